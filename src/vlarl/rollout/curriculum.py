"""The success rate of each task, and how often each is sampled for training.

A task has the strongest learning signal where success and failure are equally likely: the variance of its outcome,
p(1 - p), is largest there, and a group of episodes is most likely to contain both. With s the moving success of a task
and w its weight in episodes,

    p        = (s w + 1) / (w + 2)                         Laplace's rule: few episodes stay near 1/2
    interest = (4 p (1 - p)) ^ (1 / tau)                   1 at 50%; 0 for a solved task that is skipped
    chance   = floor · mixture + (1 - floor) · mixture · interest / Σ (mixture · interest)

The mixture is the static part: equal weights, or `curriculum.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.schema import CurriculumConfig
from vlarl.errors import UsageError
from vlarl.json_files import read_json
from vlarl.observability.run_dir import RunDirectory

SOLVED = 0.9  # what counts as solved where no task is skipped

Probabilities = NDArray[np.float64]

TaskName = int | str
"""A task among those of a run: its index, or `libero_goal/3` where a run has several suites."""


def metric_name(task: TaskName) -> str:
    """The task in names of metrics: `task_03`, or `libero_goal/task_03`."""
    suite, _, task_id = str(task).rpartition("/")
    return f"{suite}/task_{int(task_id):02d}" if suite else f"task_{int(task_id):02d}"


@dataclass(frozen=True)
class TaskRecord:
    """The record of one task: a mean of its outcomes in which each episode counts `alpha` times the next one."""

    success: float = 0.0
    weight: float = 0.0  # effective episodes in the mean, at most 1 / (1 - alpha)
    episodes: int = 0

    def after(self, success: bool, alpha: float) -> TaskRecord:
        """The record with one more episode."""
        weight = alpha * self.weight + 1.0
        return TaskRecord(self.success + (success - self.success) / weight, weight, self.episodes + 1)

    @property
    def estimate(self) -> float:
        """The expected success, by Laplace's rule of succession: 1/2 for a task never tried."""
        return (self.success * self.weight + 1.0) / (self.weight + 2.0)


class Curriculum:
    """The records of the tasks, and the sampling probabilities that follow from them."""

    def __init__(self, config: CurriculumConfig, names: Sequence[TaskName]) -> None:
        self.config = config
        self.records = {name: TaskRecord() for name in names}
        weights = np.array(config.weights if config.weights is not None else [1.0] * len(names), dtype=np.float64)
        self._mixture: Probabilities = weights / weights.sum()  # [tasks]

    def record(self, task: TaskName, success: bool) -> None:
        """Take one episode into account."""
        self.records[task] = self.records[task].after(success, self.config.ema_alpha)

    def is_solved(self, task: TaskName) -> bool:
        """Whether the moving success is high enough, over at least 1 / (1 - alpha) episodes."""
        record, threshold = self.records[task], self.config.skip_solved_above
        has_enough = record.episodes * (1.0 - self.config.ema_alpha) >= 1.0 - 1e-9
        return has_enough and record.success > (SOLVED if threshold is None else threshold)

    def probabilities(self) -> Probabilities:
        """[tasks] the probability that the next group is of each task."""
        if self.config.mode != "adaptive":
            return self._mixture
        interest: Probabilities = self._mixture * np.array([self._interest(task) for task in self.records])
        if not interest.any():  # every task is solved
            return self._mixture
        floor = self.config.floor
        return np.asarray(floor * self._mixture + (1.0 - floor) * interest / interest.sum())

    def _interest(self, task: TaskName) -> float:
        if self.config.skip_solved_above is not None and self.is_solved(task):
            return 0.0
        expected = self.records[task].estimate
        return float((4.0 * expected * (1.0 - expected)) ** (1.0 / self.config.tau))

    def metrics(self) -> dict[str, float]:
        """The `curriculum/` metrics: the current records, and the probabilities for the next iteration."""
        probabilities = self.probabilities()
        row: dict[str, float] = {}
        for (task, record), probability in zip(self.records.items(), probabilities, strict=True):
            if record.episodes:
                row[f"curriculum/{metric_name(task)}_success"] = record.success
            row[f"curriculum/{metric_name(task)}_probability"] = float(probability)
        row["curriculum/entropy"] = entropy(probabilities)
        row["curriculum/num_solved"] = float(sum(self.is_solved(task) for task in self.records))
        return row

    def state(self) -> dict[str, Any]:
        """The records as JSON can hold them."""
        return {"tasks": {str(task): asdict(record) for task, record in self.records.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; a task that it lacks is unchanged, and one that only it has is left out."""
        saved = state.get("tasks", {})
        self.records |= {i: _parse_record(saved[str(i)]) for i in self.records if str(i) in saved}


def entropy(probabilities: Probabilities) -> float:
    """Entropy in nats: the logarithm of the number of tasks when all are equally likely, 0 when one is certain."""
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def sample_indices(probabilities: Probabilities, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` indices, shuffled; each occurs `count` times its probability, rounded up or down.

    One random offset decides how all are rounded (systematic sampling), so counts are far closer to the probabilities
    than with independent samples, and exact on average.
    """
    order = rng.permutation(len(probabilities))
    ends = np.cumsum(probabilities[order])
    points = (rng.random() + np.arange(count)) / count
    intervals = np.searchsorted(ends[:-1] / ends[-1], points, side="right")
    return np.asarray(rng.permutation(order[intervals]), dtype=np.int64)


def read_curriculum(source: Path, suites: Sequence[str]) -> dict[str, Any]:
    """The state in an earlier run's curriculum.json; `source` is the file or that run's folder.

    Records of a run on one suite are named by index alone, those of one on several by suite and index.
    """
    path = RunDirectory(source).curriculum_file if source.is_dir() else source
    remedy = "curriculum.start_from must name a run's folder, or its curriculum.json"
    try:
        content = read_json(path)
        others, tasks = content["suite"].split("+"), dict(content["tasks"])
        for saved in tasks.values():
            _parse_record(saved)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror or error}): {remedy}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a curriculum ({type(error).__name__}: {error}): {remedy}.") from error
    if not set(others) & set(suites):
        ours = f"env.suites are {', '.join(suites)}" if len(suites) > 1 else f"env.suite is {suites[0]}"
        raise UsageError(f"{path} is for {', '.join(others)}, and {ours}: these suites have different tasks.")
    whole = {name if len(others) > 1 else f"{others[0]}/{name}": saved for name, saved in tasks.items()}
    if len(suites) > 1:
        return {"tasks": whole}
    own = f"{suites[0]}/"
    return {"tasks": {name.removeprefix(own): saved for name, saved in whole.items() if name.startswith(own)}}


def _parse_record(saved: Mapping[str, Any]) -> TaskRecord:
    record = TaskRecord(float(saved["success"]), float(saved["weight"]), int(saved["episodes"]))
    if not (0.0 <= record.success <= 1.0 and 0.0 <= record.weight <= record.episodes + 1e-9):
        raise ValueError(f"not a mean of outcomes: {record}")
    return record
