"""Episodes on prompts, without a policy: what a text earned."""

import numpy as np
import torch

from vlarl.decisions import Decisions, Row
from vlarl.policies.vlm.decisions import TextSample, text_decisions
from vlarl.types import EpisodeResult, Observation, Prompt, Response, Task, Trajectory, Transition

SUITE = "prompts_arithmetic"


def prompt_of(text: str, solution: str | None = None, *images: np.ndarray, **columns: object) -> Prompt:
    """A prompt of one message."""
    given = columns if solution is None else {"solution": solution, **columns}
    return Prompt(({"role": "user", "content": text},), images, columns=given)


def responded(
    text: str,
    prompt: Prompt,
    success: bool = False,
    reward: float = 0.0,
    state: int = 0,
    num_tokens: int = 3,
    cut_off: bool = False,
    task_id: int = 0,
    **fields: object,
) -> EpisodeResult:
    """An evaluated episode whose text responds to a prompt."""
    task = Task(SUITE, task_id, state, seed=state)
    response = Response(prompt, text, num_tokens, cut_off)
    return EpisodeResult(task, prompt.text, success, 1, reward, response=response, **fields)


def text_trajectory(
    text: str,
    prompt: Prompt,
    reward: float,
    num_tokens: int,
    stopped: bool = True,
    group: int = 0,
    member: int = 0,
    **fields: object,
) -> Trajectory:
    """An episode of one text of so many tokens, padded by two."""
    task = Task(SUITE, 0, group, seed=member, group=group, member=member, iteration=1)
    observation = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), prompt.text, prompt)
    decided = Row(decision(num_tokens, stopped), 0)
    transition = Transition(observation, None, decided, np.float32([reward]), 1, text)
    last = observation.without_images()
    return Trajectory(task, (transition,), last, True, False, reward > 0, 0, **fields)


def decision(num_tokens: int, stopped: bool) -> Decisions:
    """One text of so many tokens, with two more of padding."""
    ids = torch.arange(num_tokens + 2)[None]
    sample = TextSample(ids, torch.tensor([num_tokens]), torch.tensor([stopped]))
    return text_decisions(sample, torch.zeros(ids.shape))
