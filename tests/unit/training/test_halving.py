"""An update that runs out of memory continues with smaller microbatches, as if they had been small from the start."""

import copy
import logging
from dataclasses import dataclass

import pytest
import torch
from fakes.decisions import annotated_update, nothing
from fakes.small_gpu import SmallGpu

from vlarl.config.schema import OptimConfig
from vlarl.errors import VlarlError
from vlarl.policies.tiny import init_tiny
from vlarl.training.halving import Microbatches, NoMemory
from vlarl.training.ranks import SingleRank

CPU = torch.device("cpu")
LENGTHS = (4, 3, 4, 2)  # 13 decisions


@pytest.fixture
def policy():
    return init_tiny("parallel", seed=3)


@pytest.fixture
def updated(act, policy_batch, configure, build):
    """updated(policy, size, rows): a policy after an update with microbatches of this size, and the update's result.

    Passes over more than `rows` rows run out of memory.
    """

    def run(policy, size, rows=None, **sections):
        policy = copy.deepcopy(policy)
        sections = {"algorithm": {"epochs": 1, "old_logprobs": "engine"}, **sections}
        learner = build(policy, configure(optim={"microbatch_size": size, "lr": 1e-3, "minibatches": 1}, **sections))
        batch = policy_batch(policy, act(policy, lengths=LENGTHS))
        gpu = None if rows is None else SmallGpu(policy, rows, spared=1)
        return learner, annotated_update(learner, batch, 1), gpu

    return run


@pytest.mark.parametrize("sections", [{}, {"algorithm": {"epochs": 2}}], ids=["one step", "annotated"])
def test_the_result_is_that_of_an_update_whose_microbatches_were_small_from_the_start(
    policy, updated, caplog, sections
):
    """Gradients of the microbatches that went well before the error are not counted twice."""
    with caplog.at_level(logging.WARNING, logger="vlarl"):
        learner, result, gpu = updated(policy, 8, rows=3, **sections)
    expected, undisturbed, _ = updated(policy, 2, **sections)
    assert gpu.passes[:4] == [8, 5, 4, 2], "13 rows, of which the first 8 went well"
    assert learner.microbatches.optim.microbatch_size == 2
    for (name, found), (_, wanted) in zip(
        learner.policy.named_parameters(), expected.policy.named_parameters(), strict=True
    ):
        assert torch.equal(found, wanted), name
    assert result.metrics.pop("oom_retries") == 2 and "oom_retries" not in undisturbed.metrics
    assert result == undisturbed
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(". ")[0] for text in said] == [
        "the update ran out of memory with microbatches of 8 decisions; from here on 4",
        "the update ran out of memory with microbatches of 4 decisions; from here on 2",
    ]
    assert "CUDA out of memory" in said[0]


def test_the_smaller_size_is_remembered(policy, act, policy_batch, configure, build):
    learner = build(policy, configure(optim={"microbatch_size": 8}, algorithm={"epochs": 1}))
    batch = policy_batch(policy, act(policy, lengths=LENGTHS))
    gpu = SmallGpu(policy, 4)
    assert learner.update(batch, 1, nothing).metrics["oom_retries"] == 1
    gpu.passes.clear()
    assert "oom_retries" not in learner.update(batch, 2, nothing).metrics
    assert gpu.passes == [4, 4, 4, 1]
    learner.microbatches.optim = learner.microbatches.optim.model_copy(update={"microbatch_size": 128})
    gpu.passes.clear()
    learner.update(batch, 3, nothing)
    assert gpu.passes == [13, 6, 3, 3, 3, 3, 1], "128 is more than there are rows, so that these count"


def test_a_single_decision_that_does_not_fit_ends_the_run_with_remedies(policy, updated):
    with pytest.raises(VlarlError) as refusal:
        updated(policy, 4, rows=0)
    text = str(refusal.value)
    assert text.startswith(
        "the update of a single decision ran out of memory: CUDA out of memory. Tried to allocate 2.00"
    )
    assert all(remedy in text for remedy in ("policy.quantize 4", "policy.gradient_checkpointing", "vlarl doctor"))


def test_a_failed_pass_leaves_the_policy_in_evaluation_mode(policy, act, policy_batch, configure, build):
    learner = build(policy, configure(algorithm={"epochs": 1}))
    SmallGpu(policy, 0)
    with pytest.raises(VlarlError):
        learner.update(policy_batch(policy, act(policy)), 1, nothing)
    assert not policy.training


def test_values_of_last_observations_are_computed_in_smaller_microbatches_too(
    policy, act, policy_batch, configure, build
):
    learner = build(policy, configure(algorithm={"name": "ppo", "critic_hidden": (8,)}, optim={"microbatch_size": 8}))
    batch = policy_batch(policy, act(policy, lengths=LENGTHS))
    expected = learner.annotate(batch, 1, batch.inputs.rows(torch.arange(6)))
    gpu = SmallGpu(policy, 3, method="values")
    found = learner.annotate(batch, 1, batch.inputs.rows(torch.arange(6)))
    assert gpu.passes == [6, 3, 3] and learner.microbatches.optim.microbatch_size == 3
    torch.testing.assert_close(found.last_values, expected.last_values)


def test_an_optimizer_step_without_memory_ends_the_run_with_remedies(policy, act, policy_batch, configure, build):
    learner = build(policy, configure(algorithm={"epochs": 1}))

    def step():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    learner.optimizer.step = step
    with pytest.raises(VlarlError, match="the optimizer's step ran out of memory: CUDA out of memory"):
        learner.update(policy_batch(policy, act(policy)), 1, nothing)


def test_a_budget_of_tokens_is_halved(caplog):
    sizes = Microbatches(OptimConfig(microbatch_tokens=4096), SingleRank(), CPU, sharded=False)

    def work():
        if sizes.optim.microbatch_tokens > 1500:
            return sizes.distribute([torch.arange(5)], torch.arange(0), no_memory)
        return "done"

    assert sizes.attempt(work) == "done" and sizes.optim.microbatch_tokens == 1024
    assert "microbatches of 4096 tokens; from here on 2048" in caplog.text


def no_memory(piece):
    raise torch.OutOfMemoryError("CUDA out of memory")


@dataclass
class TwoRanks:
    """The first of two ranks; what the second one has found, call by call."""

    others: list[list[object]]
    rank = 0
    world_size = 2

    def gather(self, own):
        return [own, self.others.pop(0)]

    def sum(self, tensor): ...

    def any(self, flag):
        return flag


def test_all_ranks_halve_when_one_of_them_runs_out_of_memory():
    """Rank 0 has enough memory; it learns of the other's failure from the results that are exchanged."""
    ranks = TwoRanks([[NoMemory("CUDA out of memory")], [3.0, 5.0]])
    sizes = Microbatches(OptimConfig(microbatch_size=4), ranks, CPU, sharded=False)
    done: list[list[int]] = []

    def work():
        def one(piece):
            done.append(piece.tolist())
            return float(piece.sum())

        pieces = torch.split(torch.arange(8), sizes.optim.microbatch_size)
        return sizes.distribute(pieces, torch.arange(0), one)

    assert sizes.attempt(work) == [1.0, 3.0, 9.0, 5.0]
    assert done == [[0, 1, 2, 3], [0, 1], [4, 5]], "rank 0's microbatches"
    assert sizes.take_retries() == {"oom_retries": 1.0} and sizes.take_retries() == {}


def test_a_rank_without_memory_makes_its_turns_without_work():
    """The other rank passes as often as ever: nothing waits."""
    ranks, passes = TwoRanks([[1.0, 1.0]]), []
    sizes = Microbatches(OptimConfig(microbatch_size=2), ranks, CPU, sharded=False)

    def work():
        if passes:
            return "begun again"
        pieces = torch.split(torch.arange(8), 2)
        return sizes.distribute(pieces, torch.arange(0), lambda piece: passes.append(piece) or no_memory(piece))

    assert sizes.attempt(work) == "begun again" and len(passes) == 1
    assert ranks.others == [], "its results were exchanged"


def test_weights_that_several_ranks_share_can_not_be_helped():
    """A pass waits for the others in its middle: a rank that left it would leave them waiting."""
    sizes = Microbatches(OptimConfig(), TwoRanks([]), CPU, sharded=True)
    with pytest.raises(VlarlError, match=r"weights that several learners share ran out of memory.*policy\.quantize 4"):
        sizes.attempt(lambda: sizes.distribute([torch.arange(4)], torch.arange(0), no_memory))
    alone = Microbatches(OptimConfig(), SingleRank(), CPU, sharded=True)
    with pytest.raises(VlarlError, match="a single decision"):
        alone.attempt(lambda: alone.distribute([torch.arange(1)], torch.arange(0), no_memory))


def test_an_idle_rank_without_memory_ends_the_run():
    sizes = Microbatches(OptimConfig(), TwoRanks([]), CPU, sharded=False)
    idle = torch.arange(0)
    sizes._ranks.rank = 1
    with pytest.raises(VlarlError, match="a learner without decisions of its own ran out of memory"):
        sizes.attempt(lambda: sizes.distribute([torch.arange(4)], idle, no_memory))
