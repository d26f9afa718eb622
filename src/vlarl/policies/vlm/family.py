"""Language and vision-language models of transformers as a family: the way in from load.py, which loads nothing until
it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlarl.errors import UsageError
from vlarl.policies.family import Family, LoadOptions

if TYPE_CHECKING:
    from vlarl.policies.vlm.description import VlmDescription
    from vlarl.policies.vlm.policy import VlmPolicy

OF_ROBOTS = ("decoder", "chunk_length", "num_images", "use_proprio", "actions", "resize", "center_crop", "heads_device")
"""Options of a checkpoint that acts on a robot."""


class VlmFamily(Family):
    """Folders that transformers reads as a causal language model or as an image-text-to-text model."""

    supported = (
        "language and vision-language models of transformers, such as Qwen/Qwen2.5-VL-3B-Instruct or "
        "Qwen/Qwen2.5-0.5B-Instruct"
    )
    writes_texts = True

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Whether transformers has such a model. One with another head, such as a classifier, is refused when it is
        read: by then the message can say what it is."""
        from vlarl.policies.vlm.checkpoint import MODEL_TYPES, reads_images

        return reads_images(config) is not None or config.get("model_type") in MODEL_TYPES

    def read(self, path: str, folder: Path, options: LoadOptions) -> VlmPolicy:
        """Load a checkpoint or adapter folder."""
        from vlarl.policies.vlm.checkpoint import read_policy

        options.flow.refuse_given()
        refuse_options_of_robots({name: getattr(options, name) for name in OF_ROBOTS})
        return read_policy(
            path,
            dtype=options.dtype,
            device=options.device,
            attention=options.attention,
            quantize=options.quantize,
            base=options.base,
            deferred=options.deferred,
        )

    def describe(
        self,
        path: str,
        folder: Path,
        decoder: Literal["autoregressive", "parallel"] | None = None,
        num_images: int | None = None,
    ) -> VlmDescription:
        """Describe a checkpoint or adapter folder."""
        from vlarl.policies.vlm.description import describe

        refuse_options_of_robots({"decoder": decoder, "num_images": num_images})
        return describe(path, folder)


def refuse_options_of_robots(given: Mapping[str, object]) -> None:
    """UsageError for options that a model that writes texts does not have, all of them at once."""
    defaults = {field.name: field.default for field in fields(LoadOptions)}
    wrong = [f"policy.{name} = {value!r}" for name, value in given.items() if value != defaults[name]]
    if wrong:
        remedy = "it is for policies of robots, and this one writes texts; leave it out"
        raise UsageError(f"{', '.join(wrong)}: {remedy}.")
