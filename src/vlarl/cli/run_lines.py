"""The lines that `vlarl train` and `vlarl finetune` print about a run besides its progress. Does not load torch."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.mixtures import parse_mixture
from vlarl.config.paths import brief
from vlarl.config.resume_command import resume_command
from vlarl.config.run_checkpoints import RunProgress
from vlarl.config.schema import Config
from vlarl.config.source.presets import is_preset
from vlarl.config.source.start import Start
from vlarl.config.suites import suite_facts, suites_of
from vlarl.config.training_data import training_data_of
from vlarl.config.words import counted, plural
from vlarl.errors import UsageError
from vlarl.observability.machine import may_have_gpu
from vlarl.observability.run_dir import RunDirectory

GLOSSARY = """\
words:
  decision   one call of the policy: images and an instruction in, a chunk of actions out
  group      several episodes of one task from one initial state, which are compared with each other
  engine     what runs the policy during rollouts: PyTorch, or vLLM (section vllm)
  iteration  one round: a rollout of rollout.num_groups groups, or of rollout.num_steps steps in every environment, an
             update of the policy, an evaluation if one is due"""


def opening_lines(config: Config | FinetuneConfig, folder: Path, start: Start | None) -> list[str]:
    """The run, its start (None: a resumed run), policy, tasks and device in one line, printed before anything is
    loaded; and the note on the start."""
    if isinstance(config, Config):
        what = f"{plural(len(suites_of(config.env)), 'suite')} {_listed(suites_of(config.env))}"
    else:
        demos, reward = config.demos, config.reward
        what = f"demonstrations {brief(demos.path) if demos.path else 'of ' + _listed(demos.suites)}"
        if demos.mixture:
            what += f" ({_listed(demos.mixture)})"
        if reward.labels != "none":
            what = f"a reward model of {reward.labels}, {what if reward.path is None else brief(reward.path)}"
    is_here = config.distributed.backend == "local"
    device = _device(config.run.device) if is_here else "those of a Ray cluster"
    label = "" if start is None else f"{start.label}, "
    line = f"run {brief(folder)}: {label}policy {brief(config.policy.path)}, {what}, device {device}"
    return [line, f"note: {start.note}"] if start is not None and start.note else [line]


def with_suite_note(start: Start, config: Config, given: Mapping[str, object]) -> Start:
    """The start with a note if its preset has another suite than the one that the given policy was trained on."""
    if "policy.path" not in given or {"env.suite", "env.suites"} & given.keys() or not is_preset(start.source):
        return start
    data, suite = training_data_of(config.policy.path), config.env.suite
    if data is None or data.suite is None or data.suite in suites_of(config.env):
        return start
    note = (
        f"policy.path was trained on {data.suite}, but this run is on {suite}: --env.suite {data.suite} keeps the suite"
    )
    return replace(start, note="; ".join(filter(None, (start.note, note))))


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda, if torch can use the GPU, else cpu" if may_have_gpu() else "cpu"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def not_checked(config: Config | FinetuneConfig) -> list[str]:
    """What `--dry-run` does not check, and the command that does."""
    lines, of_model = [], f"vlarl doctor --model {shlex.quote(brief(config.policy.path))}"
    if config.policy.path.partition(":")[0] not in ("builtin", "init"):
        lines.append(f"the files of policy.path: {of_model}")
    if isinstance(config, Config):
        if config.lora.adapter is not None:
            lines.append("whether lora.adapter was trained on policy.path")
        sources = [name for name in (config.reward.source, *config.reward.sources) if ":" in name]
        if sources:
            lines.append(f"the code of the reward: {_listed(dict.fromkeys(sources))}")
        facts = suite_facts(config.env, config.gym)
        if config.env.suite == "gym":
            lines.append("the environment: vlarl env check, with the same options")
        elif facts is not None and facts.in_processes:
            lines.append("the simulator: vlarl doctor")
    elif config.demos.path:
        first = [one.name for one in parse_mixture(config.demos.mixture)[:1]]
        inspected = brief(Path(config.demos.path, *first))
        lines.append(f"the files of demos.path: vlarl data inspect {shlex.quote(inspected)}")
    return [*lines, "the device: vlarl doctor", f"its memory: {of_model}"]


def nothing_left(run: Path, progress: RunProgress, config: Config, flags: Sequence[str]) -> str:
    """The message for a run that has finished; UsageError if flags were given, as they would have no effect."""
    shown, done, limit = brief(run), progress.iteration, config.run.iterations
    if limit is not None and done >= limit:
        than = "all of" if done == limit else "more than"
        state = f"the run {shown} has done {counted(done, 'iteration')}, {than} run.iterations = {limit}"
        option, more = "run.iterations", max(2 * limit, done + 1)
    else:
        state = f"the run {shown} has used up its {config.run.total_env_steps:,} environment steps"
        option, more = "run.total_env_steps", 2 * progress.env_steps
    longer = resume_command(run, {option: more})
    if flags:
        raise UsageError(
            f"{state}: nothing is left to do, so {_listed(flags)} would have no effect, and nothing was changed. To "
            f"train longer: {longer}"
        )
    return f"{state}: it is finished. To train longer: {longer}"


def log_lines(run: RunDirectory, lines: Sequence[str]) -> None:
    """Write the lines that were printed after the end of a run to its log."""
    if not run.logs.is_dir():
        return
    with run.log_to_file():
        for line in lines:
            logging.getLogger(__name__).info("%s", line)
