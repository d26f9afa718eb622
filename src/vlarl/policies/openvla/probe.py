"""A synthetic input for comparing two models of one size, such as before and after a merge."""

from __future__ import annotations

import torch

from vlarl.policies.openvla.config import OpenVLAConfig
from vlarl.policies.openvla.inputs import OpenVLAInputs


def probe_input(config: OpenVLAConfig) -> tuple[OpenVLAInputs, torch.Tensor]:
    """Two synthetic decisions, the same for all models of a size: ragged prompts, noise for pixels, any tokens."""
    generator = torch.Generator().manual_seed(0)
    size, length = config.image_size, 12
    ids = torch.randint(10, config.first_action_id, (2, length), generator=generator)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    mask[1, length - 3 :] = False
    pixels = torch.randint(0, 256, (2, config.num_images, 3, size, size), generator=generator).to(torch.uint8)
    proprio = torch.rand(2, config.proprio_dim, generator=generator) * 2 - 1 if config.use_proprio else None
    shape = (2, config.num_action_tokens)
    tokens = torch.randint(config.first_action_id, config.vocab_size, shape, generator=generator)
    return OpenVLAInputs(ids, mask, pixels, proprio), tokens
