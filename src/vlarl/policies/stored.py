"""What a checkpoint folder holds, from its small files and the headers of the large ones."""

from __future__ import annotations

import math
from pathlib import Path

from vlarl.policies import adapters
from vlarl.policies.checkpoint_json import read_json, whole
from vlarl.policies.family import AdapterFacts, StoredWeights
from vlarl.policies.weight_files import read_shapes, stored_dtype, weight_files


def adapter_facts(folder: Path) -> AdapterFacts | None:
    """The adapter in a folder; None if there is none."""
    if not adapters.is_adapter(folder):
        return None
    content = read_json(folder / adapters.CONFIG_NAME)
    if content.get("peft_type") != "LORA":
        raise ValueError(f"{folder} holds an adapter of type {content.get('peft_type')}: only LORA is supported")
    rank, alpha = (whole(content.get(name, 8), f"{name} of {adapters.CONFIG_NAME}", 1) for name in ("r", "lora_alpha"))
    return AdapterFacts(rank, alpha, adapters.base_of(folder))


def stored_weights(folder: Path) -> StoredWeights:
    """Number, type and size of the weights of a folder."""
    files = weight_files(folder)
    return StoredWeights(
        num_parameters=sum(math.prod(shape) for shape in read_shapes(folder).values()),
        dtype=str(stored_dtype(folder)).removeprefix("torch."),
        num_bytes=sum(file.stat().st_size for file in files),
        num_files=len(files),
    )
