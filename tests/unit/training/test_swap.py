"""Swapping a policy's weights: all of them or none, whatever fails meanwhile."""

import pytest
import torch

from vlarl.policies.tiny import init_tiny
from vlarl.training.swap import swapped, trained_weights


class RunsOut(dict):
    """Weights by name; memory runs out when one of them is taken."""

    def __init__(self, weights: dict[str, torch.Tensor], at: int) -> None:
        super().__init__(weights)
        self.broken: str | None = list(weights)[at]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.broken:
            self.broken = None
            raise RuntimeError("out of memory")
        return super().__getitem__(name)


@pytest.mark.parametrize("at", [0, 5, -1])
def test_an_exchange_that_fails_half_way_is_undone(at):
    policy = init_tiny("parallel", seed=3)
    own = {name: p.detach().clone() for name, p in trained_weights(policy).items()}
    others = {name: tensor + 1 for name, tensor in own.items()}
    weights = RunsOut({name: tensor.clone() for name, tensor in others.items()}, at)
    with pytest.raises(RuntimeError, match="out of memory"), swapped(policy, weights):
        raise AssertionError("the block is not entered")
    assert all(torch.equal(p, own[name]) for name, p in trained_weights(policy).items())
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_inside_the_block_all_have_changed_places():
    policy = init_tiny("parallel", seed=3)
    own = {name: p.detach().clone() for name, p in trained_weights(policy).items()}
    weights = {name: tensor + 1 for name, tensor in own.items()}
    with pytest.raises(ValueError, match="in the block"), swapped(policy, weights):
        assert all(torch.equal(p, own[name] + 1) for name, p in trained_weights(policy).items())
        assert all(torch.equal(weights[name], own[name]) for name in own)
        raise ValueError("in the block")
    assert all(torch.equal(p, own[name]) for name, p in trained_weights(policy).items())
