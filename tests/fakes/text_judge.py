"""What transformers says of texts, each prompt alone and unpadded: in float64 it judges log-probs of any engine."""

from dataclasses import replace
from typing import Any

import torch
from fakes.decisions import split
from fakes.float_error import FloatJudge, exactly

from vlarl.decisions import Decisions
from vlarl.policies.vlm.inputs import VISION, VlmInputs
from vlarl.policies.vlm.policy import VlmPolicy


def media_of(policy: VlmPolicy, one: VlmInputs) -> dict[str, Any]:
    """Images and videos of one prompt, as the model's own forward pass takes them."""
    found = {}
    for name in VISION:
        if (ragged := getattr(one, name)) is not None and int(ragged.counts.sum()):
            found[name] = ragged.padded() if policy.processor.in_rows else ragged.values
    return found


def library_logits(policy: VlmPolicy, inputs: VlmInputs, decisions: Decisions) -> torch.Tensor:
    """[tokens, V] of all texts, end to end: each row alone and unpadded, by the model's own forward pass."""
    if policy.model.dtype == torch.float64 and policy.access.is_mixture:
        policy.model.set_experts_implementation("eager")  # the kernels of the others know no float64
    found = []
    for row, one in enumerate(split(inputs)):
        length = int(decisions.sample.length[row])
        given = {"input_ids": torch.cat([one.ids, decisions.sample.ids[row : row + 1, :length]], dim=1)}
        if one.mm_token_type_ids is not None:
            given["mm_token_type_ids"] = torch.nn.functional.pad(one.mm_token_type_ids, (0, length))
        found.append(policy.model(**given, **media_of(policy, one)).logits[0, -length - 1 : -1])
    return torch.cat(found)


@torch.no_grad()
def judges(
    policy: VlmPolicy, inputs: VlmInputs, decisions: Decisions, temperature: float
) -> tuple[FloatJudge, FloatJudge]:
    """Log-probs and entropies of all tokens in float64, and float32's own error over the whole vocabulary."""
    exact = (exactly(policy, lambda p: library_logits(p, inputs, decisions)) / temperature).log_softmax(-1)
    plain = (library_logits(policy, inputs, decisions) / temperature).log_softmax(-1)
    chosen = decisions.sample.ids[decisions.mask].unsqueeze(-1)
    of_logprobs = replace(FloatJudge.of(exact, plain), exact=exact.gather(-1, chosen).squeeze(-1))
    return of_logprobs, replace(of_logprobs, exact=-(exact.exp() * exact).sum(-1))


def check_texts(policy: VlmPolicy, inputs: VlmInputs, decisions: Decisions, temperature: float, factor: float) -> None:
    """The log-probs of an engine's texts are those of the policy over the whole vocabulary."""
    found, _ = judges(policy, inputs, decisions, temperature or 1.0)
    found.check(decisions.engine_logprobs[decisions.mask], factor)
