"""`vlarl data`: inspect a recorded dataset, or record scripted demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vlarl.cli import arguments as args
from vlarl.config.known import GYM, KNOWN_SUITES, SUITES
from vlarl.config.problems import ConfigError
from vlarl.config.rules.env import check_task_ids
from vlarl.config.schema import Camera
from vlarl.config.words import counted
from vlarl.errors import UsageError
from vlarl.observability.terminal import printable

if TYPE_CHECKING:
    from vlarl.data.inspection import DatasetSummary
    from vlarl.data.recording import TaskCount
    from vlarl.data.rlds.reader import RldsDataset
    from vlarl.envs.base import Demonstration

STATISTICS = ("q01", "q99", "mean", "std", "min", "max")
USAGE = """usage: vlarl data COMMAND [ARGUMENTS]

  inspect  PATH                  what an RLDS dataset holds
  record   --suite S --out DIR   scripted demonstrations of a suite, as an RLDS dataset

  vlarl data COMMAND --help      options of a command"""


def data(arguments: Sequence[str]) -> int:
    """Run `vlarl data inspect` or `vlarl data record`."""
    commands = {"inspect": inspect, "record": record}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = arguments
    if name not in commands:
        raise UsageError(f"unknown command 'data {name}'; commands: {', '.join(commands)} (vlarl data --help)")
    return commands[name](rest)


def inspect(arguments: Sequence[str]) -> int:
    """Print what a dataset holds, and write a contact sheet if requested."""
    about = "Print what an RLDS dataset holds: episodes, instructions, fields, statistics."
    parser = args.Parser("data inspect", about)
    parser.add_argument("path", metavar="PATH", help="folder of the dataset, such as data/libero_spatial/1.0.0")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write frames of the first episodes to this PNG file")
    given = parser.parse_args(arguments)

    from vlarl.data.inspection import contact_sheet, summarize
    from vlarl.data.rlds.reader import RldsDataset

    dataset = RldsDataset(given.path)
    print(printable("\n".join(_inspection_lines(dataset, summarize(dataset)))))
    if given.out is not None:
        try:
            contact_sheet(dataset).save(given.out, "PNG")
        except OSError as error:
            raise UsageError(f"--out: {given.out} can't be written ({error.strerror}): name another file.") from error
        print(f"\ncontact sheet: {given.out}")
    return 0


def _inspection_lines(dataset: RldsDataset, summary: DatasetSummary) -> list[str]:
    lengths = summary.episode_lengths
    width = max(len(name) for name in dataset.fields)
    lines = [
        f"dataset:   {dataset.name} ({dataset.folder})",
        f"episodes:  {len(lengths)}, of which {summary.num_successes} end at their goal; "
        f"{counted(len(dataset.shard_lengths), 'shard')}",
        f"steps:     {sum(lengths):,}, {min(lengths)} to {max(lengths)} per episode",
        "",
        "fields:",
        *(f"  {name:<{width}}  {_described(dataset, name)}" for name in dataset.fields),
        "",
        "instructions:",
        *(f"  {count:>5} x  {text}" for text, count in summary.instructions.items()),
    ]
    if summary.statistics is None:
        return lines
    lines += ["", f"statistics, of actions as a policy gives them:\n  {'':<12}" + _columns(STATISTICS)]
    for part in ("action", "proprio"):
        columns = summary.statistics[part]
        for dim in range(len(columns["mean"])):
            values = [f"{columns[name][dim]:.4g}" for name in STATISTICS]
            note = "  not normalised" if not columns["mask"][dim] else ""
            lines.append(f"  {f'{part} {dim}':<12}{_columns(values)}{note}")
    return lines


def _described(dataset: RldsDataset, name: str) -> str:
    field = dataset.fields[name]
    shape = " x ".join(str(size) for size in field.shape)
    return f"{'image ' if field.kind == 'image' else ''}{field.dtype}{f' [{shape}]' if shape else ''}"


def _columns(texts: Sequence[str]) -> str:
    return "".join(f"{text:>11}" for text in texts)


def record(arguments: Sequence[str]) -> int:
    """Record scripted demonstrations, and print the successes of each task."""
    given = _record_parser().parse_args(arguments)
    facts = SUITES.get(given.suite)
    tasks = None if given.tasks is None else tuple(given.tasks)
    if problems := list(check_task_ids(tasks, facts, "--tasks")):
        raise ConfigError(problems)

    from vlarl.data.recording import open_experts
    from vlarl.data.recording import record as run_record
    from vlarl.observability.machine import available_cores

    num_envs = given.num_envs or available_cores()
    with open_experts(given.suite, given.image_size, tuple(given.cameras), num_envs) as experts:
        folder, counts = run_record(
            experts, given.out, tasks, given.episodes, given.seed, given.noise, given.keep_failures, _print_episode
        )
    print("\n".join(_record_lines(counts)))
    print(f"\ndataset: {folder}")
    return 0


def _record_parser() -> args.Parser:
    parser = args.Parser("data record", "Record scripted demonstrations of a suite's tasks as an RLDS dataset.")
    add = parser.add_argument
    suites = ", ".join(suite for suite in KNOWN_SUITES if suite != GYM)
    add("--suite", type=args.suite, required=True, metavar="S", help=f"one of {suites}")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the dataset, which becomes DIR/SUITE/1.0.0")
    add("--tasks", type=args.non_negative, nargs="+", metavar="N", help="ids of tasks; by default all of the suite")
    add("--episodes", type=args.positive, default=10, metavar="N", help="demonstrations per task")
    add("--noise", type=args.temperature, default=0.1, metavar="X", help="std of the noise on executed actions")
    add("--image-size", type=args.positive, default=256, metavar="N", help="side length of a rendered view in pixels")
    cameras = get_args(Camera)
    add("--cameras", nargs="+", choices=cameras, default=list(cameras), help="views, the agent's first")
    add("--num-envs", type=args.positive, metavar="N", help="simulator processes; by default one per core")
    add("--seed", type=args.non_negative, default=0, metavar="N", help="seed of states and noise")
    add("--keep-failures", action="store_true", help="also record episodes that don't reach their goal")
    return parser


def _print_episode(episode: Demonstration, done: int, total: int) -> None:
    task, outcome = episode.task, "success" if episode.success else "failure"
    where = f"task {task.task_id}  state {task.init_state}"
    print(f"episode {done}/{total}  {where}  {counted(len(episode.actions), 'step')}  {outcome}", flush=True)


def _record_lines(counts: dict[int, TaskCount]) -> list[str]:
    lines = ["", f"{'task':>4}  {'success':>9}  {'steps':>7}  instruction"]
    for task_id, count in sorted(counts.items()):
        success = f"{count.num_successes}/{count.num_episodes}"
        lines.append(f"{task_id:>4}  {success:>9}  {count.num_recorded_steps:>7,}  {count.instruction}")
    won, total = (sum(getattr(c, name) for c in counts.values()) for name in ("num_successes", "num_episodes"))
    steps = sum(count.num_recorded_steps for count in counts.values())
    return [*lines, f"{'all':>4}  {f'{won}/{total}':>9}  {steps:>7,}"]
