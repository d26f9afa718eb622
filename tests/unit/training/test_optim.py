"""Learning rates and weight decay: known values."""

import math

import pytest
import torch
from torch import nn

from vlarl.training.optim import build_adamw, lr_factor, set_lr, warmup_cosine


def test_learning_rate_schedules():
    def factors(schedule: str, warmup: int = 0) -> list[float]:
        return [lr_factor(n, 10, schedule, warmup) for n in range(11)]

    assert factors("constant") == [1.0] * 11
    assert factors("linear") == pytest.approx([1 - n / 10 for n in range(11)])
    assert factors("cosine") == pytest.approx([0.5 * (1 + math.cos(math.pi * n / 10)) for n in range(11)])
    warm = factors("linear", warmup=2)
    assert warm[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1 - 1 / 8])
    assert warm[-1] == pytest.approx(0.0)
    assert lr_factor(99, 10, "linear", 0) == 0.0


def test_supervised_schedule_rises_in_a_line_and_falls_to_zero():
    assert [warmup_cosine(n, 10, 4) for n in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert warmup_cosine(7, 10, 4) == pytest.approx(0.5)
    assert warmup_cosine(10, 10, 4) == pytest.approx(0.0)
    assert warmup_cosine(1, 1, 0) == pytest.approx(0.0)


def test_only_matrices_decay_and_frozen_weights_stay():
    matrix, vector, frozen = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (2, 2)))
    frozen.requires_grad_(False)
    optimizer = build_adamw([matrix, vector, frozen], lr=0.1, weight_decay=0.5, betas=(0.9, 0.95))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix.data, torch.full((2, 2), 0.95))
    assert torch.equal(vector.data, torch.ones(2)) and torch.equal(frozen.data, torch.ones(2, 2))
    assert all(frozen is not p for group in optimizer.param_groups for p in group["params"])


def test_set_lr_reaches_every_group():
    optimizer = build_adamw([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))], 0.1, 0.1, (0.9, 0.95))
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_step_is_counted_by_the_weights_it_changed():
    """Fused kernels don't by themselves, and adapters keep copies in a smaller type that follow this count."""
    weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    optimizer = build_adamw(weights, 0.1, 0.0, (0.9, 0.95))
    for parameter in weights:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter._version for parameter in weights]
    optimizer.step()
    assert all(parameter._version > count for parameter, count in zip(weights, before, strict=True))
