"""`vlarl eval`: how often a checkpoint succeeds, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vlarl.cli import arguments as args
from vlarl.config.checks import check_task_ids
from vlarl.config.describe import options
from vlarl.config.flags import parse_flags
from vlarl.config.known import KNOWN_SUITES
from vlarl.config.problems import ConfigError, Problem
from vlarl.config.schema import Config, PolicyConfig
from vlarl.config.yaml_source import read_document
from vlarl.errors import UsageError

if TYPE_CHECKING:
    from vlarl.types import EvalResult


def evaluate(arguments: Sequence[str]) -> int:
    """Evaluate a checkpoint and print its success on each task."""
    about = (
        "Measure a checkpoint's success on initial states that training never sees. How it is loaded is said by "
        "--policy.FIELD VALUE as in `vlarl train --help`, such as --policy.num_images 2; a run's checkpoint knows."
    )
    parser = args.Parser("eval", about)
    add, defaults = parser.add_argument, Config()
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="checkpoint or adapter folder, hub id, builtin:tiny-oft or builtin:tiny-openvla",
    )
    suites = f"one of {', '.join(KNOWN_SUITES)}; a run's own for its checkpoints, else {defaults.env.suite}"
    add("--suite", type=args.suite, metavar="S", help=suites)
    add("--tasks", type=args.non_negative, nargs="+", metavar="N", help="ids of tasks; all of the suite without it")
    add(
        "--states-per-task",
        type=args.positive,
        default=defaults.eval.states_per_task,
        metavar="N",
        help="initial states of each task",
    )
    add("--temperature", type=args.temperature, default=0.0, metavar="T", help="sampling temperature; 0 is greedy")
    add(
        "--num-envs",
        type=args.positive,
        default=defaults.env.num_envs,
        metavar="N",
        help="environments that run side by side",
    )
    add("--videos", type=args.non_negative, default=0, metavar="N", help="episodes to film")
    add("--out", type=Path, metavar="DIR", help="new folder for results; in the run's own `eval` without it")
    add(
        "--device",
        default=defaults.run.device,
        metavar="D",
        help="cpu, cuda, cuda:1…; auto takes a GPU if there is one",
    )
    add("--seed", type=args.non_negative, default=0, metavar="N", help="seed of environments and sampling")
    given, rest = parser.parse_known_args(arguments)
    policy = policy_options(given.checkpoint, rest)
    task_ids = None if given.tasks is None else tuple(given.tasks)
    if problems := list(check_task_ids(task_ids, "--tasks")):
        raise ConfigError(problems)
    from vlarl.evaluation import evaluate as run_evaluation
    from vlarl.evaluation import results_folder

    out = given.out or results_folder(given.checkpoint)
    if given.videos and out is None:
        raise UsageError("--videos needs a place for them: add --out DIR")
    result = run_evaluation(
        given.checkpoint,
        suite=given.suite or suite_of_run(given.checkpoint) or defaults.env.suite,
        task_ids=task_ids,
        states_per_task=given.states_per_task,
        temperature=given.temperature,
        num_envs=given.num_envs,
        videos=given.videos,
        out=out,
        seed=given.seed,
        device=given.device,
        policy_config=policy,
    )
    print(success_table(result))
    if out is not None:
        print(f"results: {out}")
    return 0


def policy_options(checkpoint: str, arguments: Sequence[str]) -> PolicyConfig:
    """How to load the checkpoint: as its run did, then as the flags `--policy.FIELD VALUE` say."""
    flags = parse_flags(arguments, Config)
    problems = [*flags.problems, *(Problem(text, "unexpected argument") for text in flags.positionals)]
    problems += [
        Problem(flags.spelled[path], "not an option of eval; see `vlarl eval --help`")
        for path in flags.values
        if not path.startswith("policy.")
    ]
    values = {path.removeprefix("policy."): value for path, value in flags.values.items() if path.startswith("policy.")}
    try:
        policy = PolicyConfig.model_validate({**section_of_run(checkpoint, "policy"), **values})
    except ValidationError as error:
        names = [str(detail["loc"][0]) for detail in error.errors()]
        known = options(Config)
        problems += [Problem(f"policy.{name}", f"must be {known[f'policy.{name}'].allowed}") for name in names]
    if problems:
        raise ConfigError(problems)
    return policy


def suite_of_run(checkpoint: str) -> str | None:
    """The suite that a run's checkpoint was trained on; None for any other checkpoint."""
    suite = section_of_run(checkpoint, "env").get("suite")
    return None if suite is None else str(suite)


def section_of_run(checkpoint: str, section: str) -> dict[str, Any]:
    """A section of the configuration of the run that a checkpoint belongs to; empty for any other checkpoint."""
    config = Path(checkpoint).resolve().parent.parent / "config.yaml"
    content = read_document(config).data.get(section) if config.is_file() else None
    return content if isinstance(content, dict) else {}


def success_table(result: EvalResult) -> str:
    """Successes of each task and of all, as aligned text."""
    instructions = {e.task.task_id: e.instruction for e in result.episodes}
    rows = [
        (str(task), f"{won}/{total}", f"{won / total:.1%}", instructions[task])
        for task, (won, total) in result.per_task().items()
    ]
    won = sum(e.success for e in result.episodes)
    rows.append(("all", f"{won}/{len(result.episodes)}", f"{result.success_rate:.1%}", ""))
    table = [("task", "won", "success", "instruction"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join(
        f"{a:>{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {text}".rstrip() for a, b, c, text in table
    )
