"""The commands that take a configuration, and `vlarl train`, which is one of them; finetune.py has the other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vlarl.cli.resume import named_checkpoint, refuse_damaged
from vlarl.cli.run_lines import GLOSSARY, log_lines, not_checked, nothing_left, opening_lines, with_suite_note
from vlarl.cli.runs import find_run
from vlarl.config.derive import default_run_name, derive, derived_lines, length_lines
from vlarl.config.describe import help_text, options
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import is_prompts
from vlarl.config.paths import brief, briefly
from vlarl.config.resume_command import refuse_without_callables, resume_command
from vlarl.config.run_checkpoints import resumed_checkpoint, run_progress
from vlarl.config.schema import Config
from vlarl.config.source.aliases import ALIASES, alias_of, plain_name
from vlarl.config.source.flags import Flags, parse_flags
from vlarl.config.source.load import COMMANDS as SCHEMAS
from vlarl.config.source.load import load_config, to_yaml
from vlarl.config.source.presets import DEFAULT_PRESET, is_source, presets_of
from vlarl.config.source.start import Start, start_of
from vlarl.config.state_choice import SeenStates, seen_by_run
from vlarl.config.suites import SuiteStates, each_suite, suite_facts
from vlarl.config.trust import refuse_untrusted
from vlarl.config.words import plural, words_of
from vlarl.errors import UsageError
from vlarl.observability.run_dir import RunDirectory
from vlarl.run.preflight import refuse_early, refuse_missing

if TYPE_CHECKING:
    from vlarl.run.session import RunSummary

AnyConfig = TypeVar("AnyConfig", Config, FinetuneConfig)

FINETUNE_PRESET = "tabletop_base"
RESUME_KEEPS = ("run.name", "run.root", "run.seed", "policy.path")  # the weights come from the run's own checkpoint
FREE_IN_FINETUNE = (
    "demos.num_workers",
    "policy.attention",
    "policy.gradient_checkpointing",
    "policy.heads_device",
)  # of the sections that say what is trained, and on what


def _kept_by(schema: type[Config] | type[FinetuneConfig]) -> tuple[str, ...]:
    """The options that a resumed run can't change."""
    if schema is Config:
        return RESUME_KEEPS
    what = [path for path in options(schema) if path.startswith(("policy.", "lora.", "demos."))]
    return ("run.name", "run.root", "run.seed", "optim.batch_size", *(p for p in what if p not in FREE_IN_FINETUNE))


DRY_RUN = ("--dry-run", "--dryrun", "--dry")
WITH_NAME = {
    "--resume": ("resume", "the name or folder of a run, or a checkpoint in it"),
    "--from": ("start", "the name of a checkpoint of the run, such as step_000002"),
}
"""Flags that take a name: the field of the request, and what the name is."""

WHERE = {
    "unseen": "unseen {}",
    "trained": "the training's own {}",
    "partly trained": "{}, some of which were trained on",
    "not known": "{} that may have been trained on",
}


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    source: str | None  # preset or file
    flags: Flags
    resume: str | None = None
    start: str | None = None  # name of the checkpoint to resume from; by default the newest
    dry_run: bool = False
    detach: bool = False
    wants_help: bool = False
    trust: bool = False


def _loop(config: Config, resume: Path | None, checkpoint: Path | None = None) -> RunSummary:
    from vlarl.loop import train

    return train(config, resume=resume, checkpoint=checkpoint)


def train(arguments: Sequence[str], run_training: Callable[..., RunSummary] = _loop) -> int:
    """`vlarl train`: improve a policy, print success before and after and the paths of the results."""
    request = parse_request(arguments, Config, trains=True)
    if request.wants_help:
        print(help_page("train", DEFAULT_PRESET))
        return 0
    run_dir: Path | None = None
    start: Start | None = None
    if request.resume is not None:
        config, run_dir, checkpoint = resumed_run(request, Config)
        if checkpoint is not None:
            run_training = partial(run_training, checkpoint=checkpoint)
        progress = run_progress(run_dir, checkpoint)
        if progress is not None and progress.is_finished(config):
            message = nothing_left(run_dir, progress, config, list(request.flags.spelled.values()))
            if not request.dry_run:
                print(message)
                return 0
        refuse_without_callables(config, run_dir)
    else:
        refuse_from(request)
        start = start_of(request.source, request.flags.values)
        config = load_config(request.source, request.flags, trust=request.trust)
        start = with_suite_note(start, config, request.flags.values)
    if request.dry_run:
        refuse_early(config, is_new=run_dir is None)
        head = [f"resumes {brief(str(run_dir))}"] if start is None else start.lines
        print_dry_run(config, head, [*derived_lines(derive(config)), *length_lines(config)])
        return 0
    if start is not None:
        config = with_name(config, start)
    refuse_missing(config, is_new=run_dir is None)
    if request.detach:
        return _detached(arguments, config, run_dir)
    folder = run_dir or Path(config.run.root) / str(config.run.name)
    print("\n".join(opening_lines(config, folder, start)), flush=True)
    summary = run_training(config, run_dir)
    lines = _closing_lines(summary, config)
    print("\n".join(lines))
    log_lines(RunDirectory(summary.run_dir), lines)
    return 130 if summary.interrupted else 0


def refuse_from(request: Request) -> None:
    """Refuse `--from` without the run that it belongs to."""
    if request.start is not None:
        raise UsageError(f"--from {request.start}: names a checkpoint of a run to resume; add --resume RUN")


def parse_request(arguments: Sequence[str], schema: type[Config] | type[FinetuneConfig], trains: bool) -> Request:
    """Parse the command's own flags; the rest are options of the configuration and at most one preset or file."""
    own: dict[str, Any] = {}  # fields of the request
    switches = dict.fromkeys(DRY_RUN, "dry_run") | ({"--trust": "trust", "--detach": "detach"} if trains else {})
    rest: list[str] = []
    tokens = list(arguments)
    while tokens:
        token = tokens.pop(0)
        if token in ("-h", "--help"):
            return Request(None, Flags(), wants_help=True)
        if (switch := token.replace("_", "-")) in switches:
            own[switches[switch]] = True
        elif (flag := token.partition("=")[0]) in WITH_NAME:
            value = token.partition("=")[2] or (tokens.pop(0) if tokens and not tokens[0].startswith("-") else "")
            field, needs = WITH_NAME[flag]
            if value.lower() in ("", "true"):
                raise UsageError(f"{flag}: needs {needs}; `vlarl status` lists the runs")
            own |= {} if value.lower() == "false" else {field: value}  # how other systems switch it off
        else:
            is_root = token.partition("=")[0] == "--root"  # as in status, report and eval
            rest.append(token.replace("--root", "--run.root", 1) if is_root else token)
    flags = parse_flags(rest, schema, own=["--help", *switches, *WITH_NAME])
    for note in flags.notes:
        print(f"note: {note}", file=sys.stderr)
    return Request(_one_source(flags, schema, resumes="resume" in own), flags, **own)


def _one_source(flags: Flags, schema: type[Config] | type[FinetuneConfig], resumes: bool) -> str | None:
    """The preset or file among the positional arguments; UsageError for several, and for the name of an option."""
    sources, flags.positionals = flags.positionals, []
    if len(sources) > 1:
        raise UsageError(f"one preset or file is enough; got {', '.join(sources)}")
    if sources and resumes:
        raise UsageError(f"--resume reads the run's own configuration; leave out {sources[0]}")
    source = sources[0] if sources else None
    if source and not is_source(source) and (path := alias_of(plain_name(source), frozenset(options(schema)))):
        raise UsageError(f"{source}: unknown preset; did you mean --{source}, which sets --{path}?")
    return source


def resumed_run(request: Request, schema: type[AnyConfig]) -> tuple[AnyConfig, Path, Path | None]:
    """The configuration of the run to resume, changed by the flags, its folder, and the named checkpoint."""
    assert request.resume is not None
    root = str(request.flags.values.get("run.root", Config().run.root))
    checkpoint = resumed_checkpoint(request.resume, root)
    folder = find_run(request.resume, root) if checkpoint is None else checkpoint.parent.parent
    if request.start is not None:
        checkpoint = named_checkpoint(folder, request.start)
    refuse_damaged(folder / "config.yaml", schema)
    # Addresses may be masked in the file.
    address = {path: value for path, value in request.flags.values.items() if path in ("reward.url", "reward.urls")}
    saved = load_config(folder / "config.yaml", address, schema=schema, trust=True)  # for comparison only
    config = load_config(folder / "config.yaml", request.flags, schema=schema, trust=True)
    if not request.trust:
        refuse_untrusted(folder / "config.yaml", config.model_dump(), request.flags.values)
    for path in _kept_by(schema):
        section, _, name = path.partition(".")
        before, now = getattr(getattr(saved, section), name), getattr(getattr(config, section), name)
        if before != now and not (path == "run.root" and folder.parent.resolve() == Path(now).resolve()):
            raise UsageError(f"{path} = {now!r}: a resumed run keeps its {name}, {before!r}; leave the flag out")
    RunDirectory(folder).refuse_locked()
    return config, folder, checkpoint


def _detached(arguments: Sequence[str], config: Config, run_dir: Path | None) -> int:
    """Start the same command as a separate process, with the name that was chosen for its run."""
    from vlarl.cli.detach import detach

    same = [argument for argument in arguments if argument != "--detach"]
    if run_dir is not None:
        return detach(same, run_dir, is_new=False)
    name = str(config.run.name)
    return detach([*same, f"--run.name={name}"], Path(config.run.root) / name, is_new=True)


def with_name(config: AnyConfig, start: Start) -> AnyConfig:
    """The configuration with a default name for its run, if it has none."""
    if config.run.name is not None:
        return config
    name = default_run_name(Path(start.source).stem, config.run.seed, datetime.now())
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def print_dry_run(config: Config | FinetuneConfig, head: list[str], derived: list[str]) -> None:
    """Print the resolved configuration, with what follows from it."""
    print("\n".join(f"# {line}" for line in head))
    print(to_yaml(briefly(config)))
    print("# derived")
    print("\n".join(f"# {line}" for line in derived))
    print("\n# not checked here")
    print("\n".join(f"# {line}" for text in not_checked(config) for line in text.splitlines()))


def _closing_lines(summary: RunSummary, config: Config) -> list[str]:
    """Success before and after, and the paths of the results."""
    run = summary.run_dir
    lines = []
    how, words = "greedy" if config.eval.temperature == 0 else "sampled", words_of(config.env.suite)
    if summary.success_before is not None and summary.success_after is None:
        lines.append(
            f"{how} {words.success} before training: {summary.success_before:.1%}; there is no later evaluation"
        )
    if summary.success_before is not None and summary.success_after is not None:
        change = f"{summary.success_before:.1%} → {summary.success_after:.1%}"
        if summary.interrupted:  # an intermediate sharded checkpoint has no training_data.json
            lines.append(f"{how} {words.success}: {change}")
        else:
            seen = _seen(run, config)
            lines.append(f"{how} {words.success} on {WHERE[seen.kind].format(plural(2, words.state))}: {change}")
            lines += [f"warning: {warning}" for warning in seen.warnings]
    if summary.interrupted:
        lines.append(f"interrupted and saved; resume with: {resume_command(run)}")
    places = {
        "report": summary.report,
        "checkpoint": run / "checkpoints" / "final",
        **({"merged": run / "checkpoints" / "merged"} if config.checkpoint.merge else {}),
        **({"data": run / "data"} if config.rollout.save != "none" else {}),
        **({"samples": run / "samples.jsonl"} if is_prompts(config.env.suite) else {"videos": run / "videos"}),
    }
    if config.rollout.save != "none" and not (run / "data").exists():
        lines.append("no episode was saved (rollout.save): none of those that were chosen passed rollout.save_filter")
    there = ((name, path) for name, path in places.items() if path is not None and path.exists())
    lines += [f"{name + ':':<12}{brief(path)}" for name, path in there]
    return lines


def _seen(run: Path, config: Config) -> SeenStates:
    """Whether the run or its base was trained on the initial states of its own evaluation."""
    from vlarl.observability.report.data import newest_training_data

    episodes = {}
    for env in each_suite(config.env):
        facts = suite_facts(env, config.gym)
        assert facts is not None, "a run has trained on it"
        states = SuiteStates.of(facts).evaluated(env.protocol)[: config.eval.states_per_task]  # none of unread data
        tasks = env.task_ids or range(facts.num_tasks)
        episodes[env.suite] = [(task, state) for task in tasks for state in states]
    training = newest_training_data(run / "checkpoints")
    return seen_by_run(training, config.gym.env, config.env.protocol, episodes)


def help_page(command: str, default_preset: str) -> str:
    """What `--help` prints."""
    schema = SCHEMAS[command]
    described = presets_of(schema)
    width = max(len(name) for name in described)
    chosen = ", or the one made for the suite or the size of the policy that you name" if command == "train" else ""
    resume = " [--resume RUN [--from NAME]]" + (" [--trust] [--detach]" if command == "train" else "")
    own = [
        "  --dry-run     print the resolved configuration and derived values, and write nothing",
        "  --help        print this text",
    ]
    example = "--run.iterations 40" if command == "train" else "--optim.steps 20000"
    resumes = [
        "  --resume RUN  resume a run: its name, its folder, or the folder of a checkpoint in it;",
        f"                flags may change the run, for example {example}",
        "  --from NAME   resume from this checkpoint of the run, such as step_000002; later ones are set aside",
    ]
    own = [*resumes, *own]
    if command == "train":
        own = [
            *resumes,
            "  --trust       run the code that the configuration of another user's run names (docs/security.md)",
            "  --detach      run in the background, independent of the terminal; `vlarl status` shows the progress",
            *own[len(resumes) :],
        ]
    lines = [
        f"usage: vlarl {command} [PRESET|FILE] [--section.field value …]{resume} [--dry-run]",
        "",
        f"presets (by default {default_preset}{chosen}):",
        *(f"  {name:<{width}}  {text}" for name, text in described.items()),
        "",
        *own,
        "",
        *([GLOSSARY, ""] if command == "train" else []),
        "Options with their defaults, which a preset may change. A list is written --section.field 0 1 2, a switch",
        "--section.field or --no-section.field; null stands for none.",
        "",
        help_text(schema, min(shutil.get_terminal_size((120, 24)).columns, 130)),
    ]
    lines += ["", "Names from other systems that work too (docs/coming-from.md has all of them):"]
    return "\n".join([*lines, *_alias_lines(frozenset(options(schema)))])


def _alias_lines(known: frozenset[str]) -> list[str]:
    """Each option that has names in other systems, with those names."""
    names: dict[str, list[str]] = {}
    for alias in ALIASES:
        if "." not in alias and (path := alias_of(alias, known)):
            names.setdefault(path, []).append(f"--{alias.replace('_', '-')}")
    return [f"  --{path:<34} {', '.join(found)}" for path, found in names.items()]
