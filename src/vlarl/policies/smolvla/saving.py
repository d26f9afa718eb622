"""A SmolVLA folder as lerobot writes it: config.json, weights, pipelines with their statistics, backbone files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vlarl.config.training_data import write_training_data
from vlarl.policies import adapters, checksums
from vlarl.policies.smolvla.conventions import FILE_NAME
from vlarl.policies.weight_files import save_module, save_weights

if TYPE_CHECKING:
    from vlarl.policies.smolvla.policy import SmolVLAPolicy

MODEL = "model."  # before the names of the weight file
BACKBONE = f"{MODEL}vlm_with_expert.vlm."
HEADS = ("value_head", "noise_head")  # files of our own beside the weights


def save(policy: SmolVLAPolicy, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Write the whole model, or the adapters if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / checksums.FILE_NAME).unlink(missing_ok=True)  # of other weights
    content = {
        **policy.config.raw,
        "n_action_steps": policy.conventions.num_steps,
        "num_steps": policy.denoising.num_steps,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=4), encoding="utf-8")
    write_training_data(folder, policy.training_data)
    (folder / FILE_NAME).write_text(policy.stored_conventions.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for name, data in policy.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    if policy.has_adapter and policy.base is not None:
        from vlarl.policies import lora

        lora.save(policy.model, folder, policy.base.path, policy.base.fingerprint)
    else:
        save_weights(stored_tensors(policy, dtype), folder, None, max_shard_bytes)
        adapters.remove(folder)
    for name in HEADS:
        (folder / f"{name}.safetensors").unlink(missing_ok=True)
        if (head := getattr(policy, name)) is not None:
            save_module(head, folder / f"{name}.safetensors")


def stored_tensors(policy: SmolVLAPolicy, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the weight file. Each has the type that it was read in, unless that would lose bits of it: frozen
    weights are written as they were read, and trained ones in float32."""
    for name, tensor in (*policy.model.state_dict().items(), *policy.unread.items()):
        name = name if name in policy.unread else f"{MODEL}{name}"
        if dtype is not None and name.startswith(BACKBONE) and tensor.is_floating_point():
            yield name, tensor.to(dtype)
            continue
        kind = policy.stored.get(name, tensor.dtype)
        rounded = tensor.to(kind)
        yield name, rounded if torch.equal(rounded.to(tensor.dtype), tensor) else tensor
