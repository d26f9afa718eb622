"""Which episodes to run next, and the seeds that make each of them repeatable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from vlarl.config.known import PROMPTS
from vlarl.config.schema import Config
from vlarl.config.state_choice import missing_states
from vlarl.config.suites import StateProtocol
from vlarl.config.words import counted
from vlarl.envs.base import DataFile, SuiteSpec
from vlarl.errors import UsageError
from vlarl.rollout.curriculum import Curriculum, sample_indices
from vlarl.types import IntArray, Task, Trajectory

_ROLLOUT, _EVALUATION, _TASK_ORDER = 0, 1, 2  # keep the seeds of different purposes apart

DATA = "data"


def derive_seed(*values: int) -> int:
    """A 64-bit seed that depends on all the values."""
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0])


class Sampler(Protocol):
    """Samples tasks, in this process or as a worker of a cluster."""

    def get_batch(self, iteration: int) -> list[Task]:
        """The tasks of the iteration's groups: each task and initial state `group_size` times, with different seeds."""
        ...

    def refill(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of `count` more groups of the same iteration; `first` is how many groups it has had so far."""
        ...

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take an iteration's episodes into account. Crashed ones are ignored."""
        ...

    def state(self) -> dict[str, Any]:
        """What the next iteration's groups depend on besides seed and iteration, as JSON can hold it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, or from an earlier run's curriculum."""
        ...

    def describe(self) -> dict[str, Any]:
        """The state in full, for people: the content of curriculum.json."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the curriculum adds to an iteration's row."""
        ...


class TaskSampler:
    """Samples tasks. An iteration's groups depend on the run's seed, the iteration and the results reported before."""

    def __init__(self, config: Config, spec: SuiteSpec) -> None:
        self.spec = spec
        self.seed = config.run.seed
        self.num_groups = math.ceil(config.rollout.num_groups * config.rollout.oversample)
        self.group_size = config.rollout.group_size
        self.task_ids = chosen_task_ids(spec, config.env.task_ids)
        self.states = training_states(spec, config.env.protocol)
        self.curriculum = Curriculum(config.curriculum, self.task_ids)

    def get_batch(self, iteration: int) -> list[Task]:
        """The tasks of the iteration's groups: each task and initial state `group_size` times, with different seeds."""
        return self._groups(iteration, 0, self.num_groups)

    def refill(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of `count` more groups of the same iteration; `first` is how many groups it has had so far."""
        return self._groups(iteration, first, count) if count else []

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take an iteration's episodes into account. Crashed ones are ignored."""
        for trajectory in trajectories:
            if trajectory.status != "crashed":
                self.curriculum.record(trajectory.task.task_id, trajectory.success)

    def state(self) -> dict[str, Any]:
        """What the next iteration's groups depend on besides seed and iteration, as JSON can hold it."""
        files = {DATA: [asdict(file) for file in self.spec.data]} if self.spec.data else {}
        return self.curriculum.state() | files

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, or from an earlier run's curriculum; UsageError if the run's data is not
        what it was."""
        if DATA in state:
            refuse_other_data([DataFile(**file) for file in state[DATA]], self.spec.data)
        self.curriculum.restore(state)

    def metrics(self) -> dict[str, float]:
        """What the curriculum adds to an iteration's row."""
        return self.curriculum.metrics()

    def describe(self) -> dict[str, Any]:
        """The state in full, for people: the content of curriculum.json."""
        instructions = {task.task_id: task.instruction for task in self.spec.tasks}
        probabilities = self.curriculum.probabilities()
        tasks = {
            str(task_id): {
                "instruction": instructions[task_id],
                **asdict(record),
                "probability": float(probability),
                "solved": self.curriculum.is_solved(task_id),
            }
            for (task_id, record), probability in zip(self.curriculum.records.items(), probabilities, strict=True)
        }
        return {"suite": self.spec.name, "mode": self.curriculum.config.mode, "tasks": tasks}

    def _groups(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of the groups `first` to `first + count - 1` of an iteration."""
        entropy = [self.seed, _TASK_ORDER, iteration] + ([first] if first else [])
        rng = np.random.default_rng(np.random.SeedSequence(entropy))
        order = self._order(count, rng)
        states = rng.choice(self.states, size=count)
        return [
            self._task(iteration, group, member, int(task_id), int(state))
            for group, task_id, state in zip(range(first, first + count), order, states, strict=True)
            for member in range(self.group_size)
        ]

    def _order(self, count: int, rng: np.random.Generator) -> IntArray:
        """Task ids for `count` groups: in shuffled rounds, or by the curriculum's probabilities."""
        if self.curriculum.config.mode != "uniform":
            return np.array(self.task_ids)[sample_indices(self.curriculum.probabilities(), count, rng)]
        rounds = -(-count // len(self.task_ids))
        order: IntArray = np.concatenate([rng.permutation(self.task_ids) for _ in range(rounds)])[:count]
        return order

    def _task(self, iteration: int, group: int, member: int, task_id: int, state: int) -> Task:
        seed = derive_seed(self.seed, _ROLLOUT, iteration, group, member)
        return Task(self.spec.name, task_id, state, seed, group, member, self.group_size, iteration)


def refuse_other_data(before: Sequence[DataFile], now: Sequence[DataFile]) -> None:
    """Refuse to resume on other rows: samples are counted by their position, and held-out rows could be trained on."""
    changes = [
        f"{old.name} had {counted(old.rows, 'row')}"
        + (f", and {new.name} has {new.rows}" if (old.name, old.rows) != (new.name, new.rows) else " of other content")
        for old, new in zip(before, now, strict=False)
        if (old.rows, old.digest) != (new.rows, new.digest)
    ]
    if len(before) != len(now):
        changes = [f"the run had {counted(len(before), 'file')}, and now has {len(now)}"]
    if changes:
        raise UsageError(
            f"prompts.path: the data has changed since the checkpoint was saved ({'; '.join(changes)}). Restore it, or "
            "start a new run whose policy.path is the checkpoint."
        )


def evaluation_tasks(
    spec: SuiteSpec,
    task_ids: Sequence[int] | None,
    states_per_task: int,
    seed: int,
    protocol: StateProtocol = "disjoint",
) -> list[Task]:
    """The fixed episodes of an evaluation: the first `states_per_task` of the protocol's states of each task.

    Datasets have as many rows as they have: of those at most so many.
    """
    counts = len(spec.eval_states), len(spec.benchmark_states)
    if spec.name == PROMPTS:
        states_per_task = min(states_per_task, len(spec.eval_states))
    if message := missing_states(states_per_task, spec.name, protocol, *counts):
        raise UsageError(f"eval.states_per_task = {states_per_task}: {message}.")
    return tasks_from_states(spec, task_ids, evaluation_states(spec, protocol)[:states_per_task], seed)


def tasks_from_states(spec: SuiteSpec, task_ids: Sequence[int] | None, states: Sequence[int], seed: int) -> list[Task]:
    """The evaluation episodes of each task from each of these initial states."""
    return [
        Task(spec.name, task_id, state, derive_seed(seed, _EVALUATION, task_id, state))
        for task_id in chosen_task_ids(spec, task_ids)
        for state in states
    ]


def evaluation_states(spec: SuiteSpec, protocol: StateProtocol) -> tuple[int, ...]:
    """The initial states that a protocol evaluates on, of every task."""
    return spec.eval_states if protocol == "disjoint" else spec.benchmark_states


def training_states(spec: SuiteSpec, protocol: StateProtocol) -> tuple[int, ...]:
    """The initial states that a protocol trains on, of every task."""
    return spec.train_states if protocol == "disjoint" else spec.benchmark_states


def chosen_task_ids(spec: SuiteSpec, task_ids: Sequence[int] | None) -> list[int]:
    """The configured tasks, all of them by default; an id that the suite doesn't have is refused."""
    known = [task.task_id for task in spec.tasks]
    unknown = sorted(set(task_ids or ()) - set(known))
    if unknown:
        raise UsageError(f"env.task_ids: {spec.name} has no task {unknown}; its tasks are {known[0]} to {known[-1]}.")
    return known if task_ids is None else list(task_ids)
