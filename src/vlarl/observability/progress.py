"""What the user sees while a run trains: a live display in a terminal, one plain line per iteration elsewhere.
Every line goes to the log of the run, too.

iteration       7/20  ━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  1:12 elapsed, 2:10 left
rollout      128/192  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━  episodes

success        71.4%  ▂▃▃▄▅▆▆ in training
               62.5%  evaluated after iteration 5 (200 episodes)
return         0.710  KL 0.0041    2,310 env steps/s
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vlarl.config.secrets import masked
from vlarl.config.words import ROBOT_WORDS, SuiteWords, counted, plural
from vlarl.observability.clock import duration
from vlarl.observability.samples import Sample
from vlarl.observability.terminal import printable

log = logging.getLogger(__name__)

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_WIDTH = 140  # columns of a sample's lines
_RECENT = 5  # iterations that the estimate of the remaining time uses
_Params = ParamSpec("_Params")


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Values between 0 and 1 as a row of blocks, the newest `width` of them."""
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(min(max(v, 0.0), 1.0) * top)] for v in values[-width:] if v == v)


def _never_fatal(
    method: Callable[Concatenate[Progress, _Params], None],
) -> Callable[Concatenate[Progress, _Params], None]:
    """An error of the terminal (a closed pipe) never stops training."""

    @wraps(method)
    def guarded(self: Progress, /, *args: _Params.args, **kwargs: _Params.kwargs) -> None:
        if self._broken:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._give_up(error)
        except SystemExit as error:
            # rich ends the process when its pipe closes (`vlarl train | head`).
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            self._give_up(error.__context__)

    return guarded


class Progress:
    """The display of one run. Use it as a context manager: the terminal is restored however the block ends."""

    def __init__(
        self, iterations: int, console: Console | None = None, start: int = 0, words: SuiteWords = ROBOT_WORDS
    ) -> None:
        """`start` is the iteration that a resumed run continues from, `words` those for its suite."""
        self._iterations = iterations
        self._words = words
        self._console = console or Console()
        encoding = (self._console.encoding or "").lower()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal and encoding.startswith("utf")
        self._live: Live | None = None
        self._broken = False
        self._started = self._last_end = time.monotonic()
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._begun = self._iteration = start
        self._metrics: dict[str, float] = {}
        self._rollout_success: list[float] = []
        self._val: tuple[int, str, int] | None = None  # iteration, success rate or reward, episodes
        self._phase: tuple[str, int, int, str] | None = None  # name, done, total, unit

    def expect(self, iterations: int) -> None:
        """Set how many iterations are expected; a run with a limit on environment steps updates this as it trains."""
        self._iterations = iterations

    def __enter__(self) -> Progress:
        self._started = self._last_end = time.monotonic()
        self._start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def evaluation(self, iteration: int, metrics: Mapping[str, float], num_episodes: int) -> None:
        """An evaluation of so many episodes has ended with these `val/` metrics; it stays on the screen."""
        name, figure = self._words.reward, f"{metrics.get('val/mean_reward', math.nan):.3f}"
        if "val/success_rate" in metrics:
            name, figure = self._words.success, f"{metrics['val/success_rate']:.1%}"
        self._val = (iteration, figure, num_episodes)
        self._phase = None
        if not self._durations:
            self._last_end = time.monotonic()  # the first iteration does not include the evaluation before training
        when = "before training" if iteration == 0 else f"after iteration {iteration}"
        of = f"of {counted(num_episodes, self._words.episode)}{_lengths(metrics, 'val')}"
        self._say(
            f"evaluation {when}: {name} {figure} {of}",
            Text.assemble(("  evaluation ", "dim"), f"{when}  ", (figure, "bold green"), (f"  {of}", "dim")),
        )
        for path, rate in metrics.items():
            match path.split("/"):
                case ["val", suite, "success_rate"]:  # there are several suites
                    self.note(f"  {suite}: {self._words.success} {rate:.1%}")

    def sample(self, sample: Sample) -> None:
        """A prompt and its response, in a few lines that stay on the screen."""
        when = "before training" if sample.iteration == 0 else f"of iteration {sample.iteration}"
        self.note(f"sample {when}{' (evaluation)' if sample.phase == 'eval' else ''}: {sample.summary}")
        images = f"[{counted(len(sample.images), 'image')}] " if sample.images else ""
        self.note(f"  prompt    {self._cut(images + sample.prompt)}")
        self.note(f"  response  {self._cut(sample.response)}")
        if sample.solution is not None and not sample.success:
            self.note(f"  solution  {self._cut(sample.solution)}")

    def _cut(self, text: str) -> str:
        """A text in one line that fits the terminal."""
        flat, width = " ".join(text.split()), max(20, min(self._console.width, MAX_WIDTH) - 14)
        return flat if len(flat) <= width else f"{flat[: width - 1]}…"

    @_never_fatal
    def evaluating(self, done_episodes: int, total_episodes: int) -> None:
        """Episodes of the current evaluation."""
        self._show_phase("evaluation", done_episodes, total_episodes, plural(2, self._words.episode))

    @_never_fatal
    def rollout(self, done: int, total: int, unit: str = "") -> None:
        """Episodes of the current rollout, or what it is counted in."""
        self._show_phase("rollout", done, total, unit or plural(2, self._words.episode))

    @_never_fatal
    def update(self, done: int, total: int) -> None:
        """Optimizer steps of the current update."""
        self._show_phase("update", done, total, "steps")

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """An iteration has ended with these metrics."""
        now = time.monotonic()
        self._durations.append(metrics.get("time/iteration", now - self._last_end))
        self._last_end = now
        self._iteration = iteration
        self._metrics = dict(metrics)
        self._phase = None
        if (success := metrics.get("rollout/success_rate")) is not None:
            self._rollout_success.append(success)
        self._say(self._plain_line())

    def training(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps of supervised training up to here, with their mean loss."""
        elapsed = time.monotonic() - self._started
        left = elapsed / max(step - self._begun, 1) * (self._iterations - step)
        self._iteration = step
        speed, loss = metrics["perf/train_samples_per_s"], metrics["train/loss"]
        of = f"step {step}/{self._iterations}"
        self._say(f"{of}  loss {loss:.4f}  {speed:.0f} samples/s  left {duration(left)}")

    def note(self, message: str) -> None:
        """A message that stays on the screen."""
        message = printable(masked(message))
        self._say(message, Text("  " + message))

    def render(self) -> RenderableType:
        """What the live display shows now."""
        return Group(Text(), self._bars(), Text(), self._figures(), Text())

    def _say(self, line: str, live: Text | None = None) -> None:
        """Write a line to the log, even when the display is broken; the live display shows `live`, or its new state."""
        log.info("%s", line)
        self._show(line, live)

    @_never_fatal
    def _show(self, line: str, live: Text | None) -> None:
        if self._live is None:
            self._print(line)
        elif live is not None:
            self._live.console.print(live)
        self._refresh()

    def _give_up(self, error: BaseException) -> None:
        self._broken = True
        log.warning("the progress display stopped: %r", error)

    @_never_fatal
    def _start(self) -> None:
        if self._is_live:
            self._live = Live(
                console=self._console, get_renderable=self.render, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start()

    def _stop(self) -> None:
        # Even a broken display must restore the cursor.
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.stop()
            except (Exception, SystemExit) as error:
                log.warning("the progress display did not end cleanly: %r", error)

    def _show_phase(self, name: str, done: int, total: int, unit: str) -> None:
        self._phase = (name, done, total, unit)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def _time_left(self) -> str:
        if not self._durations:
            return "-"
        seconds = (self._iterations - self._iteration) * sum(self._durations) / len(self._durations)
        # The current iteration has used some of it already.
        return duration(max(0.0, seconds - (time.monotonic() - self._last_end)))

    def _plain_line(self) -> str:
        m = self._metrics
        width = len(str(self._iterations))
        parts = [f"iteration {self._iteration:>{width}}/{self._iterations}"]
        if "rollout/success_rate" in m:
            parts.append(f"{self._words.success} {m['rollout/success_rate']:6.1%}")
        if self._val is not None:
            parts.append(f"val {self._val[1]:>6}")
        if "rollout/mean_return" in m:
            parts.append(f"{self._words.reward} {m['rollout/mean_return']:.3f}")
        if "train/approx_kl" in m:
            parts.append(f"kl {m['train/approx_kl']:.4f}")
        if "rollout/response_length" in m:
            parts.append(_lengths(m, "rollout").removeprefix(", "))
        if (speed := _speed(m)) is not None:
            parts.append(f"{speed:.0f} {self._words.speed}")
        parts.append(f"{self._durations[-1]:.1f} s")
        parts.append(f"left {self._time_left()}")
        return "  ".join(parts)

    def _bars(self) -> Table:
        table = _grid()
        table.add_column(width=min(44, max(10, self._console.width - 59)))
        table.add_column(no_wrap=True)
        elapsed = duration(time.monotonic() - self._started)
        table.add_row(
            "  iteration",
            Text(f"{self._iteration}/{self._iterations}", "bold"),
            _bar(self._iteration, self._iterations, "green"),
            Text(f"{elapsed} elapsed, {self._time_left()} left", "dim"),
        )
        name, done, total, unit = self._phase or ("", 0, 0, "")
        if name:
            table.add_row(
                Text(f"  {name}", "dim"), Text(f"{done}/{total}", "dim"), _bar(done, total, "cyan"), Text(unit, "dim")
            )
        else:
            # An empty row keeps the height, so that the display never jumps.
            table.add_row("", "", "", "")
        return table

    def _figures(self) -> Table:
        m = self._metrics
        table = _grid()
        table.add_column(no_wrap=True, overflow="ellipsis")
        line = Text()
        if self._rollout_success:
            line.append(sparkline(self._rollout_success), "green").append(" in training", "dim")
        table.add_row(f"  {self._words.success}", _figure(m.get("rollout/success_rate"), "{:.1%}", "bold"), line)
        if self._val is None:
            table.add_row("", Text("-", "dim"), "")
        else:
            iteration, figure, count = self._val
            when = "before training" if iteration == 0 else f"after iteration {iteration}"
            note = Text(f"evaluated {when} ({counted(count, self._words.episode)})", "dim")
            table.add_row("", Text(figure, "bold green"), note)
        details = Text()
        details.append("KL ", "dim").append(_figure(m.get("train/approx_kl"), "{:.4f}"))
        details.append("    ").append(_figure(_speed(m), "{:,.0f}")).append(f" {self._words.speed}", "dim")
        details.append(_lengths(m, "rollout").replace(", ", "    ", 1), "dim")
        table.add_row(f"  {self._words.reward}", _figure(m.get("rollout/mean_return"), "{:.3f}"), details)
        return table


def _grid() -> Table:
    """A table whose first two columns, labels and values, fit their longest entries and are never truncated."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=len("  evaluation"), no_wrap=True)
    table.add_column(min_width=9, justify="right", no_wrap=True)
    return table


def _bar(done: int, total: int, color: str) -> ProgressBar:
    return ProgressBar(
        total=max(total, 1), completed=done, complete_style=color, finished_style=color, style="bright_black"
    )


def _figure(value: float | None, form: str, style: str = "") -> Text:
    return Text("-", "dim") if value is None else Text(form.format(value), style)


def _lengths(metrics: Mapping[str, float], prefix: str) -> str:
    """`, 45.2 tokens, 3% cut off`; empty where there are no texts."""
    if (length := metrics.get(f"{prefix}/response_length")) is None:
        return ""
    fraction = metrics.get(f"{prefix}/truncated_fraction", 0.0)
    return f", {length:.1f} tokens" + (f", {fraction:.0%} cut off" if fraction else "")


def _speed(metrics: Mapping[str, float]) -> float | None:
    return metrics.get("rollout/env_steps_per_s")
