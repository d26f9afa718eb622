"""A run on the workers of a Ray cluster, behind the same contracts as in one process.

    driver (this process)                        workers (Ray actors)
    loop ── Collector ── PoolGroup ────────────► environments 0 …
                     └── EngineGroup ──────────► engine 0 …  ◄── weights ──┐
         ── RewardGroup ───────────────────────► reward 0 …               │
         ── CurriculumWorker ──────────────────► curriculum               │
         ── LearnerGroup ──────────────────────► learner 0 … ─────────────┘

The driver calls its workers; weights go from learners to engines without passing through the driver. Every wait has a
deadline. A worker that died or hung is replaced, except a learner: its loss ends the run at the last checkpoint.
"""
