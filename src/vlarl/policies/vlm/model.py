"""What is needed of a transformers model, whatever its family: positions, states of a pass, logits of states.

A pass ends at the states: logits over the whole vocabulary are computed from them in parts (scoring.py), never for a
whole batch at once. Positions are always given: a model that counts columns would count padding, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel

from vlarl.errors import UsageError
from vlarl.policies.base import TokenCount
from vlarl.policies.vlm.inputs import TOKEN_TYPES, VISION, VlmInputs

# Families whose images are a padded row for each prompt; all others read those of a batch end to end.
IMAGES_IN_ROWS = frozenset({"idefics2", "idefics3", "smolvlm", "mllama"})
PLACEHOLDERS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")


@dataclass(frozen=True)
class Pass:
    """What a pass gives: the last states of its tokens."""

    states: torch.Tensor  # [B, C, H]
    cache: Any  # keys and values of all tokens so far; None where it was not kept
    aux_loss: torch.Tensor | None  # scalar, the load-balance loss of a mixture of experts; None for other models
    tokens: TokenCount | None = None  # None where they were not counted


@dataclass(frozen=True)
class Prefix:
    """Prompts as the model reads them: padded on the left, so that every text begins in the same column."""

    ids: torch.Tensor  # [B, P] int64
    mask: torch.Tensor  # [B, P] bool
    positions: torch.Tensor  # [B, P] int64, or [3, B, P] where images have positions in time, height and width
    extra: dict[str, torch.Tensor]  # pixels, and what else the model reads with the prompt's tokens

    @property
    def next_position(self) -> torch.Tensor:
        """[B] of the first token after the prompt."""
        largest: torch.Tensor = self.positions.amax(dim=-1)
        return (largest.amax(dim=0) if largest.ndim == 2 else largest) + 1


class ModelAccess:
    """A model behind the few operations that sampling and scoring need. It holds no weights of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        if config.is_encoder_decoder:
            raise UsageError(f"{type(model).__name__} is an encoder-decoder, and only decoders are supported.")
        self.model = cast(Any, model)
        text = self.text_config = cast(Any, config.get_text_config())
        self.vocabulary: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.accepted = frozenset(inspect.signature(model.forward).parameters)
        self.images_in_rows = config.model_type in IMAGES_IN_ROWS
        self.is_mixture = "output_router_logits" in self.accepted
        self.has_grid_positions = hasattr(model.base_model, "get_rope_index")  # of images: in time, height and width
        found = {getattr(config, name, None) for name in PLACEHOLDERS}
        self.placeholders = tuple(sorted(index for index in found if isinstance(index, int)))
        # What some families do to the logits after the head: Gemma, Cohere, Granite.
        self._cap: float | None = getattr(text, "final_logit_softcapping", None)
        self._scale = float(getattr(text, "logit_scale", None) or 1.0) / float(
            getattr(text, "logits_scaling", None) or 1.0
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def prefix(self, inputs: VlmInputs, device: torch.device | None = None) -> Prefix:
        """Prompts as the model reads them, on its device, or on another."""
        inputs = inputs.to(self.device if device is None else device)
        mask = inputs.left_padded(inputs.attention_mask)
        ids = inputs.left_padded(inputs.ids)
        types = {
            name: inputs.left_padded(column)
            for name in TOKEN_TYPES
            if name in self.accepted and (column := getattr(inputs, name)) is not None
        }
        vision = self._vision(inputs)
        return Prefix(ids, mask, self._positions(ids, mask, types, vision), types | vision)

    def widened(self, prefix: Prefix, width: int) -> dict[str, torch.Tensor]:
        """What is read with the prompts, for a pass that also reads the next `width` tokens: all of them are text."""
        return {
            name: F.pad(tensor, (0, width)) if name in TOKEN_TYPES else tensor for name, tensor in prefix.extra.items()
        }

    def _vision(self, inputs: VlmInputs) -> dict[str, torch.Tensor]:
        """Pixels and what describes them, as the family reads them; empty where no row has any."""
        found = {}
        for name in VISION:
            ragged = getattr(inputs, name)
            if ragged is None or not int(ragged.counts.sum()):
                continue
            found[name] = ragged.padded() if self.images_in_rows else ragged.values
        return found

    def _positions(
        self, ids: torch.Tensor, mask: torch.Tensor, types: dict[str, torch.Tensor], vision: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        grids = {
            name: vision[name] for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts") if name in vision
        }
        if self.has_grid_positions and grids:
            index = self.model.base_model.get_rope_index
            positions: torch.Tensor = index(ids, attention_mask=mask.long(), **types, **grids)[0]
            return positions
        return (mask.cumsum(dim=1) - 1).clamp(min=0)

    def run(
        self,
        ids: torch.Tensor,  # [B, C]
        # [B, all tokens so far and these], or [B, 1, C, all columns of the cache]; None: the positions say which belong
        # together
        mask: torch.Tensor | None,
        positions: torch.Tensor,  # [B, C] or [3, B, C], or [4, 1, C] of packed samples
        extra: Mapping[str, Any] | None = None,
        *,
        cache: Any = None,
        keep_cache: bool = False,
    ) -> Pass:
        """One pass over these tokens, after those in the cache."""
        given: dict[str, Any] = {"input_ids": ids, "use_cache": keep_cache}
        given["attention_mask"] = mask.long() if mask is not None and mask.ndim == 2 else mask
        if "position_ids" in self.accepted:
            given["position_ids"] = positions
        if cache is not None:
            given["past_key_values"] = cache
        given |= extra or {}
        if self.is_mixture and not keep_cache:
            return self._run_mixture(given)
        output = self.model.base_model(**given)
        return Pass(output.last_hidden_state, output.past_key_values if keep_cache else None, None)

    def _run_mixture(self, given: dict[str, Any]) -> Pass:
        """The same through the whole model, which computes its load-balance loss; its states are taken on the way."""
        states: list[torch.Tensor] = []
        hook = self.model.base_model.register_forward_hook(lambda _, __, output: states.append(output[0]))
        try:
            output = self.model(**given, logits_to_keep=1, output_router_logits=True)
        finally:
            hook.remove()
        return Pass(states[0], None, output.aux_loss)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[…, H] -> […, V] float32."""
        logits: torch.Tensor = self.model.get_output_embeddings()(states).float() * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits

    @torch.no_grad()
    def check_logits(self) -> None:
        """Refuse a model that does more with its logits than is known here: every log-prob would be wrong."""
        ids = torch.arange(4, device=self.device)[None] % self.vocabulary
        found = self.logits(self.run(ids, torch.ones_like(ids), torch.arange(4, device=self.device)[None]).states)
        own = self.model(input_ids=ids).logits.float()
        if not torch.allclose(found, own, rtol=1e-2, atol=1e-2 * float(own.abs().max())):
            raise UsageError(
                f"{type(self.model).__name__} changes its logits in a way that is not supported: its log-probs would "
                "be wrong. Use a model of another family."
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress bars and its report on weights, of which the problems are errors here."""
    logs = cast(Any, transformers.logging)
    shown = logs.is_progress_bar_enabled()
    verbosity = logs.get_verbosity()
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if shown:
            logs.enable_progress_bar()


def max_positions(config: Any) -> int | None:
    """Tokens of prompt and text together that a model reads; None where its config does not limit them."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def remove_noise(model: nn.Module) -> None:
    """Set all dropout and all noise of routers to 0: RL compares log-probs of the same network before and after a step.

    Layers are kept, since some families read a rate from its layer.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "jitter" in name):
                setattr(module, name, 0.0)


def following(prefix: Prefix, width: int) -> torch.Tensor:
    """Positions of the next `width` tokens after the prompts, in the shape of the prompts' own."""
    positions = prefix.next_position[:, None] + torch.arange(width, device=prefix.ids.device)
    return positions if prefix.positions.ndim == 2 else positions.expand(3, -1, -1)
