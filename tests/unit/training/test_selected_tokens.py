"""`algorithm.entropy_top_fraction` through the learner: what is not selected has no policy gradient at any ratio level."""

import pytest
import torch
from fakes.decisions import annotated

from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.distribution import token_entropy
from vlarl.policies.tiny import init_tiny


@pytest.mark.parametrize("level", ["token", "action", "chunk", "sequence"])
def test_only_the_least_certain_tokens_are_moved(act, policy_batch, configure, build, level):
    """By the gradient of each token's logits, which the policy is made to keep."""
    policy = init_tiny("parallel", seed=3, chunk_length=2)
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.mul_(10)  # entropies apart
    learner = build(policy, configure(algorithm={"entropy_top_fraction": 0.25, "ratio_level": level}))
    batch, rows = policy_batch(policy, act(policy)), torch.arange(6)
    score, seen = policy.score, []

    def kept(inputs, token_ids, **options):
        scores = score(inputs, token_ids, **options)
        if scores.logits.requires_grad:
            scores.logits.retain_grad()
            seen.append(scores.logits)
        return scores

    policy.score = kept
    prepared = learner._corrected(annotated(learner, batch, 1), WeightedMeans())
    learner._accumulate(learner._minibatch(prepared, rows, moved=False), rows, True, True)
    (logits,) = seen
    with torch.no_grad():
        entropy = token_entropy(logits, 1.0)
    moved = logits.grad.abs().sum(dim=-1) > 0
    assert int(moved.sum()) == -(-int(batch.mask.sum()) // 4)
    assert not (moved & ~batch.mask).any()
    assert entropy[moved].min() > entropy[batch.mask & ~moved].max()


def test_without_a_selection_all_executed_tokens_are_moved(act, policy_batch, configure, build):
    policy = init_tiny("parallel", seed=3, chunk_length=2)
    learner = build(policy, configure())
    batch = policy_batch(policy, act(policy))
    prepared = learner._corrected(annotated(learner, batch, 1), WeightedMeans())
    assert prepared.selected is None and torch.equal(prepared.advantages, batch.advantages)
