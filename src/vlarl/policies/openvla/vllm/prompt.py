"""A row of OpenVLAInputs as a vLLM prompt that bypasses its processors, since the policy has made pixels and ids.

Padding ids, which no prompt contains, are the placeholders of the image tokens, right after the first token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from transformers import BatchFeature
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from vlarl.policies.openvla.config import OpenVLAConfig

MODALITY = "image"  # vLLM's name for the one item of a prompt


def observation_prompt(
    config: OpenVLAConfig, prompt_ids: Sequence[int], pixels: torch.Tensor, proprio: torch.Tensor | None
) -> MultiModalInput:
    """For vlarl's class: all images uint8 [I, 3, H, W] and the robot's state [P] are one item."""
    item = {"pixels": pixels} if proprio is None else {"pixels": pixels, "proprio": proprio}
    return _prompt(config, prompt_ids, item)


def library_prompt(config: OpenVLAConfig, prompt_ids: Sequence[int], pixels: torch.Tensor) -> MultiModalInput:
    """For vLLM's own class: one image, normalised for each tower, [3 * towers, H, W]."""
    scaled = pixels[0].float() / 255.0
    channels = [
        (scaled - torch.tensor(tower.mean).view(3, 1, 1)) / torch.tensor(tower.std).view(3, 1, 1)
        for tower in config.towers
    ]
    return _prompt(config, prompt_ids, {"pixel_values": torch.cat(channels)})


def _prompt(config: OpenVLAConfig, prompt_ids: Sequence[int], item: Mapping[str, torch.Tensor]) -> MultiModalInput:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in item.values():
        digest.update(tensor.contiguous().numpy().tobytes())
    num_tokens = config.num_image_tokens
    batch = BatchFeature({name: tensor.unsqueeze(0) for name, tensor in item.items()})
    fields = {name: MultiModalFieldConfig.batched(MODALITY) for name in item}
    return mm_input(
        prompt_token_ids=[prompt_ids[0], *[config.pad_token_id] * num_tokens, *prompt_ids[1:]],
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(batch, fields),
        mm_hashes={MODALITY: [digest.hexdigest()]},
        mm_placeholders={MODALITY: [PlaceholderRange(offset=1, length=num_tokens)]},
    )
