"""One worker of a cluster: a Ray actor, and the driver's handle to it.

    Worker.call("method", …) ──► Host (a Ray actor): part.method(…)
    Worker.get(request)      ◄── Result: value or error, and when it was computed
    request.stored           names of what `call_and_store` left in the object store of the worker's machine

The actor class is the same for every role; its part is a plain object that the actor's process builds. A worker runs
one call at a time, in the order of the requests. `get` waits no longer than the request's deadline; a worker that
misses it, or has died, is lost: the error says so and holds the end of the worker's log. `replace_later` starts another
one in its place in a thread, so that the group that it belongs to can serve the other workers meanwhile.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import ray
from ray import exceptions

from vlarl.distributed.shared_folder import RUN_FOLDER, SharedFolder
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
SHARED_FILE = ".shared"  # in logs/: what the driver writes there, for workers to find
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before a replacement that died is started again
PING_S = 1.0  # until a worker that does not reply counts as busy
VISIBLE_S = 5.0  # until a file that the driver has written is seen on all machines that share the folder
_END = object()


@dataclass(frozen=True)
class Call:
    """A method and its arguments as one object: Ray would serialize each argument by itself."""

    method: str
    arguments: tuple[Any, ...]


def packed(method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is sent for a call; an object of the store has to be an argument of its own, to be fetched before it."""
    if any(isinstance(argument, ray.ObjectRef) for argument in arguments):
        return method, *arguments
    return (Call(method, arguments),)


@dataclass(frozen=True)
class Result:
    """The outcome of a call."""

    value: Any = None
    error: VlarlError | None = None  # for the user, or for the caller
    defect: str | None = None  # the traceback of any other exception
    is_loss: bool = False  # of a defect: an object that it needed was lost with another worker or machine
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
    _refusal: str = ""  # why it can't begin

    def prepare(
        self, log_file: str, folder: str, modules: Sequence[str], nonce: str, shared: SharedFolder = RUN_FOLDER
    ) -> None:
        """Write to the log from now on; resolve paths and modules as the driver does.

        `nonce` is what the driver has written beside the log. Where it can't be read, nothing is written either.
        """
        if not _is_read(Path(log_file).with_name(SHARED_FILE), nonce):
            self._refusal = shared.refusal(Path(log_file).stem, Path(log_file).parents[1])
            return
        try:
            _write_to(log_file)
            self._log = open(log_file, "a+b", buffering=0)  # noqa: SIM115 - as long as the process
        except OSError as error:
            self._refusal = f"{log_file} can't be written on {socket.gethostname()} ({error.strerror}): allow it there."
            return
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [path for path in modules if path not in sys.path]

    def ping(self) -> None:
        """Return at once: only an actor that is gone can't."""

    def begin(self, build: Build) -> Result:
        """Build the part."""
        return _run(lambda: self._build(build))

    def _build(self, build: Build) -> Location:
        if self._refusal:
            raise UsageError(self._refusal)
        self.part = build()
        return Location(os.getpid(), socket.gethostname())

    def call(self, method: str | Call, *arguments: Any) -> Result:
        """Call a method of the part."""
        call = method if isinstance(method, Call) else Call(method, arguments)
        if self._log is not None:
            shorten(self._log)
        return _run(lambda: getattr(self.part, call.method)(*call.arguments))

    def call_and_store(self, num_stored: int, method: str | Call, *arguments: Any) -> tuple[Any, ...]:
        """Call a method that returns its value and objects that are to be stored; each becomes a result of its own.

        Results belong to the driver, which has their names alone: they outlive this worker.
        """
        result = self.call(method, *arguments)
        if result.error is not None or result.defect is not None:
            return (result, *[None] * num_stored)
        value, *stored = result.value
        return (replace(result, value=value), *stored)

    def stream(self, method: str, *arguments: Any) -> Iterator[Result]:
        """Call a generator method of the part, and yield its items one by one."""
        items = getattr(self.part, method)(*arguments)
        while (result := _run(lambda: next(items, _END))).value is not _END:
            yield result


def _is_read(file: Path, nonce: str) -> bool:
    """Whether a file has this content; one on a network may become visible a little late."""
    end = time.monotonic() + VISIBLE_S
    while True:
        with suppress(OSError):
            if file.read_text(encoding="ascii") == nonce:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


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
    except (Exception, SystemExit) as error:  # a process boundary: whatever a part raises is reported to the driver
        text = excerpt(traceback.format_exc().strip(), LONGEST_TRACEBACK)
        return Result(defect=text, is_loss=isinstance(error, exceptions.ObjectLostError))


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
    stored: tuple[Any, ...] = ()  # references to objects that the call leaves in the store


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
    nonce: str  # content of SHARED_FILE beside the log
    folder: SharedFolder = RUN_FOLDER  # that the log is in
    location: Location | None = None
    actor: Any = None
    _beginning: Request | None = field(default=None, repr=False)
    _has_ended: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def start(self) -> None:
        """Start the actor; `wait_started` waits until it is ready."""
        self.location = None
        with self._lock:  # a thread may be replacing it when the run ends
            if self._has_ended:
                raise self.lost("was ended with the run")
            self.actor = self.create()
        # A separate call, and the first: `build` may be of a module that only the driver's path finds.
        self.actor.prepare.remote(str(self.log_file), os.getcwd(), list(sys.path), self.nonce, self.folder)
        reference = self.actor.begin.remote(self.build)
        self._beginning = Request(self, "begin", reference, time.monotonic() + self.start_timeout_s)

    def wait_started(self) -> None:
        """Wait until it is ready for calls."""
        if self._beginning is not None:
            try:
                self.location = self.get(self._beginning)
            except WorkerLostError:
                if time.monotonic() < self._beginning.deadline:
                    raise
                raise self.lost(
                    f"has not started within {self.start_timeout_s:g} s (distributed.start_timeout_s): it hangs, or no "
                    "machine has the resources that it reserves; see `ray status`"
                ) from None
            self._beginning = None
            self.on_start()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Request:
        """Call a method of the part, in the order of requests; the result is due within the time limit."""
        with store_errors():
            reference = self.actor.call.remote(*packed(method, arguments))
        return Request(self, method, reference, time.monotonic() + (timeout_s or self.timeout_s))

    def call_and_store(self, num_stored: int, method: str, *arguments: Any, timeout_s: float) -> Request:
        """The same for a method that leaves so many objects in the store of the worker's machine."""
        with store_errors():
            call = self.actor.call_and_store.options(num_returns=1 + num_stored)
            reference, *stored = call.remote(num_stored, *packed(method, arguments))
        return Request(self, method, reference, time.monotonic() + timeout_s, tuple(stored))

    def get(self, request: Request) -> Any:
        """The result's value; WorkerLostError where none came, and the worker's own error where it raised one."""
        left = request.deadline - time.monotonic()
        try:
            with store_errors():
                result = ray.get(request.reference, timeout=max(left, 0.0))
        except exceptions.GetTimeoutError:
            raise self.lost(f"has not replied to `{request.method}` in time: it hangs") from None
        except DIED as error:
            raise self.lost(_reason_of_death(error)) from None
        return self.unwrap(request.method, result)

    def stream(self, method: str, *arguments: Any) -> Any:
        """Call a generator method: a generator of references, each due within the time limit."""
        with store_errors():
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
            raise (WorkerLostError if result.is_loss else WorkerFailedError)(what, self.name)
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
        """End it, even if it hangs, start another in its place, and wait until that is ready.

        One that dies while it starts is started again after a pause: for some seconds the cluster still uses a
        machine that was lost.
        """
        for pause_s in (*PAUSES_S, None):
            self.stop()
            self.start()
            try:
                return self.wait_started()
            except WorkerFailedError:
                raise
            except WorkerLostError:
                if pause_s is None or self._has_ended or self._is_late():
                    raise
            time.sleep(pause_s)

    def _is_late(self) -> bool:
        return self._beginning is not None and time.monotonic() >= self._beginning.deadline

    def stop(self) -> None:
        """End it now."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
            self.actor = None

    def end(self) -> None:
        """End it for good: it is not replaced any more."""
        with self._lock:
            self._has_ended = True
            self.stop()


def replace_later(worker: Worker) -> Future[None]:
    """Replace a worker while the caller continues; the result is there once the other one is ready for calls."""
    replaced: Future[None] = Future()

    def replace() -> None:
        try:
            worker.replace()
        except Exception as error:  # noqa: BLE001 - of a thread: raised where the result is read
            replaced.set_exception(error)
        else:
            replaced.set_result(None)

    threading.Thread(target=replace, name=f"replacing {worker.name}", daemon=True).start()
    return replaced


def replace_lost(workers: Sequence[Worker], name: str) -> None:
    """Replace the named worker, and those that have died with it, side by side; wait until all of them are ready."""
    pings = {worker.name: worker.actor.ping.remote() for worker in workers if worker.name != name}
    replied, _ = ray.wait(list(pings.values()), num_returns=len(pings), timeout=PING_S) if pings else ([], [])
    gone = [worker for worker in workers if worker.name == name or _is_death(pings[worker.name], replied)]
    for replaced in [replace_later(worker) for worker in gone]:
        replaced.result()


def _is_death(ping: Any, replied: Sequence[Any]) -> bool:
    """Whether a worker has died; one that is busy has not replied."""
    if ping in replied:
        try:
            ray.get(ping)
        except DIED:
            return True
    return False


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
    with store_errors():
        return ray.put(value)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn the error of a full object store into one that says what to do."""
    try:
        yield
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        raise ClusterError(
            f"Ray's object store is full, and the disk it spills to as well ({type(error).__name__}): raise "
            "distributed.object_store_mb, free some space, or collect fewer or smaller episodes (rollout.num_groups, "
            "env.image_size)."
        ) from None
