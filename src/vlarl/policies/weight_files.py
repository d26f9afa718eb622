"""The weights of a checkpoint folder as transformers lays them out: safetensors, whole or in shards with an index.

Tensors are read and written one by one, so that there is never a second copy of a model in memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vlarl.policies.checkpoint_json import read_json, write_json
from vlarl.policies.deferred import StoredWeight, placeholder, stored_weight
from vlarl.policies.quantize import quantized, refuse_quantized, waits_for_quantization
from vlarl.policies.tensor_file import write_tensors

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000  # the shard size of the original checkpoints

# Buffers that old versions of transformers stored and that the model computes itself.
IGNORED = re.compile(r"rotary_emb\.inv_freq$")

_FILE_NAME = re.compile(r"[\w.-]{1,200}\.safetensors")
_WRITTEN = re.compile(r"model(-\d{5}(-of-\d{5})?)?\.safetensors(\.part|\.index\.json)?")


def weight_files(folder: Path) -> list[Path]:
    """The weight files, from the index if there is one."""
    if not (folder / INDEX_NAME).is_file():
        if not (folder / WEIGHTS_NAME).is_file():
            raise FileNotFoundError(
                f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}: it holds no weights to load{_pickled(folder)}"
            )
        return [folder / WEIGHTS_NAME]
    files = [folder / name for name in sorted(set(_weight_map(folder).values()))]
    if not files:
        raise ValueError(f"{folder / INDEX_NAME} names no files, so there are no weights: copy the folder again")
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        raise FileNotFoundError(f"{folder}: the index names {', '.join(absent)}, which are not there: copy them")
    return files


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all stored weights, from the files' headers alone; index and files must agree."""
    shapes: dict[str, tuple[int, ...]] = {}
    holds: dict[str, set[str]] = {}
    for path in weight_files(folder):
        with opened(path) as file:
            names = [name for name in file.keys() if not IGNORED.search(name)]  # noqa: SIM118 - not a dict
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        holds[path.name] = set(names)
    if (folder / INDEX_NAME).is_file():
        lost = [f"{n} in {f}" for n, f in _weight_map(folder).items() if n not in holds[f] and not IGNORED.search(n)]
        if lost:
            raise ValueError(
                f"{folder}: {INDEX_NAME} names tensors that the files don't hold ({len(lost)}): {', '.join(lost)}. "
                "Index and files are of different checkpoints: copy or download the folder again"
            )
    return shapes


def stored_dtype(folder: Path) -> torch.dtype:
    """The type that most of a folder's weights are stored in, float32 or bfloat16."""
    counts: Counter[str] = Counter()
    for path in weight_files(folder):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                counts[part.get_dtype()] += math.prod(part.get_shape())
    usual = max(counts, key=counts.__getitem__, default="F32")
    return torch.bfloat16 if usual == "BF16" else torch.float32  # float32 for any other type


def load_model(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    instead: Mapping[str, torch.Tensor] | None = None,
    deferred: bool = False,
) -> None:
    """Fill a model, which may be on the meta device, with a folder's weights in the given type.

    Names and shapes are checked before any tensor is read. Then each tensor is moved to the device by itself, so that
    the host holds no more than the pages of one file beside the model. Tensors given as `instead` replace those of the
    same names, or are added. `deferred` weights are placeholders on the host, which each rank replaces by its part.
    """
    own = dict(instead or {})
    shapes = read_shapes(folder) | {name: tuple(tensor.shape) for name, tensor in own.items()}
    fills = _match(model, shapes, str(folder))
    for name, tensor in own.items():
        _put(model, fills[name], _loaded(_get(model, fills[name][0]), tensor, dtype, device))
    for path in weight_files(folder):
        for name, tensor in read_tensors(path):  # views: only what is copied is read
            if name in fills and name not in own:
                old = _get(model, fills[name][0])
                is_weight = isinstance(old, nn.Parameter)
                if is_weight and not tensor.is_floating_point():
                    raise not_floats(path, name, tensor.dtype)
                if is_weight and deferred:
                    stored = StoredWeight(path, name, dtype)
                    _put(model, fills[name], placeholder(stored, tuple(tensor.shape), old.requires_grad))
                else:
                    _put(model, fills[name], _loaded(old, tensor, dtype, device))


def load_state(module: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Load a whole state into a module; one error lists all names and shapes that don't fit."""
    for name, filled in _match(module, {n: tuple(t.shape) for n, t in state.items()}, source).items():
        old = _get(module, filled[0])
        tensor = state[name]
        if isinstance(old, nn.Parameter) and stored_weight(tensor) is None:
            tensor = nn.Parameter(tensor, old.requires_grad)
        _put(module, filled, tensor)


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one safetensors file, one at a time; they are views of the mapped file, not copies."""
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - not a dict: it has no other iterator
            yield name, file.get_tensor(name)


def not_floats(path: Path, name: str, dtype: torch.dtype) -> ValueError:
    """The error for a weight that is not stored as floats."""
    kind = str(dtype).removeprefix("torch.")
    return ValueError(
        f"{path}: {name} is stored as {kind}, and weights must be floats (float32, bfloat16, float16 or float64): take "
        "the checkpoint as it was trained, not a quantised or damaged copy"
    )


def save_weights(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights as transformers does: model.safetensors, or shards of at most `max_shard_bytes` and their index.

    Tensors may be on any device; one shard at a time is on the host. Of tied tensors in a mapping only the first is
    written; an iterable, which may compute its tensors lazily, must yield each only once. `dtype` None keeps the types.
    """
    tensors = _without_ties(named_tensors).items() if isinstance(named_tensors, Mapping) else named_tensors
    parts: list[list[str]] = []  # names in each file
    sizes: dict[str, int] = {"total_parameters": 0, "total_size": 0}
    shard: dict[str, torch.Tensor] = {}
    free_bytes = max_shard_bytes

    def write(content: dict[str, torch.Tensor]) -> None:
        parts.append(list(content))
        write_tensors(content, folder / f"model-{len(parts):05d}.safetensors.part")

    for name, tensor in tensors:
        refuse_quantized(name, tensor)
        size = tensor.numel() * _stored_type(tensor, dtype).itemsize
        sizes["total_parameters"] += tensor.numel()
        sizes["total_size"] += size
        if size > max_shard_bytes:
            write({name: _on_host(tensor, dtype)})
            continue
        if size > free_bytes:
            write(shard)
            shard, free_bytes = {}, max_shard_bytes
        shard[name] = _on_host(tensor, dtype)
        free_bytes -= size
    if shard:
        write(shard)
    _name_parts(folder, parts, sizes)


def save_module(module: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write a module's state as one safetensors file, in its own precision or another."""
    state = _without_ties(module.state_dict())
    for name, tensor in state.items():
        refuse_quantized(name, tensor)
    write_tensors({name: _on_host(tensor, dtype) for name, tensor in state.items()}, path)


def _pickled(folder: Path) -> str:
    """The part of a message that says what to do about pickled weights; empty if there are none."""
    names = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if not names:
        return ""
    return (
        f". There is {names[0]}, but a pickle could run code and is never read: convert it to {WEIGHTS_NAME} "
        "(transformers' save_pretrained writes that), on a machine where you trust the file"
    )


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / INDEX_NAME} has no weight_map of file names: copy the file again")
    odd = [name for name in weight_map.values() if not _FILE_NAME.fullmatch(name)]
    if odd:
        raise ValueError(
            f"{folder / INDEX_NAME} names {odd[0][:80]!r}, which is not the name of a safetensors file in the same "
            "folder: copy or download the folder again"
        )
    return weight_map


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A mapped safetensors file; the error for a broken one names it."""
    if path.exists() and not path.is_file():  # opening a pipe would block forever
        raise ValueError(f"{path} is not a file: copy or download it again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}): copy or download it again") from error


def _match(module: nn.Module, stored: Mapping[str, tuple[int, ...]], source: str) -> dict[str, list[str]]:
    """The module's names that each stored tensor fills: several if they are tied; one stored name is enough."""
    wanted = module.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        tied.setdefault(id(tensor), []).append(name)
    fills = {next((n for n in names if n in stored), names[0]): names for names in tied.values()}
    missing = [name for name in fills if name not in stored]
    unexpected = [name for name in stored if name not in wanted]
    shapes = [
        f"{name} {stored[name]} for {tuple(wanted[name].shape)}"
        for name in fills
        if name in stored and stored[name] != tuple(wanted[name].shape)
    ]
    problems = [
        f"{title} ({len(names)}): {', '.join(names)}"
        for title, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if problems:
        raise ValueError(f"the weights of {source} don't fit its config.json; {'; '.join(problems)}")
    return fills


def _get(module: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(path), attribute)
    return tensor


def _put(module: nn.Module, names: list[str], tensor: torch.Tensor) -> None:
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(path), attribute, tensor)


def _loaded(old: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The replacement of `old`: on the device, in the wanted type, in memory of its own."""
    kept = dtype if stored.is_floating_point() else stored.dtype
    if waits_for_quantization(old):
        return quantized(old, stored.to(kept), device)
    moved = stored.to(device)  # before converting the type, which then takes no host memory
    tensor = moved.to(kept, copy=moved is stored)
    return nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _without_ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under its first name; the same memory under another name is omitted."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        first.setdefault(memory, name)
    return {name: tensors[name] for name in first.values()}


def _stored_type(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _on_host(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    host = tensor.detach().to("cpu", _stored_type(tensor, dtype)).contiguous()
    whole = host.untyped_storage().nbytes() == host.nbytes
    return host if whole else host.clone()  # the library refuses views of one storage


def _name_parts(folder: Path, parts: list[list[str]], sizes: dict[str, int]) -> None:
    """Give the written files their final names, which contain how many there are, and write an index if several."""
    written = [folder / f"model-{index:05d}.safetensors.part" for index in range(1, len(parts) + 1)]
    for old in folder.iterdir():  # only now that the new ones are complete; a stale index would override a single file
        if _WRITTEN.fullmatch(old.name) and old not in written:
            old.unlink()
    if len(parts) == 1:
        written[0].rename(folder / WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for shard, (path, names) in enumerate(zip(written, parts, strict=True), start=1):
        final = f"model-{shard:05d}-of-{len(parts):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_NAME, index)
