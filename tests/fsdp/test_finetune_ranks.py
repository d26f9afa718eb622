"""Two ranks fine-tune a policy to what one process makes of it: losses, norms, validations, weights, checkpoints."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.smolvla import FOLDER
from fakes.three_schemas import three_schemas
from finetune_cases import BATCH, PLAIN, SAVED, Case, Outcome, build, configured, gap, is_equal, run
from rank_cases import in_ranks, small_policy
from safetensors.torch import load_file

from vlarl.decisions import TensorRows
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.load import load_policy
from vlarl.policies.supervised import ImitationErrors
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import Ranks, SingleRank

LIMIT = 1e-5
FACTOR = 4.0  # times what other passes change in one process, where ranks have other passes than one process has
NONE = Sharding("none")
LORA = {"lora": {"enabled": True, "rank": 4}, "optim": {"lr": 1e-2}}
PLAYED = {"suites": ("tabletop_spatial",), "task_ids": (0,), "episodes_per_task": 4, "num_workers": 1}
CASES = {
    "tokens": Case("parallel"),
    "tokens, none": Case("parallel", {}, NONE),
    "tokens, offloaded": Case("parallel", {}, Sharding("full", cpu_offload=True)),
    "autoregressive": Case("autoregressive"),
    "autoregressive, microbatches": Case("autoregressive", {"optim": {"microbatch_size": 3}}, NONE),
    "regression head": Case("parallel", {"policy": {"actions": "l1"}}),
    "adapters": Case("parallel", LORA | {"policy": {"gradient_checkpointing": True}}),
    "adapters, none": Case("parallel", LORA | {"optim": {"microbatch_size": 3}}, NONE),
    "mixture, augmented": Case(
        "parallel",
        {"augment": {"enabled": True}, "demos": {"mixture": ("bridge_orig:0.5", "viola:0.3", "mine:0.2")}},
    ),
    "flow": Case("smolvla", {"demos": PLAYED | {"image_size": 32}}),
}
DROPOUT = Case("parallel", {"lora": {"enabled": True, "rank": 4, "dropout": 0.2}, "optim": {"lr": 1e-2}})
ROUNDED = Case("parallel", {}, Sharding("full", compute_dtype=torch.bfloat16))  # near to one process, not equal
RESUMED = {"tokens": CASES["tokens"], "tokens, none": CASES["tokens, none"], "dropout": DROPOUT}


def in_folder(case: Case, root: Path) -> Case:
    """A mixture is found below the folder of all datasets."""
    if "mixture" not in case.sections.get("demos", {}):
        return case
    demos = case.sections["demos"] | {"path": str(root / "data")}
    return replace(case, sections=case.sections | {"demos": demos})


def run_here(name: str, case: Case, root: Path, folder: Path, ranks: Ranks, **options: Any) -> Outcome:
    """A run of the case whose passes have the size of half a batch."""
    return run(in_folder(case, root), root, folder / name, ranks, BATCH // 2, **options)


def validated(root: Path, folder: Path, ranks: Ranks) -> list[int]:
    """How many decisions each pass of a rank has in a validation of seven."""
    case = CASES["tokens, none"]
    trainer, policy = build(configured(case, root, 2), case, folder, ranks)
    measure, found = policy.imitation_errors, []

    def counted(rows: TensorRows, frames: torch.Tensor) -> ImitationErrors:
        found.append(len(rows))
        return measure(rows, frames)

    policy.imitation_errors = counted  # type: ignore[method-assign]
    trainer.validate()
    return found


def other_demos(root: Path, folder: Path, ranks: Ranks) -> str:
    """What a rank says when the other one has read another dataset."""
    name = ("viola", "mine")[ranks.rank]
    case = Case("parallel", {"demos": {"path": str(root / "data" / name), "mapping": None, "holdout": 0.0}}, NONE)
    if name == "mine":
        case = replace(case, sections={"demos": {"holdout": 0.0}})
    try:
        build(configured(case, root), case, folder, ranks)
    except UsageError as error:
        return str(error)
    return "trained"


def refusal(root: Path, folder: Path, ranks: Ranks) -> str:
    """What a rank says when the weights of the other one are not finite."""
    case = CASES["tokens, none"]
    trainer, policy = build(configured(case, root), case, folder, ranks)
    if ranks.rank == 1:
        with torch.no_grad():
            next(policy.parameters()).fill_(torch.inf)
    try:
        trainer.save("step_000009")
    except VlarlError as error:
        return str(error)
    return "saved"


def work_of_two(ranks: Ranks, folder: Path, root: Path, alone: Path) -> dict[str, Any]:
    """All work of two ranks, in one process each: starting them takes longer than most of it."""
    cases = CASES | {"dropout": DROPOUT, "rounded": ROUNDED}
    results: dict[str, Any] = {name: run_here(name, case, root, folder, ranks) for name, case in cases.items()}
    for name, case in RESUMED.items():
        again = run_here(f"{name}, resumed", case, root, folder, ranks, resume=folder / name / SAVED)
        results[f"{name}, resumed"] = again
    results["of one"] = run_here("of one", CASES["tokens"], root, folder, ranks, resume=alone / "tokens" / SAVED)
    results["other demos"] = other_demos(root, folder, ranks)
    results["validated"] = validated(root, folder / "validated", ranks)
    results["refusal"] = refusal(root, folder / "refusal", ranks)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases and recordings."""
    folder = tmp_path_factory.mktemp("finetune")
    for decoder in ("parallel", "autoregressive"):
        small_policy(decoder).save(folder / decoder)  # type: ignore[arg-type] - it is one of them
    shutil.copytree(FOLDER, folder / "smolvla", ignore=shutil.ignore_patterns("*.npz"))
    three_schemas(folder / "data")
    return folder


@pytest.fixture(scope="module")
def alone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(root: Path, alone_folder: Path) -> dict[str, Outcome]:
    """One process, half a batch in a pass."""
    torch.set_num_threads(1)
    return {name: run_here(name, case, root, alone_folder, SingleRank()) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def two(
    root: Path, alone: dict[str, Outcome], alone_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("two")
    return in_ranks(2, partial(work_of_two, root=root, alone=alone_folder), folder), folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_what_one_process_trains(root, tmp_path, alone, two, name):
    """After each step: loss, norm of the gradient and validations; after the last, all weights."""
    first, second = (results[name] for results in two[0])
    assert is_equal(first, second), "every rank knows the same"
    case, limit = CASES[name], LIMIT
    has_other_passes = "microbatch_size" in case.sections.get("optim", {})
    if has_other_passes:  # gradients that are rounding alone become whole steps of Adam
        optim = case.sections["optim"] | {"microbatch_size": 2}
        other = run(replace(case, sections=case.sections | {"optim": optim}), root, tmp_path, SingleRank())
        limit = max(LIMIT, FACTOR * gap(other, alone[name]))
        assert limit < PLAIN["optim"]["lr"], "less than a step"
    assert gap(first, alone[name]) <= limit
    if case.sharding.mode == "none" and not has_other_passes:
        assert is_equal(first, alone[name]), "the same passes, summed in the same order"
    steps = [row for row in first.rows if "train/loss" in row]
    assert len({row["train/loss"] for row in steps}) == len(steps) and len(first.rows) == 6
    total = sum(weight.numel() for weight in first.weights.values())
    local = [results[name].num_local for results in two[0]]
    assert (sum(local) == total) if case.sharding.mode == "full" else (local == [total, total])


@pytest.mark.parametrize("name", ["tokens", "flow"])
def test_passes_do_not_matter(root, tmp_path, alone, name):
    """The loss of a sample is the same in any pass, that of flow matching with its noise, too."""
    case = CASES[name]
    case = replace(case, sections=case.sections | {"optim": {"microbatch_size": None}})
    found = run(case, root, tmp_path, SingleRank())
    for mine, theirs in zip(found.rows[:1], alone[name].rows[:1], strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert abs(mine[key] - theirs[key]) <= LIMIT * max(1.0, abs(theirs[key]))


@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_resume_to_the_bit(two, name):
    """Adapters with dropout, too: each rank has its own random state."""
    for results in two[0]:
        assert is_equal(results[f"{name}, resumed"], results[name])
        assert len(results[f"{name}, resumed"].rows) == 3
    for file in ("final", "step_000004"):
        again, undisturbed = (two[1] / folder / file for folder in (f"{name}, resumed", name))
        for path in undisturbed.glob("*.safetensors"):
            ours, theirs = load_file(again / path.name), load_file(path)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), path


def test_ranks_drop_other_inputs(two, alone):
    """Random states differ between ranks: else both would drop the same of their samples."""
    kept = [load_file(two[1] / "tokens, none" / SAVED / "trainer.safetensors")[f"rng.cpu.{rank}"] for rank in (0, 1)]
    assert not torch.equal(kept[0], kept[1])


def test_validations_are_divided(two):
    assert [results["validated"] for results in two[0]] == [[2, 2], [2, 1]]


@pytest.mark.parametrize("name", ["tokens", "tokens, none"])
def test_one_process_resumes_what_two_ranks_have_begun(root, two, alone, tmp_path, name):
    torch.set_num_threads(1)
    found = run_here(name, CASES[name], root, tmp_path, SingleRank(), resume=two[1] / name / SAVED)
    assert gap(found, Outcome(alone[name].rows[3:], alone[name].weights)) <= LIMIT


def test_two_ranks_resume_what_one_process_has_begun(two, alone):
    assert gap(two[0][0]["of one"], Outcome(alone["tokens"].rows[3:], alone["tokens"].weights)) <= LIMIT


@pytest.mark.parametrize("name", ["tokens", "regression head", "adapters", "flow"])
def test_the_final_policy_is_whole(two, name):
    """Written once, in the original layout; the best one and those of steps, too."""
    folder, expected = two[1] / name, two[0][0][name].weights
    assert {path.name for path in folder.iterdir()} >= {"final", "best_validation", "step_000004"}
    for checkpoint in ("final", "step_000004"):
        policy = load_policy(folder / checkpoint, actions="l1" if name == "regression head" else "tokens")
        weights = dict(policy.named_parameters())
        assert all(torch.equal(weights[key], value) for key, value in expected.items() if key in weights)
        assert len(weights.keys() & expected.keys()) > len(expected) / 2
    assert (folder / "step_000004" / "sharded").is_dir() and not (folder / "final" / "sharded").exists()


def test_lower_precision_of_sharded_weights_is_near(two, alone):
    """bfloat16 has 8 bits: a loss is off by some hundredths, and weights move by about as much as the rate."""
    found, expected = two[0][0]["rounded"].rows[0], alone["tokens"].rows[0]
    assert 0 < abs(found["train/loss"] - expected["train/loss"]) < 0.02 * expected["train/loss"]


def test_what_is_not_finite_on_one_rank_is_saved_by_none(two):
    assert all("so they are not saved" in results["refusal"] for results in two[0])
    assert not list((two[1] / "refusal").glob("step*"))


def test_ranks_that_see_different_demonstrations_are_refused(two):
    first, second = (results["other demos"] for results in two[0])
    assert "rank 0 has read 32 frames of viola, rank 1 24 frames of mine" in first
    assert "rank 1 has read 24 frames of mine, rank 0 32 frames of viola" in second


def test_parts_of_a_batch_are_equal(root, tmp_path):
    class Three(SingleRank):
        world_size = 3

    case = CASES["tokens, none"]
    with pytest.raises(ValueError, match="3 ranks can't have equal parts of 8 samples"):
        build(configured(case, root), case, tmp_path, Three())
