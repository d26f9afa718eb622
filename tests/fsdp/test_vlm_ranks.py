"""Two ranks train language and vision-language models to what one process trains them to.

Of the prompts some have images and others none, so that in some passes one rank has images and the other has not: a
rank that ran no vision tower would leave the other one waiting.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.decisions import rows_of
from fakes.groups import flat
from fakes.vlm_models import observation, write_model
from rank_cases import LEARNING, Case, Drift, Outcome, drift, in_ranks, otherwise_rounded, run

from vlarl.decisions import Sampling
from vlarl.policies.load import load_policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import Ranks, SingleRank
from vlarl.types import Task, Trajectory, Transition

CPU = torch.device("cpu")
IMAGES = {"qwen2_5_vl": (2, 0, 0, 0, 1, 0, 0, 0), "qwen2": (0,) * 8}  # of each of eight prompts
LORA = {"enabled": True, "rank": 4}
ONE_BY_ONE = {**LEARNING, "microbatch_size": 1, "minibatches": 2}  # one of the ranks has images, the other none
PACKED = {**LEARNING, "packing": True, "microbatch_tokens": 80, "minibatches": 2}
FULL, NONE = Sharding("full"), Sharding("none")
FACTOR = 4.0

CASES = {
    "text": Case("qwen2", {"kl": {"coef": 0.1}}, FULL),
    "images": Case("qwen2_5_vl", {"optim": ONE_BY_ONE, "kl": {"coef": 0.1}}, FULL),
    "images, packed": Case("qwen2_5_vl", {"optim": PACKED, "policy": {"gradient_checkpointing": True}}, FULL),
    "images, none": Case("qwen2_5_vl", {"optim": ONE_BY_ONE}, NONE),
    "images, adapters": Case(
        "qwen2_5_vl", {"optim": ONE_BY_ONE, "lora": LORA, "policy": {"gradient_checkpointing": True}}, FULL
    ),
    "images, critic": Case(
        "qwen2_5_vl", {"optim": ONE_BY_ONE, "algorithm": {"name": "ppo", "critic_hidden": (8,), "epochs": 1}}, FULL
    ),
}


def experience(bases: Path, kind: str) -> list[Trajectory]:
    """Two groups of four texts for prompts of different lengths, of which two succeed."""
    policy = load_policy(bases / kind)
    seen = [observation("count " * (1 + n % 3), count, seed=n) for n, count in enumerate(IMAGES[kind])]
    inputs = policy.process(seen)
    decisions = TorchEngine(policy, CPU).generate(inputs, Sampling(1.0, max_tokens=5), range(len(seen)))
    episodes = []
    for n, (read, decided) in enumerate(zip(rows_of(inputs), rows_of(decisions), strict=True)):
        transition = Transition(seen[n], read, decided, np.array([n % 2], np.float32), 1)
        task = Task("prompts", 0, n, n, n // 4)
        episodes.append(Trajectory(task, (transition,), seen[n], True, False, bool(n % 2), 0))
    return flat(episodes[:4], episodes[4:])


def run_case(case: Case, bases: Path, ranks: Ranks, save_to: Path | None = None) -> Outcome:
    return run(case, bases, ranks, save_to=save_to, groups=experience(bases, case.decoder))


def work(ranks: Ranks, folder: Path, bases: Path) -> dict[str, Outcome]:
    return {name: run_case(case, bases, ranks, folder / name) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for kind in IMAGES:
        write_model(kind, folder / kind)
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
    # Of so few weights the luckiest are off by nothing at all: float32's own step is added.
    least = Drift(1e-6, 1e-6, 1e-6)
    allowed = Drift(*(FACTOR * (getattr(own, n) + getattr(least, n)) for n in ("metrics", "weight", "norm")))
    assert drift(first, expected).within(allowed), (drift(first, expected), allowed)
    padding = [[row["packing_efficiency"] for row in outcome.metrics] for outcome in (first, expected)]
    assert padding[0] == padding[1], "ranks take the same passes"
    assert repr(first.metrics) == repr(second.metrics) and first.steps == second.steps == expected.steps


def test_weights_are_sharded_and_the_last_checkpoint_is_whole(bases, two):
    for name in ("text", "images"):
        whole = load_policy(bases / CASES[name].decoder)
        total = sum(weight.numel() for weight in whole.parameters())
        parts = [results[name].num_local for results in two[0]]
        assert sum(parts) == total and max(parts) < 0.6 * total
        saved = dict(load_policy(two[1] / name / "final").named_parameters())
        expected = two[0][0][name].weights
        assert list(saved) == list(expected) and all(torch.equal(saved[n], weight) for n, weight in expected.items())
