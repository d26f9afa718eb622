"""The output of `vlarl eval` and `vlarl compare`: a counter while episodes run, tables at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from vlarl.config.paths import brief
from vlarl.config.state_choice import in_ranges
from vlarl.config.words import ROBOT_WORDS, SuiteWords, counted, plural, words_of
from vlarl.evaluation.compare import Comparison
from vlarl.evaluation.record import EvalRecord, EvalSettings
from vlarl.observability.clock import duration
from vlarl.observability.significance import wilson_interval
from vlarl.solutions import find_solution
from vlarl.types import EpisodeResult, EvalResult

LINES = 10  # progress lines of a whole evaluation, if the output is not a terminal
SILENCE_S = 60.0  # the longest time without a progress line
LISTED = 5  # unpaired episodes that are listed


class EpisodeCounter:
    """Shows the progress of an evaluation on stderr: a bar in a terminal, otherwise a line from time to time."""

    def __init__(self, label: str, console: Console | None = None, words: SuiteWords = ROBOT_WORDS) -> None:
        self._label = label
        self._words = words
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._place: TaskID | None = None
        self._won = self._counted = 0
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> EpisodeCounter:
        self._started = self._last_line = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            label, so_far = TextColumn("{task.description}"), TextColumn("{task.fields[so_far]}")
            self._bar = Progress(
                label, BarColumn(), MofNCompleteColumn(), so_far, console=self._console, transient=True
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, result: EpisodeResult, done: int, total: int) -> None:
        """Count a finished episode, the `done`-th of `total`."""
        self._won += result.outcome == "success"
        self._counted += result.outcome != "crashed"
        elapsed = time.monotonic() - self._started
        rate = f"{self._won / self._counted:.1%} {self._words.won}, " if self._counted else ""
        so_far = f"{rate}{duration(elapsed)} elapsed, {duration(elapsed / done * (total - done))} left"
        if self._bar is not None:
            if self._place is None:
                self._place = self._bar.add_task(self._label, total=total, so_far=so_far)
            self._bar.update(self._place, completed=done, so_far=so_far)
        elif done * LINES // total > (done - 1) * LINES // total or time.monotonic() - self._last_line > SILENCE_S:
            self._last_line = time.monotonic()
            self._console.print(
                f"{self._label}: {done}/{counted(total, self._words.episode)}, {so_far}",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )


def success_table(result: EvalResult) -> str:
    """Successes of each task and of all, with Wilson's 95% intervals and mean lengths, as aligned text."""
    parts, words = result.by_task(), words_of(result.episodes[0].task.suite)
    rows = [(str(i), *_cells(part), part.episodes[0].instruction) for i, part in parts.items()]
    head = ("task", words.won, words.success, "95% interval", words.length, words.instruction)
    return _aligned([head, *rows, ("all", *_cells(result), "")])


def closing_lines(record: EvalRecord, with_states: bool = True) -> list[str]:
    """Remarks on an evaluation below its table; a comparison has printed the states already."""
    result, settings, lines = record.result, record.settings, []
    words = words_of(settings.suite)
    if result.num_crashed:
        cause = "the simulator failed" if words is ROBOT_WORDS else "the prompt can't be used"
        lines.append(
            f"{result.num_crashed} of {counted(len(result.episodes), words.episode)} could not be run because {cause}, "
            f"and count neither as {words.won} nor as {words.lost}."
        )
    if num_retries := sum(e.num_retries for e in result.episodes):
        lines.append(f"{counted(num_retries, 'time')} an episode was retried because its simulator had died.")
    responses = [episode.response for episode in result.counted if episode.response is not None]
    if responses and all(find_solution(response.prompt.columns) is None for response in responses):
        lines.append("no prompt has a solution (prompts.solution_column), so the accuracy says nothing.")
    lines += states_lines(settings) if with_states else []
    if not result.complete:
        lines.append(
            f"interrupted: {len(result.episodes)} of {counted(record.num_planned, words.episode)} had finished and are "
            f"kept.{' Successes end first, so the rate may be too high.' if words is ROBOT_WORDS else ''}"
        )
    if record.folder is not None:
        lines.append(f"results: {brief(record.folder)}")
    return lines


def states_lines(settings: EvalSettings) -> list[str]:
    """Which initial states were used, whether they were trained on and which file says so, and the warnings."""
    lines = []
    if settings.init_states:
        trained, is_one = settings.num_trained_states, len(settings.init_states) == 1
        if trained is None:
            seen = f"whether {'it was' if is_one else 'they were'} trained on is not known"
        elif is_one:
            seen = f"it was {'' if trained else 'not '}trained on, says {settings.training_data_from}"
        else:
            verb = "was" if trained in (0, 1) else "were"
            seen = f"{trained or 'none'} of them {verb} trained on, says {settings.training_data_from}"
        state = words_of(settings.suite).state
        kind = f"{state}: index" if is_one else f"{plural(2, state)}: indices"
        tasks = "each task" if len(settings.task_ids) > 1 else f"task {settings.task_ids[0]}"
        lines.append(f"{kind} {in_ranges(settings.init_states)} of {tasks}; {seen}")
    return [*lines, *(f"warning: {warning}" for warning in settings.warnings)]


def comparison_table(comparison: Comparison) -> str:
    """Success of both on each task and on all, and the difference in points, as aligned text."""
    a, b = comparison.a.by_task(), comparison.b.by_task()
    rows = [(str(i), *_side_by_side(a[i], b[i]), a[i].episodes[0].instruction) for i in a]
    last = ("all", *_side_by_side(comparison.a, comparison.b), "")
    given = words_of(comparison.a.episodes[0].task.suite).instruction if a else ""
    return _aligned([("task", "A", "", "B", "", "B - A", given), *rows, last])


def comparison_lines(comparison: Comparison, a: EvalRecord, b: EvalRecord) -> list[str]:
    """The checkpoints A and B, the result of the test, and the episodes that could not be paired."""
    lines = [f"{name}: {brief(record.settings.checkpoint)}" for name, record in (("A", a), ("B", b))]
    lines.append(comparison.in_words())
    for name, other, unpaired in (("A", "B", comparison.unpaired_a), ("B", "A", comparison.unpaired_b)):
        if unpaired:
            more = f" and {len(unpaired) - LISTED} more" if len(unpaired) > LISTED else ""
            listed = ", ".join(unpaired[:LISTED])
            are = f"{counted(len(unpaired), 'episode')} of {name} {'is' if len(unpaired) == 1 else 'are'}"
            lines.append(f"{are} left out, because {other} has none: {listed}{more}")
    for name, record in (("A", a), ("B", b)):
        if not record.result.complete:
            of = counted(record.num_planned, "episode")
            lines.append(f"{name} is not complete: {len(record.result.episodes)} of {of}.")
        lines += [f"{name}: {line}" for line in states_lines(record.settings)]
    return lines


def _cells(result: EvalResult) -> tuple[str, str, str, str]:
    """won, success, interval, steps or tokens."""
    total = len(result.counted)
    if not total:
        return "0/0", "-", "-", "-"
    low, high = wilson_interval(result.won, total)
    interval = f"{100 * low:.1f} - {100 * high:.1f}%"
    length = result.mean_length if math.isnan(result.mean_tokens) else result.mean_tokens
    return f"{result.won}/{total}", f"{result.success_rate:.1%}", interval, f"{length:.1f}"


def _side_by_side(a: EvalResult, b: EvalResult) -> tuple[str, ...]:
    sides = (cell for part in (a, b) for cell in (f"{part.won}/{len(part.counted)}", f"{part.success_rate:.1%}"))
    return (*sides, f"{100 * (b.success_rate - a.success_rate):+.1f}")


def _aligned(table: Sequence[tuple[str, ...]]) -> str:
    """Right-aligned columns; the last one is left-aligned."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    lines = ("  ".join([*(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in table)
    return "\n".join(line.rstrip() for line in lines)
