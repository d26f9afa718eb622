"""features.json of TensorFlow Datasets: which fields a dataset has, of what type and shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlarl.errors import UsageError

DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
UNKNOWN = -1  # a size of a shape that differs from step to step
OTHER_CONTENT = ("jsonFeature", "video", "audio", "boundingBox", "translation", "labeledImage", "optional")
MAX_VALUES = 1 << 26  # of one field at one step: an image of 4096 x 4096 and 4 channels

_MODULE = "tensorflow_datasets.core.features."
_DICT = f"{_MODULE}features_dict.FeaturesDict"


@dataclass(frozen=True)
class Field:
    """One field of an episode or of its steps."""

    kind: Literal["tensor", "image", "text", "other"]  # other: a field that is listed but can't be read
    dtype: str = "string"
    shape: tuple[int, ...] = ()  # of one step
    encoding: str = field(default="jpeg", compare=False)  # of images that are written; a reader looks at each image

    @property
    def num_values(self) -> int | None:
        """Values of one step; None where that differs."""
        return None if UNKNOWN in self.shape else math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it is stored as floats; integers and booleans are stored as integers."""
        return np.issubdtype(np.dtype(self.dtype), np.floating)

    def to_json(self) -> dict[str, Any]:
        """The field as features.json has it."""
        if self.kind == "text":
            return {"pythonClassName": f"{_MODULE}text_feature.Text", "text": {}}
        shape = {"dimensions": [str(size) for size in self.shape]} if self.shape else {}
        if self.kind == "image":
            image = {"dtype": self.dtype, "encodingFormat": self.encoding, "shape": shape}
            return {"image": image, "pythonClassName": f"{_MODULE}image_feature.Image"}
        name = "tensor_feature.Tensor" if self.shape else "scalar.Scalar"
        return {
            "pythonClassName": f"{_MODULE}{name}",
            "tensor": {"dtype": self.dtype, "encoding": "none", "shape": shape},
        }


def parse_features(content: Mapping[str, Any], path: Path) -> dict[str, Field]:
    """All fields by their names in the records, such as steps/observation/image, sorted."""
    try:
        return dict(sorted(_walk(content, "")))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{path} describes fields that can't be read ({reason}): copy or download the dataset again."
        ) from error


def _walk(node: Mapping[str, Any], name: str) -> list[tuple[str, Field]]:
    if "featuresDict" in node:
        children = node["featuresDict"]["features"]
        return [found for child, inner in children.items() for found in _walk(inner, f"{name}/{child}".lstrip("/"))]
    if "sequence" in node:
        inner = _walk(node["sequence"]["feature"], name)
        if name == "steps":
            return inner
        length = int(node["sequence"].get("length", UNKNOWN))  # a list within a step, or of the episode
        return [(child, replace(field, shape=(length, *field.shape))) for child, field in inner]
    if "text" in node:
        return [(name, Field("text"))]
    if "image" in node:
        return [(name, Field("image", str(node["image"].get("dtype", "uint8")), _shape(node["image"])))]
    if "classLabel" in node:
        return [(name, Field("tensor", "int64"))]
    is_other = any(content in node for content in OTHER_CONTENT)
    tensor = {} if is_other else node["tensor"]
    if is_other or tensor.get("encoding", "none") != "none":
        return [(name, Field("other"))]
    dtype = str(tensor["dtype"])
    if dtype == "string":
        return [(name, Field("text"))]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}; known are {', '.join(DTYPES)}")
    return [(name, Field("tensor", dtype, _shape(tensor)))]


def _shape(node: Mapping[str, Any]) -> tuple[int, ...]:
    shape = tuple(int(size) for size in node.get("shape", {}).get("dimensions", ()))
    if any(size < UNKNOWN or size == 0 for size in shape):
        raise ValueError(f"the shape {list(shape)} has a size below 1")
    if math.prod(max(size, 1) for size in shape) > MAX_VALUES:
        raise ValueError(f"the shape {list(shape)} has more than {MAX_VALUES:,} values")
    return shape


def features_json(fields: Mapping[str, Field]) -> dict[str, Any]:
    """The content of features.json for fields by their names in the records."""
    tree: dict[str, Any] = {}
    for name, one in sorted(fields.items()):
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = one.to_json()
    return _dict_json(tree, "")


def _dict_json(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    if "pythonClassName" in tree:
        return dict(tree)
    inner = {
        "featuresDict": {"features": {child: _dict_json(node, child) for child, node in tree.items()}},
        "pythonClassName": _DICT,
    }
    if name != "steps":
        return inner
    return {
        "pythonClassName": f"{_MODULE}dataset_feature.Dataset",
        "sequence": {"feature": inner, "length": "-1"},
    }
