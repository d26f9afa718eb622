"""`vlarl bench`: the speed of an environment, and of the parts of a run beside its peers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlarl.cli import arguments as args
from vlarl.config.known import KNOWN_SUITES, SUITES, is_prompts
from vlarl.config.words import counted
from vlarl.errors import UsageError

if TYPE_CHECKING:
    from vlarl.bench.request import BenchRequest
    from vlarl.bench.results import Report

HELP = """\
usage: vlarl bench env [--suite S] …
       vlarl bench rollout|update|sync|iteration [--model CHECKPOINT] …

  env         steps per second of an environment
  rollout     decisions through the engine, beside transformers on the same weights
  update      optimizer steps of LoRA, beside peft on the same weights
  sync        new weights for an engine: of this process, and of another one
  iteration   a whole iteration of GRPO: rollout, update and the rest

`vlarl bench rollout --help` lists the options of a command; docs/performance.md explains the tables."""

DEFAULT_MODEL = "builtin:tiny-oft"
DEFAULT_RANK = 32
PEERS = {
    "rollout": "also measure transformers on the same weights, for a policy without adapters",
    "update": "also measure peft on the same weights",
    "sync": "also measure a copy of all weights",
}
NO_PEER = {"rollout": True, "update": False}  # the value of --adapters for which a command has no peer
BOTH = "by default both ways are measured"


def bench(arguments: Sequence[str]) -> int:
    """Measure the speed of a part on this machine and print it."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name not in BENCHES:
        what = f"argument what: invalid choice: {name!r} (choose from {', '.join(BENCHES)})"
        chosen = (
            "say what to measure: `vlarl bench env` measures the speed of an environment (--suite S), `vlarl bench "
        )
        chosen += "rollout`, `update`, `sync` and `iteration` that of the parts of a run (--model CHECKPOINT)"
        raise UsageError(chosen if not name else f"{what} (see `vlarl bench --help`)")
    return BENCHES[name](rest)


def env(arguments: Sequence[str]) -> int:
    """Print the steps per second of an environment."""
    parser = args.Parser("bench env", "Measure the steps per second of an environment on this machine.")
    add = parser.add_argument
    add("--suite", type=args.suite, default=KNOWN_SUITES[0], metavar="S", help=f"one of {', '.join(SUITES)}")
    counts = "environments in parallel, by default 64 on the tabletop; for simulators several counts, such as 1 2"
    add("--num-envs", type=args.positive, nargs="+", metavar="N", help=counts)
    size = "side length of a rendered view in pixels; by default 64, or 256 for LIBERO"
    add("--image-size", type=args.positive, metavar="N", help=size)
    add("--steps", type=args.positive, default=200, metavar="N", help="steps per environment")
    add("--chunk", type=args.positive, default=8, metavar="K", help="simulators: actions between two rendered views")
    add("--exact-pixels", action="store_true", help="MuJoCo: render with the simulator's own quality settings")
    given = parser.parse_args(arguments)
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


def rollout(arguments: Sequence[str]) -> int:
    """Print how long decisions take."""
    parser = _parser(
        "rollout", "Measure decisions through the engine: a batch of observations to a batch of actions.", BOTH
    )
    size = "decisions in a batch; several sizes are measured one after the other"
    parser.add_argument("--rows", type=args.positive, nargs="+", default=[1, 64], metavar="N", help=size)

    def measure(given: argparse.Namespace, request: BenchRequest) -> Report:
        from vlarl.bench.rollout import bench_rollout

        return bench_rollout(request, given.rows)

    return _run(parser, arguments, measure)


def update(arguments: Sequence[str]) -> int:
    """Print how long optimizer steps take."""
    trained = "by default adapters; --no-adapters trains all weights, which needs float32"
    parser = _parser(
        "update", "Measure optimizer steps of GRPO through the learner, by size of the microbatch.", trained
    )
    size = "decisions in a forward and backward pass; several sizes are measured one after the other"
    parser.add_argument("--microbatch", type=args.positive, nargs="+", default=[1, 8, 32], metavar="N", help=size)

    def measure(given: argparse.Namespace, request: BenchRequest) -> Report:
        from vlarl.bench.update import bench_update

        return bench_update(request, given.microbatch)

    return _run(parser, arguments, measure)


def sync(arguments: Sequence[str]) -> int:
    """Print how long an engine takes to get new weights."""
    parser = _parser("sync", "Measure how long an engine takes to get changed weights, and what is sent.", BOTH)
    size = "largest message in megabytes, as distributed.sync_bucket_mb"
    parser.add_argument("--bucket-mb", type=args.positive, default=256, metavar="N", help=size)

    def measure(given: argparse.Namespace, request: BenchRequest) -> Report:
        from vlarl.bench.sync import bench_sync

        return bench_sync(request, given.bucket_mb)

    return _run(parser, arguments, measure)


def iteration(arguments: Sequence[str]) -> int:
    """Print how long an iteration takes."""
    trained = "by default adapters; --no-adapters trains all weights, which needs float32"
    parser = _parser("iteration", "Measure whole iterations of GRPO with an environment that costs nothing.", trained)
    add = parser.add_argument
    add("--decisions", type=args.positive, default=1024, metavar="N", help="decisions of an iteration")
    add("--rows", type=args.positive, default=32, metavar="N", help="environments, and so decisions in a batch")
    add("--microbatch", type=args.positive, default=32, metavar="N", help="decisions in a forward and backward pass")

    def measure(given: argparse.Namespace, request: BenchRequest) -> Report:
        from vlarl.bench.iteration import bench_iteration

        return bench_iteration(request, given.decisions, given.rows, given.microbatch)

    return _run(parser, arguments, measure)


BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "env": env,
    "rollout": rollout,
    "update": update,
    "sync": sync,
    "iteration": iteration,
}


def _parser(name: str, description: str, adapters: str) -> args.Parser:
    """The options that the parts of a run have in common."""
    parser = args.Parser(f"bench {name}", description)
    add = parser.add_argument
    switch = argparse.BooleanOptionalAction
    add("--model", default=DEFAULT_MODEL, metavar="CHECKPOINT", help="folder, built-in or fresh model, or hub id")
    decoders = ("auto", "autoregressive", "parallel")
    add("--decoder", choices=decoders, default="auto", help="as policy.decoder: auto is the checkpoint's own")
    add("--dtype", choices=("float32", "bfloat16"), help="type of the weights; by default bfloat16, on a CPU float32")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:N; auto is a GPU if there is one")
    add("--adapters", action=switch, default=None, help=f"LoRA adapters on every linear layer; {adapters}")
    add("--rank", type=args.positive, metavar="N", help=f"rank of the adapters; by default {DEFAULT_RANK}")
    repeats = "repeats after the warm-up, of which the table gives median and quartiles"
    add("--repeats", type=args.positive, default=5, metavar="N", help=repeats)
    if name != "iteration":
        add("--peers", action=switch, default=None, help=f"{PEERS[name]}; by default they are measured")
    add("--memory-gb", type=args.temperature, metavar="N", help="GPU memory in GiB that may be used; by default all")
    add("--out", type=Path, metavar="FILE", help="also write the results as JSON")
    add("--json", action="store_true", help="print the results as JSON in place of the table")
    return parser


def _run(
    parser: args.Parser,
    arguments: Sequence[str],
    measure: Callable[[argparse.Namespace, BenchRequest], Report],
) -> int:
    given = parser.parse_args(arguments)
    name = parser.prog.rpartition(" ")[2]
    peers = getattr(given, "peers", None)
    has_peer = name not in NO_PEER or NO_PEER[name] is not given.adapters
    if peers and not has_peer:
        way = "--adapters" if given.adapters else "--no-adapters"
        raise UsageError(f"--peers: `vlarl bench {name} {way}` has no peer; leave out one of the two.")
    if given.rank is not None and given.adapters is False:
        raise UsageError("--rank is for adapters, and --no-adapters leaves them out: give one of the two.")
    if given.out is not None and not given.out.parent.is_dir():
        raise UsageError(f"--out {given.out}: there is no directory {given.out.parent}; make it first.")

    from vlarl.bench.request import BenchRequest

    request = BenchRequest(
        model=given.model,
        decoder=given.decoder,
        dtype=given.dtype,
        device=given.device,
        adapters=given.adapters,
        rank=given.rank or DEFAULT_RANK,
        repeats=given.repeats,
        peers=has_peer and peers is not False,
        memory_gb=given.memory_gb,
    )
    report = measure(given, request)
    text = json.dumps(report.to_json(), indent=2)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    print(text if given.json else "\n".join(report.lines()))
    return 0
