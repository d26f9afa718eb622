"""Errors that a user can act on: the command line prints only their message. Any other exception is a defect."""

from __future__ import annotations

import traceback

LONGEST_TEXT = 4000  # characters of another library's or a user's error in a message


def excerpt(text: str, limit: int = LONGEST_TEXT) -> str:
    """The text; of one that is too long for a message or a log, the beginning and the end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters left out) … {text[-half:]}"


def raised_in(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error's traceback, the innermost last, without that of W&B, which wraps sys.exit."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.endswith("exit_hooks.py")]


def describe_error(error: BaseException) -> str:
    """An exception of a user's code as the end of a sentence: `raised KeyError: 'x'`, or `called sys.exit(1)`."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({excerpt(repr(error.code))})"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's own exception
        text = "(its text can't be read)"
    return f"raised {type(error).__name__}: {excerpt(text)}"


class VlarlError(Exception):
    """An error whose message explains it to the user; the command line ends with `exit_code`."""

    exit_code = 1


class UsageError(VlarlError):
    """The request is wrong: configuration, input, a missing file, an existing run, an unwritable folder."""

    exit_code = 2


def install_command(extra: str | None = None) -> str:
    """The command that installs vlarl, with an extra if one is named, in a clone of its repository."""
    return "pip install -c constraints.txt -e " + (f"'.[{extra}]'" if extra else ".")


class MissingExtraError(UsageError):
    """An optional package is needed and not installed; the message has the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; in your clone of vlarl run: {install_command(extra)}")
        self.package = package
        self.extra = extra


class DivergedError(VlarlError):
    """The policy has diverged: its newest weights are unusable and not saved."""


class ClusterError(VlarlError):
    """The run can't continue on this cluster; its last checkpoint has the progress until then."""


class RowsLostError(ClusterError):
    """Processed observations are gone with the machine that held them."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name  # of the object that was missed first

    def __reduce__(self) -> tuple[type[RowsLostError], tuple[str, str]]:
        return type(self), (str(self), self.name)


class LearnersLostError(ClusterError):
    """Learners were lost, and the run may start them again from its newest checkpoint."""


class WorkerLostError(ClusterError):
    """A worker of the run died or hangs."""

    def __init__(self, message: str, worker: str) -> None:
        super().__init__(message)
        self.worker = worker  # its name

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str]]:
        return type(self), (str(self), self.worker)


class WorkerFailedError(WorkerLostError):
    """A worker raised an unexpected exception: it is alive, but its state can't be trusted."""
