"""The appearance of each kind of object: one painting function per sprite, in metres, at any resolution.

Names are kinds, plus states (`stove_on`), levels (`drawer:7`, `gripper:3`), `shadow:<kind>` and overlays that are
painted over a container's contents (`basket_front`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from vlarl.envs.tabletop.brush import Brush, Color, darker, lighter, mix
from vlarl.envs.tabletop.geometry import DEPTH_TO_SCREEN as DEPTH
from vlarl.envs.tabletop.geometry import HEIGHT_TO_SCREEN as HEIGHT
from vlarl.envs.tabletop.geometry import Float64Array
from vlarl.envs.tabletop.objects import KINDS

DRAWER_LEVELS = 11
GRIPPER_LEVELS = 11

WHITE: Color = (0.96, 0.96, 0.94)
BLACK: Color = (0.13, 0.13, 0.15)
STEEL: Color = (0.72, 0.74, 0.77)
WOOD: Color = (0.50, 0.30, 0.16)
RED: Color = (0.80, 0.10, 0.10)
BLUE: Color = (0.13, 0.32, 0.75)

Paint = Callable[[Brush], None]


@dataclass(frozen=True)
class Sprite:
    """A painting function and the part of the image plane it paints, around the object's base."""

    paint: Paint
    half_width: float
    below: float
    above: float


def _bowl(brush: Brush) -> None:
    side, height = 0.042, 0.045
    brush.outlined(brush.tapered(0.0, height, 0.024, side), brush.round_shade((0.20, 0.20, 0.23), side))
    brush.fill(brush.disc(height, side), (0.42, 0.43, 0.47))
    depth = np.clip((brush.v - HEIGHT * height) / (DEPTH * side), -1, 1)
    inner = (0.10 + 0.10 * (1 + depth) / 2)[..., None] * np.array([0.95, 0.97, 1.1])
    brush.fill(brush.disc(height, side - 0.007), inner)
    brush.fill(brush.disc(0.018, 0.018, y=0.003), (0.24, 0.24, 0.27), alpha=0.6)


def _plate(brush: Brush) -> None:
    brush.outlined(brush.disc(0.004, 0.058), (0.72, 0.71, 0.70), width=0.0025)
    brush.fill(brush.disc(0.012, 0.06), (0.97, 0.97, 0.96))
    brush.fill(brush.disc(0.012, 0.053), (0.80, 0.22, 0.20))
    brush.fill(brush.disc(0.012, 0.0485), (0.95, 0.95, 0.94))
    brush.fill(brush.disc(0.009, 0.037), (0.84, 0.84, 0.84))
    brush.fill(brush.disc(0.008, 0.035), (0.93, 0.93, 0.92))


def _ramekin(brush: Brush) -> None:
    brush.outlined(brush.tapered(0.0, 0.03, 0.029, 0.032), brush.round_shade((0.93, 0.90, 0.82), 0.032))
    brush.fill(brush.disc(0.03, 0.032), (0.98, 0.96, 0.90))
    brush.fill(brush.disc(0.029, 0.026), (0.72, 0.45, 0.14))
    brush.fill(brush.disc(0.026, 0.022), (0.93, 0.66, 0.24))


def _box(brush: Brush, w: float, d: float, h: float, side: Color, top: Color, label: Color, label_top: bool) -> None:
    """A closed box seen from the front: front face, top face, and a label on one of them."""
    front, back = -DEPTH * d, -DEPTH * d + HEIGHT * h
    shade = np.asarray(side) * (0.80 + 0.12 * np.clip((brush.v - front) / max(back - front, 1e-6), 0, 1))[..., None]
    brush.outlined(brush.box(-w, w, front, DEPTH * d + HEIGHT * h, 0.003), shade)
    brush.fill(brush.box(-w, w, back, DEPTH * d + HEIGHT * h, 0.002), top)
    brush.fill(brush.box(-w, w, back - 0.0012, back + 0.0012), lighter(top, 0.5), alpha=0.8)
    if label_top:
        middle = HEIGHT * h
        brush.fill(brush.box(-0.62 * w, 0.62 * w, middle - 0.45 * DEPTH * d, middle + 0.45 * DEPTH * d, 0.003), label)
    else:
        brush.fill(brush.box(-w, w, front + 0.25 * HEIGHT * h, front + 0.62 * HEIGHT * h), darker(label, 0.08))


def _carton(brush: Brush, body: Color, label: Color) -> None:
    _box(brush, 0.024, 0.018, 0.085, body, darker(body, 0.12), label, label_top=False)
    top = HEIGHT * 0.085
    brush.fill(brush.box(-0.024, 0.024, top - 0.004, top + 0.012, 0.002), lighter(label, 0.1))
    brush.fill(brush.box(-0.024, 0.024, top + 0.009, top + 0.013), lighter(body, 0.4))


def _can(brush: Brush, label: Color, stripe: Color) -> None:
    radius, height = 0.027, 0.065
    brush.outlined(brush.tapered(0.0, height, radius, radius), brush.round_shade(STEEL, radius))
    brush.fill(brush.band(0.005, height - 0.004, radius, radius), brush.round_shade(label, radius))
    brush.fill(brush.band(0.022, 0.036, radius, radius), brush.round_shade(stripe, radius))
    brush.fill(brush.disc(height, radius), (0.86, 0.87, 0.89))
    brush.fill(brush.disc(height, radius - 0.005), mix(label, (0.66, 0.68, 0.71), 0.55))


def _bottle(brush: Brush, body: Color, label: Color, cap: Color, height: float, waist: float) -> None:
    radius = 0.023
    brush.outlined(brush.tapered(waist, height - 0.012, radius * 0.8, 0.010), brush.round_shade(body, radius))
    brush.outlined(brush.tapered(0.0, waist, radius, radius), brush.round_shade(body, radius), width=0.0015)
    brush.fill(brush.tapered(waist, height - 0.012, radius, 0.009), brush.round_shade(body, radius))
    brush.fill(brush.band(0.14 * height, 0.46 * height, radius, radius), brush.round_shade(label, radius))
    brush.outlined(brush.tapered(height - 0.016, height, 0.011, 0.010), brush.round_shade(cap, 0.011), width=0.001)
    brush.fill(brush.disc(height, 0.010), lighter(cap, 0.3))


def _mug(brush: Brush, color: Color) -> None:
    radius, height = 0.027, 0.055
    ring = np.abs(brush.ellipse(0.028, 0.018, 0.014, 0.014)) - 0.004
    brush.outlined(ring, darker(color, 0.15), width=0.002)
    brush.outlined(brush.tapered(0.0, height, 0.025, radius), brush.round_shade(color, radius))
    brush.fill(brush.disc(height, radius), lighter(color, 0.4))
    brush.fill(brush.disc(height - 0.001, radius - 0.005), darker(color, 0.55))


def _moka_pot(brush: Brush) -> None:
    brush.outlined(brush.box(0.018, 0.042, 0.012, 0.050, 0.006), BLACK)
    brush.fill(brush.box(0.018, 0.034, 0.018, 0.043, 0.004), (0.45, 0.44, 0.42))
    brush.outlined(brush.tapered(0.0, 0.038, 0.03, 0.021), brush.round_shade(STEEL, 0.03, 0.6))
    brush.outlined(brush.tapered(0.040, 0.078, 0.019, 0.026), brush.round_shade(STEEL, 0.026, 0.6), width=0.002)
    brush.fill(brush.disc(0.078, 0.026), (0.58, 0.60, 0.63))
    brush.fill(brush.disc(0.080, 0.018), (0.80, 0.81, 0.83))
    brush.fill(brush.ellipse(0.0, HEIGHT * 0.088, 0.007, 0.007), BLACK)


def _stove(brush: Brush, burning: bool) -> None:
    _box(brush, 0.078, 0.075, 0.03, (0.42, 0.45, 0.50), (0.56, 0.59, 0.63), STEEL, label_top=True)
    brush.fill(brush.box(-0.07, 0.07, HEIGHT * 0.03 - 0.052, HEIGHT * 0.03 + 0.052, 0.006), (0.74, 0.77, 0.80))
    hot, cold = (1.0, 0.22, 0.05), (0.36, 0.38, 0.42)
    if burning:
        glow = np.clip(1.0 - np.hypot(brush.u / 0.07, (brush.v - HEIGHT * 0.03) / 0.052), 0, 1)
        brush.blend(0.75 * glow, (1.0, 0.22, 0.05))
    for radius in (0.050, 0.033, 0.016):
        ring = np.abs(brush.disc(0.03, radius)) - 0.0038
        brush.fill(ring, hot if burning else cold)


def _knob(brush: Brush, turned: bool) -> None:
    brush.outlined(brush.tapered(0.0, 0.026, 0.016, 0.014), brush.round_shade((0.92, 0.80, 0.20), 0.016))
    brush.fill(brush.disc(0.026, 0.014), (1.0, 0.35, 0.10) if turned else (0.98, 0.90, 0.40))
    mark = brush.box(-0.011, 0.011, HEIGHT * 0.026 - 0.002, HEIGHT * 0.026 + 0.002)
    upright = brush.box(-0.002, 0.002, HEIGHT * 0.026 - 0.009, HEIGHT * 0.026 + 0.009)
    brush.fill(mark if turned else upright, BLACK)


def _cabinet(brush: Brush) -> None:
    _box(brush, 0.075, 0.055, 0.11, WOOD, (0.68, 0.45, 0.26), WOOD, label_top=True)
    brush.fill(brush.box(-0.068, 0.068, HEIGHT * 0.11 - 0.037, HEIGHT * 0.11 + 0.037, 0.004), (0.62, 0.40, 0.22))
    front = -DEPTH * 0.055
    brush.fill(brush.box(-0.066, 0.066, front + 0.040, front + 0.060, 0.002), darker(WOOD, 0.35))
    brush.fill(brush.box(-0.063, 0.063, front + 0.0425, front + 0.0575, 0.002), lighter(WOOD, 0.08))
    brush.fill(brush.box(-0.068, 0.068, front + 0.002, front + 0.037, 0.002), (0.12, 0.08, 0.05))


def _drawer(brush: Brush, level: int) -> None:
    """The front of the drawer, and as much of its inside as its extension shows."""
    depth = DEPTH * 0.11 * level / (DRAWER_LEVELS - 1)
    top = HEIGHT * 0.055
    if level:
        brush.outlined(brush.box(-0.064, 0.064, top - 0.008, top + depth, 0.001), (0.72, 0.50, 0.30))
        brush.fill(brush.box(-0.057, 0.057, top - 0.004, top + depth, 0.001), (0.24, 0.15, 0.09))
        brush.fill(brush.box(-0.057, 0.057, top - 0.004, top + 0.55 * depth, 0.001), (0.36, 0.23, 0.13))
    brush.outlined(brush.box(-0.066, 0.066, 0.0, top, 0.003), (0.78, 0.56, 0.34), width=0.002)
    brush.fill(brush.box(-0.059, 0.059, 0.005, top - 0.005, 0.002), (0.70, 0.48, 0.27))
    brush.outlined(brush.box(-0.022, 0.022, 0.014, 0.023, 0.004), (0.93, 0.93, 0.95), width=0.002)


def _rack(brush: Brush) -> None:
    _box(brush, 0.045, 0.045, 0.03, (0.16, 0.42, 0.40), (0.22, 0.55, 0.52), WHITE, label_top=True)
    for k in range(4):
        low = HEIGHT * 0.03 - 0.032 + 0.0185 * k
        brush.fill(brush.box(-0.042, 0.042, low, low + 0.010, 0.002), (0.30, 0.68, 0.64))


def _weave(brush: Brush) -> Float64Array:
    pattern = np.sin(brush.u * 420) * np.sin(brush.v * 420)
    color: Float64Array = np.clip((1.0 + 0.13 * pattern)[..., None] * np.array([0.83, 0.66, 0.40]), 0, 1)
    return color


def _basket(brush: Brush) -> None:
    w, d, h = 0.075, 0.062, 0.06
    brush.outlined(brush.box(-w, w, -DEPTH * d, DEPTH * d + HEIGHT * h, 0.01), _weave(brush))
    inside = brush.box(-w + 0.009, w - 0.009, HEIGHT * h - DEPTH * d + 0.007, HEIGHT * h + DEPTH * d - 0.007, 0.006)
    brush.fill(inside, (0.36, 0.25, 0.13))
    floor = brush.box(-w + 0.015, w - 0.015, HEIGHT * h - DEPTH * d + 0.007, DEPTH * d - 0.004, 0.005)
    brush.fill(floor, (0.50, 0.36, 0.20))


def _basket_front(brush: Brush) -> None:
    w, d, h = 0.075, 0.062, 0.06
    top = HEIGHT * h - DEPTH * d
    brush.fill(brush.box(-w, w, -DEPTH * d, top + 0.007, 0.01), _weave(brush))
    brush.fill(brush.box(-w, w, top, top + 0.007, 0.003), (0.93, 0.78, 0.52))


def _gripper(brush: Brush, level: int) -> None:
    """Two fingers whose tips are at the origin, the hand above them, and an arm that fades out."""
    half_gap = 0.007 + 0.033 * level / (GRIPPER_LEVELS - 1)
    fade = np.clip((0.20 - brush.v) / 0.07, 0.0, 1.0)
    arm = np.clip(0.5 - brush.box(-0.017, 0.017, 0.09, 0.24, 0.004) / brush.pixel, 0, 1)
    brush.blend(0.9 * arm * fade, brush.round_shade((0.86, 0.87, 0.90), 0.02))
    brush.outlined(brush.box(-0.024, 0.024, 0.086, 0.112, 0.007), brush.round_shade((0.20, 0.45, 0.85), 0.026))
    for side in (-1, 1):
        centre = side * (half_gap + 0.0055)
        finger = brush.box(centre - 0.0065, centre + 0.0065, -0.004, 0.066, 0.003)
        brush.outlined(finger, (0.26, 0.27, 0.31), width=0.002)
        brush.fill(brush.box(centre - 0.0065, centre + 0.0065, -0.004, 0.012, 0.003), (0.95, 0.42, 0.10))
        brush.fill(brush.box(centre - 0.0045, centre - 0.0015, 0.014, 0.062), (0.48, 0.50, 0.55))
    brush.outlined(brush.box(-0.052, 0.052, 0.058, 0.090, 0.008), brush.round_shade((0.90, 0.91, 0.93), 0.06, 0.3))


def _shadow(brush: Brush, ru: float, rv: float, darkness: float) -> None:
    """A soft spot, a little to the right because the light comes from the left."""
    away = np.hypot((brush.u - 0.006) / ru, (brush.v + 0.002) / rv)
    brush.blend(darkness * np.clip(1.35 - away, 0.0, 0.7) / 0.7, (0.08, 0.05, 0.03))


_PAINTINGS: dict[str, Paint] = {
    "bowl": _bowl,
    "plate": _plate,
    "ramekin": _ramekin,
    "cookie_box": partial(
        _box,
        w=0.048,
        d=0.036,
        h=0.035,
        side=(0.62, 0.13, 0.30),
        top=(0.80, 0.22, 0.42),
        label=(0.98, 0.85, 0.55),
        label_top=True,
    ),
    "stove": partial(_stove, burning=False),
    "stove_on": partial(_stove, burning=True),
    "knob": partial(_knob, turned=False),
    "knob_on": partial(_knob, turned=True),
    "cabinet": _cabinet,
    "rack": _rack,
    "basket": _basket,
    "basket_front": _basket_front,
    "wine_bottle": partial(
        _bottle, body=(0.10, 0.27, 0.15), label=(0.93, 0.89, 0.76), cap=(0.55, 0.08, 0.16), height=0.14, waist=0.085
    ),
    "cream_cheese": partial(
        _box, w=0.031, d=0.02, h=0.024, side=(0.40, 0.62, 0.88), top=(0.62, 0.80, 0.97), label=WHITE, label_top=True
    ),
    "butter": partial(
        _box,
        w=0.031,
        d=0.02,
        h=0.022,
        side=(0.88, 0.74, 0.18),
        top=(1.0, 0.90, 0.38),
        label=(0.98, 0.97, 0.80),
        label_top=True,
    ),
    "pudding": partial(
        _box,
        w=0.029,
        d=0.022,
        h=0.03,
        side=(0.33, 0.17, 0.09),
        top=(0.42, 0.22, 0.12),
        label=(0.85, 0.55, 0.75),
        label_top=True,
    ),
    "milk": partial(_carton, body=WHITE, label=BLUE),
    "orange_juice": partial(_carton, body=(0.98, 0.60, 0.10), label=(0.20, 0.55, 0.20)),
    "alphabet_soup": partial(_can, label=(0.16, 0.36, 0.78), stripe=(0.98, 0.86, 0.30)),
    "tomato_sauce": partial(_can, label=(0.82, 0.14, 0.12), stripe=WHITE),
    "ketchup": partial(_bottle, body=RED, label=(0.90, 0.15, 0.12), cap=WHITE, height=0.105, waist=0.07),
    "bbq_sauce": partial(
        _bottle, body=(0.24, 0.10, 0.28), label=(0.90, 0.62, 0.18), cap=BLACK, height=0.105, waist=0.07
    ),
    "salad_dressing": partial(
        _bottle, body=(0.45, 0.72, 0.22), label=(0.95, 0.96, 0.88), cap=(0.13, 0.42, 0.16), height=0.105, waist=0.07
    ),
    "moka_pot": _moka_pot,
    "white_mug": partial(_mug, color=(0.93, 0.93, 0.95)),
    "yellow_mug": partial(_mug, color=(0.96, 0.78, 0.16)),
}
OVERLAYS: dict[str, str] = {"basket": "basket_front"}
_SHADOW_SHAPES: dict[str, tuple[float, float, float]] = {  # half axes on the screen, darkness
    "gripper": (0.040, 0.025, 0.36),
    "stove": (0.092, 0.075, 0.4),
    "cabinet": (0.09, 0.062, 0.45),
    "basket": (0.088, 0.066, 0.4),
    "plate": (0.066, 0.052, 0.35),
    "drawer": (0.07, 0.02, 0.35),
    "rack": (0.055, 0.045, 0.4),
    "cookie_box": (0.056, 0.040, 0.4),
}
MARGIN = 0.012


def sprite(name: str) -> Sprite:
    """The sprite of that name."""
    family, _, detail = name.partition(":")
    if family == "shadow":
        radius = KINDS[detail].radius if detail in KINDS else 0.04
        shape = _SHADOW_SHAPES.get(detail, (1.15 * radius, 0.85 * radius, 0.42))
        return Sprite(
            partial(_shadow, ru=shape[0], rv=shape[1], darkness=shape[2]), *(1.5 * shape[i] for i in (0, 1, 1))
        )
    if family == "gripper":
        return Sprite(partial(_gripper, level=int(detail)), 0.068, 0.012, 0.21)
    if family == "drawer":
        return Sprite(partial(_drawer, level=int(detail)), 0.078, MARGIN, 0.14)
    kind = KINDS[family.removesuffix("_on").removesuffix("_front")]
    extent = max(kind.radius * 1.05, 0.045 if kind.name == "moka_pot" else 0.0)
    return Sprite(
        _PAINTINGS[name], extent + MARGIN, DEPTH * kind.radius + MARGIN, kind.radius + HEIGHT * kind.height + MARGIN
    )
