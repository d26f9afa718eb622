"""Load a policy from a checkpoint: a path, a run, a built-in name or a hub id.

The checkpoint's own config.json says which family of policies reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError

from vlarl.config.describe import options
from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.known import is_prompts
from vlarl.config.problems import ConfigError, Problem, shown
from vlarl.config.run_checkpoints import locate_checkpoint
from vlarl.config.schema import Config, FlowConfig, ModelConfig, PolicyConfig
from vlarl.config.suites import suites_of
from vlarl.config.training_data import TrainingData
from vlarl.devices import usable_device
from vlarl.errors import UsageError
from vlarl.policies import adapters
from vlarl.policies.base import Policy
from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.deferred import stored_weight
from vlarl.policies.family import Description, Family, FlowOptions, LoadOptions
from vlarl.policies.fresh import FRESH, fresh_checkpoint
from vlarl.policies.locate import BUILTIN, checkpoint_folder
from vlarl.policies.openvla.family import OpenVLAFamily
from vlarl.policies.smolvla.family import SmolVLAFamily
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.policies.vlm.family import VlmFamily

__all__ = ["BUILTIN", "DTYPES", "checkpoint_folder", "load_configured", "load_policy"]

FAMILIES: dict[str, Family] = {"openvla": OpenVLAFamily(), "smolvla": SmolVLAFamily(), "vlm": VlmFamily()}
"""The families of policies, by the model type that config.json names; the last one recognises any of transformers'."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def family_of(folder: Path, base: str | None = None) -> Family:
    """The family of a checkpoint folder; an adapter folder without a config.json belongs to its base's."""
    path = folder / "config.json"
    if adapters.is_adapter(folder) and not path.is_file():
        path = adapters.find_base(folder, base)[1] / "config.json"
    config = read_json(path)
    kind = config.get("model_type") or config.get("type")  # transformers' name of it, lerobot's
    found = FAMILIES.get(str(kind)) or next((f for f in FAMILIES.values() if f.recognizes(config)), None)
    if found is None:
        supported = "; ".join(family.supported for family in FAMILIES.values())
        raise ValueError(f"model type {kind} is not supported; supported are {supported}")
    return found


def describe_checkpoint(
    path: str | Path,
    decoder: Literal["autoregressive", "parallel"] | None = None,
    num_images: int | None = None,
) -> Description:
    """Describe a checkpoint or adapter folder, a built-in model or a hub id, read as `load_policy` would read it."""
    name = locate_checkpoint(path).path
    folder = checkpoint_folder(name)
    return family_of(folder).describe(name, folder, decoder, num_images)


def training_warning(path: str, base: str | None = None) -> str | None:
    """What a user should know before RL starts from a checkpoint; None: nothing. A fresh model needs no warning."""
    if path in FRESH:
        return None
    folder = checkpoint_folder(path)
    return family_of(folder, base).training_warning(path, folder)


def load_policy(
    path: str | Path,
    *,
    decoder: Literal["auto", "autoregressive", "parallel"] | None = None,
    chunk_length: int | None = None,
    num_images: int | None = None,
    use_proprio: bool | None = None,
    actions: Literal["tokens", "hybrid", "l1"] = "tokens",
    resize: Literal["bicubic", "lanczos3"] = "bicubic",
    center_crop: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: torch.device | str = "cpu",
    heads_device: torch.device | str | None = None,
    quantize: Literal[4, 8] | None = None,
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa",
    base: str | None = None,
    deferred: bool = False,
    flow: FlowOptions = FlowOptions(),  # noqa: B008 - frozen
) -> Policy:
    """Load a checkpoint or adapter folder, a run, a built-in or fresh model, or a hub id; None: the checkpoint's value.

    A run's name or folder means its `checkpoints/final`, or its newest checkpoint if there is no final.

    `base` is the base model of an adapter, if it is not the one that the adapter names. `deferred` leaves weights on
    disk, for learners that are going to shard them: such a policy can't act. The other options are those of
    the section `policy` in docs/configuration.md; `flow` has those of flow policies.

    >>> import numpy as np, vlarl
    >>> policy = vlarl.load_policy("builtin:tiny-oft")
    >>> image, state = np.zeros((64, 64, 3), np.uint8), np.zeros(8, np.float32)
    >>> policy.predict_action(image, "open the drawer", state).shape  # four actions of seven dimensions
    (4, 7)
    """
    _check_values(
        decoder=decoder,
        chunk_length=chunk_length,
        num_images=num_images,
        use_proprio=use_proprio,
        actions=actions,
        resize=resize,
        center_crop=center_crop,
        dtype=dtype,
        quantize=quantize,
        attention=attention,
    )
    usable_device("device", str(device))
    is_fresh = str(path) in FRESH
    if is_fresh:
        path = fresh_checkpoint(str(path), chunk_length, num_images, use_proprio)
    path = locate_checkpoint(path).path
    base = None if base is None else locate_checkpoint(base).path
    wanted = LoadOptions(
        dtype=DTYPES[dtype],
        device=device,
        decoder=None if decoder == "auto" else decoder,
        chunk_length=chunk_length,
        num_images=num_images,
        use_proprio=use_proprio,
        actions=actions,
        resize=resize,
        center_crop=center_crop,
        heads_device=heads_device,
        quantize=quantize,
        attention=attention,
        base=base,
        deferred=deferred,
        flow=flow,
    )
    try:
        folder = checkpoint_folder(path)
        policy = family_of(folder, base).read(path, folder, wanted)
    except (OSError, ValueError, StrictDataclassError) as error:  # the last one: sizes that transformers refuses
        reason = " ".join(str(error).split())
        raise UsageError(f"the policy {path} can't be loaded: {reason}") from error
    if is_fresh:
        policy.training_data = TrainingData()
    if torch.device(device).type == "meta":
        return policy.eval()
    broken = [
        name
        for name, weight in policy.named_parameters()
        if stored_weight(weight) is None and not weight.isfinite().all()
    ]
    if broken:
        raise UsageError(
            f"the policy {path} can't be used: {len(broken)} of its weights hold NaN or infinity, the first is "
            f"{broken[0]}. Use an earlier checkpoint."
        )
    return policy.eval()


def _check_values(**given: object) -> None:
    """Refuse values that the options of the section `policy` don't allow; None means the checkpoint's value."""
    try:
        PolicyConfig.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        names = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
        allowed = options(Config)
        wrong = [
            Problem(f"{name} = {shown(given[name])}", f"must be {allowed[f'policy.{name}'].allowed}") for name in names
        ]
        raise ConfigError(wrong) from error


def load_configured(
    settings: ModelConfig,
    path: str | Path,
    device: torch.device | str,
    decoder: Literal["auto", "autoregressive", "parallel"] = "auto",
    actions: Literal["tokens", "hybrid", "l1"] = "tokens",
    deferred: bool = False,
) -> Policy:
    """Load a policy with the options of a configuration."""
    return load_policy(
        path,
        decoder=decoder,
        chunk_length=settings.chunk_length,
        num_images=settings.num_images,
        use_proprio=settings.use_proprio,
        actions=actions,
        resize=settings.resize,
        center_crop=settings.center_crop,
        dtype=settings.dtype,
        device=device,
        heads_device=settings.heads_device,
        quantize=settings.quantize,
        attention=settings.attention,
        base=settings.base,
        deferred=deferred,
        flow=_flow_options(settings),
    )


def _flow_options(settings: ModelConfig) -> FlowOptions:
    """Those of RL; supervised training has none."""
    if not isinstance(settings, FlowConfig):
        return FlowOptions()
    return FlowOptions(
        noise=settings.flow_noise,
        level=settings.flow_level,
        std=settings.flow_std,
        steps=settings.flow_steps,
        stochastic_step=settings.flow_stochastic_step,
        critic=settings.flow_critic,
        gripper=settings.gripper,
        state_dims=settings.state_dims,
    )


def load_supervised(settings: FinetunePolicyConfig, device: torch.device, deferred: bool = False) -> SupervisedPolicy:
    """The policy that supervised training starts from: with its regression head if that is trained and the checkpoint
    has one."""
    folder = checkpoint_folder(settings.path)
    try:
        has_head = settings.actions == "l1" and family_of(folder, settings.base).has_regression_head(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"the policy {settings.path} can't be loaded: {error}") from error
    policy = load_configured(settings, settings.path, device, actions="l1" if has_head else "tokens", deferred=deferred)
    if not isinstance(policy, SupervisedPolicy):
        raise UsageError(f"policy.path = {settings.path!r}: this kind of policy can't be trained on demonstrations.")
    return policy


def load_acting_policy(config: Config, checkpoint: Path | None, device: torch.device, deferred: bool = False) -> Policy:
    """The configured policy, for acting; on the device `meta` it has no weights and only processes observations."""
    return load_for_suites(config.policy, checkpoint or config.policy.path, device, suites_of(config.env), deferred)


def load_for_suites(
    settings: PolicyConfig, path: str | Path, device: torch.device, suites: Sequence[str], deferred: bool = False
) -> Policy:
    """Load a policy for acting in suites of one kind; another kind of policy is refused before its weights are read."""
    refuse_other_kind(str(path), settings.base, suites[0])
    policy = load_configured(settings, path, device, settings.decoder, settings.actions, deferred)
    policy.use_statistics(settings.unnorm_key, *suites)
    return policy


def refuse_other_kind(path: str, base: str | None, suite: str) -> None:
    """Refuse a policy of robots on prompts, and one that writes texts on a robot."""
    writes_texts = False
    if path not in FRESH:
        folder = checkpoint_folder(path)
        try:
            writes_texts = family_of(folder, base).writes_texts
        except (OSError, ValueError) as error:
            raise UsageError(f"the policy {path} can't be loaded: {' '.join(str(error).split())}") from error
    if is_prompts(suite) and not writes_texts:
        remedy = (
            f"name a language or vision-language model for {suite}, or a suite of a robot, such as tabletop_spatial"
        )
        raise UsageError(f"policy.path = {path!r}: this policy acts on a robot, and prompts need texts; {remedy}.")
    if writes_texts and not is_prompts(suite):
        remedy = "set env.suite to prompts (your data), prompts_arithmetic or prompts_shapes, or name a robot's policy"
        raise UsageError(
            f"policy.path = {path!r}: this model writes texts, and {suite} takes a robot's actions; {remedy}."
        )
