"""The cases of gpu_paths.py that train on a Ray cluster of one machine, by the command `vlarl train`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_paths import case

RUN = {
    "run.iterations": 4, "rollout.num_groups": 16, "rollout.group_size": 1, "env.num_envs": 16,
    "env.lockstep": "true", "checkpoint.interval": 1, "eval.interval": 0, "eval.states_per_task": 1, "eval.videos": 0,
    "logging.tensorboard": "false", "logging.report": "false",
    "distributed.learners_per_node": "[1]", "distributed.sharding": "none",
    "distributed.restarts": 1, "distributed.timeout_s": 120, "distributed.worker_cpus": 0.25,
}  # fmt: skip
SHARED_GPU = {"distributed.colocate": "true", "distributed.learner_gpus": 0.6, "distributed.engine_gpus": 0.4}


@case("ray_torch", 240, options={"vllm.num_engines": 0})
@case("ray_vllm", 400, options={"vllm.num_engines": 1, "vllm.sync_backend": "ipc"})
def ray_run(folder: Path, device: str, options: dict[str, Any]) -> dict[str, Any]:
    """A run on one GPU with an engine beside the learner, undisturbed and with its learner killed once."""
    kind = "vllm" if options["vllm.num_engines"] else "torch"
    rows: dict[str, list[dict[str, float]]] = {}
    found: dict[str, Any] = {}
    for name in ("calm", "disturbed"):
        started = time.perf_counter()
        run = folder / f"{kind}-{name}"
        shutil.rmtree(run, ignore_errors=True)
        own = {"run.device": device, "run.root": folder, "run.name": run.name}
        output = _train(
            run,
            RUN | (SHARED_GPU if device == "cuda" else {}) | options | own,
            disturb=name == "disturbed",
        )
        found[f"{name}_s"] = round(time.perf_counter() - started, 1)
        rows[name] = trained_rows(run)
        found[f"{name}_iterations"] = len(rows[name])
        found[f"{name}_sync_s"] = [json.loads(line).get("sync/seconds") for line in (run / "metrics.jsonl").open()]
        found["restarted"] = "are started again from the newest checkpoint" in " ".join(output.split())
    pairs = [(key, a[key], b[key]) for a, b in zip(*rows.values(), strict=True) for key in a if key in b]
    differences = {key: abs(a - b) / max(1.0, abs(a)) for key, a, b in pairs if a == a}
    found["largest_difference"] = max((size, key) for key, size in differences.items())
    last = rows["calm"][-1]
    found |= {key: value for key, value in last.items() if "mismatch" in key or "ratio" in key or key == "sync/bytes"}
    complete = found["calm_iterations"] == found["disturbed_iterations"] == RUN["run.iterations"]
    return {"passed": bool(complete and found["restarted"])} | found


def _train(run: Path, options: Mapping[str, Any], disturb: bool) -> str:
    """Train in a process; where it is to be disturbed, its learner is killed after the second iteration."""
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vlarl", "train", "tabletop_cluster", *given]
    with (run.parent / f"{run.name}.out").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.05)
            if disturb and len(trained_rows(run)) >= 2:
                os.kill(json.loads((run / "logs" / "workers.json").read_text())["learner 0"]["pid"], signal.SIGKILL)
                disturb = False
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"vlarl train ended with {process.returncode}: {text[-1000:]}")
    return text


def trained_rows(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    timed = (
        "time",
        "perf/",
        "rollout/collection_time",
        "rollout/env_steps_per_s",
        "sync/seconds",
        "sync/commit_seconds",
    )
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [
        {key: value for key, value in row.items() if not key.startswith(timed) and isinstance(value, int | float)}
        for row in rows
        if row["iteration"] > 0  # the evaluation before training
    ]
