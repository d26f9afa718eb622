"""features.json of TensorFlow Datasets: which fields a dataset has, of what type and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlarl.errors import UsageError

_MODULE = "tensorflow_datasets.core.features."
_DICT = f"{_MODULE}features_dict.FeaturesDict"


@dataclass(frozen=True)
class Field:
    """One field of an episode or of its steps."""

    kind: Literal["tensor", "image", "text"]
    dtype: str = "string"
    shape: tuple[int, ...] = ()  # of one step

    @property
    def is_float(self) -> bool:
        """Whether it is stored as floats; all other numbers and truth values are stored as integers."""
        return np.issubdtype(np.dtype(self.dtype), np.floating)

    def to_json(self) -> dict[str, Any]:
        """The field as features.json has it."""
        if self.kind == "text":
            return {"pythonClassName": f"{_MODULE}text_feature.Text", "text": {}}
        shape = {"dimensions": [str(size) for size in self.shape]} if self.shape else {}
        if self.kind == "image":
            picture = {"dtype": self.dtype, "encodingFormat": "jpeg", "shape": shape}
            return {"image": picture, "pythonClassName": f"{_MODULE}image_feature.Image"}
        name = "tensor_feature.Tensor" if self.shape else "scalar.Scalar"
        return {
            "pythonClassName": f"{_MODULE}{name}",
            "tensor": {"dtype": self.dtype, "encoding": "none", "shape": shape},
        }


def parse_features(content: Mapping[str, Any], path: Path) -> dict[str, Field]:
    """All fields by their names in the records, such as steps/observation/image, sorted."""
    try:
        return dict(sorted(_walk(content, "")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} has fields that can't be read ({reason}); RLDS datasets can.") from error


def _walk(node: Mapping[str, Any], name: str) -> list[tuple[str, Field]]:
    if "featuresDict" in node:
        children = node["featuresDict"]["features"]
        return [found for child, inner in children.items() for found in _walk(inner, f"{name}/{child}".lstrip("/"))]
    if "sequence" in node:
        return _walk(node["sequence"]["feature"], name)
    if "text" in node:
        return [(name, Field("text"))]
    if "image" in node:
        return [(name, Field("image", str(node["image"].get("dtype", "uint8")), _shape(node["image"])))]
    tensor = node["tensor"]
    if tensor.get("encoding", "none") != "none":
        raise ValueError(f"{name} is a tensor with encoding {tensor['encoding']}, which is not supported")
    dtype = str(tensor["dtype"])
    return [(name, Field("text") if dtype == "string" else Field("tensor", np.dtype(dtype).name, _shape(tensor)))]


def _shape(node: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in node.get("shape", {}).get("dimensions", ()))


def features_json(fields: Mapping[str, Field]) -> dict[str, Any]:
    """The content of features.json for fields by their names in the records."""
    tree: dict[str, Any] = {}
    for name, field in sorted(fields.items()):
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = field.to_json()
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
