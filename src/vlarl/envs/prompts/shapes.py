"""The suite `prompts_shapes`: images of a few coloured shapes, or of digits, with one-word solutions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vlarl.envs.prompts.source import OnError, builtin_spec, one_turn
from vlarl.solutions import Match
from vlarl.types import Prompt, UInt8Array

SUITE = "prompts_shapes"
KINDS = ("count", "colour", "position", "compare", "digits")
INSTRUCTIONS = (
    "count the shapes",
    "name the colour of a shape",
    "say where a shape is",
    "say which colour has more shapes",
    "read a number",
)

SIZE = 56  # pixels of a side
CELLS = 4  # shapes stand in a grid of so many columns and rows, so that they never overlap
PITCH = SIZE // CELLS
RADIUS = 5  # of a shape, in pixels
DARKEST, BRIGHTEST = 8, 72  # grey of the background
NOISE = 4  # grey levels by which a pixel of the background is off, at most: no two images are the same
JITTER = 1  # pixels by which a shape is off the centre of its cell, at most: shapes never touch
DIGIT_JITTER = 3  # pixels by which digits are off the centre of the image, at most
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 90, 230), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
MOST = 5  # shapes that are counted

GLYPHS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001010010010",
    "111101111101111",
    "111101111001111",
)
"""The digits 0 to 9, each 3 pixels wide and 5 high, row by row."""


@dataclass(frozen=True)
class Shape:
    """One shape in the grid."""

    kind: str
    colour: str
    cell: int  # row * CELLS + column


class ShapePrompts:
    """Everything about a prompt follows from its task and index."""

    match: Match = "exact"
    on_error: OnError = "stop"

    def __init__(self) -> None:
        self.spec = builtin_spec(SUITE, INSTRUCTIONS)

    def prompt(self, task_id: int, state: int) -> Prompt:
        """The prompt of a kind, from its index."""
        kind = KINDS[task_id]
        rng = np.random.default_rng([task_id, state])
        text, solution, image = _MAKERS[kind](rng)
        return one_turn(text, {"solution": solution, "kind": kind, "data_source": f"{SUITE}/{kind}"}, image)


def render(shapes: list[Shape], rng: np.random.Generator) -> UInt8Array:
    """[SIZE, SIZE, 3] the shapes on a dark background, each a little off the centre of its cell."""
    image = _background(rng)
    y, x = np.mgrid[:SIZE, :SIZE]
    for shape in shapes:
        row, column = divmod(shape.cell, CELLS)
        off_y, off_x = rng.integers(-JITTER, JITTER + 1, size=2)
        dy, dx = y - (row * PITCH + PITCH // 2 + off_y), x - (column * PITCH + PITCH // 2 + off_x)
        inside = {
            "circle": dy**2 + dx**2 <= RADIUS**2,
            "square": np.maximum(abs(dy), abs(dx)) < RADIUS,
            "triangle": (abs(dy) <= RADIUS) & (2 * abs(dx) <= dy + RADIUS),
        }[shape.kind]
        image[inside] = COLOURS[shape.colour]
    return image


def render_digits(text: str, colour: str, rng: np.random.Generator, scale: int = 6) -> UInt8Array:
    """[SIZE, SIZE, 3] digits near the centre of the image, one beside the other."""
    glyphs = [np.array([int(bit) for bit in GLYPHS[int(digit)]], bool).reshape(5, 3) for digit in text]
    line = np.concatenate([np.pad(glyph, ((0, 0), (0, 1))) for glyph in glyphs], axis=1)[:, :-1]
    line = line.repeat(scale, axis=0).repeat(scale, axis=1)
    off = rng.integers(-DIGIT_JITTER, DIGIT_JITTER + 1, size=2)
    top, left = ((SIZE - side) // 2 + by for side, by in zip(line.shape, off, strict=True))
    image = _background(rng)
    image[top : top + line.shape[0], left : left + line.shape[1]][line] = COLOURS[colour]
    return image


def _background(rng: np.random.Generator) -> UInt8Array:
    grey = rng.integers(DARKEST, BRIGHTEST + 1) + rng.integers(-NOISE, NOISE + 1, size=(SIZE, SIZE, 1))
    return np.broadcast_to(grey, (SIZE, SIZE, 3)).astype(np.uint8)


def _cells(rng: np.random.Generator, count: int) -> list[int]:
    return [int(cell) for cell in rng.choice(CELLS * CELLS, count, replace=False)]


def _several(rng: np.random.Generator, names: Iterable[str], count: int) -> list[str]:
    return [str(name) for name in rng.choice(list(names), count, replace=False)]


def _one(rng: np.random.Generator, names: Iterable[str]) -> str:
    return _several(rng, names, 1)[0]


def _count(rng: np.random.Generator) -> tuple[str, str, UInt8Array]:
    count = int(rng.integers(1, MOST + 1))
    shapes = [Shape(_one(rng, SHAPES), _one(rng, COLOURS), cell) for cell in _cells(rng, count)]
    return "How many shapes are there?", str(count), render(shapes, rng)


def _colour(rng: np.random.Generator) -> tuple[str, str, UInt8Array]:
    count = int(rng.integers(1, len(SHAPES) + 1))
    kinds, colours = _several(rng, SHAPES, count), _several(rng, COLOURS, count)
    shapes = [Shape(*each) for each in zip(kinds, colours, _cells(rng, count), strict=True)]
    return f"Which colour is the {kinds[0]}?", colours[0], render(shapes, rng)


def _position(rng: np.random.Generator) -> tuple[str, str, UInt8Array]:
    first, second = _several(rng, SHAPES, 2)
    colours = _several(rng, COLOURS, 2)
    across, along = (int(n) for n in rng.choice(CELLS, 2, replace=False))  # differ along the axis in the text
    other = [int(n) for n in rng.integers(CELLS, size=2)]
    if rng.random() < 0.5:
        text, solution = f"Is the {first} left or right of the {second}?", "left" if across < along else "right"
        cells = other[0] * CELLS + across, other[1] * CELLS + along
    else:
        text, solution = f"Is the {first} above or below the {second}?", "above" if across < along else "below"
        cells = across * CELLS + other[0], along * CELLS + other[1]
    shapes = [Shape(first, colours[0], cells[0]), Shape(second, colours[1], cells[1])]
    return text, solution, render(shapes, rng)


def _compare(rng: np.random.Generator) -> tuple[str, str, UInt8Array]:
    few = int(rng.integers(1, 4))
    many = few + int(rng.integers(1, 3))
    more, less = _several(rng, COLOURS, 2)
    colours = [more] * many + [less] * few
    shapes = [Shape(_one(rng, SHAPES), *each) for each in zip(colours, _cells(rng, many + few), strict=True)]
    first, second = _several(rng, (more, less), 2)
    return f"Are there more {first} or more {second} shapes?", more, render(shapes, rng)


def _digits(rng: np.random.Generator) -> tuple[str, str, UInt8Array]:
    number = str(int(rng.integers(0, 100)))
    return "Which number is this?", number, render_digits(number, _one(rng, COLOURS), rng)


_MAKERS = {"count": _count, "colour": _colour, "position": _position, "compare": _compare, "digits": _digits}
