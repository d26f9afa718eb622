"""A run on the workers of a Ray cluster, behind the same contracts as in one process.

    driver (this process)                        workers (Ray actors)
    loop ── Collector ── PoolGroup ────────────► environments 0 …
                     └── EngineGroup ──────────► engine 0 …  ◄── weights ──┐
         ── RewardGroup ───────────────────────► reward 0 …               │
         ── CurriculumWorker ──────────────────► curriculum               │
         ── LearnerGroup ──────────────────────► learner 0 … ─────────────┘

The driver asks, workers answer; weights go from learners to engines without passing the driver. Every wait has a
deadline. A worker that died or hung is replaced, but for learners: their loss ends the run at its last checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlarl.config.schema import Config
from vlarl.errors import MissingExtraError
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.trace import NoTrace

if TYPE_CHECKING:
    from vlarl.parts import Parts


def launch_cluster(config: Config, directory: RunDirectory, trace: NoTrace, checkpoint: Path | None) -> Parts:
    """Start all workers of a run; `checkpoint` holds the weights to go on from."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("ray", "cluster") from error
    from vlarl.distributed.launch import launch_workers

    return launch_workers(config, directory, trace, checkpoint)
