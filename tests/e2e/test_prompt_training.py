"""`vlarl train`, `eval`, `merge` and `--resume` with language and vision-language models, as a user types them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.vlm_models import write_model
from PIL import Image

from vlarl.cli import main
from vlarl.policies.load import load_policy

SMALL = {
    "rollout.num_groups": 3,
    "rollout.group_size": 4,
    "rollout.max_tokens": 4,
    "eval.states_per_task": 2,
    "eval.interval": 2,  # so that a run which ends after two iterations has evaluated as often as a longer one
    "optim.lr": 1e-3,
    "run.device": "cpu",
    "run.num_threads": 1,
    "logging.tensorboard": "false",
    "logging.report": "false",
    "reward.source": "first_byte_reward:first_bytes",
}
TIMES = ("time", "perf/", "rollout/collection_time", "rollout/env_steps_per_s")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lambda kind: root / kind if (root / kind).is_dir() else write_model(kind, root / kind)


@pytest.fixture
def data(tmp_path) -> Path:
    """Ten rows, half of them with an image; one has too many words."""
    rng = np.random.default_rng(0)
    rows = []
    for n in range(10):
        rows.append({"prompt": [{"role": "user", "content": f"say {n}"}], "solution": str(n)})
        if n % 2:
            Image.fromarray(rng.integers(0, 256, (40, 40 + n, 3), dtype=np.uint8)).save(tmp_path / f"{n}.png")
            rows[-1]["image"] = f"{n}.png"
    rows.append({"prompt": "word " * 80, "solution": "x"})
    (tmp_path / "held_out.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:3]))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path / "rows.jsonl"


def command(folder: Path, data: Path, root: Path, name: str, iterations: int) -> list[str]:
    options = SMALL | {"policy.path": folder, "run.root": root, "run.name": name, "run.iterations": iterations}
    options["env.suite"] = "prompts_arithmetic"
    if (folder / "preprocessor_config.json").is_file():
        options |= {"env.suite": "prompts", "prompts.path": data, "prompts.max_tokens": 150}
        options["prompts.eval_path"] = data.with_name("held_out.jsonl")
    return ["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


@pytest.fixture
def reward(tmp_path, monkeypatch):
    """Random texts differ in their first byte, so groups have a learning signal."""
    (tmp_path / "first_byte_reward.py").write_text(
        "def first_bytes(completions, **kwargs):\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    return [ord(text[0]) % 7 / 7 if text else 0.0 for text in texts]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("first_byte_reward", None)  # the next test has its own file


def rows_of(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in lines]


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl"])
def test_a_run_resumes_to_the_bit_where_it_was_stopped(folder_of, data, reward, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    assert main([*command(folder_of(kind), data, root, "whole", 4), "--checkpoint.interval", "2"]) == 0
    assert main([*command(folder_of(kind), data, root, "parts", 2), "--checkpoint.interval", "2"]) == 0
    assert main(["train", "--resume", str(root / "parts"), "--run.iterations", "4"]) == 0
    whole, parts = rows_of(root / "whole"), rows_of(root / "parts")
    assert len(whole) == 5
    assert parts == whole and whole[-1]["rollout/consumed_samples"] == 12
    assert whole[-1].get("rollout/dropped_prompts") == (1.0 if kind == "qwen2_5_vl" else 0.0)
    ours, theirs = (load_policy(root / name / "checkpoints" / "final") for name in ("whole", "parts"))
    weights = dict(theirs.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in ours.named_parameters())
    assert not torch.equal(ours.probe_logits(), load_policy(folder_of(kind)).probe_logits()), "it was trained"


def test_adapters_are_trained_evaluated_merged_and_carded(folder_of, data, reward, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root, folder = tmp_path / "runs", folder_of("qwen2_5_vl")
    given = ["--use-lora", "--lora.rank=4", "--rollout.top_p=0.95", "--rollout.top_k=50", "--rollout.stop", "</a>"]
    assert main([*command(folder, data, root, "lora", 2), *given]) == 0
    assert main(["eval", str(root / "lora"), "--out", str(tmp_path / "evaluated")]) == 0
    results = json.loads((tmp_path / "evaluated" / "results.json").read_text())
    assert results["rollout"] == {"max_tokens": 4, "min_tokens": 0, "stop": ["</a>"], "stop_token_ids": []}
    assert main(["merge", str(root / "lora"), str(tmp_path / "merged")]) == 0
    adapted, merged = (load_policy(path) for path in (root / "lora" / "checkpoints" / "final", tmp_path / "merged"))
    assert (adapted.probe_logits() - merged.probe_logits()).abs().max() < 1e-4
    assert main(["eval", str(tmp_path / "merged"), "--suite", "prompts_shapes", "--episodes", "1"]) == 0
    capsys.readouterr()
    assert main(["push", str(root / "lora"), "me/mine", "--dry-run"]) == 0
    card = capsys.readouterr().out
    assert "pipeline_tag: image-text-to-text" in card and "predict_action" not in card
    assert (
        "--env.suite prompts --prompts.path DATA.jsonl" in card and str(data.parent) not in card.partition("path:")[2]
    )
