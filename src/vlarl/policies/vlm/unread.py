"""A transformers model whose weights stay on disk until it is sharded: of each a rank reads its own rows.

The library renames stored weights, and for some architectures joins several of them into one parameter (the experts of
a mixture). Where it only renames, a parameter is a placeholder for its stored weight (policies/deferred.py); a model
with joined weights is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights

from vlarl.policies.deferred import StoredWeight, placeholder
from vlarl.policies.weight_files import not_floats, opened, weight_files


def unread_model(empty: PreTrainedModel, folder: Path, auto: Any) -> PreTrainedModel | None:
    """The model of a folder with placeholders for weights; None where a stored weight is not a parameter by itself.

    `empty` is the same model on the device `meta`, whose names and shapes were compared with the folder's.
    """
    stored = _stored_weights(empty, folder)
    parameters, buffers = dict(empty.named_parameters()), dict(empty.named_buffers())
    if stored is None or not parameters.keys() <= stored.keys():
        return None
    attention = empty.config._attn_implementation
    with no_init_weights():  # memory that is never written to, and buffers with their values
        made: PreTrainedModel = auto.from_config(
            empty.config, dtype=empty.dtype, attn_implementation=attention, trust_remote_code=False
        )
    made.tie_weights()
    made.generation_config = empty.generation_config
    fills = _shared_names(made)
    for names in fills:
        known = next(name for name in names if name in parameters)
        weight = StoredWeight(*stored[known], parameters[known].dtype)
        _put(made, names, placeholder(weight, tuple(parameters[known].shape), True))
    for name in buffers.keys() & stored.keys():
        path, own = stored[name]
        with opened(path) as file:
            made.get_buffer(name).copy_(file.get_tensor(own))
    return made


def _stored_weights(empty: PreTrainedModel, folder: Path) -> dict[str, tuple[Path, str]] | None:
    """File and stored name of each tensor of the model; None where stored weights are joined."""
    transforms = get_model_conversion_mapping(empty)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    own: dict[str, Any] = empty.state_dict()
    prefix = empty.base_model_prefix
    found: dict[str, tuple[Path, str]] = {}
    for path in weight_files(folder):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                renamed, joined = rename_source_key(name, renamings, converters, prefix, own)
                if renamed not in own and name in own:
                    renamed, joined = rename_source_key(name, [], [], prefix, own)
                if joined is not None:
                    return None
                if not file.get_slice(name).get_dtype().startswith(("F", "BF")):
                    raise not_floats(path, name, file.get_tensor(name).dtype)
                found[renamed] = path, name
    return found


def _shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _put(model: nn.Module, names: list[str], parameter: nn.Parameter) -> None:
    for name in names:
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._parameters[attribute] = parameter


@contextmanager
def random_instead(model: nn.Module) -> Iterator[None]:
    """Inside the block weights are random, with the memory of a few values: for checks of what a model computes."""
    kept = dict(model.named_parameters())
    fills = [(names, kept[names[0]]) for names in _shared_names(model)]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    generator = torch.Generator().manual_seed(0)
    try:
        for names, weight in fills:
            shape = weight.shape[-1:] if id(weight) in embeddings else (weight.shape[0], *[1] * (weight.ndim - 1))
            values = torch.randn(shape, generator=generator).to(weight.dtype).expand(weight.shape)
            _put(model, names, nn.Parameter(values, requires_grad=False))
        yield
    finally:
        for names, weight in fills:
            _put(model, names, weight)
