"""The books of an asynchronous run: which groups are outstanding, when the next are admitted, which are trained on.

    admit ─► queued ─► begin ─► running ─► end (of all members) ─► conclude (scored) ─► waiting ─► deliver ─► trained
                                                                        │
                                                                        └─► dropped: there is nothing to learn from

A group is outstanding from `admit` until the update on it is done, or until it is dropped. G groups make an update, a
batch of the sampler has B groups (G, or more with oversampling), s is `max_staleness`, n the version of the weights.

* A batch is admitted while at most s·G groups are outstanding: rollouts are ahead of the update by s iterations, and at
  most s·G + B groups are kept at a time.
* A group's version is that of the engine when its first episode begins; all its decisions are of that version or newer.
* An update is due once G groups wait, and no group of version n - s or older is still unfinished. It is on the oldest G
  and on all others of version n - s or older. So no group that is left is older than n - s + 1, and at the next update,
  at version n + 1, none is older than s updates: the bound holds without throwing groups away. Leaving out those that
  take long would train on fewer long episodes than the policy has, and those are mostly its failures.

Nothing here knows threads or clocks: `rollout/ahead.py` has those, and calls this under its lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlarl.config.schema import RolloutConfig
from vlarl.rollout.selection import GroupRule
from vlarl.types import Task, Trajectory

GroupKey = tuple[int, int]
"""A group by its batch and its index there."""

NEXT_BATCH = "next_batch"


@dataclass
class Group:
    """A group that is outstanding."""

    tasks: tuple[Task, ...]
    version: int | None = None  # of the engine when its first episode began; None: it has not begun
    ended: list[Trajectory] = field(default_factory=list)  # in the order of their ends
    scored: tuple[Trajectory, ...] | None = None  # None: it is not concluded yet
    kept: tuple[Trajectory, ...] = ()  # those of them that can be trained on

    @property
    def is_unfinished(self) -> bool:
        """Whether it has begun and is not concluded."""
        return self.version is not None and self.scored is None


@dataclass(frozen=True)
class Delivery:
    """What an update is trained on, and what it is reported with."""

    trajectories: tuple[Trajectory, ...]  # of the delivered groups, and of those dropped since the last delivery
    kept: tuple[Trajectory, ...]  # those that are trained on; members of a group follow each other
    metrics: dict[str, float]
    outstanding: dict[str, Any]  # what a resumed run begins with, as JSON can hold it


class OutstandingGroups:
    """Counts groups from their tasks to their update."""

    def __init__(
        self,
        config: RolloutConfig,
        rule: GroupRule,
        max_staleness: int,
        iterations_left: int | None = None,
        next_batch: int = 1,
    ) -> None:
        """`max_staleness` is at least 1; `iterations_left`: None where environment steps end the run."""
        self.num_groups = config.num_groups
        self.next_batch = next_batch  # of the sampler, counted over the whole run
        self._rule = rule
        self._max_staleness = max_staleness
        rounds = 1 + (config.max_refills if config.refill else 0)
        self._max_tried = math.ceil(config.num_groups * config.oversample) * rounds
        self._iterations_left = math.inf if iterations_left is None else iterations_left
        self._groups: dict[GroupKey, Group] = {}  # queued, running or waiting; in the order of their beginning
        self._dropped: list[Group] = []  # since the last delivery
        self._num_concluded = 0  # since the last delivery
        self._num_training = 0  # delivered, whose update is not done

    def restore(self, state: Mapping[str, Any]) -> list[Task]:
        """Resume with the groups of `Delivery.outstanding`; their tasks, which begin again."""
        next_batch, tasks = read_outstanding(state)
        self.next_batch = self.next_batch if next_batch is None else next_batch
        self._add(tasks)
        return tasks

    @property
    def num_outstanding(self) -> int:
        """Groups that are queued, running, waiting for their update, or being trained on."""
        return len(self._groups) + self._num_training

    @property
    def num_unreported(self) -> int:
        """Groups that the sampler has handed out and has not been told the results of."""
        return len(self._groups) + len(self._dropped)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for their update."""
        return sum(group.scored is not None for group in self._groups.values())

    @property
    def wants_batch(self) -> bool:
        """Whether the next batch is admitted: no more than the staleness allows, or the iterations left can use."""
        ahead, left = self._max_staleness * self.num_groups, self._iterations_left * self.num_groups
        return self.num_outstanding <= ahead and self.num_outstanding < left

    def admit(self, tasks: Sequence[Task]) -> None:
        """Take in the tasks of the next batch."""
        self._add(tasks)
        self.next_batch += 1

    def begin(self, task: Task, version: int) -> None:
        """Note that an episode begins, while the engine has weights of this version."""
        group = self._groups[_key(task)]
        if group.version is None:
            group.version = version
            self._groups[_key(task)] = self._groups.pop(_key(task))  # to the end of those that have begun

    def end(self, trajectory: Trajectory) -> Group | None:
        """Note that an episode has ended: its group, if that was the last of its members."""
        group = self._groups[trajectory.group]
        group.ended.append(trajectory)
        return group if len(group.ended) == len(group.tasks) else None

    def conclude(self, group: Group, scored: Iterable[Trajectory]) -> None:
        """Note the rewards of a group, all of whose members have ended. If it is dropped, another may take its turn.

        Members that crashed or could not be scored are left out of it. What is not trained on lets its inputs go.
        """
        self._num_concluded += 1
        members = sorted(scored, key=lambda trajectory: trajectory.task.member)
        usable = [trajectory for trajectory in members if trajectory.status == "ok"]
        is_kept = self._rule.keeps(usable)
        group.kept = tuple(usable) if is_kept else ()
        kept = {id(trajectory) for trajectory in group.kept}
        group.scored = tuple(each if id(each) in kept else each.without_inputs() for each in members)
        group.ended.clear()
        if not is_kept:
            self._dropped.append(self._groups.pop(_key(group.tasks[0])))

    @property
    def has_enough(self) -> bool:
        """Whether an update is due as far as the count of groups goes: enough wait, or enough have been tried."""
        return self.num_waiting >= self.num_groups or self._num_concluded >= self._max_tried

    def has_stragglers(self, version: int) -> bool:
        """Whether a group is unfinished that would be too old for the update after that of these weights."""
        return any(group.is_unfinished and self._is_last_call(group, version) for group in self._groups.values())

    def deliver(self, version: int) -> Delivery:
        """The oldest groups that wait, for an update of weights of this version."""
        waiting = [(key, group) for key, group in self._groups.items() if group.scored is not None]
        chosen = [
            (key, group)
            for index, (key, group) in enumerate(waiting)
            if index < self.num_groups or self._is_last_call(group, version)
        ]
        for key, _ in chosen:
            del self._groups[key]
        delivered = [group for _, group in chosen]
        reported = [trajectory for group in (*delivered, *self._dropped) for trajectory in group.scored or ()]
        dropped = {"rollout/groups_dropped": float(len(self._dropped))} if self._rule.is_active else {}
        self._num_training, self._num_concluded, self._dropped = len(delivered), 0, []
        left = sorted(self._groups.values(), key=lambda group: group.version is None)  # those that have begun first
        return Delivery(
            trajectories=tuple(reported),
            kept=tuple(trajectory for group in delivered for trajectory in group.kept),
            metrics={
                "rollout/groups_unfinished": float(sum(group.is_unfinished for group in left)),
                "rollout/groups_waiting": float(self.num_waiting),
                **dropped,
            },
            outstanding={NEXT_BATCH: self.next_batch, "groups": [_row(group.tasks) for group in left]},
        )

    def trained(self) -> None:
        """Note that the update on what was delivered is done."""
        self._num_training = 0
        self._iterations_left -= 1

    def _add(self, tasks: Sequence[Task]) -> None:
        members: dict[GroupKey, list[Task]] = {}
        for task in tasks:
            members.setdefault(_key(task), []).append(task)
        for key, group in members.items():
            if key in self._groups:
                raise ValueError(f"group {key} is outstanding already")
            self._groups[key] = Group(tuple(group))

    def _is_last_call(self, group: Group, version: int) -> bool:
        """Whether the group would be too old for the update after that of weights of this version."""
        return group.version is not None and group.version <= version - self._max_staleness


def read_outstanding(state: Mapping[str, Any]) -> tuple[int | None, list[Task]]:
    """The next batch and the tasks of `Delivery.outstanding`; None and no tasks where the run was not asynchronous."""
    if NEXT_BATCH not in state:
        return None, []
    return int(state[NEXT_BATCH]), [task for row in state["groups"] for task in _tasks(row)]


def _key(task: Task) -> GroupKey:
    return task.iteration, task.group


def _row(tasks: Sequence[Task]) -> dict[str, Any]:
    """The tasks of a group, which differ in their seeds, as JSON can hold them."""
    first = tasks[0]
    return {
        "suite": first.suite,
        "task_id": first.task_id,
        "init_state": first.init_state,
        "group": first.group,
        "batch": first.iteration,
        "seeds": [task.seed for task in tasks],
    }


def _tasks(row: Mapping[str, Any]) -> list[Task]:
    """What `_row` was given."""
    seeds = [int(seed) for seed in row["seeds"]]
    suite = str(row["suite"])
    where = int(row["task_id"]), int(row["init_state"])
    return [
        Task(suite, *where, seed, int(row["group"]), member, len(seeds), int(row["batch"]))
        for member, seed in enumerate(seeds)
    ]
