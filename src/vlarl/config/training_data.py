"""Which suites, tasks and initial states a checkpoint was trained on: `training_data.json`, beside every saved policy.

    vlarl train, finetune ──► policy.training_data ──► training_data.json ──► a copy, `vlarl merge`, a run that starts
                                                                              from it, `vlarl eval`

The file is data: it is validated, and nothing that it names is imported or called. For a checkpoint without the file,
the config.yaml of its run says what it was trained on, as long as it is in the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vlarl.config.finetune import DemoConfig
from vlarl.config.known import BUILTINS, GYM, SUITES
from vlarl.config.metaworld_tasks import METAWORLD_TASKS
from vlarl.config.schema import Config, EnvConfig, GymConfig
from vlarl.config.source.yaml_file import read_document
from vlarl.config.suites import StateProtocol, SuiteStates, each_suite, suite_facts
from vlarl.errors import UsageError

FILE_NAME = "training_data.json"
FORMAT = 1

Index = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # printable


class TrainedOn(BaseModel):
    """What one run trained on: `{"by": "train", "suite": "libero_goal", "protocol": "disjoint", "task_ids": [0, 1],
    "states": [0, 1, 2]}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    by: Literal["train", "finetune"]
    suite: Name
    gym_env: Name | None = None  # the environment of suite gym; it is compared, never imported
    protocol: StateProtocol | None = None  # env.protocol of the run; None: demonstrations
    task_ids: tuple[Index, ...] | None = None  # None: not known
    states: tuple[Index, ...] | None = None  # initial states of each task; None: not known

    def has_task(self, suite: str, gym_env: str | None, task_id: int) -> bool:
        """Whether the run may have trained on a task. Suites of Meta-World share tasks and their initial states."""
        names, own = METAWORLD_TASKS.get(suite, ()), METAWORLD_TASKS.get(self.suite, ())
        if names and own:
            trained = own if self.task_ids is None else [own[i] for i in self.task_ids if i < len(own)]
            return task_id < len(names) and names[task_id] in trained
        is_suite = self.suite == suite and (suite != GYM or self.gym_env == gym_env)
        return is_suite and (self.task_ids is None or task_id in self.task_ids)


class _Content(BaseModel):
    """The content of training_data.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]  # Literal[1] would take true and 1.0, which equal it
    trained_on: tuple[TrainedOn, ...]
    unknown: tuple[Name, ...]


@dataclass(frozen=True)
class TrainingData:
    """What a policy was trained on, run by run; without entries, its weights are fresh."""

    runs: tuple[TrainedOn, ...] = ()  # the newest is the last
    unknown: tuple[str, ...] = ()  # checkpoints and datasets it comes from whose states are not known
    read_from: str = field(default="", compare=False)  # the file that this was read from

    def __post_init__(self) -> None:
        """Refuse values that could not be read back from the file: at the start of a run, not when it is saved."""
        try:
            _Content(format=FORMAT, trained_on=self.runs, unknown=self.unknown)
        except ValidationError as error:
            raise UsageError(
                f"{FILE_NAME} cannot hold what the policy was trained on ({_reason(error)}): rename the checkpoint or "
                "dataset, without control characters."
            ) from error

    def plus(self, runs: Iterable[TrainedOn], unknown: Iterable[str] = ()) -> TrainingData:
        """With further runs. Runs that are already listed are moved to the end, not repeated."""
        added = tuple(dict.fromkeys(runs))
        before = tuple(run for run in self.runs if run not in added)
        return replace(self, runs=before + added, unknown=tuple(dict.fromkeys((*self.unknown, *unknown))))

    def joined(self, other: TrainingData) -> TrainingData:
        """What both were trained on, the other one later."""
        return self.plus(other.runs, other.unknown)

    def on(self, suite: str, gym_env: str | None, task_id: int) -> tuple[TrainedOn, ...]:
        """The runs on a task."""
        return tuple(run for run in self.runs if run.has_task(suite, gym_env, task_id))

    def states(self, suite: str, gym_env: str | None, task_id: int) -> frozenset[int]:
        """The initial states of a task that were trained on, as far as that is known."""
        return frozenset(state for run in self.on(suite, gym_env, task_id) for state in run.states or ())

    def protocol(self, suite: str) -> StateProtocol | None:
        """The protocol of the newest run on a suite that had one."""
        return next((run.protocol for run in reversed(self.runs) if run.suite == suite and run.protocol), None)

    @property
    def suite(self) -> str | None:
        """The suite of the newest run of `vlarl train`; without one, the only suite that was demonstrated."""
        demonstrated = {run.suite for run in self.runs}
        only = demonstrated.pop() if len(demonstrated) == 1 else None
        return next((run.suite for run in reversed(self.runs) if run.by == "train"), only)


def by_run(env: EnvConfig, gym: GymConfig) -> list[TrainedOn]:
    """What a run of `vlarl train` trains on, suite by suite."""
    return [by_training(one, gym) for one in each_suite(env)]


def by_training(env: EnvConfig, gym: GymConfig) -> TrainedOn:
    """What training on one suite trains on."""
    facts = suite_facts(env, gym)
    if facts is None or not facts.are_states_known:
        return TrainedOn(by="train", suite=env.suite, protocol=env.protocol)
    return TrainedOn(
        by="train",
        suite=env.suite,
        gym_env=gym.env if env.suite == GYM else None,
        protocol=env.protocol,
        task_ids=env.task_ids or tuple(range(facts.num_tasks)),
        states=SuiteStates.of(facts).trained(env.protocol),
    )


def by_demonstrations(demos: DemoConfig, *datasets: str) -> TrainingData:
    """What `vlarl finetune` trains on; `datasets` are the names of recorded episodes, mostly those of their suites.

    Their states are not known, except those of the tabletop, which only `vlarl data record` records. A dataset with any
    other name may be of any suite.
    """
    if not datasets:
        return TrainingData(tuple(_demonstrated(demos, suite) for suite in demos.suites if suite in SUITES))
    data = TrainingData()
    for dataset in datasets:
        facts = SUITES.get(dataset)
        if facts is None:
            data = data.plus((), (dataset,))
        else:
            states = None if facts.in_processes else SuiteStates.of(facts).train
            data = data.plus([TrainedOn(by="finetune", suite=dataset, states=states)])
    return data


def _demonstrated(demos: DemoConfig, suite: str) -> TrainedOn:
    facts = SUITES[suite]
    train = SuiteStates.of(facts).train[: demos.episodes_per_task]  # in turn, see data/demos.py
    return TrainedOn(
        by="finetune",
        suite=suite,
        task_ids=demos.task_ids or tuple(range(facts.num_tasks)),
        states=() if facts.demos_from_fresh_states else train,
    )


def write_training_data(folder: Path, data: TrainingData) -> None:
    """Write the file into a checkpoint's folder, a line for each run."""
    lines = [json.dumps(run.model_dump(mode="json", exclude_none=True)) for run in data.runs]
    runs = "".join(f"\n    {line}," for line in lines).removesuffix(",") + ("\n  " if lines else "")
    text = f'{{\n  "format": {FORMAT},\n  "trained_on": [{runs}],\n  "unknown": {json.dumps(list(data.unknown))}\n}}\n'
    (folder / FILE_NAME).write_text(text, encoding="utf-8")


def read_training_data(folder: Path) -> TrainingData | None:
    """Read the file in a folder; None if there is none. A malformed file is refused, with its name."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        content = _Content.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}): check its permissions.") from error
    except ValidationError as error:
        raise UsageError(
            f"{path} does not say what the checkpoint was trained on ({_reason(error)}): copy the file again from the "
            "checkpoint's origin, or move it away to evaluate without it."
        ) from error
    return TrainingData(content.trained_on, content.unknown, read_from=str(path))


def _reason(error: ValidationError) -> str:
    """The first error, and where it is."""
    detail = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    return f"{place}: {detail['msg']}" if place else detail["msg"]


def training_data_of(checkpoint: str | Path) -> TrainingData | None:
    """What a checkpoint on this machine was trained on: by its file and by its run; None if neither is there."""
    folder = local_folder(str(checkpoint))
    if folder is None:
        return TrainingData() if str(checkpoint).startswith("init:") else None
    data = _of_folder(folder, frozenset())
    in_file = data is not None and (folder / FILE_NAME).is_file()
    return replace(data, read_from=f"{checkpoint}/{FILE_NAME}") if data is not None and in_file else data


def local_folder(checkpoint: str) -> Path | None:
    """The folder of a built-in checkpoint or of one on this machine; None for any other name."""
    kind, _, name = checkpoint.partition(":")
    if kind == "builtin" and name in BUILTINS:
        return Path(str(files("vlarl") / "policies" / "builtin" / name))
    folder = Path(checkpoint).expanduser()
    return folder if folder.is_dir() else None


def run_of(checkpoint: str) -> Path | None:
    """The folder of the run that a checkpoint belongs to; None for any other checkpoint."""
    folder = Path(checkpoint).expanduser().resolve()
    run = folder.parent.parent
    is_of_run = folder.is_dir() and folder.parent.name == "checkpoints" and (run / "config.yaml").is_file()
    return run if is_of_run else None


def _of_folder(folder: Path, seen: frozenset[Path]) -> TrainingData | None:
    """`seen`: runs visited so far, which ends the recursion for runs that name each other."""
    data, run = read_training_data(folder), run_of(str(folder))
    if run is None or run in seen:
        return data
    path = run / "config.yaml"
    sections = {name: content for name, content in read_document(path).data.items() if isinstance(content, dict)}
    has_file = data is not None
    if data is None:  # saved by a version without this file
        data = _of_starts(sections, seen | {run}, str(path))
    try:
        if "demos" not in sections:
            return data.plus(_by_training(sections))
        demos = DemoConfig.model_validate(_only(sections["demos"], ("suites", "task_ids", "episodes_per_task", "path")))
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors(include_url=False)[0]["loc"])
        raise UsageError(f"{path} does not say what its run was trained on: {place} is not valid.") from error
    if demos.path is None:
        return data.joined(by_demonstrations(demos))
    return data if has_file else data.plus((), [demos.path])  # only the dataset knows its suite


def _of_starts(sections: Mapping[str, Any], seen: frozenset[Path], read_from: str) -> TrainingData:
    """What the initial checkpoints of a run were trained on."""
    data = TrainingData(read_from=read_from)
    starts = (sections.get("policy", {}).get("path", Config().policy.path), sections.get("lora", {}).get("adapter"))
    for start in (str(start) for start in starts if start is not None):
        folder = local_folder(start)
        fresh = TrainingData() if start.startswith("init:") else None
        before = fresh if folder is None else _of_folder(folder, seen)
        data = data.plus((), [start]) if before is None else data.joined(before)
    return data


def _by_training(sections: Mapping[str, Any]) -> list[TrainedOn]:
    names = ("suite", "suites", "suite_tasks", "protocol", "task_ids")
    env = EnvConfig.model_validate(_only(sections.get("env", {}), names))
    gym = GymConfig.model_validate(_only(sections.get("gym", {}), ("env", "num_states", "instructions")))
    return by_run(env, gym)


def _only(section: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: section[name] for name in names if name in section}
