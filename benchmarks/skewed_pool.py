"""Slots that sleep, for benchmarks/streaming.py --in-process: the collector is real, nothing else costs anything."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from skewed_env import SLOW_STATES

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.envs.base import SuiteSpec, TaskSpec, started
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.types import ChunkOutcome, Observation, Task, Trajectory

NUM_STATES = 30
SEEN = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(8, np.float32), "wait")


class SkewedPool:
    """An episode takes `short` decisions, or ten times as many from one of SLOW_STATES initial states."""

    lockstep = False
    num_cores: int | None = None
    busy_s: float | None = None

    def __init__(self, num_envs: int, sleep_s: float, short: int = 1) -> None:
        self.spec = SuiteSpec("skewed", (TaskSpec(0, "wait", 99),), tuple(range(NUM_STATES)), (NUM_STATES,), ())
        self.num_envs, self.sleep_s, self.short = num_envs, sleep_s, short
        self._left: dict[int, int] = {}  # decisions, by slot
        self._due: dict[int, float] = {}  # when its chunk ends, by slot
        self._begun: list[int] = []

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: frozenset[int] = frozenset()) -> None:
        """Begin these episodes."""
        for slot, task in zip(slots, tasks, strict=True):
            self._left[slot] = self.short * (10 if task.init_state % SLOW_STATES == 0 else 1)
        self._begun += slots

    def send_chunk(self, slots: Sequence[int], actions: Any, record: frozenset[int] = frozenset()) -> None:
        """Sleep in these slots, side by side."""
        self._due |= {slot: time.monotonic() + self.sleep_s for slot in slots}

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """Those that are due, at least one."""
        begun, self._begun = [(slot, started(SEEN)) for slot in self._begun], []
        if not begun:
            time.sleep(max(0.0, min(self._due.values()) - time.monotonic()))
        now = time.monotonic()
        ended = [slot for slot, due in self._due.items() if due <= now]
        for slot in ended:
            del self._due[slot]
            self._left[slot] -= 1
        nothing = np.zeros(1, np.float32)
        return begun + [(slot, ChunkOutcome(nothing, 1, False, self._left[slot] == 0, False, SEEN)) for slot in ended]


@dataclass(frozen=True)
class Nothing(TensorRows):
    """Inputs of a policy that reads nothing."""

    nothing: torch.Tensor  # [B]


class IdlePolicy:
    """Reads nothing and does nothing."""

    num_steps = 1

    def process(self, observations: Sequence[Observation]) -> Nothing:
        """Nothing, for each of them."""
        return Nothing(torch.zeros(len(observations)))

    def act(self, decisions: Decisions) -> list[np.ndarray[Any, Any]]:
        """Stand still."""
        return [np.zeros((1, 1), np.float32)] * len(decisions)


class IdleEngine:
    """Decides at once."""

    version = 0

    def generate(self, inputs: Nothing, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """One token for each row."""
        ids = torch.zeros((len(seeds), 1), dtype=torch.int64)
        return token_decisions(ids, -torch.ones(len(seeds), 1), action_dim=1).of_version(self.version)


class SkewedSampler:
    """Groups of random states, the same in every run."""

    def __init__(self, num_groups: int, group_size: int) -> None:
        self.num_groups, self.group_size = num_groups, group_size

    def get_batch(self, iteration: int, unreported: int = 0) -> list[Task]:
        """The tasks of a batch."""
        states = np.random.default_rng(iteration).integers(0, NUM_STATES, self.num_groups)
        return [
            Task("skewed", 0, int(state), 0, group, member, self.group_size, iteration)
            for group, state in enumerate(states)
            for member in range(self.group_size)
        ]

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Nothing depends on them."""
