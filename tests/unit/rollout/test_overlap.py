"""Simulators step while the policy decides: on a clock of its own, so that the times can be computed on paper."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vlarl.decisions import Decisions, Sampling
from vlarl.envs.base import NOTHING, AsyncPool, Record, SuiteSpec, TaskSpec, started
from vlarl.policies.openvla.decisions import token_decisions, token_ids
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.rollout.collector import Collector
from vlarl.rollout.statistics import busy_metrics
from vlarl.types import ChunkOutcome, Observation, Task

CHUNKS = 20  # of an episode


class Clock:
    """Time that passes only when it is moved."""

    now = 0.0


class TimedPool(AsyncPool):
    """Simulators that share cores evenly, as processes of a machine do. A chunk of slot i takes `chunk_s(i)` alone."""

    lockstep = False

    def __init__(self, clock: Clock, num_envs: int, cores: int, halves: bool, uneven: float = 0.0) -> None:
        self.spec = SuiteSpec("timed", (TaskSpec(0, "", CHUNKS),), (0,), (1,), (1,))
        self.num_envs, self.cores = num_envs, cores
        self.num_cores = cores if halves else None
        self.clock, self.then = clock, 0.0
        self.uneven = uneven
        self.left: dict[int, float] = {}  # work of the slots that step
        self.arrived: dict[int, ChunkOutcome] = {}
        self.steps: dict[int, tuple[Task, list[float]]] = {}
        self.core_s = 0.0

    def _advance(self, until: float) -> None:
        """Let the slots work until a time; those that finish free their part of the cores."""
        while self.left and self.then < until:
            rate = min(1.0, self.cores / len(self.left))
            passed = min(until - self.then, min(self.left.values()) / rate)
            self.core_s += passed * rate * len(self.left)
            self.left = {slot: work - passed * rate for slot, work in self.left.items()}
            self.then += passed
            for slot in [slot for slot, work in self.left.items() if work < 1e-9]:
                del self.left[slot]
                self.arrived[slot] = self._outcome(slot)
        self.then = until

    def _outcome(self, slot: int) -> ChunkOutcome:
        task, actions = self.steps[slot]
        done = len(actions) == CHUNKS
        return ChunkOutcome(np.zeros(1, np.float32), 1, done, False, done, self._see(task, len(actions)))

    @staticmethod
    def _see(task: Task, step: int) -> Observation:
        return Observation(np.full((1, 1, 1, 3), task.init_state, np.uint8), np.full(8, step, np.float32), "")

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        self._advance(self.clock.now)
        for slot, task in zip(slots, tasks, strict=True):
            self.steps[slot] = (task, [])
            self.arrived[slot] = started(self._see(task, 0))

    def send_chunk(self, slots: Sequence[int], actions: object, record: Record = NOTHING) -> None:
        self._advance(self.clock.now)
        for slot, action in zip(slots, actions, strict=True):
            self.steps[slot][1].append(float(action[0, 0]))
            self.left[slot] = 1.0 + self.uneven * slot

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        self._advance(self.clock.now)
        while not self.arrived:
            rate = min(1.0, self.cores / len(self.left))
            self._advance(self.then + min(self.left.values()) / rate)
        self.clock.now = self.then
        outcomes, self.arrived = sorted(self.arrived.items()), {}
        return outcomes


class TimedPolicy:
    """Its action is the token."""

    num_steps = 1

    def process(self, observations: Sequence[Observation]) -> OpenVLAInputs:
        ids = torch.tensor([[int(o.images.max()), int(o.proprio[0])] for o in observations])
        return OpenVLAInputs(ids, ids > -1, ids, None)

    def act(self, decisions: Decisions) -> list[np.ndarray]:
        return list(token_ids(decisions).reshape(-1, 1, 1).float().numpy())


class TimedEngine:
    """A decision takes the same time for any batch; the token follows from the seed."""

    version = 0

    def __init__(self, clock: Clock, decision_s: float) -> None:
        self.clock, self.decision_s, self.batches = clock, decision_s, []

    def generate(self, inputs: OpenVLAInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        self.clock.now += self.decision_s
        self.batches.append(len(seeds))
        ids = torch.tensor([[seed % 997] for seed in seeds])
        return token_decisions(ids, ids.float(), action_dim=1).of_version(0)


def measured(num_envs: int, cores: int, decision_s: float, halves: bool, uneven: float = 0.0, episodes: int = 0):
    """Seconds, sizes of the batches, fraction of the cores' time that was used, and the actions of each episode."""
    clock = Clock()
    pool, engine = TimedPool(clock, num_envs, cores, halves, uneven), TimedEngine(clock, decision_s)
    tasks = [Task("timed", 0, state, seed=100 + state) for state in range(episodes or num_envs)]
    actions = {}
    for index, episode in Collector(pool, TimedPolicy(), engine).episodes(tasks, Sampling(1.0)):
        actions[index] = [int(token_ids(t.decision)[0, 0]) for t in episode.trajectory.transitions]
    return clock.now, engine.batches, pool.core_s / (clock.now * cores), actions


def test_with_two_slots_a_core_half_of_them_step_while_the_other_half_is_decided_for():
    seconds, batches, busy, _ = measured(8, 4, decision_s=1.0, halves=True, uneven=1e-3)
    assert batches[0] == 8 and set(batches[1:]) == {4}
    # All are ready at the start, are decided for by 1 and have stepped by 3, two on each core. Then two halves take
    # turns: one has all cores for the second in which the other is decided for. The last chunk of the second ends at
    # 3 + 2 * 19 + 1.
    assert seconds == pytest.approx(2 * CHUNKS + 2, rel=0.01)
    assert busy > 0.95


def test_deciding_for_whatever_is_ready_leaves_cores_idle():
    seconds, batches, busy, _ = measured(8, 4, decision_s=1.0, halves=False, uneven=1e-3)
    # One slot is ready first and is decided for alone; the other seven share four cores for 7 / 4 s meanwhile.
    assert busy < 0.8 and seconds > 1.2 * (2 * CHUNKS + 2)
    assert min(batches) == 1


@pytest.mark.parametrize("halves", [True, False])
def test_with_one_slot_a_core_none_waits_for_another(halves):
    seconds, _, _, _ = measured(4, 4, decision_s=0.01, halves=halves, uneven=0.5)
    # The slowest slot takes 1 + 3 * 0.5 s a chunk, and is decided for at once, or after the decision under way.
    assert seconds == pytest.approx(CHUNKS * (2.5 + 0.01), abs=CHUNKS * 0.02)


def test_five_slots_on_four_cores_wait_for_one():
    _, batches, _, _ = measured(5, 4, decision_s=0.1, halves=True, uneven=0.1)
    assert min(batches) == 1


def test_the_last_episodes_do_not_wait_for_slots_that_are_done():
    # Nine episodes in eight slots: the last one runs alone, and is decided for alone.
    _, batches, _, _ = measured(8, 4, decision_s=1.0, halves=True, episodes=9)
    assert sum(batches) == 9 * CHUNKS and batches[-CHUNKS + 4 :] == [1] * (CHUNKS - 4)


def test_the_episodes_are_the_same_whatever_the_batches():
    with_halves = measured(8, 4, 1.0, halves=True, uneven=0.1, episodes=12)
    without = measured(8, 4, 1.0, halves=False, uneven=0.1, episodes=12)
    assert with_halves[1] != without[1]
    assert with_halves[3] == without[3] and len(with_halves[3]) == 12
    assert len({json.dumps(actions) for actions in with_halves[3].values()}) == 12


def test_the_busy_fraction_is_over_all_simulators():
    assert busy_metrics(10.0, 26.0, seconds=4.0, num_envs=8) == {"perf/simulators_busy": 0.5}
    assert busy_metrics(None, None, 4.0, 8) == {}
