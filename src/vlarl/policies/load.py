"""Load a policy from a checkpoint: a path, a run, a built-in name or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError

from vlarl.config.describe import options
from vlarl.config.problems import ConfigError, Problem, shown
from vlarl.config.run_checkpoints import locate_checkpoint
from vlarl.config.schema import Config, ModelConfig, PolicyConfig
from vlarl.config.training_data import TrainingData
from vlarl.devices import usable_device
from vlarl.errors import UsageError
from vlarl.policies.fresh import FRESH, fresh_checkpoint
from vlarl.policies.locate import BUILTIN, checkpoint_folder
from vlarl.policies.openvla.checkpoint import read_policy
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.policy import OpenVLAPolicy

__all__ = ["BUILTIN", "DTYPES", "checkpoint_folder", "load_configured", "load_policy"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
) -> OpenVLAPolicy:
    """Load a checkpoint or adapter folder, a run, a built-in or fresh model, or a hub id; None: the checkpoint's value.

    A run's name or folder means its `checkpoints/final`, or its newest checkpoint if there is no final.

    `base` is the base model of an adapter, if it is not the one that the adapter names. The other options are those of
    the section `policy` in docs/configuration.md.

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
    try:
        policy = read_policy(
            path,
            decoder=None if decoder == "auto" else decoder,
            chunk_length=chunk_length,
            num_images=num_images,
            use_proprio=use_proprio,
            images=ImagePipeline(jpeg=resize == "lanczos3", resize=resize, center_crop=center_crop),
            dtype=DTYPES[dtype],
            device=device,
            heads_device=heads_device,
            l1_head=actions != "tokens",
            quantize=quantize,
            attention=attention,
            base=base,
        )
    except (OSError, ValueError, StrictDataclassError) as error:  # the last one: sizes that transformers refuses
        reason = " ".join(str(error).split())
        raise UsageError(f"the policy {path} can't be loaded: {reason}") from error
    policy.acts_by_regression = actions == "l1"
    if is_fresh:
        policy.training_data = TrainingData()
    if torch.device(device).type == "meta":
        return policy.eval()
    broken = [name for name, weight in policy.named_parameters() if not weight.isfinite().all()]
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
) -> OpenVLAPolicy:
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
    )


def load_acting_policy(config: Config, checkpoint: Path | None, device: torch.device) -> OpenVLAPolicy:
    """The configured policy, for acting; on the device `meta` it has no weights and only processes observations."""
    settings = config.policy
    path = checkpoint or settings.path
    policy = load_configured(settings, path, device, settings.decoder, settings.actions)
    policy.use_statistics(settings.unnorm_key, config.env.suite)
    return policy
