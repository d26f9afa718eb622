"""Data and reward functions of TRL's and verl's users train a model as they are: only the command is vlarl's."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes.vlm_models import write_model
from PIL import Image

from vlarl.cli import main
from vlarl.envs.prompts.shapes import ShapePrompts

TRL_REWARDS = '''
"""Two reward functions in the style of TRL's documentation."""

import json
import re


def format_reward(completions, **kwargs):
    pattern = r"^<think>.*?</think>\\s*<answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content, re.DOTALL) else -0.01 * len(content) for content in contents]


def accuracy_reward(prompts, completions, completion_ids, solution, image, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    with open("calls.jsonl", "a") as file:
        for prompt, ids, right, each in zip(prompts, completion_ids, solution, image):
            row = {"role": prompt[-1]["role"], "ids": ids, "solution": right, "pixels": list(each.get_flattened_data())[::50]}
            file.write(json.dumps(row | {"columns": sorted(kwargs)}) + "\\n")
    return [float(content.strip() == right) + 0.1 * len(set(content)) for content, right in zip(contents, solution)]
'''

VERL_SCORE = '''
"""A score in the style of verl's reward_score functions."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "shapes/geo3k" and extra_info["split"] == "train" or extra_info["split"] == "test"
    if extra_info["index"] % 7 == 3:
        return {"score": 0.0, "acc": False}
    return 1.0 if solution_str.strip() == ground_truth else 0.01 * len(set(solution_str))
'''


def png(image) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()


def trl_rows(count: int) -> list[dict]:
    rows = []
    for state in range(count):
        prompt = ShapePrompts().prompt(state % 5, state)
        text = {"type": "text", "text": prompt.text}
        rows.append(
            {
                "prompt": [{"role": "user", "content": [{"type": "image", "text": None}, text]}],
                "image": {"bytes": png(prompt.images[0]), "path": None},
                "solution": prompt.columns["solution"],
                "difficulty": state % 3,
            }
        )
    return rows


def pixels_of(row: dict) -> list[tuple[int, ...]]:
    return list(Image.open(io.BytesIO(row["image"]["bytes"])).get_flattened_data())[::50]


def verl_rows(count: int, split: str) -> list[dict]:
    rows = []
    for state in range(count):
        prompt = ShapePrompts().prompt(state % 5, state)
        rows.append(
            {
                "data_source": "shapes/geo3k",
                "prompt": [{"role": "user", "content": f"<image>{prompt.text} Put the answer into \\boxed{{}}."}],
                "images": [{"bytes": png(prompt.images[0])}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": prompt.columns["solution"]},
                "extra_info": {"split": split, "index": state, "question": prompt.text},
            }
        )
    return rows


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder of a user with a model in it."""
    monkeypatch.chdir(tmp_path)
    write_model("qwen2_5_vl", tmp_path / "model")
    return tmp_path


SMALL = [
    *("--policy.path", "model", "--env.suite", "prompts", "--run.name", "run", "--run.iterations", "2"),
    *(
        "--rollout.num_groups",
        "3",
        "--rollout.group_size",
        "4",
        "--rollout.max_tokens",
        "8",
        "--optim.minibatches",
        "1",
    ),
    *("--algorithm.name", "grpo", "--algorithm.epochs", "1", "--eval.states_per_task", "2", "--eval.interval", "0"),
    *("--optim.lr", "1e-3", "--run.num_threads", "1", "--run.device", "cpu"),
]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_dataset_and_two_functions_of_trl(folder):
    pq.write_table(pa.Table.from_pylist(trl_rows(20)), folder / "train.parquet")
    (folder / "grpo_rewards.py").write_text(TRL_REWARDS)
    rewards = ["--reward.sources", "grpo_rewards:accuracy_reward", "grpo_rewards:format_reward"]
    rewards += ["--reward.source", "combined", "--reward.weights", "1.0", "0.5"]
    assert main(["train", *SMALL, "--prompts.path", "train.parquet", *rewards]) == 0
    rows = metrics(folder)
    for name in ("reward/grpo_rewards_accuracy_reward/mean", "reward/grpo_rewards_format_reward/std"):
        assert all(name in row for row in rows[1:]), [name for name in rows[1] if name.startswith("reward/")]
    assert rows[2]["train/grad_norm"] > 0, "the texts differ in reward, so there is something to learn"
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert len(calls) == 2 * 12 + 2 * 2, "each text of two rollouts and two evaluations of a tenth of 20 rows, once"
    given = trl_rows(20)
    for call in calls:
        assert call["role"] == "user" and 1 <= len(call["ids"]) <= 8
        pixels = [tuple(pixel) for pixel in call["pixels"]]
        assert any(row["solution"] == call["solution"] and pixels_of(row) == pixels for row in given), "its own image"
        assert "difficulty" in call["columns"]


def test_a_parquet_file_and_a_score_of_verl(folder):
    pq.write_table(pa.Table.from_pylist(verl_rows(12, "train")), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(verl_rows(4, "test")), folder / "test.parquet")
    (folder / "geo_score.py").write_text(VERL_SCORE)
    paths = ["--prompts.path", "train.parquet", "--prompts.eval_path", "test.parquet"]
    assert main(["train", *SMALL, *paths, "--reward.source", "geo_score:compute_score"]) == 0
    rows = metrics(folder)
    assert rows[-1]["train/grad_norm"] > 0
    episodes = [json.loads(line) for line in (folder / "runs" / "run" / "episodes.jsonl").read_text().splitlines()]
    assert sum(episode["phase"] != "eval" for episode in episodes) == 24
