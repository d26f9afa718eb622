"""Weights as bytes: buckets of bounded size, each a complete safetensors file with an optional checksum."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from vlarl.errors import UsageError, VlarlError
from vlarl.weights.stream import WeightStream, is_adapter_weight

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedBucketError(VlarlError):
    """The bytes of a bucket are not those that were sent. Nothing of it was loaded: it can be sent again."""


def buckets(weights: WeightStream, bucket_bytes: int) -> Iterator[bytes]:
    """The stream as safetensors of at most `bucket_bytes` each; a larger tensor gets one of its own.

    A bucket holds adapters or weights of the model, never both: engines load them in different ways. While the caller
    has a bucket, no other copy of its tensors is kept here.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes = {bucket_bytes}: give a positive number of bytes, such as {256 << 20}.")
    bucket: dict[str, torch.Tensor] = {}
    filled, of_adapters = 0, False
    for name, tensor in weights:
        host = tensor.detach().cpu().contiguous()
        if bucket and (filled + host.nbytes > bucket_bytes or is_adapter_weight(name) != of_adapters):
            yield _packed(bucket)
            filled = 0
        bucket[name] = host
        filled += host.nbytes
        of_adapters = is_adapter_weight(name)
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


def content_bytes(payload: bytes) -> int:
    """Bytes of the tensors in a bucket, without their names and shapes."""
    return len(payload) - 8 - int.from_bytes(payload[:8], "little")


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
    """A bucket as the message that engines load, with the CRC-32 of its bytes if it is to be verified."""
    return {"payload": payload, "checksum": zlib.crc32(payload) if checksum else None}


def verified(message: dict[str, Any]) -> bytes:
    """The bucket of a message; DamagedBucketError if its bytes are not those that were sent."""
    payload: bytes = message["payload"]
    if message["checksum"] is not None and zlib.crc32(payload) != message["checksum"]:
        raise DamagedBucketError(
            f"a bucket of {len(payload)} bytes arrived damaged (CRC-32 is not {message['checksum']}): send it again"
        )
    return payload
