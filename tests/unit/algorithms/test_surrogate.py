"""Whole losses: by hand, by finite differences, in microbatches, and with garbage where nothing was executed."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_problem import (
    BINS,
    ROWS,
    STEPS,
    TEMPERATURE,
    TOKENS,
    Actor,
    compute,
    evaluate,
    logprobs_of,
    make,
    values_of,
    with_sequence_ratio,
)

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.base import AlgorithmContext, Loss
from vlarl.algorithms.surrogate import clipped_gradient, clipped_ratio
from vlarl.config.schema import AlgorithmConfig, Config, KlConfig
from vlarl.decisions import TrainBatch
from vlarl.policies import distribution
from vlarl.policies.base import Evaluation
from vlarl.policies.openvla.decisions import token_ids

EVERYTHING = {"entropy_coef": 0.02, "action_reconstruction_coef": 0.3}
LEVELS = ["token", "action", "chunk", "sequence"]
MEANS = ["token_mean", "sequence_mean"]
WIDE = {"clip_low": 0.2, "clip_high": 0.28}  # GSPO's own range would clip all ratios here
CASES = [
    *({"name": "grpo", "ratio_level": level, "aggregate": mean} | WIDE for level, mean in product(LEVELS, MEANS)),
    *({"name": "cpgd", "aggregate": mean, "policy_drift_coef": 0.4} for mean in MEANS),
    *(
        {"name": "ppo", "gae_level": level, "cliprange_value": c}
        for level in ("chunk", "step", "token")
        for c in (0.2, None)
    ),
    {"name": "ppo", "gae_level": "token", "policy_loss": "cpg", "policy_drift_coef": 0.4},
    {"name": "rloo", "policy_loss": "cpg"},
    {"name": "grpo", "dual_clip": 1.1},
    {"name": "reinforce", "clip_low": 0.1, "clip_high": 0.1},
]
VALUES = {"chunk": 1, "step": STEPS, "token": TOKENS}


def name_of(case: dict[str, object]) -> str:
    return "-".join(str(value) for value in case.values())


def configured(case: dict[str, object], estimator: str = "k3") -> Config:
    return Config.model_validate({"algorithm": {**case, **EVERYTHING}, "kl": {"coef": 0.5, "estimator": estimator}})


def problem(case: dict[str, object]) -> tuple[torch.Tensor, TrainBatch, torch.Tensor | None]:
    """Logits, batch and values of a case. A trajectory's ratio is compared with the objective of whole trajectories."""
    whole = case.get("ratio_level") == "sequence"
    num_values = VALUES[str(case.get("gae_level", "chunk"))]
    logits, batch = make(str(case.get("aggregate", "token_mean")), num_values, by_trajectory=whole)
    batch = with_sequence_ratio(logits, batch) if whole else batch
    return logits, batch, values_of(batch) if case["name"] == "ppo" else None


@pytest.fixture
def in_double_precision(monkeypatch):
    monkeypatch.setattr(distribution, "_scaled", lambda logits, temperature: logits / temperature)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_by_central_differences(case, estimator, in_double_precision):
    """Of logits and values, in double precision; the ratio of a trajectory is recomputed at every point."""
    config = configured(case, estimator)
    logits, batch, values = problem(case)

    def total(logits: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        whole = case.get("ratio_level") == "sequence"
        here = with_sequence_ratio(logits, batch) if whole else batch
        return compute(config, logits, here, values, kl_coef=0.5).total

    leaves = [leaf.clone().requires_grad_() for leaf in (logits, values) if leaf is not None]
    total(leaves[0], leaves[1] if len(leaves) > 1 else None).backward()
    for number, leaf in enumerate(leaves):
        numeric = torch.zeros_like(leaf)
        for index in product(*(range(n) for n in leaf.shape)):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [part.detach().clone() for part in leaves]
                moved[number][index] += step
                sides.append(float(total(moved[0], moved[1] if len(moved) > 1 else None)))
            numeric[index] = (sides[0] - sides[1]) / 2e-6
        torch.testing.assert_close(leaf.grad, numeric, atol=1e-7, rtol=1e-5)
        assert numeric.abs().max() > 1e-3


@pytest.mark.parametrize("sizes", [[1] * ROWS, [3, 1], [1, 3]], ids=str)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_microbatches_add_up_to_the_gradient_of_the_whole(case, sizes):
    config = configured(case)
    logits, batch, values = problem(case)
    num_values = int(batch.value_mask.sum())

    def gradients(cuts: list[int]) -> tuple[float, list[torch.Tensor]]:
        leaves = [leaf.clone().requires_grad_() for leaf in (logits, values) if leaf is not None]
        total = 0.0
        for rows in torch.arange(ROWS).split(cuts):
            part = [leaf[rows] for leaf in leaves]
            critic = part[1] if len(part) > 1 else None
            loss = compute(config, part[0], batch.rows(rows), critic, kl_coef=0.5, num_values=num_values)
            loss.total.backward()
            total += float(loss.total.detach())
        return total, [leaf.grad for leaf in leaves]

    whole_total, whole = gradients([ROWS])
    total, pieces = gradients(sizes)
    assert total == pytest.approx(whole_total, abs=1e-6)
    for piece, expected in zip(pieces, whole, strict=True):
        torch.testing.assert_close(piece, expected, atol=1e-6, rtol=0)
        assert expected.abs().max() > 1e-3


@settings(max_examples=60)
@given(case=st.sampled_from(CASES), data=st.data())
def test_garbage_where_nothing_was_executed_changes_nothing(case, data):
    """NaN, infinities and huge values in every masked element don't change loss, gradients and metrics."""
    config = configured(case)
    logits, batch, values = problem(case)
    garbage = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, -1e30]))

    def run(dirty: bool) -> tuple[object, list[torch.Tensor]]:
        def fill(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(~mask, garbage) if dirty else x

        here = replace(
            batch,
            old_logprobs=fill(batch.old_logprobs, batch.mask),
            advantages=fill(batch.advantages, batch.mask),
            ref_logprobs=fill(batch.ref_logprobs, batch.mask),
            returns=fill(batch.returns, batch.value_mask),
            old_values=fill(batch.old_values, batch.value_mask),
        )
        leaves = [fill(logits.float(), batch.mask[..., None].expand_as(logits))]
        leaves += [] if values is None else [fill(values, batch.value_mask)]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        loss = compute(config, leaves[0], here, leaves[1] if len(leaves) > 1 else None, kl_coef=0.5)
        loss.total.backward()
        return loss, [leaf.grad for leaf in leaves]

    (clean, clean_gradients), (dirty, dirty_gradients) = run(False), run(True)
    assert torch.equal(dirty.total, clean.total)
    for ours, expected in zip(dirty_gradients, clean_gradients, strict=True):
        assert torch.equal(ours, expected)
    assert (clean_gradients[0][~batch.mask] == 0).all() and (clean_gradients[0][batch.mask] != 0).any()
    for kind in ("token_sums", "decision_sums", "maxima"):
        assert {k: float(v) for k, v in getattr(dirty, kind).items()} == {
            k: float(v) for k, v in getattr(clean, kind).items()
        }


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_that_are_not_selected_have_no_policy_gradient_at_any_level(case):
    """Every second one is not; the others keep theirs. Without the terms that are for all tokens."""
    logits, batch, values = problem(case)
    selected = batch.mask & (torch.arange(TOKENS) % 2 == 0)
    batch = replace(batch, selected=selected, advantages=torch.where(selected, batch.advantages, 0.0))
    leaf = logits.float().requires_grad_()
    config = Config.model_validate({"algorithm": case | {"policy_drift_coef": 0.0}})
    compute(config, leaf, replace(batch, ref_logprobs=None), values).total.backward()
    moved = leaf.grad.abs().sum(dim=-1) > 0
    assert moved.any() and not (moved & ~selected).any()
    if case.get("ratio_level") in ("action", "chunk"):
        assert (leaf.grad[selected].abs().sum() > 0).all()


def test_a_shared_ratio_has_the_value_of_all_its_tokens_selected_or_not():
    logits, batch = make()
    logprobs = logprobs_of(logits, batch)
    context = AlgorithmContext(AlgorithmConfig(ratio_level="chunk"), KlConfig(), TEMPERATURE)
    old = torch.where(batch.mask, batch.old_logprobs.float(), logprobs)
    some = replace(batch, selected=batch.mask & (torch.arange(TOKENS) % 2 == 0))
    everything, part = (clipped_ratio(logprobs, old, b, context).ratio for b in (batch, some))
    assert torch.equal(everything, part) and (everything - 1).abs().max() > 0.1


def test_a_chunk_that_has_become_unlikely_beyond_all_bounds_makes_no_nan():
    """Its log-ratios sum to hundreds: before they were bounded, 0 * inf became the gradient of all weights."""
    logits, batch = make()
    old_logprobs, advantages = (batch.old_logprobs - 100).float(), batch.advantages.abs().float()
    batch = replace(batch, old_logprobs=old_logprobs, advantages=advantages)
    for level in ("token", "action", "chunk"):
        leaf = logits.float().requires_grad_()
        loss = compute(Config.model_validate({"algorithm": {"ratio_level": level}}), leaf, batch)
        loss.total.backward()
        assert loss.total.isfinite() and leaf.grad.isfinite().all()
        assert all(x.isfinite() for part in (loss.token_sums, loss.maxima) for x in part.values())


@pytest.mark.parametrize("name", ["grpo", "cpgd"])
def test_the_clip_range_of_an_algorithm_reaches_its_loss(name):
    """Half of all ratios lie outside of it in the direction of their advantage, none with bounds that are far away."""
    logits, batch = make()

    def clipped(**options: float) -> float:
        config = Config.model_validate({"algorithm": {"name": name} | options})
        return float(compute(config, logits, batch).token_sums["clipfrac"])

    log_ratio = logprobs_of(logits, batch) - batch.old_logprobs
    high = ((log_ratio > torch.tensor(1.28).log()) & (batch.advantages > 0))[batch.mask].sum()
    low = ((log_ratio < torch.tensor(0.8).log()) & (batch.advantages < 0))[batch.mask].sum()
    assert clipped() == int(high + low) and high > 0 < low
    assert clipped(clip_low=1.0) == int(high) and clipped(clip_high=50.0) == int(low)


@pytest.mark.parametrize("mean", MEANS)
def test_the_loss_by_hand(mean):
    """Token by token in plain Python: surrogate, entropy, KL, reconstruction, and their metrics."""
    logits, batch = make(mean)
    config = configured({"name": "grpo", "aggregate": mean, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.1})
    loss = compute(config, logits, batch, kl_coef=0.5)
    bins, sums, expected = Actor().bin_values().double(), dict.fromkeys(loss.token_sums, 0.0), 0.0
    for i in range(ROWS):
        for t in range(int(batch.mask[i].sum())):
            logprobs = (logits[i, t] / TEMPERATURE).log_softmax(-1)
            index = int(token_ids(batch.decisions)[i, t])
            log_ratio = float(logprobs[index] - batch.old_logprobs[i, t])
            ratio, advantage = torch.tensor(log_ratio).exp().item(), float(batch.advantages[i, t])
            bounded = min(max(ratio, 0.8), 1.28)
            clipped = max(-advantage * ratio, -advantage * bounded)
            surrogate = min(clipped, -1.1 * advantage) if advantage < 0 else clipped
            away = float(batch.ref_logprobs[i, t] - logprobs[index])
            terms = {
                "policy_loss": surrogate,
                "entropy": float(-(logprobs.exp() * logprobs).sum()),
                "clipfrac": float(-advantage * bounded > -advantage * ratio),
                "dual_clipfrac": float(surrogate < clipped),
                "approx_kl": ratio - 1 - log_ratio,
                "kl_ref": torch.tensor(away).exp().item() - away - 1,
                "action_reconstruction": float((logprobs.exp() @ bins - bins[index]) ** 2),
            }
            for name, value in terms.items():
                sums[name] += value
            term = surrogate - 0.02 * terms["entropy"] + 0.5 * terms["kl_ref"] + 0.3 * terms["action_reconstruction"]
            expected += float(batch.weights[i, t]) * term
    assert float(loss.total) == pytest.approx(expected, abs=1e-5)
    assert {name: float(x) for name, x in loss.token_sums.items()} == pytest.approx(sums, abs=1e-5)
    assert sums["clipfrac"] > 0 and sums["dual_clipfrac"] > 0


def test_the_value_loss_by_hand_counts_executed_steps_alone():
    _, batch = make(num_values=STEPS)
    logits, values = torch.zeros(ROWS, TOKENS, BINS), values_of(batch)
    config = Config.model_validate({"algorithm": {"name": "ppo", "cliprange_value": None, "vf_coef": 0.7}})
    loss = compute(config, logits, batch, values, train_policy=False)
    executed = torch.arange(STEPS)[None] < torch.tensor([[3], [2], [1], [3]])
    errors = 0.5 * (values - batch.returns) ** 2
    assert float(loss.total) == pytest.approx(0.7 * float(errors[executed].mean()), abs=1e-6)
    by_decision = sum(float(errors[i][executed[i]].mean()) for i in range(ROWS))
    assert float(loss.decision_sums["value_loss"]) == pytest.approx(by_decision, abs=1e-6)


def test_while_the_critic_warms_up_only_the_value_loss_counts():
    logits, batch, values = problem({"name": "ppo"})
    leaf = logits.float().requires_grad_()
    loss = compute(configured({"name": "ppo"}), leaf, batch, values.requires_grad_(), train_policy=False)
    loss.total.backward()
    assert leaf.grad is None or (leaf.grad == 0).all()
    assert values.grad.abs().max() > 0
    assert loss.total.item() == pytest.approx(0.5 * float(loss.decision_sums["value_loss"]) / ROWS, abs=1e-6)


def test_a_kl_in_the_reward_is_reported_and_not_in_the_loss():
    logits, batch = make()
    in_reward = {"coef": 0.5, "place": "reward", "estimator": "k1"}
    config = Config.model_validate({"kl": in_reward})
    with_reference = compute(config, logits, batch, kl_coef=0.5)
    without = compute(config, logits, replace(batch, ref_logprobs=None), kl_coef=0.5)
    assert float(with_reference.total) == float(without.total)
    logprobs = logprobs_of(logits, batch)
    expected = float((logprobs - batch.ref_logprobs)[batch.mask].sum())
    assert float(with_reference.token_sums["kl_ref"]) == pytest.approx(expected, abs=1e-5)
    assert "kl_ref" not in without.token_sums


def test_a_policys_own_loss_is_weighted_by_the_microbatchs_fraction():
    logits, batch = make()
    config = Config.model_validate({"algorithm": {"aux_loss_coef": 0.1}})
    algorithm = build_algorithm(config.algorithm, TEMPERATURE)

    def total(rows: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        part = batch.rows(rows)
        evaluation = replace(evaluate(config, logits[rows], part, None), aux_loss=aux)
        return algorithm.loss(evaluation, part, value_weight=1.0, kl_coef=0.0, train_policy=True).total

    aux = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    everything = torch.arange(ROWS)
    assert (total(everything, aux) - total(everything, None)).item() == pytest.approx(0.3, abs=1e-6)
    sum(total(rows, aux) for rows in everything.split([1, 3])).backward()
    assert float(aux.grad) == pytest.approx(0.1, abs=1e-6)


def test_without_weights_or_advantages_or_values_or_bins_the_loss_says_what_is_missing():
    logits, batch = make()
    with pytest.raises(ValueError, match="no weights of its elements"):
        compute(Config(), logits, replace(batch, weights=None))
    with pytest.raises(ValueError, match="no advantages"):
        compute(Config(), logits, replace(batch, advantages=None))
    with pytest.raises(ValueError, match="value head"):
        compute(Config.model_validate({"algorithm": {"name": "ppo"}}), logits, batch)
    reconstructing = Config.model_validate({"algorithm": {"action_reconstruction_coef": 0.1}})
    without = evaluate(Config(), logits, batch, None)
    with pytest.raises(ValueError, match="needs a policy that finds action_reconstruction"):
        build_algorithm(reconstructing.algorithm, TEMPERATURE).loss(
            without, batch, value_weight=1.0, kl_coef=0.0, train_policy=True
        )


def test_the_first_ratio_is_one_and_says_so():
    logits, batch = make()
    fresh = replace(batch, old_logprobs=logprobs_of(logits, batch))
    loss = compute(Config(), logits, fresh)
    assert float(loss.maxima["ratio_error"]) == 0 and float(loss.maxima["ratio_max"]) == 1


@pytest.mark.parametrize("case", [case for case in CASES if case.get("ratio_level") != "sequence"], ids=name_of)
def test_without_old_log_probs_the_ratio_starts_at_the_passs_own(case):
    """Loss, gradient and metrics are those of a batch whose old log-probs were found by an equal pass."""
    logits, batch, values = problem(case)

    def run(old: torch.Tensor | None) -> tuple[Loss, torch.Tensor]:
        leaf = logits.float().requires_grad_()
        loss = compute(configured(case), leaf, replace(batch, old_logprobs=old), values, kl_coef=0.5)
        loss.total.backward()
        return loss, leaf.grad

    (without, gradient), (given, expected) = run(None), run(logprobs_of(logits.float(), batch))
    assert torch.equal(gradient, expected) and gradient.abs().max() > 1e-3
    assert torch.equal(without.total, given.total)
    assert {k: float(v) for k, v in without.token_sums.items()} == {k: float(v) for k, v in given.token_sums.items()}
    assert float(without.maxima["ratio_error"]) == 0 and float(without.maxima["ratio_max"]) == 1


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_what_a_policy_says_of_masked_elements_changes_nothing(garbage):
    """`Evaluation` may hold anything there: loss and gradients are those of zeros."""
    logits, batch = make()
    config = configured({"name": "grpo", "dual_clip": 1.1})
    algorithm = build_algorithm(config.algorithm, TEMPERATURE, config.kl)
    found = evaluate(config, logits.float(), batch, None)

    def run(fill: float) -> list[torch.Tensor]:
        columns = found.logprobs, found.entropy, found.extras["action_reconstruction"]
        leaves = [column.detach().masked_fill(~batch.mask, fill).requires_grad_() for column in columns]
        evaluation = Evaluation(leaves[0], leaves[1], extras={"action_reconstruction": leaves[2]})
        loss = algorithm.loss(evaluation, batch, value_weight=1.0, kl_coef=0.5, train_policy=True)
        loss.total.backward()
        return [loss.total, *loss.token_sums.values(), *loss.maxima.values(), *(leaf.grad for leaf in leaves)]

    clean, dirty = run(0.0), run(garbage)
    assert len(clean) == len(dirty) > 10
    assert all(torch.equal(ours, expected) for ours, expected in zip(dirty, clean, strict=True))


def test_cpgds_drift_pulls_back_through_the_algorithm():
    """For a good action far beyond the clip it is the only force that does."""
    _, batch = make()
    batch = replace(batch, advantages=torch.ones_like(batch.advantages))
    logprobs = (batch.old_logprobs + 5.5).requires_grad_()
    options = AlgorithmConfig(name="cpgd", policy_drift_coef=1.0)
    context = AlgorithmContext(options, KlConfig(), TEMPERATURE)
    clipped_gradient(logprobs, batch.old_logprobs, batch, context).loss.sum().backward()
    assert (logprobs.grad > 1).all()


ALGORITHMS = ["grpo", "rloo", "group_norm", "reinforce", "reinforce_baseline", "reinforce_pp", "ppo"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_cpg_the_gradient_of_any_algorithm_is_that_of_the_log_prob_up_to_the_clip(name):
    """-weight x advantage for each token, whatever its ratio; none beyond the bound in the advantage's direction."""
    _, batch = make()
    case = {"name": name, "policy_loss": "cpg", "clip_low": 0.2, "clip_high": 0.28, "vf_coef": 0.0}
    config = Config.model_validate({"algorithm": case})
    logprobs = (batch.decisions.engine_logprobs.double() + 0.1).requires_grad_()
    evaluation = Evaluation(logprobs, torch.zeros_like(logprobs), values_of(batch))
    algorithm = build_algorithm(config.algorithm, TEMPERATURE)
    algorithm.loss(
        evaluation, replace(batch, ref_logprobs=None), value_weight=0.0, kl_coef=0.0, train_policy=True
    ).total.backward()
    ratio = (logprobs - batch.old_logprobs).detach().exp()
    beyond = torch.where(batch.advantages > 0, ratio > 1.28, ratio < 0.8)
    counted = batch.mask & ~beyond
    assert (batch.mask & beyond).any() and (counted & ((ratio - 1).abs() > 0.05)).any(), "tokens of both kinds"
    expected = torch.where(counted, -batch.weights * batch.advantages, 0.0)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-12, atol=1e-15)


def test_cpgd_is_grpo_with_the_loss_cpg_and_every_other_algorithm_clips_its_ratio():
    logits, batch = make()
    shared = {"policy_drift_coef": 0.4}
    by_name = compute(configured({"name": "cpgd"} | shared), logits, batch, None, kl_coef=0.5)
    by_loss = compute(configured({"name": "grpo", "policy_loss": "cpg"} | shared), logits, batch, None, kl_coef=0.5)
    assert torch.equal(by_name.total, by_loss.total)
    for name in ALGORITHMS:
        values = values_of(batch) if name == "ppo" else None
        by_default, clipped, other = (
            compute(configured({"name": name} | case), logits, batch, values, kl_coef=0.5).total
            for case in ({}, {"policy_loss": "clip"}, {"policy_loss": "cpg"})
        )
        assert torch.equal(by_default, clipped) and not torch.equal(clipped, other)
