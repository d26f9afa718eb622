"""A batched Gymnasium environment as an `EnvPool`, for simulators that run all their slots at once on a GPU.

A batch steps as a whole, so all running episodes are sent together, as the collector does with a lock-step pool. A slot
whose episode ends within a chunk waits for the others: it gets the middle of the action range, and its results are
ignored. A running slot that is left out of a chunk loses its episode. If the environment returns unusable values for a
slot (NaN, no success), that slot's outcome is an error and the others continue.

Requirements (`make_vector_env` refuses other environments): the environment resets no slot by itself, and
`reset(seed=[…], options={"reset_mask": mask})` resets only the chosen slots, each by its own seed, as in Gymnasium.
ManiSkill uses `options={"env_idx": tensor}`, and the first seed drives the random numbers of all chosen slots: such an
environment sets `metadata["reset_option"] = "env_idx"` and has its slots reset one by one, so that a seed gives the
same state in every slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import NOTHING, Actions, LockstepPool, Record, RewardMode, StepOutcome, as_chunks, started
from vlarl.envs.gym.probe import call_env, try_out
from vlarl.envs.gym.reading import RENDER, ActionMap, EnvOutput, Find, Reader, Tasks, missing, step_outcome, to_image
from vlarl.envs.gym.source import make_vector_env, refused, reset_option
from vlarl.envs.signals import SignalError, UnreadableError, as_array, check_reward, shown_value
from vlarl.errors import VlarlError
from vlarl.types import ChunkOutcome, FloatArray, Observation, Task, UInt8Array


class Rows:
    """Some slots of a batch's output. Each path is copied from its device once, on first use."""

    def __init__(self, seen: EnvOutput, slots: Sequence[int]) -> None:
        self._seen = seen
        self._slots = np.asarray(slots, np.intp)
        self._columns: dict[str, Sequence[Any] | NDArray[Any]] = {}

    def of(self, index: int) -> Find:
        """How to find values of the slot at this index of `slots`."""
        return lambda option, path: self._column(option, path)[index]

    def _column(self, option: str, path: str) -> Sequence[Any] | NDArray[Any]:
        if path not in self._columns:
            value = self._seen.find(option, path)
            if isinstance(value, str):
                self._columns[path] = [value] * len(self._slots)
            elif isinstance(value, tuple | list) and len(value) > self._slots.max(initial=-1):
                self._columns[path] = [value[slot] for slot in self._slots]
            elif not getattr(value, "shape", ()) or value.shape[0] <= self._slots.max(initial=-1):
                raise missing(option, path, f"is {shown_value(value)}; a batched environment gives a row for each slot")
            else:
                self._columns[path] = as_array(value[self._slots])
        return self._columns[path]


class GymVectorPool(LockstepPool):
    """`num_envs` slots of one batched environment."""

    def __init__(self, config: GymConfig, env: EnvConfig, num_envs: int, image_size: int, reward: RewardMode) -> None:
        super().__init__()
        self.num_envs = num_envs
        self._config = config
        self._env = call_env(config, "making it", lambda: make_vector_env(config, num_envs))
        self._reset_option = reset_option(self._env)
        self._reader, self._tasks = Reader(config, image_size), Tasks(config)
        self._success, self._reward = config.success, reward
        self._video_path = RENDER if self._env.render_mode == "rgb_array" else config.images[0]
        self._instructions = [""] * num_envs
        self._running = np.zeros(num_envs, np.bool_)
        self._must_reset = np.ones(num_envs, np.bool_)  # may not be stepped before a reset
        self._num_steps = np.zeros(num_envs, np.int64)
        space, registered = self._env.single_action_space, self._env.spec
        limit = env.max_steps or (registered.max_episode_steps if registered is not None else None)
        every = range(num_envs)
        self._seen = call_env(config, "reset", lambda: self._restart(dict.fromkeys(every, 0), self._tasks.options(0)))
        self.spec = try_out(config, space, limit, Rows(self._seen, [0]).of(0), self._try_step)
        self._actions = ActionMap(space, config.actions)
        self._limit = self.spec.tasks[0].max_steps
        self._must_reset[:] = True

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Start each task in its slot and return the first observations."""
        seen = self._start(slots, tasks)
        for slot in slots:
            if isinstance(failure := seen[slot], str):
                raise VlarlError(f"{self.spec.name} can't be started in slot {slot}: {failure}")
        return [first for slot in slots if isinstance(first := seen[slot], Observation)]

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        """Start each task in its slot; `record.frames` are the slots whose first frame is returned, too."""
        seen = self._start(slots, tasks)
        for slot in slots:
            first = seen[slot]
            if isinstance(first, str):
                self._outcomes.append((slot, self._failed(first)))
            else:
                self._outcomes.append((slot, started(first, (self.frame(slot),) if slot in record.frames else ())))

    def _start(self, slots: Sequence[int], tasks: Sequence[Task]) -> dict[int, Observation | str]:
        """The first observation of each slot, or why there is none."""
        seen: dict[int, Observation | str] = {}
        for part in self._reset_groups(dict(zip(slots, tasks, strict=True))):
            task_id = next(iter(part.values())).task_id
            self._seen = self._restart(
                {slot: task.init_state for slot, task in part.items()}, self._tasks.options(task_id)
            )
            rows = Rows(self._seen, list(part))
            for index, slot in enumerate(part):
                self._running[slot], self._num_steps[slot] = True, 0
                try:
                    self._instructions[slot] = self._tasks.instruction(task_id, rows.of(index))
                    seen[slot] = self._reader.read(rows.of(index), self._instructions[slot])
                except UnreadableError as error:
                    seen[slot] = self._lost(slot, error)
        return seen

    def _lost(self, slot: int, error: Exception) -> str:
        """End the episode of a slot with unusable values, and return the error message."""
        self._running[slot] = False
        step = f"in step {self._num_steps[slot]}" if self._num_steps[slot] else "at the reset"
        return f"{error}, {step} in slot {slot}"

    def _failed(self, reason: str) -> ChunkOutcome:
        size = self._reader.image_shape
        blank = Observation(np.zeros(size, np.uint8), np.zeros(self.spec.proprio_dim, np.float32), "")
        return started(blank, error=reason)

    def step_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> list[ChunkOutcome]:
        """Run one chunk [len(slots), K, D] in each slot, stopping at a slot's first end; return what `record` says."""
        chunks = as_chunks(actions, len(slots), self.spec.action_dim)
        if idle := [slot for slot in slots if not self._running[slot]]:
            raise RuntimeError(f"slots {idle} run no episode: reset them before stepping")
        self._running[[slot for slot in range(self.num_envs) if slot not in slots]] = False
        rewards = np.zeros(chunks.shape[:2], np.float32)
        frames: dict[int, list[UInt8Array]] = {slot: [] for slot in slots}
        passed: dict[int, list[Observation]] = {slot: [] for slot in slots}
        steps: dict[int, list[StepOutcome]] = {slot: [] for slot in slots}
        seen: dict[int, Observation | str] = {}
        live = list(range(len(slots)))
        for k in range(chunks.shape[1]):
            if k and record.steps:
                seen |= self._pass([slots[index] for index in live if slots[index] in record.steps], passed)
                live = [index for index in live if self._running[slots[index]]]
            running = [slots[index] for index in live]
            for index, step in zip(live, self._step(running, chunks[live, k]), strict=True):
                if isinstance(step, str):
                    seen[slots[index]] = step
                    continue
                rewards[index, k] = step.reward
                steps[slots[index]].append(step)
            for slot in record.frames.intersection(running).difference(seen):
                frames[slot].append(self.frame(slot))
            ended = [slot for slot in running if not self._running[slot] and slot not in seen]
            seen |= self._observe(ended)  # now: the next step changes the batch
            live = [index for index in live if self._running[slots[index]]]
            if not live:
                break
        seen |= self._observe([slots[index] for index in live])
        outcomes = []
        for index, slot in enumerate(slots):
            last = seen[slot]
            if isinstance(last, str):
                outcomes.append(self._failed(last))
                continue
            outcomes.append(
                ChunkOutcome(
                    rewards=rewards[index],
                    num_executed=len(steps[slot]),
                    terminated=steps[slot][-1].terminated,
                    truncated=steps[slot][-1].truncated,
                    success=steps[slot][-1].success,
                    observation=last,
                    frames=tuple(frames[slot]),
                    passed=tuple(passed[slot]),
                )
            )
        return outcomes

    def frame(self, slot: int) -> UInt8Array:
        """An image [H, W, 3] of the slot's current state, in the environment's own size."""
        return to_image(Rows(self._seen, [slot]).of(0)("gym.images", self._video_path), self._video_path).copy()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _step(self, slots: list[int], actions: FloatArray) -> list[StepOutcome | str]:
        """One step of the whole batch, in which these slots run their episodes; a string is the error of a slot."""
        if self._must_reset.any():
            ended = np.flatnonzero(self._must_reset).tolist()
            self._restart(dict.fromkeys(ended, 0), self._tasks.options(0))
        batch = np.zeros((self.num_envs, self.spec.action_dim), np.float32)
        batch[slots] = actions
        result = call_env(self._config, "step", lambda: self._env.step(self._actions(batch)))
        observation, reward, terminated, truncated, info = result
        self._seen = EnvOutput(observation, info, self._env.render)
        rewards, ends, cuts = (
            self._per_slot(name, value)
            for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated))
        )
        # Environments of the other kind may be stepped past the end of an episode.
        self._must_reset = ((ends != 0) | (cuts != 0)) & (self._reset_option == "reset_mask")
        self._num_steps[slots] += 1
        rows = Rows(self._seen, slots)
        outcomes: list[StepOutcome | str] = []
        for index, slot in enumerate(slots):
            try:
                step = step_outcome(self._success, rows.of(index), rewards[slot], ends[slot], cuts[slot], self._reward)
                check_reward(step.reward)
            except (SignalError, UnreadableError) as error:
                outcomes.append(self._lost(slot, error))
                continue
            if not step.terminated and self._num_steps[slot] >= self._limit:
                step = replace(step, truncated=True)
            self._running[slot] = not (step.terminated or step.truncated)
            outcomes.append(step)
        return outcomes

    def _per_slot(self, name: str, value: Any) -> NDArray[Any]:
        """[num_envs] what the environment returned for each slot."""
        array = as_array(value)
        if array.shape != (self.num_envs,) or array.dtype.kind not in "biuf":
            kind = f"{array.dtype}{list(array.shape)}"
            raise refused(self._config, f"step returned {name} as {kind}; it must be one value for each of its slots")
        return array

    def _pass(self, slots: Sequence[int], passed: dict[int, list[Observation]]) -> dict[int, Observation | str]:
        """Note what these slots show before their next step; returns the errors of those that can't be read."""
        found = self._observe(slots)
        for slot, observation in found.items():
            if isinstance(observation, Observation):
                passed[slot].append(observation)
        return {slot: error for slot, error in found.items() if isinstance(error, str)}

    def _observe(self, slots: Sequence[int]) -> dict[int, Observation | str]:
        """The current observation of each of these slots, or its error."""
        rows = Rows(self._seen, slots)
        seen: dict[int, Observation | str] = {}
        for index, slot in enumerate(slots):
            try:
                seen[slot] = self._reader.read(rows.of(index), self._instructions[slot])
            except UnreadableError as error:
                seen[slot] = self._lost(slot, error)
        return seen

    def _reset_groups(self, tasks: Mapping[int, Task]) -> Iterator[dict[int, Task]]:
        """Groups of slots that one call of `reset` can start: those of one task, or each by itself."""
        for task in tasks.values():
            if task.suite != self.spec.name:
                raise ValueError(f"this pool runs {self.spec.name}, but the task is of {task.suite}")
        if self._reset_option == "env_idx":
            yield from ({slot: task} for slot, task in tasks.items())
        else:
            for task_id in sorted({task.task_id for task in tasks.values()}):
                yield {slot: task for slot, task in tasks.items() if task.task_id == task_id}

    def _restart(self, seeds: Mapping[int, int], options: dict[str, Any]) -> EnvOutput:
        """Reset these slots, each by its seed, without touching the others."""
        chosen = np.zeros(self.num_envs, np.bool_)
        chosen[list(seeds)] = True
        if self._reset_option == "env_idx":
            import torch

            # One seed for every slot, chosen or not: some random numbers depend on the first, some on the slot's own.
            every = [next(iter(seeds.values()))] * self.num_envs
            device = getattr(self._env, "device", None)
            options = {**options, "env_idx": torch.as_tensor(np.flatnonzero(chosen), device=device)}
        else:
            every = [seeds.get(slot, 0) for slot in range(self.num_envs)]
            options = {**options, "reset_mask": chosen}
        result = call_env(self._config, "reset", lambda: self._env.reset(seed=every, options=options))  # type: ignore[arg-type]  # as its own vectors take it
        observation, info = result
        self._must_reset[chosen] = False
        return EnvOutput(observation, info, self._env.render)

    def _try_step(self, action: FloatArray) -> Find:
        observation, _, _, _, info = self._env.step(np.stack([action] * self.num_envs))
        return Rows(EnvOutput(observation, info, self._env.render), [0]).of(0)
