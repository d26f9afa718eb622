"""The reference is what training started from: with adapters off, with other adapters, or with a copy of the weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.decisions import annotated, nothing, taken_ids
from fakes.float_error import FloatJudge, logprob_judge

from vlarl.algorithms.base import Estimate
from vlarl.algorithms.kl import k1, k3
from vlarl.config.schema import LoraConfig, PolicyConfig
from vlarl.policies.distribution import token_logprobs
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny
from vlarl.training.annotate import Annotations, reference_kl
from vlarl.training.batch import build_batch, with_estimates
from vlarl.training.checkpoint import CheckpointStore, restore
from vlarl.training.state import TrainerState

LORA = LoraConfig(enabled=True, rank=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "base"
    init_tiny("parallel", seed=3).save(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter on the base."""
    folder = tmp_path_factory.mktemp("reference") / "adapter"
    policy = adapted(base)
    stray(policy, 0.05)
    policy.save(folder)
    return folder


def adapted(path: Path, lora: LoraConfig = LORA) -> OpenVLAPolicy:
    policy = load_policy(path)
    policy.prepare_training(PolicyConfig(), lora, seed=1)
    return policy


def stray(policy: OpenVLAPolicy, size: float = 0.02) -> None:
    """Move everything that is trained."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def started(kind: str, base: Path, adapter: Path) -> tuple[OpenVLAPolicy, dict]:
    """A policy as a run starts with it, and the options that say so."""
    if kind == "full":
        return load_policy(base), {"policy": {"path": str(base)}}
    if kind == "fresh adapter":
        return adapted(base), {"policy": {"path": str(base)}, "lora": {"enabled": True, "rank": 4}}
    if kind == "adapter as policy.path":
        return adapted(adapter), {"policy": {"path": str(adapter)}}
    lora = {"adapter": str(adapter)}
    return adapted(base, LoraConfig(**lora)), {"policy": {"path": str(base)}, "lora": lora}


KINDS = ("full", "fresh adapter", "adapter as policy.path", "adapter as lora.adapter")


def seen_and_done(policy: OpenVLAPolicy, episode) -> tuple[OpenVLAInputs, torch.Tensor]:
    inputs = policy.process([t.observation for t in episode.transitions])
    return inputs, torch.from_numpy(np.stack([taken_ids(t) for t in episode.transitions]))


@torch.no_grad()
def scored(policy: OpenVLAPolicy, episode) -> torch.Tensor:
    inputs, ids = seen_and_done(policy, episode)
    return token_logprobs(policy.score(inputs, ids).logits, ids - policy.codec.first_id, 1.0)


def judge_of(policy: OpenVLAPolicy, episode) -> FloatJudge:
    return logprob_judge(policy, *seen_and_done(policy, episode), 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_logprobs_are_those_of_the_start_also_after_a_resume(
    kind, base, adapter, act, configure, build, tmp_path
):
    policy, options = started(kind, base, adapter)
    config = configure(kl={"coef": 0.1}, **options)
    learner = build(policy, config)
    assert (learner.reference.weights is None) == (kind == "fresh adapter"), "switching off copies nothing"
    (episode,) = act(policy, lengths=(3,))
    at_start, start = scored(policy, episode), judge_of(policy, episode)
    stray(policy)
    trained = {name: p.detach().clone() for name, p in policy.named_parameters()}
    now, moved = scored(policy, episode), judge_of(policy, episode)
    assert (now - at_start).abs().max() > 0.05

    def noted(learner) -> torch.Tensor:
        batch = build_batch([episode])
        assert batch.mask.all()
        return learner.annotate(batch, 1).ref_logprobs

    start.check(noted(learner))
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, trained[name]), "the policy is as it was"
        assert parameter.requires_grad == (name in dict(learner_trained(learner)))
    assert torch.equal(scored(policy, episode), now)

    folder = CheckpointStore(tmp_path, keep=2).save("step_000001", learner, TrainerState(iteration=1))
    resumed = load_policy(folder)
    resumed.prepare_training(PolicyConfig(), LORA.model_copy(update={"enabled": "lora" in options}), seed=1)
    again = build(resumed, config)
    restore(again, folder)
    moved.check(scored(resumed, episode))
    start.check(noted(again))


def learner_trained(learner):
    return [(name, parameter) for name, parameter, _ in learner.named_trained()]


def test_kl_of_executed_tokens_only(trajectory, configure):
    episodes = [trajectory([[0] * 3], num_executed=[2], seed=1), trajectory([[0] * 3, [0] * 3], num_executed=[3, 1])]
    batch = build_batch(episodes)
    learner = batch.decisions.engine_logprobs + 3  # the engine's mismatch is not charged
    reference = learner - torch.tensor([0.5, 0.25, 0.25])[:, None]
    noted = Annotations(logprobs=learner, ref_logprobs=reference).onto(batch, configure())
    first, second = reference_kl(noted, episodes, "k1")
    assert first.shape == (1, 21) and second.shape == (2, 21)
    np.testing.assert_allclose(first[0], [0.5] * 14 + [0.0] * 7, atol=1e-6)
    np.testing.assert_allclose(second[0], 0.25, atol=1e-6)
    np.testing.assert_allclose(second[1], [0.25] * 7 + [0.0] * 14, atol=1e-6)
    np.testing.assert_allclose(reference_kl(noted, episodes, "k3")[1][0], np.exp(-0.25) - 1 + 0.25, atol=1e-6)


@pytest.mark.parametrize("missing", ["logprobs", "ref_logprobs"])
def test_a_kl_without_one_of_the_two_log_probs_is_refused(trajectory, configure, missing):
    episodes = [trajectory([[0] * 3])]
    batch = build_batch(episodes)
    columns = {name: torch.zeros(1, 21) for name in ("logprobs", "ref_logprobs") if name != missing}
    with pytest.raises(AssertionError, match="annotate the batch first"):
        reference_kl(Annotations(**columns).onto(batch, configure()), episodes, "k1")


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_kl_to_the_reference_is_measured_and_steers_its_coefficient(place, act, configure, build):
    policy = init_tiny("parallel", seed=3)
    estimator = "k1" if place == "reward" else "k3"
    kl = {"coef": 0.1, "place": place, "estimator": estimator, "target": 1e-4, "horizon": 100}
    learner = build(policy, configure(kl=kl, optim={"lr": 0.0}, algorithm={"epochs": 1}))
    stray(policy)
    episodes = act(policy)
    zeros = [np.zeros((len(episode.transitions), 1), np.float32) for episode in episodes]
    batch = with_estimates(build_batch(episodes), episodes, [Estimate(z) for z in zeros], "chunk")
    batch = annotated(learner, batch, 1)
    result = learner.update(batch, 1, nothing)
    estimate = {"k1": k1, "k3": k3}[estimator](batch.decisions.engine_logprobs, batch.ref_logprobs)
    expected = float(estimate[batch.mask].mean())
    assert result.metrics["kl_ref"] == pytest.approx(expected, rel=1e-3, abs=1e-6) and abs(expected) > 1e-3
    assert result.metrics["kl_coef"] == 0.1
    error = 0.2 if expected > 0 else -0.2  # far off the target, so the largest step: 3 episodes of a horizon of 100
    assert learner.kl.coef == pytest.approx(0.1 * (1 + error * 3 / 100))
    moved = result.metrics["grad_norm"]
    assert (moved > 0) == (place == "loss"), "without advantages, only a term of the loss pulls"


def test_without_a_penalty_nothing_is_kept_or_scored(policy, act, configure, build):
    learner = build(policy, configure())
    assert learner.reference is None
    assert learner.annotate(build_batch(act(policy)), 1).ref_logprobs is None
