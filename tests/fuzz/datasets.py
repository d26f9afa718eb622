"""RLDS datasets with something wrong in one of their files.

Reading all episodes must end in an error of one line, or give what the undamaged dataset gives. Damage that comes with a
right checksum, as another writer's mistake would, must be refused where it can be noticed: lengths, finiteness, images.
"""

import io
import json
import os
import random
import shutil
import struct
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fuzz.answers import ask, judged, litter
from fuzz.harness import Case, Defect, Row
from fuzz.json_mutations import DAMAGED_JSON, replace_leaf
from PIL import Image

from vlarl.data.rlds.reader import FEATURES, INFO, RldsDataset
from vlarl.data.rlds.tf_example import Feature, encode_example
from vlarl.data.rlds.tfrecord import write_record
from vlarl.data.rlds.writer import OBSERVATION, RldsWriter, episode_features
from vlarl.envs.base import Demonstration
from vlarl.errors import VlarlError
from vlarl.types import Task

NAME, SIZE, STEPS = "tabletop_spatial", 16, 5
ACTION, STATE, CAMERA = "steps/action", f"{OBSERVATION}state", f"{OBSERVATION}image"
INSTRUCTION = "steps/language_instruction"
Expected = Literal["same", "refuse", "any"]  # same: refused, or read as the original is
Mutation = Callable[[random.Random, Path], Expected]
Content = list[dict[str, Any]]


def _episodes() -> list[Demonstration]:
    rng = np.random.default_rng(0)
    return [
        Demonstration(
            task=Task(NAME, number, 0, number, number),
            instruction=f"put bowl {number} on the plate",
            images=rng.integers(0, 256, (STEPS + number, 1, SIZE, SIZE, 3), dtype=np.uint8),
            proprio=rng.uniform(-1, 1, (STEPS + number, 8)).astype(np.float32),
            actions=rng.uniform(-1, 1, (STEPS + number, 7)).astype(np.float32),
            rewards=np.zeros(STEPS + number, np.float32),
            success=True,
        )
        for number in range(4)
    ]


def prepare(shared: Path) -> None:
    """A dataset of four episodes in two shards."""
    with RldsWriter(shared, NAME, shard_bytes=24_000) as writer:
        for episode in _episodes():
            writer.add(episode)
    assert 1 < len(_shards(shared / NAME / "1.0.0")) < 4, "several shards, and several episodes in one"


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tfrecord-*"))


def read_all(folder: Path) -> Content:
    """Every field of every episode."""
    dataset = RldsDataset(folder)
    content: Content = []
    for episode in dataset:
        fields: dict[str, Any] = {"length": len(episode)}
        for name, field in dataset.fields.items():
            if field.kind == "image":
                fields[name] = episode.images(name)
            else:
                fields[name] = episode.texts(name) if field.kind == "text" else episode.values(name)
        content.append(fields)
    return content


def difference(one: Content, two: Content) -> str:
    """In what two contents differ, in the fields that both have; empty where they are the same."""
    if len(one) != len(two):
        return f"{len(one)} episodes in place of {len(two)}"
    for number, (ours, theirs) in enumerate(zip(one, two, strict=True)):
        for name in ours.keys() & theirs.keys():
            if not np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name])):
                return f"{name} of episode {number} is another one"
    return ""


# Files


def shard_flipped(rng: random.Random, folder: Path) -> Expected:
    path = rng.choice(_shards(folder))
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 16))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return "same"


def actions_flipped(rng: random.Random, folder: Path) -> Expected:
    """One bit of an action: nothing but the checksum can tell."""
    path = _shards(folder)[0]
    data = bytearray(path.read_bytes())
    actions = bytes(np.asarray(episode_features(NAME, _episodes()[0])[ACTION]).tobytes())
    place = data.index(actions) + 4 * rng.randrange(len(actions) // 4)
    data[place + rng.randrange(2)] ^= 1 << rng.randrange(8)  # of the mantissa: the value stays finite
    path.write_bytes(data)
    return "refuse"


def shard_truncated(rng: random.Random, folder: Path) -> Expected:
    path = rng.choice(_shards(folder))
    os.truncate(path, rng.randrange(path.stat().st_size))
    return "refuse"


def shard_with_more(rng: random.Random, folder: Path) -> Expected:
    path = rng.choice(_shards(folder))
    data = path.read_bytes()
    path.write_bytes(data + rng.choice((b"\x00", b"\x00" * 16, rng.randbytes(100), data)))
    return "refuse"


def record_lengths(rng: random.Random, folder: Path) -> Expected:
    path = rng.choice(_shards(folder))
    length = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)))
    path.write_bytes(length + path.read_bytes()[8:])
    return "refuse"


def file_replaced(rng: random.Random, folder: Path) -> Expected:
    path = rng.choice([*_shards(folder), folder / INFO, folder / FEATURES])
    path.unlink()
    kinds: tuple[Callable[[], object], ...] = (
        path.mkdir,
        path.touch,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(rng.randbytes(1000)),
        lambda: None,
    )
    rng.choice(kinds)()
    return "refuse"


def info_damaged(rng: random.Random, folder: Path) -> Expected:
    (folder / INFO).write_bytes(rng.choice(DAMAGED_JSON))
    return "refuse"


def info_value(rng: random.Random, folder: Path) -> Expected:
    return _json(rng, folder / INFO)


def info_templates(rng: random.Random, folder: Path) -> Expected:
    tree = json.loads((folder / INFO).read_text())
    templates = (
        "{",
        "{x}",
        "{DATASET.__class__}",
        "{DATASET:9999999999}",
        "{0}",
        "../{DATASET}",
        "/",
        "\x00",
        7,
        ["x"],
        {},
    )
    lengths = (["x"], [-1], ["1e3"], [10**30], [1.5], "22", {"a": 1}, [None], [[1]], [True], ["2", "2", "2"], [])
    split = tree["splits"][0]
    rng.choice(
        (
            lambda: split.update(filepathTemplate=rng.choice(templates)),
            lambda: split.update(shardLengths=rng.choice(lengths)),
            lambda: tree.update(splits=rng.choice(([], {}, [None], ["train"], 7, [{}], "train"))),
            lambda: tree.update(fileFormat=rng.choice(("riegeli", 7, None, {}))),
        )
    )()
    (folder / INFO).write_text(json.dumps(tree))
    return "same"


def features_damaged(rng: random.Random, folder: Path) -> Expected:
    (folder / FEATURES).write_bytes(rng.choice(DAMAGED_JSON))
    return "refuse"


def features_value(rng: random.Random, folder: Path) -> Expected:
    return _json(rng, folder / FEATURES)


def features_shapes(rng: random.Random, folder: Path) -> Expected:
    """Sizes that don't fit the records."""
    tree = json.loads((folder / FEATURES).read_text())
    steps = tree["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    which = rng.choice(("action", "state", "image"))
    field = steps["action"] if which == "action" else steps["observation"]["featuresDict"]["features"][which]
    sizes = {"action": ("1", "6", "14", "0", "-1", "x", "99999999999"), "state": ("4", "2", "16", "0", "-1")}
    shape = field["image" if which == "image" else "tensor"]["shape"]
    if which == "image":
        shape["dimensions"] = rng.choice((["17", "16", "3"], ["16", "16", "1"], ["100000", "100000", "3"], ["16"], []))
    else:
        shape["dimensions"] = [rng.choice(sizes[which])]
    (folder / FEATURES).write_text(json.dumps(tree))
    return "same"


def features_types(rng: random.Random, folder: Path) -> Expected:
    tree = json.loads((folder / FEATURES).read_text())
    steps = tree["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    field = rng.choice(("action", "reward", "is_first", "discount"))
    types = ("float64", "int8", "int64", "bool", "string", "complex64", "object", "bfloat16", "x", "", "V9")
    steps[field]["tensor"]["dtype"] = rng.choice(types)
    (folder / FEATURES).write_text(json.dumps(tree))
    return "same"


# Records with right checksums


def _record(rng: random.Random, folder: Path, change: Callable[[dict[str, Feature]], None]) -> None:
    """Write the first shard again with one changed episode."""
    shard = _shards(folder)[0]
    count = int(json.loads((folder / INFO).read_text())["splits"][0]["shardLengths"][0])
    chosen = rng.randrange(count)
    with shard.open("wb") as file:
        for number, episode in enumerate(_episodes()[:count]):
            features = dict(episode_features(NAME, episode))
            if number == chosen:
                change(features)
            write_record(file, encode_example(features))


def fields_of_unequal_length(rng: random.Random, folder: Path) -> Expected:
    name = rng.choice((ACTION, STATE, CAMERA, INSTRUCTION, "steps/reward", "steps/is_last", "steps/is_terminal"))
    cut = rng.choice((1, 2, -1))

    def change(features: dict[str, Feature]) -> None:
        values = features[name]
        longer = np.concatenate([values, values[-1:]]) if isinstance(values, np.ndarray) else [*values, values[-1]]
        features[name] = longer if cut < 0 else values[:-cut]

    _record(rng, folder, change)
    return "refuse"


def numbers_not_finite(rng: random.Random, folder: Path) -> Expected:
    name, value = rng.choice((ACTION, STATE)), rng.choice((float("nan"), float("inf"), float("-inf")))

    def change(features: dict[str, Feature]) -> None:
        values = np.array(features[name])
        values[rng.randrange(len(values)), 0] = value
        features[name] = values

    _record(rng, folder, change)
    return "refuse"


def image(kind: str, size: tuple[int, int], mode: str = "RGB") -> bytes:
    """An image of this format."""
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


def images_of_another_kind(rng: random.Random, folder: Path) -> Expected:
    """Other formats, sizes and modes; headers that promise gigapixels; half files."""
    small = image("JPEG", (SIZE, SIZE))
    png = image("PNG", (SIZE, SIZE))
    huge = bytearray(png)
    huge[16:24] = struct.pack(">II", 60_000, 60_000)
    size = rng.choice(((8, 8), (SIZE, 8), (17, 17), (1, 1), (300, 300)))
    kinds = ("GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA")
    contents = (
        *(image(kind, (SIZE, SIZE)) for kind in kinds),
        *(
            image("JPEG", size),
            image("PNG", size),
            bytes(huge),
            b"",
            b"\x00" * 100,
            b"\xff\xd8\xff",
            small[:20],
            png[:40],
        ),
        *(small[: len(small) // 2], rng.randbytes(500)),
    )

    def change(features: dict[str, Feature]) -> None:
        frames = list(features[CAMERA])
        frames[rng.randrange(len(frames))] = rng.choice(contents)
        features[CAMERA] = frames

    _record(rng, folder, change)
    return "refuse"


def fields_missing(rng: random.Random, folder: Path) -> Expected:
    name = rng.choice((ACTION, STATE, CAMERA, INSTRUCTION))

    def change(features: dict[str, Feature]) -> None:
        del features[name]

    _record(rng, folder, change)
    return "refuse"


def fields_of_another_kind(rng: random.Random, folder: Path) -> Expected:
    name = rng.choice((ACTION, STATE, CAMERA, INSTRUCTION, "steps/is_last"))

    def change(features: dict[str, Feature]) -> None:
        other = (np.zeros(5, np.int64), np.zeros(5, np.float32), [b"x"] * 5, [b"\xff\xfe"] * 5)
        kinds = [values for values in other if type(values) is not type(features[name])]
        features[name] = rng.choice(kinds)

    _record(rng, folder, change)
    return "refuse"


def empty_episodes(rng: random.Random, folder: Path) -> Expected:
    def change(features: dict[str, Feature]) -> None:
        for name, values in features.items():
            if name.startswith("steps/"):
                features[name] = values[:0]

    _record(rng, folder, change)
    return "refuse"


def records_that_are_no_examples(rng: random.Random, folder: Path) -> Expected:
    shard = _shards(folder)[0]
    count = int(json.loads((folder / INFO).read_text())["splits"][0]["shardLengths"][0])
    garbage = (
        b"",
        b"\xff" * 50,
        b"\x0a\xff\xff\xff\xff\x0f",
        rng.randbytes(200),
        b"\x08\x01",
        b"\x0a\x02\x08\x01",
        b"\x0b",
    )
    with shard.open("wb") as file:
        for _ in range(count):
            write_record(file, rng.choice(garbage))
    return "refuse"


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__.replace("_", " "): mutation
    for mutation in (
        *(shard_flipped, actions_flipped, shard_truncated, shard_with_more, record_lengths, file_replaced),
        *(info_damaged, info_value, info_templates),
        *(features_damaged, features_value, features_shapes, features_types),
        *(fields_of_unequal_length, numbers_not_finite, images_of_another_kind, fields_missing),
        *(fields_of_another_kind, empty_episodes, records_that_are_no_examples),
    )
}


def _json(rng: random.Random, path: Path) -> Expected:
    tree = json.loads(path.read_text())
    replace_leaf(rng, tree)
    path.write_text(json.dumps(tree))
    return "same"


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """Read a mutant, by Python and by `vlarl data inspect`."""
    folder = case.folder / "data"
    shutil.copytree(case.shared / NAME / "1.0.0", folder)
    expected = MUTATIONS[case.mutation](case.rng(), folder)
    answer, defects = _read(folder, case.shared / NAME / "1.0.0", expected)
    work = case.folder / "work"
    work.mkdir()
    defects += judged(ask(["data", "inspect", str(folder)], work), what="vlarl data inspect")
    defects += litter(work, ())
    return answer, defects


def _read(folder: Path, original: Path, expected: Expected) -> tuple[str, list[Defect]]:
    try:
        content = read_all(folder)
    except VlarlError:
        return "refused", []
    except Exception:  # noqa: BLE001 - whatever else is raised is a traceback to the user
        return "failed", [Defect("traceback", traceback.format_exc())]
    if expected == "refuse":
        return "worked", [Defect("wrong", "read without a word, though it can't be right")]
    change = difference(content, read_all(original))
    if change and expected == "same":
        return "worked", [Defect("wrong", f"read without a word, with another content: {change}")]
    return "worked", []


ROW = Row(
    name="datasets",
    about="RLDS folders with damaged shards, dataset_info.json and features.json, and with records whose checksum is "
    "right and whose content is not: lengths, NaN, image formats and sizes, missing fields",
    mutations=tuple(MUTATIONS),
    cases=320,
    deadline_s=20.0,
    run=run,
    prepare=prepare,
)
