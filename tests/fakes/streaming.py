"""A rollout in a stream, in one process: environments that end when the test wants, and a sampler that counts."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from fakes.decisions import NoInputs

from vlarl.config.schema import RolloutConfig
from vlarl.decisions import Decisions, Sampling
from vlarl.envs.base import NOTHING, Record, SuiteSpec, TaskSpec, started
from vlarl.interrupt import InterruptGuard
from vlarl.observability.clock import Stopwatch
from vlarl.observability.trace import NoTrace
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.rollout.ahead import Calls, Check, RolloutsAhead
from vlarl.rollout.collector import Collector
from vlarl.rollout.outstanding import Delivery, OutstandingGroups
from vlarl.rollout.selection import GroupRule
from vlarl.types import ChunkOutcome, Observation, Rollout, Task, Trajectory

LIMIT_S = 20.0  # for what must happen
A_WHILE_S = 0.3  # for what must not
Key = tuple[int, int, int]
"""An episode by its batch, its group and its member."""


def key(task: Task) -> Key:
    return task.iteration, task.group, task.member


def becomes(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Whether it is so before the time is over."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class StreamPool:
    """Episodes of `length(task)` decisions of a millisecond; those for which `is_held(task)` do not end meanwhile."""

    lockstep = False
    num_cores = None
    busy_s = None

    def __init__(self, num_envs: int, length: Callable[[Task], int] = lambda task: 1) -> None:
        self.spec = SuiteSpec("fake", (TaskSpec(0, "it", 99),), (0,), (1,), (1,))
        self.num_envs = num_envs
        self.length = length
        self.is_held: Callable[[Task], bool] = lambda task: False
        self.crashes: Callable[[Task], bool] = lambda task: False
        self.succeeds: Callable[[Task], bool] = lambda task: task.member % 2 == 0
        self.error: BaseException | None = None
        self.obeys = True  # whether the collector can check for a stop while all episodes are held
        self.is_stuck = False  # the collector waits in `receive`, and can't check
        self.began: list[Key] = []
        self.ended: list[Key] = []
        self._slots: dict[int, tuple[Task, int]] = {}  # the task and the decisions made
        self._moving: list[int] = []
        self._beginning: list[int] = []

    def running(self) -> set[Key]:
        return {key(task) for task, _ in list(self._slots.values())}

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        for slot, task in zip(slots, tasks, strict=True):
            assert slot not in self._slots, "a running slot was reset"
            self._slots[slot] = (task, 0)
            self._beginning.append(slot)
            self.began.append(key(task))

    def send_chunk(self, slots: Sequence[int], actions: Any, record: Record = NOTHING) -> None:
        for slot in slots:
            task, made = self._slots[slot]
            self._slots[slot] = (task, made + 1)
        self._moving += slots

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        if self.error is not None:
            raise self.error
        end = time.monotonic() + LIMIT_S
        while True:
            beginning, self._beginning = self._beginning, []
            free = [slot for slot in self._moving if not self.is_held(self._slots[slot][0])]
            self._moving = [slot for slot in self._moving if slot not in free]
            outcomes = [(slot, started(self._observe())) for slot in beginning]
            outcomes += [(slot, self._step(slot)) for slot in free]
            time.sleep(0.001)
            if outcomes or self.obeys:
                return outcomes
            self.is_stuck = True
            assert time.monotonic() < end

    def _step(self, slot: int) -> ChunkOutcome:
        task, made = self._slots[slot]
        is_last = made >= self.length(task)
        if is_last:
            del self._slots[slot]
            self.ended.append(key(task))
        crashed = is_last and self.crashes(task)
        success = is_last and not crashed and self.succeeds(task)
        return ChunkOutcome(
            rewards=np.array([float(success)], np.float32),
            num_executed=1,
            terminated=success,
            truncated=is_last and not crashed and not success,
            success=success,
            observation=self._observe(),
            error="the simulator died" if crashed else None,
        )

    def _observe(self) -> Observation:
        return Observation(np.zeros((1, 1, 1, 3), np.uint8), np.zeros(8, np.float32), "it")


class StreamPolicy:
    num_steps = 1

    def process(self, observations: Sequence[Observation]) -> NoInputs:
        return NoInputs(torch.zeros(len(observations)))

    def act(self, decisions: Decisions) -> list[np.ndarray]:
        return [np.zeros((1, 1), np.float32)] * len(decisions)


class StreamEngine:
    version = 0

    def generate(self, inputs: NoInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        ids = torch.zeros((len(seeds), 1), dtype=torch.int64)
        return token_decisions(ids, -torch.ones(len(seeds), 1), action_dim=1).of_version(self.version)


class CountingSampler:
    """Batches of `num_groups` groups of `group_size` members; notes its calls."""

    def __init__(self, num_groups: int, group_size: int) -> None:
        self.num_groups, self.group_size = num_groups, group_size
        self.batches: list[int] = []
        self.unreported: list[int] = []
        self.reported: list[Key] = []
        self.error: BaseException | None = None

    def get_batch(self, iteration: int, unreported: int = 0) -> list[Task]:
        if self.error is not None:
            raise self.error
        self.batches.append(iteration)
        self.unreported.append(unreported)
        return [
            Task("fake", 0, 0, 1000 * iteration + 10 * group + member, group, member, self.group_size, iteration)
            for group in range(self.num_groups)
            for member in range(self.group_size)
        ]

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        self.reported += [key(trajectory.task) for trajectory in trajectories]


def returns_differ(members: Sequence[Trajectory]) -> bool:
    returns = [member.episode_return for member in members]
    return max(returns) > min(returns)


class Stream:
    """A source with its parts; `with stream.open() as source`."""

    def __init__(
        self,
        num_envs: int = 4,
        max_staleness: int = 1,
        iterations: int | None = None,
        state: dict[str, Any] | None = None,
        next_batch: int = 1,
        sampler: Any = None,
        **rollout: Any,
    ) -> None:
        self.config = RolloutConfig(**{"num_groups": 2, "group_size": 2} | rollout)
        self.pool, self.engine = StreamPool(num_envs), StreamEngine()
        self.guard = InterruptGuard()
        groups = -(-self.config.num_groups * self.config.oversample // 1)
        self.sampler = sampler or CountingSampler(int(groups), self.config.group_size)
        self.groups = OutstandingGroups(
            self.config, GroupRule(self.config, returns_differ), max_staleness, iterations, next_batch
        )
        self.first_tasks = self.groups.restore(state or {})
        self.scored: list[Key] = []
        self.scoring: Callable[[list[Trajectory], Check], list[Trajectory]] = lambda episodes, check: episodes
        self.seconds: list[dict[str, float]] = []

    def open(self, kind: type[RolloutsAhead] = RolloutsAhead) -> RolloutsAhead:
        collector = Collector(self.pool, StreamPolicy(), self.engine, retries=0)
        calls = Calls(self._score, self._report)
        return kind(
            self.groups,
            collector,
            self.sampler,
            Sampling(1.0),
            calls,
            self.guard,
            lambda track: Stopwatch(NoTrace(), track),
            self.first_tasks,
        )

    def update(self, source: RolloutsAhead) -> None:
        """What the loop does after `get`."""
        self.engine.version += 1
        source.updated()

    def _score(self, episodes: list[Trajectory], check: Check) -> list[Trajectory]:
        scored = self.scoring(episodes, check)
        self.scored += [key(each.task) for each in scored]
        return scored

    def _report(self, iteration: int, delivery: Delivery, seconds: dict[str, float]) -> Rollout:
        self.seconds.append(seconds)
        self.sampler.report_results(delivery.trajectories)
        kept, metrics, state = delivery.kept, delivery.metrics, delivery.outstanding
        return Rollout(iteration, delivery.trajectories, kept, metrics, {}, {}, seconds, 0, state)


def groups_of(trajectories: Iterable[Trajectory]) -> list[tuple[int, int]]:
    """The keys of the groups, in order."""
    return list(dict.fromkeys(trajectory.group for trajectory in trajectories))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("rollout", "reward")]
