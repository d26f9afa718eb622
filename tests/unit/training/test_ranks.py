"""How work is distributed over ranks, by fakes of one rank of several; and pieces that count nothing."""

from dataclasses import replace

import pytest
import torch

from vlarl.training.batch import uncounted, weighted
from vlarl.training.fsdp import sum_gradients
from vlarl.training.ranks import SingleRank, distribute, on_first


class OneOf:
    """A rank with fake others: they return the given results, or the same as this rank."""

    def __init__(self, rank: int, results: list) -> None:
        self.rank, self.world_size, self.results = rank, len(results), results
        self.summed: list[int] = []

    def gather(self, own):
        return [own if rank == self.rank else result for rank, result in enumerate(self.results)]

    def sum(self, tensor):
        self.summed.append(tensor.numel())
        tensor.mul_(self.world_size)

    def any(self, flag):
        return flag


def test_one_process_works_on_every_piece_in_order():
    seen = []
    assert distribute([1, 2, 3], 0, lambda piece: seen.append(piece) or piece * 10, SingleRank()) == [10, 20, 30]
    assert seen == [1, 2, 3]
    assert distribute([], 0, str, SingleRank()) == []


def test_ranks_take_turns_and_the_last_is_idle():
    seen: list[int] = []

    def work(piece: int) -> int:
        seen.append(piece)
        return piece * 10

    ranks = OneOf(1, [[10, 40], None, [30, -10]])
    assert distribute([1, 2, 3, 4], -1, work, ranks) == [10, 20, 30, 40]
    assert seen == [2, -1], "as many passes as the others, one of them for nothing"


def test_what_rank_0_could_not_do_is_known_to_the_others():
    from vlarl.errors import VlarlError

    done = []
    on_first(OneOf(1, [([None], None), ([None], None)]), lambda: done.append("never"))
    assert done == []
    with pytest.raises(VlarlError, match="rank 0 failed: no space"):
        on_first(OneOf(1, [([], "no space"), ([None], None)]), lambda: None)
    with pytest.raises(OSError, match="no space"):  # as it was, where it happened
        on_first(SingleRank(), lambda: (_ for _ in ()).throw(OSError("no space")))


def test_gradients_are_summed_in_buckets(monkeypatch):
    monkeypatch.setattr("vlarl.training.fsdp.BUCKET_BYTES", 40)
    sizes = [(2, 3), (4,), (20,), (1,)]  # 24 and 16 bytes fit together, 80 are too many by themselves
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for value, parameter in enumerate(parameters, start=1):
        parameter.grad = torch.full_like(parameter, float(value))
    parameters.insert(1, torch.nn.Parameter(torch.zeros(7)))  # without a gradient
    ranks = OneOf(0, [None, None])
    sum_gradients(parameters, ranks)
    assert ranks.summed == [10, 20, 1]
    for value, parameter in zip((1, None, 2, 3, 4), parameters, strict=True):
        assert parameter.grad is None if value is None else torch.equal(parameter.grad, parameter * 0 + 2.0 * value)
    alone = torch.nn.Parameter(torch.zeros(1))
    alone.grad = torch.ones(1)
    sum_gradients([alone], SingleRank())
    assert alone.grad.item() == 1.0


@pytest.mark.parametrize("algorithm", [{"name": "grpo"}, {"name": "ppo", "critic_hidden": (16,), "gae_level": "step"}])
def test_an_uncounted_decision_leaves_a_gradient_of_zero(policy, act, learner_batch, configure, build, algorithm):
    learner = build(policy, configure(algorithm=algorithm))
    batch = learner_batch(learner, act(policy))
    off = batch.decisions.engine_logprobs + 3.0
    batch = weighted(replace(batch, old_logprobs=off), torch.arange(6), "token_mean")
    part = uncounted(batch.rows(torch.tensor([4])))
    loss = learner.algorithm.loss(learner._evaluate(part, True), part, value_weight=0.5, kl_coef=0.1, train_policy=True)
    loss.total.backward()
    reached = [p.grad for _, p, _ in learner.named_trained() if p.grad is not None]
    assert reached and all(not gradient.any() for gradient in reached)
