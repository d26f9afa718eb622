"""Two ranks learn what one process learns: over three updates, whatever is trained and however it is distributed."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.small_gpu import SmallGpu
from rank_cases import (
    LEARNING,
    Case,
    Drift,
    Outcome,
    build,
    drift,
    experience,
    in_ranks,
    metric_gap,
    otherwise_rounded,
    run,
    small_policy,
    update,
)

from vlarl.errors import UsageError, VlarlError
from vlarl.policies.load import load_policy
from vlarl.training.checkpoint import COUNTERS, TENSORS, restore
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import Ranks, SingleRank, distribute, on_first

LORA = {"enabled": True, "rank": 4}
ONCE = {"epochs": 1}  # where more would show nothing else, to save time
PPO = {"name": "ppo", "critic_hidden": (16,), "epochs": 1}
REFERENCE = {"coef": 0.1}
ADAPTIVE = {"target": 1e-3, "horizon": 100}
REFUSED = {"name": "cpgd", "old_logprobs": "engine", "epochs": 1}  # its clip ends the gradient of an infinite loss
IMITATING = {  # five samples in microbatches of three: the ranks have different ones
    "ptx": {"path": "experts", "coef": 0.5, "batch_size": 5, "episodes_per_task": 1},
    "env": {"task_ids": (0,)},
}
FULL, NONE = Sharding("full"), Sharding("none")

BFLOAT16 = "grpo, adapters on bfloat16"
FACTOR = 4.0

CASES = {
    "grpo": Case("parallel", {"kl": REFERENCE, "ema": {"beta": 0.9}}, FULL),
    "grpo, offloaded": Case("autoregressive", {"algorithm": ONCE}, Sharding("full", cpu_offload=True)),
    "grpo, none": Case("autoregressive", {"kl": REFERENCE, "algorithm": {"ratio_level": "sequence"}}, NONE),
    "grpo, stale": Case("parallel", {"algorithm": ONCE | {"importance": "truncated"}}, FULL),  # from the second update
    "grpo, adapters": Case(
        "parallel",
        {"lora": LORA, "kl": REFERENCE, "policy": {"gradient_checkpointing": True}, "algorithm": ONCE},
        FULL,
    ),
    "grpo, adapters, none": Case("autoregressive", {"lora": LORA, "algorithm": {"entropy_top_fraction": 0.5}}, NONE),
    BFLOAT16: Case("parallel", {"lora": LORA, "kl": REFERENCE, "policy": {"dtype": "bfloat16"}}, FULL),
    "ppo": Case("autoregressive", {"algorithm": PPO | {"value_init_steps": 1}}, FULL),
    "ppo, adapters": Case("parallel", {"algorithm": PPO | {"gae_level": "step"}, "lora": LORA}, FULL),
    "ppo, adapters, none": Case("parallel", {"algorithm": PPO, "lora": LORA}, NONE),
    "ppo, critic": Case("parallel", {"algorithm": PPO | {"value_init_steps": 1}, "critic": {"kind": "separate"}}, FULL),
    "ppo, critic, none": Case("autoregressive", {"algorithm": PPO, "critic": {"kind": "separate"}}, NONE),
    "ppo, critic, adapters": Case(
        "autoregressive", {"algorithm": PPO, "critic": {"kind": "separate"}, "lora": LORA}, FULL
    ),
    "grpo, imitating": Case("parallel", {"algorithm": ONCE} | IMITATING, FULL),
    "ppo, imitating, none": Case("autoregressive", {"algorithm": PPO | {"value_init_steps": 1}} | IMITATING, NONE),
    "a refused step": Case("parallel", {"algorithm": ONCE}, FULL, broken=(2,)),
    "a refused step, none": Case("parallel", {"algorithm": ONCE}, NONE, broken=(2,)),
    "a refused loss": Case("parallel", {"algorithm": REFUSED, "kl": REFERENCE | ADAPTIVE}, FULL, (2,), clipped=True),
    "a refused loss, none": Case("parallel", {"algorithm": REFUSED, "ema": {"beta": 0.9}}, NONE, (2,), clipped=True),
    "an early stop": Case("parallel", {"algorithm": {"max_approx_kl": 1e-5, "epochs": 3}}, FULL),
}
SAVED = ("grpo", "ppo, critic, adapters")  # with checkpoints, which others resume from
ROUNDED = Case(
    "parallel", {"algorithm": ONCE}, Sharding("full", compute_dtype=torch.bfloat16)
)  # near to one process, not equal


def work_of_two(ranks: Ranks, folder: Path, bases: Path, alone: Path) -> dict[str, Any]:
    """All work of two ranks, in one process each: starting them takes longer than most of it."""
    results: dict[str, Any] = {}
    for name, case in (CASES | {"rounded": ROUNDED}).items():
        results[name] = run(case, bases, ranks, save_to=folder / name if name in SAVED else None)
    for name in SAVED:
        results[f"{name}, resumed"] = run(CASES[name], bases, ranks, resume=alone / name / "step_000001")
    results["short of memory"] = [_short_of_memory(ranks, bases, size) for size in (3, 1)]
    results["failure"] = _failure(ranks)
    results["refusals"] = _refusals(ranks, bases)
    results["distribute"] = distribute("abc", "idle", str.upper, ranks), ranks.any(ranks.rank == 1), ranks.any(False)
    return results


def _short_of_memory(
    ranks: Ranks, bases: Path, microbatch_size: int
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """An update of ranks of which the second has memory for two decisions: its metrics, and the weights after it."""
    sections = {"algorithm": ONCE, "optim": {**LEARNING, "microbatch_size": microbatch_size}}
    case, outcome = Case("autoregressive", sections, NONE), Outcome()
    learner, _ = build(case, bases, ranks)
    if ranks.rank == 1:
        SmallGpu(learner.policy, 2)
    update(learner, experience(bases, case.decoder), 1, case, outcome)
    return outcome.metrics[0], {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


def _failure(ranks: Ranks) -> str:
    def fail() -> None:
        raise VlarlError("the disk is full")

    try:
        on_first(ranks, fail)
    except VlarlError as error:
        return str(error)
    return "nothing"


def _refusals(ranks: Ranks, bases: Path) -> str:
    try:
        build(Case("parallel", {}, Sharding("hybrid", group_size=3)), bases, ranks)
    except UsageError as error:
        return str(error)
    return "nothing"


def work_of_four(ranks: Ranks, folder: Path, bases: Path, two: Path) -> dict[str, Outcome]:
    """Two groups of two ranks, and the checkpoint of two ranks."""
    hybrid = Sharding("hybrid", group_size=2)
    case = Case("parallel", CASES["grpo"].sections, hybrid)
    return {
        "grpo": run(case, bases, ranks, save_to=folder / "grpo"),
        "grpo, resumed": run(case, bases, ranks, resume=two / "grpo" / "step_000001"),
    }


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for decoder in ("parallel", "autoregressive"):
        small_policy(decoder).save(folder / decoder)  # type: ignore[arg-type] - it is one of them
    return folder


@pytest.fixture(scope="module")
def alone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(bases: Path, alone_folder: Path) -> dict[str, Outcome]:
    """One process."""
    torch.set_num_threads(1)
    return {
        name: run(case, bases, SingleRank(), save_to=alone_folder / name if name in SAVED else None)
        for name, case in (CASES | {"rounded": ROUNDED}).items()
    }


@pytest.fixture(scope="module")
def two(bases: Path, alone: dict[str, Outcome], alone_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of two ranks, and where their checkpoints are."""
    folder = tmp_path_factory.mktemp("two")
    return in_ranks(2, partial(work_of_two, bases=bases, alone=alone_folder), folder), folder


@pytest.fixture(scope="module")
def four(bases: Path, two: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("four")
    return in_ranks(4, partial(work_of_four, bases=bases, two=two[1]), folder), folder


@pytest.fixture(scope="module")
def allowed(bases: Path, alone: dict[str, Outcome]) -> dict[str, Drift]:
    """What ranks may differ from one process by: FACTOR times what one process differs from itself by, when it rounds
    otherwise. Single values are lucky or not, so for them all cases in float32 are taken together."""
    own = {name: drift(run(otherwise_rounded(case), bases, SingleRank()), alone[name]) for name, case in CASES.items()}
    exact = [one for name, one in own.items() if name != BFLOAT16]
    metrics, weight = max(one.metrics for one in exact), max(one.weight for one in exact)
    assert metrics < 1e-5 and weight < 1e-5, "this is not rounding"
    pooled = {name: Drift(metrics, weight, one.norm) for name, one in own.items()} | {BFLOAT16: own[BFLOAT16]}
    return {name: one.times(FACTOR) for name, one in pooled.items()}


def assert_near(found: Outcome, expected: Outcome, allowed: Drift) -> None:
    between = drift(found, expected)
    assert between.within(allowed), f"{between}, of {allowed}"


def later(outcome: Outcome) -> Outcome:
    """What remains after the first update."""
    return replace(outcome, metrics=outcome.metrics[1:])


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert list(found) == list(expected)
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_process_learns(alone, two, allowed, name):
    expected, (first, second) = alone[name], [results[name] for results in two[0]]
    assert_near(first, expected, allowed[name])
    assert repr(first.metrics) == repr(second.metrics)  # bit for bit, NaN included
    assert first.steps == second.steps == expected.steps
    assert furthest(first.weights, second.weights) == 0.0


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_learning_rate_that_is_wrong_by_a_thousandth_would_show(bases, alone, allowed, name):
    case = CASES[name]
    wrong = replace(case, sections={**case.sections, "optim": {**LEARNING, "lr": 1.001 * LEARNING["lr"]}})
    assert not drift(run(wrong, bases, SingleRank()), alone[name]).within(allowed[name])


def test_the_cases_learn_something_and_stop_where_they_should(alone):
    assert [steps[0] for steps in alone["grpo"].steps] == [2, 2, 2]
    for refused in ("a refused step", "a refused loss", "a refused loss, none"):
        assert alone[refused].steps == [(1, 0, False), (0, 1, False), (1, 0, False)]
    assert "kl_ref" not in alone["a refused loss"].metrics[1], "what was refused is not in the means"
    assert alone["a refused loss"].metrics[2]["kl_coef"] == alone["a refused loss"].metrics[1]["kl_coef"]
    assert alone["a refused loss"].metrics[1]["kl_coef"] != 0.1, "the first update moved it"
    assert [stopped for _, _, stopped in alone["an early stop"].steps] == [True, True, True]
    assert alone["grpo"].metrics[-1]["kl_ref"] > 1e-6
    assert abs(alone["grpo, stale"].metrics[-1]["importance_mean"] - 1) > 1e-4
    assert alone["grpo, adapters on bfloat16"].metrics[-1]["ratio_max"] > 1.0


@pytest.mark.parametrize("name", ["grpo", "ppo, critic, adapters"])
def test_each_rank_keeps_about_half_of_a_sharded_policy(alone, two, name):
    total = alone[name].num_local
    parts = [results[name].num_local for results in two[0]]
    assert sum(parts) == total and max(parts) < 0.55 * total
    assert [results["grpo, none"].num_local for results in two[0]] == [alone["grpo, none"].num_local] * 2


def test_passes_in_bfloat16_stay_near_and_leave_the_weights_in_float32(alone, two):
    expected, found = alone["rounded"], two[0][0]["rounded"]
    assert metric_gap(found.metrics, expected.metrics) < 0.05
    assert {weight.dtype for weight in found.weights.values()} == {torch.float32}
    assert 1e-5 < furthest(found.weights, expected.weights) < 2e-3


@pytest.mark.parametrize("name", SAVED)
def test_two_ranks_go_on_from_one_process(alone, two, allowed, name):
    assert_near(two[0][0][f"{name}, resumed"], later(alone[name]), allowed[name])


@pytest.mark.parametrize("name", SAVED)
def test_one_process_goes_on_from_two_ranks(bases, alone, two, allowed, name):
    checkpoint = two[1] / name / "step_000001"
    assert not (checkpoint / TENSORS).exists() and not (checkpoint / "config.json").exists()
    resumed = run(CASES[name], bases, SingleRank(), resume=checkpoint)
    assert_near(resumed, later(alone[name]), allowed[name])


@pytest.mark.parametrize("name", SAVED)
def test_the_last_checkpoint_of_ranks_holds_a_policy_that_anybody_can_load(two, name):
    folder = two[1] / name / "final"
    weights = dict(load_policy(folder).named_parameters())
    expected = {n: w for n, w in two[0][0][name].weights.items() if n in weights}
    assert furthest({n: weights[n].detach() for n in expected}, expected) == 0.0
    assert json.loads((folder / COUNTERS).read_text())["iteration"] == 3
    assert not list((two[1] / name).glob(".*")), "nothing half-written is left"


def test_the_average_is_exported_too(alone_folder, alone, two, allowed):
    ours, theirs = (
        {n: p.detach() for n, p in load_policy(folder / "grpo" / "ema").named_parameters()}
        for folder in (two[1], alone_folder)
    )
    assert furthest(ours, theirs) <= allowed["grpo"].weight
    assert furthest(ours, two[0][0]["grpo"].weights) > 1e-4, "it lags behind"


def test_a_checkpoint_in_parts_with_another_critic_is_refused(bases, two):
    learner, _ = build(CASES["ppo, adapters"], bases, SingleRank())
    with pytest.raises(UsageError, match="critic.kind = 'head': .* was written with 'separate'"):
        restore(learner, two[1] / "ppo, critic, adapters" / "step_000001")


@pytest.mark.parametrize("damage", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_in_parts_is_named(bases, two, tmp_path, damage):
    folder = tmp_path / "step_000001"
    shutil.copytree(two[1] / "grpo" / "step_000001", folder)
    (folder / "sharded" / damage).write_bytes(b"\x80")
    learner, _ = build(CASES["grpo"], bases, SingleRank())
    with pytest.raises(UsageError, match="step_000001 is damaged .*: move it away"):
        restore(learner, folder)


def test_what_fails_on_the_first_rank_fails_on_all(two):
    assert [results["failure"] for results in two[0]] == ["the disk is full", "rank 0 failed: the disk is full"]


def test_groups_that_do_not_divide_the_ranks_are_refused(two):
    for results in two[0]:
        assert results["refusals"].startswith("sharding in groups of 3: the 2 learner ranks can't be divided")


def test_work_is_distributed_and_all_ranks_have_all_results(two):
    assert [results["distribute"] for results in two[0]] == [(["A", "B", "C"], True, False)] * 2


def test_four_ranks_in_two_groups_learn_the_same_and_go_on_from_two(alone, four, allowed):
    results, folder = four
    for rank in results:
        assert metric_gap(rank["grpo"].metrics, alone["grpo"].metrics) <= allowed["grpo"].metrics
        assert metric_gap(rank["grpo, resumed"].metrics, alone["grpo"].metrics[1:]) <= allowed["grpo"].metrics
    assert_near(results[0]["grpo"], alone["grpo"], allowed["grpo"])
    assert_near(results[0]["grpo, resumed"], later(alone["grpo"]), allowed["grpo"])
    total = alone["grpo"].num_local
    assert all(rank["grpo"].num_local < 0.55 * total for rank in results)
    assert sum(rank["grpo"].num_local for rank in results) == 2 * total
    exported = dict(load_policy(folder / "grpo" / "final").named_parameters())
    assert furthest({n: p.detach() for n, p in exported.items()}, results[0]["grpo"].weights) == 0.0


def test_ranks_halve_their_microbatches_together_when_one_of_them_runs_out_of_memory(two):
    """Of three decisions to one: the same, on both, as with microbatches of one from the beginning."""
    for results in two[0]:
        (halved, found), (undisturbed, expected) = results["short of memory"]
        assert halved.pop("oom_retries") == 1 and "oom_retries" not in undisturbed
        assert halved == undisturbed
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
