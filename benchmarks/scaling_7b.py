"""The scaling model's predictions for the 7B on LIBERO at 8, 64 and 512 GPUs: the table of docs/scaling.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scaling_model import Loop, forecast

# One GPU of an OpenVLA-OFT 7B on LIBERO. What is measured and what is assumed: docs/scaling.md.
OFT_7B = Loop(
    slots=1,
    episode=40,
    env_chunk_s=8 / 58.04,
    env_spread=0.2,
    reset_s=0.19,
    engine_fixed_s=0.0125 - 0.275 / 32,
    engine_row_s=0.275 / 32,
    driver_call_s=0.002,
    update_s=1 / 32.4,
    batch_s=0.0003,
    microbatch=32,
    shard_bytes=15.08e9,
    shard_ranks=8,
    gradient_bytes=0.43e9,
    ring_bytes_per_s=300e9,
    iterations=2,
)
ENVS_PER_GPU, EPISODES_PER_ENV, GPUS_PER_NODE, CORES_PER_NODE = 8, 4, 8, 128
SYNC_BYTES, STORE_BYTES_PER_S, NETWORK_BYTES_PER_S = 14.47e9, 0.35e9, 50e9
PRESET_ROW_S, BICUBIC_ROW_S, SENT_ROW_S = 0.0053, 0.0014, 0.0002  # process() on two threads and pickling, on the driver


def on_gpus(gpus: int, *, row_s: float, store: bool, apart: bool = False, envs_per_gpu: int = ENVS_PER_GPU) -> Loop:
    """The 7B on `gpus` GPUs, each engine and learner in turn; `apart`: a quarter run engines, the others learners."""
    nodes, envs = max(gpus // GPUS_PER_NODE, 1), gpus * envs_per_gpu
    engines, ranks = (gpus // 4, gpus - gpus // 4) if apart else (gpus, gpus)
    by_store = {"sync_fixed_s": SYNC_BYTES / STORE_BYTES_PER_S, "sync_copies": nodes}
    return replace(
        OFT_7B,
        env_workers=envs,
        cores=nodes * CORES_PER_NODE,
        engines=engines,
        ranks=ranks,
        decisions=gpus * ENVS_PER_GPU * EPISODES_PER_ENV * OFT_7B.episode,
        driver_row_s=row_s,
        sync_bytes=SYNC_BYTES,
        sync_bytes_per_s=NETWORK_BYTES_PER_S,
        max_staleness=int(apart),
        iterations=4 if apart else 2,
        **(by_store if store else {}),  # type: ignore[arg-type]
    )


def scaling_tables(sizes: tuple[int, ...] = (8, 64, 512)) -> str:
    """The table of docs/scaling.md: the effect of each change, at each size."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("LANCZOS and JPEG on the driver (`libero_10_cluster`), object store", {"row_s": PRESET_ROW_S, "store": True}),
        ("bicubic on the driver, object store", {"row_s": BICUBIC_ROW_S, "store": True}),
        ("workers process images, object store", {"row_s": SENT_ROW_S, "store": True}),
        ("the same, nccl", {"row_s": SENT_ROW_S, "store": False}),
        ("the same, 16 environments per GPU", {"row_s": SENT_ROW_S, "store": False, "envs_per_gpu": 16}),
        (
            "a quarter of the GPUs act, the others train, asynchronous",
            {"row_s": SENT_ROW_S, "store": False, "apart": True},
        ),
    ]
    lines = [
        "| GPUs | how | decisions | rollout s | batch s | update s | sync s | iteration s | decisions/s | "
        "environments, engines, learners, driver busy | busiest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for gpus in sizes:
        for how, change in changes:
            loop = on_gpus(gpus, **change)
            f = forecast(loop)
            parts = " | ".join(f"{seconds:.0f}" for seconds in (f.rollout_s, f.batch_s, f.update_s, f.sync_s))
            busy = ", ".join(f"{fraction:.0%}" for fraction in f.busy.values())
            lines.append(
                f"| {gpus} | {how} | {loop.decisions:,} | {parts} | {f.iteration_s:.0f} | "
                f"{loop.decisions / f.iteration_s:,.0f} | {busy} | {f.busiest}, {f.busiest_share:.0%} |"
            )
    return "\n".join(lines)
