"""`vlarl eval`: the success rate of a checkpoint by task; comparison of two checkpoints; replay of one episode."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vlarl.cli import INTERRUPTED
from vlarl.cli import arguments as args
from vlarl.config.known import BUILTINS, KNOWN_SUITES, is_prompts
from vlarl.config.paths import brief
from vlarl.config.problems import ConfigError, Problem
from vlarl.config.run_checkpoints import LocatedCheckpoint, as_hub_id, locate_checkpoint, refuse_unknown
from vlarl.config.schema import Config, SaveFilter
from vlarl.config.source.aliases import ALIASES, plain_name
from vlarl.config.source.flags import BOOLEANS, MODELS, model_path, parse_flags
from vlarl.config.source.spelling import suite_name
from vlarl.config.source.yaml_file import read_document
from vlarl.config.state_choice import DEFAULT_EPISODES
from vlarl.config.suites import BOTH
from vlarl.config.training_data import TrainingData, run_of
from vlarl.config.words import counted, plural, words_of
from vlarl.errors import UsageError
from vlarl.evaluation.request import (
    EvalOptions,
    EvalRequest,
    Saving,
    Videos,
    eval_request,
    on_the_same_states,
    same_episodes,
)
from vlarl.observability.terminal import printable

if TYPE_CHECKING:
    from vlarl.evaluation.record import EvalRecord

ABOUT = (
    "Measure how often a checkpoint succeeds on fixed initial states. Results go into a new folder: in the run's "
    "`eval` for a checkpoint of a run, else in `evals`. --policy.FIELD, --env.FIELD and --gym.FIELD set how the "
    "checkpoint is loaded and the simulator is run, as in `vlarl train --help`, such as --policy.actions l1 for OFT's "
    "regression head; a run's checkpoint needs none of them. --distributed.backend ray runs the engine and the "
    "environments as workers of a Ray cluster, and --vllm.num_engines makes the engines vLLM's; results are the same."
)
CHECKPOINT_NAMES = ("checkpoint", "model", "pretrained_checkpoint", "vla_path", "policy.path")
OTHER_NAMES = {
    "n_episodes": "--episodes",
    "num_episodes": "--episodes",
    "n_eval_episodes": "--episodes",
    "num_trials_per_task": "--episodes",
    "eval.n_episodes": "--episodes",
    "eval.states_per_task": "--episodes",
    "task_suite": "--suite",
    "task_suite_name": "--suite",
    "env.task": "--suite",
    "task_id": "--tasks",
    "task_ids": "--tasks",
    "n_envs": "--num-envs",
    "output_dir": "--out",
    "eval_run_dir": "--out",
    "rollout_temperature": "--temperature",
    "eval_temperature": "--temperature",
    "eval.temperature": "--temperature",
    "run.seed": "--seed",
    "run.device": "--device",
    "rollout.save": "--save",
    "rollout.save_filter": "--save-filter",
    "rollout.save_every": "--save-every",
    "rollout.save_fps": "--save-fps",
}
GREEDY = "evaluations are greedy, unless --temperature says otherwise"
HABITS = {
    **dict.fromkeys(("greedy", "deterministic", "deterministic_eval"), GREEDY),
    "json": "the folder of the results has them as results.json; --out DIR names the folder",
    "dry_run": "not a flag of eval; --episodes 1 is a quick try",
}
"""Switches of other programs, and the advice for them."""
TRUST = (
    "run the code that the configuration of another user's run names, such as its gym.env; without this flag such a "
    "checkpoint is refused (docs/security.md)"
)
GIVEN_BY_ID = ("suite", "tasks", "episodes", "seed", "against", "protocol", "videos")


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint, or two, and print success on each task; or replay one episode."""
    given, rest = _parser().parse_known_args(_with_suites(_with_own_names(arguments)))
    options = _options(given, rest)
    first = locate_checkpoint(given.checkpoint, given.root)
    second = None if given.against is None else locate_checkpoint(given.against, given.root)
    if given.episode is not None:
        return _replay(first, given, options)
    request = _request(first.path, given, options)
    other = None if second is None else _request(second.path, given, options | same_episodes(request))
    _announce(first.note, second.note if second else "", _more_tasks(request, given.tasks))
    if other is not None:
        return _compare(*on_the_same_states(request, other), given.out)
    record = _run(request, given.out)
    _print_result(record)
    _print_saved(record, request.saving)
    return 0 if record.result.complete else INTERRUPTED


def _with_own_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with flag names of training and of other systems replaced by those of eval."""
    found: list[str] = []
    for text in arguments:
        name, has_value, value = text.partition("=")
        plain = plain_name(name) if name.startswith("--") else ""
        if plain in CHECKPOINT_NAMES:
            found += [model_path(value)] if has_value else []
        elif flag := OTHER_NAMES.get(plain) or OTHER_NAMES.get(ALIASES.get(plain, "")):
            found.append(flag + has_value + value)
        else:
            found.append(model_path(text) if text in MODELS else text)
    return found


def _with_suites(arguments: Sequence[str]) -> list[str]:
    """The arguments with the suites after --suite as one value: a checkpoint may follow them."""
    found: list[str] = []
    for text in arguments:
        is_suite = suite_name(text) in KNOWN_SUITES and not Path(text).exists()
        if is_suite and found[-2:-1] == ["--suite"] and not found[-1].startswith("-"):
            found[-1] += f",{text}"
        else:
            found.append(text)
    return found


def _parser() -> args.Parser:
    parser = args.Parser("eval", ABOUT)
    add = parser.add_argument
    checkpoints = (
        "name or folder of a run (its checkpoints/final, or its newest checkpoint), checkpoint or adapter folder, hub "
        "id, or a built-in policy: " + ", ".join(f"builtin:{name}" for name in BUILTINS)
    )
    add("checkpoint", metavar="CHECKPOINT", help=checkpoints)
    add("--against", metavar="CHECKPOINT", help="evaluate this one too, on the same episodes, and compare")
    suites = (
        f"the suite to evaluate on, or several of one kind: of {', '.join(KNOWN_SUITES)}. Without this flag it is what "
        "the run of the checkpoint was configured with, or the suite that the "
        f"checkpoint was trained on, or {Config().env.suite} if the checkpoint does not say"
    )
    add("--suite", type=args.suites, metavar="S", help=suites)
    protocols = (
        "the initial states to use. disjoint: those that training leaves out. benchmark: those of published results. "
        "both: all states of either, once, and a table of the two; --episodes then counts for each. "
        "With this flag the first ones are used, even if the checkpoint was trained on them. Without it the protocol "
        "is the checkpoint's own, or benchmark if it has none, and states that the checkpoint was trained on are left "
        "out (unless its own run was configured with env.protocol benchmark)"
    )
    add("--protocol", choices=("disjoint", "benchmark", BOTH), help=protocols)
    add("--tasks", type=args.non_negative, nargs="+", metavar="N", help="ids of tasks; by default all of each suite")
    episodes = (
        f"episodes per task, each from another initial state; by default as many as there are, up to {DEFAULT_EPISODES}"
    )
    add("--episodes", type=args.positive, metavar="N", help=episodes)
    add("--episode", metavar="ID", help="run one episode again and record a video, by its id in results.json")
    add("--temperature", type=args.temperature, default=0.0, metavar="T", help="sampling temperature; 0 is greedy")
    environments = "environments in parallel; by default 64 tabletops, or one simulator process per core"
    add("--num-envs", type=args.positive, metavar="N", help=environments)
    videos = "videos to record: all, failures, none, or a count, which is distributed over the tasks; by default none"
    add("--videos", type=_videos, metavar="WHICH", help=videos)
    formats = "save the episodes as a dataset of each suite, data/SUITE of the results: every step, with all views"
    add("--save", choices=("rlds", "lerobot"), help=formats)
    add("--save-filter", choices=get_args(SaveFilter), help="save all episodes (default), or those that succeed")
    add("--save-every", type=args.positive, metavar="N", help="save one in N episodes, before the filter")
    add("--save-fps", type=args.positive, metavar="N", help="lerobot: steps per second that the dataset says it has")
    add("--out", type=Path, metavar="DIR", help="new folder for the results")
    add("--trust", action="store_true", help=TRUST)
    args.add_root(parser)
    device = "cpu, cuda, cuda:1…; auto takes a GPU if there is one"
    add("--device", default=Config().run.device, metavar="D", help=device)
    add("--seed", type=args.non_negative, metavar="N", help="seed of environments and sampling; by default 0")
    return parser


def _announce(*lines: str) -> None:
    """Print remarks on the located checkpoints to stderr."""
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


def _more_tasks(request: EvalRequest, tasks: Sequence[int] | None) -> str:
    """A remark if a run that trained on some tasks of the suite is evaluated on all of them; empty otherwise."""
    run = run_of(request.checkpoint)
    if run is None or tasks is not None or request.env.task_ids is not None:
        return ""
    env = read_document(run / "config.yaml").data.get("env")
    trained = env.get("task_ids") if isinstance(env, dict) and env.get("suite") == request.label else None
    if not isinstance(trained, list | tuple) or not all(isinstance(task, int) for task in trained):
        return ""
    ids = " ".join(str(task) for task in trained)
    named = f"{plural(len(trained), 'task')} {ids.replace(' ', ', ')}"
    return f"its run was trained on {named} only; all tasks are evaluated (--tasks {ids}: only those of the run)"


def _videos(text: str) -> Videos:
    """all, failures, none or a count."""
    words: dict[str, Videos] = {"all": "all", "failures": "failures", "none": 0}
    try:
        return words[text] if text in words else args.non_negative(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} must be all, failures, none or a count") from None


def _habits(rest: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The switches of HABITS with their advice, and all other arguments; true or false after a switch is its value."""
    advice: dict[str, str] = {}
    others: list[str] = []
    tokens = list(rest)
    while tokens:
        text = tokens.pop(0)
        flag, has_value, value = text.partition("=")
        if not flag.startswith("--") or plain_name(flag) not in HABITS:
            others.append(text)
            continue
        if not has_value and tokens and tokens[0].lower() in BOOLEANS:
            value = tokens.pop(0)
        is_off = value.lower() == "false"
        sampled = "set --temperature, such as 1, to sample" if HABITS[plain_name(flag)] == GREEDY else ""
        if sampled and is_off:
            advice[flag] = sampled
        elif not is_off:
            advice[flag] = HABITS[plain_name(flag)]
    return advice, others


def _options(given: argparse.Namespace, rest: Sequence[str]) -> dict[str, object]:
    """Options of the sections env, gym and policy, by dotted path: the flags of eval and those of the schema."""
    advice, rest = _habits(rest)
    flags = parse_flags(rest, EvalOptions, _parser().flags())
    needless = {text: reason for text, reason in advice.items() if reason == GREEDY}
    problems = [Problem(text, remedy) for text, remedy in advice.items() if text not in needless]
    stray = f"unexpected argument; for another checkpoint of a run write {given.checkpoint}/NAME, for two --against"
    problems += [*flags.problems, *(Problem(text, stray) for text in flags.positionals)]
    for note in [*flags.notes, *(f"{text} is not needed: {reason}" for text, reason in needless.items())]:
        print(f"note: {note}", file=sys.stderr)
    if problems:
        raise ConfigError(problems)
    tasks = None if given.tasks is None else tuple(given.tasks)
    named = {"protocol": given.protocol, "task_ids": tasks, "num_envs": given.num_envs}
    if given.suite is not None:
        named |= {"suite": given.suite[0]} if len(given.suite) == 1 else {"suites": given.suite}
    return flags.values | {f"env.{name}": value for name, value in named.items() if value is not None}


def _request(checkpoint: str, given: argparse.Namespace, options: dict[str, object]) -> EvalRequest:
    request = eval_request(
        checkpoint,
        options,
        training=_hub_training_data(checkpoint),
        states_per_task=given.episodes,
        temperature=given.temperature,
        seed=given.seed or 0,
        videos=given.videos or 0,
        saving=_saving(given),
        device=given.device,
        trust=given.trust,
    )
    _refuse_fresh(checkpoint)
    refuse_unknown(checkpoint, given.root)
    return request


def _saving(given: argparse.Namespace) -> Saving:
    return Saving(given.save or "none", given.save_filter or "all", given.save_every or 1, given.save_fps)


def _refuse_fresh(checkpoint: str) -> None:
    kind, _, size = checkpoint.partition(":")
    if kind == "init":
        remedy = f"did you mean builtin:{size}?" if size in BUILTINS else "name a checkpoint that was trained"
        raise UsageError(f"{checkpoint}: fresh weights, which are untrained; {remedy}")


def _hub_training_data(checkpoint: str) -> TrainingData | None:
    """What a checkpoint on the hub was trained on; None for a checkpoint on this machine, whose folder has it."""
    if as_hub_id(checkpoint) is None:
        return None
    from vlarl.policies.locate import hub_training_data  # loads torch, which takes seconds

    return hub_training_data(checkpoint)


def _run(request: EvalRequest, out: Path | None, name: str = "") -> EvalRecord:
    """Evaluate with a counter on stderr."""
    from vlarl.evaluation.record import EvalDirectory, new_folder

    folder = out or new_folder(request.checkpoint, request.label, datetime.now())
    EvalDirectory.refuse_existing(folder)
    what = f"{request.label}, {'both protocols' if request.by_protocol else f'protocol {request.env.protocol}'}"
    line = f"evaluating {name}{brief(request.checkpoint)} on {what}, into {brief(folder)}"
    print(line, file=sys.stderr, flush=True)

    from vlarl.cli.eval_display import EpisodeCounter
    from vlarl.evaluation.run import run_evaluation  # after the line: torch takes seconds to load

    with EpisodeCounter(name + request.label, words=words_of(request.env.suite)) as counter:
        return run_evaluation(request, folder, counter)


def _print_result(record: EvalRecord) -> None:
    from vlarl.cli.eval_display import closing_lines, protocol_table, success_table

    table = []
    if record.result.episodes:
        table.append(protocol_table(record) if record.by_protocol() else success_table(record.result))
    print(printable("\n".join([*table, *closing_lines(record)])))


def _print_saved(record: EvalRecord, saving: Saving) -> None:
    if saving.kind != "none" and record.folder is not None:
        data = record.folder / "data"
        print(f"saved: {brief(data)}" if data.exists() else "saved: nothing, as no chosen episode passed the filter")


def _compare(first: EvalRequest, second: EvalRequest, out: Path | None) -> int:
    from vlarl.cli.eval_display import closing_lines, comparison_lines, comparison_table
    from vlarl.evaluation.compare import compare
    from vlarl.evaluation.record import EvalDirectory

    if out is not None:
        EvalDirectory.refuse_existing(out)
    records = []
    for name, request in (("A", first), ("B", second)):
        record = _run(request, None if out is None else out / name, f"{name}: ")
        if not record.result.complete:
            _print_result(record)
            return INTERRUPTED
        records.append(record)
    a, b = records
    comparison = compare(a, b)
    closing = [line for record in records for line in closing_lines(record, with_states=False)]
    print(printable("\n".join([comparison_table(comparison), *comparison_lines(comparison, a, b), *closing])))
    return 0


def _replay(located: LocatedCheckpoint, given: argparse.Namespace, options: dict[str, object]) -> int:
    """Run one episode again, record a video, and print whether the outcome is the recorded one."""
    if needless := [f"--{name}" for name in GIVEN_BY_ID if getattr(given, name) is not None]:
        raise UsageError(
            f"--episode says which episode to run, and a video of it is recorded: leave out {', '.join(needless)}"
        )
    request = eval_request(
        located.path,
        options,
        training=_hub_training_data(located.path),
        temperature=given.temperature,
        videos=0 if is_prompts(given.episode.partition("-")[0]) else "all",
        saving=_saving(given),
        device=given.device,
        trust=given.trust,
        episode=given.episode,
    )
    refuse_unknown(located.path, given.root)
    _announce(located.note)
    record = _run(request, given.out)
    if not record.result.complete:
        _print_result(record)
        return INTERRUPTED
    from vlarl.cli.eval_display import closing_lines

    (episode,) = record.result.episodes
    lines = [f"{given.episode}: {episode.outcome} after {counted(episode.length, 'step')} ({episode.instruction})"]
    if episode.response is not None:
        words = words_of(request.env.suite)
        lines = [
            f"{given.episode}: {words.won if episode.success else words.lost}",
            f"prompt:   {episode.instruction}",
            f"response: {episode.response.text}",
        ]
    print(printable("\n".join([*lines, _on_record(record), *closing_lines(record)])))
    return 0


def _on_record(replay: EvalRecord) -> str:
    """Whether a replayed episode ended as in an earlier evaluation of the same checkpoint."""
    from vlarl.evaluation.record import find_records, results_root

    (episode,) = replay.result.episodes
    ours = replay.settings
    root = results_root(ours.checkpoint)
    for record in find_records(root):
        theirs = record.settings
        known = [e for e in record.result.episodes if e.task == episode.task]
        if not known or theirs.replay_of is not None or theirs.fingerprint != ours.fingerprint:
            continue
        if (theirs.temperature, theirs.policy, theirs.max_steps) != (ours.temperature, ours.policy, ours.max_steps):
            continue
        recorded = known[0]
        if (recorded.outcome, recorded.length) == (episode.outcome, episode.length):
            return f"the same as recorded in {_brief(record)}"
        return f"not as recorded in {_brief(record)}: {recorded.outcome} after {counted(recorded.length, 'step')}"
    return f"no evaluation in {brief(root)} has this episode of this checkpoint with temperature {ours.temperature:g}"


def _brief(record: EvalRecord) -> str:
    return brief(record.folder) if record.folder is not None else "memory"
