"""What belongs to each rank in a checkpoint: its random states, its parts of the average, and weights that are finite."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Case, Outcome, build, experience, in_ranks, small_policy, update

from vlarl.errors import VlarlError
from vlarl.training.checkpoint import CheckpointStore, restore
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import Alone, Ranks
from vlarl.training.state import TrainerState

SECTIONS: dict[str, dict[str, Any]] = {"algorithm": {"epochs": 1}, "ema": {"beta": 0.9}, "run": {"seed": 11}}
CASES = {"full": Case("parallel", SECTIONS, Sharding("full")), "none": Case("parallel", SECTIONS, Sharding("none"))}


def draw() -> list[float]:
    return torch.rand(4).tolist()


def save(case: Case, bases: Path, ranks: Ranks, folder: Path) -> list[float]:
    """A checkpoint after one update, and what this rank draws next."""
    learner, _ = build(case, bases, ranks)
    update(learner, experience(bases, case.decoder), 1, case, Outcome())
    torch.manual_seed(100 + ranks.rank)
    torch.rand(ranks.rank)
    CheckpointStore(folder, 2, ranks).save("step_000001", learner, TrainerState(iteration=1, optimizer_steps=1))
    return draw()


def resumed(case: Case, bases: Path, ranks: Ranks, folder: Path) -> tuple[list[float], int]:
    """What this rank draws after it was restored, and how many updates its average has seen."""
    learner, _ = build(case, bases, ranks, folder)
    torch.manual_seed(0)
    restore(learner, folder)
    assert learner.average is not None
    return draw(), learner.average.num_updates


def refusal(case: Case, bases: Path, ranks: Ranks, folder: Path) -> str:
    """What a save says when a weight of rank 1 alone is not finite."""
    learner, _ = build(case, bases, ranks)
    if ranks.rank == 1:
        parts = [getattr(parameter, "_local_tensor", parameter) for parameter in learner.policy.parameters()]
        with torch.no_grad():
            max(parts, key=torch.numel).fill_(float("inf"))  # of some, the other rank has all
    try:
        CheckpointStore(folder, 2, ranks).save("step_000009", learner, TrainerState(iteration=9))
    except VlarlError as error:
        return str(error)
    return "saved"


def work_of_two(ranks: Ranks, folder: Path, bases: Path, alone: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[f"{name}, next"] = save(case, bases, ranks, folder / name)
        results[f"{name}, resumed"] = resumed(case, bases, ranks, folder / name / "step_000001")
        results[f"{name}, of one process"] = resumed(case, bases, ranks, alone / "step_000001")
        results[f"{name}, refused"] = refusal(case, bases, ranks, folder / name)
    return results


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    small_policy("parallel").save(folder / "parallel")
    return folder


@pytest.fixture(scope="module")
def alone(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    folder = tmp_path_factory.mktemp("alone")
    return save(CASES["none"], bases, Alone(), folder), folder


@pytest.fixture(scope="module")
def two(bases: Path, alone: tuple[list[float], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("two")
    return in_ranks(2, partial(work_of_two, bases=bases, alone=alone[1]), folder), folder


@pytest.mark.parametrize("name", CASES)
def test_each_rank_gets_its_own_random_state_back(two, name):
    first, second = two[0]
    for results in (first, second):
        drawn, num_updates = results[f"{name}, resumed"]
        assert drawn == results[f"{name}, next"]
        assert num_updates == 1
    assert first[f"{name}, next"] != second[f"{name}, next"]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_the_checkpoint_does_not_know_has_a_seed_of_its_own(two, alone, name):
    first, second = (results[f"{name}, of one process"][0] for results in two[0])
    assert first == alone[0], "the first continues where the one process was"
    assert second not in (first, alone[0])
    assert second == two[0][1]["none, of one process"][0], "and the same each time"


@pytest.mark.parametrize("name", CASES)
def test_one_process_continues_from_the_first_of_two_ranks(bases, two, name):
    drawn, num_updates = resumed(CASES["none"], bases, Alone(), two[1] / name / "step_000001")
    assert (drawn, num_updates) == (two[0][0][f"{name}, next"], 1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_on_one_rank_is_saved_by_none(two, name):
    assert all("not finite" in results[f"{name}, refused"] for results in two[0])
    assert [path.name for path in (two[1] / name).glob("*step*")] == ["step_000001"]
