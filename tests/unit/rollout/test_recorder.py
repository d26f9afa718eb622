import json
from dataclasses import replace
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from vlarl.errors import VlarlError
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.video import CaptionPainter, caption_height, write_video
from vlarl.rollout.recorder import EpisodeRecorder
from vlarl.types import EpisodeResult, Observation, Task, Trajectory, Transition

INSTRUCTION = "put the red block on the plate"


def _trajectory(status: str = "ok") -> Trajectory:
    seen = Observation(np.zeros((1, 4, 4, 3), np.uint8), np.zeros(8, np.float32), INSTRUCTION)
    step = Transition(
        seen, np.zeros(14, np.int64), np.zeros(14, np.float32), np.array([0.25, 0.5], np.float32), num_executed=2
    )
    task = Task("tabletop_spatial", task_id=3, init_state=31, seed=77, group=5, member=2)
    num_retries = 2 if status == "crashed" else 0
    return Trajectory(
        task, (step, step), seen, True, False, True, policy_version=6, status=status, num_retries=num_retries
    )  # type: ignore[arg-type]


def _result(success: bool, frames: int = 0) -> EpisodeResult:
    images = tuple(np.full((64, 64, 3), 20 * i, np.uint8) for i in range(frames))
    return EpisodeResult(Task("tabletop_spatial", 3, 31, 9), INSTRUCTION, success, 12, 1.0 * success, images)


def test_one_line_per_episode_with_everything_needed_to_replay_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    with EpisodeRecorder(run) as recorder:
        recorder.record(2, "rollout", [_trajectory(), _trajectory(status="crashed")])
        recorder.record(2, "eval", [_result(success=False)], policy_version=7)
        rows = [json.loads(line) for line in run.episodes_file.read_text().splitlines()]
    assert rows[0] == {
        "iteration": 2,
        "phase": "rollout",
        "episode_id": "tabletop_spatial-t03-s031-000000000000004d",
        "suite": "tabletop_spatial",
        "task_id": 3,
        "init_state": 31,
        "seed": 77,
        "group": 5,
        "member": 2,
        "instruction": INSTRUCTION,
        "success": True,
        "length": 4,
        "return": 1.5,
        "status": "ok",
        "num_retries": 0,
        "policy_version": 6,
    }
    assert (rows[1]["status"], rows[1]["num_retries"]) == ("crashed", 2)
    assert (rows[2]["phase"], rows[2]["success"], rows[2]["length"], rows[2]["return"]) == ("eval", False, 12, 0.0)
    assert rows[2]["policy_version"] == 7


def test_a_return_that_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    with EpisodeRecorder(run) as recorder:
        recorder.record(0, "eval", [EpisodeResult(Task("s", 0, 0, 0), "x", False, 1, float("nan"))])
    assert json.loads(run.episodes_file.read_text())["return"] is None


@pytest.mark.parametrize(("success", "outcome"), [(True, "success"), (False, "failure")])
def test_a_video_has_every_frame_and_holds_the_last(tmp_path: Path, success: bool, outcome: str) -> None:
    run = RunDirectory.create(tmp_path, "first")
    with EpisodeRecorder(run) as recorder:
        paths = [video.path for video in recorder.write_videos(0, [_result(success, frames=7), _result(success)])]
    assert paths == [run.videos / f"iter_0000_task03_state31_{outcome}.mp4"]
    with imageio.get_reader(paths[0], format="FFMPEG") as video:
        meta = video.get_meta_data()
        frames = list(video.iter_data())
    assert len(frames) == 7 + 10  # one second more at 10 frames a second
    assert meta["fps"] == 10 and meta["codec"] == "h264" and "yuv420p" in meta["pix_fmt"]
    assert frames[0].shape == (320 + caption_height(320), 320, 3)
    assert abs(int(frames[6][160, 160].mean()) - 120) < 8, "the scene is the seventh frame"
    caption = frames[-1][320:].astype(int)
    strongest = caption.max(axis=(0, 1))
    colored = np.abs(caption[..., 0] - caption[..., 1]) > 60
    assert colored.any() and strongest.max() > 200
    red, green, _ = caption[colored].mean(axis=0)
    assert (green > red) == success
    assert list(run.videos.glob(".*")) == []


def test_odd_sizes_become_even(tmp_path: Path) -> None:
    path = tmp_path / "odd.mp4"
    write_video(path, [np.zeros((333, 401, 3), np.uint8)] * 2, "a very long instruction " * 20, "success", fps=5)
    with imageio.get_reader(path, format="FFMPEG") as video:
        assert video.get_meta_data()["size"] == (400, 332 + caption_height(400))
        assert len(list(video.iter_data())) == 2 + 5


def test_a_video_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    frames = [np.zeros((64, 64, 3), np.uint8)]
    with pytest.raises(VlarlError, match="video.mp4"):
        write_video(tmp_path / "missing" / "video.mp4", frames, INSTRUCTION, "success")
    with EpisodeRecorder(run) as recorder:
        assert recorder.write_video("missing/video", frames, INSTRUCTION, "success") is None
        assert recorder.write_video("video", frames, INSTRUCTION, "crashed") == run.videos / "video.mp4"


def test_a_video_of_an_episode_that_crashed_is_neither_a_success_nor_a_failure(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    with EpisodeRecorder(run) as recorder:
        crashed = replace(_result(success=False, frames=2), status="crashed")
        (video,) = recorder.write_videos(3, [crashed])
    assert video.path == run.videos / "iter_0003_task03_state31_crashed.mp4"


@pytest.mark.parametrize("width", [320, 512])
def test_instructions_wrap_and_only_what_leaves_two_lines_is_cut(width: int) -> None:
    longest = "put the white mug on the left plate and put the yellow and white mug on the right plate"  # of LIBERO
    painter = CaptionPainter(longest, "success", 9, (width, width))
    assert len(painter.lines) == 2 and " ".join(painter.lines) == longest
    first, second = CaptionPainter(f"{longest} and then close the drawer", "success", 9, (width, width)).lines
    assert longest.startswith(first) and second.endswith("...")
    ink = painter.paint(np.zeros((width, width, 3), np.uint8), 3)[width:].min(axis=2) > 200
    rows, margin = np.flatnonzero(ink.any(axis=1)), width // 32
    assert np.diff(rows).max() > 1, "two lines apart from each other"
    assert not ink[:, :margin].any() and not ink[:, -margin:].any()
