"""`vlarl data`: inspect a recorded dataset, convert it, or record scripted demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vlarl.cli import arguments as args
from vlarl.config.finetune import Gripper
from vlarl.config.known import GYM, KNOWN_SUITES, SUITES
from vlarl.config.problems import ConfigError
from vlarl.config.rules.env import check_task_ids
from vlarl.config.schema import Camera
from vlarl.config.words import counted
from vlarl.errors import UsageError
from vlarl.observability.terminal import printable

if TYPE_CHECKING:
    from vlarl.data.inspection import DatasetSummary
    from vlarl.data.lerobot.reader import LeRobotDataset
    from vlarl.data.recording import EpisodeWriter, TaskCount
    from vlarl.data.rlds.reader import RldsDataset
    from vlarl.envs.base import Demonstration

STATISTICS = ("q01", "q99", "mean", "std", "min", "max")
PROGRESS_LINES = 20  # of a conversion, about
USAGE = """usage: vlarl data COMMAND [ARGUMENTS]

  inspect  PATH                  what an RLDS or LeRobot dataset holds
  convert  SOURCE TARGET         an RLDS dataset as a LeRobot dataset, or the other way round
  record   --suite S --out DIR   scripted demonstrations of a suite, as an RLDS or LeRobot dataset

  vlarl data COMMAND --help      options of a command"""


def data(arguments: Sequence[str]) -> int:
    """Run one of the commands."""
    commands = {"inspect": inspect, "convert": convert, "record": record}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = arguments
    if name not in commands:
        raise UsageError(f"unknown command 'data {name}'; commands: {', '.join(commands)} (vlarl data --help)")
    return commands[name](rest)


def inspect(arguments: Sequence[str]) -> int:
    """Print what a dataset holds, and write a contact sheet if requested."""
    about = "Print what an RLDS or LeRobot dataset holds: episodes, instructions, fields, statistics."
    parser = args.Parser("data inspect", about)
    parser.add_argument("path", metavar="PATH", help="folder of the dataset, such as data/libero_spatial/1.0.0")
    help_text = "write frames of the first episodes to this PNG file, a row for each camera"
    parser.add_argument("--sheet", "--out", dest="out", type=Path, metavar="FILE", help=help_text)
    given = parser.parse_args(arguments)

    from vlarl.data.inspection import contact_sheet, open_dataset, summarize

    dataset = open_dataset(given.path)
    print(printable("\n".join(_inspection_lines(dataset, summarize(dataset)))))
    if given.out is not None:
        try:
            contact_sheet(dataset).save(given.out, "PNG")
        except OSError as error:
            raise UsageError(f"--sheet: {given.out} can't be written ({error.strerror}): name another file.") from error
        print(f"\ncontact sheet: {given.out}")
    return 0


def _inspection_lines(dataset: RldsDataset | LeRobotDataset, summary: DatasetSummary) -> list[str]:
    from vlarl.data.inspection import roles_of

    lengths, roles = summary.episode_lengths, roles_of(dataset)
    won = "" if summary.num_successes is None else f", of which {summary.num_successes} end at their goal"
    width = max(len(name) for name in dataset.fields)
    lines = [
        f"dataset:   {dataset.name} ({dataset.folder})",
        f"format:    {_format(dataset)}",
        f"episodes:  {len(lengths)}{won}",
        f"steps:     {sum(lengths):,}, {min(lengths)} to {max(lengths)} per episode",
        f"views:     {', '.join(roles.views) or 'none is known as one'}",
        "",
        "fields:",
        *(f"  {name:<{width}}  {_described(dataset, name)}" for name in dataset.fields),
        "",
        "instructions:",
        *(f"  {count:>5} x  {text}" for text, count in summary.instructions.items()),
    ]
    if summary.statistics is None:
        return lines
    lines += ["", f"statistics, of actions {summary.convention}:\n  {'':<12}" + _columns(STATISTICS)]
    for part in ("action", "proprio"):
        columns = summary.statistics[part]
        for dim in range(len(columns["mean"])):
            values = [f"{columns[name][dim]:.4g}" for name in STATISTICS]
            note = "  not normalised" if not columns["mask"][dim] else ""
            lines.append(f"  {f'{part} {dim}':<12}{_columns(values)}{note}")
    return lines


def _format(dataset: RldsDataset | LeRobotDataset) -> str:
    from vlarl.data.lerobot.reader import LeRobotDataset

    if not isinstance(dataset, LeRobotDataset):
        return f"RLDS, {counted(len(dataset.shard_lengths), 'shard')}"
    files = counted(len({row.data_path for row in dataset.rows}), "file")
    meaning = dataset.declared.gripper or "not declared"
    return f"LeRobot v3.0, {dataset.fps} steps a second, {files} of steps, gripper {meaning}"


def convert(arguments: Sequence[str]) -> int:
    """Write a dataset in the other format."""
    given = _convert_parser().parse_args(arguments)

    from vlarl.data.conversion import Conversion, to_lerobot, to_rlds
    from vlarl.data.inspection import open_dataset
    from vlarl.data.lerobot.declared import SUCCESS
    from vlarl.data.lerobot.reader import LeRobotDataset

    source = open_dataset(given.source)
    options = Conversion(
        drop=tuple(given.drop),
        overwrite=given.overwrite,
        fps=given.fps,
        video=given.video,
        instruction=given.instruction,
        gripper=given.gripper,
        name=given.name,
    )
    if isinstance(source, LeRobotDataset):
        if SUCCESS not in source.fields:
            print(f"note: there is no {SUCCESS}, so that is_terminal marks the last step of every episode")
        folder = to_rlds(source, given.target, options, _print_converted)
    else:
        folder = to_lerobot(source, given.target, options, _print_converted)
    print(f"\ndataset: {folder}")
    return 0


def _convert_parser() -> args.Parser:
    about = "Write an RLDS dataset as a LeRobot dataset, or a LeRobot dataset as an RLDS dataset."
    parser = args.Parser("data convert", about)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder of the dataset that is read")
    add(
        "target",
        metavar="TARGET",
        type=Path,
        help="folder of the LeRobot dataset; an RLDS dataset is TARGET/NAME/1.0.0",
    )
    add("--fps", type=args.positive, metavar="N", help="to LeRobot: steps per second, which RLDS does not say")
    add("--video", action="store_true", help="to LeRobot: frames as H.264 videos, smaller and not quite equal")
    add("--instruction", metavar="FIELD", help="to LeRobot: the text field that is the task; by default the usual ones")
    add("--gripper", choices=get_args(Gripper), help="what the gripper means, where the dataset's name does not say it")
    add("--name", metavar="NAME", help="name of the result, mostly that of its suite; by default that of the source")
    add("--drop", nargs="+", default=[], metavar="FIELD", help="leave out fields which the other format can't hold")
    add("--overwrite", action="store_true", help="replace an existing dataset, once the new one is complete")
    return parser


def _print_converted(done: int, total: int, num_steps: int) -> None:
    if done == total or done % max(1, total // PROGRESS_LINES) == 0:
        print(f"episode {done}/{total}  {counted(num_steps, 'step')}", flush=True)


def _described(dataset: RldsDataset | LeRobotDataset, name: str) -> str:
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

    if given.format == "lerobot" and given.fps is None:
        raise UsageError("a LeRobot dataset says how many steps a second has: give --fps.")
    if given.format != "lerobot" and (given.fps is not None or given.video):
        raise UsageError("--fps and --video describe a LeRobot dataset: add --format lerobot, or leave them out.")

    from vlarl.data.lerobot.demonstrations import DemonstrationWriter
    from vlarl.data.recording import open_experts
    from vlarl.data.recording import record as run_record
    from vlarl.data.rlds.writer import RldsWriter
    from vlarl.envs.base import ExpertFlaws
    from vlarl.observability.machine import available_cores

    _refuse_flaws(given.suite, given.close_high, given.release_early, given.hesitation)
    formats: dict[str, Callable[[str | Path, str], EpisodeWriter]] = {
        "rlds": RldsWriter,
        "lerobot": lambda root, name: DemonstrationWriter(root, name, given.fps, given.video),
    }
    num_envs = given.num_envs or available_cores()
    flaws = ExpertFlaws(given.close_high, given.release_early, given.noise, given.hesitation)
    with open_experts(given.suite, given.image_size, tuple(given.cameras), num_envs) as experts:
        folder, counts = run_record(
            experts,
            given.out,
            tasks,
            given.episodes,
            given.seed,
            flaws,
            given.keep_failures,
            _print_episode,
            formats[given.format],
        )
    print("\n".join(_record_lines(counts)))
    print(f"\ndataset: {folder}")
    return 0


def _refuse_flaws(suite: str, close_high: float, release_early: float, hesitation: float) -> None:
    """Refuse flaws that the experts of a suite don't have."""
    if suite.startswith("tabletop") and hesitation:
        raise UsageError("--hesitation: the experts of the tabletop don't pause; leave it out.")
    if hesitation == 1:
        raise UsageError("--hesitation 1: an expert that always pauses plays no episode; choose a fraction below 1.")
    if suite.startswith("metaworld") and (close_high or release_early):
        flag = "--close-high" if close_high else "--release-early"
        raise UsageError(f"{flag}: the experts of Meta-World make no mistakes on purpose; use --hesitation or --noise.")


def _record_parser() -> args.Parser:
    parser = args.Parser("data record", "Record scripted demonstrations of a suite's tasks as a dataset.")
    add = parser.add_argument
    suites = ", ".join(suite for suite in KNOWN_SUITES if suite != GYM)
    add("--suite", type=args.suite, required=True, metavar="S", help=f"one of {suites}")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of DIR/SUITE/1.0.0, or of LeRobot's DIR/SUITE",
    )
    add("--format", choices=("rlds", "lerobot"), default="rlds", help="format of the dataset")
    add("--fps", type=args.positive, metavar="N", help="LeRobot: steps per second that the dataset says it has")
    add("--video", action="store_true", help="LeRobot: frames as H.264 videos instead of images")
    add("--tasks", type=args.non_negative, nargs="+", metavar="N", help="ids of tasks; by default all of the suite")
    add("--episodes", type=args.positive, default=10, metavar="N", help="demonstrations per task")
    add("--noise", type=args.temperature, default=0.1, metavar="X", help="std of the noise on executed actions")
    high = "fraction of episodes of the tabletop or LIBERO in which the gripper closes too high, and then gives up"
    add("--close-high", type=args.fraction, default=0.0, metavar="P", help=high)
    early = "fraction of episodes of the tabletop or LIBERO in which the object is released before its target"
    add("--release-early", type=args.fraction, default=0.0, metavar="P", help=early)
    pauses = "fraction of the time that a simulator's expert stands still, as human operators do; below 1"
    add("--hesitation", type=args.fraction, default=0.0, metavar="P", help=pauses)
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
