"""One worker of a cluster: a Ray actor, and the driver's handle to it.

    Worker.call("method", …) ──► Host (a Ray actor): part.method(…)
    Worker.get(request)      ◄── Result: value or error, and when it was computed

The actor class is the same for every role; its part is a plain object that the actor's process builds. A worker runs
one call at a time, in the order of the requests. `get` waits no longer than the request's deadline; a worker that
misses it, or has died, is lost: the error says so and holds the end of the worker's log.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ray
from ray import exceptions

from vlarl.envs.process_log import last_lines, shorten
from vlarl.errors import ClusterError, UsageError, VlarlError, WorkerFailedError, WorkerLostError, excerpt
from vlarl.observability.trace import NoTrace

Build = Callable[[], object]
"""Builds a worker's part, in the worker's process."""

DIED = (
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,  # it had returned, and its machine is gone
)
"""What Ray raises for an actor that is gone."""

LOG_TAIL_LINES = 12
LONGEST_TRACEBACK = 16_000  # characters
_END = object()


@dataclass(frozen=True)
class Result:
    """The outcome of a call."""

    value: Any = None
    error: VlarlError | None = None  # for the user, or for the caller
    defect: str | None = None  # the traceback of any other exception
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Location:
    """Where a worker runs."""

    pid: int
    host: str


class Host:
    """The actor's side: builds its part once, then runs calls of its methods."""

    _log: IO[bytes] | None = None

    def prepare(self, log_file: str, folder: str, modules: Sequence[str]) -> None:
        """Write to the log from now on; resolve paths and modules as the driver does."""
        _write_to(log_file)
        self._log = open(log_file, "a+b", buffering=0)  # noqa: SIM115 - as long as the process
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [path for path in modules if path not in sys.path]

    def begin(self, build: Build) -> Result:
        """Build the part."""
        return _run(lambda: self._build(build))

    def _build(self, build: Build) -> Location:
        self.part = build()
        return Location(os.getpid(), socket.gethostname())

    def call(self, method: str, *arguments: Any) -> Result:
        """Call a method of the part."""
        if self._log is not None:
            shorten(self._log)
        return _run(lambda: getattr(self.part, method)(*arguments))

    def stream(self, method: str, *arguments: Any) -> Iterator[Result]:
        """Call a generator method of the part, and yield its items one by one."""
        items = getattr(self.part, method)(*arguments)
        while (result := _run(lambda: next(items, _END))).value is not _END:
            yield result


def _write_to(log_file: str) -> None:
    """Send everything that the process writes, also while it crashes, to a log of its own."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True)


def _run(work: Callable[[], Any]) -> Result:
    began = time.time()
    try:
        return Result(work(), began=began, ended=time.time())
    except VlarlError as error:
        return Result(error=_portable(error))
    except (Exception, SystemExit):  # a process boundary: whatever a part raises is reported to the driver
        return Result(defect=excerpt(traceback.format_exc().strip(), LONGEST_TRACEBACK))


def _portable(error: VlarlError) -> VlarlError:
    """The error in a form that can be pickled: some can't be rebuilt from their text."""
    try:
        pickle.loads(pickle.dumps(error))
    except TypeError:
        return UsageError(str(error)) if isinstance(error, UsageError) else VlarlError(str(error))
    return error


@dataclass
class Request:
    """A pending call."""

    worker: Worker
    method: str
    reference: Any
    deadline: float  # monotonic


@dataclass
class Worker:
    """The driver's side of one worker."""

    name: str  # "learner 0"
    create: Callable[[], Any]  # a new actor in the worker's bundle on the cluster
    build: Build
    log_file: Path
    timeout_s: float
    start_timeout_s: float
    trace: NoTrace
    on_start: Callable[[], None]  # called whenever it has started
    location: Location | None = None
    actor: Any = None
    _beginning: Request | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the actor; `wait_started` waits until it is ready."""
        self.location = None
        self.actor = self.create()
        # A separate call, and the first: `build` may be of a module that only the driver's path finds.
        self.actor.prepare.remote(str(self.log_file), os.getcwd(), list(sys.path))
        reference = self.actor.begin.remote(self.build)
        self._beginning = Request(self, "begin", reference, time.monotonic() + self.start_timeout_s)

    def wait_started(self) -> None:
        """Wait until it is ready for calls."""
        if self._beginning is not None:
            self.location = self.get(self._beginning)
            self._beginning = None
            self.on_start()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Request:
        """Call a method of the part, in the order of requests; the result is due within the time limit."""
        with _store_errors():
            reference = self.actor.call.remote(method, *arguments)
        return Request(self, method, reference, time.monotonic() + (timeout_s or self.timeout_s))

    def get(self, request: Request) -> Any:
        """The result's value; WorkerLostError where none came, and the worker's own error where it raised one."""
        left = request.deadline - time.monotonic()
        try:
            with _store_errors():
                result = ray.get(request.reference, timeout=max(left, 0.0))
        except exceptions.GetTimeoutError:
            raise self.lost(f"has not replied to `{request.method}` in time: it hangs") from None
        except DIED as error:
            raise self.lost(_reason_of_death(error)) from None
        return self.unwrap(request.method, result)

    def stream(self, method: str, *arguments: Any) -> Any:
        """Call a generator method: a generator of references, each due within the time limit."""
        with _store_errors():
            return self.actor.stream.options(num_returns="streaming").remote(method, *arguments)

    def next(self, items: Any, method: str) -> Any:
        """The next item of a stream, once `ray.wait` has reported it ready."""
        try:
            result = ray.get(next(items))
        except DIED as error:
            raise self.lost(_reason_of_death(error)) from None
        except StopIteration:
            raise VlarlError(f"{self.name} ended `{method}` without a result; its log is {self.log_file}.") from None
        return self.unwrap(method, result)

    def unwrap(self, method: str, result: Result) -> Any:
        """The value of a result; what the worker raised is raised here."""
        if result.error is not None:
            raise result.error
        if result.defect is not None:
            what = f"{self.name} failed in `{method}`:\n{result.defect}\nIts log is {self.log_file}."
            raise WorkerFailedError(what, self.name)
        self.trace.span(self.name, method, result.began, result.ended)
        return result.value

    def lost(self, what: str) -> WorkerLostError:
        """The error for a worker that can't reply any more."""
        where = f" (pid {self.location.pid} on {self.location.host})" if self.location else ""
        return WorkerLostError(f"{self.name}{where} {what}.{self.log_tail()}", self.name)

    def log_tail(self) -> str:
        """The last lines that it wrote, for a message; empty if it wrote nothing."""
        try:
            with self.log_file.open("rb") as file:
                tail = "".join(f"\n    {line}" for line in last_lines(file, LOG_TAIL_LINES))
        except OSError:
            return ""
        return f" The end of {self.log_file}:{tail}" if tail else ""

    def replace(self) -> None:
        """End it, even if it hangs, start another in its place, and wait until that is ready."""
        self.stop()
        self.start()
        self.wait_started()

    def stop(self) -> None:
        """End it now."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
            self.actor = None


def get_all(requests: Sequence[Request]) -> list[Any]:
    """The values of all results, in the order of the requests; the first failure is raised at once."""
    waiting = {request.reference: request for request in requests}
    values: dict[Any, Any] = {}
    while waiting:
        left = min(request.deadline for request in waiting.values()) - time.monotonic()
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(left, 0.0))
        late = [r for r, q in waiting.items() if not ready and q.deadline <= time.monotonic()]
        for reference in ready or late:
            request = waiting.pop(reference)
            values[reference] = request.worker.get(request)
    return [values[request.reference] for request in requests]


def _reason_of_death(error: Exception) -> str:
    """Ray's explanation, shortened."""
    text = str(error)
    if "ray.kill" in text:
        return "was stopped"
    if "connection error code 2" in text or "WorkerCrashed" in type(error).__name__:
        return "died (killed, out of memory, or crashed)"
    first = next((line.strip() for line in text.splitlines() if "dead because" in line), text.splitlines()[0])
    return f"died: {first}"


def put(value: object) -> Any:
    """Put a value into the object store once, for several workers to read."""
    with _store_errors():
        return ray.put(value)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn the error of a full object store into one that says what to do."""
    try:
        yield
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        raise ClusterError(
            f"Ray's object store is full, and the disk it spills to as well ({type(error).__name__}): raise "
            "distributed.object_store_mb, free some space, or collect fewer or smaller episodes (rollout.num_groups, "
            "env.image_size)."
        ) from None
