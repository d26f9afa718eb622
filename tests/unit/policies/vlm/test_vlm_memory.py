"""Logits of a whole batch never exist at the same time, neither forward nor backward, packed or padded."""

import pytest
import torch
from fakes.memory import TensorMemory
from fakes.vlm_models import observation
from test_vlm_packing import with_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from vlarl.policies.vlm.decisions import TextSample, text_decisions

VOCABULARY, LENGTH, ROWS = 20_000, 48, 8
ALL_LOGITS = 4 * ROWS * LENGTH * VOCABULARY  # bytes in float32: 31 MB


@pytest.fixture(scope="module")
def policy(shared):
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
    made = with_model(shared("llama"), Qwen2Config, Qwen2ForCausalLM, **sizes)
    made.use_packing()
    return made


def update(policy, **options) -> TensorMemory:
    """The memory of an evaluation and its backward pass."""
    inputs = policy.process([observation("say " * (1 + row % 3)) for row in range(ROWS)])
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    sample = TextSample(ids, torch.full((ROWS,), LENGTH), torch.ones(ROWS, dtype=torch.bool))
    decisions = text_decisions(sample, torch.zeros(ids.shape))
    with TensorMemory() as memory:
        found = policy.evaluate(inputs, decisions, 1.0, **options)
        (found.logprobs.sum() + (found.entropy.sum() if options else 0.0)).backward()
    policy.zero_grad(set_to_none=True)
    return memory


@pytest.mark.parametrize("options", [{}, {"entropy_gradient": True}], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_logits_of_a_batch_are_never_in_memory(policy, packing, options, monkeypatch):
    monkeypatch.setattr(policy, "packing", packing)
    monkeypatch.setattr(policy, "positions_at_once", 8)
    memory = update(policy, **options)
    weights = sum(4 * p.numel() for p in policy.parameters())  # their gradients are made besides
    assert memory.largest < ALL_LOGITS / 10
    assert memory.peak - weights < ALL_LOGITS / 4
    monkeypatch.setattr(policy, "positions_at_once", ROWS * LENGTH)
    assert update(policy, **options).peak > ALL_LOGITS, "the measurement sees them where they are made at once"
