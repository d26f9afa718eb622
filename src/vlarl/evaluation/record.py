"""The folder of one evaluation, and how its results are written and read.

<folder>/  results.json     what was measured and how, success by task with intervals, every episode
           episodes.jsonl   one row per episode, written when it ends
           eval.log         warnings and errors
           videos/          videos, named by the episode's id and outcome
           samples.jsonl    of prompts: responses and rewards, with their images in samples/
           logs/            of an evaluation on a cluster: what its workers print

results.json exists from the beginning, with `complete: false`, and is written again at the end, whatever the cause of
the end. The results of a killed process are read from both files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from vlarl.config.training_data import run_of
from vlarl.errors import UsageError
from vlarl.json_files import read_json
from vlarl.observability.episodes import episode_row, read_episode
from vlarl.observability.files import read_jsonl, write_atomically
from vlarl.observability.run_dir import check_writable
from vlarl.observability.significance import wilson_interval
from vlarl.rollout.statistics import response_metrics
from vlarl.types import EvalResult, Task

SCHEMA = 1
LOGS = "logs"  # of the workers of a cluster


@dataclass(frozen=True)
class EvalSettings:
    """The settings of an evaluation. All but the machine and the time determine the result."""

    checkpoint: str
    fingerprint: str  # of the checkpoint's files
    suite: str
    protocol: str
    task_ids: tuple[int, ...]
    states_per_task: int
    max_steps: int  # time limit of an episode
    num_trained_states: int | None  # of these states of a task, those trained on; None: not known
    temperature: float
    seed: int
    replay_of: str | None  # id of the one episode that was run again
    env: dict[str, Any]
    gym: dict[str, Any]  # empty for any other suite
    policy: dict[str, Any]
    vlarl: str
    machine: str
    started: str
    # Evaluations of older versions lack these.
    init_states: tuple[int, ...] = ()  # of each task
    training_data_from: str | None = None  # the file that says what was trained on; None: not known
    warnings: tuple[str, ...] = ()  # that qualify the success rate
    prompts: dict[str, Any] = field(default_factory=dict)  # empty for any other suite
    rollout: dict[str, Any] = field(default_factory=dict)  # where texts end; empty for a robot
    suites: dict[str, dict[str, Any]] = field(default_factory=dict)  # of several suites, OF_SUITE of each; else empty
    protocols: dict[str, dict[str, Any]] = field(default_factory=dict)  # of both protocols, OF_PROTOCOL of each

    def each(self) -> list[EvalSettings]:
        """The settings of each suite, as of an evaluation of that suite alone."""
        if not self.suites:
            return [self]
        return [replace(self, suite=name, suites={}, **_as_tuples(own)) for name, own in self.suites.items()]

    def each_protocol(self) -> dict[str, EvalSettings]:
        """The settings of each of two protocols, as of an evaluation with that one alone; empty if it has one."""
        return {
            name: replace(self, protocol=name, protocols={}, **_as_tuples(own)) for name, own in self.protocols.items()
        }

    def protocol_states(self) -> dict[str, frozenset[tuple[str, int]]]:
        """Of two protocols, the states of each, with their suites; empty if there is one protocol."""
        found: dict[str, set[tuple[str, int]]] = {}
        for each in self.each():
            for name, part in each.each_protocol().items():
                found.setdefault(name, set()).update((each.suite, state) for state in part.init_states)
        return {name: frozenset(states) for name, states in found.items()}


OF_PROTOCOL = ("states_per_task", "num_trained_states", "init_states", "warnings")
"""Settings that two protocols of an evaluation have each for itself."""
OF_SUITE = (*OF_PROTOCOL, "task_ids", "max_steps", "protocols")
"""Settings that several suites of an evaluation have each for itself."""


def united_settings(parts: Mapping[str, EvalSettings]) -> EvalSettings:
    """The settings of several suites, by their names, as those of one evaluation."""
    each = list(parts.values())
    trained = [part.num_trained_states for part in each]
    return replace(
        each[0],
        suite="+".join(parts),
        task_ids=(),
        states_per_task=max(part.states_per_task for part in each),
        max_steps=max(part.max_steps for part in each),
        num_trained_states=None if None in trained else max(count or 0 for count in trained),
        init_states=tuple(sorted({state for part in each for state in part.init_states})),
        warnings=tuple(dict.fromkeys(warning for part in each for warning in part.warnings)),
        suites={name: {key: getattr(part, key) for key in OF_SUITE} for name, part in parts.items()},
        protocols={},
    )


def of_both_protocols(whole: EvalSettings, parts: Mapping[str, EvalSettings]) -> EvalSettings:
    """The settings of an evaluation on the states of two protocols, with those of each; a warning says of which."""
    warnings = [f"{name}: {warning}" for name, part in parts.items() for warning in part.warnings]
    each = {name: {key: getattr(part, key) for key in OF_PROTOCOL} for name, part in parts.items()}
    return replace(whole, warnings=tuple(warnings), protocols=each)


def _as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True)
class EvalRecord:
    """An evaluation: its settings and its results."""

    settings: EvalSettings
    num_planned: int
    result: EvalResult
    folder: Path | None = None

    def by_protocol(self) -> dict[str, EvalResult]:
        """The result with each of two protocols; empty if there is one."""
        return {name: of_states(self.result, own) for name, own in self.settings.protocol_states().items()}

    def to_json(self) -> dict[str, Any]:
        """The content of results.json."""
        result, by_suite = self.result, self.result.by_suite()
        both = {name: summary(part) for name, part in self.by_protocol().items()}
        return {
            "schema": SCHEMA,
            "complete": result.complete,
            **asdict(self.settings),
            "num_planned": self.num_planned,
            "total": summary(result),
            **({"totals": {name: summary(part) for name, part in by_suite.items()}} if self.settings.suites else {}),
            **({"by_protocol": both} if both else {}),
            "tasks": [
                {
                    **({"suite": suite} if self.settings.suites else {}),
                    "task_id": task_id,
                    "instruction": part.episodes[0].instruction,
                    **summary(part),
                }
                for suite, own in by_suite.items()
                for task_id, part in own.by_task().items()
            ],
            "episodes": [episode_row(episode) for episode in result.episodes],
        }


def of_states(result: EvalResult, states: Collection[tuple[str, int]]) -> EvalResult:
    """The episodes from these states, each given with its suite."""
    return replace(result, episodes=tuple(e for e in result.episodes if (e.task.suite, e.task.init_state) in states))


def summary(result: EvalResult) -> dict[str, Any]:
    """Successes, rate with Wilson's 95% interval and mean length; null where no episode could be run."""
    total = len(result.counted)
    low, high = wilson_interval(result.won, total)
    return {
        "won": result.won,
        "episodes": total,
        "crashed": result.num_crashed,
        "rate": result.success_rate if total else None,
        "low": low if total else None,
        "high": high if total else None,
        "mean_length": result.mean_length if total else None,
        **response_metrics([e.response for e in result.counted if e.response is not None]),
    }


@dataclass(frozen=True)
class EvalDirectory:
    """The files of one evaluation."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> EvalDirectory:
        """Make the folder of a new evaluation; an existing one is refused, unless it has only logs of workers that
        this evaluation has started."""
        if not path.is_dir() or [each.name for each in path.iterdir()] != [LOGS]:
            cls.refuse_existing(path)
        directory = cls(path)
        try:
            directory.videos.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"cannot write to {path} ({error.strerror}): name a folder you can write to.") from error
        return directory

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Refuse a folder that is there already or can't be made, before hours of episodes are run."""
        if path.exists():
            raise UsageError(f"{path} exists already, and results are never overwritten: name a new folder.")
        check_writable(path.parent, "name a folder you can write to")

    @property
    def results_file(self) -> Path:
        """The results."""
        return self.path / "results.json"

    @property
    def episodes_file(self) -> Path:
        """One row per episode."""
        return self.path / "episodes.jsonl"

    @property
    def log_file(self) -> Path:
        """Warnings and errors."""
        return self.path / "eval.log"

    @property
    def videos(self) -> Path:
        """Folder of videos of episodes."""
        return self.path / "videos"

    @property
    def data(self) -> Path:
        """Folder of saved episodes, a dataset for each suite."""
        return self.path / "data"

    @property
    def samples_file(self) -> Path:
        """Prompts, responses and rewards; there is none without prompts."""
        return self.path / "samples.jsonl"

    @property
    def sample_images(self) -> Path:
        """Folder of the images of these prompts."""
        return self.path / "samples"

    def write(self, record: EvalRecord) -> None:
        """Write results.json, in one atomic step."""
        write_atomically(self.results_file, json.dumps(record.to_json(), indent=2, allow_nan=False) + "\n")


def results_root(checkpoint: str) -> Path:
    """The folder for results of a checkpoint: its run's `eval`, or `evals` for a checkpoint outside a run."""
    run = run_of(checkpoint)
    return Path("evals") if run is None else run / "eval"


def new_folder(checkpoint: str, suite: str, now: datetime) -> Path:
    """A new folder for the results of a checkpoint, named by the time; it does not exist yet."""
    name = f"{now:%Y%m%d_%H%M%S}"
    if run_of(checkpoint) is None:
        label = re.sub(r"[^\w.-]+", "-", Path(checkpoint).name)
        name = f"{label}_{suite}_{name}"
    root = results_root(checkpoint)
    names = (name, *(f"{name}_{suffix}" for suffix in range(2, 1000)))
    return next(root / each for each in names if not (root / each).exists())


def read_record(folder: Path) -> EvalRecord:
    """The evaluation in a folder, including one that was stopped or killed before its end."""
    directory = EvalDirectory(folder)
    try:
        content = read_json(directory.results_file)
    except OSError as error:
        raise UsageError(
            f"{folder} is not an evaluation: its results.json can't be read ({error.strerror}). Name the folder that "
            "`vlarl eval` printed as `results:`."
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{directory.results_file} is not valid JSON ({error}): evaluate the checkpoint again."
        ) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(
            f"{directory.results_file} was not written by this version of vlarl, which reads schema {SCHEMA}: "
            "evaluate the checkpoint again."
        )
    try:
        return _record(content, directory)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"{directory.results_file} is damaged ({error!r}): evaluate the checkpoint again.") from error


def find_records(root: Path) -> Iterator[EvalRecord]:
    """The evaluations in the folders of a root, newest first; unreadable ones are skipped."""
    found = sorted(root.glob("*/results.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        try:
            yield read_record(path.parent)
        except UsageError:
            continue


_KINDS: dict[type | tuple[type, ...], tuple[str, ...]] = {  # types of the settings
    str: ("checkpoint", "fingerprint", "suite", "protocol", "vlarl", "machine", "started"),
    (str, type(None)): ("replay_of", "training_data_from"),
    int: ("states_per_task", "max_steps", "seed"),
    (int, float): ("temperature",),
    (int, type(None)): ("num_trained_states",),
    dict: ("env", "gym", "policy", "prompts", "rollout", "suites", "protocols"),
    tuple: ("task_ids", "init_states", "warnings"),
}


def _check_kinds(values: Mapping[str, Any]) -> None:
    for kind, names in _KINDS.items():
        for name in names:
            if name in values and not isinstance(values[name], kind):
                raise ValueError(f"{name} is {str(values[name])[:40]!r}")
    for name, kind in {"task_ids": int, "init_states": int, "warnings": str}.items():
        if not all(isinstance(each, kind) for each in values.get(name, ())):
            raise ValueError(f"{name} is {str(values[name])[:40]!r}")


def _record(content: Mapping[str, Any], directory: EvalDirectory) -> EvalRecord:
    required = [each.name for each in fields(EvalSettings) if each.default is each.default_factory is MISSING]
    known = (each.name for each in fields(EvalSettings) if each.name in content or each.name in required)
    values = {name: content[name] for name in known}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    _check_kinds(values | lists)
    settings = EvalSettings(**(values | lists))
    complete = content["complete"] is True
    # A killed process has written its episodes, but not the final results.
    rows = content["episodes"] if complete else list(read_jsonl(directory.episodes_file))
    settings.protocol_states()
    order = [each.suite for each in settings.each()]
    episodes = tuple(sorted((read_episode(row) for row in rows), key=lambda e: _place(e.task, order)))
    return EvalRecord(settings, int(content["num_planned"]), EvalResult(episodes, complete), directory.path)


def _place(task: Task, suites: Sequence[str]) -> tuple[int, int, int]:
    """Where an episode belongs in an evaluation of these suites."""
    return suites.index(task.suite) if task.suite in suites else len(suites), task.task_id, task.init_state
