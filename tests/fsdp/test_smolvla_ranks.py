"""Two ranks with sharded weights train SmolVLA to what one process trains it to."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.decisions import rows_of
from fakes.groups import flat
from fakes.smolvla import FOLDER, seen, smolvla
from rank_cases import LEARNING, Case, Drift, Outcome, drift, in_ranks, otherwise_rounded, run

from vlarl.decisions import Sampling
from vlarl.policies.load import load_policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import Ranks, SingleRank
from vlarl.types import Task, Trajectory, Transition

CPU = torch.device("cpu")
FULL = Sharding("full")
STEPS = {"chunk_length": 3}
FACTOR = 4.0
CASES = {
    "expert": Case("smolvla", {"optim": LEARNING, "policy": STEPS, "kl": {"coef": 0.1}}, FULL),
    "backbone and critic": Case(
        "smolvla",
        {
            "optim": LEARNING,
            "policy": {**STEPS, "train_backbone": True, "flow_critic": "expert"},
            "algorithm": {"name": "ppo", "critic_hidden": (8,), "epochs": 1},
        },
        FULL,
    ),
}


def experience(bases: Path) -> list[Trajectory]:
    """Two groups of four decisions, of which two succeed."""
    policy = smolvla(bases / "smolvla")
    observed = [seen(n) for n in range(8)]
    inputs = policy.process(observed)
    decisions = TorchEngine(policy, CPU).generate(inputs, Sampling(1.0), range(8))
    episodes = []
    for n, (read, decided) in enumerate(zip(rows_of(inputs), rows_of(decisions), strict=True)):
        rewards = np.array([0, 0, n % 2], np.float32)
        transition = Transition(observed[n], read, decided, rewards, policy.num_steps)
        task = Task("tabletop_spatial", 0, n, n, n // 4)
        episodes.append(Trajectory(task, (transition,), observed[n], True, False, bool(n % 2), 0))
    return flat(episodes[:4], episodes[4:])


def run_case(case: Case, bases: Path, ranks: Ranks, save_to: Path | None = None) -> Outcome:
    return run(case, bases, ranks, save_to=save_to, groups=experience(bases))


def work(ranks: Ranks, folder: Path, bases: Path) -> dict[str, Outcome]:
    return {name: run_case(case, bases, ranks, folder / name) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    shutil.copytree(FOLDER, folder / "smolvla", ignore=shutil.ignore_patterns("*.npz"))
    return folder


@pytest.fixture(scope="module")
def two(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Outcome]], Path]:
    folder = tmp_path_factory.mktemp("two")
    return in_ranks(2, partial(work, bases=bases), folder), folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_process_learns(bases, two, name):
    torch.set_num_threads(1)
    case, (first, second) = CASES[name], [results[name] for results in two[0]]
    expected = run_case(case, bases, SingleRank())
    own = drift(run_case(otherwise_rounded(case), bases, SingleRank()), expected)
    assert own.metrics < 1e-4 and own.weight < 1e-4, "this is not rounding"
    least = Drift(1e-6, 1e-6, 1e-6)
    allowed = Drift(*(FACTOR * (getattr(own, n) + getattr(least, n)) for n in ("metrics", "weight", "norm")))
    assert drift(first, expected).within(allowed), (drift(first, expected), allowed)
    assert repr(first.metrics) == repr(second.metrics) and first.steps == second.steps == expected.steps


def test_weights_are_sharded_and_the_last_checkpoint_is_whole(bases, two):
    total = sum(weight.numel() for weight in load_policy(bases / "smolvla").parameters())
    parts = [results["expert"].num_local for results in two[0]]
    assert sum(parts) == total and max(parts) < 0.6 * total
    saved = dict(load_policy(two[1] / "expert" / "final").named_parameters())
    expected = two[0][0]["expert"].weights
    assert list(saved) == list(expected) and all(torch.equal(saved[n], weight) for n, weight in expected.items())
