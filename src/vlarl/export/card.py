"""The model card of a pushed checkpoint: what it is, how it was trained, its success rates, how to load it.

Everything is read from the checkpoint's folder and from its run. Unknown facts are left out, never guessed. Paths of
this machine are shortened to their last part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vlarl import __version__
from vlarl.config.known import PROMPTS, SUITES, is_prompts
from vlarl.config.run_checkpoints import HUB_ID
from vlarl.config.schema import Config
from vlarl.config.state_choice import in_ranges, state_warnings
from vlarl.config.training_data import TrainedOn, TrainingData, run_of, training_data_of
from vlarl.config.words import counted, plural
from vlarl.errors import install_command
from vlarl.evaluation.record import EvalRecord
from vlarl.json_files import read_object
from vlarl.observability.report.data import Evaluation, RunData, load_run
from vlarl.observability.significance import wilson_interval
from vlarl.policies.adapters import base_of, is_adapter
from vlarl.policies.locate import BUILTIN

AVERAGE, BEST = "ema", "best_return"  # checkpoints of the averaged weights, and of the best training return
LEFT_OUT = ("logging", "distributed")  # sections about where a run ran, not about what was trained
PRIVATE = ("run.name", "run.root", "run.device", "run.num_threads", "reward.url", "reward.urls", "reward.headers_env")


@dataclass(frozen=True)
class Source:
    """A checkpoint to be pushed, and what is known about it."""

    folder: Path
    run: RunData | None  # the run that it belongs to
    training: TrainingData | None  # what it was trained on; None: not known
    base: str | None  # what it was trained from: a hub id, a built-in name or a path; None: not known
    records: tuple[EvalRecord, ...] = ()  # evaluations of this checkpoint by `vlarl eval`

    @classmethod
    def of(cls, folder: Path, records: Sequence[EvalRecord] = ()) -> Source:
        """Read a checkpoint's folder and its run."""
        path = run_of(str(folder))
        run = None if path is None else load_run(path)
        return cls(folder, run, training_data_of(folder), _base(folder, run), tuple(records))

    @property
    def writes_texts(self) -> bool:
        """Whether it is a language or vision-language model that was trained on prompts."""
        return self.training is not None and any(is_prompts(run.suite) for run in self.training.runs)

    @property
    def reads_images(self) -> bool:
        """Whether there is a processor of images beside it."""
        return (self.folder / "preprocessor_config.json").is_file()

    @property
    def iterations(self) -> int | None:
        """The iterations that these weights were trained for; None: not known."""
        if self.folder.name == AVERAGE:
            return _count(self.folder / "metadata.json", "training_step")
        return _count(self.folder / "trainer.json", "iteration")

    @property
    def updates(self) -> int | None:
        """The policy updates by reinforcement learning that these weights had; None: not known."""
        if self.run is None:
            return None
        counters = "metadata.json" if self.folder.name in (AVERAGE, BEST) else "trainer.json"
        return _count(self.folder / counters, "policy_updates")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings before a push: weights that no update has changed, an adapter whose base is not public."""
        found = [] if self.updates != 0 else [f"{_unchanged(self)}. The model card says so."]
        if is_adapter(self.folder) and self.base is not None and not _is_public(self.base):
            found.append(
                f"this is an adapter on {self.base}, which only this machine has: others cannot load it. Push that "
                f"model too and name it as the adapter's base, or push both as one: `vlarl merge {self.folder} OUT`, "
                "then `vlarl push OUT ORG/NAME`."
            )
        return tuple(found)


def model_card(source: Source, repo_id: str) -> str:
    """The text of README.md for the repository."""
    sections = [
        _front_matter(source),
        f"# {repo_id.partition('/')[2]}\n\n{_introduction(source)}",
        _success(source),
        _loading(source, repo_id),
        _training(source),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(source: Source) -> str:
    tags = ["robotics", "reinforcement-learning", "vision-language-action", "vlarl"]
    head: dict[str, Any] = {"library_name": "vlarl", "pipeline_tag": "robotics"}
    if source.writes_texts:
        tags = ["reinforcement-learning", "vlarl"]
        task = "image-text-to-text" if source.reads_images else "text-generation"
        head = {"library_name": "peft" if is_adapter(source.folder) else "transformers", "pipeline_tag": task}
    if source.base is not None and _hub_name(source.base):
        head |= {"base_model": _hub_name(source.base)}
        head |= {"base_model_relation": "adapter" if is_adapter(source.folder) else "finetune"}
    algorithm = source.run.option("algorithm", "name") if source.run else None
    head["tags"] = [*tags, str(algorithm)] if algorithm else tags
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---"


def _introduction(source: Source) -> str:
    kind = "A vision-language-action policy"
    if source.writes_texts:
        kind = "A vision-language model" if source.reads_images else "A language model"
    if is_adapter(source.folder):
        kind = "A LoRA adapter"
    origin = f" on {_shown(source.base)}" if source.base and is_adapter(source.folder) else ""
    origin = origin or (f", trained from {_shown(source.base)}" if source.base else "")
    algorithm = source.run.option("algorithm", "name") if source.run else None
    how = f" by {str(algorithm).upper()}" if algorithm else ""
    lines = [f"{kind}{origin}, made{how} with vlarl {__version__}."]
    if source.updates == 0:
        lines += ["", f"**Note: {_unchanged(source)}.**"]
    if source.training is not None and source.training.runs:
        lines += ["", "Trained on:", "", *(f"* {_trained_on(run)}" for run in source.training.runs)]
    return "\n".join(lines)


def _unchanged(source: Source) -> str:
    """The text for weights that no update has changed."""
    base = f", {_shown(source.base)}" if source.base else ""
    return f"this checkpoint is the base policy{base}: no update was made"


def _trained_on(run: TrainedOn) -> str:
    by = "reinforcement learning" if run.by == "train" else "demonstrations"
    tasks = "" if run.task_ids is None else f", tasks {in_ranges(run.task_ids)}"
    states = f", initial states {in_ranges(run.states)} of each" if run.states else ""
    return f"`{run.suite}`{tasks} ({by}{states})"


def _success(source: Source) -> str:
    rows = [*_loop_rows(source), *(_record_row(record) for record in source.records)]
    if not rows:
        return ""
    warnings = [*_loop_warnings(source), *(text for record in source.records for text in record.settings.warnings)]
    lines = [
        "## Success",
        "",
        "With Wilson's 95% interval.",
        "",
        "| Evaluation | Episodes | Before training | After |",
        "| --- | --- | --- | --- |",
        *rows,
        *(f"\n{text}" for text in dict.fromkeys(warnings)),
    ]
    return "\n".join(lines)


def _loop_rows(source: Source) -> list[str]:
    """The evaluations of the run itself: before the first update, and of this checkpoint."""
    run, after = source.run, _own_evaluation(source)
    if run is None or (run.first is None and after is None):
        return []
    before = run.first
    evaluations = [evaluation for evaluation in (before, after) if evaluation is not None]
    totals = " / ".join(dict.fromkeys(str(evaluation.score.total) for evaluation in evaluations))
    cells = [_rate(e.score.won, e.score.total) if e is not None and e.score.total else "-" for e in (before, after)]
    tasks = " and ".join(
        _tasks({task for evaluation in evaluations for task, _ in run.states(evaluation)[suite]}, suite)
        for suite in run.suites
    )
    what = f"{tasks}, {run.decoding}, by the training run"
    return [f"| {what} | {totals} | {cells[0]} | {cells[1]} |"]


def _loop_warnings(source: Source) -> tuple[str, ...]:
    run, after = source.run, _own_evaluation(source)
    evaluation = after or (run.first if run else None)
    if run is None or evaluation is None:
        return ()
    env = run.option("gym", "env")
    who = "this checkpoint"
    states = run.states(evaluation).items()
    found = (state_warnings(source.training, suite, env, pairs, who) for suite, pairs in states)
    return tuple(dict.fromkeys(warning for warnings in found for warning in warnings))


def _own_evaluation(source: Source) -> Evaluation | None:
    """The run's evaluation of exactly these weights; None if there is none."""
    run = source.run
    if run is None or (source.folder.name == AVERAGE) != bool(run.option("eval", "use_ema")):
        return None
    return next((e for e in run.evaluations if e.iteration == source.iterations and e.iteration > 0), None)


def _record_row(record: EvalRecord) -> str:
    settings, result = record.settings, record.result
    manner = "greedy" if settings.temperature == 0 else f"sampled at temperature {settings.temperature:g}"
    tasks = " and ".join(_tasks(part.by_task(), suite) for suite, part in result.by_suite().items())
    label = f"{tasks}, {manner}, protocol {settings.protocol}, by `vlarl eval`"
    return f"| {label} | {len(result.counted)} | - | {_rate(result.won, len(result.counted))} |"


def _tasks(task_ids: Collection[int], suite: str) -> str:
    """``all 10 tasks of `libero_spatial` ``, or ``tasks 0, 3 of `libero_spatial` ``."""
    facts = SUITES.get(suite)
    if facts is not None and set(task_ids) >= set(range(facts.num_tasks)):
        return f"all {counted(facts.num_tasks, 'task')} of `{suite}`"
    return f"{plural(len(task_ids), 'task')} {in_ranges(task_ids)} of `{suite}`"


def _rate(won: int, total: int) -> str:
    low, high = wilson_interval(won, total)
    return f"{won / total:.1%} [{low:.1%}, {high:.1%}]"


def _loading(source: Source, repo_id: str) -> str:
    suite = source.training.suite if source.training is not None else None
    on = f" --suite {suite}" if suite else ""
    on += " --prompts.path DATA.jsonl" if suite == PROMPTS else ""
    options = f" --env.suite {suite}{on.partition(str(suite))[2]}" if source.writes_texts else ""
    call = [
        "# image: [H, W, 3] uint8; proprio: the robot's state, where the model reads it. One row per step.",
        "action = policy.predict_action(image, instruction, proprio)",
    ]
    if source.writes_texts:
        call = ["# policy.model is the model of transformers, policy.processor.processor its processor."]
    return "\n".join(
        [
            "## Use it",
            "",
            "```bash",
            f"{install_command()}    # in a clone of vlarl's repository",
            f"vlarl eval {repo_id}{on}",
            f"vlarl train --policy.path {repo_id}{options}    # continue from it",
            "```",
            "",
            "```python",
            "import vlarl",
            "",
            f'policy = vlarl.load_policy("{repo_id}")',
            *call,
            "```",
        ]
    )


def _training(source: Source) -> str:
    if source.run is None or not source.run.config:
        return ""
    changed = yaml.safe_dump(_changed_options(source.run.config), sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(
        [
            "## How it was trained",
            "",
            f"By `vlarl train config.yaml` (vlarl {__version__}) with these options; all others have their defaults."
            + _done(source),
            "",
            "```yaml",
            changed.rstrip(),
            "```",
        ]
    )


def _done(source: Source) -> str:
    """How much of it was done when the checkpoint was saved, as a sentence; empty if it is not known."""
    parts = [(source.iterations, "iteration"), (source.updates, "update")]
    known = [counted(count, noun) for count, noun in parts if count is not None]
    return f" This is the policy after {' and '.join(known)}." if known else ""


def _changed_options(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options that differ from the defaults, without those about the machine and without paths on it."""
    defaults = Config().model_dump(mode="json")
    changed: dict[str, dict[str, Any]] = {}
    for section, values in config.items():
        if section in LEFT_OUT or not isinstance(values, Mapping):
            continue
        for name, value in values.items():
            if value != defaults.get(section, {}).get(name) and f"{section}.{name}" not in PRIVATE:
                changed.setdefault(section, {})[name] = _without_folders(value)
    return changed


def _without_folders(value: Any) -> Any:
    """A value of an option, in which paths, also those of a list, are names."""
    if isinstance(value, list | tuple):
        return [_without_folders(each) for each in value]
    return _shown(value) if isinstance(value, str) else value


def _base(folder: Path, run: RunData | None) -> str | None:
    if is_adapter(folder):
        return base_of(folder)
    merged = read_object(folder / "merge_metadata.json").get("base")
    if merged is not None:
        return str(merged)
    path = run.option("policy", "path") if run is not None else None
    return None if path is None else str(path)


def _count(path: Path, name: str) -> int | None:
    """A count in a file; None if there is none."""
    value = read_object(path).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_public(name: str) -> bool:
    """Whether others can load it: a model on the hub, or one built into vlarl."""
    return name in BUILTIN or name.startswith("init:") or _hub_name(name) is not None


def _hub_name(name: str) -> str | None:
    """`organisation/name` of a model on the hub; None for a folder on this machine."""
    match = HUB_ID.fullmatch(name)
    if match is None or Path(name).expanduser().exists():
        return None
    return match["repo"]


def _shown(name: str) -> str:
    """A name without this machine's folders in front of it."""
    is_path = name.startswith(("/", "~", "./", "../")) or ("/" in name and Path(name).expanduser().exists())
    return Path(name).name if is_path else name
