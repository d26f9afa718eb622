"""The episode loop: the only loop over time in vlarl.

    supply ─► free slot ─► send_reset ─┐
                  ▲                    ▼
                  │                 receive ─► observation ─► process ─► engine ─► act ─► send_chunk ─┐
                  │                    ▲                                                                 │
                  └─ ended or cut ◄────┴─────────────────────────────────────────────────────────────────┘

A supply says which episodes the slots run: each task of a list to its end (`Collector.episodes`), or so many decisions
in each slot, after which its episode waits for the next iteration (`rollout/segments.py`). The slots that are ready act
together in one batch, while the others still run, unless the pool works in lock-step. Simulators that outnumber their
cores can wait for one another without leaving a core idle: with twice as many, half of them step while the other half
is decided for, in one batch rather than in several small ones. A slot whose episode ended takes the next one at once.
An episode whose simulator died or hung, or whose observation was lost with its machine, is run again from its
beginning; seeds follow from the task and the decision, so with the same weights it becomes the same episode.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from vlarl.config.words import counted
from vlarl.decisions import Decisions, PickedRows, Row, Sampling, TensorRows
from vlarl.envs.base import EnvPool, Record, fitting, started
from vlarl.errors import RowsLostError, VlarlError
from vlarl.observability.log_file import current_log_file
from vlarl.policies.base import Policy
from vlarl.rollout.engines.base import Engine
from vlarl.rollout.steps import NO_RECORDING, EpisodeSteps, RecordingPlan
from vlarl.rollout.tasks import derive_seed
from vlarl.types import Action, ChunkOutcome, Earlier, Observation, Task, TaskKey, Trajectory, Transition, UInt8Array

log = logging.getLogger(__name__)

RETRIES = 3


@dataclass(frozen=True)
class Episode:
    """A finished trajectory; with the frames of its video and with all its steps, if those are recorded."""

    trajectory: Trajectory
    frames: tuple[UInt8Array, ...] = ()
    steps: EpisodeSteps | None = None


@dataclass
class Running:
    """An episode to run, or under way. What was decided last waits for its outcome."""

    task: Task
    index: int = 0  # of the task in the caller's list
    attempt: int = 0
    is_recorded: bool = False  # as a video
    version: int = 0  # of the weights that decided last; of the engine at its start, before any have
    earlier: Earlier = Earlier()  # the segments before this one
    actions: list[Action] = field(default_factory=list)  # that ran so far, those of earlier segments among them
    observation: Observation | None = None  # where it is now; None: its slot has to be reset
    decided: tuple[Row[TensorRows], Row[Decisions], Action] | None = None  # inputs, decision and what it became
    transitions: list[Transition] = field(default_factory=list)
    frames: list[UInt8Array] = field(default_factory=list)
    steps: EpisodeSteps | None = None  # all of them, earlier segments' among them; None: they are not recorded

    @classmethod
    def begin(cls, task: Task, plan: RecordingPlan, index: int = 0) -> Running:
        """An episode that has not started yet, recorded as planned."""
        steps = EpisodeSteps() if plan.steps(task) else None
        return cls(task, index, is_recorded=plan.video(task), steps=steps)

    def note(self, outcome: ChunkOutcome) -> None:
        """Take in what the environment returned."""
        self.frames.extend(outcome.frames)
        if self.observation is not None and self.decided is not None:
            inputs, decision, action = self.decided
            seen = replace(self.observation, inputs=None)  # the transition has them
            text = action if isinstance(action, str) else None
            self.transitions.append(Transition(seen, inputs, decision, outcome.rewards, outcome.num_executed, text))
            if self.steps is not None:
                self.steps.add(seen, action, outcome)
            self.actions.append(action)
        self.observation, self.decided = outcome.observation, None

    def finish(self, outcome: ChunkOutcome) -> Episode:
        """The episode, which ended with this outcome, or its segment, which is cut here."""
        trajectory = Trajectory(
            task=self.task,
            transitions=tuple(self.transitions),
            final_observation=outcome.observation,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            success=outcome.success,
            policy_version=self.version,
            status="ok" if outcome.error is None else "crashed",
            num_retries=self.attempt,
            continues=outcome.error is None and not (outcome.terminated or outcome.truncated),
            earlier=self.earlier,
        )
        return Episode(trajectory, tuple(self.frames), self.steps)

    def again(self, failed: bool = True) -> Running:
        """The same episode from its beginning; one more attempt where it failed."""
        steps = None if self.steps is None else EpisodeSteps()
        return Running(self.task, self.index, self.attempt + failed, self.is_recorded, steps=steps)


class Supply(Protocol):
    """Says which episodes the slots run."""

    def wants(self, slot: int) -> bool:
        """Whether there is an episode for a slot that is free."""
        ...

    def take(self, slots: Sequence[int]) -> dict[int, Running]:
        """The episodes that free slots run now, by slot: new ones, or those that continue where the slot is."""
        ...

    def put_back(self, slot: int, episode: Running) -> None:
        """Take back an episode that has to be run again."""
        ...

    def decided(self, slots: Sequence[int]) -> None:
        """Note that one decision was made in each of these slots."""
        ...

    def is_cut(self, slot: int) -> bool:
        """Whether the episode of a slot waits from here on, though it has not ended."""
        ...


class TaskList:
    """Every task of a list, to its end: the supply of evaluations, and of rollouts that are counted in episodes."""

    def __init__(self, tasks: Sequence[Task], plan: RecordingPlan, last_task: list[TaskKey | None]) -> None:
        """`last_task` is the task that each slot ran last."""
        self._plan, self._last_task = plan, last_task
        self._waiting = deque(Running.begin(task, plan, index) for index, task in enumerate(tasks))

    def wants(self, slot: int) -> bool:
        """Whether a task waits."""
        return bool(self._waiting)

    def take(self, slots: Sequence[int]) -> dict[int, Running]:
        """Waiting tasks for free slots, each one of the task that it ran last where there is one."""
        taken: dict[int, Running] = {}
        for slot in slots[: len(self._waiting)]:
            chosen = fitting(self._choice(), self._last_task[slot], set(self._last_task))
            taken[slot] = self._waiting[chosen]
            self._last_task[slot] = taken[slot].task.key
            del self._waiting[chosen]
        return taken

    def _choice(self) -> list[Task]:
        """The first of the waiting tasks, which a slot chooses one of."""
        return [each.task for each in self._waiting]

    def put_back(self, slot: int, episode: Running) -> None:
        """Run it before the others."""
        self._waiting.appendleft(episode)

    def decided(self, slots: Sequence[int]) -> None:
        """Decisions are not counted."""

    def is_cut(self, slot: int) -> bool:
        """Episodes run to their end."""
        return False


class Collector:
    """Runs episodes of a policy in a pool of environments."""

    def __init__(self, pool: EnvPool, policy: Policy, engine: Engine, retries: int = RETRIES) -> None:
        """`retries`: how often an episode is run again whose simulator failed, before it is given up as crashed."""
        self.pool = pool
        self.policy = policy
        self.engine = engine
        self.retries = retries
        self.num_runs = 0  # of any supply: each of them leaves the slots elsewhere
        self.last_task: list[TaskKey | None] = [None] * pool.num_envs  # of each slot

    def episodes(
        self,
        tasks: Sequence[Task],
        sampling: Sampling,
        plan: RecordingPlan = NO_RECORDING,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Episode]]:
        """Run every task to its end: each episode, with the index of its task, as soon as it ends.

        `plan` says which of them are recorded. `check` is called at every turn and may raise to stop. An error is
        raised at the end where no episode could be run.
        """
        for _, episode, outcome in self.run(TaskList(tasks, plan, self.last_task), sampling, check):
            yield episode.index, episode.finish(outcome)

    def run(
        self,
        supply: Supply,
        sampling: Sampling,
        check: Callable[[], None] = lambda: None,
        all_may_fail: bool = False,
    ) -> Iterator[tuple[int, Running, ChunkOutcome]]:
        """Run what the supply has: the slot, the episode and its last outcome, as soon as it ends or is cut.

        `all_may_fail`: the caller itself judges episodes none of which could be run.
        """
        self.num_runs += 1
        running: dict[int, Running] = {}
        ready: list[int] = []
        lost: list[tuple[int, ChunkOutcome]] = []  # episodes that could not be decided on
        num_ran = num_lost = 0
        cause = ""  # of the first failure
        while True:
            ready += self._start(supply, running)
            if not running:
                break
            for slot, outcome in lost or (self.pool.receive() if len(running) > len(ready) else ()):
                episode = running[slot]
                if outcome.error is None:
                    episode.note(outcome)
                    if not (outcome.terminated or outcome.truncated or supply.is_cut(slot)):
                        ready.append(slot)
                        continue
                    num_ran += 1
                else:
                    cause = cause or outcome.error
                    if self.is_retried(episode, outcome.error):
                        supply.put_back(slot, episode.again())
                        del running[slot]
                        continue
                    num_lost += 1
                del running[slot]
                yield slot, episode, outcome
            has_free_slot, lost = any(supply.wants(slot) for slot in self._free(running)), []
            awaits_others = self.pool.lockstep and (has_free_slot or len(ready) < len(running))
            if len(ready) >= self._enough(len(running)) and not awaits_others:
                lost = self._decide(sorted(ready), running, sampling)
                supply.decided(sorted(set(ready) - {slot for slot, _ in lost}))
                ready = []
            check()
        if num_lost and num_ran == 0 and not all_may_fail:
            raise self.none_could_be_run(num_lost, cause)

    def _enough(self, num_running: int) -> int:
        """How many slots have to be ready for a decision: those that the cores can do without, at most half of them."""
        spare = 0 if self.pool.num_cores is None else num_running - self.pool.num_cores
        return max(1, min(spare, -(-num_running // 2)))

    def _free(self, running: dict[int, Running]) -> list[int]:
        return [slot for slot in range(self.pool.num_envs) if slot not in running]

    def _start(self, supply: Supply, running: dict[int, Running]) -> list[int]:
        """Give episodes to free slots, and reset those whose episode begins; returns the slots that are ready."""
        taken = supply.take([slot for slot in self._free(running) if supply.wants(slot)])
        running |= taken
        beginning = [slot for slot, episode in taken.items() if episode.observation is None]
        for slot in beginning:
            taken[slot].version = self.engine.version
        if beginning:
            tasks = [taken[slot].task for slot in beginning]
            self.pool.send_reset(beginning, tasks, self._recorded(beginning, running))
        return [slot for slot in taken if slot not in beginning]

    def is_retried(self, episode: Running, error: str) -> bool:
        """Whether an episode whose simulator failed is run again; not once it was tried often enough."""
        again = episode.attempt < self.retries
        fate = "it is run again" if again else f"given up after {counted(episode.attempt + 1, 'attempt')}"
        after = counted(len(episode.actions), "decision")
        log.warning("episode %s failed after %s, %s: %s", episode.task.episode_id, after, fate, error)
        return again

    def none_could_be_run(self, num_episodes: int, cause: str) -> VlarlError:
        """The error that ends a run whose environment does not work; `cause` is the first failure."""
        first = cause.split("\n", 1)[0]
        file = current_log_file()
        where = f" The whole text of each is in {file}." if file is not None else ""
        remedy = "Fix the environment; `vlarl env check` tries it out alone."
        return VlarlError(
            f"none of {num_episodes} episodes of {self.pool.spec.name} could be run. The first one: "
            f"{first.rstrip('.')}.{where} {remedy}"
        )

    def _decide(
        self, slots: list[int], running: dict[int, Running], sampling: Sampling
    ) -> list[tuple[int, ChunkOutcome]]:
        """One decision in each of these slots: process, generate, act, and send to the environments.

        Returns the slots whose observation is lost, with an error as their outcome.
        """
        episodes = [running[slot] for slot in slots]
        rows, inputs = self._inputs([episode.observation for episode in episodes if episode.observation is not None])
        seeds = [derive_seed(episode.task.seed, len(episode.actions)) for episode in episodes]
        try:
            decisions = self.engine.generate(inputs, sampling, seeds).to("cpu")
        except RowsLostError as error:
            gone = {id(batch): batch.gone(error.name) for batch in {id(row.batch): row.batch for row in rows}.values()}
            lost = [slot for slot, row in zip(slots, rows, strict=True) if gone[id(row.batch)]]
            if not lost:
                raise
            left = [slot for slot in slots if slot not in lost]
            failed = [(slot, started(_blank(running[slot].observation), error=str(error))) for slot in lost]
            return failed + (self._decide(left, running, sampling) if left else [])
        actions = self.policy.act(decisions)
        versions = decisions.version.tolist()
        for row, (episode, action) in enumerate(zip(episodes, actions, strict=True)):
            episode.decided, episode.version = (rows[row], Row(decisions, row), action), versions[row]
        self.pool.send_chunk(slots, actions, self._recorded(slots, running))
        return []

    def _inputs(self, seen: list[Observation]) -> tuple[list[Row[TensorRows]], TensorRows]:
        """The observations as the policy reads them, one by one and together: those of the environments' workers, or
        processed here."""
        rows = [observation.inputs for observation in seen if observation.inputs is not None]
        if rows:
            return rows, PickedRows.of(rows)
        inputs = self.policy.process(seen)
        return [Row(inputs, index) for index in range(len(seen))], inputs

    def _recorded(self, slots: list[int], running: dict[int, Running]) -> Record:
        return Record(
            frozenset(slot for slot in slots if running[slot].is_recorded),
            frozenset(slot for slot in slots if running[slot].steps is not None),
        )


def _blank(seen: Observation | None) -> Observation:
    """The observation without what is lost."""
    assert seen is not None, "a decision is made at an observation"
    return replace(seen, inputs=None, fetch=None)
