"""What a weight sync sends to an engine in another process: names and shapes first, then tensors one at a time.

    policy ─► policy_weights: adapters folded in, heads left out ─► WeightStream ─► buckets of bytes ─► engine

Names are those of the checkpoint. An engine loads whole layers (vLLM keeps q, k, v as one matrix, and fills a layer
only when all of it has arrived), so tensors are sent in groups: all tensors of a group, or none.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from vlarl.errors import UsageError, VlarlError

HEADS = ("value_head.", "l1_head.")  # only the learner has them: engines neither estimate values nor regress actions
_PACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_PACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LANGUAGE_LINEAR = re.compile(rf"(language_model\..*)\.({'|'.join(_PACKED)})\.(weight|bias)")


@dataclass(frozen=True)
class WeightStream:
    """Weights by the checkpoint's names; every iteration makes the tensors again, one at a time."""

    shapes: Mapping[str, tuple[int, ...]]  # in the order of the iteration
    make: Callable[[str], torch.Tensor]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.make(name)) for name in self.shapes)

    def only(self, names: Collection[str]) -> WeightStream:
        """The part of the stream with these names."""
        return WeightStream({name: shape for name, shape in self.shapes.items() if name in names}, self.make)


def group_of(name: str) -> str:
    """The layer of the engine that a tensor belongs to: its module, with the parts of packed matrices together."""
    packed = _LANGUAGE_LINEAR.fullmatch(name)
    return f"{packed[1]}.{_PACKED[packed[2]]}" if packed else name.rpartition(".")[0]


def checkpoint_name(name: str) -> str | None:
    """A policy's parameter by the checkpoint's name; None for what engines don't have."""
    return None if name.startswith(HEADS) else name.removeprefix("model.")


def policy_weights(policy: nn.Module) -> WeightStream:
    """All weights of a policy that an engine has, with adapters folded in; the policy itself is not changed.

    Shards (FSDP's DTensors) are gathered one tensor at a time, so every rank has to iterate.
    """
    sources = dict(_sources(policy))
    return WeightStream(
        {name: tuple(tensor.shape) for name, (tensor, _) in sources.items()},
        lambda name: _materialize(*sources[name]),
    )


def trained_names(policy: nn.Module) -> set[str]:
    """Names of the weights that training changes, and of those that have to be sent with them."""
    changed = {
        group_of(name) for name, (tensor, layer) in _sources(policy) if layer is not None or tensor.requires_grad
    }
    return {name for name, _ in _sources(policy) if group_of(name) in changed}


class ChangedWeights:
    """Tracks what an engine has: everything is sent once, afterwards only what training changes."""

    def __init__(self, policy: nn.Module, *, engine_has_base: bool) -> None:
        """`engine_has_base`: the engine was started from the same weights that are frozen here."""
        self.policy = policy
        self._complete = engine_has_base

    def next(self) -> WeightStream:
        """What the next sync has to send."""
        everything = policy_weights(self.policy)
        return everything.only(trained_names(self.policy)) if self._complete else everything

    def sent(self) -> None:
        """The engine has loaded it."""
        self._complete = True

    def forget(self) -> None:
        """The engine was replaced, or refused: the next sync sends everything."""
        self._complete = False


def buckets(weights: WeightStream, bucket_bytes: int, dtype: torch.dtype | None = None) -> Iterator[bytes]:
    """The stream as safetensors of at most `bucket_bytes` each (a larger tensor gets one of its own).

    While the caller has a bucket, no other copy of its tensors is kept here.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes = {bucket_bytes}: give a positive number of bytes, such as {256 << 20}.")
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in weights:
        host = _on_host(tensor, dtype)
        if bucket and filled + host.nbytes > bucket_bytes:
            yield _packed(bucket)
            filled = 0
        bucket[name] = host
        filled += host.nbytes
    if bucket:
        yield _packed(bucket)


def _packed(bucket: dict[str, torch.Tensor]) -> bytes:
    """The tensors as safetensors; takes them out of the bucket. The library's own writer holds all bytes twice."""
    header: dict[str, Any] = {}
    contents: list[Any] = []
    end = 0
    for name in sorted(bucket, key=lambda name: -bucket[name].itemsize):  # so that every element is aligned
        tensor = bucket[name]
        span = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        contents.append(tensor.reshape(-1).view(torch.uint8).numpy())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    bucket.clear()
    return b"".join([len(text).to_bytes(8, "little"), text, *contents])


def bucket_names(payload: bytes) -> set[str]:
    """Names of the weights in a bucket."""
    return set(json.loads(bytes(payload[8 : 8 + int.from_bytes(payload[:8], "little")])))


def unpacked(payload: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, as read-only views of its bytes."""
    begin = 8 + int.from_bytes(payload[:8], "little")
    tensors: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for name, entry in json.loads(bytes(payload[8:begin])).items():
            dtype, shape, (first, last) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            count = (last - first) // dtype.itemsize
            view = torch.frombuffer(payload, dtype=dtype, count=count, offset=begin + first)
            tensors[name] = view.reshape(shape)
    return tensors


def bucket_message(payload: bytes, checksum: bool) -> dict[str, Any]:
    """A bucket as the message that engines load."""
    return {"payload": payload, "checksum": zlib.crc32(payload) if checksum else None}


def check_shapes(
    sent: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]], *, whole: bool = False
) -> None:
    """Refuse tensors that the engine doesn't have, whose shape differs, or that come without the rest of their group;
    `whole`: refuse unless all of the engine's tensors are sent."""
    groups: dict[str, list[str]] = {}
    for name in known:
        groups.setdefault(group_of(name), []).append(name)
    touched = dict.fromkeys(groups) if whole else dict.fromkeys(group_of(name) for name in sent)
    problems = [
        *(f"{name} is not a weight of the engine's model" for name in sent if name not in known),
        *(
            f"{name} has shape {sent[name]}, the engine's {known[name]}"
            for name in sent
            if name in known and tuple(sent[name]) != tuple(known[name])
        ),
        *(
            f"{name} is missing, and its layer can only be loaded as a whole"
            for group in touched
            for name in groups.get(group, ())
            if name not in sent
        ),
    ]
    if problems:
        raise UsageError(
            f"the weight sync is refused and nothing was changed: {_first(problems)}. Engine and learner must be of "
            "the same checkpoint."
        )


def check_complete(awaited: Collection[str], version: int) -> None:
    """Refuse to finish a sync in which announced weights are missing."""
    if awaited:
        raise VlarlError(
            f"version {version} is incomplete: {len(awaited)} weights have not arrived, such as {min(awaited)}. Send "
            "them, or abandon the sync (abandon_sync) and start another."
        )


def _first(problems: Sequence[str], count: int = 5) -> str:
    more = f", and {len(problems) - count} more" if len(problems) > count else ""
    return "; ".join(problems[:count]) + more


def _sources(policy: nn.Module) -> Iterator[tuple[str, tuple[torch.Tensor, nn.Module | None]]]:
    """Each weight of the base model by its name, with the adapter that changes it."""
    modules = dict(policy.named_modules())
    for full, parameter in policy.named_parameters():
        if ".lora_" in full:
            continue
        path = full.replace(".base_layer.", ".")
        name = checkpoint_name(path)
        if name is not None:
            adapted = path.endswith(".weight") and full != path
            yield name, (parameter, modules[path.removesuffix(".weight")] if adapted else None)


@torch.no_grad()
def _materialize(tensor: torch.Tensor, layer: nn.Module | None) -> torch.Tensor:
    """The whole tensor, with the adapter added in float32."""
    whole = _gathered(tensor.detach())
    if layer is None:
        return whole
    if whole.dtype in (torch.int8, torch.uint8):
        raise UsageError(
            "policy.quantize: a quantised base can't be sent to a vLLM engine; leave it out, or use the torch engine "
            "(vllm.num_engines 0)."
        )
    adapter: Any = layer
    (active,) = adapter.active_adapters
    into, out = (_gathered(cast(nn.Linear, part[active]).weight.detach()) for part in (adapter.lora_A, adapter.lora_B))
    delta = (out.float() @ into.float()).mul_(adapter.scaling[active])
    return delta.add_(whole.float()).to(whole.dtype)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A shard's whole tensor, by a collective of all ranks."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else cast(torch.Tensor, full())


def _on_host(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kept).contiguous()
