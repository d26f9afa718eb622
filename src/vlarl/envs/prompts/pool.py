"""Prompts as an `EnvPool`: a slot holds one prompt, and the text that responds to it ends the episode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image

from vlarl.envs.base import NOTHING, Actions, LockstepPool, Record, started
from vlarl.envs.prompts.source import PromptError, PromptSource
from vlarl.solutions import find_solution, matches
from vlarl.types import ChunkOutcome, Observation, Prompt, Task, UInt8Array

FRAME_SIZE = 256  # pixels of a side of a video's frame
KEPT_PROMPTS = 2  # read last: members of a group follow each other


class PromptPool(LockstepPool):
    """`num_envs` prompts of one suite. An episode succeeds where the text gives the solution, if the prompt has one."""

    def __init__(self, source: PromptSource, num_envs: int) -> None:
        super().__init__()
        self.source = source
        self.spec = source.spec
        self.num_envs = num_envs
        self._shown: list[Observation | None] = [None] * num_envs
        # Members of a group get the same object: it is decoded once, and policies process it once in a batch.
        self._prompt = lru_cache(maxsize=KEPT_PROMPTS)(source.prompt)

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        """Start each task in its slot; a prompt that can't be used is an error of its episode if they are skipped."""
        for slot, task in zip(slots, tasks, strict=True):
            try:
                (observation,) = self.reset([slot], [task])
                error = None
            except PromptError as problem:
                if self.source.on_error == "stop":
                    raise
                observation, error = Observation.of_prompt(Prompt(({"role": "user", "content": ""},))), str(problem)
            frames = (self.frame(slot),) if slot in record.frames and error is None else ()
            self._outcomes.append((slot, started(observation, frames, error)))

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Show each slot the prompt of its task."""
        shown: list[Observation] = []
        for slot, task in zip(slots, tasks, strict=True):
            if task.suite != self.spec.name:
                raise ValueError(f"this pool has prompts of {self.spec.name}, but the task is of {task.suite}")
            self._shown[slot] = None
            observation = Observation.of_prompt(self._prompt(task.task_id, task.init_state))
            self._shown[slot] = observation
            shown.append(observation)
        return shown

    def step_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> list[ChunkOutcome]:
        """Take the text of each slot, which ends its episode."""
        outcomes = []
        for slot, text in zip(slots, actions, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"{self.spec.name} takes texts, not actions of a robot")
            shown = self._shown[slot]
            if shown is None or shown.prompt is None:
                raise RuntimeError(f"slot {slot} has no prompt: reset it first")
            solution = find_solution(shown.prompt.columns)
            success = solution is not None and matches(text, solution, self.source.match)
            # A last observation is kept with its episode, and nothing follows it: its pixels would only take memory.
            last = Observation.of_prompt(shown.prompt.without_images())
            frames = (self.frame(slot),) if slot in record.frames else ()
            outcomes.append(ChunkOutcome(np.array([success], np.float32), 1, True, False, success, last, frames))
            self._shown[slot] = None
        return outcomes

    def frame(self, slot: int) -> UInt8Array:
        """The first image of the slot's prompt, or the first frame of its first video; black without either."""
        shown = self._shown[slot]
        prompt = None if shown is None else shown.prompt
        images = () if prompt is None else (*prompt.images, *(video[0] for video in prompt.videos))
        if not images:
            return np.zeros((FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
        return np.asarray(Image.fromarray(images[0]).resize((FRAME_SIZE, FRAME_SIZE), Image.Resampling.NEAREST))

    def close(self) -> None:
        """Release the prompts that are kept."""
        self._prompt.cache_clear()
