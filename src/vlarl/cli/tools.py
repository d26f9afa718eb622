"""The small commands: `vlarl bench` and `vlarl report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlarl.cli import arguments as args
from vlarl.cli.runs import LISTED, find_run
from vlarl.config.known import KNOWN_SUITES, SUITES, is_prompts
from vlarl.config.paths import brief
from vlarl.config.run_checkpoints import list_runs
from vlarl.config.words import counted
from vlarl.errors import UsageError

BENCHES = ("env",)


def bench(arguments: Sequence[str]) -> int:
    """Measure the speed of a part on this machine and print it."""
    parser = args.Parser("bench", "Measure the speed of a part on this machine.")
    add = parser.add_argument
    add("what", nargs="?", choices=BENCHES, help="env: steps per second of an environment")
    add("--suite", type=args.suite, default=KNOWN_SUITES[0], metavar="S", help=f"one of {', '.join(SUITES)}")
    counts = "environments in parallel, by default 64 on the tabletop; for simulators several counts, such as 1 2"
    add("--num-envs", type=args.positive, nargs="+", metavar="N", help=counts)
    size = "side length of a rendered view in pixels; by default 64, or 256 for LIBERO"
    add("--image-size", type=args.positive, metavar="N", help=size)
    add("--steps", type=args.positive, default=200, metavar="N", help="steps per environment")
    add("--chunk", type=args.positive, default=8, metavar="K", help="simulators: actions between two rendered views")
    add("--exact-pixels", action="store_true", help="MuJoCo: render with the simulator's own quality settings")
    given = parser.parse_args(arguments)
    if given.what is None:
        raise UsageError("say what to measure: `vlarl bench env` measures the speed of an environment (--suite S)")
    if given.suite not in SUITES or is_prompts(given.suite):
        kind = "prompts" if is_prompts(given.suite) else "a Gymnasium environment"
        raise UsageError(f"--suite {given.suite}: `vlarl env check` times {kind}")
    facts = SUITES[given.suite]
    print("\n".join(_simulator_speed(given) if facts.in_processes else _tabletop_speed(given)))
    return 0


def _tabletop_speed(given: Any) -> list[str]:
    from vlarl.envs.bench import bench_tabletop

    (num_envs,) = given.num_envs or [64]
    result = bench_tabletop(given.suite, num_envs, given.image_size or 64, given.steps)
    return [
        f"{result.suite}, {counted(result.num_envs, 'environment')}, {result.image_size} px: steps per second",
        f"  rendered at every step  {result.env_steps_per_s:>9,.0f}",
        f"  rendered once per chunk {result.chunked_steps_per_s:>9,.0f}",
        f"  not rendered            {result.unrendered_steps_per_s:>9,.0f}",
    ]


def _simulator_speed(given: Any) -> list[str]:
    from vlarl.config.schema import EnvConfig
    from vlarl.envs.bench import bench_simulator

    env = EnvConfig(suite=given.suite, exact_pixels=given.exact_pixels)
    image_size = given.image_size or (256 if given.suite.startswith("libero_") else 64)
    result = bench_simulator(env, given.num_envs or [1, 2], image_size, given.steps, given.chunk)
    lines = [f"{result.suite}, one camera of {image_size} px rendered every {result.chunk} steps: steps per second"]
    if result.stock_steps_per_s is not None:
        lines.append(f"  stock hf-libero, 1 process         {result.stock_steps_per_s:>8.2f}")
    first = next(iter(result.steps_per_s.values()))
    for count, speed in result.steps_per_s.items():
        name = f"vlarl, {counted(count, 'process')}"
        lines.append(f"  {name:<35}{speed:>8.2f}  {speed / first:.2f} x")
    return [*lines, f"first reset {result.first_reset_s:.1f} s, another episode {result.reset_s:.2f} s"]


def report(arguments: Sequence[str]) -> int:
    """Write a run's report.html again and print where it is."""
    parser = args.Parser("report", "Write the report of a run again, from the files in its folder.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="name or folder of a run")
    args.add_root(parser)
    given = parser.parse_args(arguments)
    if given.run is None:
        runs = list_runs(given.root)
        known = f"Newest first: {', '.join(runs[:LISTED])}" if runs else f"{given.root}/ holds none"
        raise UsageError(f"name a run: `vlarl report RUN` takes the name or the folder of a run. {known}")
    folder = find_run(given.run, given.root)

    from vlarl.observability.report import write_report

    print(f"report: {brief(write_report(folder))}")
    return 0
