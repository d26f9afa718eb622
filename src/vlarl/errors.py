"""Errors that a user can act on: the command line prints their text alone. Anything else is a defect."""

from __future__ import annotations

import traceback

LONGEST_TEXT = 4000  # characters of an error that others have written, in a message


def excerpt(text: str, limit: int = LONGEST_TEXT) -> str:
    """The text, or the beginning and the end of one that is too long for a message or a log."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"


def raised_in(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames that an error went through, the innermost last, but for that of W&B, which wraps sys.exit."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.endswith("exit_hooks.py")]


def told(error: BaseException) -> str:
    """What a user's code did, as the rest of a sentence: `raised KeyError: 'x'`, or that it called sys.exit."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({excerpt(repr(error.code))})"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's own exception
        text = "(its text can't be read)"
    return f"raised {type(error).__name__}: {excerpt(text)}"


class VlarlError(Exception):
    """Something went wrong that the message explains; the command line ends with `exit_code`."""

    exit_code = 1


class UsageError(VlarlError):
    """The request itself is at fault: configuration, input, a missing file, an existing run, an unwritable folder."""

    exit_code = 2


def install_command(extra: str | None = None) -> str:
    """How vlarl is installed, with an extra where it is named: in a clone of its repository, as README says."""
    return "pip install -c constraints.txt -e " + (f"'.[{extra}]'" if extra else ".")


class MissingExtraError(UsageError):
    """An optional package is asked for and not installed; the message holds the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; in your clone of vlarl run: {install_command(extra)}")
        self.package = package
        self.extra = extra


class DivergedError(VlarlError):
    """The policy acts no more: its newest weights are not worth saving."""


class ClusterError(VlarlError):
    """The run can't go on where it runs; what was learnt before is in the last checkpoint."""


class WorkerLostError(ClusterError):
    """A worker of the run died or hangs."""

    def __init__(self, message: str, worker: str) -> None:
        super().__init__(message)
        self.worker = worker  # its name

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str]]:
        return type(self), (str(self), self.worker)


class WorkerFailedError(WorkerLostError):
    """A worker raised what it should not have: it is there, and not to be trusted any more."""
