"""The output of `vlarl eval` and `vlarl compare`: a counter while episodes run, tables at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
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


PROTOCOLS = {"disjoint": "held-out", "benchmark": "benchmark"}
NOTHING = EvalResult(())


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
    """Successes of each task, of each of several suites and of all, with Wilson's 95% intervals and mean lengths, as
    aligned text."""
    suites, words = result.by_suite(), words_of(result.episodes[0].task.suite)
    rows: list[tuple[str, ...]] = []
    for suite, own in suites.items():
        rows += [(str(i), *_cells(part), part.episodes[0].instruction) for i, part in own.by_task().items()]
        rows += [("all", *_cells(own), f"all of {suite}")] if len(suites) > 1 else []
    head = ("task", words.won, words.success, "95% interval", words.length, words.instruction)
    return _aligned([head, *rows, ("all", *_cells(result), "all suites" if len(suites) > 1 else "")])


def protocol_table(record: EvalRecord) -> str:
    """Successes of each task with each of two protocols, with Wilson's 95% intervals, as aligned text."""
    by_protocol = list(record.by_protocol().values())
    suites = record.result.by_suite()
    rows: list[tuple[str, ...]] = []
    for suite, own in suites.items():
        parts = [result.by_suite().get(suite, NOTHING).by_task() for result in by_protocol]
        rows += [
            (str(i), *_both(part.get(i, NOTHING) for part in parts), of_task.episodes[0].instruction)
            for i, of_task in own.by_task().items()
        ]
        if len(suites) > 1:
            rows.append(("all", *_both(r.by_suite().get(suite, NOTHING) for r in by_protocol), f"all of {suite}"))
    names = [PROTOCOLS[name] for name in record.by_protocol()]
    head = ("task", *(cell for name in names for cell in (name, "success", "95% interval")), "instruction")
    return _aligned([head, *rows, ("all", *_both(by_protocol), "all suites" if len(suites) > 1 else "")])


def _both(results: Iterable[EvalResult]) -> tuple[str, ...]:
    return tuple(cell for result in results for cell in _cells(result)[:3])


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
    return [line for each in settings.each() for line in _states_lines(each, bool(settings.suites))]


def _states_lines(settings: EvalSettings, is_one_of_several: bool) -> list[str]:
    if both := settings.each_protocol():
        parts = {PROTOCOLS[name]: _states_lines(part, is_one_of_several) for name, part in both.items()}
        return [f"{name}: {line}" for name, own in parts.items() for line in own]
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
        tasks += f" of {settings.suite}" if is_one_of_several else ""
        lines.append(f"{kind} {in_ranges(settings.init_states)} of {tasks}; {seen}")
    return [*lines, *(f"warning: {warning}" for warning in settings.warnings)]


def comparison_table(comparison: Comparison) -> str:
    """Success of both on each task and on all, and the difference in points, as aligned text; a table for each of two
    protocols."""
    if both := comparison.by_protocol():
        return "\n".join(f"{PROTOCOLS[name]} states\n{comparison_table(part)}" for name, part in both.items())
    suites = comparison.a.by_suite()
    rows: list[tuple[str, ...]] = []
    for suite, ours in suites.items():
        theirs = comparison.b.by_suite()[suite]
        a, b = ours.by_task(), theirs.by_task()
        rows += [(str(i), *_side_by_side(a[i], b[i]), a[i].episodes[0].instruction) for i in a]
        rows += [("all", *_side_by_side(ours, theirs), f"all of {suite}")] if len(suites) > 1 else []
    last = ("all", *_side_by_side(comparison.a, comparison.b), "all suites" if len(suites) > 1 else "")
    given = words_of(comparison.a.episodes[0].task.suite).instruction if suites else ""
    return _aligned([("task", "A", "", "B", "", "B - A", given), *rows, last])


def comparison_lines(comparison: Comparison, a: EvalRecord, b: EvalRecord) -> list[str]:
    """The checkpoints A and B, the result of the test, and the episodes that could not be paired."""
    lines = [f"{name}: {brief(record.settings.checkpoint)}" for name, record in (("A", a), ("B", b))]
    both = comparison.by_protocol()
    lines += [f"{PROTOCOLS[name]}: {part.in_words()}" for name, part in both.items()] or [comparison.in_words()]
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
