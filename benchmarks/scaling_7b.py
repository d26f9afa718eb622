"""The scaling model's predictions for the 7B on LIBERO at 8, 64 and 512 GPUs: the table of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scaling_model import Loop, forecast

SYNC_BYTES = 0.44e9  # LoRA of rank 32 on every linear layer
STORE_BYTES_PER_S, NETWORK_BYTES_PER_S = 0.35e9, 50e9
DRIVER_ROW_S, DRIVER_BATCH_S = 0.0003, 0.000015  # of the loop's thread, a decision; each slot is a worker
PROCESS_S = 0.0056  # JPEG, Lanczos and crop of an image on one thread, in the environment worker
ENVS_PER_GPU, EPISODES_PER_ENV, GPUS_PER_NODE, CORES_PER_NODE = 8, 4, 8, 128

# One GPU of an OpenVLA-OFT 7B on LIBERO. What is measured and what is assumed: docs/scaling.md.
OFT_7B = Loop(
    slots=1,
    episode=40,
    episode_std=0.3,
    env_chunk_s=8 / 58.04 + PROCESS_S,
    env_std=0.2,
    reset_s=0.19,
    engine_fixed_s=0.0125 - 0.275 / 32,
    engine_row_s=0.275 / 32,
    driver_row_s=DRIVER_ROW_S,
    update_s=1 / 32.4,
    batch_s=DRIVER_BATCH_S,
    minibatches=4,
    microbatch=32,
    shard_bytes=15.08e9,
    shard_ranks=8,
    gradient_bytes=0.43e9,
    ring_bytes_per_s=300e9,
    sync_bytes_per_s=NETWORK_BYTES_PER_S,
    iterations=2,
)


def on_gpus(gpus: int, *, apart: bool = False, envs_per_gpu: int = ENVS_PER_GPU) -> Loop:
    """The 7B on `gpus` GPUs, each engine and learner in turn; `apart`: a quarter run engines, the others learners.

    Rank 0 writes what it sends to the store of its machine, from where each other machine fetches it.
    """
    nodes, envs = max(gpus // GPUS_PER_NODE, 1), gpus * envs_per_gpu
    engines, ranks = (gpus // 4, gpus - gpus // 4) if apart else (gpus, gpus)
    return replace(
        OFT_7B,
        env_workers=envs,
        cores=nodes * CORES_PER_NODE,
        engines=engines,
        ranks=ranks,
        decisions=gpus * ENVS_PER_GPU * EPISODES_PER_ENV * OFT_7B.episode,
        sync_bytes=SYNC_BYTES,
        sync_copies=nodes,
        sync_fixed_s=SYNC_BYTES / STORE_BYTES_PER_S,
        max_staleness=int(apart),
        staged=apart,
        iterations=4 if apart else 2,
    )


def scaling_tables(sizes: tuple[int, ...] = (8, 64, 512)) -> Iterator[str]:
    """The lines of the table of docs/scaling.md: the effect of each change, at each size."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("in turn (`libero_10_cluster`)", {}),
        ("the same, 16 environments per GPU", {"envs_per_gpu": 16}),
        ("asynchronous: a quarter of the GPUs act, the others train", {"apart": True}),
        ("the same, 16 environments per GPU", {"apart": True, "envs_per_gpu": 16}),
    ]
    yield (
        "| GPUs | how | decisions | rollout s | batch s | update s | sync s | iteration s | decisions/s | "
        "environments, engines, learners, driver busy | busiest |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for gpus in sizes:
        for how, change in changes:
            loop = on_gpus(gpus, **change)
            f = forecast(loop)
            rollout = "" if loop.max_staleness else f"{f.rollout_s:.0f}"  # it overlaps with others
            parts = " | ".join(f"{seconds:.0f}" for seconds in (f.batch_s, f.update_s, f.sync_s))
            busy = ", ".join(f"{fraction:.0%}" for fraction in f.busy.values())
            yield (
                f"| {gpus} | {how} | {loop.decisions:,} | {rollout} | {parts} | {f.iteration_s:.0f} | "
                f"{loop.decisions / f.iteration_s:,.0f} | {busy} | {f.busiest}, {f.busiest_share:.0%} |"
            )
