import io
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vlarl.errors import MissingExtraError, VlarlError
from vlarl.observability.metrics import MetricLogger
from vlarl.observability.samples import Sample
from vlarl.observability.sinks import SHOWN_SAMPLES, JsonlSink, TensorBoardSink, WandbSink
from vlarl.observability.video import GIF_FRAMES, Video


def test_jsonl_rows_can_be_tailed_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    before = time.time()
    sink.write(0, {"val/success_rate": 0.5})
    row = json.loads(path.read_text())  # readable although the sink is open
    assert row["iteration"] == 0 and row["val/success_rate"] == 0.5
    assert before - 1 <= row["time"] <= time.time() + 1
    sink.close()
    again = JsonlSink(path)
    again.write(1, {"val/success_rate": 0.75})
    again.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [0, 1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_file_and_the_remedy() -> None:
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(VlarlError, match="/dev/full.*disk is full.*--resume"):
        sink.write(0, {"a": 1.0})
    with pytest.raises(VlarlError):
        sink.close()


def _scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, round(e.value, 4)) for e in events.Scalars(tag)]


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for iteration in range(5):
        first.write(iteration, {"val/success_rate": 0.1 * iteration})
    first.close()
    # Event files are ordered by their second of creation.
    for path in tmp_path.iterdir():
        path.rename(path.with_name(path.name.replace("tfevents.", "tfevents.0")))
    resumed = TensorBoardSink(tmp_path, resume_after=2)
    resumed.write(3, {"val/success_rate": 0.9})
    resumed.close()
    assert _scalars(tmp_path, "val/success_rate") == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.9)]


def test_wandb_offline_writes_into_the_run_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # W&B keeps caches and settings there
    monkeypatch.setattr(sys, "argv", ["vlarl", "train", "--reward.url", "http://h/score?token=s3cr3tT0ken"])
    for session in range(2):
        sink = WandbSink(tmp_path, project="vlarl", name="first", group="g", mode="offline", config={"seed": 1})
        sink.write(session, {"val/success_rate": 0.5})
        sink.close()
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert files and {path.name for path in files} == {f"run-{run_id}.wandb"}
    written = b"".join(path.read_bytes() for path in files)
    assert b"val/success_rate" in written
    assert b"http://h/score?token=***" in written and b"s3cr3tT0ken" not in written, "the command line is sent along"
    assert sys.argv[-1].endswith("s3cr3tT0ken")


def test_a_missing_wandb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises ImportError
    with pytest.raises(MissingExtraError, match=r"-e '\.\[wandb\]'"):
        WandbSink(tmp_path, project="vlarl", name="first")
    assert list(tmp_path.iterdir()) == []


def video(folder: Path, frames: int = 3) -> Video:
    path = folder / "iter_0007_task03_state31_success.mp4"
    path.write_bytes(b"a video")
    shades = tuple(np.full((64, 64, 3), 60 * i % 256, np.uint8) for i in range(frames))
    return Video(path, shades, "open the drawer", "success")


def test_tensorboard_plays_videos_of_one_episode_on_one_slider(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path / "events")
    sink.show(7, [video(tmp_path)])
    sink.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (event,) = events.Images("val/videos/task03_state31")
    image = Image.open(io.BytesIO(event.encoded_image_string))
    assert (event.step, image.format, image.n_frames) == (7, "GIF", 3)
    assert (event.width, event.height) == image.size


def test_a_long_video_is_shown_in_fewer_frames_and_the_same_time(tmp_path: Path) -> None:
    content, size = video(tmp_path, frames=2 * GIF_FRAMES).as_gif()
    image = Image.open(io.BytesIO(content))
    assert image.n_frames == GIF_FRAMES and image.size == size
    assert image.info["duration"] == 200  # milliseconds: every second frame of 10 per second
    image.seek(GIF_FRAMES - 1)
    assert abs(np.asarray(image.convert("RGB"))[100, 100].mean() - 60 * (2 * GIF_FRAMES - 1) % 256) < 8, "the last one"


def test_wandb_gets_the_file_and_the_last_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sink = WandbSink(tmp_path, project="vlarl", name="first", mode="offline")
    logged = []
    run, sink._run = sink._run, SimpleNamespace(log=logged.append)
    sink.show(7, [video(tmp_path)])
    run.log(logged[0])
    sink._run = run
    sink.close()
    (row,) = logged
    assert row["iteration"] == 7
    assert [v._caption for v in row["val/videos"]] == ["open the drawer: success"]
    media = {path.suffix: path for path in (tmp_path / "wandb").rglob("media/**/*.*")}
    assert media[".mp4"].read_bytes() == b"a video"
    assert Image.open(media[".png"]).size[0] == 320, "the last frame, with its caption"


def test_videos_that_wandb_refuses_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sink = WandbSink(tmp_path, project="vlarl", name="first", mode="offline")
    missing = replace(video(tmp_path), path=tmp_path / "missing.mp4")
    sink.show(7, [missing])
    sink.close()
    assert "did not take the videos" in caplog.text


def test_rows_alone_go_into_the_file_and_videos_stay_where_they_are(tmp_path: Path) -> None:
    with MetricLogger([JsonlSink(tmp_path / "metrics.jsonl")]) as metrics:
        metrics.show(0, [video(tmp_path)])
        metrics.show(0, [])
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def sample(text: str = "7", phase: str = "eval", images: tuple[str, ...] = ()) -> Sample:
    return Sample(
        7, phase, "prompts-t00-s003", 0, 3, "3 + 4?", images, text, "7", 1.0, {"format": 0.5}, True, 2, False
    )  # fmt: skip


def test_tensorboard_shows_samples_as_code_in_which_nothing_is_markup(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.show_samples(7, [sample("**7**\n# no title"), *[sample()] * SHOWN_SAMPLES])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("val/samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7 and text.count("response (reward 1.000, correct, 2 tokens):") == SHOWN_SAMPLES
    assert "prompt:\n\n    3 + 4?\n" in text and "\n\n    **7**\n    # no title\n" in text


def test_wandb_has_a_table_of_samples_and_an_axis_for_evaluations(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    sink = WandbSink(tmp_path, project="vlarl", name="first", mode="offline")
    logged: list[dict] = []
    run = sink._run
    sink._run = SimpleNamespace(log=logged.append)
    sink.show_samples(7, [sample(images=("red.png",))] * (SHOWN_SAMPLES + 1))
    sink.show_samples(7, [sample(phase="rollout")])
    sink.write(7, {"train/entropy": 0.5})
    sink.write(8, {"train/entropy": 0.5, "val/success_rate": 0.25})
    for row in logged:
        run.log(row)
    sink._run = run
    sink.close()
    evaluated, trained, no_evaluation, with_evaluation = logged
    table = evaluated["val/samples"]
    assert table.columns[:4] == ["iteration", "prompt", "images", "response"] and len(table.data) == SHOWN_SAMPLES
    row = dict(zip(table.columns, table.data[0], strict=True))
    assert (row["iteration"], row["response"], row["reward"], row["reward_parts"]) == (7, "7", 1.0, '{"format": 0.5}')
    assert len(row["images"]) == 1 and evaluated["val/iteration"] == 7
    assert len(trained["rollout/samples"].data) == 1 and "val/iteration" not in trained
    assert "val/iteration" not in no_evaluation and with_evaluation["val/iteration"] == 8
    assert list((tmp_path / "wandb").rglob("media/table/val/samples*.json"))


def test_wandb_plots_training_over_iterations_and_evaluations_over_their_own(tmp_path: Path, monkeypatch) -> None:
    import wandb

    class Recorded:
        def __init__(self) -> None:
            self.axes: dict[str, str | None] = {}

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            self.axes[name] = step_metric

    recorded = Recorded()
    monkeypatch.setattr(wandb, "init", lambda **settings: recorded)
    WandbSink(tmp_path, project="vlarl", name="first", mode="offline")
    assert recorded.axes == {"iteration": None, "*": "iteration", "val/iteration": None, "val/*": "val/iteration"}


def test_samples_that_wandb_refuses_are_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sink = WandbSink(tmp_path, project="vlarl", name="first", mode="offline")
    sink.show_samples(7, [sample(images=("missing.png",))])
    sink.close()
    assert "did not take the samples" in caplog.text


def test_samples_go_to_every_sink_and_no_samples_to_none(tmp_path: Path) -> None:
    with MetricLogger([JsonlSink(tmp_path / "metrics.jsonl")]) as metrics:
        metrics.show_samples(0, [sample()])
        metrics.show_samples(0, [])
    assert (tmp_path / "metrics.jsonl").read_text() == ""
