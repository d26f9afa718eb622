"""Which episodes to run next, and the seeds that let any of them be run again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlarl.config.schema import Config
from vlarl.envs.base import SuiteSpec
from vlarl.errors import UsageError
from vlarl.types import Task

_ROLLOUT, _EVALUATION, _TASK_ORDER = 0, 1, 2  # keep the seeds of different purposes apart


def derive_seed(*numbers: int) -> int:
    """A 64-bit seed that depends on all the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class TaskSampler:
    """Deals tasks out evenly. It keeps no state: an iteration's groups follow from the run's seed and its number."""

    def __init__(self, config: Config, spec: SuiteSpec) -> None:
        self.spec = spec
        self.seed = config.run.seed
        self.num_groups = config.rollout.num_groups
        self.group_size = config.rollout.group_size
        self.task_ids = chosen_task_ids(spec, config.env.task_ids)
        self.states = spec.eval_states if config.env.train_on_eval_states else spec.train_states

    def groups(self, iteration: int) -> list[list[Task]]:
        """The iteration's groups: each the same task and initial state `group_size` times, with different seeds."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, _TASK_ORDER, iteration]))
        rounds = -(-self.num_groups // len(self.task_ids))
        order = np.concatenate([rng.permutation(self.task_ids) for _ in range(rounds)])[: self.num_groups]
        states = rng.choice(self.states, size=self.num_groups)
        return [
            [self._task(iteration, group, member, int(task_id), int(state)) for member in range(self.group_size)]
            for group, (task_id, state) in enumerate(zip(order, states, strict=True))
        ]

    def _task(self, iteration: int, group: int, member: int, task_id: int, state: int) -> Task:
        seed = derive_seed(self.seed, _ROLLOUT, iteration, group, member)
        return Task(self.spec.name, task_id, state, seed, group, member)


def evaluation_tasks(spec: SuiteSpec, task_ids: Sequence[int] | None, states_per_task: int, seed: int) -> list[Task]:
    """The fixed episodes of an evaluation: the first `states_per_task` evaluation states of each task."""
    if states_per_task > len(spec.eval_states):
        raise UsageError(
            f"eval.states_per_task: {states_per_task} is more than the {len(spec.eval_states)} evaluation states "
            f"that a task of {spec.name} has."
        )
    return [
        Task(spec.name, task_id, state, derive_seed(seed, _EVALUATION, task_id, state))
        for task_id in chosen_task_ids(spec, task_ids)
        for state in spec.eval_states[:states_per_task]
    ]


def chosen_task_ids(spec: SuiteSpec, task_ids: Sequence[int] | None) -> list[int]:
    """The wanted tasks, all of them by default; an id that the suite doesn't have is refused."""
    known = [task.task_id for task in spec.tasks]
    unknown = sorted(set(task_ids or ()) - set(known))
    if unknown:
        raise UsageError(f"env.task_ids: {spec.name} has no task {unknown}; its tasks are {known[0]} to {known[-1]}.")
    return known if task_ids is None else list(task_ids)
