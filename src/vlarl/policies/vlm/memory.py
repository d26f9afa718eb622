"""Estimates a language model's device memory from its config alone: for rollouts, and for updates of adapters.

Both count tensors at the peak, like `torch.cuda.max_memory_allocated`; the CUDA context is extra. Prompts and texts
have the lengths below. Logits over the vocabulary exist for one position of each text in a rollout, and for one chunk
of positions (scoring.py) in an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from vlarl.policies.adapters import linear_names
from vlarl.policies.family import BYTES, FLOAT32, DtypeName, MemoryEstimate, copied_bytes
from vlarl.policies.quantize import BLOCK, QUANTIZED_BYTES, UNPACKED_BYTES
from vlarl.policies.vlm.generation import DEFAULT_MAX_TOKENS
from vlarl.policies.vlm.policy import UNADAPTED
from vlarl.policies.vlm.scoring import CHUNK_BYTES

PROMPT_LENGTH = 512  # tokens, those of an image included
IMAGE_TOKENS = 256  # of them, where the model reads images
TEXT_LENGTH = DEFAULT_MAX_TOKENS
LOGIT_COPIES = 4  # logits, their softmax, its gradient and a copy that is sorted or masked


@dataclass(frozen=True)
class Tower:
    """Widths of a stack of layers."""

    layers: int
    hidden: int
    inner: int  # of the MLP, or of the experts that a token passes through
    keys: int  # and values

    @property
    def saved(self) -> int:
        """Values of a token that a layer with adapters saves for its backward pass, without their low-rank products:
        its input, two norms, the state between them, queries, keys, values, attention's output, four inner tensors."""
        return 6 * self.hidden + 2 * self.keys + 4 * self.inner

    @property
    def alive(self) -> int:
        """Values of a token in the MLP of a layer without gradients."""
        return 5 * self.hidden + 3 * self.inner


class Sizes:
    """How many values the model has, and a pass over some rows makes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config: Any = model.config
        text = config.get_text_config()
        self.vocabulary: int = text.vocab_size
        self.text = _tower(text)
        vision = getattr(config, "vision_config", None)
        self.vision = None if vision is None else _tower(vision)
        merged = int(getattr(vision, "spatial_merge_size", None) or getattr(config, "scale_factor", None) or 1)
        self.patches = 0 if vision is None else IMAGE_TOKENS * merged**2  # of a prompt

    def weights(self, dtype: DtypeName, quantize: Literal[4, 8] | None) -> int:
        """Bytes of the model."""
        whole = sum(p.numel() for p in self.model.parameters())
        packed = sum(self._packed(quantize))
        return (whole - packed) * BYTES[dtype] + round(packed * QUANTIZED_BYTES[quantize or 8])

    def unpacked(self, quantize: Literal[4, 8] | None) -> int:
        """Bytes of the largest quantised matrix while a product reads it."""
        return 0 if quantize is None else max(self._packed(quantize), default=0) * UNPACKED_BYTES[quantize]

    def adapter_weights(self, rank: int) -> int:
        """Values in all adapters: two matrices for each linear layer."""
        return sum(rank * (layer.in_features + layer.out_features) for layer in self._linears())

    def low_rank_products(self, rank: int) -> int:
        """Values that adapters save for each token, averaged over the layers of the language model."""
        return rank * max(len(self._linears()) // max(self.text.layers, 1), 1)

    def _linears(self) -> list[nn.Linear]:
        found = [self.model.get_submodule(name) for name in linear_names(self.model, UNADAPTED)]
        return [layer for layer in found if isinstance(layer, nn.Linear)]

    def _packed(self, bits: Literal[4, 8] | None) -> list[int]:
        """Weights of each layer that is quantised."""
        if bits is None:
            return []
        return [layer.weight.numel() for layer in self._linears() if bits == 8 or layer.in_features % BLOCK == 0]


def estimate_rollout(
    model: PreTrainedModel, batch_size: int, dtype: DtypeName, quantize: Literal[4, 8] | None = None
) -> MemoryEstimate:
    """Sampling texts for a batch of prompts, without gradient."""
    sizes, width = Sizes(model), BYTES[dtype]
    text = sizes.text
    cache = batch_size * (PROMPT_LENGTH + TEXT_LENGTH) * text.layers * 2 * text.keys * width
    logits = LOGIT_COPIES * batch_size * sizes.vocabulary * FLOAT32
    reading = batch_size * PROMPT_LENGTH * text.alive * width
    seeing = 0 if sizes.vision is None else batch_size * sizes.patches * sizes.vision.alive * width
    peak = max(logits, reading, seeing) + sizes.unpacked(quantize)
    return MemoryEstimate(sizes.weights(dtype, quantize), activations=peak, cache=cache)


def estimate_lora_update(
    model: PreTrainedModel,
    microbatch_size: int,
    dtype: DtypeName,
    rank: int,
    gradient_checkpointing: bool,
    quantize: Literal[4, 8] | None = None,
) -> MemoryEstimate:
    """An update of adapters of all linear layers: forward and backward pass of a microbatch, AdamW's state."""
    copied = copied_bytes(dtype, quantize)
    if quantize is not None:
        dtype = "float32"  # everything not quantised is float32, including the states between layers
    sizes, width = Sizes(model), BYTES[dtype]
    adapters = sizes.adapter_weights(rank)
    logits = microbatch_size * TEXT_LENGTH * sizes.vocabulary * FLOAT32
    kept = sizes.unpacked(quantize) + LOGIT_COPIES * min(logits, max(CHUNK_BYTES, sizes.vocabulary * FLOAT32))
    passes = [(sizes.text, microbatch_size * (PROMPT_LENGTH + TEXT_LENGTH))]
    if sizes.vision is not None:
        passes.append((sizes.vision, microbatch_size * sizes.patches))
    for tower, tokens in passes:
        saved = tokens * (tower.saved + sizes.low_rank_products(rank)) * width
        if gradient_checkpointing:  # each layer's input, and all that the layer saves that is recomputed
            kept += tower.layers * tokens * tower.hidden * width + saved
        else:
            kept += tower.layers * saved
    return MemoryEstimate.of_lora(sizes.weights(dtype, quantize), adapters, copied, kept)


def _tower(config: Any) -> Tower:
    heads = _first(config, "num_attention_heads", "num_heads")
    hidden = _first(config, "hidden_size", "embed_dim")
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    experts = getattr(config, "num_experts_per_tok", None)
    inner = _first(config, "intermediate_size", "ffn_dim", default=4 * hidden)
    if experts:
        inner = int(experts) * (getattr(config, "moe_intermediate_size", None) or inner)
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return Tower(_first(config, "num_hidden_layers", "depth", "num_layers"), hidden, inner, keys)


def _first(config: Any, *names: str, default: int | None = None) -> int:
    """The first of these fields that the config has: families call the same size by different names."""
    found = next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)
    if found is None:
        raise ValueError(f"its config has none of {', '.join(names)}, so its memory can't be estimated")
    return found
