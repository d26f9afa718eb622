"""OpenVLA on demonstrations: cross-entropy of action tokens, or the absolute error of OFT's regression head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from vlarl.decisions import TensorRows
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.supervised import ImitationErrors
from vlarl.types import FloatArray, UInt8Array

if TYPE_CHECKING:
    from vlarl.policies.openvla.policy import OpenVLAPolicy


@dataclass(frozen=True)
class DemoRows(TensorRows):
    """Demonstrated decisions without their images."""

    input_ids: torch.Tensor  # [N, P] int64
    attention_mask: torch.Tensor  # [N, P] bool
    proprio: torch.Tensor | None  # [N, R] float32, normalised; None for policies without the proprio token
    actions: torch.Tensor  # [N, K, D] float32, normalised
    token_ids: torch.Tensor  # [N, K*D] int64, the tokens of these actions


def demo_rows(policy: OpenVLAPolicy, instructions: Sequence[str], proprio: FloatArray, actions: FloatArray) -> DemoRows:
    """Prompts, states and actions, normalised by the statistics in use."""
    ids, mask = policy.processor.prompts(instructions)
    normalizer = policy.normalizer
    states = torch.from_numpy(normalizer.normalize_proprio(proprio)) if policy.config.use_proprio else None
    targets = normalizer.normalize(actions)
    return DemoRows(ids, mask, states, torch.from_numpy(targets), torch.from_numpy(policy.codec.encode(targets)))


def demo_frames(policy: OpenVLAPolicy, images: Sequence[UInt8Array] | UInt8Array) -> torch.Tensor:
    """[N, I, H, W, 3] uint8; frames that were rendered for the policy are not copied."""
    if isinstance(images, np.ndarray) and policy.processor.is_ready(images[0]):
        return torch.from_numpy(images[:, : policy.num_images])
    return torch.from_numpy(policy.processor.frames(images))


def supervised_loss(policy: OpenVLAPolicy, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the action ids, the support that rollout samples from; or the regression head's error."""
    rows, inputs = _inputs(rows, frames)
    if policy.acts_by_regression:
        return F.l1_loss(policy.regress(inputs), rows.actions.to(policy.heads_device))
    logits = policy.score(inputs, rows.token_ids).logits
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits.float().flatten(0, 1), (rows.token_ids - policy.codec.first_id).flatten())


def imitation_errors(policy: OpenVLAPolicy, rows: TensorRows, frames: torch.Tensor) -> ImitationErrors:
    """Of the regression head's actions, or of the most likely tokens and the actions that they stand for."""
    rows, inputs = _inputs(rows, frames)
    wanted = rows.actions.cpu()
    if policy.acts_by_regression:
        return ImitationErrors((policy.regress(inputs).cpu() - wanted).abs().mean(dim=(1, 2)), None)
    ids = policy.score(inputs, rows.token_ids).logits.argmax(dim=-1) + policy.codec.first_id
    actions = torch.from_numpy(policy.codec.decode(ids.cpu().numpy()))
    right = (ids == rows.token_ids.to(ids.device)).float().mean(dim=1)
    return ImitationErrors((actions - wanted).abs().mean(dim=(1, 2)), right.cpu())


def _inputs(rows: TensorRows, frames: torch.Tensor) -> tuple[DemoRows, OpenVLAInputs]:
    assert isinstance(rows, DemoRows), "these are demonstrations for another policy"
    pixels = frames.permute(0, 1, 4, 2, 3)
    return rows, OpenVLAInputs(rows.input_ids, rows.attention_mask, pixels, rows.proprio)
