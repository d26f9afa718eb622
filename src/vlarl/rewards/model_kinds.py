"""Which reward a checkpoint is: one that was trained here, or by its architecture."""

from __future__ import annotations

import torch
import transformers

from vlarl.errors import UsageError
from vlarl.rewards.base import Scoring
from vlarl.rewards.judge import JudgeOptions, JudgeReward
from vlarl.rewards.model import ClassifierReward, ModelReward, SimilarityReward
from vlarl.rewards.pretrained import load_part
from vlarl.rewards.reward_checkpoint import GENERATIVE, trained_folder
from vlarl.rewards.trained import TrainedReward


def load_reward_model(
    path: str, device: torch.device, scoring: Scoring, batch_size: int, judge: JudgeOptions
) -> ModelReward:
    """The reward for a checkpoint: one that was trained here, or by its architecture. One that can't score is
    refused."""
    if (trained := trained_folder(path)) is not None:
        return TrainedReward(str(trained), device, scoring, batch_size)
    config = load_part(transformers.AutoConfig, path)
    name = (getattr(config, "architectures", None) or ["?"])[0]
    architecture = getattr(transformers, name, None)
    if name.endswith("ForSequenceClassification"):
        return ClassifierReward(path, device, scoring, batch_size)
    if all(hasattr(architecture, method) for method in ("get_image_features", "get_text_features")):
        return SimilarityReward(path, device, scoring, batch_size)
    if name.endswith(GENERATIVE):
        return JudgeReward(path, device, scoring, batch_size, judge)
    raise UsageError(
        f"reward.model: {path} is a {name}, which gives no score. Use a sequence classifier with one label "
        "(…ForSequenceClassification), a pair of encoders (CLIPModel, SiglipModel) or a generative model that judges "
        "(…ForCausalLM, …ForConditionalGeneration); serve anything else yourself and set reward.source to remote."
    )
