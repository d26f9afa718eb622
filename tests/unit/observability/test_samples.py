"""samples.jsonl: what is written, how much of it, and what is read back from a damaged file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.responses import prompt_of, responded
from PIL import Image

from vlarl.observability import samples
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.samples import Sample, SampleRecorder, evenly_chosen, read_samples, reduced
from vlarl.types import Prompt


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def image(shade: int, height: int = 20, width: int = 30) -> np.ndarray:
    return np.full((height, width, 3), shade, np.uint8)


def test_a_row_has_all_that_a_person_needs_to_judge_it(run):
    prompt = prompt_of("Which colour?", "red", image(3), image(5))
    episode = responded("It is red", prompt, True, 1.2, 1003, 4, task_id=1, reward_parts={"format": 0.2})
    failed = responded("blue", prompt, False, 0.0, 1004, 9, cut_off=True, reward_error="no reply")
    with SampleRecorder(run) as recorder:
        recorder.record(20, "eval", [episode, failed])
    row, other = (json.loads(line) for line in run.samples_file.read_text().splitlines())
    images = row.pop("images")
    assert row == {
        "iteration": 20, "phase": "eval", "episode_id": episode.task.episode_id, "task_id": 1, "init_state": 1003,
        "prompt": "Which colour?", "response": "It is red", "solution": "red", "reward": 1.2,
        "reward_parts": {"format": 0.2}, "success": True, "length": 4, "truncated": False,
    }  # fmt: skip
    assert [np.asarray(Image.open(run.path / name)).mean() for name in images] == [3, 5]
    assert other["images"] == images and len(list(run.sample_images.iterdir())) == 2, "each image is stored once"
    assert other["reward"] is None and other["truncated"]
    first, second = read_samples(run.samples_file)
    assert first == Sample(**row | {"images": tuple(images)})
    assert first.summary == "reward 1.200, correct, 4 tokens"
    assert second.summary == "the reward failed, wrong, 9 tokens, cut off"


def test_robots_leave_no_samples(run):
    episode = replace(responded("", prompt_of("")), response=None)
    with SampleRecorder(run) as recorder:
        assert recorder.record(1, "rollout", [episode]) == []
    assert not run.samples_file.exists() and not run.sample_images.exists()


def test_images_are_few_and_small_and_a_video_is_its_middle_frame():
    video = np.stack([image(shade) for shade in range(5)])
    prompt = Prompt(({"role": "user", "content": "x"},), (image(9, 1000, 500),) * 2, (video, video, video))
    found = reduced(prompt)
    assert [each.shape for each in found.images] == [(256, 128, 3)] * 2 + [(20, 30, 3)] * 2
    assert [each.mean() for each in found.images] == [9, 9, 2, 2] and found.videos == ()


def test_images_stop_at_the_limit_of_the_folder_and_texts_do_not(run, monkeypatch, caplog):
    noise = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
    episodes = [responded("a", prompt_of("x", None, pixels)) for pixels in noise]
    with SampleRecorder(run) as recorder:
        recorder.record(1, "rollout", episodes[:1])
        one = sum(path.stat().st_size for path in run.sample_images.iterdir())
    monkeypatch.setattr(samples, "FOLDER_BYTES", int(2.5 * one))
    with SampleRecorder(run) as recorder:  # a resumed run counts what is there
        found = recorder.record(2, "rollout", episodes[1:])
    assert [len(sample.images) for sample in found] == [1, 0, 0, 0]
    assert len(list(run.sample_images.iterdir())) == 2 and caplog.text.count("kept without images") == 1
    assert len(list(read_samples(run.samples_file))) == 5


def test_a_photograph_is_stored_as_jpeg_of_almost_the_same_pixels(run):
    y, x = np.mgrid[0:256, 0:256]
    rng = np.random.default_rng(0)
    photo = np.stack([x, y, (x + y) // 2], -1) + rng.normal(0, 6, (256, 256, 1))
    photo = photo.clip(0, 255).astype(np.uint8)
    with SampleRecorder(run) as recorder:
        (sample,) = recorder.record(1, "eval", [responded("a", prompt_of("x", None, photo))])
    (name,) = sample.images
    assert name.endswith(".jpg") and (run.path / name).stat().st_size < photo.nbytes / 4
    assert np.abs(np.asarray(Image.open(run.path / name), float) - photo).mean() < 6


def test_long_and_invalid_texts_are_kept_as_far_as_they_can_be_shown(run, monkeypatch):
    monkeypatch.setattr(samples, "TEXT_LENGTH", 10)
    with SampleRecorder(run) as recorder:
        recorder.record(1, "eval", [responded("a\ud800b" + "c" * 20, prompt_of("p" * 20, "s" * 20))])
    (sample,) = read_samples(run.samples_file)
    assert (sample.response, sample.prompt, sample.solution) == ("a?bccccccc", "p" * 10, "s" * 10)


def test_a_conversation_is_shown_with_its_roles():
    turns = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    )
    assert Prompt(turns).conversation == "system: Be brief.\n\nuser: What?"
    assert Prompt(turns[1:]).conversation == "What?"


def test_rows_that_are_not_samples_are_skipped(run):
    with SampleRecorder(run) as recorder:
        recorder.record(1, "eval", [responded("a", prompt_of("x"))])
    whole = json.loads(run.samples_file.read_text())
    wrong = [
        {"iteration": "1"}, {"iteration": True}, {"phase": "test"}, {"images": "a.png"}, {"images": [1]}, {"prompt": 3},
        {"reward": "1"}, {"reward_parts": {"a": "b"}}, {"reward_parts": []}, {"success": 1}, {"solution": 4},
    ]  # fmt: skip
    rows = [*(whole | each for each in wrong), {k: v for k, v in whole.items() if k != "response"}, whole | {"more": 1}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 3, "ph'
    run.samples_file.write_text(text.replace('"reward": 0.0', '"reward": 0.5') + "\nNaN\n")
    (found,) = read_samples(run.samples_file)
    assert found.reward == 0.5
    run.samples_file.write_text(json.dumps(whole).replace('"reward": 0.0', '"reward": Infinity') + "\n")
    assert list(read_samples(run.samples_file)) == []


def test_chosen_ones_are_evenly_distributed():
    assert evenly_chosen(8, 4) == [0, 2, 4, 6] and evenly_chosen(2, 4) == [0, 1]
    assert evenly_chosen(0, 4) == [] and evenly_chosen(4, 0) == []
