"""A run on the workers of a Ray cluster, behind the same contracts as in one process.

    driver (this process)                        workers (Ray actors)
    loop ── Collector ── PoolGroup ────────────► environments 0 …
                     └── EngineGroup ──────────► engine 0 …  ◄── weights ──┐
         ── RewardGroup ───────────────────────► reward 0 …               │
         ── CurriculumWorker ──────────────────► curriculum               │
         ── LearnerGroup ──────────────────────► learner 0 … ─────────────┘

The driver calls its workers; weights and observations go from worker to worker without passing through it. Every wait
has a deadline. A worker that died or hung is replaced, except a learner: all learners are then started again from the
last checkpoint.
"""

import os

# A thread that outlives a run and calls Ray would otherwise start a cluster of its own, open to the network.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
