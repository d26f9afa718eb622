"""The data of a report, read from the files of a run: any file may be missing, and nothing is rendered here."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from vlarl.config.known import is_prompts
from vlarl.config.secrets import masked
from vlarl.config.state_choice import SeenStates, seen_by_run
from vlarl.config.training_data import FILE_NAME, TrainingData, read_training_data
from vlarl.config.words import SuiteWords, words_of
from vlarl.errors import UsageError
from vlarl.observability.files import read_jsonl
from vlarl.observability.run_dir import LARGEST_COUNT, RunDirectory
from vlarl.observability.samples import Sample, read_samples
from vlarl.observability.significance import wilson_interval

Series = list[tuple[float, float]]  # iteration, value

_CURRICULUM = re.compile(r"curriculum/task_(\d+)_probability")
_TRAINING_VIDEO = re.compile(r"rollout_(\d+)_(?:(\w+)_)?task(\d+)_state(\d+)_group\d+_\d+_(success|failure)\.mp4")
_VIDEO = re.compile(r"iter_(\d+)_(?:(\w+)_)?task(\d+)_state(\d+)_(success|failure)\.mp4")


@dataclass(frozen=True)
class Score:
    """Successes out of episodes."""

    won: int
    total: int

    @property
    def rate(self) -> float:
        """The fraction of successes."""
        return self.won / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval, which stays sensible near 0 and 1."""
        return wilson_interval(self.won, self.total)


@dataclass(frozen=True)
class Evaluation:
    """All evaluated episodes after one iteration."""

    iteration: int
    episodes: tuple[Mapping[str, Any], ...]

    @property
    def score(self) -> Score:
        """Over all tasks."""
        return _score(self.episodes)

    def per_task(self) -> dict[int, Score]:
        """task_id -> score."""
        tasks = sorted({int(e["task_id"]) for e in self.episodes})
        return {task: _score(e for e in self.episodes if int(e["task_id"]) == task) for task in tasks}

    def outcomes(self) -> dict[tuple[str, int, int], bool]:
        """(suite, task, initial state) -> success."""
        return {
            (str(e.get("suite")), int(e["task_id"]), int(e["init_state"])): bool(e["success"]) for e in self.episodes
        }

    def of_suite(self, suite: str) -> Evaluation:
        """The episodes of one of several suites."""
        return replace(self, episodes=tuple(e for e in self.episodes if e.get("suite") == suite))


@dataclass(frozen=True)
class Video:
    """One video."""

    path: Path
    iteration: int
    task_id: int
    init_state: int
    success: bool
    suite: str = ""  # where the run has several


@dataclass(frozen=True)
class RunData:
    """A run as its files describe it."""

    run: RunDirectory
    status: Mapping[str, Any]
    config: Mapping[str, Any]
    config_text: str
    metrics: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Evaluation, ...]
    videos: tuple[Video, ...]
    training_episodes: Mapping[tuple[str, int], int]  # suite and task_id -> episodes of training
    training: TrainingData | None  # what the run and its base were trained on; None: not known
    samples: tuple[Sample, ...] = ()  # prompts and responses; none of a robot
    training_videos: tuple[Video, ...] = ()  # of the newest iteration that has any

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites that the run was on."""
        several = self.option("env", "suites")
        if isinstance(several, list) and len(several) > 1:
            return tuple(str(suite) for suite in several)
        return (str(self.option("env", "suite")),)

    def states(self, evaluation: Evaluation) -> dict[str, list[tuple[int, int]]]:
        """(task, initial state) of the episodes of an evaluation, by suite."""
        several = len(self.suites) > 1
        parts = {suite: evaluation.of_suite(suite) if several else evaluation for suite in self.suites}
        return {suite: [(task, state) for _, task, state in part.outcomes()] for suite, part in parts.items()}

    def by_suite(self) -> dict[str, RunData]:
        """The run as each suite saw it; the whole run where it had one suite."""
        if len(self.suites) == 1:
            return {self.suites[0]: self}
        return {suite: self._of_suite(suite) for suite in self.suites}

    def _of_suite(self, suite: str) -> RunData:
        evaluations = (evaluation.of_suite(suite) for evaluation in self.evaluations)
        prefix = f"curriculum/{suite}/"
        return replace(
            self,
            evaluations=tuple(evaluation for evaluation in evaluations if evaluation.episodes),
            videos=tuple(video for video in self.videos if video.suite == suite),
            training_episodes={key: count for key, count in self.training_episodes.items() if key[0] == suite},
            metrics=tuple(
                {name.replace(prefix, "curriculum/", 1): value for name, value in row.items()} for row in self.metrics
            ),
        )

    def num_trained(self, task: int) -> int:
        """Episodes of training of a task, of one suite."""
        return sum(count for (_, task_id), count in self.training_episodes.items() if task_id == task)

    @property
    def is_of_prompts(self) -> bool:
        """Whether the policy wrote texts."""
        return is_prompts(str(self.option("env", "suite")))

    @property
    def is_supervised(self) -> bool:
        """Whether the run imitated demonstrations (`vlarl finetune`); then iterations are optimizer steps."""
        return "demos" in self.config

    @property
    def is_of_reward_model(self) -> bool:
        """Whether a supervised run trained a reward model."""
        return self.is_supervised and self.config.get("reward", {}).get("labels", "none") != "none"

    @property
    def is_judged(self) -> bool:
        """Whether success is known, which it is not of prompts without solutions."""
        evaluated = [row for row in self.metrics if "val/mean_reward" in row]
        return not self.is_of_prompts or not evaluated or any("val/success_rate" in row for row in evaluated)

    @property
    def words(self) -> SuiteWords:
        """What episodes and success are called."""
        return words_of(str(self.option("env", "suite")))

    @property
    def first(self) -> Evaluation | None:
        """The evaluation before training, if it ended."""
        known = self.evaluations if self.is_judged else ()
        return known[0] if known and known[0].iteration == 0 else None

    @property
    def last(self) -> Evaluation | None:
        """The latest evaluation after some training."""
        known = self.evaluations if self.is_judged else ()
        return known[-1] if known and known[-1].iteration > 0 else None

    @property
    def iteration(self) -> int:
        """The last iteration that any file mentions."""
        rows = [int(row["iteration"]) for row in self.metrics]
        return max([int(self.status.get("iteration") or 0), *rows])

    @property
    def seconds(self) -> float | None:
        """How long the run has worked; if it was resumed, only its metrics know."""
        iterations = self.series("time/iteration")
        if iterations:
            return sum(seconds for _, seconds in iterations)
        started, updated = self.status.get("started"), self.status.get("updated")
        return float(updated) - float(started) if started and updated else None

    @property
    def instructions(self) -> dict[int, str]:
        """task_id -> the instruction."""
        episodes = (e for evaluation in self.evaluations for e in evaluation.episodes)
        return {int(e["task_id"]): str(e["instruction"]) for e in episodes if e.get("instruction")}

    @property
    def curriculum_tasks(self) -> list[int]:
        """The tasks that the curriculum kept records of."""
        matches = (_CURRICULUM.fullmatch(name) for row in self.metrics for name in row)
        return sorted({int(match[1]) for match in matches if match})

    def series(self, name: str) -> Series:
        """The finite points of one metric."""
        points = ((float(row["iteration"]), row.get(name)) for row in self.metrics)
        return [(x, float(y)) for x, y in points if isinstance(y, (int, float)) and abs(y) <= sys.float_info.max]

    def option(self, section: str, name: str) -> Any:
        """A value of the configuration, or None."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    @property
    def decoding(self) -> str:
        """How evaluated episodes chose their actions: greedy or sampled."""
        return "sampled" if self.option("eval", "temperature") else "greedy"

    @property
    def seen(self) -> SeenStates:
        """Whether the run or its base was trained on the initial states of its newest evaluation."""
        evaluation = self.last or self.first
        episodes = self.states(evaluation) if evaluation is not None else dict.fromkeys(self.suites, ())
        return seen_by_run(self.training, self.option("gym", "env"), self.option("env", "protocol"), episodes)

    def video_pairs(self) -> list[tuple[Video | None, Video | None]]:
        """Videos of the same task and initial state before training and at the end."""
        last = max((v.iteration for v in self.videos), default=0)
        before = {(v.suite, v.task_id, v.init_state): v for v in self.videos if v.iteration == 0}
        after = {(v.suite, v.task_id, v.init_state): v for v in self.videos if v.iteration == last and last > 0}
        return [(before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())]


def load_run(path: Path) -> RunData:
    """Read the files of a run; what is missing or incomplete is left out."""
    run = RunDirectory.open(path)
    text = ""
    if run.config_file.is_file() and is_inside(run.config_file, run.path):
        text = masked(run.config_file.read_text(encoding="utf-8", errors="replace"))
    return RunData(
        run=run,
        status=run.read_status(),
        config=_parse(text),
        config_text=text,
        metrics=tuple(row for row in read_jsonl(run.metrics_file) if _is_count(row.get("iteration"))),
        evaluations=_evaluations(run.episodes_file),
        videos=_videos(run, _VIDEO),
        training_videos=_of_the_last(_videos(run, _TRAINING_VIDEO)),
        training_episodes=_training_episodes(run.episodes_file),
        training=newest_training_data(run.checkpoints),
        samples=tuple(read_samples(run.samples_file)) if is_inside(run.samples_file, run.path) else (),
    )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is really in the folder, not a link to one elsewhere: a report is sent to others."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def _parse(text: str) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError):  # `!!bool maybe` is a KeyError
        return {}
    return config if isinstance(config, dict) else {}


def _evaluations(path: Path) -> tuple[Evaluation, ...]:
    """Evaluated episodes by iteration, without those that crashed: they say nothing about the policy."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in read_jsonl(path):
        counts = (row.get(name) for name in ("iteration", "task_id", "init_state"))
        is_whole = all(map(_is_count, counts)) and isinstance(row.get("success"), bool)
        if row.get("phase") == "eval" and is_whole and row.get("status") != "crashed":
            found.setdefault(int(row["iteration"]), []).append(row)
    return tuple(Evaluation(iteration, tuple(rows)) for iteration, rows in sorted(found.items()))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def _training_episodes(path: Path) -> dict[tuple[str, int], int]:
    rows = (row for row in read_jsonl(path) if row.get("phase") == "rollout" and _is_count(row.get("task_id")))
    return dict(Counter((str(row.get("suite")), int(row["task_id"])) for row in rows))


def newest_training_data(checkpoints: Path) -> TrainingData | None:
    """The training data that the newest checkpoint of a run records; None where there is none, or it is not valid."""
    for path in sorted(checkpoints.glob(f"[!.]*/{FILE_NAME}"), key=_time_written, reverse=True):
        try:
            if (data := read_training_data(path.parent)) is not None:
                return data
        except UsageError:
            return None
    return None


def _time_written(path: Path) -> float:
    """0 for a file of a checkpoint that the run has deleted in the meantime."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _videos(run: RunDirectory, names: re.Pattern[str]) -> tuple[Video, ...]:
    matches = ((path, names.fullmatch(path.name)) for path in sorted(run.videos.glob("*.mp4")))
    return tuple(
        Video(path, int(m[1]), int(m[3]), int(m[4]), m[5] == "success", m[2] or "")
        for path, m in matches
        if m and is_inside(path, run.path)
    )


def _of_the_last(videos: tuple[Video, ...]) -> tuple[Video, ...]:
    last = max((video.iteration for video in videos), default=0)
    return tuple(video for video in videos if video.iteration == last)


def _score(episodes: Iterable[Mapping[str, Any]]) -> Score:
    outcomes = [bool(e["success"]) for e in episodes]
    return Score(sum(outcomes), len(outcomes))
