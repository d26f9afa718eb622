"""What belongs to each rank in a checkpoint: its random states, its parts and their checksums, weights that are finite."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Case, Outcome, build, experience, in_ranks, small_policy, update

from vlarl.errors import UsageError, VlarlError
from vlarl.policies import checksums
from vlarl.training.checkpoint import CheckpointStore, restore
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import Ranks, SingleRank, on_each
from vlarl.training.retention import size_of
from vlarl.training.state import TrainerState

SECTIONS: dict[str, dict[str, Any]] = {"algorithm": {"epochs": 1}, "ema": {"beta": 0.9}, "run": {"seed": 11}}
CASES = {"full": Case("parallel", SECTIONS, Sharding("full")), "none": Case("parallel", SECTIONS, Sharding("none"))}
PARTS = ("__0_0.distcp", "__1_0.distcp")  # of the ranks


def draw() -> list[float]:
    return torch.rand(4).tolist()


def save(case: Case, bases: Path, ranks: Ranks, folder: Path) -> list[float]:
    """A checkpoint after one update, and this rank's next random values."""
    learner, _ = build(case, bases, ranks)
    update(learner, experience(bases, case.decoder), 1, case, Outcome())
    torch.manual_seed(100 + ranks.rank)
    torch.rand(ranks.rank)
    CheckpointStore(folder, 2, ranks).save("step_000001", learner, TrainerState(iteration=1, optimizer_steps=1))
    return draw()


def resumed(case: Case, bases: Path, ranks: Ranks, folder: Path) -> tuple[list[float], int]:
    """This rank's random values after it was restored, and how many updates its average has had."""
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


def retained(bases: Path, ranks: Ranks, folder: Path) -> list[str]:
    """The checkpoints that are left of three, with space for two and a half sharded ones."""
    learner, _ = build(CASES["full"], bases, ranks)
    CheckpointStore(folder, 9, ranks).save("step_000001", learner, TrainerState(iteration=1))
    limit = 2.5 * size_of(folder) / 2**30
    for iteration in (2, 3):
        store = CheckpointStore(folder, 9, ranks, max_total_gib=limit)
        store.save(f"step_{iteration:06d}", learner, TrainerState(iteration=iteration))
    return sorted(path.name for path in folder.iterdir())


def read_for_checksums(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the work came to, and the files that this rank read for their checksums."""
    original, files = checksums._checksum, []

    def noted(path: Path) -> list[int]:
        files.append(path.name)
        return original(path)

    checksums._checksum = noted
    try:
        return work(), files
    finally:
        checksums._checksum = original


def damage(ranks: Ranks, bases: Path, folder: Path, name: str) -> str:
    """What this rank says of a checkpoint that has one wrong bit in the middle of a file."""
    copied = folder.parent / f"damaged {name}"
    if ranks.rank == 0:
        shutil.copytree(folder, copied)
        file = copied / "sharded" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    ranks.any(False)  # waits for rank 0
    learner, _ = build(CASES["full"], bases, ranks, copied)
    try:
        restore(learner, copied)
    except UsageError as error:
        return str(error)
    return "restored"


def failure(ranks: Ranks) -> str:
    """What this rank says when the work of rank 1 fails."""

    def work() -> None:
        if ranks.rank == 1:
            raise OSError("the disk is gone")

    try:
        on_each(ranks, work)
    except (OSError, VlarlError) as error:
        return str(error)
    return "worked"


def work_of_two(ranks: Ranks, folder: Path, bases: Path, alone: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"failure": failure(ranks)}
    for name, case in CASES.items():
        own = folder / name
        drawn, results[f"{name}, listed"] = read_for_checksums(partial(save, case, bases, ranks, own))
        after, results[f"{name}, checked"] = read_for_checksums(
            partial(resumed, case, bases, ranks, own / "step_000001")
        )
        results |= {f"{name}, next": drawn, f"{name}, resumed": after}
        results[f"{name}, of one process"] = resumed(case, bases, ranks, alone / "step_000001")
        results[f"{name}, refused"] = refusal(case, bases, ranks, folder / name)
    results["retained"] = retained(bases, ranks, folder / "retained")
    for part in PARTS:
        results[part] = damage(ranks, bases, folder / "full" / "step_000001", part)
    return results


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    small_policy("parallel").save(folder / "parallel")
    return folder


@pytest.fixture(scope="module")
def alone(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    folder = tmp_path_factory.mktemp("alone")
    return save(CASES["none"], bases, SingleRank(), folder), folder


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
    drawn, num_updates = resumed(CASES["none"], bases, SingleRank(), two[1] / name / "step_000001")
    assert (drawn, num_updates) == (two[0][0][f"{name}, next"], 1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_on_one_rank_is_saved_by_none(two, name):
    assert all("not finite" in results[f"{name}, refused"] for results in two[0])
    assert [path.name for path in (two[1] / name).glob("*step*")] == ["step_000001"]


def test_sharded_checkpoints_are_removed_by_their_size_and_all_their_parts(two):
    assert two[0][0]["retained"] == two[0][1]["retained"] == ["step_000002", "step_000003"]
    parts = sorted(path.name for path in (two[1] / "retained" / "step_000002" / "sharded").iterdir())
    assert parts == [".metadata", *PARTS]


def test_each_rank_reads_its_own_parts_for_their_checksums(two):
    for when in ("listed", "checked"):
        assert [results[f"full, {when}"] for results in two[0]] == [[part] for part in PARTS]
        whole = ["trainer.safetensors" in results[f"none, {when}"] for results in two[0]]
        assert whole == [True, False], "what is whole is the first rank's"
    listed = json.loads((two[1] / "full" / "step_000001" / "checksums.json").read_text())
    assert list(listed) == [f"sharded/{part}" for part in PARTS]


@pytest.mark.parametrize("part", PARTS)
def test_damage_that_one_rank_finds_is_told_by_all_alike(two, part):
    first, second = (results[part] for results in two[0])
    assert first == second
    assert f"{part} is not what was written, by its checksum in checksums.json. Copy it again" in first


@pytest.mark.parametrize("part", PARTS)
def test_one_process_checks_the_parts_of_all_ranks(bases, two, part):
    learner, _ = build(CASES["none"], bases, SingleRank())
    with pytest.raises(UsageError, match=f"{part} is not what was written, by its checksum"):
        restore(learner, two[1] / "full" / f"damaged {part}")


def test_what_fails_on_one_rank_fails_on_all(two):
    assert [results["failure"] for results in two[0]] == ["rank 1 failed: the disk is gone", "the disk is gone"]
