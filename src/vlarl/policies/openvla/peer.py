"""OpenVLA as transformers' own classes run it, and peft trains it: what `vlarl bench` compares with.

The language model is the library's, with its own layers, `generate` and loss; it shares the policy's tensors. The image
tokens are computed by the policy's towers, which are faster than the original's, so the difference is that of the
language model alone. Tokens are limited to the action ids, as the policy's are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from vlarl.decisions import Decisions, TensorRows
from vlarl.errors import UsageError
from vlarl.policies.openvla.config import language_config
from vlarl.policies.openvla.decisions import token_ids
from vlarl.policies.openvla.decoders import ParallelDecoder, embed_prefix
from vlarl.policies.openvla.inputs import openvla_inputs
from vlarl.policies.openvla.policy import OpenVLAPolicy

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0


class OnlyActions(LogitsProcessor):
    """Leaves the action ids to choose from."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] with those of all other ids at minus infinity."""
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self._first : self._last] = scores[:, self._first : self._last]
        return kept


class TransformersPeer:
    """The policy's weights in transformers' class for its language model."""

    name = "transformers"

    def __init__(self, policy: OpenVLAPolicy) -> None:
        if policy.has_adapter:
            raise UsageError("the peer shares a model's own weights: make it before the policy has adapters.")
        self.policy = policy
        self.language: Any = plain_language_model(policy)
        self._first, self._last = policy.config.first_action_id, policy.config.vocab_size
        self._count = policy.config.num_action_tokens

    @torch.no_grad()
    def generate(self, inputs: TensorRows) -> torch.Tensor:
        """[B, K*D] the greedy ids: by `generate`, or for a parallel decoder by one pass where all columns see all."""
        embeds = self.embeds(inputs)
        if isinstance(self.policy.decoder, ParallelDecoder):
            return self._parallel_logits(embeds).argmax(dim=-1) + self._first
        found: torch.Tensor = self.language.generate(
            inputs_embeds=embeds,
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device),
            max_new_tokens=self._count,
            min_new_tokens=self._count,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([OnlyActions(self._first, self._last)]),
        )
        return found

    @torch.no_grad()
    def prefill(self, inputs: TensorRows) -> torch.Tensor:
        """[B, 1, num_bins] the logits after the prompt, with the cache that `generate` fills."""
        out = self.language(inputs_embeds=self.embeds(inputs), use_cache=True, logits_to_keep=1)
        return cast(torch.Tensor, out.logits[..., self._first : self._last])

    def trainer(self, rank: int) -> PeftTrainer:
        """peft's adapters on the language model."""
        return PeftTrainer(self, rank)

    def embeds(self, inputs: TensorRows) -> torch.Tensor:
        """[B, S, H] prompt and image tokens, as the policy has them."""
        policy = self.policy
        prefix = embed_prefix(policy.model, openvla_inputs(inputs).to(policy.device), policy.proprio_projector)
        assert prefix.padding is None, "prompts of one length have no padding"
        return prefix.embeds

    def logits(self, inputs: TensorRows, ids: torch.Tensor) -> torch.Tensor:
        """[B, K*D, num_bins] of each of the given ids, after those before it."""
        with torch.no_grad():
            embeds = self.embeds(inputs)
            if not isinstance(self.policy.decoder, ParallelDecoder):
                embeds = torch.cat([embeds, self.policy.model.embed_tokens(ids[:, :-1])], dim=1)
        if isinstance(self.policy.decoder, ParallelDecoder):
            return self._parallel_logits(embeds)
        out = self.language(inputs_embeds=embeds, use_cache=False, logits_to_keep=self._count)
        return cast(torch.Tensor, out.logits[..., self._first : self._last])

    def _parallel_logits(self, embeds: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.policy.decoder, ParallelDecoder)
        with torch.no_grad():
            whole = torch.cat([embeds, *self.policy.decoder.action_part(self.policy.model, embeds)], dim=1)
        size = whole.shape[1]
        seen = torch.ones(len(whole), 1, size, size, dtype=torch.bool, device=whole.device)
        kept = self._count + 2  # from the last token of the prompt on
        out = self.language(inputs_embeds=whole, attention_mask=seen, use_cache=False, logits_to_keep=kept)
        return cast(torch.Tensor, out.logits[:, : self._count, self._first : self._last])


def plain_language_model(policy: OpenVLAPolicy) -> nn.Module:
    """transformers' class for the language model, on the policy's tensors."""
    config = language_config(policy.config.text)
    if config.tie_word_embeddings:
        raise UsageError("the peer has no way to share tied embeddings: leave peers out with --no-peers.")
    with torch.device("meta"):
        build = cast(Any, AutoModelForCausalLM).from_config  # untyped in the library
        language = build(config, attn_implementation="sdpa", dtype=policy.model.dtype)
    language.load_state_dict(policy.model.language_model.state_dict(), assign=True)
    # Its angles are not part of a state dict, and were made on the meta device.
    language.model.rotary_emb = type(language.model.rotary_emb)(config=config).to(policy.device)
    left = [name for name, tensor in (*language.named_parameters(), *language.named_buffers()) if tensor.is_meta]
    assert not left, f"not shared: {left}"
    language.requires_grad_(False)
    return cast(nn.Module, language.eval())


class PeftTrainer:
    """Plain peft: adapters on all linear layers of the language model, layers recomputed, cross-entropy of the action
    tokens, AdamW."""

    name = "peft"

    def __init__(self, peer: TransformersPeer, rank: int) -> None:
        from peft import LoraConfig, get_peft_model

        self._peer = peer
        config = LoraConfig(r=rank, lora_alpha=min(rank, 16), target_modules="all-linear")
        peer.language.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model = get_peft_model(peer.language, config)
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=LEARNING_RATE, weight_decay=0.0)

    def update(self, inputs: TensorRows, decisions: Decisions, microbatch_size: int) -> float:
        """One step of AdamW; returns the mean cross-entropy."""
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        rows, total = len(inputs), 0.0
        for begin in range(0, rows, microbatch_size):
            part = slice(begin, begin + microbatch_size)
            loss = -self._logprobs(inputs.rows(part), decisions.rows(part)).mean() * len(range(rows)[part]) / rows
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._trained, MAX_GRAD_NORM)
        self._optimizer.step()
        self._model.eval()
        return total

    @torch.no_grad()
    def logprobs(self, inputs: TensorRows, decisions: Decisions) -> torch.Tensor:
        """[B, K*D] of the action ids, at temperature 1."""
        return self._logprobs(inputs, decisions)

    def _logprobs(self, inputs: TensorRows, decisions: Decisions) -> torch.Tensor:
        config, device = self._peer.policy.config, self._peer.policy.device
        ids = token_ids(decisions).to(device)
        logits = self._peer.logits(inputs, ids).float()
        indices = (ids - config.first_action_id).flatten()
        return -F.cross_entropy(logits.flatten(0, 1), indices, reduction="none").view(ids.shape)
