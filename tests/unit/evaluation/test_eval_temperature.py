"""The temperature of an evaluation reaches the engine: that of `eval.temperature`, and 0, which is greedy, by default."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

import vlarl.evaluation.run
import vlarl.run.local
from vlarl.api import evaluate
from vlarl.cli import main
from vlarl.config import load_config
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.loop import collect
from vlarl.loop import evaluate as evaluate_in_the_loop
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.run.open import open_run

ROLLOUT = 1.25


class NotingEngine(TorchEngine):
    """Notes the temperature of every batch."""

    temperatures: list[float] = []

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        self.temperatures.append(sampling.temperature)
        return super().generate(inputs, sampling, seeds)


@pytest.fixture
def temperatures(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The temperatures that engines are called with from now on."""
    monkeypatch.setattr(NotingEngine, "temperatures", [])
    for module in (vlarl.run.local, vlarl.evaluation.run):
        monkeypatch.setattr(module, "TorchEngine", NotingEngine)
    return NotingEngine.temperatures


@pytest.mark.parametrize(("given", "expected"), [({}, 0.0), ({"eval.temperature": 0.75}, 0.75)])
def test_in_the_loop(checkpoint, tmp_path, temperatures, given, expected):
    quick = {
        "policy.path": str(checkpoint),
        "run.root": str(tmp_path),
        "run.name": "quick",
        "run.num_threads": 1,
        "run.device": "cpu",
        "env.task_ids": [0],
        "env.num_envs": 2,
        "rollout.num_groups": 1,
        "rollout.group_size": 2,
        "rollout.temperature": ROLLOUT,
        "optim.minibatches": 1,
        "eval.states_per_task": 1,
        "eval.videos": 0,
        "logging.tensorboard": False,
    }
    parts, session = open_run(load_config(overrides=quick | given), None)
    with closing(parts), session:
        evaluate_in_the_loop(parts, session)
        assert set(temperatures) == {expected}
        temperatures.clear()
        collect(parts, session, 1, session.stopwatch())
        assert set(temperatures) == {ROLLOUT}, "a rollout's is another option"


@pytest.mark.parametrize(("flags", "expected"), [([], 0.0), (["--temperature", "0.75"], 0.75)])
def test_by_the_command(checkpoint, tmp_path, temperatures, flags, expected):
    out = str(tmp_path / "x")
    assert (
        main(["eval", str(checkpoint), "--tasks", "0", "--episodes", "1", "--device", "cpu", "--out", out, *flags]) == 0
    )
    assert set(temperatures) == {expected}


@pytest.mark.parametrize(("given", "expected"), [({}, 0.0), ({"temperature": 0.75}, 0.75)])
def test_from_python(checkpoint: Path, temperatures, given, expected):
    evaluate(checkpoint, tasks=[0], episodes=1, device="cpu", **given)
    assert set(temperatures) == {expected}
