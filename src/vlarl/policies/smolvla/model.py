"""SmolVLA: images, instruction and state as a prefix that is read once, and an expert that denoises actions after it.

    images ─► tower ─► connector ─┐
    instruction ─► embeddings ────┼─► language model ─► keys and values of each layer
    state ─► projection ──────────┘            │
    noisy actions, time ─► expert ◄────────────┘  ─► velocities

Nothing of the prefix attends to the actions, so it is computed once for all denoising steps. Images and instruction
don't attend to the state either: where the backbone is frozen they need no gradient, but the state's projection does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vlarl.policies.smolvla.config import SmolVLAConfig, TextSizes
from vlarl.policies.smolvla.layers import (
    CrossLayer,
    DecoderLayer,
    ExpertLayer,
    ExpertLinear,
    ExpertNorm,
    KeyValue,
    RMSNorm,
)
from vlarl.policies.smolvla.vision import Connector, VisionTower, padded_pixels


@dataclass(frozen=True)
class Prefix:
    """What the expert reads of an observation."""

    layers: tuple[KeyValue, ...]  # of the language model
    mask: torch.Tensor  # [B, P] bool: False for padding
    state: torch.Tensor  # [B, hidden] the language model's last state, at the robot's state

    @property
    def next_position(self) -> torch.Tensor:
        """[B, 1] of the first action."""
        return self.mask.sum(dim=1, keepdim=True)


class LanguageModel(nn.Module):
    """The first layers of the backbone's language model."""

    def __init__(self, sizes: TextSizes, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, sizes.hidden)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, sizes.eps)


class Backbone(nn.Module):
    """Tower, connector and language model."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.vision_model = VisionTower(config.tower)
        self.connector = Connector(config.tower, config.text.hidden)
        self.text_model = LanguageModel(config.text, config.vocab_size)


class Vlm(nn.Module):
    """The backbone, by the name of the checkpoint; its head, which SmolVLA does not use, is not a part of the model."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.model = Backbone(config)


class Expert(nn.Module):
    """The action expert's layers."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        sizes, shown = config.expert, config.text.kv_heads * config.text.head_dim
        self.layers = nn.ModuleList(
            ExpertLayer(sizes) if config.attends_jointly(i) else CrossLayer(sizes, shown) for i in range(sizes.layers)
        )
        self.norm = ExpertNorm(sizes.hidden, sizes.eps)


class VlmWithExpert(nn.Module):
    """Both, by the names of the checkpoint."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.vlm, self.lm_expert = Vlm(config), Expert(config)


class SmolVLAModel(nn.Module):
    """Everything in a checkpoint's weight file that is used."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False  # layers are computed again in the backward pass
        self.vlm_with_expert = VlmWithExpert(config)
        width = config.expert.hidden
        self.state_proj = ExpertLinear(config.max_state_dim, config.text.hidden)
        self.action_in_proj = ExpertLinear(config.max_action_dim, width)
        self.action_out_proj = ExpertLinear(width, config.max_action_dim)
        self.action_time_mlp_in = ExpertLinear(2 * width, width)
        self.action_time_mlp_out = ExpertLinear(width, width)

    @property
    def backbone(self) -> Backbone:
        """The vision-language model without its head."""
        return self.vlm_with_expert.vlm.model

    @property
    def expert(self) -> Expert:
        """The layers that read noisy actions."""
        return self.vlm_with_expert.lm_expert

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.state_proj.weight.device

    def embed_context(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Images [B, I, 3, H, W] and tokens [B, T] as embeddings, scaled by the square root of their width."""
        kind, scale = self.backbone.connector.modality_projection.proj.weight.dtype, math.sqrt(self.config.text.hidden)
        images = padded_pixels(pixels.flatten(0, 1), self.config.tower.image).to(kind)
        seen = self.backbone.connector(self.backbone.vision_model(images))
        read = self.backbone.text_model.embed_tokens(tokens)
        return torch.cat([seen.unflatten(0, pixels.shape[:2]).flatten(1, 2), read], dim=1) * scale

    def prefix(
        self, pixels: torch.Tensor, tokens: torch.Tensor, token_mask: torch.Tensor, state: torch.Tensor
    ) -> Prefix:
        """Read images, an instruction [B, T] padded on the right, and a normalised state [B, max_state_dim]."""
        trained = any(p.requires_grad for p in self.backbone.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            context = self.embed_context(pixels, tokens)
            num_images = context.shape[1] - tokens.shape[1]
            mask = F.pad(token_mask, (num_images, 0), value=True)
            positions = mask.cumsum(dim=1) - 1
            everything = mask[:, None, :].expand(-1, context.shape[1], -1)  # no order among images and instruction
            _, shown = self._run(self.backbone.text_model.layers, context, positions, everything, None)
        token = self.state_proj(state.to(self.state_proj.weight.dtype)).unsqueeze(1).to(context.dtype)
        mask = F.pad(mask, (0, 1), value=True)
        at = mask.sum(dim=1, keepdim=True) - 1
        last, own = self._run(self.backbone.text_model.layers, token, at, mask[:, None, :], shown)
        layers = tuple(before.followed_by(after) for before, after in zip(shown, own, strict=True))
        return Prefix(layers, mask, self.backbone.text_model.norm(last[:, 0]))

    def expert_states(self, prefix: Prefix, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """[B, C, width] what the expert makes of noisy actions [B, C, M] at times [B]."""
        x = self._embed_actions(noisy, times)
        count = x.shape[1]
        order = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()  # an action sees those before it
        mask = torch.cat(
            [prefix.mask[:, None].expand(-1, count, -1), order.expand(len(x), -1, -1)],
            dim=2,
        )
        positions = prefix.next_position + torch.arange(count, device=x.device)
        states, _ = self._run(self.expert.layers, x, positions, mask, prefix.layers)
        out: torch.Tensor = self.expert.norm(states)
        return out

    def velocity(self, states: torch.Tensor) -> torch.Tensor:
        """[B, C, M] of the expert's states."""
        out: torch.Tensor = self.action_out_proj(states)
        return out

    def _embed_actions(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        actions = self.action_in_proj(noisy.to(self.action_in_proj.weight.dtype))
        time = time_embedding(times, actions.shape[-1], self.config.min_period, self.config.max_period)
        both = torch.cat([actions, time.to(actions.dtype)[:, None].expand_as(actions)], dim=2)
        out: torch.Tensor = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))
        return out

    def _run(
        self,
        layers: nn.ModuleList,
        x: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        before: tuple[KeyValue, ...] | None,
    ) -> tuple[torch.Tensor, tuple[KeyValue, ...]]:
        """States through all layers, each after its own keys and values of what came before."""
        shown = []
        for i, layer in enumerate(layers):
            past = None if before is None else before[i]
            if self.checkpointing and torch.is_grad_enabled():
                x, own = cast(
                    tuple[torch.Tensor, KeyValue], checkpoint(layer, x, positions, mask, past, use_reentrant=False)
                )
            else:
                x, own = layer(x, positions, mask, past)
            shown.append(own)
        return x, tuple(shown)


def time_embedding(times: torch.Tensor, width: int, min_period: float, max_period: float) -> torch.Tensor:
    """[B, width] float64 sines and cosines of times [B], with periods from the shortest to the longest."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=times.device)
    angles = times.double()[:, None] * (2 * math.pi / (min_period * (max_period / min_period) ** fraction))
    return torch.cat([angles.sin(), angles.cos()], dim=1)
