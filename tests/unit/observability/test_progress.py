import io
from pathlib import Path

import pytest
from rich.console import Console

from vlarl.config.words import PROMPT_WORDS
from vlarl.observability.clock import duration, duration_in_words
from vlarl.observability.log_file import log_to_file
from vlarl.observability.progress import Progress, sparkline
from vlarl.observability.samples import Sample

METRICS = {
    "rollout/success_rate": 0.714,
    "rollout/mean_return": 0.71,
    "rollout/env_steps_per_s": 2310.4,
    "train/approx_kl": 0.0041,
}


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("the reader has gone")


def _plain() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=False, width=40), stream


def test_plain_output_is_one_line_an_iteration_without_escapes() -> None:
    console, stream = _plain()
    with Progress(20, console) as progress:
        progress.evaluation(0, {"val/success_rate": 0.485}, 200)
        progress.rollout(64, 192)
        progress.update(1, 4)
        progress.iteration(1, METRICS)
        progress.note("saved [checkpoint]")
        progress.iteration(2, METRICS)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert lines[0] == "evaluation before training: success 48.5% of 200 episodes"
    start = "iteration  1/20  success  71.4%  val  48.5%  return 0.710  kl 0.0041  2310 env steps/s"
    assert lines[1].startswith(start) and "left" in lines[1]
    assert lines[2] == "saved [checkpoint]"
    assert len(lines) == 4


TEXTS = {
    "rollout/success_rate": 0.5,
    "rollout/mean_return": 0.25,
    "rollout/response_length": 45.25,
    "rollout/truncated_fraction": 0.03,
    "rollout/env_steps_per_s": 12.0,
    "time/iteration": 2.0,
}


def sample(response: str, success: bool) -> Sample:
    return Sample(
        3, "rollout", "x", 0, 1, "What is\n3 + 4?", ("a.png",), response, "7", 0.5, {}, success, 9, not success
    )  # fmt: skip


def test_prompts_are_shown_in_their_own_words_and_samples_in_lines_that_fit() -> None:
    console, stream = _plain()
    with Progress(20, console, words=PROMPT_WORDS) as progress:
        val = {"val/success_rate": 0.485, "val/response_length": 12.0, "val/truncated_fraction": 0.0}
        progress.evaluation(0, val, 200)
        progress.iteration(1, TEXTS)
        progress.sample(sample("\x1b[31m7\x1b[0m", success=True))
        progress.sample(sample("because " * 20, success=False))
        progress.evaluation(2, {"val/mean_reward": 0.25}, 8)
        progress.iteration(3, {"rollout/mean_return": 0.25})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "evaluation before training: accuracy 48.5% of 200 responses, 12.0 tokens"
    figures = "accuracy  50.0%  val  48.5%  reward 0.250  45.2 tokens, 3% cut off  12 responses/s  2.0 s"
    assert lines[1].startswith(f"iteration  1/20  {figures}")
    assert lines[2:5] == [
        "sample of iteration 3: reward 0.500, correct, 9 tokens",
        "  prompt    [1 image] What is 3 + 4?",
        "  response  7",
    ]
    assert lines[5] == "sample of iteration 3: reward 0.500, wrong, 9 tokens, cut off"
    assert lines[7] == "  response  because because because b…" and lines[8] == "  solution  7"
    assert lines[9] == "evaluation after iteration 2: reward 0.250 of 8 responses", "without solutions"
    assert lines[10].startswith("iteration  3/20  val  0.250  reward 0.250")


def test_plain_output_needs_no_metric() -> None:
    console, stream = _plain()
    with Progress(3, console) as progress:
        progress.iteration(1, {})
    assert stream.getvalue().startswith("iteration 1/3  ")


def test_the_live_display_shows_the_figures_and_restores_the_cursor_after_an_exception() -> None:
    stream = io.StringIO()
    console = Console(file=io.TextIOWrapper(buffer := io.BytesIO(), encoding="utf-8"), force_terminal=True, width=100)
    with pytest.raises(KeyError), Progress(20, console) as progress:
        progress.evaluation(0, {"val/success_rate": 0.485}, 200)
        progress.rollout(64, 192)
        progress.iteration(1, METRICS)
        raise KeyError("training failed")
    console.file.flush()
    text = buffer.getvalue().decode()
    for figure in ("1/20", "71.4%", "48.5%", "0.0041", "2,310", "elapsed"):
        assert figure in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert stream.getvalue() == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_closed_terminal_does_not_stop_training(is_terminal: bool) -> None:
    with Progress(2, Console(file=ClosedPipe(), force_terminal=is_terminal)) as progress:
        progress.iteration(1, METRICS)
        progress.note("still here")
        progress.iteration(2, METRICS)


@pytest.mark.parametrize("console", [_plain()[0], Console(file=ClosedPipe(), force_terminal=False), None])
def test_every_line_is_in_the_log(tmp_path: Path, console: Console | None) -> None:
    """Also with a live display, and after the display has failed."""
    if console is None:
        console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), force_terminal=True, width=100)
    with log_to_file(tmp_path / "log"), Progress(2, console) as progress:
        progress.evaluation(0, {"val/success_rate": 0.485}, 1)
        progress.iteration(1, METRICS)
        progress.note("saved")
        progress.training(2, {"train/loss": 0.5, "perf/train_samples_per_s": 10.0})
    lines = [line.partition("progress: ")[2] for line in (tmp_path / "log").read_text().splitlines()]
    lines = [line for line in lines if not line.startswith("the progress display stopped")]
    assert lines[0] == "evaluation before training: success 48.5% of 1 episode"
    assert lines[1].startswith("iteration 1/2  success  71.4%  val  48.5%")
    assert lines[2] == "saved" and lines[3].startswith("step 2/2  loss 0.5000")


def test_no_label_of_the_live_display_is_cut() -> None:
    text = io.StringIO()
    console = Console(file=text, width=100)
    progress = Progress(20, console)
    progress.evaluating(12_345, 23_456)
    console.print(progress.render())
    assert "  evaluation " in text.getvalue() and "12345/23456" in text.getvalue()


def test_sparkline_scales_zero_to_one() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0], width=3) == "▁▁█"
    assert sparkline([float("nan"), 2.0]) == "█"


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0, 42, 187, 3723)] == ["0:00", "0:42", "3:07", "1:02:03"]
    assert [duration_in_words(s) for s in (42, 187, 3723)] == ["42 s", "3 min 7 s", "1 h 2 min"]
