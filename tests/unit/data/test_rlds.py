"""RLDS data that TensorFlow Datasets wrote: found, described, and decoded only on request (arrays: tests/golden)."""

import json
import os
import shutil
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vlarl.data.rlds.reader as rlds
from vlarl.config.dataset_folder import find_dataset, find_recording
from vlarl.data.rlds.features import features_json, parse_features
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.tf_example import BYTES_LIST, FLOAT_LIST, INT64_LIST, Example, encode_example
from vlarl.data.rlds.tfrecord import TFRecordFile, write_record
from vlarl.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "golden" / "rlds"
FOLDER = GOLDEN / "libero_spatial_no_noops" / "1.0.0"
IMAGE = "steps/observation/image"


@pytest.fixture(scope="module")
def dataset() -> RldsDataset:
    return RldsDataset(FOLDER)


def test_episodes_are_found_in_any_order_and_are_consistent(dataset):
    assert len(dataset) == 8 and dataset.shard_lengths == [4, 4] and dataset.name == "libero_spatial_no_noops"
    episode = RldsDataset(FOLDER)[5]
    assert len(episode) == len(episode.steps) == 13
    np.testing.assert_array_equal(episode.values("steps/is_first"), [True] + [False] * 12)
    np.testing.assert_array_equal(episode.values("steps/reward"), [0.0] * 12 + [1.0])
    np.testing.assert_array_equal(episode.steps[3].values("action"), episode.values("steps/action")[3])
    assert episode.texts("steps/language_instruction") == ["open the middle drawer of the cabinet"] * 13
    with pytest.raises(IndexError, match="no episode 8"):
        dataset[8]


def test_only_the_requested_frames_are_decoded(monkeypatch):
    decoded: list[int] = []
    decode = rlds.decode_image
    monkeypatch.setattr(rlds, "decode_image", lambda data: decoded.append(len(data)) or decode(data))
    episode = RldsDataset(FOLDER)[0]
    assert len(episode.values("steps/action")) == 16 and decoded == []
    chunk = episode.images(IMAGE, [0, 8])
    assert len(decoded) == 2
    episode.steps[4].image("wrist_image")
    assert len(decoded) == 3
    np.testing.assert_array_equal(chunk, episode.images(IMAGE)[[0, 8]])
    assert len(decoded) == 19


def test_shards_are_opened_when_an_episode_of_theirs_is_read(tmp_path):
    copy = copied(tmp_path)
    last = copy / "libero_spatial_no_noops-train.tfrecord-00001-of-00002"
    last.write_bytes(b"broken" * 100)
    dataset = RldsDataset(copy)
    assert len(dataset[3]) == 22
    with pytest.raises(UsageError, match="00001-of-00002: record 0 at byte 0 is damaged"):
        dataset[4]


def copied(tmp_path: Path) -> Path:
    for file in FOLDER.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def test_fields_are_described_as_tensorflow_datasets_does(dataset):
    content = json.loads((FOLDER / "features.json").read_text())
    described = features_json(dataset.fields)
    steps = content["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    del steps["observation"]["featuresDict"]["features"]["image"]["description"]  # prose
    assert described == content
    assert parse_features(described, Path("x")) == dataset.fields


def test_a_wrong_field_lists_those_there_are(dataset):
    with pytest.raises(UsageError, match=r"no image field 'steps/observation/top'; there are .*wrist_image\."):
        dataset[0].images("steps/observation/top")
    with pytest.raises(UsageError, match="no tensor field 'steps/language_instruction'"):
        dataset[0].values("steps/language_instruction")


def rewritten(folder: Path, change) -> Path:
    """A copy of the dataset whose second episode's features are changed; all checksums are right."""
    path = copied(folder) / "libero_spatial_no_noops-train.tfrecord-00000-of-00002"
    file = TFRecordFile(path)
    records = [bytes(file.record(number)) for number in range(len(file))]
    example = Example(records[1])
    kinds = {BYTES_LIST: example.texts, FLOAT_LIST: example.floats, INT64_LIST: example.integers}
    features = {name: kinds[example.kind(name)](name) for name in example.names}
    change(features)
    records[1] = encode_example(features)
    with path.open("wb") as out:
        for record in records:
            write_record(out, record)
    return folder


def png(width: int, height: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def gif() -> bytes:
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "GIF")
    return file.getvalue()


ACTION, STATE, TEXT = "steps/action", "steps/observation/state", "steps/language_instruction"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda f: f.update({ACTION: f[ACTION][:-7]}), r"steps/action has \d+ steps, and the other fields have \d+"),
        (lambda f: f.update({ACTION: f[ACTION][:-1]}), r"steps/action has \d+ values, which is not a multiple of 7"),
        (lambda f: f[IMAGE].pop(), r"steps/observation/image has \d+ steps, and the other fields"),
        (lambda f: f[TEXT].append(b"again"), r"steps/language_instruction has \d+ steps, and the other"),
        (lambda f: f.update({"steps/is_last": f["steps/is_last"][1:]}), r"steps/is_last has \d+ steps, and the other"),
        (lambda f: f.pop(STATE), "it has no field 'steps/observation/state'; it has "),
        (lambda f: f.update({name: f[name][:0] for name in f if name.startswith("steps/")}), "it has no steps"),
        (
            lambda f: f[IMAGE].__setitem__(2, png(63, 64)),
            r"image of step 2 in steps/observation/image has 64 x 63 pixels",
        ),
        (
            lambda f: f[IMAGE].__setitem__(2, gif()),
            "image of step 2 in steps/observation/image is neither PNG nor JPEG",
        ),
        (
            lambda f: f[IMAGE].__setitem__(0, png(64, 64)[:20]),
            "image of step 0 in steps/observation/image is a damaged PNG",
        ),
        (
            lambda f: f[IMAGE].__setitem__(1, f[IMAGE][1][:9]),
            "image of step 1 in steps/observation/image is a damaged JPEG",
        ),
        (
            lambda f: f[IMAGE].__setitem__(0, png(64, 64).replace(struct.pack(">II", 64, 64), b"\0\1\0\0\0\1\0\0", 1)),
            "says that it has 65,536 x 65,536 pixels, and 16,777,216 are allowed",
        ),
    ],
)
def test_an_inconsistent_episode_is_refused_when_it_is_opened(tmp_path, change, complaint):
    dataset = RldsDataset(rewritten(tmp_path, change))
    assert len(dataset[0]) == 16, "the others can be read"
    with pytest.raises(
        UsageError, match=f"00000-of-00002, episode 1 at byte [0-9,]+ can't be read .*{complaint}.*copy or download"
    ):
        dataset[1]


def test_images_of_other_cameras_are_not_looked_at(tmp_path):
    folder = rewritten(tmp_path, lambda f: f[IMAGE].__setitem__(2, png(63, 64)))
    wrist = "steps/observation/wrist_image"
    assert len(RldsDataset(folder, cameras=[wrist])[1].images(wrist, [2])) == 1
    with pytest.raises(UsageError, match="image of step 2 in steps/observation/image"):
        RldsDataset(folder, cameras=[IMAGE])[1]


@pytest.mark.parametrize(("name", "value"), [(ACTION, np.nan), (STATE, np.inf)])
def test_values_that_are_not_finite_are_named_with_their_step(tmp_path, name, value):
    def spoil(features):
        per_step = len(features[name]) // len(features[TEXT])
        features[name] = features[name].copy()
        features[name][3 * per_step + 1] = value

    episode = RldsDataset(rewritten(tmp_path, spoil))[1]
    with pytest.raises(
        UsageError, match=rf"episode 1 at byte [0-9,]+ can't be read \({name} holds NaN or infinity in step 3\)"
    ):
        episode.values(name)


def test_a_frame_whose_header_is_right_and_whose_content_is_not_is_named(tmp_path):
    episode = RldsDataset(rewritten(tmp_path, lambda f: f[IMAGE].__setitem__(0, png(128, 128)[:60])))[1]
    with pytest.raises(
        UsageError, match=r"episode 1 at byte [0-9,]+ can't be read \(an image in steps/observation/image: "
    ):
        episode.images(IMAGE, [0])


def described(change) -> str:
    content = json.loads((FOLDER / "features.json").read_text())
    change(content["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"])
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda steps: steps["action"]["tensor"]["shape"].update(dimensions=["9" * 12]), "more than 67,108,864 values"),
        (
            lambda steps: steps["action"]["tensor"]["shape"].update(dimensions=["0"]),
            r"the shape \[0\] has a size below 1",
        ),
        (lambda steps: steps["action"]["tensor"].update(dtype="V99999999999"), "action has the dtype 'V99999999999'"),
        (lambda steps: steps["action"]["tensor"].update(dtype=["float32"]), "dtype"),
        (lambda steps: steps["action"].pop("tensor"), "KeyError: 'tensor'"),
        (lambda steps: steps.clear(), "no steps, so that"),
    ],
)
def test_fields_that_cannot_be_are_refused(tmp_path, change, complaint):
    folder = copied(tmp_path)
    (folder / "features.json").write_text(described(change))
    with pytest.raises(UsageError, match=rf"features.json describes .*{complaint}"):
        RldsDataset(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"filepathTemplate": "{DATASET:>99999999999}"}, "does not make a file name"),
        ({"filepathTemplate": "{DATASET.__class__}"}, "does not make a file name"),
        ({"filepathTemplate": "{NOTHING}"}, "does not make a file name"),
        ({"filepathTemplate": "../{DATASET}"}, "does not make a file name"),
        ({"filepathTemplate": "x" * 5000}, "does not make a file name"),
        ({"filepathTemplate": "{DATASET}.{SHARD_INDEX}"}, "libero_spatial_no_noops.00000 is missing"),
        ({"shardLengths": ["many"]}, "dataset_info.json is malformed .*many"),
        ({"shardLengths": 4}, "dataset_info.json is malformed"),
        ({"shardLengths": ["-4", "8"]}, "a shard has fewer than 0 episodes"),
        ({"shardLengths": ["4", "9" * 15]}, "says that it holds 999,999,999,999,999 episodes"),
        ({"shardLengths": []}, "has no episodes in its split 'train'"),
    ],
)
def test_shards_that_cannot_be_are_refused(tmp_path, change, complaint):
    folder = copied(tmp_path)
    info = json.loads((folder / "dataset_info.json").read_text())
    info["splits"][0].update(change)
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UsageError, match=complaint):
        RldsDataset(folder)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda f: (f / "features.json").unlink(), r"features.json can't be read \(No such file"),
        (lambda f: (f / "dataset_info.json").write_text("{"), "dataset_info.json is not valid JSON"),
        (lambda f: (f / "dataset_info.json").write_text("[]"), "dataset_info.json does not hold a JSON object"),
        (
            lambda f: (f / "features.json").write_text('{"tensor": {"dtype": "quaternion"}}'),
            "describes fields that can't be read .*quaternion",
        ),
        (lambda f: (f / "features.json").write_text("[" * 100_000), "features.json is not valid JSON"),
        (lambda f: (f / "dataset_info.json").write_bytes(b"\xff{}"), "dataset_info.json is not valid JSON"),
        (lambda f: (f / "dataset_info.json").write_text('{"splits": [1]}'), "dataset_info.json is malformed"),
        (lambda f: next(f.glob("*-00001-of-*")).unlink(), "00001-of-00002 is missing: copy or download"),
        (
            lambda f: (f / "dataset_info.json").write_text(
                (f / "dataset_info.json").read_text().replace('"4",', '"5",')
            ),
            r"00000-of-00002 holds 4 episodes, but dataset_info.json says 5",
        ),
        (
            lambda f: (f / "dataset_info.json").write_text(
                (f / "dataset_info.json").read_text().replace('"tfrecord"', '"riegeli"')
            ),
            "written as riegeli",
        ),
    ],
)
def test_an_incomplete_folder_says_what_is_wrong(tmp_path, spoil, complaint):
    copy = copied(tmp_path)
    spoil(copy)
    with pytest.raises(UsageError, match=complaint):
        RldsDataset(copy)[0]


def test_a_dataset_is_found_below_the_folder_that_is_named(tmp_path):
    assert find_dataset(FOLDER) == find_dataset(FOLDER.parent) == find_dataset(GOLDEN) == FOLDER
    with pytest.raises(UsageError, match="no RLDS dataset"):
        find_dataset(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        find_dataset(tmp_path / "x")
    (tmp_path / "pusht" / "meta").mkdir(parents=True)
    (tmp_path / "pusht" / "meta" / "info.json").write_text("{}")
    with pytest.raises(UsageError, match="pusht is a LeRobot dataset, and not an RLDS dataset: open it with LeRobot"):
        find_dataset(tmp_path / "pusht")
    assert find_recording(tmp_path / "pusht") == ("lerobot", tmp_path / "pusht")
    assert find_recording(GOLDEN) == ("rlds", FOLDER)
    with pytest.raises(UsageError, match=r"no LeRobot dataset, .* LeRobot datasets are in .*/pusht\.$"):
        find_recording(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dataset_info.json").write_text("{}")
    with pytest.raises(UsageError, match=r"several datasets; name one of .*/a, .*/b\."):
        find_dataset(tmp_path)
    with pytest.raises(UsageError, match="no split 'test'; it has train"):
        RldsDataset(FOLDER, split="test")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pattern", ["features.json", "*-00000-of-00002"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path, pattern):
    folder = copied(tmp_path)
    path = next(folder.glob(pattern))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=f"{path.name} (can't be read|is)"):
        RldsDataset(folder)[0]
