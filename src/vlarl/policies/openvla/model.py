"""OpenVLA's architecture at any size, with the parameter names of the original checkpoint."""

from __future__ import annotations

import re
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from vlarl.policies.openvla.attention import AttentionName
from vlarl.policies.openvla.config import OpenVLAConfig, language_config
from vlarl.policies.openvla.heads import TiedHead
from vlarl.policies.openvla.language import build_language_model
from vlarl.policies.openvla.vision import VisionBackbone

UNADAPTED = ("lm_head", ".scale", ".shift")  # the head, and FiLM's own layers, which OFT trains in full

# The matrices that make up most of a model. Embeddings and lm_head are not quantised, nor are parts that never run.
QUANTIZED = re.compile(
    r"language_model\.model\.layers\..+|projector\.\w+|vision_backbone\.\w+\.blocks\..+\.(attn|mlp)\.\w+"
)


class Projector(nn.Module):
    """Vision features to the language model's width: three layers for the fused towers, two for a single one."""

    def __init__(self, feature_dim: int, hidden_size: int, *, fused: bool) -> None:
        super().__init__()
        middle = 4 * feature_dim if fused else hidden_size
        self.fc1 = nn.Linear(feature_dim, middle)
        self.fc2 = nn.Linear(middle, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size) if fused else None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, P, W] -> [B, P, H]."""
        x: torch.Tensor = self.fc2(F.gelu(self.fc1(features)))
        return x if self.fc3 is None else cast(torch.Tensor, self.fc3(F.gelu(x)))


class OpenVLAModel(nn.Module):
    """Towers, projector and language model: what a checkpoint's model.safetensors holds."""

    def __init__(self, config: OpenVLAConfig, attention: AttentionName = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.hidden_size = int(language_config(config.text).hidden_size)
        self.vision_backbone = VisionBackbone(config.towers, self.hidden_size if config.use_film else None)
        self.language_model = build_language_model(config.text, attention)
        self.projector = Projector(self.vision_backbone.feature_dim, self.hidden_size, fused=len(config.towers) > 1)

    @property
    def _language(self) -> Any:
        return self.language_model  # transformers' class is chosen at run time

    @property
    def num_layers(self) -> int:
        """Layers of the language model."""
        return len(self._language.model.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of the states between them."""
        weight: torch.Tensor = self._language.model.norm.weight  # a matrix may be quantised
        return weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes; sharded weights may be stored elsewhere."""
        return self.vision_backbone.featurizer.pixel_mean.device

    @property
    def recomputable(self) -> list[Any]:
        """The vision blocks and the layers, in the order of a pass."""
        blocks = [block for tower in self.vision_backbone.towers for block in tower.blocks[:-1]]
        return [*blocks, *self._language.model.layers]

    def checkpoint_layers(self, enabled: bool, kept: int = 0) -> None:
        """Recompute every layer and vision block in the backward pass instead of saving its activations, but for the
        last `kept` ones.

        The last ones, since their activations are free again when the first layers are recomputed; and a vision
        block's activations take more memory for the arithmetic that they save.
        """
        layers = self.recomputable
        for index, layer in enumerate(layers):
            layer.recompute = enabled and index < len(layers) - kept
            layer.last_product.ends_recomputed = layer.recompute  # what an adapter's layer looks at

    def embed_images(self, pixels: torch.Tensor, language: torch.Tensor | None = None) -> torch.Tensor:
        """uint8 [B, I, 3, H, W], or normalised floats as the vision backbone takes -> [B, I*P, H] image tokens.

        With FiLM, language [B, H] is the mean embedding of each prompt.
        """
        out: torch.Tensor = self.projector(self.vision_backbone(pixels, language))
        return out

    def embed_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L, H]."""
        out: torch.Tensor = self._language.model.embed_tokens(ids)
        return out

    def finish(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm, applied only to the states that are read."""
        out: torch.Tensor = self._language.model.norm(states)
        return out

    def action_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Finished states [B, T, H] -> float32 logits [B, T, num_bins] over the action ids, lowest id first."""
        head = self._language.lm_head
        first, last = self.config.first_action_id, self.config.vocab_size
        if type(head) in (nn.Linear, TiedHead):
            return F.linear(states, head.weight[first:last]).float()
        # An adapter wraps the head, or its weights are quantised: only its own forward is correct.
        wrapped: torch.Tensor = head(states)
        return wrapped[..., first:last].float()
