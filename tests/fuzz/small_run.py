"""A training run that is small and real: the tabletop, a tiny policy, some iterations, a checkpoint after each."""

import json
from pathlib import Path
from typing import Any

from fuzz.answers import DONE, ask
from fuzz.harness import Defect
from safetensors.torch import load_file

ITERATIONS = 4
TIMED = ("time", "perf/", "rollout/collection_time", "rollout/env_steps_per_s")


def make_checkpoint(shared: Path) -> Path:
    """The policy that the runs begin with."""
    from vlarl.policies.tiny import init_tiny

    folder = shared / "policy"
    init_tiny("parallel", seed=3, chunk_length=8).save(folder)
    return folder


def flags(policy: Path, root: Path, *extra: str) -> list[str]:
    """The command line of the run."""
    return [
        "train",
        *("--policy.path", str(policy)),
        *("--run.root", str(root)),
        *("--run.name", "run"),
        *("--run.iterations", str(ITERATIONS)),
        *("--run.num_threads", "1"),
        *("--run.device", "cpu"),
        *("--env.task_ids", "0", "3"),
        *("--env.num_envs", "4"),
        *("--env.max_steps", "16"),
        *("--rollout.num_groups", "2"),
        *("--rollout.group_size", "2"),
        *("--reward.source", "dense"),
        *("--optim.lr", "1e-3"),
        *("--optim.warmup_iterations", "0"),
        *("--optim.minibatches", "2"),
        *("--algorithm.epochs", "1"),
        *("--ema.beta", "0.9"),
        *("--eval.states_per_task", "1"),
        *("--eval.interval", "2"),
        *("--eval.videos", "0"),
        *("--checkpoint.interval", "1"),
        "--no-logging.tensorboard",
        "--no-logging.report",
        *extra,
    ]


def undisturbed(shared: Path) -> Path:
    """The run that nothing disturbs, made in this process."""
    policy = make_checkpoint(shared)
    answer = ask(flags(policy, shared / "whole"), shared)
    if answer.code != DONE:
        raise RuntimeError(f"the undisturbed run fails:\n{answer.raised or answer.text}")
    return shared / "whole" / "run"


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of a run, without what the clock says."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def differences(run: Path, whole: Path, with_rows: bool = True) -> list[Defect]:
    """In what a run differs from the undisturbed one: its rows, its weights, its counters."""
    different = []
    for name in ("metrics.jsonl", "episodes.jsonl") if with_rows else ():
        if rows(run / name) != rows(whole / name):
            different.append(name)
    ours, theirs = run / "checkpoints", whole / "checkpoints"
    for path in sorted(theirs.glob("*/*.safetensors")):
        if path.parent.name in ("final", "ema") and not _same_tensors(ours / path.relative_to(theirs), path):
            different.append(f"checkpoints/{path.relative_to(theirs)}")
    counters = [json.loads((folder / "final" / "trainer.json").read_text()) for folder in (ours, theirs)]
    if counters[0] != counters[1]:
        different.append("checkpoints/final/trainer.json")
    if partial := [path.name for path in ours.iterdir() if path.name.startswith(".")]:
        different.append(f"partial checkpoints that are left: {', '.join(partial)}")
    if not different:
        return []
    return [Defect("wrong", f"the resumed run is another one than the undisturbed: {', '.join(different)}")]


def _same_tensors(one: Path, two: Path) -> bool:
    if not one.is_file():
        return False
    if one.read_bytes() == two.read_bytes():
        return True
    ours, theirs = load_file(one), load_file(two)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
