"""`vlarl data convert`: every array comes back equal, and what the other format can't hold is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from fakes.lerobot_data import IMAGE, WRIST, episode, write

from vlarl.cli.data import data
from vlarl.data.conversion import Conversion, to_lerobot, to_rlds
from vlarl.data.field_names import feature_of, field_of
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.rlds.features import Field
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.writer import RldsWriter
from vlarl.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "golden"


def quiet(*_: object) -> None:
    pass


def assert_equal(ours: RldsDataset, theirs: RldsDataset) -> None:
    """Every array of every field of every episode; images after decoding."""
    assert ours.fields == theirs.fields and len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name, field in theirs.fields.items():
            if field.kind == "image":
                np.testing.assert_array_equal(one.images(name), other.images(name))
            elif field.kind == "text":
                assert one.texts(name) == other.texts(name)
            else:
                np.testing.assert_array_equal(one.values(name), other.values(name))
                assert one.values(name).dtype == other.values(name).dtype


@pytest.fixture(scope="module")
def as_lerobot(tmp_path_factory: pytest.TempPathFactory) -> LeRobotDataset:
    folder = tmp_path_factory.mktemp("converted") / "libero"
    to_lerobot(RldsDataset(GOLDEN / "rlds"), folder, Conversion(fps=20), quiet)
    return LeRobotDataset(folder)


def test_rlds_comes_back_equal_in_all_arrays(tmp_path, as_lerobot):
    source = RldsDataset(GOLDEN / "rlds")
    for read, original in zip(as_lerobot, source, strict=True):
        np.testing.assert_array_equal(read.images(IMAGE), original.images("steps/observation/image"))
        np.testing.assert_array_equal(read.values("action"), original.values("steps/action"))
        np.testing.assert_array_equal(read.values("next.reward"), original.values("steps/reward"))
        np.testing.assert_array_equal(read.values("next.success"), original.values("steps/is_terminal"))
        assert read.texts() == original.texts("steps/language_instruction")
    back = RldsDataset(to_rlds(as_lerobot, tmp_path, Conversion(), quiet))
    assert_equal(back, source)
    assert back.name == source.name
    features = json.loads((back.folder / "features.json").read_text())
    steps = features["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    assert steps["observation"]["featuresDict"]["features"]["image"]["image"]["encodingFormat"] == "png"
    statistics = json.loads((back.folder / "dataset_statistics.json").read_text())[source.name]
    actions = np.concatenate([read.values("steps/action") for read in source])
    np.testing.assert_allclose(statistics["action"]["mean"][:6], actions[:, :6].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(statistics["action"]["mean"][6], (actions[:, 6] <= 0).mean(), atol=1e-6)  # open is 1


def test_lerobot_comes_back_equal_in_all_arrays(tmp_path):
    source = write(tmp_path / "source")
    rlds = RldsDataset(to_rlds(source, tmp_path / "rlds", Conversion(drop=["one"]), quiet))
    assert rlds.name == "libero_spatial"
    to_lerobot(rlds, tmp_path / "back", Conversion(fps=10), quiet)
    back = LeRobotDataset(tmp_path / "back")
    assert back.declared == source.declared and back.tasks == source.tasks
    for index, read in enumerate(back):
        values, cameras, instructions, metadata = episode(index)
        for name in ("action", "observation.state", "next.success"):
            np.testing.assert_array_equal(read.values(name), values[name])
        assert read.texts("phase") == values["phase"] and read.texts() == instructions and read.metadata == metadata
        for name, frames in cameras.items():
            np.testing.assert_array_equal(read.images(name), frames)
    assert set(back.info.own_features) == set(source.info.own_features) - {"one"}


def test_frames_as_videos_are_close(tmp_path, as_lerobot):
    to_lerobot(RldsDataset(GOLDEN / "rlds"), tmp_path / "video", Conversion(fps=20, video=True), quiet)
    videos = LeRobotDataset(tmp_path / "video")
    for name in (IMAGE, WRIST):
        assert videos.info.features[name].dtype == "video"
        away = [
            np.abs(a.images(name).astype(float) - b.images(name)).mean()
            for a, b in zip(videos, as_lerobot, strict=True)
        ]
        assert max(away) <= 3.0


def test_names_of_fields_are_inverse_to_each_other():
    for field, is_image in (
        ("steps/observation/image", True),
        ("steps/observation/images/left", False),
        ("steps/reward", False),
        ("steps/is_terminal", False),
        ("steps/observation/gripper/state", False),
        ("steps/action", False),
        ("steps/image", True),
    ):
        assert field_of(feature_of(field, is_image), is_image) == field


def rlds_with(folder: Path, fields: dict[str, Field], values: dict) -> RldsDataset:
    """One episode of two steps with these fields beside an action and an instruction."""
    always = {"steps/action": Field("tensor", "float32", (7,)), "steps/language_instruction": Field("text")}
    content = {"steps/action": np.zeros((2, 7), np.float32), "steps/language_instruction": [b"do it", b"do it"]}
    with RldsWriter(folder, "mine") as writer:
        writer.add_values(always | fields, content | values)
    return RldsDataset(folder)


@pytest.mark.parametrize(
    ("fields", "values", "complaint"),
    [
        (
            {"steps/matrix": Field("tensor", "float32", (2, 2))},
            {"steps/matrix": np.zeros((2, 2, 2), np.float32)},
            "--drop steps/matrix",
        ),
        (
            {"steps/next/success": Field("tensor", "bool")},
            {"steps/next/success": np.zeros(2, np.int64)},
            "its name would be next.success",
        ),
        ({"episode_id": Field("text")}, {"episode_id": [b"x"]}, "only texts and single values in episode_metadata/"),
        (
            {"steps/is_last": Field("tensor", "bool")},
            {"steps/is_last": np.ones(2, np.int64)},
            "does not mark the last step alone",
        ),
    ],
)
def test_what_lerobot_can_not_hold_is_refused_and_can_be_left_out(tmp_path, fields, values, complaint):
    source = rlds_with(tmp_path / "rlds", fields, values)
    with pytest.raises(UsageError, match=complaint):
        to_lerobot(source, tmp_path / "out", Conversion(fps=5), quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["rlds"]
    to_lerobot(source, tmp_path / "out", Conversion(fps=5, drop=list(fields)), quiet)
    assert LeRobotDataset(tmp_path / "out").declared.gripper is None  # a robot that vlarl does not know


def test_what_rlds_can_not_hold_is_refused(tmp_path):
    """`one` has float64 values, of which a record would keep a half."""
    source = write(tmp_path / "source")
    with pytest.raises(UsageError, match="episode 0: one has values of float64 that RLDS, which stores float32"):
        to_rlds(source, tmp_path / "rlds", Conversion(), quiet)
    assert list((tmp_path / "rlds").rglob("*.json")) == []
    declared = write(tmp_path / "open", gripper="open_is_1")
    with pytest.raises(UsageError, match="declared to be open_is_1, and that of an RLDS dataset with the name libero"):
        to_rlds(declared, tmp_path / "rlds", Conversion(drop=["one"]), quiet)


def test_the_command_converts_shows_progress_and_replaces_only_on_request(tmp_path, capsys):
    out, back = tmp_path / "lerobot", tmp_path / "back"
    assert data(["convert", str(GOLDEN / "rlds"), str(out), "--fps", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "episode 1/8  16 steps" and lines[-1] == f"dataset: {out}" and len(lines) == 10
    with pytest.raises(UsageError, match="lerobot exists already: name a new folder, or replace it with --overwrite"):
        data(["convert", str(GOLDEN / "rlds"), str(out), "--fps", "20"])
    assert data(["convert", str(GOLDEN / "rlds"), str(out), "--fps", "5", "--overwrite"]) == 0
    assert LeRobotDataset(out).fps == 5
    assert data(["convert", str(out), str(back), "--name", "libero_goal"]) == 0
    assert RldsDataset(back).name == "libero_goal"
    with pytest.raises(UsageError, match="exists already"):
        data(["convert", str(out), str(back), "--name", "libero_goal"])
    capsys.readouterr()
    data(["convert", str(out), str(back), "--name", "libero_goal", "--overwrite"])
    assert "note" not in capsys.readouterr().out
    data(["convert", str(GOLDEN / "lerobot" / "lerobot_image"), str(tmp_path / "theirs")])
    assert "there is no next.success, so that is_terminal marks the last step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{rlds}", "{out}"], "does not say how many steps a second has, .*: give --fps"),
        (["{rlds}", "{out}", "--fps", "5", "--drop", "steps/x"], "--drop: .* has no steps/x; it has "),
        (
            ["{rlds}", "{out}", "--fps", "5", "--instruction", "steps/x"],
            "no text field steps/x.*name it with --instruction",
        ),
        (["{lerobot}", "{out}", "--fps", "5"], "--fps describes a LeRobot dataset that is written"),
        (["{lerobot}", "{out}", "--drop", "x"], "--drop: .* has no x; it has observation.images.image"),
        (["nowhere", "{out}"], "nowhere is not a directory"),
    ],
)
def test_mistakes_are_reported(tmp_path, arguments, complaint):
    known = {"rlds": GOLDEN / "rlds", "lerobot": GOLDEN / "lerobot" / "lerobot_image", "out": tmp_path / "out"}
    with pytest.raises(UsageError, match=complaint):
        data(["convert", *(text.format(**known) for text in arguments)])
    assert list(tmp_path.iterdir()) == []


def test_inspecting_a_lerobot_folder(tmp_path, capsys):
    folder = GOLDEN / "lerobot" / "lerobot_image"
    assert data(["inspect", str(folder), "--sheet", str(tmp_path / "sheet.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "format:    LeRobot v3.0, 10 steps a second, 1 file of steps, gripper not declared",
        "episodes:  4",
        "steps:     35, 6 to 13 per episode",
        f"views:     {IMAGE}, {WRIST}",
        f"  {IMAGE}        image uint8 [96 x 128 x 3]",
        "      2 x  pick up the black bowl and place it on the plate",
    ):
        assert line in lines
    assert any(line.startswith("statistics, of actions as recorded, because the gripper") for line in lines)
    from PIL import Image

    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    first = LeRobotDataset(folder)[0].images(IMAGE, [0, 12])
    np.testing.assert_array_equal(sheet[4 + 16 : 4 + 16 + 96, 4:132], first[0])  # with its proportions
    np.testing.assert_array_equal(sheet[4 + 16 : 4 + 16 + 96, -132:-4], first[1])
