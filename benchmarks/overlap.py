"""How busy simulators are while a policy decides, with and without halved batches. Prints a table.

    python benchmarks/overlap.py [--slots 8] [--cores 4] [--episodes 16]

Simulators are real processes of a `WorkerPool` that sleep instead of computing, and so does the engine, so that a
crowded machine shows the same figures. A simulator's step takes a token from a pipe that holds one for each core:
processes take turns as they do on a machine with that many cores. `busy` is the work of all steps divided by the time
that the cores had: 100% would be simulators that never wait for the policy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sleeping_env import CHUNK, EPISODE, SleepingFactory

from vlarl.decisions import Decisions, Sampling
from vlarl.envs.process_pool import WorkerPool
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.rollout.collector import Collector
from vlarl.types import FloatArray, Observation, Task


class IdlePolicy:
    """Reads nothing and does not move."""

    num_steps = CHUNK

    def process(self, observations: Sequence[Observation]) -> OpenVLAInputs:
        """Blank rows."""
        rows = torch.zeros(len(observations), 1, dtype=torch.long)
        return OpenVLAInputs(rows, rows == 0, rows, None)

    def act(self, decisions: Decisions) -> list[FloatArray]:
        """Chunks of zeros."""
        return [np.zeros((CHUNK, 7), np.float32)] * len(decisions)


class SleepingEngine:
    """Takes the same time for a batch of any size, as a GPU does."""

    version = 0

    def __init__(self, decision_s: float) -> None:
        self._decision_s = decision_s
        self.batches: list[int] = []

    def generate(self, inputs: OpenVLAInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sleep, and decide."""
        time.sleep(self._decision_s)
        self.batches.append(len(seeds))
        ids = torch.zeros(len(seeds), 1, dtype=torch.long)
        return token_decisions(ids, ids.float(), action_dim=1).of_version(0)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    slots: int
    cores: int
    chunk_s: float  # of one simulator that has a core for itself
    decision_s: float
    variation: float
    episodes: int


def measure(case: Case, halved: bool) -> tuple[float, float, float]:
    """Fraction of the cores' time that steps took, mean size of a batch, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "cores"
        os.mkfifo(tokens)
        pipe = os.open(tokens, os.O_RDWR)
        os.write(pipe, b"." * case.cores)
        factory = SleepingFactory(tokens, case.chunk_s / CHUNK, case.variation)
        engine = SleepingEngine(case.decision_s)
        with closing(WorkerPool(factory, case.slots)) as pool:
            pool.reset(range(case.slots), [Task("sleeping", 0, 0, 0)] * case.slots)  # the processes have started
            pool.num_cores = case.cores if halved else None
            tasks = [Task("sleeping", 0, 0, seed) for seed in range(case.episodes)]
            began = time.perf_counter()
            for _ in Collector(pool, IdlePolicy(), engine).episodes(tasks, Sampling(1.0)):
                pass
            seconds = time.perf_counter() - began
        os.close(pipe)
    work = case.episodes * EPISODE * case.chunk_s
    return work / (seconds * min(case.cores, case.slots)), float(np.mean(engine.batches)), seconds


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--cores", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--chunk", type=float, default=0.16, help="seconds of simulation in a chunk")
    given = parser.parse_args()
    print("slots  cores  decision  variation  busy, all ready  batch  busy, halves  batch  time ratio")
    for slots, decision, variation in (
        (given.slots, 1.0, 0.0),
        (given.slots, 1.0, 0.3),
        (given.slots, 0.5, 0.3),
        (given.slots, 2.0, 0.3),
        (given.cores, 1.0, 0.3),
        (given.cores, 0.1, 0.3),
    ):
        case = Case(slots, given.cores, given.chunk, decision * given.chunk, variation, given.episodes)
        (before, size, long), (after, half, short) = measure(case, False), measure(case, True)
        line = f"{slots:>5}  {given.cores:>5}  {decision:>6g} x  {variation:>8.0%}  {before:>15.1%}  {size:>5.1f}"
        print(f"{line}  {after:>12.1%}  {half:>5.1f}  {long / short:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
