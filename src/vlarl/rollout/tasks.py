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
from vlarl.config.suites import StateProtocol, each_suite
from vlarl.config.words import counted
from vlarl.envs.base import DataFile, SuiteSpec
from vlarl.errors import UsageError
from vlarl.rollout.curriculum import Curriculum, TaskName, sample_indices
from vlarl.types import IntArray, Task, TaskKey, Trajectory

_ROLLOUT, _EVALUATION, _TASK_ORDER = 0, 1, 2  # keep the seeds of different purposes apart
_SINGLE, _SINGLE_ORDER = 4, 5  # 3 is that of rollout/epochs.py

DATA = "data"


def derive_seed(*values: int) -> int:
    """A 64-bit seed that depends on all the values."""
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0])


class Sampler(Protocol):
    """Samples tasks, in this process or as a worker of a cluster."""

    def get_batch(self, iteration: int, unreported: int = 0) -> list[Task]:
        """The tasks of the iteration's groups: each task and initial state `group_size` times, with different seeds.

        `unreported`: how many groups of earlier batches have not been reported yet (`rollout/ahead.py`).
        """
        ...

    def refill(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of `count` more groups of the same iteration; `first` is how many groups it has had so far."""
        ...

    def get_episodes(self, indices: Sequence[int]) -> list[Task]:
        """The tasks of single episodes, which are counted over the whole run: for rollouts of a fixed length."""
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
        self.tasks: list[TaskKey] = [
            (suite.name, task_id)
            for suite, env in zip(spec.suites, each_suite(config.env), strict=True)
            for task_id in chosen_task_ids(suite, env.task_ids)
        ]
        self.states = training_states(spec, config.env.protocol)
        if any(training_states(suite, config.env.protocol) != self.states for suite in spec.also):
            raise UsageError("env.suites: the suites differ in the initial states of their tasks; train on each alone.")
        self.curriculum = Curriculum(config.curriculum, [self._name(key) for key in self.tasks])

    def get_batch(self, iteration: int, unreported: int = 0) -> list[Task]:
        """The tasks of the iteration's groups: each task and initial state `group_size` times, with different seeds."""
        return self._groups(iteration, 0, self.num_groups)

    def refill(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of `count` more groups of the same iteration; `first` is how many groups it has had so far."""
        return self._groups(iteration, first, count) if count else []

    def get_episodes(self, indices: Sequence[int]) -> list[Task]:
        """The tasks of single episodes, which are counted over the whole run: each follows from its index, and with
        a curriculum from the results reported before."""
        return [self._single(index) for index in indices]

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take an iteration's episodes into account. Crashed ones are ignored."""
        for trajectory in trajectories:
            if trajectory.status != "crashed":
                self.curriculum.record(self._name(trajectory.task.key), trajectory.success)

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
        suites = self.spec.suites
        instructions = {(suite.name, task.task_id): task.instruction for suite in suites for task in suite.tasks}
        probabilities = self.curriculum.probabilities()
        tasks = {
            str(self._name(key)): {
                "instruction": instructions[key],
                **asdict(self.curriculum.records[self._name(key)]),
                "probability": float(probability),
                "solved": self.curriculum.is_solved(self._name(key)),
            }
            for key, probability in zip(self.tasks, probabilities, strict=True)
        }
        names = "+".join(suite.name for suite in suites)
        return {"suite": names, "mode": self.curriculum.config.mode, "tasks": tasks}

    def _name(self, key: TaskKey) -> TaskName:
        """The task's name in the curriculum: its index says enough where there is one suite."""
        suite, task_id = key
        return f"{suite}/{task_id}" if self.spec.also else task_id

    def _groups(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of the groups `first` to `first + count - 1` of an iteration."""
        entropy = [self.seed, _TASK_ORDER, iteration] + ([first] if first else [])
        rng = np.random.default_rng(np.random.SeedSequence(entropy))
        order = self._order(count, rng)
        states = rng.choice(self.states, size=count)
        return [
            self._task(iteration, group, member, self.tasks[task], int(state))
            for group, task, state in zip(range(first, first + count), order, states, strict=True)
            for member in range(self.group_size)
        ]

    def _order(self, count: int, rng: np.random.Generator) -> IntArray:
        """Indices of tasks for `count` groups: in shuffled rounds, or by the curriculum's probabilities."""
        if self.curriculum.config.mode != "uniform":
            return sample_indices(self.curriculum.probabilities(), count, rng)
        rounds = -(-count // len(self.tasks))
        order: IntArray = np.concatenate([rng.permutation(len(self.tasks)) for _ in range(rounds)])[:count]
        return order

    def _single(self, index: int) -> Task:
        """The task of one episode: in shuffled rounds of all tasks, or by the curriculum's probabilities."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, _SINGLE_ORDER, index, 1]))
        if self.curriculum.config.mode != "uniform":
            task = int(sample_indices(self.curriculum.probabilities(), 1, rng)[0])
        else:
            finished, within = divmod(index, len(self.tasks))
            order = np.random.default_rng(np.random.SeedSequence([self.seed, _SINGLE_ORDER, finished]))
            task = int(order.permutation(len(self.tasks))[within])
        seed = derive_seed(self.seed, _SINGLE, index)
        return Task(*self.tasks[task], int(rng.choice(self.states)), seed, group=index)

    def _task(self, iteration: int, group: int, member: int, key: TaskKey, state: int) -> Task:
        seed = derive_seed(self.seed, _ROLLOUT, iteration, group, member)
        return Task(*key, state, seed, group, member, self.group_size, iteration)


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


def evaluations_of(config: Config, spec: SuiteSpec) -> list[Task]:
    """The fixed episodes of a run's own evaluations, of each of its suites."""
    return [
        task
        for suite, env in zip(spec.suites, each_suite(config.env), strict=True)
        for task in evaluation_tasks(suite, env.task_ids, config.eval.states_per_task, config.run.seed, env.protocol)
    ]


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
