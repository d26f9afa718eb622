"""Losses: masks that hide anything, temperatures, denominators, gradients by finite differences."""

from dataclasses import replace

import pytest
import torch

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.base import Denominators, Loss
from vlarl.algorithms.kl import k3
from vlarl.algorithms.losses import clipped_policy_loss, masked_sum, value_loss
from vlarl.config.schema import Config
from vlarl.policies.base import Scores
from vlarl.policies.distribution import token_logprobs
from vlarl.types import PolicyInput, TrainBatch

TEMPERATURE = 1.6
ROWS, TOKENS, BINS = 3, 4, 5


def batch(with_critic: bool = True) -> tuple[torch.Tensor, TrainBatch]:
    """Logits of a small problem whose ratios are near, above and below the clip, with ragged masks."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, TOKENS, BINS, generator=generator, dtype=torch.float64)
    places = torch.randint(BINS, (ROWS, TOKENS), generator=generator)
    old = token_logprobs(logits, places, TEMPERATURE).double() + 0.3 * torch.randn(
        ROWS, TOKENS, generator=generator, dtype=torch.float64
    )
    nothing = torch.zeros(ROWS, 1, dtype=torch.int64)
    return logits, TrainBatch(
        inputs=PolicyInput(nothing, nothing.bool(), nothing, None),
        token_ids=places + 768,
        places=places,
        old_logprobs=old,
        advantages=torch.randn(ROWS, 1, generator=generator, dtype=torch.float64).expand(-1, TOKENS).contiguous(),
        mask=torch.arange(TOKENS)[None] < torch.tensor([[4], [2], [1]]),
        returns=torch.tensor([1.0, 0.0, -1.0]) if with_critic else None,
        old_values=torch.tensor([0.5, 0.1, -0.2]) if with_critic else None,
    )


OVER = Denominators(num_tokens=7, num_decisions=3)
VALUES = torch.tensor([0.9, 0.05, 0.4])


def compute(config: Config, logits: torch.Tensor, rows: TrainBatch, train_policy: bool = True) -> Loss:
    values = VALUES.clone().requires_grad_() if rows.returns is not None else None
    algorithm = build_algorithm(config.algorithm, TEMPERATURE)
    return algorithm.loss(Scores(logits, values), rows, OVER, train_policy=train_policy)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_loss_is_the_mean_over_executed_tokens(configure, name):
    logits, rows = batch()
    config = configure(algorithm={"name": name, "entropy_coef": 0.01, "clip_low": 0.2, "clip_high": 0.28})
    loss = compute(config, logits, rows)
    expected, kl, clipped, entropies = 0.0, 0.0, 0, 0.0
    for i in range(ROWS):
        for t in range(int(rows.mask[i].sum())):
            logprobs = (logits[i, t] / TEMPERATURE).log_softmax(-1)
            log_ratio = float(logprobs[rows.places[i, t]] - rows.old_logprobs[i, t])
            ratio, advantage = torch.tensor(log_ratio).exp().item(), float(rows.advantages[i, t])
            bounded = min(max(ratio, 0.8), 1.28)
            expected += max(-advantage * ratio, -advantage * bounded)
            clipped += -advantage * bounded > -advantage * ratio
            kl += ratio - 1 - log_ratio
            entropies += float(-(logprobs.exp() * logprobs).sum())
    value = 0.5 * max((0.9 - 1) ** 2, (0.7 - 1) ** 2) + 0.5 * 0.05**2 + 0.5 * max(1.4**2, 1.0**2)
    total = (expected - 0.01 * entropies) / 7 + (0.5 * value / 3 if name == "ppo" else 0)
    assert loss.total.item() == pytest.approx(total, abs=1e-5)
    assert float(loss.token_sums["policy_loss"]) == pytest.approx(expected, abs=1e-5)
    assert float(loss.token_sums["entropy"]) == pytest.approx(entropies, abs=1e-5)
    assert float(loss.token_sums["approx_kl"]) == pytest.approx(kl, abs=1e-5)
    assert float(loss.token_sums["clipfrac"]) == clipped > 0


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_tokens_past_the_end_change_neither_loss_nor_gradient(configure, garbage):
    config = configure(algorithm={"entropy_coef": 0.01})
    logits, rows = batch(with_critic=False)

    def run(rows: TrainBatch) -> tuple[Loss, torch.Tensor]:
        leaf = logits.float().clone().requires_grad_()
        loss = compute(config, leaf, rows)
        loss.total.backward()
        return loss, leaf.grad

    clean, clean_grad = run(rows)
    dirty, dirty_grad = run(
        replace(
            rows,
            old_logprobs=rows.old_logprobs.masked_fill(~rows.mask, garbage),
            advantages=rows.advantages.masked_fill(~rows.mask, garbage),
        )
    )
    assert torch.equal(dirty.total, clean.total)
    assert torch.equal(dirty_grad, clean_grad)
    assert (clean_grad[~rows.mask] == 0).all() and (clean_grad[rows.mask] != 0).any()
    for name, total in clean.token_sums.items():
        assert float(dirty.token_sums[name]) == float(total), name
    for name, value in clean.maxima.items():
        assert float(dirty.maxima[name]) == float(value), name


def test_gradient_of_the_policy_loss_by_finite_differences(configure, monkeypatch):
    """In double precision, away from the kinks of the clip."""
    from vlarl.policies import distribution

    monkeypatch.setattr(distribution, "_scaled", lambda logits, temperature: logits / temperature)  # float32 no more
    config = configure(algorithm={"entropy_coef": 0.02})
    logits, rows = batch(with_critic=False)
    leaf = logits.clone().requires_grad_()
    compute(config, leaf, rows).total.backward()
    numeric = torch.zeros_like(logits)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in logits.shape)).tolist():
        sides = []
        for step in (1e-6, -1e-6):
            moved = logits.clone()
            moved[tuple(index)] += step
            sides.append(float(compute(config, moved, rows).total))
        numeric[tuple(index)] = (sides[0] - sides[1]) / 2e-6
    torch.testing.assert_close(leaf.grad, numeric, atol=1e-7, rtol=1e-5)
    assert numeric.abs().max() > 1e-3


def test_while_the_critic_warms_up_only_the_value_loss_counts(configure):
    logits, rows = batch()
    leaf = logits.float().clone().requires_grad_()
    config = configure(algorithm={"name": "ppo"})
    loss = compute(config, leaf, rows, train_policy=False)
    loss.total.backward()
    assert leaf.grad is None or (leaf.grad == 0).all()
    assert loss.total.item() == pytest.approx(0.5 * float(loss.decision_sums["value_loss"]) / 3, abs=1e-6)


def test_microbatches_of_unequal_tokens_add_up_to_the_whole(configure):
    logits, rows = batch()
    config = configure(algorithm={"name": "ppo"})
    whole = compute(config, logits, rows).total.item()
    algorithm = build_algorithm(config.algorithm, TEMPERATURE)
    parts = [
        algorithm.loss(
            Scores(logits[i : i + 1], VALUES[i : i + 1]), rows.rows(torch.tensor([i])), OVER, train_policy=True
        ).total.item()
        for i in range(ROWS)
    ]
    assert sum(parts) == pytest.approx(whole, abs=1e-6)


def test_asymmetric_clip_by_hand():
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss, clipped = clipped_policy_loss(ratio, advantages, 0.2, 0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.28, 1.3, -0.7, 0.8, -2.2]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_clipped_value_loss_takes_the_worse_of_the_two():
    values, old, returns = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.9]), torch.tensor([1.0, 0.0])
    torch.testing.assert_close(value_loss(values, old, returns, 0.2), torch.tensor([0.32, 0.5]))
    torch.testing.assert_close(value_loss(values, old, returns, None), torch.tensor([0.0, 0.5]))


def test_k3_is_zero_at_equality_and_never_negative():
    x = torch.linspace(-3, 3, 31)
    assert float(k3(x, x).abs().max()) == 0
    assert (k3(torch.zeros_like(x), x) >= 0).all()
    assert float(k3(torch.tensor(0.0), torch.tensor(1.0))) == pytest.approx(2.718281828 - 2, abs=1e-6)


def test_an_empty_mask_sums_to_zero():
    assert float(masked_sum(torch.tensor([float("nan")]), torch.tensor([False]))) == 0.0
