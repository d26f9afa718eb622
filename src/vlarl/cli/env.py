"""`vlarl env`: list suites and their tasks, and check that an environment meets the contract."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlarl.cli import arguments as args
from vlarl.config.known import GYM, KNOWN_SUITES, PROMPTS, SUITES, TABLETOP_IMAGE_SIZE, is_prompts
from vlarl.config.problems import unknown
from vlarl.config.schema import Config
from vlarl.config.source.flags import parse_flags
from vlarl.config.source.load import load_config
from vlarl.config.source.presets import presets_of
from vlarl.config.suites import cameras_of, suite_facts
from vlarl.config.words import counted, plural
from vlarl.errors import UsageError, install_command

if TYPE_CHECKING:
    from vlarl.envs.base import EnvFactory, Expert, RewardMode, SingleEnv, SuiteSpec
    from vlarl.envs.check import Subject

IMAGE_SIZE = 224  # default of env.image_size: what OpenVLA reads; on the tabletop, what the built-in policies read
WIDTH = 110
LABELS = {"passed": "ok", "breach": "BREACH", "note": "note"}

HELP = """\
usage: vlarl env list
       vlarl env tasks SUITE
       vlarl env check [SUITE|PRESET|FILE] [--section.field value …] [--out DIR] [--trust]

  list    suites, their tasks and limits, and what to install for them
  tasks   ids and instructions of a suite's tasks
  check   run the configured environment and report what breaks the contract that training relies on"""


def env(arguments: Sequence[str]) -> int:
    """Run `vlarl env list`, `tasks` or `check`."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    commands = {"list": list_suites, "tasks": list_tasks, "check": check}
    if name not in commands:
        raise UsageError(f"{name!r}: {unknown('command', name, tuple(commands))} (see `vlarl env --help`)")
    return commands[name](rest)


def list_suites(arguments: Sequence[str]) -> int:
    """Print a line for each suite."""
    args.Parser("env list", "List the suites, their tasks and limits, and what to install for them.").parse_args(
        arguments
    )
    rows = [("suite", "tasks", "steps", "")]
    for name, facts in SUITES.items():
        install = "built in" if facts.extra is None else install_command(facts.extra)
        rows.append((name, str(facts.num_tasks), str(facts.max_steps), install))
    rows.append((GYM, "", "", "any Gymnasium environment; see docs/adding-an-env.md"))
    rows.append((PROMPTS, "", "1", "prompts of your own data; see docs/prompts.md"))
    print("\n".join(f"{name:<20} {tasks:>5}  {steps:>5}  {text}".rstrip() for name, tasks, steps, text in rows))
    return 0


def list_tasks(arguments: Sequence[str]) -> int:
    """Print a line for each task of a suite."""
    parser = args.Parser("env tasks", "List the ids and instructions of a suite's tasks.")
    parser.add_argument("suite", type=args.suite, metavar="SUITE", help="one of `vlarl env list`")
    suite = parser.parse_args(arguments).suite
    if suite == GYM:
        raise UsageError("the tasks of gym are those of gym.instructions in your configuration")
    if suite == PROMPTS:
        raise UsageError("prompts has one task: the data that prompts.path names in your configuration")
    print("\n".join(f"{task.task_id:>3}  {task.instruction}" for task in _spec(suite).tasks))
    return 0


def check(arguments: Sequence[str]) -> int:
    """Check the configured environment, print the findings, and return 1 if it breaks the contract."""
    about = (
        "Run short episodes of random actions in the configured environment and report what breaks the contract that "
        "training relies on. Options are those of `vlarl train`, such as --env.suite, --env.max_steps and section gym."
    )
    parser = args.Parser("env check", about)
    parser.usage = "vlarl env check [SUITE|PRESET|FILE] [--section.field value …] [--out DIR] [--trust]"
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the first images here as PNG")
    trust = "run the code that the configuration of another user's run names (docs/security.md)"
    parser.add_argument("--trust", action="store_true", help=trust)
    given, rest = parser.parse_known_args(arguments)
    flags = parse_flags(rest, Config)
    sources, flags.positionals = flags.positionals, []
    if len(sources) > 1:
        raise UsageError(f"one suite, preset or file is enough; got {', '.join(sources)}")
    if sources and (suite := _suite(sources[0])) is not None:
        given_suite = flags.values.setdefault("env.suite", suite)
        if given_suite != suite:
            raise UsageError(f"one suite is enough; got {sources[0]} and --env.suite {given_suite}")
        sources = []
    config = load_config(sources[0] if sources else None, flags, with_policy=False, trust=given.trust)

    from vlarl.envs.check import check_env

    num_breaches, num_passed = 0, 0
    with _subject(config) as subject:
        print(f"{config.env.suite}, task 0: {subject.spec.tasks[0].instruction}")
        for finding in check_env(subject):
            num_breaches += finding.kind == "breach"
            num_passed += finding.kind == "passed"
            print(_entry(LABELS[finding.kind], finding.text, finding.remedy), flush=True)
        if given.out is not None:
            for file in _write_images(subject, given.out):
                print(f"image: {file}")
    print(f"{num_breaches or 'no'} {plural(num_breaches, 'breach')}, {counted(num_passed, 'check')} passed")
    return 1 if num_breaches else 0


def _entry(label: str, text: str, remedy: str) -> str:
    """A finding as lines, the remedy below it."""
    lines = textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<8}", subsequent_indent=" " * 10)
    return "\n".join(lines + textwrap.wrap(remedy, WIDTH, initial_indent=" " * 10 + "→ ", subsequent_indent=" " * 12))


def _suite(name: str) -> str | None:
    """The suite of this name, or the first of a family (`libero`); None for a preset or file."""
    found = name if name in KNOWN_SUITES else next((suite for suite in SUITES if suite.startswith(f"{name}_")), None)
    is_word = Path(name).name == name and not Path(name).suffix and not Path(name).exists()
    if found is None and is_word and name not in (known := presets_of(Config)):
        raise UsageError(f"{name}: {unknown('suite or preset', name, [*KNOWN_SUITES, *known])}")
    return found


@contextmanager
def _subject(config: Config) -> Iterator[Subject]:
    """The configured environment in this process, and a second instance in another process or slot."""
    from vlarl.envs.build import build_factory, build_pool
    from vlarl.envs.check import SlotEnv, Subject
    from vlarl.envs.process_pool import WorkerPool
    from vlarl.envs.tabletop.expert import SlotExpert
    from vlarl.envs.tabletop.pool import TabletopPool

    facts = suite_facts(config.env, config.gym)
    reward: RewardMode = "dense" if facts is not None and facts.has_dense_reward else "sparse"
    is_tabletop = config.env.suite.startswith("tabletop_")
    size = config.env.image_size or (TABLETOP_IMAGE_SIZE if is_tabletop else IMAGE_SIZE)
    if facts is not None and not facts.in_processes:
        num_views = len(config.gym.images if config.env.suite == GYM else cameras_of(config.env))
        shape = (0, 1, 1, 3) if is_prompts(config.env.suite) else (num_views, size, size, 3)
        pool = build_pool(config.env, config.gym, 2, size, reward, config.prompts)
        try:
            expert = SlotExpert(pool.world, 0) if isinstance(pool, TabletopPool) else None
            yield Subject(SlotEnv(pool, 0), pool.spec, shape, SlotEnv(pool, 1), expert)
        finally:
            pool.close()
        return
    factory = build_factory(config.env, config.gym, size, reward)
    os.environ.update(factory.variables(0))  # read when a simulator is imported
    workers = WorkerPool(factory, 1, config.env.timeout_s)
    try:
        made = factory.build()
        try:
            yield Subject(made, factory.spec, factory.image_shape, SlotEnv(workers, 0), _expert(factory, made))
        finally:
            made.close()
    finally:
        workers.close()


def _expert(factory: EnvFactory, made: SingleEnv) -> Expert | None:
    try:
        return factory.build_expert(made)
    except UsageError:
        return None


def _write_images(subject: Subject, folder: Path) -> list[Path]:
    """Write the first views of the first task, and a frame of its video."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    subject.env.reset(subject.task())
    seen = subject.env.observe()
    shown = [*seen.images, *(seen.prompt.images if seen.prompt is not None else ())]
    images = {f"view_{index}.png": view for index, view in enumerate(shown)}
    images["frame.png"] = subject.env.frame()
    for name, image in images.items():
        Image.fromarray(image).save(folder / name)
    return [folder / name for name in images]


def _spec(suite: str) -> SuiteSpec:
    """A suite's description, without its simulator."""
    if suite.startswith("libero_"):
        from vlarl.envs.libero.suites import libero_spec

        return libero_spec(suite, None)
    if suite.startswith("metaworld_"):
        from vlarl.envs.metaworld.suites import metaworld_spec

        return metaworld_spec(suite)
    if is_prompts(suite):
        from vlarl.envs.build import NO_DATA, build_prompts

        return build_prompts(suite, NO_DATA).spec
    from vlarl.envs.tabletop.tasks import get_suite

    return get_suite(suite).spec
