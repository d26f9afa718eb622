"""Prompts that are too long are left out and counted, without decoding any image."""

import json
import logging

import pytest
from fakes.kinds import TextPolicy
from PIL import Image

from vlarl.config.schema import Config
from vlarl.decisions import Sampling
from vlarl.envs.build import build_pool
from vlarl.envs.prompts import media
from vlarl.errors import UsageError
from vlarl.rollout.epochs import build_task_sampler
from vlarl.rollout.usable import usable_spec, usable_tasks
from vlarl.types import Task


class Measuring(TextPolicy):
    """A word is a token, and so are ten pixels of an image's side."""

    def prompt_length(self, prompt):
        return len(prompt.text.split()) + sum((image.shape[0] + image.shape[1]) // 10 for image in prompt.images)


@pytest.fixture
def data(tmp_path):
    """Ten rows of 1 to 10 words; the first has an image of 20 x 30 pixels, five tokens."""
    Image.new("RGB", (30, 20)).save(tmp_path / "image.png")
    rows = [{"prompt": " ".join(["word"] * (n + 1)), "solution": "x"} for n in range(10)]
    rows[0]["image"] = "image.png"
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in rows[1:]))
    return tmp_path


def made(data, limit, **more):
    prompts = {"path": (str(data / "rows.jsonl"),), "eval_path": (str(data / "eval.jsonl"),), "max_tokens": limit}
    config = Config.model_validate({"env": {"suite": "prompts"}, "prompts": prompts | more})
    return config, build_pool(config.env, config.gym, 2, 64, "sparse", config.prompts)


def test_longer_prompts_are_dropped_and_counted(data, caplog, monkeypatch):
    config, pool = made(data, 5, weights=(2.0,))
    monkeypatch.setattr(media, "_pixels", None)  # an image that is decoded fails the test
    with caplog.at_level(logging.WARNING):
        spec = usable_spec(config, Measuring(), pool)
    assert spec.train_states == (1, 2, 3, 4), "the first one has an image besides its word"
    assert spec.eval_states == (10, 11, 12, 13) and spec.num_dropped == 6 + 5
    assert len(spec.repeats) == 4
    assert caplog.messages == ["11 prompts of more than 5 tokens (prompts.max_tokens) dropped, of 19"]
    sampler = build_task_sampler(config, spec)
    assert sampler.metrics()["rollout/dropped_prompts"] == 11.0
    assert {task.init_state for task in sampler.get_batch(1)} <= {1, 2, 3, 4}


class Strict(Measuring):
    """Refuses the word of the first row, and reads 9 tokens of prompt and text."""

    def prompt_length(self, prompt):
        if prompt.images:
            raise UsageError("the prompt ('word') is refused by the model's chat template: no images.")
        return super().prompt_length(prompt)

    def check_sampling(self, sampling, prompt_tokens=0):
        if prompt_tokens + sampling.max_tokens > 9:
            raise UsageError(f"prompts of {prompt_tokens} tokens: the model reads 9.")


def test_what_the_model_refuses_ends_the_run_before_it_starts_or_is_left_out(data, caplog):
    config, pool = made(data, None)
    rollout = config.rollout.model_copy(update={"max_tokens": 2})
    with pytest.raises(
        UsageError, match=r"rows.jsonl, row 0: the prompt \('word'\) is refused by.*prompts.on_error skip"
    ):
        usable_spec(config.model_copy(update={"rollout": rollout}), Strict(), pool)
    config, pool = made(data, None, on_error="skip")
    with caplog.at_level(logging.WARNING):
        spec = usable_spec(config.model_copy(update={"rollout": rollout}), Strict(), pool)
    assert spec.train_states == (1, 2, 3, 4, 5, 6) and spec.eval_states == tuple(range(10, 16))
    assert spec.num_dropped == 1 + 3 + 3 and spec.benchmark_states == spec.eval_states
    assert "row 7: prompts of 8 tokens: the model reads 9." in caplog.messages[1]
    assert caplog.messages[-1] == "7 prompts that can't be used dropped, of 19"


def test_if_the_model_refuses_all_the_reason_is_said(data):
    config, pool = made(data, None, on_error="skip")
    with pytest.raises(
        UsageError, match="19 of 19 prompts can't be used, and none is left to train on: .*row 0: .*reads"
    ):
        usable_spec(config, TextPolicy(), pool)


def test_videos_are_not_decoded_to_be_measured_without_a_limit(tmp_path, monkeypatch):
    rows = [{"prompt": "what happens", "solution": "x"} | ({"video": "video.mp4"} if n == 0 else {}) for n in range(3)]
    (tmp_path / "video.mp4").write_bytes(b"")
    for name in ("rows", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config, pool = made(tmp_path, None)
    assert usable_spec(config, Measuring(), pool).train_states == (0, 1, 2)


def test_a_limit_that_leaves_nothing_is_refused(data):
    config, pool = made(data, 1)
    with pytest.raises(UsageError, match="prompts.max_tokens = 1: 19 of 19 prompts are longer.* left to train on"):
        usable_spec(config, Measuring(), pool)


def test_an_image_that_can_not_be_read_is_found_when_the_run_starts(data):
    (data / "image.png").write_bytes(b"not an image")
    config, pool = made(data, 5)
    with pytest.raises(UsageError, match="rows.jsonl, row 0 "):
        usable_spec(config, Measuring(), pool)
    config, pool = made(data, 5, on_error="skip")
    assert usable_spec(config, Measuring(), pool).train_states == (1, 2, 3, 4)


def test_an_evaluation_leaves_them_out(data):
    config, pool = made(data, 5)
    tasks = [Task("prompts", 0, state, 0) for state in (10, 13, 14)]
    assert usable_tasks(tasks, config.prompts, Measuring(), pool, Sampling(1.0)) == tasks[:2]
    with pytest.raises(UsageError, match="prompts.max_tokens = 5: 1 of 1 prompt are longer"):
        usable_tasks(tasks[2:], config.prompts, Measuring(), pool, Sampling(1.0))
