"""Small RLDS datasets of any schema, written with the package's own encoders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vlarl.data.rlds.features import Field, features_json
from vlarl.data.rlds.tf_example import Feature, encode_example
from vlarl.data.rlds.tfrecord import write_record
from vlarl.images.jpeg import encode_jpeg

Values = np.ndarray | Sequence[bytes]
Episode = Mapping[str, Values]  # by names relative to the steps


def frames(length: int, grey: int, height: int = 8, width: int = 8) -> list[bytes]:
    """JPEG frames of one grey level, which decode to it exactly."""
    return [encode_jpeg(np.full((height, width, 3), grey + step, np.uint8)) for step in range(length)]


def field_of(values: Values) -> Field:
    """What features.json says of the values of all steps."""
    if isinstance(values, np.ndarray):
        return Field("tensor", str(values.dtype), values.shape[1:])
    if values[0].startswith(b"\xff\xd8"):
        from io import BytesIO

        with Image.open(BytesIO(values[0])) as image:
            return Field("image", "uint8", (image.height, image.width, 3))
    return Field("text")


def feature_of(values: Values) -> Feature:
    if not isinstance(values, np.ndarray):
        return values
    return values.astype(np.float32 if np.issubdtype(values.dtype, np.floating) else np.int64).ravel()


def write_dataset(
    root: Path, name: str, episodes: Sequence[Episode], splits: Mapping[str, Sequence[Episode]] | None = None
) -> Path:
    """Write a dataset; its folder is returned. `splits` are further ones besides train."""
    folder = root / name / "1.0.0"
    folder.mkdir(parents=True)
    described = []
    for split, of_split in {"train": episodes, **(splits or {})}.items():
        with (folder / f"{name}-{split}.tfrecord-00000-of-00001").open("wb") as file:
            for episode in of_split:
                steps = {f"steps/{key}": feature_of(values) for key, values in episode.items()}
                write_record(file, encode_example(steps))
        described.append({"name": split, "shardLengths": [str(len(of_split))]})
    fields = {f"steps/{key}": field_of(values) for key, values in episodes[0].items()}
    (folder / "features.json").write_text(json.dumps(features_json(fields)))
    (folder / "dataset_info.json").write_text(json.dumps({"name": name, "splits": described}))
    return folder
