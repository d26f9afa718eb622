"""Errors that a user can act on: the command line prints their text alone. Anything else is a defect."""

from __future__ import annotations


class VlarlError(Exception):
    """Something went wrong that the message explains; the command line ends with `exit_code`."""

    exit_code = 1


class UsageError(VlarlError):
    """The request itself is at fault: configuration, input, a missing file, an existing run, an unwritable folder."""

    exit_code = 2


class MissingExtraError(UsageError):
    """An optional package is asked for and not installed; the message holds the command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'vlarl[{extra}]'")
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
