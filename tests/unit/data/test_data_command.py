"""`vlarl data`: recording and inspecting, as a user meets them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlarl.cli.data import data
from vlarl.data.recording import record
from vlarl.data.rlds.reader import RldsDataset
from vlarl.envs.base import Demonstration, SuiteSpec, TaskSpec
from vlarl.errors import UsageError, VlarlError

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


class HalfFailing:
    """Experts that fail at every second episode, or always."""

    spec = SuiteSpec("libero_10", (TaskSpec(0, "do it", 9),), (0, 1), (2,), (2,))

    def __init__(self, always: bool = False) -> None:
        self.always = always

    def demonstrate(self, tasks, action_noise):
        for number, task in enumerate(tasks):
            success = number % 2 == 0 and not self.always
            views = np.zeros((2, 1, 8, 8, 3), np.uint8)
            state, done = np.zeros((2, 8), np.float32), np.ones((2, 7), np.float32)
            yield Demonstration(task, "do it", views, state, done, np.zeros(2, np.float32), success)


def test_failures_are_recorded_only_on_request(tmp_path):
    for keep, episodes, steps in ((False, 2, 4), (True, 3, 6)):
        folder, counts = record(HalfFailing(), tmp_path / str(keep), None, 3, 0, 0.0, keep, lambda *_: None)
        terminal = [bool(episode.values("steps/is_terminal")[-1]) for episode in RldsDataset(folder)]
        assert len(terminal) == episodes and sum(terminal) == 2
        assert (counts[0].num_episodes, counts[0].num_successes, counts[0].num_recorded_steps) == (3, 2, steps)


def test_nothing_but_failures_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(VlarlError, match="none of 2 demonstrations of libero_10 succeeded, so nothing was recorded"):
        record(HalfFailing(always=True), tmp_path, None, 2, 0, 0.0, False, lambda *_: None)
    assert list((tmp_path / "libero_10").iterdir()) == []


def test_inspecting_golden_data(tmp_path, capsys):
    assert data(["inspect", str(GOLDEN), "--out", str(tmp_path / "sheet.png")]) == 0
    text = capsys.readouterr().out
    for line in (
        "episodes:  8, of which 8 end at their goal; 2 shards",
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
        (["inspct"], "unknown command 'data inspct'; commands: inspect, record"),
        (["inspect", "nowhere"], "nowhere is not a directory"),
        (["inspect", str(GOLDEN), "--out", "/nowhere/x.png"], "can't be written"),
        (["record", "--suite", "libero_spacial", "--out", "x"], "did you mean 'libero_spatial'"),
        (["record", "--suite", "tabletop_goal", "--out", "x", "--tasks", "10"], "--tasks = .10.: no task 10"),
        (["record", "--suite", "gym", "--out", "x"], "has no scripted expert"),
        (["record", "--suite", "tabletop_goal"], "--out"),
    ],
)
def test_mistakes_are_reported(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        data(arguments)


def test_help_is_there(capsys):
    assert data([]) == 0
    assert "inspect  PATH" in capsys.readouterr().out
