"""Rollouts ahead of the update, in a stream: the policy is trained as soon as enough groups are complete.

    rollout thread   runs the episodes of all admitted groups, in whichever slot is free     waits for: tasks
         ▼ groups whose members have all ended
    reward thread    scores groups, and admits the next batch where one is dropped           waits for: groups
         ▼ scored groups
    loop             get(iteration): the oldest of them, for the update                      waits for: enough groups
         │ updated()
         └─► the next batch is admitted: its tasks go to the rollout thread

Nothing waits for the slowest episode of a batch: its slot is busy, the others continue with the next tasks. When groups
are admitted and delivered, and why no decision is older than `max_staleness` updates when it is trained on, is in
`rollout/outstanding.py`. One lock guards the books, the tasks that wait and the sampler; episodes run and groups are
scored without it.

The loop publishes new weights after each update, and the engine takes them between two decisions, in the middle of
episodes: every decision keeps the version and the log-probs of the weights that made it, which is what the learner
corrects for (`algorithm.importance`).

Evaluations use the same environments and the same reward. In `paused()` no episode begins and no group is scored; the
loop waits for those under way, an episode at most, and the tasks that wait are run afterwards.

Whatever ends a thread ends the loop in `get` or `paused`, after the groups that are complete have been trained on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

from vlarl.decisions import Sampling
from vlarl.interrupt import Interrupted, InterruptGuard
from vlarl.observability.clock import Stopwatch
from vlarl.rollout.collector import Collector, Episode, Running, TaskList
from vlarl.rollout.outstanding import Delivery, Group, OutstandingGroups
from vlarl.rollout.source import RolloutSource
from vlarl.rollout.steps import NO_RECORDING, RecordingPlan
from vlarl.rollout.tasks import Sampler
from vlarl.types import ChunkOutcome, Rollout, Task, TaskKey, Trajectory

CHECK_S = 0.2  # how often the loop checks for Ctrl-C while it waits
LEAVE_S = 30.0  # for the threads to stop, before the run ends without them

Check = Callable[[], None]
"""Raises where the run is to stop."""


@dataclass(frozen=True)
class Calls:
    """What the source calls, each in the thread that the diagram above names."""

    score: Callable[[list[Trajectory], Check], list[Trajectory]]  # in the reward thread
    report: Callable[[int, Delivery, dict[str, float]], Rollout]  # what is delivered, what took how long; in the loop
    show: Callable[[int, int], None] = lambda done, total: None  # complete groups, and those of an update
    ended: Callable[[Episode], None] = lambda episode: None  # in the rollout thread


class StreamedTasks(TaskList):
    """The tasks of admitted groups: the supply of an asynchronous run. A slot chooses among those of the oldest batch.

    While it is held, no slot gets a task.
    """

    def __init__(
        self,
        lock: threading.Condition,
        last_task: list[TaskKey | None],
        begins: Callable[[Task], None],
        plan: RecordingPlan = NO_RECORDING,
    ) -> None:
        """`begins` is told of each task that a slot takes, with the lock held."""
        super().__init__((), plan, last_task)
        self.is_held = False
        self._lock = lock
        self._begins = begins

    def add(self, tasks: Sequence[Task]) -> None:
        """Let these tasks wait behind the others."""
        with self._lock:
            self._waiting.extend(Running.begin(task, self._plan) for task in tasks)
            self._lock.notify_all()

    def wants(self, slot: int) -> bool:
        """Whether a task waits and may begin."""
        with self._lock:
            return super().wants(slot) and not self.is_held

    def take(self, slots: Sequence[int]) -> dict[int, Running]:
        """Waiting tasks for free slots."""
        with self._lock:
            taken = {} if self.is_held else super().take(slots)
            for episode in taken.values():
                self._begins(episode.task)
            return taken

    def put_back(self, slot: int, episode: Running) -> None:
        """Run it before the others."""
        with self._lock:
            super().put_back(slot, episode)

    def _choice(self) -> list[Task]:
        """A batch that is older than others is not kept waiting for them."""
        oldest = self._waiting[0].task.iteration
        return [each.task for each in takewhile(lambda each: each.task.iteration == oldest, self._waiting)]


class RolloutsAhead(RolloutSource):
    """Collects groups in threads of its own, no further ahead than the staleness allows."""

    def __init__(
        self,
        groups: OutstandingGroups,
        collector: Collector,
        sampler: Sampler,
        sampling: Sampling,
        calls: Calls,
        guard: InterruptGuard,
        stopwatch: Callable[[str], Stopwatch],
        first_tasks: Sequence[Task] = (),
        plan: RecordingPlan = NO_RECORDING,
    ) -> None:
        """`first_tasks` are those that a resumed run begins with, which `groups` has in its books; `stopwatch` makes
        the clock of a thread; `plan` says which episodes are recorded."""
        super().__init__()
        self._groups, self._collector, self._sampler, self._sampling = groups, collector, sampler, sampling
        self._calls, self._guard = calls, guard
        self._lock = threading.Condition()  # guards all that follows, `groups` and the sampler
        self._tasks = StreamedTasks(self._lock, collector.last_task, self._begins, plan)
        self._tasks.add(first_tasks)
        self._complete: list[Group] = []  # all of whose members have ended, and which have to be scored
        self._busy: set[str] = set()  # threads that run episodes or score groups now
        self._cause = ""  # of the first episode that crashed since the last delivery
        self._error: BaseException | None = None  # that ended a thread
        self._is_leaving = False
        self._delivered = time.monotonic()
        self._paused_s = self._waited_s = 0.0  # since the last delivery
        self._clocks = {name: stopwatch(name) for name in ("rollout", "reward")}
        self._reward_s = 0.0  # up to the last delivery
        self._threads = [
            threading.Thread(target=self._guarded, args=(name, work), name=name, daemon=True)
            for name, work in (("rollout", self._roll_out), ("reward", self._score))
        ]

    def __enter__(self) -> Self:
        self._delivered = time.monotonic()
        self._admit()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the threads: after the last iteration they have nothing to do, otherwise at their next check."""
        with self._lock:
            self._is_leaving = True
            self._lock.notify_all()
        end = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration: the oldest complete groups, as soon as there are enough."""
        with self._lock:
            self._guard.check()
            while not self._groups.has_enough or self._groups.has_stragglers(self._version):
                has_enough, began = self._groups.has_enough, time.monotonic()
                self._wait(f"without a rollout {iteration}")
                self._waited_s += time.monotonic() - began if has_enough else 0.0
            delivery = self._groups.deliver(self._version)
            episodes = delivery.trajectories
            if episodes and all(trajectory.status == "crashed" for trajectory in episodes):
                raise self._collector.none_could_be_run(len(episodes), self._cause)
            delivery.metrics["rollout/waited_for_stragglers_s"] = self._waited_s
            return self._calls.report(iteration, delivery, self._seconds())

    def updated(self) -> None:
        """What was delivered is trained on: as many groups may follow it."""
        with self._lock:
            self._groups.trained()
            self._admit()
            self._show()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block no episode runs and no group is scored: those under way are finished first."""
        try:
            with self._lock:
                self._tasks.is_held = True
                while self._busy:
                    self._wait("before an evaluation")
                self._refuse_ended("before an evaluation")
            began = time.monotonic()
            yield
            self._paused_s += time.monotonic() - began
        finally:
            with self._lock:
                self._tasks.is_held = False
                self._lock.notify_all()

    @property
    def _version(self) -> int:
        return self._collector.engine.version

    def _seconds(self) -> dict[str, float]:
        """What took how long since the last delivery; the lock is held."""
        now, reward_s = time.monotonic(), self._clocks["reward"].seconds.get("reward", 0.0)
        collecting_s = max(now - self._delivered - self._paused_s, 1e-9)
        seconds = {"rollout": collecting_s, "reward": reward_s - self._reward_s}
        self._delivered, self._reward_s, self._cause = now, reward_s, ""
        self._paused_s = self._waited_s = 0.0
        return seconds

    def _wait(self, what: str) -> None:
        """Let the threads work for a moment; the lock is held before and after."""
        self._refuse_ended(what)
        self._lock.wait(CHECK_S)

    def _refuse_ended(self, what: str) -> None:
        """Raise whatever ended one of the threads."""
        self._guard.check()
        if self._error is not None:
            raise self._error
        if not all(thread.is_alive() for thread in self._threads):
            raise RuntimeError(f"a thread of the rollouts has ended {what}")

    def _check(self) -> None:
        """Raise where the threads are to stop."""
        self._guard.check()
        if self._is_leaving:
            raise Interrupted

    def _admit(self) -> None:
        """Queue batches as far as the staleness allows. The sampler is called with the lock held: it is told results
        and gives tasks in one order, whichever threads call."""
        with self._lock:
            while self._groups.wants_batch and not self._is_leaving:
                tasks = self._sampler.get_batch(self._groups.next_batch, self._groups.num_unreported)
                self._groups.admit(tasks)
                self._tasks.add(tasks)

    def _begins(self, task: Task) -> None:
        self._groups.begin(task, self._version)

    def _show(self) -> None:
        self._calls.show(min(self._groups.num_waiting, self._groups.num_groups), self._groups.num_groups)

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a thread's border: the loop raises it
            with self._lock:
                self._error = self._error or error
        finally:
            self._rest(name)

    def _rest(self, name: str) -> None:
        """Note that a thread does nothing that a pause would have to wait for."""
        with self._lock:
            self._busy.discard(name)
            self._lock.notify_all()

    def _wakes(self, name: str, has_work: Callable[[], bool]) -> bool:
        """Wait until there is work for a thread, which is busy from then on; False: the threads are to end."""
        with self._lock:
            while not self._is_leaving:
                if has_work() and not self._tasks.is_held:
                    self._busy.add(name)
                    return True
                self._lock.wait()
            return False

    def _roll_out(self) -> None:
        while self._wakes("rollout", lambda: self._tasks.wants(0)):
            self._run_episodes()
            self._rest("rollout")

    def _run_episodes(self) -> None:
        """Run what waits, and what is added meanwhile."""
        with self._clocks["rollout"].timed("rollout"):
            for _, episode, outcome in self._collector.run(self._tasks, self._sampling, self._check, all_may_fail=True):
                self._ended(episode, outcome)

    def _ended(self, episode: Running, outcome: ChunkOutcome) -> None:
        finished = episode.finish(outcome)
        self._calls.ended(finished)
        trajectory = finished.trajectory
        if outcome.error is not None:
            trajectory = trajectory.without_inputs()  # never trained on: they would fill the object stores
        with self._lock:
            self._cause = self._cause or outcome.error or ""
            if (group := self._groups.end(trajectory)) is not None:
                self._complete.append(group)
                self._lock.notify_all()

    def _score(self) -> None:
        while self._wakes("reward", lambda: bool(self._complete)):
            self._score_complete()
            self._rest("reward")

    def _score_complete(self) -> None:
        """Score all groups that are complete by now, together: rewards that are models work in batches."""
        with self._lock:
            groups, self._complete = self._complete, []
        episodes = [trajectory for group in groups for trajectory in group.ended]
        with self._clocks["reward"].timed("reward"):
            scored = iter(self._calls.score(episodes, self._check))
        with self._lock:
            for group in groups:
                self._groups.conclude(group, [next(scored) for _ in group.tasks])
            self._admit()
            self._show()
            self._lock.notify_all()
