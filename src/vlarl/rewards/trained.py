"""Reward models that `vlarl finetune` has trained, as rewards.

    pairs      the score of the response
    steps      the probability that a step is good, the lowest of the steps that the response has
    episodes   the probability that the state is a good one, by the agent's view and the instruction

Scored decision by decision, a decision of a robot gets the change of the score that it made. The changes add up to the
score of the end less that of the beginning, so that nothing is gained by staying in a good state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vlarl.errors import VlarlError
from vlarl.rewards.base import Scoring
from vlarl.rewards.model import ModelReward, state_after
from vlarl.rewards.reward_checkpoint import load_trained
from vlarl.rewards.reward_model import STEP_SEPARATOR, Candidate, RewardModel, state_candidate
from vlarl.types import Observation, Trajectory


class TrainedReward(ModelReward):
    """The score of a trained reward model."""

    model: RewardModel

    def __init__(self, path: str, device: torch.device, scoring: Scoring, batch_size: int) -> None:
        model = load_trained(Path(path), device)
        super().__init__(path, model, device, scoring, batch_size)
        self.labels = model.description.labels
        self.image_size = model.description.image_size or model.image_size
        self.reads_images = model.reads_images

    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The score of each end, or what each decision has changed."""
        if self.labels != "episodes" or self.scoring == "outcome":
            return super().scores(trajectories)
        counts = [len(trajectory.transitions) for trajectory in trajectories]
        states = [(t, done) for t, count in zip(trajectories, counts, strict=True) for done in range(count + 1)]
        with torch.inference_mode():
            parts = [states[first : first + self.batch_size] for first in range(0, len(states), self.batch_size)]
            levels = torch.cat([self.score_states(part) for part in parts]).float()
        episodes = torch.split(levels, [count + 1 for count in counts])
        return [episode.diff().tolist() for episode in episodes]

    def score_states(self, states: Sequence[tuple[Trajectory, int]]) -> torch.Tensor:
        """[N] the score of each state, or of each response."""
        candidates = [self._candidates(trajectory, done) for trajectory, done in states]
        flat = [one for each in candidates for one in each]
        passes = [flat[first : first + self.batch_size] for first in range(0, len(flat), self.batch_size)]
        scores = torch.cat([self.model.score(self.model.read(each).to(self.device)) for each in passes])
        if self.labels == "pairs":
            return scores
        found = torch.split(scores.sigmoid(), [len(each) for each in candidates])
        return torch.stack([each.min() for each in found])

    def _candidates(self, trajectory: Trajectory, num_decisions: int) -> list[Candidate]:
        """What is scored: one candidate, or one for each step of a text."""
        transition = trajectory.transitions[max(num_decisions - 1, 0)]
        prompt, text = transition.observation.prompt, transition.text
        is_text = prompt is not None and text is not None
        if is_text != (self.labels != "episodes"):
            trained, given = ("texts", "a robot's episode") if self.labels != "episodes" else ("robots", "a text")
            raise VlarlError(f"reward.model: {self.path} was trained on {trained}, and {given} is to be scored.")
        if prompt is None or text is None:
            return [self._state(state_after(trajectory, num_decisions))]
        if self.labels == "pairs":
            return [Candidate(prompt, text)]
        return [Candidate(prompt, part) for part in beginnings(text)]

    def _state(self, observation: Observation) -> Candidate:
        """A robot's state, its view resized to the size that the model was trained on."""
        return state_candidate(observation.images[0], observation.instruction, self.image_size)


def beginnings(text: str) -> list[str]:
    """A text up to the end of each of its steps, which are its lines.

    >>> beginnings("2 and 2\\n\\nis 4")
    ['2 and 2', '2 and 2\\n\\nis 4']
    """
    lines = text.split(STEP_SEPARATOR)
    ends = [index + 1 for index, line in enumerate(lines) if line.strip()] or [len(lines)]
    return [STEP_SEPARATOR.join(lines[:end]) for end in ends]
