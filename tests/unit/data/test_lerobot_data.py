"""LeRobot datasets: what is written is read back equal, and damaged files are refused by their names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from fakes.lerobot_data import IMAGE, LENGTHS, TASKS, WRIST, episode, features, write

from vlarl.data.lerobot.cache import BoundedCache
from vlarl.data.lerobot.declared import Declared
from vlarl.data.lerobot.info import Feature
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.lerobot.writer import LeRobotWriter
from vlarl.errors import UsageError

DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
GREY_LEVELS = 3.0
GOLDEN = Path(__file__).parents[2] / "golden" / "lerobot"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> LeRobotDataset:
    return write(tmp_path_factory.mktemp("images") / "data")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> LeRobotDataset:
    return write(tmp_path_factory.mktemp("videos") / "data", "video")


def assert_read_back(dataset: LeRobotDataset, grey_levels: float) -> None:
    assert len(dataset) == len(LENGTHS) and dataset.fps == 10 and dataset.tasks == TASKS[:2]
    for index, read in enumerate(dataset):
        values, cameras, instructions, metadata = episode(index)
        assert len(read) == LENGTHS[index] and read.texts() == instructions and read.metadata == metadata
        for name, written in values.items():
            found = read.texts(name) if isinstance(written, list) else read.values(name)
            np.testing.assert_array_equal(found, written)
            assert isinstance(written, list) or found.dtype == written.dtype
        for name, frames in cameras.items():
            found = read.images(name)
            assert found.shape == frames.shape and found.dtype == np.uint8
            assert np.abs(found.astype(float) - frames).mean(axis=(1, 2, 3)).max() <= grey_levels
            np.testing.assert_array_equal(read.images(name, [2, 0]), found[[2, 0]])
        np.testing.assert_allclose(read.values("timestamp"), np.arange(len(read)) / 10, rtol=1e-6)
        np.testing.assert_array_equal(read.values("frame_index"), np.arange(len(read)))


def test_images_are_read_back_to_the_bit(images):
    assert_read_back(images, grey_levels=0)
    assert images.name == "libero_spatial" and images.declared.gripper == "closed_is_1"
    assert not (images.folder / "videos").exists()


def test_videos_are_read_back_closely(videos):
    assert_read_back(videos, GREY_LEVELS)
    row = videos.rows[2]
    assert row.clips[IMAGE].start == (LENGTHS[0] + LENGTHS[1]) / 10  # all episodes in one video


def test_frames_are_those_of_the_whole_video_read_from_its_beginning():
    """A key frame is every second one: an episode may begin between two of them."""
    dataset = LeRobotDataset(GOLDEN / "lerobot_video")
    path = dataset.rows[0].clips[WRIST].path
    with imageio.get_reader(path, "ffmpeg") as reader:
        whole = np.stack([frame for frame in reader]).astype(float)  # noqa: C416 - its length is infinite
    found = np.concatenate([read.images(WRIST) for read in dataset])
    assert found.shape == whole.shape
    assert np.abs(found - whole).mean(axis=(1, 2, 3)).max() <= GREY_LEVELS
    away = np.abs(found[:, None].astype(np.int16) - whole[None].astype(np.int16)).mean(axis=(2, 3, 4))
    assert away.argmin(axis=1).tolist() == list(range(len(whole)))


def test_files_that_grow_too_large_are_followed_by_others(tmp_path):
    """A limit of nothing: every episode has its own files, and is found in them."""
    dataset = write(tmp_path / "data", "video", data_file_mb=0, video_file_mb=0)
    assert len(list((dataset.folder / "data").glob("*/*"))) == 3
    assert dataset.rows[1].data_path.name == "file-001.parquet"
    starts = [row.clips[IMAGE].start for row in dataset.rows]
    names = [row.clips[IMAGE].path.name for row in dataset.rows]
    assert len(set(names)) == len([start for start in starts if start == 0])
    assert_read_back(dataset, GREY_LEVELS)


def test_statistics_are_those_of_all_steps(images):
    stats = json.loads((images.folder / "meta/stats.json").read_text())
    actions = np.concatenate([episode(index)[0]["action"] for index in range(3)]).astype(float)
    for name, value in {
        "mean": actions.mean(axis=0),
        "std": actions.std(axis=0),
        "min": actions.min(axis=0),
        "q90": np.quantile(actions, 0.9, axis=0),
        "count": [12],
    }.items():
        np.testing.assert_allclose(stats["action"][name], value)
    frames = np.concatenate([episode(index)[1][IMAGE] for index in range(3)]) / 255
    for name in ("mean", "std", "min", "max"):
        shaped = np.asarray(stats[IMAGE][name])
        assert shaped.shape == (3, 1, 1)
        np.testing.assert_allclose(shaped.ravel(), getattr(frames.reshape(-1, 3), name)(axis=0), atol=1e-12)
    rows = parquet.read_table(images.folder / EPISODES).to_pylist()
    np.testing.assert_allclose(rows[1]["stats/action/mean"], actions[5:8].mean(axis=0))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_the_layout_is_lerobots(tmp_path, kind):
    """The same columns and types, file by file, as in a dataset that lerobot wrote."""

    def columns(path: Path) -> dict[str, pyarrow.DataType]:
        return {f.name: f.type for f in parquet.read_schema(path) if not f.name.startswith("stats/")}

    theirs, ours = GOLDEN / f"lerobot_{kind}", tmp_path / "ours"
    source = LeRobotDataset(theirs)
    names = [name for name in source.info.own_features if source.fields[name].kind == "tensor"]
    with LeRobotWriter(ours, source.info.own_features, source.fps, robot="panda") as writer:
        for read in source:
            cameras = {name: read.images(name) for name in source.cameras}
            writer.add({name: read.values(name) for name in names}, cameras, read.texts())
    assert columns(ours / DATA) == columns(theirs / DATA)
    assert columns(ours / EPISODES) == columns(theirs / EPISODES)
    infos = [json.loads((folder / "meta/info.json").read_text()) for folder in (ours, theirs)]
    for info in infos:
        for feature in info["features"].values():
            feature.get("info", {}).pop("video.codec", None)  # AV1 and H.264
    assert infos[0] == infos[1]
    stats = [json.loads((folder / "meta/stats.json").read_text()) for folder in (ours, theirs)]
    assert {k: set(v) for k, v in stats[0].items()} == {k: set(v) for k, v in stats[1].items()}
    np.testing.assert_allclose(stats[0]["action"]["mean"], stats[1]["action"]["mean"], atol=1e-6)
    np.testing.assert_allclose(stats[0][IMAGE]["mean"], stats[1][IMAGE]["mean"], atol=0.02)


def test_an_error_leaves_nothing_and_an_existing_dataset_stays(tmp_path):
    write(tmp_path / "data")
    with pytest.raises(UsageError, match="data exists already: name a new folder, or replace it with --overwrite"):
        write(tmp_path / "data")
    with (
        pytest.raises(RuntimeError, match="stop"),
        LeRobotWriter(tmp_path / "data", features("video"), 10, overwrite=True) as writer,
    ):
        writer.add(*episode(1))
        raise RuntimeError("stop")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert len(LeRobotDataset(tmp_path / "data")) == 3
    with LeRobotWriter(tmp_path / "data", features(), 10, overwrite=True) as writer:
        writer.add(*episode(1))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert len(LeRobotDataset(tmp_path / "data")) == 1


@pytest.mark.parametrize(
    ("feature", "complaint"),
    [
        (Feature("video", (15, 16, 3)), "15 x 16 pixels, and videos have even sizes: write images"),
        (Feature("image", (16, 16, 1)), "not of 3 channels"),
        (Feature("float32", (4, 4)), "written as vectors"),
    ],
)
def test_what_can_not_be_written_is_refused(tmp_path, feature, complaint):
    with pytest.raises(UsageError, match=complaint):
        LeRobotWriter(tmp_path / "data", {"x": feature}, 10)
    assert list(tmp_path.iterdir()) == []


def test_an_episode_of_other_shapes_is_refused(tmp_path):
    values, cameras, texts, metadata = episode(0)
    with LeRobotWriter(tmp_path / "data", features(), 10) as writer:
        with pytest.raises(ValueError, match="observation.state has the shape"):
            writer.add({**values, "observation.state": np.zeros((5, 9), np.float32)}, cameras, texts)
        with pytest.raises(ValueError, match="action has the shape"):
            writer.add({**values, "action": values["action"][:4]}, cameras, texts)
        writer.add(values, cameras, texts, metadata)
    assert len(LeRobotDataset(tmp_path / "data")) == 1


# --- damaged files ---------------------------------------------------------------------------------------------------


def edit_json(name: str, **changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **changes}))

    return spoil


def edit_rows(name: str, change: Callable[[list[dict]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        table = parquet.read_table(folder / name)
        rows = table.to_pylist()
        change(rows)
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), folder / name)

    return spoil


def cut(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return spoil


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def read_all(folder: Path) -> None:
    for read in LeRobotDataset(folder):
        read.texts()
        for name, field in read._dataset.fields.items():
            if field.kind == "tensor":
                read.values(name)
            elif field.kind == "image":
                read.images(name)


VIDEO = f"videos/{WRIST}/chunk-000/file-000.mp4"
PNG = features()[IMAGE]
DAMAGE = {
    "no info": (lambda folder: (folder / "meta/info.json").write_text("{"), "info.json is not valid JSON"),
    "another version": (
        edit_json("meta/info.json", codebase_version="v2.1"),
        "version 'v2.1', and v3.0 can be read: convert it with python -m lerobot.datasets.v30.convert_dataset_v21_to_v30",
    ),
    "a version of the future": (
        edit_json("meta/info.json", codebase_version="v4.0"),
        "write it again with lerobot 0.4",
    ),
    "no rate": (edit_json("meta/info.json", fps=0), r"info.json is malformed \(fps is 0"),
    "no features": (edit_json("meta/info.json", features={}), "it describes no timestamp"),
    "a path that leaves the folder": (
        edit_json("meta/info.json", data_path="../x"),
        "does not name a file of the dataset",
    ),
    "a template that looks inside": (
        edit_json("meta/info.json", data_path="{chunk_index.real}"),
        "does not name a file of the dataset",
    ),
    "more episodes": (
        edit_json("meta/info.json", total_episodes=4),
        "describes 3 episodes of 12 steps, and .* 4 episodes",
    ),
    "no steps": (without(DATA), f"{DATA} is missing: copy or download"),
    "half of the steps": (cut(DATA), f"{DATA} can't be read"),
    "no tasks": (without("meta/tasks.parquet"), "tasks.parquet is missing"),
    "a task less": (
        edit_rows("meta/tasks.parquet", lambda rows: rows.pop()),
        "a task_index is not that of one of 1 tasks",
    ),
    "an episode that is longer": (
        edit_rows(EPISODES, lambda rows: rows[1].update(length=4)),
        r"episode 1 has 4 steps, from 5 to 8",
    ),
    "an episode twice": (
        edit_rows(EPISODES, lambda rows: rows[1].update(episode_index=0)),
        "episode_index = 0, and 1 follows",
    ),
    "a step less": (edit_rows(DATA, lambda rows: rows.pop()), "has 11 steps, and meta/episodes says 12 in 3 episodes"),
    "steps in another order": (edit_rows(DATA, lambda rows: rows.reverse()), "has index = 11 in row 0, and 0 follows"),
    "an empty value": (edit_rows(DATA, lambda rows: rows[3].update(action=None)), "action has empty values"),
    "NaN": (
        edit_rows(DATA, lambda rows: rows[3]["action"].__setitem__(1, float("nan"))),
        "action holds NaN or infinity in row 3",
    ),
    "half an image": (
        edit_rows(DATA, lambda rows: rows[6][IMAGE].update(bytes=rows[6][IMAGE]["bytes"][:60])),
        f"episode 1 can't be read .the image of step 1 in {IMAGE}",
    ),
    "a file's name for an image": (
        edit_rows(DATA, lambda rows: rows[6][IMAGE].update(bytes=None, path="x.png")),
        "names files of images",
    ),
    "an unknown declaration": (edit_json("meta/vlarl.json", grip="x"), "grip is not known; known are name, gripper"),
    "a wrong gripper": (edit_json("meta/vlarl.json", gripper="soft"), "gripper is one of closed_is_1"),
}


def flip(name: str, value: float) -> Callable[[Path], None]:
    """Change one bit of a float32 where it is stored, as a failing disk would."""

    def spoil(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        at = data.index(np.float32(value).tobytes())
        data[at] ^= 1
        (folder / name).write_bytes(bytes(data))

    return spoil


DAMAGE["a flipped bit"] = (flip(DATA, episode(0)[0]["observation.state"][2, 3]), "file-000.parquet can't be read")
VIDEO_DAMAGE = {
    "no video": (without(VIDEO), f"{VIDEO} is missing"),
    "half a video": (cut(VIDEO), f"{VIDEO} can't be read"),
    "not a video": (
        lambda folder: (folder / VIDEO).write_text("#EXTM3U\nfile:/etc/passwd\n"),
        f"{VIDEO} can't be read",
    ),
    "frames past the end": (
        edit_rows(EPISODES, lambda rows: rows[2].update({f"videos/{WRIST}/from_timestamp": 1.0})),
        "there are 2 frames of 16 x 16 pixels from 1.00 s on, and the episode has 4",
    ),
    "frames between two": (
        edit_rows(EPISODES, lambda rows: rows[2].update({f"videos/{WRIST}/from_timestamp": 0.77})),
        "a frame is at 0.8000 s, and at 10 frames a second it is expected at 0.7700 s",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_with_its_file(tmp_path, images, name):
    spoil, complaint = DAMAGE[name]
    shutil.copytree(images.folder, tmp_path / "data")
    spoil(tmp_path / "data")
    with pytest.raises(UsageError, match=complaint):
        read_all(tmp_path / "data")


@pytest.mark.parametrize("name", VIDEO_DAMAGE)
def test_damage_of_videos_is_named_with_its_file(tmp_path, videos, name):
    spoil, complaint = VIDEO_DAMAGE[name]
    shutil.copytree(videos.folder, tmp_path / "data")
    spoil(tmp_path / "data")
    with pytest.raises(UsageError, match=complaint):
        read_all(tmp_path / "data")


def test_features_that_are_not_there_are_refused_with_those_that_are(images):
    with pytest.raises(UsageError, match="there is no tensor feature 'actions'; there are observation.state, action"):
        images[0].values("actions")
    with pytest.raises(UsageError, match="there is no image feature 'action'"):
        images[0].images("action")
    with pytest.raises(IndexError, match="no episode 3"):
        images[3]


def test_a_cache_keeps_what_was_used_last():
    cache: BoundedCache[str] = BoundedCache(10)
    made: list[str] = []

    def get(key: str) -> str:
        return cache.get(key, lambda: (made.append(key) or key, 5))

    assert [get(key) for key in ("a", "b", "a", "c", "a", "b")] == ["a", "b", "a", "c", "a", "b"]
    assert made == ["a", "b", "c", "b"]


def test_what_a_dataset_means_is_found_by_usual_names(images):
    roles = Declared().roles(images.fields)
    assert roles.views == (IMAGE, WRIST) and (roles.state, roles.action) == ("observation.state", "action")
    libero = {name.replace("wrist_image", "image2"): field for name, field in images.fields.items()}
    assert Declared().roles(libero).views == (IMAGE, "observation.images.image2")
    assert Declared(views=(WRIST,), action="one").roles(images.fields).views == (WRIST,)
    other = {name.replace("images.", "cameras."): field for name, field in images.fields.items()}
    assert Declared().roles(other).views == ()
