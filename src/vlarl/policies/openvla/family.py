"""OpenVLA and OpenVLA-OFT as a family: the way in from load.py, which loads nothing until it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlarl.policies.family import Family, LoadOptions
from vlarl.policies.openvla.config import missing_fields
from vlarl.policies.openvla.text_families import FAMILIES as TEXT_FAMILIES

if TYPE_CHECKING:
    from vlarl.policies.openvla.description import OpenVLADescription
    from vlarl.policies.openvla.policy import OpenVLAPolicy

MODEL_TYPE = "openvla"  # in config.json


class OpenVLAFamily(Family):
    """Checkpoints in the layout of the original OpenVLA and OpenVLA-OFT."""

    supported = (
        f"OpenVLA and OpenVLA-OFT checkpoints (model type {MODEL_TYPE}, with a language model of type "
        f"{', '.join(TEXT_FAMILIES)}), such as openvla/openvla-7b"
    )

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Whether it names no model type, as Prismatic's own, or has the fields of this one."""
        return config.get("model_type") is None and config.get("type") is None or not missing_fields(config)

    def read(self, path: str, folder: Path, options: LoadOptions) -> OpenVLAPolicy:
        """Load a checkpoint or adapter folder."""
        from vlarl.policies.openvla.checkpoint import read_policy
        from vlarl.policies.openvla.images import ImagePipeline

        options.flow.refuse_given()
        lanczos = options.resize == "lanczos3"
        policy = read_policy(
            path,
            folder=folder,
            decoder=options.decoder,
            chunk_length=options.chunk_length,
            num_images=options.num_images,
            use_proprio=options.use_proprio,
            images=ImagePipeline(jpeg=lanczos, resize=options.resize, center_crop=options.center_crop),
            dtype=options.dtype,
            device=options.device,
            heads_device=options.heads_device,
            l1_head=options.actions != "tokens",
            quantize=options.quantize,
            attention=options.attention,
            base=options.base,
            deferred=options.deferred,
        )
        policy.acts_by_regression = options.actions == "l1"
        return policy

    def describe(
        self,
        path: str,
        folder: Path,
        decoder: Literal["autoregressive", "parallel"] | None = None,
        num_images: int | None = None,
    ) -> OpenVLADescription:
        """Describe a checkpoint or adapter folder."""
        from vlarl.policies.openvla.description import describe

        return describe(path, folder, decoder, num_images)

    def training_warning(self, path: str, folder: Path) -> str | None:
        """RL would start from action tokens that were never trained: those of a checkpoint with an L1 head."""
        from vlarl.policies.openvla.checkpoint import has_untrained_tokens

        if not has_untrained_tokens(folder):
            return None
        return (
            "its regression head was trained and its action tokens were not. RL samples action tokens, so it hardly "
            "ever succeeds at first. Take a checkpoint that was fine-tuned with action tokens, or train them first: "
            f"vlarl finetune --policy.path {path} --policy.actions tokens"
        )

    def has_regression_head(self, folder: Path) -> bool:
        """Whether the folder holds OFT's action head."""
        from vlarl.policies.openvla.components import has_component

        return has_component(folder, "action_head")
