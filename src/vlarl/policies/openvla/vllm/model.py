"""OpenVLA for vLLM: vlarl's own towers and projector in front of vLLM's language model.

    pixels, proprio -> towers, projector -> image tokens ┐
    prompt ids      -> embedding                         ┴-> BOS  image tokens  [proprio]  prompt -> vLLM's decoder

Any size, several images, no timm. Parameters have the names of the checkpoint, so that files and weight syncs need no
translation. One observation, all of its images and the robot's state, is one multimodal item.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.inputs import MultiModalInput
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import AutoWeightsLoader, init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from vlarl.policies.openvla.config import OpenVLAConfig
from vlarl.policies.openvla.heads import ProprioProjector
from vlarl.policies.openvla.model import Projector
from vlarl.policies.openvla.vision import VisionBackbone
from vlarl.policies.openvla.vllm.config import checkpoint_config
from vlarl.policies.openvla.vllm.prompt import MODALITY, observation_prompt


class ObservationItems(ProcessorBatchItems):  # type: ignore[misc]
    """Observations as mappings with `pixels` and, where the policy reads it, `proprio`."""

    def __init__(self, observations: Sequence[Mapping[str, torch.Tensor]]) -> None:
        super().__init__(observations, MODALITY)


class ObservationParser(MultiModalDataParser):  # type: ignore[misc]
    """Parses observations that the policy's own processor has made."""

    def _parse_image_data(self, data: Any) -> ObservationItems:
        return ObservationItems([data] if isinstance(data, Mapping) else data)


class ObservationInfo(BaseProcessingInfo):  # type: ignore[misc]
    """How many items a prompt has, and how many tokens an item."""

    @property
    def config(self) -> OpenVLAConfig:
        """The checkpoint's configuration."""
        return checkpoint_config(self.ctx.model_config)

    def get_data_parser(self) -> ObservationParser:
        """Observations instead of images."""
        return ObservationParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """One observation a prompt."""
        return {MODALITY: 1}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """All patches of all images, and the robot's state."""
        return {MODALITY: self.config.num_image_tokens}


class DummyObservations(BaseDummyInputsBuilder[ObservationInfo]):  # type: ignore[misc]
    """The input with which vLLM measures the memory of the towers."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Prompts are ids here."""
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        """A black observation."""
        config = self.info.config
        size = config.image_size
        observation = {"pixels": torch.zeros(config.num_images, 3, size, size, dtype=torch.uint8)}
        if config.use_proprio:
            observation["proprio"] = torch.zeros(config.proprio_dim)
        return {MODALITY: [observation] * mm_counts.get(MODALITY, 0)}


class ObservationProcessor(BaseMultiModalProcessor[ObservationInfo]):  # type: ignore[misc]
    """Inserts placeholders for the image tokens into a prompt; pixels already have the model's size."""

    requires_tokenizer = False

    def apply(self, inputs: Any, timing_ctx: Any) -> MultiModalInput:
        """A prompt of ids and its observation."""
        config = self.info.config
        prompt = list(inputs.prompt) or [config.bos_id or 0]
        observation = inputs.mm_data_items[MODALITY].get(0)
        return observation_prompt(config, prompt, observation["pixels"], observation.get("proprio"))

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Mapping[str, Any]:
        return {}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Sequence[Any]:
        return []


@MULTIMODAL_REGISTRY.register_processor(ObservationProcessor, info=ObservationInfo, dummy_inputs=DummyObservations)
class VlarlOpenVLA(nn.Module, SupportsMultiModal):  # type: ignore[misc]
    """Towers, projector and proprio token of vlarl; the language model from vLLM's registry."""

    allow_patterns_overrides = ["model.safetensors", "model-*.safetensors"]  # not the heads beside the model

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Prompts are ids, there is no text for an image."""
        return None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = checkpoint_config(vllm_config.model_config)
        text_config = vllm_config.model_config.hf_config.text_config
        hidden_size = text_config.hidden_size
        marks: Any = self  # vLLM's mixin, which has no types here
        with marks._mark_tower_model(vllm_config, MODALITY):
            self.vision_backbone = VisionBackbone(config.towers)
            self.projector = Projector(self.vision_backbone.feature_dim, hidden_size, fused=len(config.towers) > 1)
            self.proprio_projector = ProprioProjector(config.proprio_dim, hidden_size) if config.use_proprio else None
        with marks._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config, hf_config=text_config, prefix=maybe_prefix(prefix, "language_model")
            )
        for tower in self.vision_backbone.towers:
            # Constants in the learner's type and on the weights' device, whatever vLLM's defaults are.
            mean, std = (
                torch.tensor(c, dtype=torch.float32).view(3, 1, 1) for c in (tower.config.mean, tower.config.std)
            )
            tower.pixel_mean, tower.pixel_std = mean.to(tower.pos_embed.device), std.to(tower.pos_embed.device)
        self.secondary_weights = []
        if config.use_proprio:
            self.secondary_weights.append(_proprio_file(vllm_config.model_config.model))

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        """The image tokens [P, H] of each observation, the robot's state after the patches."""
        pixels: torch.Tensor = kwargs["pixels"]  # [B, I, 3, H, W] uint8
        parts = [self.projector(self.vision_backbone(pixels))]
        if self.proprio_projector is not None:
            state = kwargs["proprio"].to(parts[0].dtype)
            parts.append(self.proprio_projector(state).unsqueeze(1))
        return list(torch.cat(parts, dim=1))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """States of the language model."""
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        """Logits over the padded vocabulary."""
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors by the checkpoint's names."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return loaded


def _proprio_file(folder: str) -> Any:
    """The proprio projector, which has a file of its own."""
    return DefaultModelLoader.Source(
        folder, None, prefix="proprio_projector.", allow_patterns_overrides=["proprio_projector.safetensors"]
    )
