"""Damage to JSON files."""

import random
from typing import Any

DAMAGED_JSON = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"7",
    b'"text"',
    b"\xff\xfe\x00",
    b'{"a": 1',
    b"{'a': 1}",
    b"\x00" * 100,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 10_000,
)
"""Contents that are no JSON object."""

ABSURD: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 2**31, 2**64, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf"), True, False, None),
    *("", "x", "x" * 5000, "..", "/", "\x00", "💥", [], [None], [0] * 1000, {}, {"a": {"b": 1}}, [[[[]]]]),
)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values of a tree; of a long list, those of its first and last ones."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))]
    if isinstance(tree, list) and tree:
        ends = range(len(tree)) if len(tree) <= 20 else (*range(10), *range(len(tree) - 10, len(tree)))
        return [leaf for index in ends for leaf in leaves(tree[index], (*path, index))]
    return [path]


def replace_leaf(rng: random.Random, tree: Any) -> None:
    """Give one value of a tree, or one of its branches, another value."""
    path = rng.choice([path for path in leaves(tree) if path])
    path = path[: rng.choice((len(path), len(path), rng.randrange(1, len(path) + 1)))]
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = rng.choice(ABSURD)
