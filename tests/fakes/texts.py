"""Episodes of one prompt and one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fakes.kinds import TaskInputs, TextSample

from vlarl.decisions import Decisions, Row
from vlarl.types import Observation, Prompt, Task, Trajectory, Transition


def text_episode(
    text: str,
    prompt: str = "What is 3 plus 4?",
    ids: Sequence[int] = (1, 2, 0),
    conversational: bool = True,
    images: tuple[np.ndarray, ...] = (),
    state: int = 0,
    **columns: Any,
) -> Trajectory:
    """An episode that ended with this text; one padding token follows its `ids`."""
    asked = Prompt(({"role": "user", "content": prompt},), images, columns=columns, conversational=conversational)
    seen = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(8, np.float32), prompt, asked)
    shape = (1, len(ids) + 1)
    decision = Decisions(
        sample=TextSample(torch.tensor([[*ids, 3]])),
        engine_logprobs=torch.zeros(shape),
        mask=torch.tensor([[True] * len(ids) + [False]]),
        step=torch.zeros(shape, dtype=torch.int64),
        version=torch.zeros(1, dtype=torch.int64),
    )
    inputs = TaskInputs(torch.zeros(1, dtype=torch.int64))
    transition = Transition(seen, Row(inputs, 0), Row(decision, 0), np.zeros(1, np.float32), 1, text)
    return Trajectory(
        task=Task("prompts", 0, state, 0),
        transitions=(transition,),
        final_observation=seen.without_images(),
        terminated=True,
        truncated=False,
        success=False,
        policy_version=0,
    )
