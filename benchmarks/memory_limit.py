"""A GRPO iteration at OpenVLA-7B's shape on GPUs of 24 and 16 GB: the sizes vlarl chooses, their speed and peak memory.

    python benchmarks/memory_limit.py FOLDER [--cases parallel autoregressive 4-bit] [--out memory_limit.json]
    python benchmarks/memory_limit.py --toy

FOLDER gets the random checkpoint of openvla_7b.py (15 GB), unless it is there. Each case is a process of its own. It
starts from a preset for a card of that size, as `vlarl train` does: `run.memory_gb` limits the tensors of the process
to 23 or 15 GiB, on any GPU, and learner and engine have the sizes that run/memory.py chooses. Simulators are left out:
observations are random, 64 at a time. The cycle is

    rollout of all decisions ──► annotate, update ──► a short rollout and update: recordings are made again, and the
                                                      optimizer's state is there

and the peaks are over all of it. With 4 bits there are a quarter of the decisions. --toy runs the same with tiny models
on the CPU, in one process; its limits plan, and refuse nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from openvla_7b import make_inputs, write

from vlarl.algorithms import build_algorithm
from vlarl.config import load_config
from vlarl.config.schema import Config
from vlarl.decisions import Decisions, TrainBatch
from vlarl.errors import VlarlError
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.recording import graph_recorder, release_recordings
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.sampling import rollout_sampling
from vlarl.run.memory import fit_to_device, fitted, planned
from vlarl.run.memory_plan import GIB, MemoryPlan
from vlarl.training.learner import Learner
from vlarl.training.prepare import load_trained_policy

SLOTS = 64
OF_4_BITS = 4  # one in so many of the decisions is enough: their passes are slower, and all alike
GROUP = 8  # decisions that are one trajectory
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # preset, and what differs from it
    "parallel": ("libero_spatial_grpo_oft_24gb", {}),
    "autoregressive": (
        "libero_spatial_grpo_oft_24gb",
        {"policy.decoder": "autoregressive", "policy.chunk_length": None},
    ),
    "4-bit": ("libero_spatial_grpo_oft_16gb", {}),
}
TOYS = {"parallel": "builtin:tiny-oft", "autoregressive": "builtin:tiny-openvla", "4-bit": "builtin:tiny-oft"}
TOY_LIMIT = 360 * 2**20


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the cases; returns what was printed as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--decisions", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("memory_limit.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        found = run_case(given.cases[0], given.folder, given.decisions, torch.device("cuda"))
        given.out.write_text(json.dumps(found))
        return found
    results: dict[str, Any] = {"torch": torch.__version__}
    if not given.toy:
        results |= {"gpu": torch.cuda.get_device_name(), "checkpoint": write(given.folder)}
        torch.cuda.empty_cache()
    for case in given.cases:
        print(f"== {case}", flush=True)
        toy, device = given.toy, torch.device("cpu")
        results[case] = run_case(case, None, given.decisions, device) if toy else in_a_process(case, given)
        print(json.dumps(results[case], indent=2), flush=True)
        given.out.write_text(json.dumps(results, indent=2))
    return results


def in_a_process(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """The case in a process of its own; if it fails, the end of what it printed."""
    out = given.out.with_suffix(f".{case}.json")
    out.unlink(missing_ok=True)
    options = ["--cases", case, "--decisions", str(given.decisions), "--out", str(out), "--child"]
    done = subprocess.run([sys.executable, __file__, str(given.folder), *options], capture_output=True, text=True)
    printed = done.stderr.strip().splitlines()[-20:]
    if done.returncode != 0 or not out.is_file():
        return {"failed": done.returncode, "stderr": printed}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def run_case(case: str, folder: Path | None, num_decisions: int, device: torch.device) -> dict[str, Any]:
    """Plan, load, and run the cycle; errors that explain themselves are a result."""
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore")
    preset, given = CASES[case]
    given = given | {"env.num_envs": SLOTS, "policy.path": TOYS[case] if folder is None else str(folder)}
    if folder is None:
        given |= {"env.suite": "tabletop_spatial", "policy.chunk_length": None, "policy.use_proprio": None}
        given |= {"policy.resize": "bicubic", "policy.quantize": None, "policy.dtype": "float32"}
    config, plan = sized(load_config(preset, given), device)
    assert plan is not None, "a base with adapters is planned"
    num_decisions //= OF_4_BITS if case == "4-bit" else 1
    found: dict[str, Any] = {"plan": plan.lines(), "sizes": plan.to_json(), "decisions": num_decisions}
    try:
        return found | iteration(config, plan, num_decisions, device)
    except VlarlError as error:
        return found | {"failed": str(error)}


def sized(config: Config, device: torch.device) -> tuple[Config, MemoryPlan | None]:
    """The configuration with the sizes of passes that `vlarl train` would use."""
    if device.type == "cuda":
        return fit_to_device(config, device)
    plan = planned(config, TOY_LIMIT)
    return (config, None) if plan is None else (fitted(config, plan), plan)


def iteration(config: Config, plan: MemoryPlan, num_decisions: int, device: torch.device) -> dict[str, Any]:
    """The cycle of rollout and update, with the parts that run/local.py makes."""
    torch.manual_seed(0)
    policy: Any = load_trained_policy(config, None, device)
    is_scarce = plan.recorded == "released"
    if is_scarce and device.type == "cuda":
        graph_recorder(device).scarce = True
    engine = TorchEngine(policy, device, config.rollout.batch_size, config.rollout.cuda_graphs)
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
    learner = Learner(policy, algorithm, config, device)
    after_loading = allocated(device)
    inputs = make_inputs(policy, num_decisions, "cpu")
    if policy.config.use_proprio:
        inputs = replace(inputs, proprio=torch.zeros(num_decisions, policy.config.proprio_dim))
    clock = Clock(device)

    def cycle(rows: OpenVLAInputs) -> tuple[float, float, float, int]:
        decisions, rollout_s = clock.timed(lambda: decide(engine, rows, config))
        if is_scarce:
            release_recordings(device)
        batch = as_batch(rows, decisions)
        annotations, annotate_s = clock.timed(lambda: learner.annotate(batch, 1))
        batch = annotations.onto(batch, config)
        result, update_s = clock.timed(lambda: learner.update(batch, 1, lambda done, of: None))
        engine.weights_changed(learner.version)
        if is_scarce:
            release_recordings(device)
        retries.append(int(result.metrics.get("oom_retries", 0)))
        return rollout_s, annotate_s, update_s, result.num_samples

    retries: list[int] = []
    rollout_s, annotate_s, update_s, num_samples = cycle(inputs)
    recording_s = engine.counts.recording_s
    cycle(inputs.rows(slice(0, min(num_decisions, 2 * SLOTS))))
    return {
        "rollout_s": round(rollout_s, 2),
        "decisions_per_s": round(num_decisions / rollout_s, 1),
        "annotate_s": round(annotate_s, 2),
        "update_s": round(update_s, 2),
        "samples_per_s": round(num_samples / update_s, 1),
        "samples_per_s_with_annotation": round(num_samples / (annotate_s + update_s), 1),
        "recording_s": round(recording_s, 2),
        "recording_again_s": round(engine.counts.recording_s - recording_s, 2),
        "oom_retries": {"rollout": engine.counts.oom_retries, "update": sum(retries)},
        "microbatch_size": learner.microbatches.optim.microbatch_size,
        "after_loading_gib": after_loading,
        "peak_allocated_gib": peak(torch.cuda.max_memory_allocated, device),
        "peak_reserved_gib": peak(torch.cuda.max_memory_reserved, device),
    }


def decide(engine: TorchEngine, inputs: OpenVLAInputs, config: Config) -> Decisions:
    """The decisions of a rollout."""
    sampling = rollout_sampling(config.rollout)
    return Decisions.cat(
        [
            engine.generate(inputs.rows(slice(wave.start, wave.stop)), sampling, wave).to("cpu")
            for wave in waves(len(inputs))
        ]
    )


def waves(count: int) -> list[range]:
    """The decisions that wait at a time: those of all slots; at the end of the rollout those of few."""
    bounds = sorted({*range(0, count, SLOTS), max(count - SLOTS // 4, 0), count})
    return [range(start, end) for start, end in pairwise(bounds)]


def as_batch(inputs: OpenVLAInputs, decisions: Decisions) -> TrainBatch:
    """A batch of trajectories of equal length with random advantages."""
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(decisions), 1, generator=generator).expand_as(decisions.step).contiguous()
    return TrainBatch(inputs, decisions, torch.arange(len(decisions)) // GROUP, advantages=advantages)


class Clock:
    """Measures work to its end on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """The result of work, and its seconds."""
        self._wait()
        began = time.perf_counter()
        result = work()
        self._wait()
        return result, time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def allocated(device: torch.device) -> float | None:
    """GiB of tensors; None on a CPU."""
    return peak(torch.cuda.memory_allocated, device)


def peak(of: Callable[[], int], device: torch.device) -> float | None:
    """GiB by one of PyTorch's counters; None on a CPU."""
    return round(of() / GIB, 2) if device.type == "cuda" else None


if __name__ == "__main__":
    main()
