"""The report of a run on prompts: samples before and after, in the words of texts, and nothing of robots."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes.responses import prompt_of, responded

from vlarl.config.training_data import TrainingData, write_training_data
from vlarl.observability.report import write_report
from vlarl.observability.report.samples import MAX_PROMPTS, MAX_TEXT
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.samples import SampleRecorder
from vlarl.observability.sinks import JsonlSink
from vlarl.rollout.recorder import EpisodeRecorder
from vlarl.rollout.statistics import evaluation_metrics
from vlarl.types import EpisodeResult, EvalResult

EVIL = "</script></pre><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
RED = np.full((8, 8, 3), (255, 0, 0), np.uint8)


class PromptRun:
    """A run on prompts, as training leaves it."""

    def __init__(self, folder: Path, suite: str = "prompts_arithmetic") -> None:
        self.run = RunDirectory.create(folder, "first")
        self.run.config_file.write_text(f"env:\n  suite: {suite}\n  protocol: disjoint\nrun:\n  seed: 0\n")
        (self.run.checkpoints / "final").mkdir()
        write_training_data(self.run.checkpoints / "final", TrainingData())
        self.run.write_status("finished", 2, 2)

    def evaluate(self, iteration: int, episodes: Sequence[EpisodeResult]) -> None:
        sink = JsonlSink(self.run.metrics_file)
        row = {"rollout/response_length": 4.0, "rollout/mean_length": 1.0, "rollout/env_steps_per_s": 3.0}
        sink.write(iteration, row | {"rollout/mean_return": 0.5} | evaluation_metrics(EvalResult(tuple(episodes))))
        sink.close()
        with EpisodeRecorder(self.run) as recorder, SampleRecorder(self.run) as samples:
            recorder.record(iteration, "eval", episodes)
            samples.record(iteration, "eval", episodes)

    def report(self) -> str:
        return write_report(self.run.path).read_text()


@pytest.fixture
def made(tmp_path: Path) -> PromptRun:
    return PromptRun(tmp_path)


def text_of(html: str) -> str:
    body = html[html.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def graded(wrong: int, right: int, **fields: object) -> list[EpisodeResult]:
    prompts = [prompt_of(f"What is {i} plus 1?", f"{i + 1}") for i in range(wrong + right)]
    return [
        responded(f"It is {i + (i >= wrong)}", prompt, i >= wrong, float(i >= wrong), i, task_id=i % 2, **fields)
        for i, prompt in enumerate(prompts)
    ]


def test_a_prompt_is_shown_with_what_was_written_before_and_after(made):
    before = responded("bleu", prompt_of("Which colour?", "red", RED), False, 0.0, 7, 5, cut_off=True)
    after = responded("red", before.response.prompt, True, 1.25, 7, 2, reward_parts={"my:format": 0.25})
    made.evaluate(0, [before])
    made.evaluate(2, [after])
    html = made.report()
    text = text_of(html)
    assert (
        "1 of the 1 evaluated prompts in samples.jsonl , with what the policy wrote before and after training." in text
    )
    assert "Which colour? solution: red before wrong bleu reward 0 &middot; 5 tokens, cut off after correct red" in text
    assert "reward 1.25 (my:format 0.25) &middot; 2 tokens" in text
    (image,) = (made.run.sample_images).iterdir()
    assert html.count(f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}") == 1


def test_the_words_are_those_of_texts(made):
    made.evaluate(0, graded(90, 10))
    made.evaluate(2, graded(20, 80))
    html = made.report()
    text = text_of(html)
    assert "Greedy accuracy rose from 10.0% to 80.0% , measured on 100 prompts that were held out of training." in text
    assert "Of the 90 responses that were wrong before, 70 are now correct; none went the other way." in text
    assert f"{MAX_PROMPTS} of the 100 evaluated prompts" in text and html.count('<div class="sample">') == MAX_PROMPTS
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", html)
    assert titles == ["Accuracy", "Reward", "Reward in evaluation", "Response length"]
    for word in ("environment step", "Episodes", "video", "initial state", "robot", "success", "Success"):
        assert word not in text, word


def test_prompts_without_solutions_are_judged_by_their_reward(made):
    def poems(reward: float) -> list[EpisodeResult]:
        return [responded("roses are red", prompt_of("Write a poem."), False, reward, i) for i in range(4)]

    made.evaluate(0, poems(0.25))
    made.evaluate(2, poems(0.75))
    text = text_of(made.report())
    assert "The mean reward of evaluated responses is 0.750 after iteration 2, from 0.250 before training." in text
    assert "accuracy" not in text and "wrong" not in text and "0.0%" not in text
    assert "Reward over iterations. Evaluation is greedy;" in text


def test_no_text_of_a_prompt_or_a_policy_becomes_markup(made):
    evil = responded(EVIL, prompt_of(EVIL, EVIL, RED), True, 1.0, reward_parts={EVIL: 1.0})
    made.evaluate(0, [evil])
    made.evaluate(2, [evil])
    with SampleRecorder(made.run) as samples:
        samples.record(1, "rollout", [evil])
    html = made.report()
    assert "&lt;script&gt;" in html and "1 response of iteration 1, sampled for training" in html
    assert "<script" not in html and "onerror=alert(1)>" not in html
    assert all(re.fullmatch(r'<img alt="[a-z ]+" src="data:image/png;base64,[\w+/=]+">', tag) for tag in tags(html))


def tags(html: str) -> list[str]:
    found = re.findall(r"<img[^>]*>", html)
    assert found
    return found


def test_images_outside_of_the_run_are_not_shown(made, tmp_path):
    made.evaluate(0, [responded("a", prompt_of("x", None, RED))])
    (image,) = made.run.sample_images.iterdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    name = f"samples/{image.name}"
    rows = made.run.samples_file.read_text()
    for path in ("../secret.png", str(tmp_path / "secret.png"), "config.yaml", "samples/missing.png"):
        made.run.samples_file.write_text(rows.replace(name, path))
        assert "<img" not in made.report()
    image.unlink()
    image.symlink_to(tmp_path / "secret.png")
    made.run.samples_file.write_text(rows)
    assert "<img" not in made.report()


def test_long_texts_are_cut_and_a_run_without_samples_says_so(made):
    made.evaluate(0, graded(3, 1))
    made.run.samples_file.unlink()
    assert "No response was kept ( logging.samples )." in text_of(made.report())
    with SampleRecorder(made.run) as samples:
        samples.record(0, "eval", [responded("y" * (MAX_TEXT + 50), prompt_of("x"))])
    html = made.report()
    assert "y" * MAX_TEXT + "…" in html and "y" * (MAX_TEXT + 1) not in html
    assert "There is no later evaluation yet." in html


def test_the_users_rows_are_one_task_and_held_out_of_their_run(tmp_path):
    made = PromptRun(tmp_path, "prompts")
    one_task = [responded("8", prompt_of(f"{i}?", "7"), False, 0.0, i) for i in range(3)]
    made.evaluate(0, one_task)
    made.evaluate(2, one_task)
    text = text_of(made.report())
    assert "Greedy accuracy stayed at 0.0% , measured on 3 prompts that were held out of training." in text
    assert "Tasks Grey" not in text
