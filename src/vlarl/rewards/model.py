"""Hugging Face models as rewards: a classifier reads an episode, or a prompt with its response, as text; encoders
compare a view with the instruction. Generative models are in judge.py.

A score is about the end of an episode, or about the state that a decision led to. No model reads actions, and none is
trained here: those that `vlarl finetune` trains are in trained.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from vlarl.errors import UsageError, VlarlError
from vlarl.rewards.base import Scoring, ScoringReward
from vlarl.rewards.conversation import ConversationReader
from vlarl.rewards.pretrained import load_part, load_whole
from vlarl.types import Observation, Trajectory

RECENT_STATES = 16  # how many states the text of an episode covers


class ModelReward(ScoringReward):
    """A transformers model that scores states of an episode, `batch_size` of them in one pass."""

    def __init__(self, path: str, model: Any, device: torch.device, scoring: Scoring, batch_size: int) -> None:
        super().__init__(scoring, batch_size)
        self.path = path
        self.device = device
        self.model = model.to(device).eval().requires_grad_(False)

    @abstractmethod
    def score_states(self, states: Sequence[tuple[Trajectory, int]]) -> torch.Tensor:
        """[N] scores of episodes, each after the given number of decisions."""

    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The score of each end, or of the state after each decision."""
        decisions = [len(trajectory.transitions) for trajectory in trajectories]
        first = [count if self.scoring == "outcome" else 1 for count in decisions]
        states = [
            (trajectory, done)
            for trajectory, start, count in zip(trajectories, first, decisions, strict=True)
            for done in range(start, count + 1)
        ]
        parts = [states[start : start + self.batch_size] for start in range(0, len(states), self.batch_size)]
        with torch.inference_mode():
            flat = iter(torch.cat([self.score_states(part) for part in parts]).float().tolist())
        return [[next(flat) for _ in range(start, count + 1)] for start, count in zip(first, decisions, strict=True)]

    def move_to_cpu(self) -> bool:
        """Move the model to the CPU for good; False when it is there already."""
        if self.device.type == "cpu":
            return False
        self.device = torch.device("cpu")
        self.model = self.model.to(self.device)
        return True


class ClassifierReward(ModelReward):
    """A sequence classifier with one label: its logit for the episode written out as text, or for a prompt and its
    response."""

    reads_images = False

    def __init__(self, path: str, device: torch.device, scoring: Scoring = "outcome", batch_size: int = 16) -> None:
        model = load_whole(transformers.AutoModelForSequenceClassification, path)
        if model.config.num_labels != 1:
            raise UsageError(
                f"reward.model: {path} has {model.config.num_labels} labels; a reward model has one. Take a checkpoint "
                "with num_labels 1."
            )
        self.reader = ConversationReader(path, model.config)
        super().__init__(path, model, device, scoring, batch_size)

    def score_states(self, states: Sequence[tuple[Trajectory, int]]) -> torch.Tensor:
        """[N] the logit of each text."""
        encoded = [self._encoded(trajectory, done) for trajectory, done in states]
        inputs = {name: column.to(self.device) for name, column in self.reader.padded(encoded).items()}
        logits: torch.Tensor = self.model(**inputs).logits
        return logits[:, 0]

    def _encoded(self, trajectory: Trajectory, num_decisions: int) -> Any:
        """The tokens of an episode up to a decision."""
        transition = trajectory.transitions[num_decisions - 1]
        prompt, text = transition.observation.prompt, transition.text
        if text is None or prompt is None:
            return self.reader.text(episode_text(trajectory, num_decisions))
        return self.reader.response(prompt, text)


class SimilarityReward(ModelReward):
    """A pair of encoders such as CLIP: cosine of the agent's view and the instruction, from -1 to 1."""

    def __init__(self, path: str, device: torch.device, scoring: Scoring = "outcome", batch_size: int = 16) -> None:
        model = load_whole(transformers.AutoModel, path)
        self.tokenizer = load_part(transformers.AutoTokenizer, path)
        self.image_processor = load_part(transformers.AutoImageProcessor, path)
        self.max_tokens = model.config.text_config.max_position_embeddings
        super().__init__(path, model, device, scoring, batch_size)

    def score_states(self, states: Sequence[tuple[Trajectory, int]]) -> torch.Tensor:
        """[N] the similarity of each view with its instruction."""
        if any(trajectory.transitions[-1].text is not None for trajectory, _ in states):
            raise VlarlError(
                f"reward.model: {self.path} compares the views of a robot with the instruction, and scores no texts. "
                "Use a sequence classifier, or a language model as a judge."
            )
        seen = [state_after(trajectory, done) for trajectory, done in states]
        text = self.tokenizer(
            [observation.instruction for observation in seen],
            padding="max_length",  # as in SigLIP's training; CLIP works with it too
            truncation=True,
            max_length=self.max_tokens,
            return_tensors="pt",
        )
        pixels = self.image_processor([observation.images[0] for observation in seen], return_tensors="pt")
        output = self.model(**{name: tensor.to(self.device) for name, tensor in (text | pixels).items()})
        return F.cosine_similarity(output.image_embeds.float(), output.text_embeds.float(), dim=-1)


def state_after(trajectory: Trajectory, num_decisions: int) -> Observation:
    """The observation after this many decisions."""
    later = [t.observation for t in trajectory.transitions[num_decisions : num_decisions + 1]]
    return later[0] if later else trajectory.final_observation


def episode_text(trajectory: Trajectory, num_decisions: int) -> str:
    """An episode up to a decision as text for a model: instruction, outcome, and the gripper's positions.

    The newest state comes first, so that a model with a short context loses the oldest.
    """
    steps = sum(t.num_executed for t in trajectory.transitions[:num_decisions])
    ended = "success" if trajectory.success else "failure"
    outcome = ended if num_decisions == len(trajectory.transitions) else "under way"
    lines = [f"Task: {trajectory.final_observation.instruction}", f"Result: {outcome} after {steps} steps"]
    for index in range(num_decisions, max(num_decisions - RECENT_STATES, -1), -1):
        x, y, z, *_, left, right = state_after(trajectory, index).proprio.tolist()
        lines.append(f"Decision {index}: gripper at {x:.2f} {y:.2f} {z:.2f}, fingers {abs(left - right):.2f} apart")
    return "\n".join(lines)
