"""RL trains without dropout, also adapters that were trained with it: the ratio starts at 1."""

import logging

import pytest
import torch
from fakes.decisions import annotated_update
from torch import nn

from vlarl.config.schema import LoraConfig, PolicyConfig
from vlarl.policies.load import load_policy
from vlarl.policies.tiny import init_tiny


@pytest.fixture
def dropped(tmp_path):
    """An adapter folder that was trained with dropout."""
    init_tiny("parallel", seed=3, chunk_length=2).save(tmp_path / "base")
    policy = load_policy(tmp_path / "base")
    policy.prepare_training(PolicyConfig(), LoraConfig(enabled=True, rank=4, dropout=0.5), seed=1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    policy.save(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_that_was_trained_with_dropout_continues_without_it(
    dropped, act, policy_batch, configure, build, caplog
):
    policy = load_policy(dropped)
    policy.prepare_training(PolicyConfig(), LoraConfig(), seed=1)
    policy.train()
    assert any(isinstance(m, nn.Dropout) and m.p == 0.5 for m in policy.modules()), "as it was saved"
    with caplog.at_level(logging.WARNING):
        learner = build(policy, configure(algorithm={"epochs": 1}))
    assert "trained with dropout (0.5), which RL does not use" in caplog.text
    result = annotated_update(learner, policy_batch(policy, act(policy)), 1)
    assert result.metrics["ratio_first_minibatch_error"] == 0.0
    assert not any(isinstance(m, nn.Dropout) for m in policy.modules())


def test_a_policy_without_dropout_is_left_alone_and_nothing_is_said(configure, build, caplog):
    policy = init_tiny("parallel", seed=3, chunk_length=2)
    before = [type(m) for m in policy.modules()]
    with caplog.at_level(logging.WARNING):
        build(policy, configure())
    assert [type(m) for m in policy.modules()] == before and "dropout" not in caplog.text
