"""How large the object stores of a run must be, from its configuration: checked when the run starts.

    rows at once = episodes of an iteration x decisions of the longest x rollouts_per_update;
                   with rollout.num_steps, slots x decisions of a segment;
                   with asynchronous rollouts, max_staleness x num_groups groups more (rollout/outstanding.py)
    store        = rows at once x (a processed row + its images where they are read later) + two buckets of weights
                   + with rollout.refill, the images of max_refills times as many rows, until the rollout is recorded
                   + every step's images of the episodes under way that are saved (rollout.save)

The rows of an environment worker are in the store of its machine. What does not fit there spills to the machine's disk
and is read back from it, which works and is slower; a run that fits into neither is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from vlarl.config.schema import Config
from vlarl.errors import UsageError
from vlarl.observability.machine import available_memory

log = logging.getLogger(__name__)

MIB = 1 << 20
DEFAULT_STORE_MIB = 2048  # of a cluster started here, at least; Ray's default is a third of the machine's memory
FILLED = 0.8  # of a store, at which Ray begins to spill
LARGEST_PART = 0.5  # of this machine's free memory that the store of a cluster started here takes by default
TEXT_BYTES = 8 << 10  # of a row, besides its pixels


@dataclass(frozen=True)
class RowBytes:
    """What one decision leaves in the store."""

    inputs: int
    images: int  # 0 where nothing reads them later


@dataclass(frozen=True)
class Machine:
    """A machine with environment workers."""

    name: str
    fraction: float  # of all slots that it has
    store: int  # bytes of its object store
    disk: int  # bytes that are free where it spills


def rows_at_once(config: Config, num_slots: int, max_steps: int, num_steps: int) -> int:
    """Decisions that are kept at the same time, if every episode lasts to its limit of `max_steps`; `num_steps` are the
    environment steps of a decision. The last observation of an episode, or of a segment of one, is one row more."""
    rollout = config.rollout
    ahead = config.distributed.max_staleness * rollout.num_groups if config.distributed.asynchronous else 0
    groups = math.ceil(rollout.num_groups * rollout.oversample) + ahead
    runs, steps = groups * rollout.group_size, max_steps
    if rollout.num_steps is not None:
        runs, steps = num_slots, rollout.num_steps
    return runs * (math.ceil(steps / num_steps) + 1) * config.optim.rollouts_per_update


def steps_at_once(config: Config, num_slots: int, max_steps: int) -> int:
    """Steps of episodes under way whose images are all kept until they are saved."""
    if config.rollout.save == "none":
        return 0
    return math.ceil(num_slots / config.rollout.save_every) * max_steps


def bytes_needed(config: Config, rows: int, each: RowBytes, saved: int = 0) -> int:
    """Bytes of all stores together; `saved` are those of steps that are saved."""
    images = rows // config.optim.rollouts_per_update  # dropped once an iteration is recorded
    if config.rollout.refill:  # also those of the groups that were replaced
        images *= 1 + config.rollout.max_refills
    return rows * each.inputs + images * each.images + 2 * config.distributed.sync_bucket_mb * 10**6 + saved


def default_store_mib(config: Config, rows: int | None, pixels: int, with_images: bool, steps: int = 0) -> int:
    """The store of a cluster that this run starts: as configured, or what it needs as far as memory allows.

    `pixels` are the bytes of the images of one observation, as the policy reads them; `rows` is None where the length
    of episodes is not known yet; `steps` are those that are saved.
    """
    if config.distributed.object_store_mb is not None:
        return config.distributed.object_store_mb
    if rows is None:
        return DEFAULT_STORE_MIB
    each = RowBytes(pixels + TEXT_BYTES, pixels if with_images else 0)
    needed = math.ceil(bytes_needed(config, rows, each, steps * pixels) / FILLED / MIB)
    free = available_memory()
    most = needed if free is None else int(free * LARGEST_PART) // MIB
    return max(DEFAULT_STORE_MIB, min(needed, most))


def check_stores(config: Config, needed: int, machines: Sequence[Machine]) -> None:
    """Refuse a run whose rows fit neither into the stores of the machines of its environments nor onto their disks."""
    option = "ray start --object-store-memory" if config.distributed.address else "distributed.object_store_mb"
    for machine in machines:
        here = math.ceil(needed * machine.fraction)
        if here <= machine.store * FILLED:
            continue
        mib = math.ceil(here / FILLED / MIB)
        wanted = mib * MIB if config.distributed.address else mib
        what = (
            f"up to {here / 1e9:.1f} GB of observations are kept at once in the object store of {machine.name}, which "
            f"has {machine.store / 1e9:.1f} GB"
        )
        if here > machine.store * FILLED + machine.disk:
            raise UsageError(
                f"distributed: {what}, and the disk that it spills to has {machine.disk / 1e9:.1f} GB free. Set "
                f"{option} to {wanted}, free space on the disk, or collect less at once (rollout.num_groups, "
                "optim.rollouts_per_update, env.image_size)."
            )
        log.warning("%s: the rest spills to its disk, which is slower. %s %d holds all of it.", what, option, wanted)


def machines_of(num_slots: Mapping[str, int], free_disk: Mapping[str, int]) -> list[Machine]:
    """The machines with environments, from the slots and the free disk of each, by Ray's id of its node."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    return [
        Machine(
            nodes[node]["NodeManagerHostname"],
            count / sum(num_slots.values()),
            int(nodes[node]["Resources"].get("object_store_memory", 0)),
            free_disk[node],
        )
        for node, count in num_slots.items()
    ]
