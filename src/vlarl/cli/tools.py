"""The small commands: `vlarl bench` and `vlarl report`."""

from __future__ import annotations

from collections.abc import Sequence

from vlarl.cli import arguments as args
from vlarl.cli.runs import find_run
from vlarl.config.known import KNOWN_SUITES

BENCHES = ("env",)


def bench(arguments: Sequence[str]) -> int:
    """Measure the speed of a part on this machine and print it."""
    parser = args.Parser("bench", "Measure the speed of a part on this machine.")
    add = parser.add_argument
    add("what", choices=BENCHES, help="env: steps of the built-in tabletop, rendered")
    add("--suite", type=args.suite, default=KNOWN_SUITES[0], metavar="S", help=f"one of {', '.join(KNOWN_SUITES)}")
    add("--num-envs", type=args.positive, default=64, metavar="N", help="environments that run side by side")
    add("--image-size", type=args.positive, default=64, metavar="N", help="pixels of a rendered view")
    add("--steps", type=args.positive, default=200, metavar="N", help="steps of each environment")
    given = parser.parse_args(arguments)

    from vlarl.envs.bench import bench_env

    result = bench_env(suite=given.suite, num_envs=given.num_envs, image_size=given.image_size, steps=given.steps)
    print(f"{result.suite}, {result.num_envs} environments, {result.image_size} px: environment steps a second")
    print(f"  rendered at every step  {result.env_steps_per_s:>9,.0f}")
    print(f"  rendered once a chunk   {result.chunked_steps_per_s:>9,.0f}")
    print(f"  not rendered            {result.unrendered_steps_per_s:>9,.0f}")
    return 0


def report(arguments: Sequence[str]) -> int:
    """Write a run's report.html again and print where it is."""
    parser = args.Parser("report", "Write the report of a run again, from the files in its folder.")
    parser.add_argument("run", metavar="RUN", help="name or folder of a run")
    parser.add_argument("--root", default="runs", metavar="DIR", help="folder that holds all runs")
    given = parser.parse_args(arguments)
    folder = find_run(given.run, given.root)

    from vlarl.observability.report import write_report

    print(f"report: {write_report(folder)}")
    return 0
