"""`vlarl data`: recording and inspecting, as a user meets them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlarl.cli.data import data
from vlarl.data.lerobot.demonstrations import DemonstrationWriter
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.recording import record
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.writer import RldsWriter
from vlarl.envs.base import Demonstration, ExpertFlaws, SuiteSpec, TaskSpec
from vlarl.errors import UsageError, VlarlError
from vlarl.images.jpeg import jpeg_round_trip

GOLDEN = Path(__file__).parents[2] / "golden" / "rlds"


def test_recording_shows_progress_and_the_success_of_each_task(tmp_path, capsys):
    arguments = ["record", "--suite", "tabletop_goal", "--out", str(tmp_path), "--tasks", "3", "0"]
    assert data([*arguments, "--episodes", "2", "--image-size", "32", "--seed", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("episode 1/4  task 3  state 0  ") and lines[0].endswith(" steps  success")
    dataset = RldsDataset(tmp_path)
    steps = [len(episode) for episode in dataset]
    assert lines[4:] == [
        "",
        "task    success    steps  instruction",
        f"   0        2/2  {steps[2] + steps[3]:>7}  put the bowl on the plate",
        f"   3        2/2  {steps[0] + steps[1]:>7}  turn on the stove",
        f" all        4/4  {sum(steps):>7}",
        "",
        f"dataset: {tmp_path}/tabletop_goal/1.0.0",
    ]
    assert dataset.fields["steps/observation/wrist_image"].shape == (32, 32, 3)
    with pytest.raises(UsageError, match="exists already"):
        data(arguments)


def test_one_seed_one_recording(tmp_path):
    def bytes_of(name: str, seed: int) -> bytes:
        out = tmp_path / name
        options = ["--tasks", "3", "--episodes", "1", "--image-size", "16", "--seed", str(seed)]
        data(["record", "--suite", "tabletop_goal", "--out", str(out), *options])
        return RldsDataset(out).shard_path(0).read_bytes()

    assert bytes_of("a", 0) == bytes_of("b", 0) != bytes_of("c", 1)


def test_a_recording_is_the_same_in_either_format(tmp_path):
    options = ["--suite", "tabletop_goal", "--tasks", "3", "--episodes", "2", "--image-size", "64"]
    data(["record", *options, "--out", str(tmp_path / "rlds")])
    lerobot = [*options, "--format", "lerobot", "--fps", "5"]
    data(["record", *lerobot, "--out", str(tmp_path / "images")])
    data(["record", *lerobot, "--out", str(tmp_path / "videos"), "--video"])
    images, videos = (LeRobotDataset(tmp_path / kind / "tabletop_goal") for kind in ("images", "videos"))
    assert images.fps == 5 and images.declared.gripper == "as_recorded" and len(images) == 2
    for ours, theirs, video in zip(images, RldsDataset(tmp_path / "rlds"), videos, strict=True):
        for name, field in {
            "action": "steps/action",
            "observation.state": "steps/observation/state",
            "next.reward": "steps/reward",
            "next.success": "steps/is_terminal",
        }.items():
            np.testing.assert_array_equal(ours.values(name), theirs.values(field))
            np.testing.assert_array_equal(video.values(name), theirs.values(field))
        assert ours.texts() == theirs.texts("steps/language_instruction")
        assert ours.metadata["file_path"] == theirs.texts("episode_metadata/file_path")[0]
        frames = ours.images("observation.images.wrist_image")
        stored = np.stack([jpeg_round_trip(frame) for frame in frames])
        np.testing.assert_array_equal(stored, theirs.images("steps/observation/wrist_image"))
        away = np.abs(frames.astype(float) - video.images("observation.images.wrist_image"))
        assert away.mean() <= 3
    with pytest.raises(UsageError, match="tabletop_goal exists already, and recordings are never overwritten"):
        data(["record", *lerobot, "--out", str(tmp_path / "images")])


def test_a_recording_that_is_stopped_keeps_its_episodes_in_either_format(tmp_path):
    def stop(episode: Demonstration, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    def lerobot(root: str | Path, name: str) -> DemonstrationWriter:
        return DemonstrationWriter(root, name, 5, False)

    for writer, read in ((RldsWriter, RldsDataset), (lerobot, lambda path: LeRobotDataset(path / "libero_10"))):
        with pytest.raises(KeyboardInterrupt):
            record(HalfFailing(), tmp_path / writer.__name__, None, 3, 0, ExpertFlaws(), True, stop, writer)
        assert len(read(tmp_path / writer.__name__)) == 2
    assert LeRobotDataset(tmp_path / "lerobot" / "libero_10").declared.gripper == "closed_is_1"


def test_a_recording_that_is_stopped_inside_an_episode_leaves_no_dataset_that_nothing_can_read(tmp_path):
    def interrupted(table: object) -> None:
        raise KeyboardInterrupt

    def stop(episode: Demonstration, done: int, total: int) -> None:
        writers[0]._writer._data.write = interrupted

    def lerobot(root: str | Path, name: str) -> DemonstrationWriter:
        writers.append(DemonstrationWriter(root, name, 5, False))
        return writers[0]

    writers: list[DemonstrationWriter] = []
    with pytest.raises(KeyboardInterrupt):
        record(HalfFailing(), tmp_path, None, 3, 0, ExpertFlaws(), True, stop, lerobot)
    assert len(writers[0]) == 1 and list(tmp_path.iterdir()) == []


class HalfFailing:
    """Experts that fail at every second episode, or always."""

    spec = SuiteSpec("libero_10", (TaskSpec(0, "do it", 9),), (0, 1), (2,), (2,))

    def __init__(self, always: bool = False) -> None:
        self.always = always

    def demonstrate(self, tasks, flaws):
        for number, task in enumerate(tasks):
            success = number % 2 == 0 and not self.always
            views = np.zeros((2, 1, 8, 8, 3), np.uint8)
            state, done = np.zeros((2, 8), np.float32), np.ones((2, 7), np.float32)
            yield Demonstration(task, "do it", views, state, done, np.zeros(2, np.float32), success)


def test_failures_are_recorded_only_on_request(tmp_path):
    for keep, episodes, steps in ((False, 2, 4), (True, 3, 6)):
        folder, counts = record(HalfFailing(), tmp_path / str(keep), None, 3, 0, ExpertFlaws(), keep, lambda *_: None)
        terminal = [bool(episode.values("steps/is_terminal")[-1]) for episode in RldsDataset(folder)]
        assert len(terminal) == episodes and sum(terminal) == 2
        assert (counts[0].num_episodes, counts[0].num_successes, counts[0].num_recorded_steps) == (3, 2, steps)


def test_nothing_but_failures_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(VlarlError, match="none of 2 demonstrations of libero_10 succeeded, so nothing was recorded"):
        record(HalfFailing(always=True), tmp_path, None, 2, 0, ExpertFlaws(), False, lambda *_: None)
    assert list((tmp_path / "libero_10").iterdir()) == []


def test_inspecting_golden_data(tmp_path, capsys):
    assert data(["inspect", str(GOLDEN), "--out", str(tmp_path / "sheet.png")]) == 0
    text = capsys.readouterr().out
    for line in (
        "format:    RLDS, 2 shards",
        "episodes:  8, of which 8 end at their goal",
        "steps:     126, 12 to 22 per episode",
        "  steps/observation/image        image uint8 [128 x 128 x 3]",
        "      3 x  open the middle drawer of the cabinet",
        f"contact sheet: {tmp_path}/sheet.png",
    ):
        assert line in text.splitlines()
    (gripper,) = [line for line in text.splitlines() if line.startswith("  action 6")]
    assert gripper.split()[2:4] == ["0", "1"] and gripper.endswith("not normalised")
    with np.load(GOLDEN / "expected.npz") as expected:
        sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
        np.testing.assert_array_equal(sheet[4:132, 4:132], expected["ep0_image0"])
        last = sheet[4 + 132 : 264, -132:-4]  # the second row's last frame
        np.testing.assert_array_equal(last, expected["ep0_wrist_last"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["inspct"], "unknown command 'data inspct'; commands: inspect, convert, record"),
        (["inspect", "nowhere"], "nowhere is not a directory"),
        (["inspect", str(GOLDEN), "--out", "/nowhere/x.png"], "can't be written"),
        (["record", "--suite", "libero_spacial", "--out", "x"], "did you mean 'libero_spatial'"),
        (["record", "--suite", "tabletop_goal", "--out", "x", "--tasks", "10"], "--tasks = .10.: no task 10"),
        (["record", "--suite", "gym", "--out", "x"], "has no scripted expert"),
        (["record", "--suite", "tabletop_goal"], "--out"),
        (["record", "--suite", "tabletop_goal", "--out", "x", "--format", "lerobot"], "steps a second has: give --fps"),
        (["record", "--suite", "tabletop_goal", "--out", "x", "--fps", "5"], "add --format lerobot, or leave them out"),
    ],
)
def test_mistakes_are_reported(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        data(arguments)


def test_help_is_there(capsys):
    assert data([]) == 0
    assert "inspect  PATH" in capsys.readouterr().out
