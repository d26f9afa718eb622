"""What vLLM has to be told to run a transformers model, how prompts get in and texts out; imports no vLLM until it
runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import UsageError
from vlarl.policies.vlm.decisions import TextSample, text_decisions
from vlarl.policies.vlm.generation import max_tokens
from vlarl.policies.vlm.inputs import vlm_inputs

if TYPE_CHECKING:
    from vlarl.policies.vlm.policy import VlmPolicy

FRAMES_APART = frozenset({"qwen3_vl"})  # whose videos have the time of each frame between frames
NO_TOKEN = -1
WITH_IMAGES = frozenset({"qwen2_vl", "qwen2_5_vl"}) | FRAMES_APART  # families whose processed images vLLM is given


class VlmInVllm:
    """A language or vision-language model's side of `VllmModel`: vLLM's own class for it."""

    whole_vocabulary = True

    def __init__(self, policy: VlmPolicy) -> None:
        if policy.base is None:
            raise UsageError("a policy that is not on disk can't run in vLLM: save it and load it again.")
        _refuse_unsupported(policy)
        self.folder = policy.base.folder
        self._policy = policy
        config = policy.model.config
        text = config.get_text_config()
        self.max_positions = int(text.max_position_embeddings)
        self.head_size = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self.values_per_token = 2 * text.num_hidden_layers * heads * self.head_size
        self._reads_images = policy.processor.reads_images

    def register(self) -> None:
        """The classes are vLLM's own."""

    def arguments(self) -> dict[str, Any]:
        """Prompts are ids. With images vLLM still looks at the model's processor when it starts, and would normalise
        pixels a second time."""
        return {"mm_device_do_normalize": False} if self._reads_images else {"skip_tokenizer_init": True}

    def prompt(self, inputs: TensorRows, row: int, sampling: Sampling, longest: int) -> Any:
        """A row's ids, and its pixels with the ranges of tokens that stand for them."""
        from vlarl.policies.vlm.vllm.prompt import Layout, processed_prompt

        given = vlm_inputs(inputs)
        length, limit = int(given.lengths[row]), max_tokens(sampling)
        if length + limit > longest:
            raise UsageError(
                f"prompt {row} has {length} tokens, and a text may have {limit}: the engine supports {longest} "
                "together. Set vllm.max_model_len, or shorten one of them."
            )
        config = self._policy.model.config
        layout = Layout(
            tokens={name: getattr(config, f"{name}_token_id", NO_TOKEN) for name in ("image", "video")},
            merge=int(getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)),
            frames_apart=config.model_type in FRAMES_APART,
            positions=lambda one: self._policy.access.prefix(one, torch.device("cpu")).positions[:, 0],
        )
        return processed_prompt(given, row, layout)

    def sampling_arguments(self, sampling: Sampling) -> dict[str, Any]:
        """What ends a text and what may be sampled. The model's own end tokens are among `stop_token_ids`."""
        never = self._policy.access.placeholders
        return {
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": max_tokens(sampling),
            "min_tokens": sampling.min_tokens,
            "ignore_eos": True,
            "stop_token_ids": list(self._policy.stops(sampling).tokens),
            "logit_bias": {token: float("-inf") for token in never} or None,
        }

    def ends(self, ids: Sequence[int], sampling: Sampling) -> bool:
        """Whether the last token completes a stop string, by the same rule as in the torch engine."""
        stops = self._policy.stops(sampling)
        return bool(stops.strings) and len(ids) >= sampling.min_tokens and stops.reached(ids)

    def decisions(
        self, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], sampling: Sampling
    ) -> Decisions:
        """Texts as decisions; one that has reached neither a stop token nor a stop string was cut off."""
        ending = frozenset(self._policy.stops(sampling).tokens)
        sample = TextSample(
            ids=_padded([torch.tensor(row, dtype=torch.int64) for row in ids]),
            length=torch.tensor([len(row) for row in ids]),
            stopped=torch.tensor([row[-1] in ending or self.ends(row, sampling) for row in ids]),
        )
        return text_decisions(sample, _padded([torch.tensor(row, dtype=torch.float32) for row in logprobs]))


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _refuse_unsupported(policy: VlmPolicy) -> None:
    remedy = "use the torch engine: vllm.num_engines 0."
    kind = policy.model.config.model_type
    if policy.access.is_mixture:
        raise UsageError(f"{kind} is a mixture of experts, whose weights vLLM has by other names: {remedy}")
    if policy.processor.reads_images and kind not in WITH_IMAGES:
        known = ", ".join(sorted(WITH_IMAGES))
        raise UsageError(f"vLLM is given processed images of {known}, not of {kind}: {remedy}")
