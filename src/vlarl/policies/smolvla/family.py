"""SmolVLA as a family: the way in from load.py, which loads nothing until it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlarl.errors import UsageError
from vlarl.policies.family import Family, LoadOptions

if TYPE_CHECKING:
    from vlarl.policies.smolvla.description import SmolVLADescription
    from vlarl.policies.smolvla.policy import SmolVLAPolicy

MODEL_TYPE = "smolvla"  # in config.json
OF_OTHERS = ("decoder", "use_proprio", "actions", "resize", "center_crop", "heads_device", "quantize", "attention")
"""Options that SmolVLA does not have."""


class SmolVLAFamily(Family):
    """Folders of lerobot's SmolVLA."""

    supported = f"SmolVLA checkpoints of lerobot (type {MODEL_TYPE})"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Only by its type."""
        return False

    def read(self, path: str, folder: Path, options: LoadOptions) -> SmolVLAPolicy:
        """Load a checkpoint or adapter folder."""
        from vlarl.policies.smolvla.checkpoint import read_policy

        _refuse({name: getattr(options, name) for name in OF_OTHERS})
        return read_policy(
            path,
            folder,
            flow=options.flow,
            chunk_length=options.chunk_length,
            num_images=options.num_images,
            dtype=options.dtype,
            device=options.device,
            base=options.base,
            deferred=options.deferred,
        )

    def describe(
        self,
        path: str,
        folder: Path,
        decoder: Literal["autoregressive", "parallel"] | None = None,
        num_images: int | None = None,
    ) -> SmolVLADescription:
        """Describe a checkpoint or adapter folder."""
        from vlarl.policies.smolvla.description import describe

        _refuse({"decoder": decoder})
        return describe(path, folder)


def _refuse(given: Mapping[str, object]) -> None:
    """UsageError for options that SmolVLA does not have, all of them at once."""
    defaults = {field.name: field.default for field in fields(LoadOptions)}
    wrong = [f"policy.{name} = {value!r}" for name, value in given.items() if value != defaults[name]]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)}: a SmolVLA policy has no such option; leave it out. If you did not give "
            "it, a preset for other models did: start from one for small models, such as tabletop_grpo."
        )
