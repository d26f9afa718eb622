"""RLDS data that TensorFlow Datasets wrote: found, described, and decoded only where asked for (arrays: tests/golden)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import vlarl.data.rlds as rlds
from vlarl.data.features import features_json, parse_features
from vlarl.data.rlds import RldsDataset, find_dataset
from vlarl.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "golden" / "rlds"
FOLDER = GOLDEN / "libero_spatial_no_noops" / "1.0.0"
IMAGE = "steps/observation/image"


@pytest.fixture(scope="module")
def dataset() -> RldsDataset:
    return RldsDataset(FOLDER)


def test_episodes_are_found_in_any_order_and_hold_together(dataset):
    assert len(dataset) == 8 and dataset.shard_lengths == [4, 4] and dataset.name == "libero_spatial_no_noops"
    episode = RldsDataset(FOLDER)[5]
    assert len(episode) == len(episode.steps) == 13
    np.testing.assert_array_equal(episode.numbers("steps/is_first"), [True] + [False] * 12)
    np.testing.assert_array_equal(episode.numbers("steps/reward"), [0.0] * 12 + [1.0])
    np.testing.assert_array_equal(episode.steps[3].numbers("action"), episode.numbers("steps/action")[3])
    assert episode.texts("steps/language_instruction") == ["open the middle drawer of the cabinet"] * 13
    with pytest.raises(IndexError, match="no episode 8"):
        dataset[8]


def test_only_the_frames_that_are_asked_for_are_decoded(monkeypatch):
    decoded: list[int] = []
    decode = rlds.decode_image
    monkeypatch.setattr(rlds, "decode_image", lambda data: decoded.append(len(data)) or decode(data))
    episode = RldsDataset(FOLDER)[0]
    assert len(episode.numbers("steps/action")) == 16 and decoded == []
    chunk = episode.images(IMAGE, [0, 8])
    assert len(decoded) == 2
    episode.steps[4].image("wrist_image")
    assert len(decoded) == 3
    np.testing.assert_array_equal(chunk, episode.images(IMAGE)[[0, 8]])
    assert len(decoded) == 19


def test_shards_are_opened_when_an_episode_of_theirs_is_read(tmp_path):
    copy = copied(tmp_path)
    last = copy / "libero_spatial_no_noops-train.tfrecord-00001-of-00002"
    last.write_bytes(b"broken")
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
        dataset[0].numbers("steps/language_instruction")


def test_a_record_that_is_no_episode_is_named(tmp_path):
    copy = copied(tmp_path)
    info = json.loads((copy / "features.json").read_text())
    steps = info["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    steps["action"]["tensor"]["shape"]["dimensions"] = ["5"]
    steps["gripper"] = steps["reward"]
    (copy / "features.json").write_text(json.dumps(info))
    episode = RldsDataset(copy)[0]
    with pytest.raises(UsageError, match="00000-of-00002, episode 0 can't be read .*reshape"):
        episode.numbers("steps/action")
    with pytest.raises(UsageError, match="episode 0 can't be read .*no feature 'steps/gripper'"):
        episode.numbers("steps/gripper")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda f: (f / "features.json").unlink(), r"features.json can't be read \(No such file"),
        (lambda f: (f / "dataset_info.json").write_text("{"), "dataset_info.json is not valid JSON"),
        (lambda f: (f / "dataset_info.json").write_text("[]"), "dataset_info.json holds no JSON object"),
        (
            lambda f: (f / "features.json").write_text('{"tensor": {"dtype": "quaternion"}}'),
            "fields that can't be read",
        ),
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
def test_a_folder_that_is_not_whole_says_what_is_wrong(tmp_path, spoil, complaint):
    copy = copied(tmp_path)
    spoil(copy)
    with pytest.raises(UsageError, match=complaint):
        RldsDataset(copy)[0]


def test_a_dataset_is_found_below_the_folder_that_is_named(tmp_path):
    assert find_dataset(FOLDER) == find_dataset(FOLDER.parent) == find_dataset(GOLDEN) == FOLDER
    with pytest.raises(UsageError, match="no RLDS dataset"):
        find_dataset(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        find_dataset(tmp_path / "x")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dataset_info.json").write_text("{}")
    with pytest.raises(UsageError, match=r"several datasets; name one of .*/a, .*/b\."):
        find_dataset(tmp_path)
    with pytest.raises(UsageError, match="no split 'test'; it has train"):
        RldsDataset(FOLDER, split="test")
