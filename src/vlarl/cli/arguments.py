"""argparse for the commands without a configuration; mistakes raise UsageError."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from vlarl.config.rules.env import check_suite
from vlarl.config.run_checkpoints import DEFAULT_ROOT
from vlarl.config.source.spelling import suite_name
from vlarl.errors import UsageError


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None and switches that are off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(str(item) for item in action.default)})"
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, shows defaults and accepts no abbreviations."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"vlarl {command}",
            description=description,
            allow_abbrev=False,
            formatter_class=_Formatter,
        )

    def parse_known_args(  # type: ignore[override]  # one signature is enough for vlarl
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; hyphens and underscores in names of options are equivalent."""
        return super().parse_known_args([self._hyphenated(text) for text in args], namespace)

    def flags(self) -> list[str]:
        """The flags of the command."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def _hyphenated(self, text: str) -> str:
        name, has_value, value = text.partition("=")
        with_hyphens = name.replace("_", "-")
        known = text.startswith("--") and with_hyphens in self._option_string_actions
        return with_hyphens + has_value + value if known else text

    def error(self, message: str) -> NoReturn:
        """Report a mistake without the usage text, which `--help` has."""
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of all runs, with the same two names in every command."""
    parser.add_argument(
        "--root", "--run.root", dest="root", default=DEFAULT_ROOT, metavar="DIR", help="folder that holds all runs"
    )


def positive(text: str) -> int:
    """An integer above zero."""
    return _integer(text, 1)


def non_negative(text: str) -> int:
    """An integer, zero or above."""
    return _integer(text, 0)


def gigabytes(text: str) -> float:
    """The size of a card: a number above the 1 GB that CUDA takes of it."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of GB above 1")
    return value


def temperature(text: str) -> float:
    """A number, zero or above."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number >= 0")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    value = temperature(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number >= 0 and <= 1")
    return value


def suite(text: str) -> str:
    """A suite that exists, in vlarl's spelling."""
    text = suite_name(text)
    for problem in check_suite(text, "suite"):
        raise argparse.ArgumentTypeError(str(problem))
    return text


def suites(text: str) -> tuple[str, ...]:
    """One or several suites that exist, separated by commas, in vlarl's spelling."""
    return tuple(suite(name) for name in text.split(","))


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= {least}")
    return value
