"""Starts the learner ranks of a supervised run on a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import ray

from vlarl.config.finetune import FinetuneConfig
from vlarl.data.demos import DemoSource, Note, collect_demos
from vlarl.data.finetune_trainer import Collected
from vlarl.data.recorded_demos import RecordedSource
from vlarl.distributed.address import check_address
from vlarl.distributed.cluster import Cluster, wait_started
from vlarl.distributed.demand import Demand
from vlarl.distributed.finetune import FinetuneRank, RankTrainers
from vlarl.distributed.store_size import DEFAULT_STORE_MIB, FILLED, MIB
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.trace import NoTrace
from vlarl.run.cluster import choose_gpus


def launch_finetune(
    config: FinetuneConfig,
    directory: RunDirectory,
    sources: Sequence[DemoSource],
    note: Note,
    workers: ExitStack,
) -> RankTrainers:
    """The ranks, which end with the stack. Scripted experts play here first, once for all ranks, which read recorded
    episodes themselves."""
    distributed = config.distributed
    if distributed.address is not None and not ray.is_initialized():
        check_address(distributed.address)
    cluster = Cluster(distributed, directory.logs.absolute(), config.run.num_threads or 1, NoTrace())
    workers.callback(cluster.close)
    is_here = distributed.address is None
    if not is_here:  # what it lacks is said before experts play; a cluster that is started here has enough
        demand = _reserve(config, cluster, DEFAULT_STORE_MIB)
    is_recorded = any(isinstance(source, RecordedSource) for source in sources)
    played = None if is_recorded else Collected(*collect_demos(sources, note))
    if is_here:
        demand = _reserve(config, cluster, store_mib(played))
    build = partial(FinetuneRank, config, demand.num_learners, demand.learner.gpus > 0)
    learners = [
        cluster.worker(f"learner {rank}", partial(build, rank), demand.learner, place)
        for rank, place in enumerate(cluster.learner_placements(demand))
    ]
    wait_started(learners)
    return RankTrainers(learners, config, played, directory.checkpoints, note)


def _reserve(config: FinetuneConfig, cluster: Cluster, store_mib: int) -> Demand:
    """Join or start the cluster, and reserve what the ranks take."""
    cluster.connect(Demand.of_learners(config.distributed, on_gpus=False).total("CPU"), store_mib)
    demand = Demand.of_learners(config.distributed, choose_gpus(config.run.device, cluster.num_gpus))
    cluster.reserve(demand)
    return demand


def store_mib(played: Collected | None) -> int:
    """MiB of the object store of a cluster that this run starts: what experts have played passes through it."""
    if played is None:
        return DEFAULT_STORE_MIB
    return max(DEFAULT_STORE_MIB, math.ceil(sum(demos.num_bytes for demos in played.demos) / FILLED / MIB))
