"""Hugging Face models as rewards: a classifier reads an episode as text, encoders compare a view with the instruction.

A score is about the end of an episode, or about the state that a decision led to. Neither model is trained, and neither
reads actions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from vlarl.errors import UsageError
from vlarl.rewards.base import Scoring, ScoringReward
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
    """A sequence classifier with one label: its logit for the episode written out as text."""

    def __init__(self, path: str, device: torch.device, scoring: Scoring = "outcome", batch_size: int = 16) -> None:
        model = _pretrained(transformers.AutoModelForSequenceClassification, path)
        if model.config.num_labels != 1:
            raise UsageError(
                f"reward.model: {path} has {model.config.num_labels} labels; a reward model has one. Take a checkpoint "
                "with num_labels 1."
            )
        self.tokenizer = _loaded(transformers.AutoTokenizer, path)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token is None:
            raise UsageError(f"reward.model: the tokenizer of {path} has no padding token; add one to its files.")
        model.config.pad_token_id = self.tokenizer.pad_token_id
        positions = getattr(model.config, "max_position_embeddings", self.tokenizer.model_max_length)
        self.max_tokens = min(positions, self.tokenizer.model_max_length)
        super().__init__(path, model, device, scoring, batch_size)

    def score_states(self, states: Sequence[tuple[Trajectory, int]]) -> torch.Tensor:
        """[N] the logit of each text."""
        texts = [episode_text(trajectory, done) for trajectory, done in states]
        inputs = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self.device)
        logits: torch.Tensor = self.model(**inputs).logits
        return logits[:, 0]


class SimilarityReward(ModelReward):
    """A pair of encoders such as CLIP: cosine of the agent's view and the instruction, from -1 to 1."""

    def __init__(self, path: str, device: torch.device, scoring: Scoring = "outcome", batch_size: int = 16) -> None:
        model = _pretrained(transformers.AutoModel, path)
        self.tokenizer = _loaded(transformers.AutoTokenizer, path)
        self.image_processor = _loaded(transformers.AutoImageProcessor, path)
        self.max_tokens = model.config.text_config.max_position_embeddings
        super().__init__(path, model, device, scoring, batch_size)

    def score_states(self, states: Sequence[tuple[Trajectory, int]]) -> torch.Tensor:
        """[N] the similarity of each view with its instruction."""
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


def load_reward_model(path: str, device: torch.device, scoring: Scoring, batch_size: int) -> ModelReward:
    """The reward for a checkpoint, chosen by its architecture; one that can't score is refused."""
    config = _loaded(transformers.AutoConfig, path)
    name = (getattr(config, "architectures", None) or ["?"])[0]
    architecture = getattr(transformers, name, None)
    if name.endswith("ForSequenceClassification"):
        return ClassifierReward(path, device, scoring, batch_size)
    if all(hasattr(architecture, method) for method in ("get_image_features", "get_text_features")):
        return SimilarityReward(path, device, scoring, batch_size)
    raise UsageError(
        f"reward.model: {path} is a {name}, which gives no score. Use a sequence classifier with one label "
        "(…ForSequenceClassification) or a pair of encoders (CLIPModel, SiglipModel); serve anything else yourself and "
        "set reward.source to remote."
    )


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


def _loaded(kind: Any, path: str, **options: Any) -> Any:
    """Load a folder or hub id with a transformers class, without running its code; UsageError where that fails."""
    try:
        # By default the library asks on the terminal whether to run code from the folder.
        return kind.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"reward.model: {path} can't be loaded: {reason}") from error


def _pretrained(kind: Any, path: str) -> Any:
    """A model with all its weights, in the precision they are stored in; pickled files are not read."""
    model, report = _loaded(kind, path, dtype="auto", use_safetensors=True, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"reward.model: {path} lacks {len(missing)} weights, the first is {missing[0]}: its scores would be "
            "random. Take a checkpoint that was trained to score."
        )
    return model
