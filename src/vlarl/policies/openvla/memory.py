"""Estimates a model's device memory from its config alone: for rollouts, and for updates of adapters.

Both count tensors at the peak, like `torch.cuda.max_memory_allocated`; the CUDA context, about half a gigabyte, is
extra. The sums follow the modules operator by operator. For its backward pass a frozen linear layer saves nothing, its
adapter saves its input and the low-rank product, a norm its input, attention its queries, keys, values and output, a
gated MLP four tensors of its inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

from vlarl.policies.adapters import linear_names
from vlarl.policies.family import BYTES, FLOAT32, DtypeName, MemoryEstimate, copied_bytes
from vlarl.policies.openvla.config import OpenVLAConfig, language_config
from vlarl.policies.openvla.model import QUANTIZED, UNADAPTED, OpenVLAModel
from vlarl.policies.openvla.towers import TowerConfig
from vlarl.policies.quantize import BLOCK, QUANTIZED_BYTES, UNPACKED_BYTES

PROMPT_LENGTH = 32  # tokens of the template with an instruction of a dozen words, as LIBERO's are


def estimate_rollout(
    config: OpenVLAConfig,
    batch_size: int,
    prompt_length: int = PROMPT_LENGTH,
    dtype: DtypeName = "bfloat16",
    quantize: Literal[4, 8] | None = None,
    lora_rank: int | None = None,
) -> MemoryEstimate:
    """Generating the actions of a batch of observations, without gradient; with a rank, including adapters."""
    sizes = Sizes(config, batch_size, prompt_length)
    text, width = sizes.text, BYTES[dtype]
    cache = 0
    if config.decoder == "autoregressive":
        columns = sizes.prefix + config.num_action_tokens - 1
        cache = batch_size * columns * text.layers * 2 * text.keys * width
    # Layers fill the cache one by one; the last one computes few columns, so the one before it is the peak.
    language = cache * (text.layers - 1) // text.layers + _language_peak(sizes) * width
    peak = max(*_vision_peaks(sizes, width), language) + sizes.pixels + sizes.unpacked(quantize)
    adapters = 0 if lora_rank is None else sizes.adapter_weights(lora_rank)
    return MemoryEstimate(
        sizes.weights(dtype, quantize),
        adapters=adapters * (FLOAT32 + copied_bytes(dtype, quantize)),
        activations=max(peak - cache, 0),
        cache=cache,
    )


def estimate_lora_update(
    config: OpenVLAConfig,
    microbatch_size: int,
    prompt_length: int = PROMPT_LENGTH,
    dtype: DtypeName = "bfloat16",
    rank: int = 32,
    gradient_checkpointing: bool = True,
    quantize: Literal[4, 8] | None = None,
    *,
    freeze_vision: bool = False,
) -> MemoryEstimate:
    """An update of adapters of all linear layers: forward and backward pass of a microbatch, AdamW's state."""
    copied = copied_bytes(dtype, quantize)
    if quantize is not None:
        dtype = "float32"  # everything not quantised is float32, including the states between layers
    sizes = Sizes(config, microbatch_size, prompt_length)
    width = BYTES[dtype]
    adapters = sizes.adapter_weights(rank, freeze_vision=freeze_vision)
    layer = sizes.saved_by_layer(sizes.columns, rank, width)
    kept = _projector_saved(sizes, rank) * width + sizes.pixels + sizes.unpacked(quantize)
    if gradient_checkpointing:
        # Each layer's input, all that one layer saves while it is recomputed, and two gradients of its inner width.
        kept += sizes.text.layers * sizes.columns * sizes.text.hidden * width
        kept += layer + 2 * sizes.columns * sizes.text.inner * width
        kept += sizes.inputs_of_linears(freeze_vision) * width if quantize == 8 else 0
    else:
        # All that layers save. The last one computes only what is read; its backward pass makes three gradients.
        kept += (sizes.text.layers - 1) * layer + sizes.saved_by_layer(sizes.read, rank, width)
        kept += 3 * sizes.columns * sizes.text.hidden * width
    if not freeze_vision:
        kept += sum(_tower_saved(sizes, tower, rank, width, gradient_checkpointing) for tower in config.towers)
    return MemoryEstimate.of_lora(sizes.weights(dtype, quantize), adapters, copied, kept)


class _ThisConfig:
    """A config as the key of a cache: equal to itself alone, since what it holds can't be hashed."""

    def __init__(self, config: OpenVLAConfig) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ThisConfig) and other.config is self.config


@lru_cache(maxsize=1)
def _meta_model(key: _ThisConfig) -> nn.Module:
    """The model on the meta device, which takes half a second to make at 7B; a plan makes twenty estimates of it."""
    with torch.device("meta"):
        return OpenVLAModel(key.config)


@dataclass(frozen=True)
class TextSizes:
    """Widths of the language model."""

    layers: int
    hidden: int
    inner: int  # of the MLP
    queries: int
    keys: int  # and values
    heads: int


class Sizes:
    """How many values a batch has, from the pixels to the last layer."""

    def __init__(self, config: OpenVLAConfig, batch_size: int, prompt_length: int) -> None:
        self.config = config
        self.num_images = batch_size * config.num_images
        self.prefix = config.num_image_tokens + prompt_length
        tail = config.num_action_tokens + (1 if config.decoder == "parallel" else -1)
        self.prompt = batch_size * self.prefix  # columns of all rows: of prompts,
        self.columns = batch_size * (self.prefix + tail)  # with the action part,
        self.read = batch_size * config.num_action_tokens  # and those that predict tokens
        self.patches = self.num_images * config.towers[0].num_patches
        self.pixels = self.num_images * 3 * config.image_size**2
        self.text = _text_sizes(language_config(config.text))

    @property
    def model(self) -> nn.Module:
        """The model on the meta device."""
        return _meta_model(_ThisConfig(self.config))

    def adapter_weights(self, rank: int, *, freeze_vision: bool = False) -> int:
        """Values in all adapters: two matrices for each trainable linear layer."""
        layers = [
            self.model.get_submodule(name)
            for name in linear_names(self.model, UNADAPTED)
            if not (freeze_vision and name.startswith("vision_backbone."))
        ]
        return sum(rank * (layer.in_features + layer.out_features) for layer in layers if isinstance(layer, nn.Linear))

    def weights(self, dtype: DtypeName, quantize: Literal[4, 8] | None) -> int:
        """Bytes of the model and of the proprio projector."""
        whole = sum(p.numel() for p in self.model.parameters())
        if self.config.use_proprio:
            whole += (self.config.proprio_dim + self.text.hidden + 2) * self.text.hidden
        if quantize is None:
            return whole * BYTES[dtype]
        packed = sum(self._packed(quantize))
        return (whole - packed) * BYTES[dtype] + round(packed * QUANTIZED_BYTES[quantize])

    def unpacked(self, quantize: Literal[4, 8] | None) -> int:
        """Bytes of the largest quantised matrix while a product reads it."""
        return 0 if quantize is None else max(self._packed(quantize), default=0) * UNPACKED_BYTES[quantize]

    def saved_by_layer(self, computed: int, rank: int, width: int) -> int:
        """Bytes that one layer of the language model saves for its backward pass, with `computed` columns."""
        text = self.text
        # Input, its norm, keys and values with their two low-rank products, for all columns
        kept = self.columns * (2 * text.hidden + 2 * text.keys + 2 * rank)
        # Queries, attention's output, state and its norm, four inner tensors, five low-rank products
        kept += computed * (2 * text.queries + 2 * text.hidden + 4 * text.inner + 5 * rank)
        stds = (self.columns + computed) * FLOAT32
        return kept * width + stds + computed * text.heads * FLOAT32

    def inputs_of_linears(self, freeze_vision: bool) -> int:
        """Input values of the linear layers: bitsandbytes keeps them in 8 bits, recomputed or not."""
        language = self.text.layers * self.columns * (2 * self.text.hidden + self.text.queries + self.text.inner)
        towers = () if freeze_vision else self.config.towers
        vision = sum(self.tower_tokens(t) * (t.depth - 1) * (3 * t.embed_dim + t.mlp_dim) for t in towers)
        return language + vision

    def tower_tokens(self, tower: TowerConfig) -> int:
        """Tokens of all images in one tower: patches, class token, registers."""
        return self.num_images * (tower.num_patches + tower.class_token + tower.num_registers)

    def _packed(self, bits: Literal[4, 8]) -> list[int]:
        """Weights of each layer that is quantised."""
        return [
            module.weight.numel()
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and QUANTIZED.fullmatch(name)
            if bits == 8 or module.in_features % BLOCK == 0
        ]


def _text_sizes(text: Any) -> TextSizes:
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    keys = int(text.num_key_value_heads) * head_dim
    layers, hidden, inner = int(text.num_hidden_layers), int(text.hidden_size), int(text.intermediate_size)
    return TextSizes(layers, hidden, inner, heads * head_dim, keys, heads)


def _language_peak(sizes: Sizes) -> int:
    """Values alive in the MLP of a layer: gate, up and their product; embeddings, input, attention's output, their sum
    and its norm. The parallel decoder holds the embeddings twice, with and without the action part."""
    hidden, inner = sizes.text.hidden, sizes.text.inner
    if sizes.config.decoder == "autoregressive":
        return sizes.prompt * (5 * hidden + 3 * inner)
    return sizes.columns * (5 * hidden + 3 * inner) + sizes.prompt * hidden


def _vision_peaks(sizes: Sizes, width: int) -> list[int]:
    """Bytes alive in the MLP of each tower's blocks, and in the widest layer of the projector."""
    peaks, features = [], 0
    patch_bytes = sizes.pixels * (FLOAT32 + 1)  # normalised, and as received
    for tower in sizes.config.towers:
        tokens = sizes.tower_tokens(tower)
        # Input, state and its norm, and the inner tensor before and after its activation
        block = tokens * (3 * tower.embed_dim + _inner_tensors(tower) * tower.mlp_dim)
        peaks.append(patch_bytes + (features + block) * width)
        features += tokens * tower.embed_dim
    channels, middle = _projector_sizes(sizes)
    peaks.append(sizes.patches * (channels + 2 * middle) * width)
    return peaks


def _tower_saved(sizes: Sizes, tower: TowerConfig, rank: int, width: int, checkpointing: bool) -> int:
    """Bytes that one tower saves for its backward pass; its last block is never computed."""
    tokens, blocks, dim = sizes.tower_tokens(tower), tower.depth - 1, tower.embed_dim
    if checkpointing:
        return blocks * tokens * dim * width
    # Two norms' inputs and outputs, queries, keys, values, attention's output; the MLP; four low-rank products
    film_dim = dim if sizes.config.use_film else 0
    kept = 8 * dim + film_dim + _inner_tensors(tower) * tower.mlp_dim + 4 * rank
    statistics = (4 + tower.num_heads) * FLOAT32  # mean and std of two norms, attention's sums
    return blocks * tokens * (kept * width + statistics)


def _projector_saved(sizes: Sizes, rank: int) -> int:
    """Values that the projector saves: inputs of its layers and of its activations, low-rank products."""
    channels, middle = _projector_sizes(sizes)
    if len(sizes.config.towers) == 1:
        return sizes.patches * (channels + 2 * middle + 2 * rank)
    return sizes.patches * (channels + 2 * middle + 2 * sizes.text.hidden + 3 * rank)


def _projector_sizes(sizes: Sizes) -> tuple[int, int]:
    channels = sum(tower.embed_dim for tower in sizes.config.towers)
    return channels, 4 * channels if len(sizes.config.towers) > 1 else sizes.text.hidden


def _inner_tensors(tower: TowerConfig) -> int:
    """Tensors of the MLP's inner width: before and after an exact GELU; the quick one's sigmoid is a third."""
    return 2 if tower.activation == "gelu" else 3
