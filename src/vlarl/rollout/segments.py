"""Rollouts of a fixed length: every slot makes so many decisions an iteration, and its episode continues in the next.

    iteration        1            │            2            │            3
    slot 0    ├─ episode 0 ───────┼───────────────┤├ episode 2 ─────────┼── …      │ a segment is cut here
    slot 1    ├─ episode 1 ──┤├ episode 3 ────────┼─────────────────────┼── …

A segment is the part of an episode that ran in one iteration: a `Trajectory` that `continues` unless the episode ended
with it. What its slot does next follows from the run's seed, the slot and the weights alone: the n-th episode of a slot
has a fixed index, and an index has its task (`Sampler.get_episodes`). So it does not matter which slot is faster, and a
resumed run collects the same segments.

An evaluation takes the environments, and a resumed run has new ones. Episodes that were open before are then brought
back by running their actions again: the same task and actions give the same episode. Where a simulator does not come
back to the same observation, the episode starts again from its beginning. The same happens to an episode whose
simulator fails: what was collected of it in this iteration is dropped, earlier segments have been trained on.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from vlarl.decisions import Sampling
from vlarl.envs.base import Record
from vlarl.errors import UsageError
from vlarl.rollout.collector import Collector, Episode, Running
from vlarl.rollout.outstanding import NEXT_BATCH
from vlarl.rollout.steps import NO_RECORDING, EpisodeSteps, RecordingPlan
from vlarl.rollout.tasks import Sampler
from vlarl.types import Action, ChunkOutcome, Earlier, FloatArray, Observation, Task, Trajectory, pixel_digest

log = logging.getLogger(__name__)


@dataclass
class _Open:
    """An episode that continues in its slot."""

    episode: Running
    fingerprint: str = ""  # of the observation that it waits at; empty: it begins with its first one


class Segments:
    """Collects `num_steps` environment steps in each slot, rounded up to whole decisions; a `Supply` of the collector.

    A chunk that the end of an episode cuts short counts as a whole decision, so that all slots make equally many.
    """

    def __init__(
        self, collector: Collector, sampler: Sampler, num_steps: int, plan: RecordingPlan = NO_RECORDING
    ) -> None:
        """`plan` says which episodes are recorded."""
        self._plan = plan
        self.collector = collector
        self.sampler = sampler
        self.num_decisions = math.ceil(num_steps / collector.policy.num_steps)  # of each slot, in each iteration
        self.num_restarted = 0  # episodes of the newest iteration that did not come back to where they were
        num_envs = collector.pool.num_envs
        self._open: dict[int, _Open] = {}  # by slot
        self._num_begun = [0] * num_envs  # episodes of each slot
        self._made = [0] * num_envs  # decisions of each slot in this iteration
        self._displaced: set[int] = set()  # slots that are no longer where their open episodes are
        self._last_run = 0  # of the collector, that left the slots where they are

    @property
    def progress(self) -> tuple[int, int]:
        """Decisions of this iteration: made, and in all."""
        return sum(self._made), self.num_decisions * len(self._made)

    def collect(
        self,
        sampling: Sampling,
        check: Callable[[], None] = lambda: None,
        ended: Callable[[Episode], None] = lambda episode: None,
    ) -> list[Trajectory]:
        """The segments of one iteration, by slot and time. `check` is called at every turn and may raise to stop;
        `ended` is called with every episode that ended."""
        self._made = [0] * len(self._made)
        if self.collector.num_runs != self._last_run:
            self._displaced = set(self._open)
        self.num_restarted = self._bring_back(check)
        segments: list[tuple[int, Trajectory]] = []
        for slot, episode, outcome in self.collector.run(self, sampling, check):
            finished = episode.finish(outcome)
            trajectory = finished.trajectory
            segments.append((slot, trajectory))
            if trajectory.status == "crashed":  # given up: a slot that does not work must not be tried forever
                self._made[slot] = self.num_decisions
            if trajectory.continues:
                self._open[slot] = _Open(_continued(episode, trajectory), fingerprint(outcome.observation))
            else:
                ended(finished)
        self._last_run = self.collector.num_runs
        return [trajectory for _, trajectory in sorted(segments, key=lambda segment: segment[0])]

    def credit(self, scored: Iterable[Trajectory]) -> None:
        """Add the rewards that segments were assigned to the returns of their episodes."""
        by_task = {open_episode.episode.task: open_episode.episode for open_episode in self._open.values()}
        for trajectory in scored:
            if trajectory.continues:
                episode = by_task[trajectory.task]
                episode.earlier = replace(
                    episode.earlier, reward=trajectory.episode_return, reward_parts=trajectory.episode_parts
                )

    def wants(self, slot: int) -> bool:
        """Whether decisions of the slot are left in this iteration."""
        return self._made[slot] < self.num_decisions

    def take(self, slots: Sequence[int]) -> dict[int, Running]:
        """The open episode of each slot, or its next one."""
        fresh = [slot for slot in slots if slot not in self._open]
        if fresh:
            indices = [slot + len(self._made) * self._num_begun[slot] for slot in fresh]
            for slot, task in zip(fresh, self.sampler.get_episodes(indices), strict=True):
                self._num_begun[slot] += 1
                self._open[slot] = _Open(Running.begin(task, self._plan))
        return {slot: self._open.pop(slot).episode for slot in slots}

    def put_back(self, slot: int, episode: Running) -> None:
        """Run it again, in the same slot."""
        self._open[slot] = _Open(episode)

    def decided(self, slots: Sequence[int]) -> None:
        """Count a decision in each of these slots. In lock-step a batched environment moves the others, too."""
        for slot in slots:
            self._made[slot] += 1
        if self.collector.pool.lockstep:
            self._displaced |= self._open.keys() - set(slots)

    def is_cut(self, slot: int) -> bool:
        """Whether the slot has made its decisions."""
        return not self.wants(slot)

    def state(self) -> dict[str, Any]:
        """What the next iteration's segments depend on besides weights and curriculum, as JSON can hold it."""
        episodes = [{"slot": slot, **_as_json(self._open[slot])} for slot in sorted(self._open)]
        return {"num_begun": list(self._num_begun), "episodes": episodes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned; from the start where that is empty, or of an asynchronous run."""
        if not state or NEXT_BATCH in state:
            return
        num_begun = [int(count) for count in state["num_begun"]]
        if len(num_begun) != len(self._num_begun):
            raise UsageError(
                f"env.num_envs = {len(self._num_begun)}: the checkpoint has the running episodes of {len(num_begun)} "
                f"environments (rollout.num_steps); resume with --env.num_envs {len(num_begun)}."
            )
        self._num_begun = num_begun
        self._open = {int(row["slot"]): _from_json(row, self._plan) for row in state["episodes"]}
        if not self._open.keys() <= set(range(len(num_begun))):
            raise ValueError("open_episodes names a slot that there is not")
        self._displaced, self._last_run = set(self._open), self.collector.num_runs

    def _bring_back(self, check: Callable[[], None]) -> int:
        """Run the actions of displaced episodes again; how many did not come back to where they were.

        All arrive together, at the same turn: a batched environment moves all its slots at every step.
        """
        is_lockstep = self.collector.pool.lockstep
        if self._displaced and is_lockstep:
            self._displaced = set(self._open)
        begun = {slot for slot in self._displaced if self._open[slot].fingerprint}
        self._displaced = set()
        seen: dict[int, Observation] = {}
        missing = set(begun)
        while missing:
            found, errors = self._run_again(begun if is_lockstep else missing, check)
            seen |= found
            missing = {slot for slot, why in errors.items() if self.collector.is_retried(self._open[slot].episode, why)}
            for slot in missing:
                self._open[slot].episode.attempt += 1
        for slot in begun:
            came = self._open[slot]
            if slot in seen and fingerprint(seen[slot]) == came.fingerprint:
                came.episode.observation = seen[slot]
                continue
            name, after = came.episode.task.episode_id, came.episode.earlier.num_steps
            log.warning("episode %s did not come back to its step %d: it starts again from its beginning", name, after)
            self._open[slot] = _Open(came.episode.again(failed=False))
        return sum(not self._open[slot].fingerprint for slot in begun)

    def _run_again(self, slots: set[int], check: Callable[[], None]) -> tuple[dict[int, Observation], dict[int, str]]:
        """Run the actions of the open episodes in these slots: where each arrives, and why others failed."""
        pool = self.collector.pool
        coming = {slot: self._open[slot].episode for slot in sorted(slots)}
        recorded = _missing_steps(coming)
        record = Record(steps=frozenset(recorded))
        seen: dict[int, Observation] = {}
        errors: dict[int, str] = {}
        for left in range(max((len(episode.actions) for episode in coming.values()), default=-1), -1, -1):
            moving = [slot for slot in coming if len(coming[slot].actions) > left]
            beginning = [slot for slot in coming if len(coming[slot].actions) == left]
            if moving:
                pool.send_chunk(moving, [coming[slot].actions[-left - 1] for slot in moving], record)
            if beginning:
                pool.send_reset(beginning, [coming[slot].task for slot in beginning], record)
            awaited = {*moving, *beginning}
            while awaited:
                check()
                for slot, outcome in pool.receive():
                    awaited.remove(slot)
                    if slot in recorded and slot in moving:
                        recorded[slot].add(seen[slot], coming[slot].actions[-left - 1], outcome)
                    if _is_under_way(outcome):
                        seen[slot] = outcome.observation
                        continue
                    del coming[slot]
                    seen.pop(slot, None)
                    if outcome.error is not None:
                        errors[slot] = outcome.error
            check()
        return seen, errors


def fingerprint(observation: Observation) -> str:
    """What tells an observation from another."""
    digest = blake2b(digest_size=16)
    pixels = observation.digest or pixel_digest(observation.images)
    for part in (pixels, observation.proprio.tobytes(), observation.instruction.encode()):
        digest.update(part)
    return digest.hexdigest()


def _missing_steps(episodes: Mapping[int, Running]) -> dict[int, EpisodeSteps]:
    """The steps that have to be recorded again, by slot: those of an earlier session, and of a try that failed."""
    recorded: dict[int, EpisodeSteps] = {}
    for slot, episode in episodes.items():
        if episode.steps is not None and len(episode.steps) < episode.earlier.num_steps:
            recorded[slot] = episode.steps = EpisodeSteps()
    return recorded


def _is_under_way(outcome: ChunkOutcome) -> bool:
    return outcome.error is None and not (outcome.terminated or outcome.truncated)


def _continued(episode: Running, segment: Trajectory) -> Running:
    """The episode after a segment of it, whose rewards are those of the environment."""
    earlier = replace(
        episode.earlier, num_steps=segment.episode_length, progress=episode.earlier.progress + segment.env_return
    )
    return replace(episode, earlier=earlier, transitions=[], frames=[])


def _as_json(open_episode: _Open) -> dict[str, Any]:
    episode = open_episode.episode
    return {
        "task": asdict(episode.task),
        "attempt": episode.attempt,
        "version": episode.version,
        "earlier": asdict(episode.earlier),
        "fingerprint": open_episode.fingerprint,
        "actions": _packed(episode.actions),
    }


def _from_json(row: Mapping[str, Any], plan: RecordingPlan) -> _Open:
    task, earlier = dict(row["task"]), row["earlier"]
    suite = str(task.pop("suite"))
    parts = {str(name): float(value) for name, value in earlier["reward_parts"].items()}
    episode = replace(
        Running.begin(Task(suite, **{str(name): int(value) for name, value in task.items()}), plan),
        attempt=int(row["attempt"]),
        version=int(row["version"]),
        earlier=Earlier(int(earlier["num_steps"]), float(earlier["progress"]), float(earlier["reward"]), parts),
        actions=list(_unpacked(row["actions"])),
    )
    return _Open(episode, str(row["fingerprint"]))


def _packed(actions: Sequence[Action]) -> dict[str, Any]:
    """Chunks [K, D] of actions as JSON can hold them, to the bit."""
    array = np.asarray(actions, dtype="<f4")  # [T, K, D]
    return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode("ascii")}


def _unpacked(packed: Mapping[str, Any]) -> FloatArray:
    """[T, K, D] what `_packed` was given."""
    content = base64.b64decode(packed["float32"], validate=True)
    array: FloatArray = np.frombuffer(content, dtype="<f4").astype(np.float32).reshape(packed["shape"])
    return array
