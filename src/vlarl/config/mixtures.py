"""Mixtures of datasets: which datasets, and how often each is sampled. Checked without reading any of them.

`demos.mixture` lists NAME:WEIGHT, or the name of a ready mixture, whose weights are OpenVLA's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SEPARATOR = ":"  # not =, which would make an override of a second entry on the command line

HYDRA = "stanford_hydra_dataset_converted_externally_to_rlds"
BUDS = "austin_buds_dataset_converted_externally_to_rlds"
FRANKA_PLAY = "nyu_franka_play_dataset_converted_externally_to_rlds"
FURNITURE = "furniture_bench_dataset_converted_externally_to_rlds"
KITCHEN = "ucsd_kitchen_dataset_converted_externally_to_rlds"
SAILOR = "austin_sailor_dataset_converted_externally_to_rlds"
SIRIUS = "austin_sirius_dataset_converted_externally_to_rlds"
EDAN = "dlr_edan_shared_control_converted_externally_to_rlds"
PICKUP = "iamlab_cmu_pickup_insert_converted_externally_to_rlds"

MAGIC_SOUP = {
    "fractal20220817_data": 0.54087122203,
    "kuka": 0.8341046294,
    "bridge_orig": 1.0,
    "taco_play": 2.0,
    "jaco_play": 1.0,
    "berkeley_cable_routing": 1.0,
    "roboturk": 2.0,
    "viola": 2.0,
    "berkeley_autolab_ur5": 2.0,
    "toto": 1.0,
    "language_table": 0.1,
    HYDRA: 2.0,
    BUDS: 1.0,
    FRANKA_PLAY: 3.0,
    FURNITURE: 0.1,
    KITCHEN: 2.0,
    SAILOR: 1.0,
    SIRIUS: 1.0,
    EDAN: 1.0,
    PICKUP: 1.0,
    "utaustin_mutex": 1.0,
    "berkeley_fanuc_manipulation": 2.0,
    "cmu_stretch": 1.0,
}
MAGIC_SOUP_PLUS = {**MAGIC_SOUP, "bc_z": 0.2, "fmb_dataset": 1.0, "dobbe": 0.2, "droid": 0.06}

NAMED: dict[str, dict[str, float]] = {
    "bridge_rt_1": {"bridge_orig": 1.0, "fractal20220817_data": 1.0},
    "rtx": {
        "fractal20220817_data": 0.54087122203,
        "kuka": 0.8341046294,
        "bridge_orig": 1.0,
        "taco_play": 2.0,
        "jaco_play": 2.0,
        "berkeley_cable_routing": 3.0,
        "roboturk": 1.0,
        "viola": 2.0,
        "berkeley_autolab_ur5": 1.0,
        "toto": 1.0,
    },
    "oxe_magic_soup": MAGIC_SOUP,
    "oxe_magic_soup_plus": MAGIC_SOUP_PLUS,
    "oxe_magic_soup_plus_minus": {
        name: 1.0 if name == "fractal20220817_data" else weight
        for name, weight in MAGIC_SOUP_PLUS.items()
        if name not in ("language_table", "droid")
    },
    "libero_all_no_noops": {f"libero_{suite}_no_noops": 1.0 for suite in ("spatial", "object", "goal", "10")},
}


@dataclass(frozen=True)
class WeightedDataset:
    """A dataset of a mixture: a folder below demos.path, or a path of its own."""

    name: str
    weight: float


def parse_mixture(entries: Sequence[str]) -> tuple[WeightedDataset, ...]:
    """The datasets of `demos.mixture`; ValueError names the entry that can't be read.

    >>> parse_mixture(["my_robot:0.5", "toto"])
    (WeightedDataset(name='my_robot', weight=0.5), WeightedDataset(name='toto', weight=1.0))
    """
    datasets: list[WeightedDataset] = []
    for entry in entries:
        name, _, text = entry.partition(SEPARATOR)
        try:
            weight = float(text) if SEPARATOR in entry else 1.0
        except ValueError:
            weight = math.nan
        if not name or not (0 < weight < math.inf):
            raise ValueError(f"{entry!r} is not NAME or NAME:WEIGHT with a weight above 0")
        datasets += [WeightedDataset(one, weight * part) for one, part in NAMED.get(name, {name: 1.0}).items()]
    names = [dataset.name for dataset in datasets]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} is in it more than once")
    return tuple(datasets)


def is_named(entries: Sequence[str]) -> bool:
    """Whether a mixture includes a ready one."""
    return any(entry.partition(SEPARATOR)[0] in NAMED for entry in entries)
