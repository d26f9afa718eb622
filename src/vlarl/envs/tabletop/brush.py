"""Antialiased painting with signed distances: shapes are functions on the image plane, so any resolution is sharp."""

from __future__ import annotations

import numpy as np

from vlarl.envs.tabletop.geometry import DEPTH_TO_SCREEN, HEIGHT_TO_SCREEN, Float64Array

Color = tuple[float, float, float]
LIGHT_FROM = -0.35  # where the brightest line of an upright cylinder lies, as a fraction of its radius
OUTLINE: Color = (0.10, 0.09, 0.09)


def mix(a: Color, b: Color, weight: float) -> Color:
    """Between two colours."""
    return (a[0] + weight * (b[0] - a[0]), a[1] + weight * (b[1] - a[1]), a[2] + weight * (b[2] - a[2]))


def lighter(color: Color, weight: float) -> Color:
    """Towards white."""
    return mix(color, (1.0, 1.0, 1.0), weight)


def darker(color: Color, weight: float) -> Color:
    """Towards black."""
    return mix(color, (0.0, 0.0, 0.0), weight)


class Brush:
    """An RGBA canvas over sample points u (right), v (up), in metres from an object's base on the image plane."""

    def __init__(self, u: Float64Array, v: Float64Array, pixel: float) -> None:
        self.u, self.v, self.pixel = np.broadcast_arrays(u, v)[0], np.broadcast_arrays(u, v)[1], pixel
        self.rgb = np.zeros((*self.u.shape, 3))  # premultiplied
        self.alpha = np.zeros(self.u.shape)

    def fill(self, distance: Float64Array, color: Color | Float64Array, alpha: float = 1.0) -> None:
        """Paint where a signed distance is negative, blending over one pixel at its edge."""
        self.blend(alpha * np.clip(0.5 - distance / self.pixel, 0.0, 1.0), color)

    def blend(self, cover: Float64Array, color: Color | Float64Array) -> None:
        """Paint with a given coverage."""
        keep = 1.0 - cover
        self.rgb = self.rgb * keep[..., None] + cover[..., None] * np.asarray(color)
        self.alpha = self.alpha * keep + cover

    def outlined(self, distance: Float64Array, color: Color | Float64Array, width: float = 0.003) -> None:
        """Fill a shape with a soft dark edge, which separates it from what is behind."""
        self.fill(distance - width, OUTLINE, alpha=0.45)
        self.fill(distance, color)

    def ellipse(self, cu: float, cv: float, ru: float, rv: float) -> Float64Array:
        """Distance to an ellipse (to first order)."""
        pu, pv = self.u - cu, self.v - cv
        k1 = np.hypot(pu / ru, pv / rv)
        k2 = np.hypot(pu / ru**2, pv / rv**2)
        distance: Float64Array = k1 * (k1 - 1.0) / np.maximum(k2, 1e-9)
        return distance

    def disc(self, height: float, radius: float, y: float = 0.0) -> Float64Array:
        """Distance to a horizontal disc at a height above the base."""
        up = HEIGHT_TO_SCREEN * height + DEPTH_TO_SCREEN * y
        return self.ellipse(0.0, up, radius, DEPTH_TO_SCREEN * radius)

    def box(self, u0: float, u1: float, v0: float, v1: float, rounding: float = 0.0) -> Float64Array:
        """Distance to an upright rectangle on the image plane."""
        hu, hv = (u1 - u0) / 2 - rounding, (v1 - v0) / 2 - rounding
        qu = np.abs(self.u - (u0 + u1) / 2) - hu
        qv = np.abs(self.v - (v0 + v1) / 2) - hv
        outside = np.hypot(np.maximum(qu, 0), np.maximum(qv, 0))
        distance: Float64Array = outside + np.minimum(np.maximum(qu, qv), 0) - rounding
        return distance

    def tapered(self, low: float, high: float, r_low: float, r_high: float) -> Float64Array:
        """Distance to the outline of an upright cone between two heights."""
        v0, v1 = HEIGHT_TO_SCREEN * low, HEIGHT_TO_SCREEN * high
        t = np.clip((self.v - v0) / max(v1 - v0, 1e-6), 0.0, 1.0)
        sides = np.abs(self.u) - (r_low + t * (r_high - r_low))
        body = np.maximum(sides, np.maximum(v0 - self.v, self.v - v1))
        outline: Float64Array = np.minimum(body, np.minimum(self.disc(low, r_low), self.disc(high, r_high)))
        return outline

    def band(self, low: float, high: float, r_low: float, r_high: float) -> Float64Array:
        """Distance to the visible side of an upright cone, without its top."""
        return np.maximum(self.tapered(low, high, r_low, r_high), -self.disc(high, r_high))

    def round_shade(self, color: Color, radius: float, contrast: float = 0.45) -> Float64Array:
        """The colour of an upright cylinder's side: bright on the left, dark to the right."""
        across = np.clip(self.u / radius - LIGHT_FROM, -1.5, 1.5)
        light = 1.12 - contrast * across**2
        glint = 0.25 * np.exp(-((across / 0.22) ** 2))
        return np.clip(np.asarray(color) * light[..., None] + glint[..., None], 0.0, 1.0)
