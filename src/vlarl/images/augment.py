"""Random crops and colours of training images, on any device, as OpenVLA's data pipeline makes them with TensorFlow.

    crop and resize ─► brightness ─► contrast ─► saturation ─► hue        values are clipped to [0, 1] after each

What is random comes from the caller: one row of uniform values for each image, so that an image is changed in the same
way wherever and whenever it is computed. The original takes the crop's two offsets from one value, which puts all crops
on a diagonal; here they are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_UNIFORMS = 6  # top, left, brightness, contrast, saturation, hue
FLOAT_TO_BYTE = 255.5  # TensorFlow truncates this product, which is not quite rounding


@dataclass(frozen=True)
class Strength:
    """How far images are changed; those of OpenVLA by default."""

    crop_area: float = 0.9  # fraction of the image that the crop keeps
    brightness: float = 0.2  # largest value that is added, of 1
    contrast: float = 0.2  # factors are between 1 - contrast and 1 + contrast
    saturation: float = 0.2
    hue: float = 0.05  # largest turn, of the whole circle


def augment(images: torch.Tensor, uniforms: torch.Tensor, strength: Strength) -> torch.Tensor:
    """[N, H, W, 3] uint8 images, each changed by its row of uniforms [N, NUM_UNIFORMS] in [0, 1)."""
    x = images.float() * (1 / 255)
    top, left, *rest = uniforms.to(x.device, x.dtype).unbind(dim=1)
    brightness, contrast, saturation, hue = (2 * value - 1 for value in rest)  # [-1, 1)
    if strength.crop_area < 1:
        x = crop(x, top, left, strength.crop_area).clamp(0, 1)
    if strength.brightness:
        x = (x + column(strength.brightness * brightness)).clamp(0, 1)
    if strength.contrast:
        x = adjust_contrast(x, 1 + strength.contrast * contrast).clamp(0, 1)
    if strength.saturation:
        x = adjust_saturation(x, 1 + strength.saturation * saturation).clamp(0, 1)
    if strength.hue:
        x = adjust_hue(x, strength.hue * hue).clamp(0, 1)
    return (x * FLOAT_TO_BYTE).clamp(max=255).to(torch.uint8)


def column(values: torch.Tensor) -> torch.Tensor:
    """[N] values as [N, 1, 1, 1]."""
    return values.view(-1, 1, 1, 1)


def crop(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, area: float) -> torch.Tensor:
    """A part of each image [N, H, W, 3], resized back to the whole, bilinearly and with aligned corners.

    `top` and `left` [N] in [0, 1) say how far into what the crop leaves out it lies.
    """
    side = area**0.5
    _, height, width, _ = images.shape
    low, high, fraction = _coordinates(left, width, side)
    rows = torch.arange(len(images), device=images.device)[:, None]
    columns = images.transpose(1, 2)  # [N, W, H, 3]
    mixed = torch.lerp(columns[rows, low], columns[rows, high], fraction[..., None, None]).transpose(1, 2)
    low, high, fraction = _coordinates(top, height, side)
    return torch.lerp(mixed[rows, low], mixed[rows, high], fraction[..., None, None])


def _coordinates(offset: torch.Tensor, size: int, side: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, size] the pixels on either side of each pixel of the crop, and its fraction between them."""
    start = offset * ((1 - side) * (size - 1))
    places = start[:, None] + torch.arange(size, device=offset.device, dtype=offset.dtype) * side
    places = places.clamp(max=size - 1)
    low = places.floor()
    return low.long(), places.ceil().long(), places - low


def adjust_contrast(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Each channel's distance from its mean over the image, multiplied."""
    means = images.mean(dim=(1, 2), keepdim=True)
    return (images - means) * column(factors) + means


def adjust_saturation(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The saturation of HSV multiplied, at most to 1: hue and value stay, so distances from the value are scaled."""
    value = images.amax(dim=-1, keepdim=True)
    extent = value - images.amin(dim=-1, keepdim=True)
    most = torch.where(extent > 0, value / extent.clamp(min=torch.finfo(images.dtype).tiny), torch.inf)
    return value - (value - images) * torch.minimum(column(factors), most)


def adjust_hue(images: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """The hue of HSV turned by a fraction of the whole circle."""
    value, extent = images.amax(dim=-1), images.amax(dim=-1) - images.amin(dim=-1)
    red, green, blue = images.unbind(dim=-1)
    divisor = torch.where(extent > 0, extent, 1)
    sixth = torch.where(
        red == value,
        (green - blue) / divisor,
        torch.where(green == value, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = torch.remainder(sixth / 6 + turns.view(-1, 1, 1), 1) * 6  # of grey pixels it is not read: their extent is 0
    parts = (hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()
    turned = torch.stack([part.clamp(0, 1) for part in parts], dim=-1)
    return value[..., None] - extent[..., None] * (1 - turned)
