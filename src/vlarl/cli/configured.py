"""The commands that take a configuration: `vlarl train` and `vlarl finetune`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vlarl.cli.runs import find_run
from vlarl.config.derive import default_run_name, derive, derive_finetune, derived_lines
from vlarl.config.describe import help_text, options
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.flags import ALIASES, Flags, parse_flags
from vlarl.config.load import COMMANDS as SCHEMAS
from vlarl.config.load import load_config, to_yaml
from vlarl.config.presets import DEFAULT_PRESET, presets_of
from vlarl.config.schema import Config
from vlarl.config.state_choice import Seen, seen_by_run
from vlarl.config.suites import SuiteStates, suite_facts
from vlarl.errors import UsageError

if TYPE_CHECKING:
    from vlarl.data.sft import FinetuneSummary
    from vlarl.session import RunSummary

AnyConfig = TypeVar("AnyConfig", Config, FinetuneConfig)

FINETUNE_PRESET = "tabletop_base"
RESUME_KEEPS = ("run.name", "run.root", "run.seed", "policy.path")  # the weights come from the run's own checkpoint


WHERE = {
    "unseen": "unseen initial states",
    "trained": "the training's own initial states",
    "partly trained": "initial states, some of which were trained on",
    "not known": "initial states that may have been trained on",
}


@dataclass(frozen=True)
class Request:
    """A command line taken apart."""

    source: str | None  # preset or file
    flags: Flags
    resume: str | None = None
    dry_run: bool = False
    detach: bool = False
    wants_help: bool = False


def _loop(config: Config, resume: Path | None) -> RunSummary:
    from vlarl.loop import train

    return train(config, resume=resume)


def _supervised(config: FinetuneConfig) -> FinetuneSummary:
    from vlarl.data.sft import finetune

    return finetune(config)


def train(arguments: Sequence[str], run_training: Callable[[Config, Path | None], RunSummary] = _loop) -> int:
    """`vlarl train`: improve a policy, print success before and after and where everything is."""
    request = _parse(arguments, Config, trains=True)
    if request.wants_help:
        print(_help("train", DEFAULT_PRESET))
        return 0
    run_dir: Path | None = None
    if request.resume is not None:
        config, run_dir = resumed_run(request)
    else:
        config = load_config(request.source, request.flags)
    if request.dry_run:
        _print_dry_run(config, derived_lines(derive(config)))
        return 0
    if run_dir is None:
        config = _named(config, request.source or DEFAULT_PRESET)
    if request.detach:
        return _detached(arguments, config, run_dir)
    summary = run_training(config, run_dir)
    print("\n".join(_closing_lines(summary, config)))
    return 130 if summary.interrupted else 0


def finetune(arguments: Sequence[str], run_training: Callable[[FinetuneConfig], FinetuneSummary] = _supervised) -> int:
    """`vlarl finetune`: make a base policy from demonstrations."""
    request = _parse(arguments, FinetuneConfig, trains=False)
    if request.wants_help:
        print(_help("finetune", FINETUNE_PRESET))
        return 0
    source = request.source or FINETUNE_PRESET
    config = load_config(source, request.flags, schema=FinetuneConfig)
    if request.dry_run:
        _print_dry_run(config, derived_lines(derive_finetune(config)))
        return 0
    summary = run_training(_named(config, source))
    print(f"loss: {summary.first_loss:.3f} → {summary.last_loss:.3f}")
    print(f"demonstrations that succeed: {summary.demo_success:.1%}")
    print(f"checkpoint: {summary.checkpoint}")
    return 0


def _parse(arguments: Sequence[str], schema: type[Config] | type[FinetuneConfig], trains: bool) -> Request:
    """Take the command's own flags out; the rest is the configuration's, and at most one preset or file."""
    request = Request(None, Flags())
    rest: list[str] = []
    tokens = list(arguments)
    while tokens:
        token = tokens.pop(0)
        if token in ("-h", "--help"):
            return replace(request, wants_help=True)
        if token == "--dry-run":
            request = replace(request, dry_run=True)
        elif trains and token == "--detach":
            request = replace(request, detach=True)
        elif trains and token.partition("=")[0] == "--resume":
            value = token.partition("=")[2] or (tokens.pop(0) if tokens and not tokens[0].startswith("-") else "")
            if not value:
                raise UsageError("--resume: needs the name or folder of a run")
            request = replace(request, resume=value)
        else:
            rest.append(token)
    flags = parse_flags(rest, schema)
    sources, flags.positionals = flags.positionals, []
    if len(sources) > 1:
        raise UsageError(f"one preset or file is enough; got {', '.join(sources)}")
    if sources and request.resume:
        raise UsageError(f"--resume reads the run's own configuration; leave out {sources[0]}")
    return replace(request, source=sources[0] if sources else None, flags=flags)


def resumed_run(request: Request) -> tuple[Config, Path]:
    """The configuration of the run to go on with, changed by the flags, and its folder."""
    assert request.resume is not None
    folder = find_run(request.resume, str(request.flags.values.get("run.root", Config().run.root)))
    saved = load_config(folder / "config.yaml")
    config = load_config(folder / "config.yaml", request.flags)
    for path in RESUME_KEEPS:
        section, _, name = path.partition(".")
        before, now = getattr(getattr(saved, section), name), getattr(getattr(config, section), name)
        if before != now and not (path == "run.root" and folder.parent.resolve() == Path(now).resolve()):
            raise UsageError(f"{path} = {now!r}: a resumed run keeps its {name}, {before!r}; leave the flag out")
    return config, folder


def _detached(arguments: Sequence[str], config: Config, run_dir: Path | None) -> int:
    """Start the same command as a process of its own, under the name that was found for its run."""
    from vlarl.cli.detach import detach

    same = [argument for argument in arguments if argument != "--detach"]
    if run_dir is not None:
        return detach(same, run_dir, is_new=False)
    name = str(config.run.name)
    return detach([*same, f"--run.name={name}"], Path(config.run.root) / name, is_new=True)


def _named(config: AnyConfig, source: str) -> AnyConfig:
    """The configuration with a name for its run, where it has none."""
    if config.run.name is not None:
        return config
    name = default_run_name(Path(source).stem, config.run.seed, datetime.now())
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _print_dry_run(config: Config | FinetuneConfig, derived: list[str]) -> None:
    print(to_yaml(config))
    print("# derived")
    print("\n".join(f"# {line}" for line in derived))


def _closing_lines(summary: RunSummary, config: Config) -> list[str]:
    """Success before and after, and where the evidence is."""
    run = summary.run_dir
    lines = []
    if summary.success_before is not None and summary.success_after is not None:
        change = f"{summary.success_before:.1%} → {summary.success_after:.1%}"
        how = "greedy" if config.eval.temperature == 0 else "sampled"
        if summary.interrupted:  # a sharded checkpoint on the way holds no policy that could say what it was trained on
            lines.append(f"{how} success: {change}")
        else:
            seen = _seen(run, config)
            lines.append(f"{how} success on {WHERE[seen.kind]}: {change}")
            lines += [f"warning: {warning}" for warning in seen.warnings]
    if summary.interrupted:
        lines.append(f"interrupted and saved; go on with: vlarl train --resume {run}")
    places = {
        "report": summary.report,
        "checkpoint": run / "checkpoints" / "final",
        "videos": run / "videos",
    }
    lines += [f"{name + ':':<12}{path}" for name, path in places.items() if path is not None and path.exists()]
    return lines


def _seen(run: Path, config: Config) -> Seen:
    """Whether the run or its base was trained on the initial states that its loop evaluates on."""
    from vlarl.observability.report.data import newest_training_data

    env, facts = config.env, suite_facts(config.env, config.gym)
    assert facts is not None, "a run has trained on it"
    states = SuiteStates.of(facts).evaluated(env.protocol)[: config.eval.states_per_task]
    episodes = [(task, state) for task in env.task_ids or range(facts.num_tasks) for state in states]
    return seen_by_run(newest_training_data(run / "checkpoints"), env.suite, config.gym.env, env.protocol, episodes)


def _help(command: str, default_preset: str) -> str:
    schema = SCHEMAS[command]
    described = presets_of(schema)
    width = max(len(name) for name in described)
    resume = " [--resume RUN] [--detach]" if command == "train" else ""
    own = [
        "  --dry-run     print the resolved configuration and the derived numbers, write nothing",
        "  --help        this text",
    ]
    if command == "train":
        own = [
            "  --resume RUN  go on with a run (its name, or its folder); flags may change it, e.g. --run.iterations 40",
            "  --detach      run as a process of its own, which outlives the terminal; `vlarl status` says how it goes",
            *own,
        ]
    lines = [
        f"usage: vlarl {command} [PRESET|FILE] [--section.field value …]{resume} [--dry-run]",
        "",
        f"presets (by default {default_preset}):",
        *(f"  {name:<{width}}  {text}" for name, text in described.items()),
        "",
        *own,
        "",
        "Options with their defaults, which a preset may change. A list is written --section.field 0 1 2, a switch",
        "--section.field or --no-section.field; null stands for none.",
        "",
        help_text(schema, min(shutil.get_terminal_size((120, 24)).columns, 130)),
    ]
    aliases = [f"  --{alias:<18} --{path}" for alias, path in ALIASES.items() if path in options(schema)]
    return "\n".join([*lines, "", "Names from other systems that work too:", *aliases])
