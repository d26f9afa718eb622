"""The command line: finds the command, runs its one function, turns errors into messages and exit codes.

Commands import what they need when they run, so that `vlarl --help` is fast and never loads torch.
Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted (after saving).
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlarl import __version__
from vlarl.errors import UsageError, VlarlError, describe_error, excerpt, raised_in

INTERRUPTED = 130
LONGEST_MESSAGE = 20_000  # characters


def _train(arguments: list[str]) -> int:
    from vlarl.cli.configured import train

    return train(arguments)


def _eval(arguments: list[str]) -> int:
    from vlarl.cli.evaluate import evaluate

    return evaluate(arguments)


def _compare(arguments: list[str]) -> int:
    from vlarl.cli.compare import compare

    return compare(arguments)


def _finetune(arguments: list[str]) -> int:
    from vlarl.cli.finetune import finetune

    return finetune(arguments)


def _merge(arguments: list[str]) -> int:
    from vlarl.cli.merge import merge

    return merge(arguments)


def _push(arguments: list[str]) -> int:
    from vlarl.cli.push import push

    return push(arguments)


def _data(arguments: list[str]) -> int:
    from vlarl.cli.data import data

    return data(arguments)


def _env(arguments: list[str]) -> int:
    from vlarl.cli.env import env

    return env(arguments)


def _bench(arguments: list[str]) -> int:
    from vlarl.cli.bench import bench

    return bench(arguments)


def _doctor(arguments: list[str]) -> int:
    from vlarl.cli.doctor import doctor

    return doctor(arguments)


def _status(arguments: list[str]) -> int:
    from vlarl.cli.status import status

    return status(arguments)


def _report(arguments: list[str]) -> int:
    from vlarl.cli.report import report

    return report(arguments)


@dataclass(frozen=True)
class Command:
    """One command of the program."""

    run: Callable[[list[str]], int]
    usage: str
    summary: str


COMMANDS: dict[str, Command] = {
    "train": Command(_train, "[PRESET|FILE] [--section.field value …]", "improve a policy by reinforcement learning"),
    "eval": Command(_eval, "RUN|CHECKPOINT", "measure a checkpoint, with intervals; compare two; replay an episode"),
    "compare": Command(_compare, "RESULTS RESULTS", "compare two evaluations by a paired test"),
    "finetune": Command(_finetune, "[PRESET|FILE] [--section.field value …]", "make a base policy from demonstrations"),
    "merge": Command(_merge, "RUN|ADAPTER OUT", "fold an adapter into its base: a checkpoint in the original layout"),
    "push": Command(_push, "RUN|CHECKPOINT ORG/NAME", "upload a checkpoint with a model card to the Hugging Face hub"),
    "env": Command(_env, "list | tasks | check", "list suites and tasks; check an environment"),
    "data": Command(_data, "inspect | convert | record", "inspect, convert or record demonstrations"),
    "bench": Command(_bench, "env|rollout|update|sync|iteration", "measure the speed of a part on this machine"),
    "doctor": Command(
        _doctor, "[RUN|CHECKPOINT]", "check this machine, or a checkpoint and its memory; say what is missing"
    ),
    "status": Command(_status, "[RUN] [--json]", "print the status of a run, or of all runs"),
    "report": Command(_report, "RUN", "write the report of a run again"),
}


OTHER_COMMANDS = {
    **dict.fromkeys(("runs", "list", "ls", "ps", "logs"), "status"),
    "resume": "train --resume {run}",
    **dict.fromkeys(("evaluate", "test", "validate"), "eval {run}"),
    **dict.fromkeys(("sft", "fine-tune", "pretrain"), "finetune"),
    **dict.fromkeys(("envs", "suites"), "env list"),
    "tasks": "env tasks",
    "upload": "push {run} ORG/NAME",
    "run": "train",
}
"""Names of these commands in other programs."""


def limit_spinning() -> None:
    """Let OpenMP threads wait without occupying a core; effective if the process has not loaded torch yet.

    Threads that wait by spinning take the core from the thread they wait for as soon as anything else runs on the
    machine: a tenth of the speed on two shared cores. A short spin costs little on an idle machine.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments, by default the process's own, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    limit_spinning()
    try:
        return _dispatch(arguments)
    except VlarlError as error:
        from vlarl.config.secrets import masked
        from vlarl.observability.terminal import printable

        print(printable(masked(f"error: {excerpt(str(error), LONGEST_MESSAGE)}")), file=sys.stderr)
        return error.exit_code
    except SystemExit as error:  # of argparse, which has printed why; or of a user's environment, which has not
        if _is_of_argparse(error):
            raise
        reason = f"code that vlarl calls {describe_error(error)}"
        print(f"error: {reason}; let it return, or raise what is wrong", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `vlarl train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        from vlarl.observability.files import full_disk, is_full

        if error.errno == errno.ENAMETOOLONG:
            print(f"error: no file can have so long a name: {excerpt(str(error.filename), 200)}", file=sys.stderr)
            return UsageError.exit_code
        if not is_full(error):
            raise
        print(f"error: {full_disk(error.filename or os.getcwd())}", file=sys.stderr)
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    name, *rest = arguments
    if name == "--version":
        print(f"vlarl {__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(_unknown_command(name, rest))
    return command.run(rest)


def _is_of_argparse(error: SystemExit) -> bool:
    frames = raised_in(error)
    return bool(frames) and frames[-1].filename == argparse.__file__


def _unknown_command(name: str, rest: Sequence[str]) -> str:
    import difflib

    if written := OTHER_COMMANDS.get(name.lower().replace("_", "-")):
        run = next((text for text in rest if not text.startswith("-")), "RUN")
        return f"unknown command '{name}'; write: vlarl {written.format(run=run)}"
    match = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
    hint = f"did you mean 'vlarl {match[0]}'? Commands" if match else "commands"
    return f"unknown command '{name}'; {hint}: {', '.join(COMMANDS)} (vlarl --help)"


def _overview() -> str:
    lines = [
        "vlarl improves vision-language-action robot policies by reinforcement learning.",
        "",
        "usage: vlarl COMMAND [ARGUMENTS]",
        "",
        *(f"  {name:<9} {command.usage:<40} {command.summary}" for name, command in COMMANDS.items()),
        "",
        "  vlarl COMMAND --help    options of a command; `vlarl train --help` lists every option and preset",
        "  vlarl --version         version of the package",
        "",
        "Try it: `vlarl train` improves the built-in policy on the built-in tabletop in minutes, on any CPU.",
    ]
    return "\n".join(lines)
