"""What every Policy promises engines and learners, asked of both decoders."""

import copy

import numpy as np
import torch
from fakes.float_error import logit_judge, value_judge

from vlarl.policies.distribution import greedy
from vlarl.policies.load import load_policy


def choose(logits: torch.Tensor, first: int) -> torch.Tensor:
    return greedy(logits)


def test_shapes_and_supports_agree(policy, observation):
    inputs = policy.process([observation(0), observation(1, "put the bowl on the plate and the cup on the tray")])
    num_tokens = policy.chunk_length * policy.action_dim
    ids, logits = policy.decode(inputs, choose)
    scores = policy.score(inputs, ids)
    assert ids.shape == (2, num_tokens) and ids.dtype == torch.int64
    assert logits.shape == scores.logits.shape == (2, num_tokens, policy.codec.num_bins)
    assert scores.logits.dtype == torch.float32 and scores.values is None
    assert policy.codec.first_id <= ids.min() and ids.max() < policy.codec.first_id + policy.codec.num_bins
    actions = policy.codec.decode(ids.numpy())
    assert actions.shape == (2, policy.chunk_length, policy.action_dim) and np.abs(actions).max() <= 1
    np.testing.assert_array_equal(policy.codec.decode(policy.codec.encode(actions)), actions)
    assert policy.unnormalize(actions).shape == actions.shape


def test_values_and_scores_read_the_same_state(policy, observation):
    policy.attach_value_head((8,), seed=1)
    torch.nn.init.normal_(policy.value_head.out.weight)
    inputs = policy.process([observation(0), observation(1, "open the drawer and close it")])
    ids, _ = policy.decode(inputs, choose)
    value_judge(policy, inputs).check(policy.score(inputs, ids).values)
    assert {n for n, _ in policy.named_parameters() if n.startswith("value_head.")}


def test_a_decision_may_have_several_values(policy, observation, tmp_path):
    head = policy.attach_value_head((8,), seed=1, num_values=3)
    torch.nn.init.normal_(head.out.weight)
    inputs = policy.process([observation(0), observation(1, "open the drawer and close it")])
    ids, _ = policy.decode(inputs, choose)
    values = policy.score(inputs, ids).values
    assert values.shape == (2, 3) and values.dtype == torch.float32 and values[0].unique().numel() == 3
    value_judge(policy, inputs).check(values)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.attach_value_head((8,), seed=2, num_values=3) is loaded.value_head
    assert torch.equal(loaded.values(inputs), policy.values(inputs))
    assert loaded.attach_value_head((8,), seed=2, num_values=2).out.out_features == 2
    loaded.detach_value_head()
    assert loaded.score(inputs, ids).values is None


def test_gradients_of_the_critic_alone_stop_before_the_trunk(policy, observation):
    policy.attach_value_head((8,), seed=1)
    torch.nn.init.normal_(policy.value_head.out.weight)
    inputs = policy.process([observation(0)])
    ids, _ = policy.decode(inputs, choose)
    scores = policy.score(inputs, ids, critic_only=True)
    assert not scores.logits.requires_grad
    logit_judge(policy, inputs, ids).check(scores.logits)
    scores.values.sum().backward()
    reached = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in policy.named_parameters() if name.startswith("value_head.")}


def test_a_critic_that_is_there_is_kept(policy, observation, tmp_path):
    head = policy.attach_value_head((8,), seed=1)
    torch.nn.init.normal_(head.out.weight)
    assert policy.attach_value_head((8,), seed=2) is head
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    loaded.attach_value_head((4, 4), seed=3)
    inputs = policy.process([observation(0)])
    assert torch.equal(loaded.values(inputs), policy.values(inputs))


def test_every_trainable_weight_but_the_critic_has_a_gradient_or_is_unused(policy, observation):
    inputs = policy.process([observation(0)])
    ids, _ = policy.decode(inputs, choose)
    policy.score(inputs, ids).logits.square().sum().backward()
    moved = sum(p.numel() for p in policy.parameters() if p.grad is not None and p.grad.abs().sum() > 0)
    assert moved > 0.85 * sum(p.numel() for p in policy.parameters())


def test_saving_and_loading_changes_nothing(policy, observation, tmp_path):
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert (loaded.chunk_length, loaded.action_dim, loaded.image_size) == (
        policy.chunk_length,
        policy.action_dim,
        policy.image_size,
    )
    for (name, ours), (other, theirs) in zip(policy.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    inputs = policy.process([observation(0)])
    assert torch.equal(policy.decode(inputs, choose)[1], loaded.decode(inputs, choose)[1])


def test_a_copy_is_independent(policy, observation):
    other = copy.deepcopy(policy)
    inputs = policy.process([observation(0)])
    before = policy.decode(inputs, choose)[1]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(policy.decode(inputs, choose)[1], before)
