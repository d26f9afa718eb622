"""Golden arrays: how they are read and compared, and whether every one of them matters."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Arrays = Mapping[str, np.ndarray]

# What the generators took and not every file says: an array of this name in the file wins.
RECIPE = {
    "clip_low": 0.2,  # rl_math: the asymmetric clip
    "clip_high": 0.28,
    "clip": 0.2,  # rl_math: the symmetric clip, also CPGD's
    "value_clip": 0.2,
    "gamma": 0.99,  # rl_math: of the advantages by GAE
    "lambda": 0.95,
    "num_heads": 2,  # film, towers: the one size that no shape of a weight tells
}


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def constant(arrays: Arrays, name: str) -> float:
    """A constant of the generator: the file's, else the documented one."""
    return float(arrays[name]) if name in arrays else RECIPE[name]


def stored_state(arrays: Arrays) -> dict[str, torch.Tensor]:
    """The weights in a file, in float32; bfloat16 is stored as uint16."""
    stored = {name.removeprefix("state/"): array for name, array in arrays.items() if name.startswith("state/")}
    return {
        name: torch.from_numpy(array).view(torch.bfloat16).float() if array.dtype == np.uint16 else torch.tensor(array)
        for name, array in stored.items()
    }


def assert_close(ours: torch.Tensor | np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else ours
    assert ours.shape == theirs.shape
    difference = np.abs(ours.astype(np.float64) - theirs).max()
    assert difference <= tolerance, f"largest difference {difference}, allowed are {tolerance}"


def rounding(ours: torch.Tensor, exact: torch.Tensor, scale: np.ndarray) -> float:
    """What two float32 computations may differ by: 10 times what ours is off here, as float64 tells.

    The original adds up in another order than ours; its error on the golden inputs is up to 2.4 times ours. Less than
    the last digit of the numbers in `scale` is never asked for.
    """
    off = float((ours.double() - exact.double()).abs().max())
    return 10 * max(off, float(np.finfo(np.float32).eps * np.abs(scale).max()))


def unnoticed(arrays: Arrays, checks: Sequence[Callable[[Arrays], Any]], but_for: str | None = None) -> list[str]:
    """The arrays that nothing depends on: with one of them changed, every check still passes.

    Those whose names start with `but_for` are left out.
    """
    tried = [name for name in arrays if but_for is None or not name.startswith(but_for)]
    return [name for name in tried if all(_passes(check, {**arrays, name: changed(arrays[name])}) for check in checks)]


def _passes(check: Callable[[Arrays], Any], arrays: Arrays) -> bool:
    try:
        check(arrays)
    except (AssertionError, ValueError, IndexError, RuntimeError):
        return False
    return True


def changed(array: np.ndarray) -> np.ndarray:
    """Other values of the same shape and type. Not a mere shift, which advantages relative to a mean don't show."""
    if array.dtype.kind == "f":
        return -(array + 1)
    if array.dtype.kind == "b":
        return ~array
    if array.dtype.kind == "U":
        return np.char.add(array, "!")
    if array.dtype == np.uint8:
        return 255 - array
    return array + 1 if array.ndim == 0 else np.full_like(array, array.flat[-1])  # ids: all the same
