"""The episode loop: the only loop over time in vlarl.

    tasks ─► free slot ─► send_reset ─┐
                 ▲                    ▼
                 │                 receive ─► observation ─► process ─► engine ─► act ─► send_chunk ─┐
                 │                    ▲                                                                 │
                 └── episode ended ◄──┴─────────────────────────────────────────────────────────────────┘

The slots that are ready act together in one batch, while the others still run, unless the pool works in lock-step. A
slot whose episode ended takes the next task at once. An episode whose simulator died or hung
is run again from its beginning; seeds follow from the task and the decision, so it becomes the same episode.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from vlarl.config.words import counted
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.envs.base import EnvPool, fitting
from vlarl.errors import VlarlError
from vlarl.observability.log_file import current_log_file
from vlarl.policies.base import Policy
from vlarl.rollout.engines.base import Engine
from vlarl.rollout.tasks import derive_seed
from vlarl.types import ChunkOutcome, Observation, Task, Trajectory, Transition, UInt8Array

log = logging.getLogger(__name__)

RETRIES = 3


@dataclass(frozen=True)
class Episode:
    """A finished trajectory, and the frames of its video if one is recorded."""

    trajectory: Trajectory
    frames: tuple[UInt8Array, ...] = ()


@dataclass(frozen=True)
class _Waiting:
    """An episode to run."""

    index: int  # of the task in the caller's list
    task: Task
    attempt: int = 0


@dataclass
class _Running:
    """An episode under way. What was decided last waits for its outcome."""

    started: _Waiting
    version: int  # of the weights that decided last; of the engine at its start, before any have
    observation: Observation | None = None
    decided: tuple[TensorRows, Decisions] | None = None  # inputs and decision, one row each
    text: str | None = None  # that the decision became
    transitions: list[Transition] = field(default_factory=list)
    frames: list[UInt8Array] = field(default_factory=list)

    def note(self, outcome: ChunkOutcome) -> None:
        """Take in what the environment returned."""
        self.frames.extend(outcome.frames)
        if self.observation is not None and self.decided is not None:
            transition = Transition(self.observation, *self.decided, outcome.rewards, outcome.num_executed, self.text)
            self.transitions.append(transition)
        self.observation = outcome.observation

    def finish(self, outcome: ChunkOutcome) -> Episode:
        """The episode, which ended with this outcome."""
        trajectory = Trajectory(
            task=self.started.task,
            transitions=tuple(self.transitions),
            final_observation=outcome.observation,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            success=outcome.success,
            policy_version=self.version,
            status="ok" if outcome.error is None else "crashed",
            num_retries=self.started.attempt,
        )
        return Episode(trajectory, tuple(self.frames))


class Collector:
    """Runs episodes of a policy in a pool of environments."""

    def __init__(self, pool: EnvPool, policy: Policy, engine: Engine, retries: int = RETRIES) -> None:
        """`retries`: how often an episode is run again whose simulator failed, before it is given up as crashed."""
        self.pool = pool
        self.policy = policy
        self.engine = engine
        self.retries = retries
        self._last_task: list[int | None] = [None] * pool.num_envs  # of each slot

    def episodes(
        self,
        tasks: Sequence[Task],
        sampling: Sampling,
        record: frozenset[int] = frozenset(),
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Episode]]:
        """Run every task to its end: each episode, with the index of its task, as soon as it ends.

        `record` holds the indices of tasks whose video is recorded. `check` is called at every turn and may raise to
        stop. An error is raised at the end where no episode could be run.
        """
        waiting = deque(_Waiting(index, task) for index, task in enumerate(tasks))
        running: dict[int, _Running] = {}
        ready: list[int] = []
        num_ran = 0
        causes: list[str] = []
        while waiting or running:
            self._start(waiting, running, record)
            for slot, outcome in self.pool.receive():
                episode = running[slot]
                if outcome.error is None:
                    episode.note(outcome)
                    if not (outcome.terminated or outcome.truncated):
                        ready.append(slot)
                        continue
                    num_ran += 1
                else:
                    causes.append(outcome.error)
                    if self._try_again(episode, outcome.error, waiting):
                        del running[slot]
                        continue
                del running[slot]
                yield episode.started.index, episode.finish(outcome)
            has_free_slot = waiting and len(running) < self.pool.num_envs
            if ready and not (self.pool.lockstep and has_free_slot):
                self._decide(sorted(ready), running, sampling, record)
                ready = []
            check()
        if causes and num_ran == 0:
            raise self._none_could_be_run(len(tasks), causes[0])

    def _start(self, waiting: deque[_Waiting], running: dict[int, _Running], record: frozenset[int]) -> None:
        """Give waiting tasks to free slots, each one of the task that it ran last where there is one."""
        free = [slot for slot in range(self.pool.num_envs) if slot not in running][: len(waiting)]
        for slot in free:
            chosen = fitting([each.task for each in waiting], self._last_task[slot], set(self._last_task))
            running[slot] = _Running(waiting[chosen], self.engine.version)
            self._last_task[slot] = waiting[chosen].task.task_id
            del waiting[chosen]
        if free:
            tasks = [running[slot].started.task for slot in free]
            self.pool.send_reset(free, tasks, self._recorded(free, running, record))

    def _try_again(self, episode: _Running, error: str, waiting: deque[_Waiting]) -> bool:
        """Put an episode whose simulator failed back in front of the others; False once it was tried often enough."""
        started, decisions = episode.started, len(episode.transitions)
        again = started.attempt < self.retries
        fate = "it is run again" if again else f"given up after {counted(started.attempt + 1, 'attempt')}"
        after = counted(decisions, "decision")
        log.warning("episode %s failed after %s, %s: %s", started.task.episode_id, after, fate, error)
        if again:
            waiting.appendleft(replace(started, attempt=started.attempt + 1))
        return again

    def _none_could_be_run(self, num_episodes: int, cause: str) -> VlarlError:
        first = cause.split("\n", 1)[0]
        file = current_log_file()
        where = f" The whole text of each is in {file}." if file is not None else ""
        remedy = "Fix the environment; `vlarl env check` tries it out alone."
        return VlarlError(
            f"none of {num_episodes} episodes of {self.pool.spec.name} could be run. The first one: "
            f"{first.rstrip('.')}.{where} {remedy}"
        )

    def _decide(
        self, slots: list[int], running: dict[int, _Running], sampling: Sampling, record: frozenset[int]
    ) -> None:
        """One decision in each of these slots: process, generate, act, and send to the environments."""
        episodes = [running[slot] for slot in slots]
        inputs = self.policy.process([episode.observation for episode in episodes if episode.observation is not None])
        seeds = [derive_seed(episode.started.task.seed, len(episode.transitions)) for episode in episodes]
        decisions = self.engine.generate(inputs, sampling, seeds).to("cpu")
        actions = self.policy.act(decisions)
        for episode, seen, decision, action in zip(episodes, inputs.split(), decisions.split(), actions, strict=True):
            episode.decided, episode.version = (seen, decision), int(decision.version)
            episode.text = action if isinstance(action, str) else None
        self.pool.send_chunk(slots, actions, self._recorded(slots, running, record))

    def _recorded(self, slots: list[int], running: dict[int, _Running], record: frozenset[int]) -> frozenset[int]:
        return frozenset(slot for slot in slots if running[slot].started.index in record)
