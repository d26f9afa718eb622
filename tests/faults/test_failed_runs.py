"""Whole runs that fail on the way: what was learnt is saved, and the resumed run equals one that never failed."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import vlarl.loop
from vlarl.cli import main
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.training.learner import Learner
from vlarl.types import Trajectory

ITERATIONS, EPISODES = 4, 8
EVALUATED = 2  # episodes of an evaluation: before iteration 1, and after every second one
TESTS = Path(__file__).parents[1]


def calls_until(iterations: int) -> int:
    """How often the reward is called until so many iterations are whole, the evaluations among them included."""
    return iterations * EPISODES + EVALUATED * (1 + iterations // 2)


class Service:
    """Something that rewards depend on. It is up for so many calls, then down."""

    def __init__(self) -> None:
        self.left = calls_until(ITERATIONS)

    def score(self, trajectory: Trajectory) -> float:
        if self.left <= 0:
            raise ConnectionError("the service is down")
        self.left -= 1
        return zlib.crc32(trajectory.final_observation.proprio.tobytes()) / 2**32


SERVICE = Service()


def judged(trajectory: Trajectory) -> float:
    """What `--reward.source` names."""
    return SERVICE.score(trajectory)


@pytest.fixture(autouse=True)
def service() -> Iterator[Service]:
    SERVICE.left = calls_until(ITERATIONS)
    yield SERVICE


def flags(checkpoint: Path, root: Path, *extra: str) -> list[str]:
    return [
        "train",
        *("--policy.path", str(checkpoint)),
        *("--run.root", str(root)),
        *("--run.name", "run"),
        *("--run.iterations", str(ITERATIONS)),
        *("--run.num_threads", "1"),
        *("--run.device", "cpu"),
        *("--env.task_ids", "0", "3"),
        *("--env.num_envs", "8"),
        *("--rollout.num_groups", "2"),
        *("--rollout.group_size", "4"),
        *("--reward.source", f"{__name__}:judged"),
        *("--reward.retries", "0"),
        *("--optim.lr", "1e-3"),
        *("--optim.warmup_iterations", "0"),
        *("--optim.minibatches", "2"),
        *("--algorithm.epochs", "1"),
        *("--ema.beta", "0.9"),
        *("--eval.states_per_task", "1"),
        *("--eval.interval", "2"),
        *("--eval.videos", "0"),
        *("--checkpoint.interval", "2"),
        "--no-logging.tensorboard",
        "--no-logging.report",
        *extra,
    ]


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Everything but times and speeds, which are never equal."""
    lines = [json.loads(line) for line in (run / file).read_text().splitlines()]
    timed = ("time", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith(("time/", "perf/"))} for row in lines]


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs."""
    SERVICE.left = calls_until(ITERATIONS)
    root = tmp_path_factory.mktemp("whole")
    assert main(flags(checkpoint, root)) == 0
    return root / "run"


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def assert_resumes(message: str, iteration: int, run: Path, whole: Path) -> None:
    """The command that the message names resumes from the iteration that it names, and ends as the whole run did."""
    command = re.search(
        r"newest checkpoint is of iteration (\d+), .*resume from it with `vlarl (train --resume .*)`", message
    )
    assert command is not None and int(command[1]) == iteration, message
    counters = json.loads((run / "checkpoints" / f"step_{iteration:06d}" / "trainer.json").read_text())
    assert (counters["iteration"], counters["version"], counters["optimizer_steps"]) == (
        iteration,
        iteration,
        2 * iteration,
    )
    SERVICE.left = calls_until(ITERATIONS)
    assert main(shlex.split(command[2])) == 0
    assert rows(run) == rows(whole)
    assert rows(run, "episodes.jsonl") == rows(whole, "episodes.jsonl")
    for folder in ("final", "ema"):
        for theirs in sorted((whole / "checkpoints" / folder).rglob("*.safetensors")):
            ours = load_file(run / theirs.relative_to(whole))
            expected = load_file(theirs)
            assert ours.keys() == expected.keys() and all(ours[name].equal(expected[name]) for name in ours), theirs
    ours, theirs = (json.loads((r / "checkpoints" / "final" / "trainer.json").read_text()) for r in (run, whole))
    assert ours == theirs


def test_a_reward_that_goes_down_costs_the_iteration_that_it_failed_in(capsys, tmp_path, checkpoint, whole, service):
    """Without periodic checkpoints; iteration 2 is whole, and the reward fails in iteration 3."""
    service.left = calls_until(2)
    assert main(flags(checkpoint, tmp_path, "--checkpoint.interval", "0")) == 1
    message = capsys.readouterr().err
    assert "iteration 3: the reward failed" in message and "Traceback" not in message
    run = tmp_path / "run"
    assert steps(run) == ["step_000002"]
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "newest checkpoint is of iteration 2" in status["message"]
    assert_resumes(message, 2, run, whole)


def test_a_failure_in_an_evaluation_keeps_the_update_before_it(tmp_path, checkpoint, whole, monkeypatch):
    """The evaluation after iteration 2 is made by the resumed run, and its row is complete."""
    evaluate_policy, calls = vlarl.loop.evaluate_policy, []

    def fails_once(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the simulator went away")
        return evaluate_policy(*arguments, **named)

    monkeypatch.setattr(vlarl.loop, "evaluate_policy", fails_once)
    with pytest.raises(RuntimeError, match="the simulator went away") as caught:
        main(flags(checkpoint, tmp_path, "--checkpoint.interval", "0", "--eval.use_ema"))
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [0, 1], "the row waits for its evaluation"
    (note,) = caught.value.__notes__
    command = re.search(r"iteration 2, .*`vlarl (train --resume .*)`", note)
    assert command is not None
    SERVICE.left = calls_until(ITERATIONS)
    assert main(shlex.split(command[1])) == 0
    ours, theirs = rows(tmp_path / "run"), rows(whole)
    assert "val/success_rate" in ours[2]

    def of_training(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The average is evaluated here, the newest weights there."""
        return [{name: value for name, value in row.items() if not name.startswith("val/")} for row in found]

    assert of_training(ours) == of_training(theirs)
    assert [(e["iteration"], e["phase"]) for e in rows(tmp_path / "run", "episodes.jsonl")] == [
        (e["iteration"], e["phase"]) for e in rows(whole, "episodes.jsonl")
    ]


def test_a_failure_in_the_last_evaluation_is_made_up_for(tmp_path, checkpoint, whole, monkeypatch):
    evaluate_policy, calls = vlarl.loop.evaluate_policy, []

    def fails_once(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the simulator went away")
        return evaluate_policy(*arguments, **named)

    monkeypatch.setattr(vlarl.loop, "evaluate_policy", fails_once)
    with pytest.raises(RuntimeError, match="the simulator went away") as caught:
        main(flags(checkpoint, tmp_path))
    assert_resumes(caught.value.__notes__[0], ITERATIONS, tmp_path / "run", whole)


def test_a_failure_in_the_middle_of_an_update_leaves_the_last_checkpoint(tmp_path, checkpoint, whole, monkeypatch):
    """One of two steps of iteration 4 is taken: these weights are those of no iteration, and are not saved."""
    step, taken = Learner._step, []

    def fails(self: Learner, *arguments: Any) -> bool:
        if len(taken) == 2 * 3 + 1:
            raise RuntimeError("out of memory")
        taken.append(1)
        return step(self, *arguments)

    monkeypatch.setattr(Learner, "_step", fails)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        main(flags(checkpoint, tmp_path))
    monkeypatch.setattr(Learner, "_step", step)
    (note,) = caught.value.__notes__
    assert "in the middle of an update" in note and steps(tmp_path / "run") == ["step_000002"]
    assert_resumes(note, 2, tmp_path / "run", whole)


def test_a_save_that_fails_leaves_the_last_checkpoint(capsys, tmp_path, checkpoint, whole, service, monkeypatch):
    save = OpenVLAPolicy.save

    def fails(self: OpenVLAPolicy, folder: Path, *arguments: Any) -> None:
        save(self, folder, *arguments)
        if "step_000003" in folder.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(OpenVLAPolicy, "save", fails)
    service.left = calls_until(3)
    assert main(flags(checkpoint, tmp_path)) == 1
    monkeypatch.setattr(OpenVLAPolicy, "save", save)
    message = capsys.readouterr().err
    assert "iteration 4: the reward failed" in message and "3, could not be saved (cannot write" in message
    assert steps(tmp_path / "run") == ["step_000002"]
    assert_resumes(message, 2, tmp_path / "run", whole)


KILLED = """
import os, sys
from pathlib import Path
import faults_run

save = faults_run.OpenVLAPolicy.save

def killed(self, folder, *arguments):
    save(self, folder, *arguments)
    if "step_000003" in folder.name:
        os._exit(9)

faults_run.OpenVLAPolicy.save = killed
faults_run.SERVICE.left = faults_run.calls_until(3)
sys.exit(faults_run.main(sys.argv[1:]))
"""


def test_a_process_killed_in_that_save_leaves_the_last_checkpoint(tmp_path, checkpoint, whole):
    """The reward is down, and the machine is switched off before the save is done."""
    (tmp_path / "faults_run.py").write_text(Path(__file__).read_text())
    arguments = flags(checkpoint, tmp_path, "--reward.source", "faults_run:judged")
    path = os.pathsep.join([str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 9, process.stderr
    run = tmp_path / "run"
    assert (run / "checkpoints" / ".new-step_000003").is_dir() and steps(run) == ["step_000002"]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    message = f"newest checkpoint is of iteration 2, resume from it with `vlarl train --resume {run} "
    assert_resumes(f"{message}--reward.source {__name__}:judged`", 2, run, whole)
