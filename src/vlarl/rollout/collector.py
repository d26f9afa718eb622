"""The episode loop: the only loop over time in vlarl.

    tasks ─► free slot ─► reset ─► observation ─► process ─► engine ─► decode ─► step_chunk ─┐
                 ▲                      ▲                                                     │
                 └── episode ended ◄────┴──────────────── goes on ◄──────────────────────────┘

All slots that have an episode act together in one batch; a slot whose episode ended takes the next task at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vlarl.envs.base import EnvPool
from vlarl.policies.base import Policy
from vlarl.rollout.engine import Engine
from vlarl.rollout.tasks import derive_seed
from vlarl.types import ChunkOutcome, Observation, Task, Trajectory, Transition, UInt8Array

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Episode:
    """A finished trajectory, and its film if somebody asked for one."""

    trajectory: Trajectory
    frames: tuple[UInt8Array, ...] = ()


@dataclass
class _Slot:
    """An episode under way."""

    index: int  # place of the task in the caller's list
    task: Task
    observation: Observation
    transitions: list[Transition] = field(default_factory=list)
    frames: list[UInt8Array] = field(default_factory=list)

    def finish(self, outcome: ChunkOutcome, version: int) -> Episode:
        if outcome.error is not None:
            log.warning(
                "episode %s crashed after %d decisions: %s", self.task.episode_id, len(self.transitions), outcome.error
            )
        trajectory = Trajectory(
            task=self.task,
            transitions=tuple(self.transitions),
            final_observation=outcome.observation,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            success=outcome.success,
            policy_version=version,
            status="ok" if outcome.error is None else "crashed",
        )
        return Episode(trajectory, tuple(self.frames))


class Collector:
    """Runs episodes of a policy in a pool of environments."""

    def __init__(self, pool: EnvPool, policy: Policy, engine: Engine) -> None:
        self.pool = pool
        self.policy = policy
        self.engine = engine

    def collect(
        self,
        tasks: Sequence[Task],
        temperature: float,
        film: frozenset[int] = frozenset(),
        on_episode: Callable[[int], None] = lambda done: None,
    ) -> list[Episode]:
        """Run every task to its end and return the episodes in the order of the tasks.

        `film` names places in `tasks` to film; `on_episode` is told how many are done, and may raise to stop.
        """
        waiting = deque(enumerate(tasks))
        running: dict[int, _Slot] = {}
        finished: dict[int, Episode] = {}
        while waiting or running:
            self._start(waiting, running, film)
            slots = sorted(running)
            outcomes = self._advance(slots, running, temperature, film)
            for slot, outcome in zip(slots, outcomes, strict=True):
                episode = running[slot]
                episode.frames.extend(outcome.frames)
                episode.observation = outcome.observation
                if outcome.terminated or outcome.truncated or outcome.error is not None:
                    finished[episode.index] = episode.finish(outcome, self.engine.version)
                    del running[slot]
            on_episode(len(finished))
        return [finished[index] for index in range(len(tasks))]

    def _start(self, waiting: deque[tuple[int, Task]], running: dict[int, _Slot], film: frozenset[int]) -> None:
        """Give waiting tasks to free slots."""
        free = [slot for slot in range(self.pool.num_envs) if slot not in running][: len(waiting)]
        if not free:
            return
        started = [waiting.popleft() for _ in free]
        observations = self.pool.reset(free, [task for _, task in started])
        for slot, (index, task), observation in zip(free, started, observations, strict=True):
            running[slot] = _Slot(index, task, observation)
            if index in film:
                running[slot].frames.append(self.pool.frame(slot))

    def _advance(
        self, slots: list[int], running: dict[int, _Slot], temperature: float, film: frozenset[int]
    ) -> list[ChunkOutcome]:
        """One decision in every running slot: observe, generate, decode, step; and note it down."""
        episodes = [running[slot] for slot in slots]
        inputs = self.policy.process([episode.observation for episode in episodes])
        seeds = [derive_seed(episode.task.seed, len(episode.transitions)) for episode in episodes]
        tokens = self.engine.generate(inputs, temperature, seeds)
        token_ids, logprobs = tokens.ids.cpu().numpy(), tokens.engine_logprobs.cpu().numpy()
        chosen = self.policy.codec.decode(token_ids) if tokens.actions is None else tokens.actions.numpy()
        actions = self.policy.unnormalize(chosen)
        filmed = frozenset(slot for slot in slots if running[slot].index in film)
        outcomes = self.pool.step_chunk(slots, actions, filmed)
        for row, (episode, outcome) in enumerate(zip(episodes, outcomes, strict=True)):
            episode.transitions.append(
                Transition(episode.observation, token_ids[row], logprobs[row], outcome.rewards, outcome.num_executed)
            )
        return outcomes
