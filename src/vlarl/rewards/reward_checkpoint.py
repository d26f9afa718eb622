"""What a reward model is made of: a checkpoint to begin from, or the folder of a trained one."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.run_checkpoints import locate_checkpoint
from vlarl.config.schema import LoraConfig
from vlarl.config.training_data import local_folder
from vlarl.errors import UsageError
from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.load import checkpoint_folder, family_of, load_configured, load_policy
from vlarl.rewards.conversation import ConversationReader
from vlarl.rewards.judge import stored_dtype
from vlarl.rewards.pretrained import load_part, load_whole
from vlarl.rewards.reward_model import (
    FILE_NAME,
    ClassifierRewardModel,
    Description,
    Labels,
    PolicyRewardModel,
    RewardModel,
    described,
)

GENERATIVE = ("ForCausalLM", "ForConditionalGeneration")  # endings of the names of models that write texts
BASES = (
    "a vision-language model such as builtin:tiny-qwen2.5-vl or Qwen/Qwen2.5-VL-3B-Instruct, a language model, or, for "
    "texts, an encoder or sequence classifier"
)


def begin_reward_model(
    settings: FinetunePolicyConfig, lora: LoraConfig, seed: int, labels: Labels, device: torch.device
) -> RewardModel:
    """The reward model to train: the checkpoint of policy.path, frozen and adapted as configured, with a fresh head.

    Training continues with the head of a checkpoint that is a reward model itself.
    """
    folder = checkpoint_folder(settings.path)
    try:
        architecture = (read_json(folder / "config.json").get("architectures") or ["?"])[0]
        is_of_robots = _is_of_robots(folder)
    except ValueError as error:
        raise UsageError(f"policy.path = {settings.path!r} can't be loaded: {error}") from error
    if is_of_robots:
        raise UsageError(f"policy.path = {settings.path!r}: it gives actions, not scores; begin from {BASES}.")
    if not architecture.endswith(GENERATIVE):
        return _begin_classifier(folder, settings, lora, seed, labels).to(device)
    policy = load_configured(settings, settings.path, device)
    if not (folder / FILE_NAME).is_file():
        policy.detach_value_head()  # that of a critic, if there is one
    policy.prepare_training(settings, lora, seed)
    policy.attach_value_head((), seed)
    return PolicyRewardModel(policy, Description(labels, "policy")).to(device)


def _is_of_robots(folder: Path) -> bool:
    """Whether a folder holds a policy without texts."""
    try:
        return not family_of(folder).writes_texts
    except ValueError:  # of no family: an encoder, for example
        return False


def _begin_classifier(
    folder: Path, settings: FinetunePolicyConfig, lora: LoraConfig, seed: int, labels: Labels
) -> ClassifierRewardModel:
    if lora.enabled or lora.adapter is not None or settings.freeze != "none":
        raise UsageError(
            f"policy.path = {settings.path!r}: a sequence classifier is trained as a whole; leave out lora and "
            "policy.freeze, or begin from a language model."
        )
    torch.manual_seed(seed)  # of a head that the checkpoint does not have
    auto = transformers.AutoModelForSequenceClassification
    try:
        model = load_part(auto, str(folder), num_labels=1, dtype=torch.float32, use_safetensors=True)
    except UsageError as error:
        reason = str(error).partition("can't be loaded: ")[2]
        raise UsageError(f"policy.path = {settings.path!r} is not a base of a reward model: {reason}") from error
    return ClassifierRewardModel(
        model, ConversationReader(str(folder), model.config), Description(labels, "classifier")
    )


def trained_folder(path: str) -> Path | None:
    """The folder of a reward model that `vlarl finetune` has written, or that of its run; None for any other model."""
    folder = local_folder(locate_checkpoint(path).path)
    return folder if folder is not None and (folder / FILE_NAME).is_file() else None


def load_trained(folder: Path, device: torch.device) -> RewardModel:
    """A reward model as it was saved; UsageError where it can't be used."""
    try:
        description = described(read_json(folder / FILE_NAME), str(folder / FILE_NAME))
    except ValueError as error:
        raise UsageError(f"reward.model: {error}") from error
    if description.scorer == "classifier":
        model = load_whole(transformers.AutoModelForSequenceClassification, str(folder))
        return ClassifierRewardModel(model, ConversationReader(str(folder), model.config), description).to(device)
    try:
        policy = load_policy(folder, dtype=stored_dtype(str(folder)), device=device)
    except UsageError as error:
        raise UsageError(f"reward.model: {str(error).removeprefix('the policy ')}") from error
    if getattr(policy, "value_head", None) is None:
        raise UsageError(f"reward.model: {folder} lacks the head that gives the score: restore value_head.safetensors.")
    return PolicyRewardModel(policy, description)
