"""The image operations applied to a frame before the towers, and how config.json specifies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from vlarl.images.bicubic import ResizeStrategy


@dataclass(frozen=True, kw_only=True)
class ImagePipeline:
    """The operations on a frame before the towers, in this order; the default is a checkpoint's own preprocessor."""

    jpeg: bool = False
    resize: Literal["bicubic", "lanczos3"] = "bicubic"
    center_crop: bool = False


def resize_strategy(raw_config: Mapping[str, object]) -> ResizeStrategy:
    """The strategy that a config.json names; else `resize-naive`, which every published OpenVLA uses."""
    name = raw_config.get("image_resize_strategy", "resize-naive")
    if name not in get_args(ResizeStrategy):
        known = ", ".join(get_args(ResizeStrategy))
        raise ValueError(f"image_resize_strategy {name!r} of config.json is unknown: it must be one of {known}")
    return cast(ResizeStrategy, name)
