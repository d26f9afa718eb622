"""Reward models that `vlarl finetune` trains: a model of transformers that gives a prompt with its response one score.

    Candidate(prompt, response) ──► read ──► rows ──► score [B]

PolicyRewardModel      a language or vision-language model as it is loaded as a policy, and a linear head on the state
                       that has read prompt and response
ClassifierRewardModel  a sequence classifier with one label, which reads texts alone

A state of a robot is a prompt, too: a view and the instruction, without a response. A saved model is a checkpoint of
its kind with a file beside it, reward_model.json, that says what it was trained on; reward.model loads it (trained.py).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from vlarl.decisions import Decisions, TensorRows
from vlarl.images.lanczos import lanczos_resize
from vlarl.policies.base import Policy
from vlarl.policies.checkpoint_json import write_json
from vlarl.rewards.conversation import ConversationReader
from vlarl.rewards.preferences import Judged
from vlarl.rewards.pretrained import save_part
from vlarl.types import Observation, Prompt, UInt8Array

Labels = Literal["pairs", "steps", "episodes"]

FILE_NAME = "reward_model.json"
STEP_SEPARATOR = "\n"  # between the steps of a text
DEFAULT_IMAGE_SIZE = 224


@dataclass(frozen=True)
class Candidate:
    """What is scored: a prompt with a response; a state of a robot has none."""

    prompt: Prompt
    response: str = ""


def state_candidate(view: UInt8Array, instruction: str, image_size: int) -> Candidate:
    """A robot's state: its view [H, W, 3], resized to a square of this side, and the instruction."""
    if view.shape[:2] != (image_size, image_size):
        view = lanczos_resize(view, image_size)
    content = [{"type": "image"}, {"type": "text", "text": instruction}]
    return Candidate(Prompt(({"role": "user", "content": content},), (view,)))


@dataclass
class Description:
    """The content of reward_model.json."""

    labels: Labels  # what the model was trained on
    scorer: Literal["policy", "classifier"]
    image_size: int | None = None  # side in pixels of the views that it was trained on; None: of texts
    held_out: dict[str, float] = field(default_factory=dict)  # its agreement with held-out labels


class RewardModel(nn.Module):
    """A model with one score, in training or trained."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description

    @property
    @abstractmethod
    def reads_images(self) -> bool:
        """Whether prompts may have images."""

    @property
    def image_size(self) -> int:
        """Side in pixels of the views that a robot's states are shown in, unless another one is configured."""
        return DEFAULT_IMAGE_SIZE

    @property
    def has_adapter(self) -> bool:
        """Whether low-rank adapters are trained in place of the weights."""
        return False

    @abstractmethod
    def read(self, candidates: Sequence[Candidate]) -> TensorRows:
        """A row for each candidate, on the CPU."""

    @abstractmethod
    def score(self, rows: TensorRows) -> torch.Tensor:
        """[B] float32: any number; of labelled states and steps, the logit of being good."""

    @abstractmethod
    def _save(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the checkpoint."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def supervised_loss(self, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch. `frames` is empty: pixels are among the rows."""
        assert isinstance(rows, Judged), "these are the rows of a policy"
        return rows.losses(rows.values(self.score)).mean()

    def weights_changed(self) -> None:
        """Called after weights were changed in place."""

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the checkpoint, with what it was trained on and how it agrees with held-out labels."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._save(folder, dtype)
        write_json(folder / FILE_NAME, vars(self.description))


@dataclass(frozen=True)
class PromptedTexts(TensorRows):
    """Prompts with responses, as a language model reads them."""

    inputs: TensorRows
    texts: Decisions  # that would write the responses


class PolicyRewardModel(RewardModel):
    """A language or vision-language model with a linear head: the value head of a policy, at the end of the text."""

    def __init__(self, policy: Policy, description: Description) -> None:
        super().__init__(description)
        self.policy = policy

    @property
    def reads_images(self) -> bool:
        """Whether prompts may have images."""
        return self.policy.num_images > 0

    @property
    def image_size(self) -> int:
        """Side in pixels of the views that the model's configuration names."""
        return self.policy.image_size

    @property
    def has_adapter(self) -> bool:
        """Whether low-rank adapters are trained in place of the weights."""
        return self.policy.has_adapter

    def read(self, candidates: Sequence[Candidate]) -> PromptedTexts:
        """Prompts as the model's own processor makes them, and the tokens of the responses."""
        inputs = self.policy.process([Observation.of_prompt(each.prompt) for each in candidates])
        return PromptedTexts(inputs, self.policy.decisions_of([each.response for each in candidates]))

    def score(self, rows: TensorRows) -> torch.Tensor:
        """[B] the head's value of the state that has read prompt and response."""
        assert isinstance(rows, PromptedTexts), "these are the rows of another model"
        return self.policy.text_values(rows.inputs, rows.texts).float()

    def weights_changed(self) -> None:
        """Bring up to date what is kept beside the weights."""
        self.policy.weights_changed()

    def _save(self, folder: Path, dtype: torch.dtype | None) -> None:
        self.policy.save(folder, dtype)


@dataclass(frozen=True)
class TokenRows(TensorRows):
    """Texts as a classifier reads them; padding is on the right."""

    ids: torch.Tensor  # [B, L] int64
    mask: torch.Tensor  # [B, L] int64: 1 where a token is, 0 in the padding
    types: torch.Tensor | None = None  # [B, L] int64, of classifiers that tell two parts apart


class ClassifierRewardModel(RewardModel):
    """A sequence classifier with one label, which reads texts alone."""

    def __init__(self, model: Any, reader: ConversationReader, description: Description) -> None:
        super().__init__(description)
        self.model, self.reader = model, reader

    @property
    def reads_images(self) -> bool:
        """It reads texts alone."""
        return False

    def read(self, candidates: Sequence[Candidate]) -> TokenRows:
        """Conversations in the classifier's chat template, without their images."""
        columns = self.reader.padded([self.reader.response(each.prompt, each.response) for each in candidates])
        return TokenRows(columns["input_ids"], columns["attention_mask"], columns.get("token_type_ids"))

    def score(self, rows: TensorRows) -> torch.Tensor:
        """[B] the logit."""
        assert isinstance(rows, TokenRows), "these are the rows of another model"
        # Joined rows are padded with zeros, and some classifiers find the end of a text by its padding.
        ids = rows.ids.masked_fill(rows.mask == 0, self.model.config.pad_token_id)
        types = {} if rows.types is None else {"token_type_ids": rows.types}
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=rows.mask, **types).logits
        return logits[:, 0].float()

    def _save(self, folder: Path, dtype: torch.dtype | None) -> None:
        save_part(self.model if dtype in (None, self.model.dtype) else copy.deepcopy(self.model).to(dtype), folder)
        save_part(self.reader.tokenizer, folder)


def described(content: Mapping[str, Any], path: str) -> Description:
    """The content of a file as a description; ValueError for one that does not fit."""
    try:
        found = Description(**content)
    except TypeError:
        raise ValueError(f"{path} is not the description of a reward model") from None
    is_known = found.labels in ("pairs", "steps", "episodes") and found.scorer in ("policy", "classifier")
    size = found.image_size
    if not is_known or not (size is None or (isinstance(size, int) and size > 0)):
        raise ValueError(f"{path} describes another kind of reward model ({found.labels}, {found.scorer}, {size})")
    return found
