"""What a person sees of a run on prompts: samples, metrics, lines and tables of the real commands."""

import json
import shutil
from pathlib import Path

import pytest
from fakes.vlm_models import write_model
from PIL import Image

from vlarl.cli import main
from vlarl.observability.samples import read_samples

FLAGS = [
    "--env.suite",
    "prompts_shapes",
    "--rollout.num_groups",
    "2",
    "--rollout.group_size",
    "3",
    "--rollout.max_tokens",
    "3",
    "--eval.interval",
    "2",
    "--eval.states_per_task",
    "1",
    "--checkpoint.interval",
    "1",
    "--optim.schedule",
    "constant",
    "--optim.minibatches",
    "1",
    "--logging.samples",
    "2",
    "--no-logging.tensorboard",
    "--run.num_threads",
    "1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model("qwen2_5_vl", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(model: Path, name: str, *flags: str) -> Path:
    assert main(["train", "--policy.path", str(model), *FLAGS, "--run.name", name, *flags]) == 0
    return Path("runs") / name


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_keeps_samples_and_a_resumed_run_the_same_ones(model, work, capsys):
    whole = train(model, "whole", "--run.iterations", "3")
    said = capsys.readouterr().out
    found = list(read_samples(whole / "samples.jsonl"))
    assert [(s.iteration, s.phase) for s in found] == [
        *[(0, "eval")] * 5, *[(1, "rollout")] * 2, *[(2, "rollout")] * 2, *[(2, "eval")] * 5, *[(3, "rollout")] * 2,
        *[(3, "eval")] * 5,
    ]  # fmt: skip
    episodes = {
        (e["iteration"], e["phase"], e["episode_id"], e["group"], e["member"]): e
        for e in rows(whole / "episodes.jsonl")
    }
    by_id = {key[:3]: episode for key, episode in episodes.items()}
    for sample in found:
        episode = by_id[sample.iteration, sample.phase, sample.episode_id]
        assert sample.prompt == episode["instruction"] and sample.reward == episode["return"]
        assert (sample.length, sample.truncated) == (episode["response_length"], episode["truncated"])
        assert [Image.open(whole / name).size for name in sample.images] == [(56, 56)]
        assert sample.solution and sample.length <= 3
    train_rows = [row for row in rows(whole / "metrics.jsonl") if row["iteration"]]
    lengths = [e["response_length"] for key, e in episodes.items() if key[:2] == (3, "rollout")]
    assert train_rows[-1]["rollout/response_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert train_rows[-1]["rollout/total_env_steps"] == 18.0 and "val/response_length" in train_rows[-1]
    assert "accuracy" in said and "responses/s" in said and "  prompt    [1 image] " in said
    assert "videos" not in said and f"samples:    {whole}/samples.jsonl" in said
    assert "Which" in (whole / "report.html").read_text()

    part = train(model, "part", "--run.iterations", "2")
    (part / "samples.jsonl").open("a").write((whole / "samples.jsonl").read_text().splitlines()[-1] + "\n")
    shutil.rmtree(part / "checkpoints" / "final")  # as if it had been killed after its first iteration
    shutil.rmtree(part / "checkpoints" / "step_000002", ignore_errors=True)
    assert main(["train", "--resume", "part", "--run.iterations", "3"]) == 0
    assert rows(part / "samples.jsonl") == rows(whole / "samples.jsonl")


def test_status_and_eval_speak_of_prompts(model, work, capsys):
    run = train(model, "first", "--run.iterations", "1", "--optim.warmup_iterations", "0", "--logging.samples", "0")
    assert not (run / "samples.jsonl").exists() and not (run / "samples").exists()
    capsys.readouterr()
    assert main(["status", "first"]) == 0
    said = capsys.readouterr().out
    assert "\naccuracy   " in said and "\nreward     " in said and "\nlength     " in said and "\nsuccess" not in said
    assert main(["eval", "first", "--tasks", "0", "--episodes", "2", "--out", "results"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == [
        "task",
        "correct",
        "accuracy",
        "95%",
        "interval",
        "tokens",
        "a",
        "prompt",
        "of",
        "the",
        "task",
    ]
    assert "prompts: indices 4000 to 4001 of task 0" in said and "initial state" not in said
    samples = list(read_samples(Path("results/samples.jsonl")))
    assert len(samples) == 2 and (Path("results") / samples[0].images[0]).is_file()
    total = json.loads(Path("results/results.json").read_text())["total"]
    assert total["response_length"] == sum(sample.length for sample in samples) / 2
    assert main(["eval", "first", "--episode", samples[0].episode_id, "--out", "again"]) == 0
    said = capsys.readouterr().out
    assert f"{samples[0].episode_id}: {'correct' if samples[0].success else 'wrong'}\n" in said
    assert f"prompt:   {samples[0].prompt}\n" in said and "step" not in said
