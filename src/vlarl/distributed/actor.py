"""One worker of a cluster: an actor on one side, and whoever waits for it on the other.

    Worker.ask("method", …) ──► Host (a Ray actor): part.method(…)
    Worker.get(question)    ◄── Answer: value or error, and when it was worked on

The actor is the same for every role; its part is a plain object that is made over there. A worker does one thing at a
time, in the order of the questions. Whoever gets an answer waits for it no longer than a deadline; a worker that misses
it, or has died, is lost, which the error says together with the end of the worker's log.
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
"""Makes a worker's part, over there."""

DIED = (
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,  # it had answered, and its machine is gone
)
"""What Ray raises for an actor that is gone."""

LOG_TAIL_LINES = 12
LONGEST_TRACEBACK = 16_000  # characters
_END = object()


@dataclass(frozen=True)
class Answer:
    """What came of a question."""

    value: Any = None
    error: VlarlError | None = None  # for the user, or for whoever asked
    defect: str | None = None  # whatever else it raised, and where
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Location:
    """Where a worker runs."""

    pid: int
    host: str


class Host:
    """The actor's side: makes its part once, then answers."""

    _log: IO[bytes] | None = None

    def prepare(self, log_file: str, folder: str, modules: Sequence[str]) -> None:
        """Write to the log from now on; paths and modules mean what they mean to the driver."""
        _write_to(log_file)
        self._log = open(log_file, "a+b", buffering=0)  # noqa: SIM115 - as long as the process
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [place for place in modules if place not in sys.path]

    def begin(self, build: Build) -> Answer:
        """Make the part."""
        return _answer(lambda: self._make(build))

    def _make(self, build: Build) -> Location:
        self.part = build()
        return Location(os.getpid(), socket.gethostname())

    def answer(self, method: str, *arguments: Any) -> Answer:
        """Call a method of the part."""
        if self._log is not None:
            shorten(self._log)
        return _answer(lambda: getattr(self.part, method)(*arguments))

    def answers(self, method: str, *arguments: Any) -> Iterator[Answer]:
        """Call a generator method of the part, and pass on one thing after the other."""
        items = getattr(self.part, method)(*arguments)
        while (answer := _answer(lambda: next(items, _END))).value is not _END:
            yield answer


def _write_to(log_file: str) -> None:
    """Send everything that the process writes, its last words included, to a log of its own."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True)


def _answer(work: Callable[[], Any]) -> Answer:
    began = time.time()
    try:
        return Answer(work(), began=began, ended=time.time())
    except VlarlError as error:
        return Answer(error=_portable(error))
    except (Exception, SystemExit):  # a process border: whatever a part raises is told to the driver
        return Answer(defect=excerpt(traceback.format_exc().strip(), LONGEST_TRACEBACK))


def _portable(error: VlarlError) -> VlarlError:
    """The error as it can travel: some can't be made again from their text."""
    try:
        pickle.loads(pickle.dumps(error))
    except TypeError:
        return UsageError(str(error)) if isinstance(error, UsageError) else VlarlError(str(error))
    return error


@dataclass
class Question:
    """Something that a worker was asked."""

    worker: Worker
    method: str
    reference: Any
    deadline: float  # monotonic


@dataclass
class Worker:
    """The driver's side of one worker."""

    name: str  # "learner 0"
    create: Callable[[], Any]  # a new actor in the worker's place on the cluster
    build: Build
    log_file: Path
    timeout_s: float
    start_timeout_s: float
    trace: NoTrace
    on_start: Callable[[], None]  # told whenever it has started
    where: Location | None = None
    actor: Any = None
    _beginning: Question | None = field(default=None, repr=False)

    def start(self) -> None:
        """Let it begin; `wait_started` waits for it."""
        self.where = None
        self.actor = self.create()
        # By itself and first: what follows may be of a module that only the driver knows where to find.
        self.actor.prepare.remote(str(self.log_file), os.getcwd(), list(sys.path))
        reference = self.actor.begin.remote(self.build)
        self._beginning = Question(self, "begin", reference, time.monotonic() + self.start_timeout_s)

    def wait_started(self) -> None:
        """Wait until it is ready to be asked."""
        if self._beginning is not None:
            self.where = self.get(self._beginning)
            self._beginning = None
            self.on_start()

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Question:
        """Ask for something, in the order of questions; the answer is due within the time limit."""
        with _store_errors():
            reference = self.actor.answer.remote(method, *arguments)
        return Question(self, method, reference, time.monotonic() + (timeout_s or self.timeout_s))

    def get(self, question: Question) -> Any:
        """The answer's value; WorkerLostError where none came, and the worker's own error where it raised one."""
        left = question.deadline - time.monotonic()
        try:
            with _store_errors():
                answer = ray.get(question.reference, timeout=max(left, 0.0))
        except exceptions.GetTimeoutError:
            raise self.lost(f"has not answered `{question.method}` in time: it hangs") from None
        except DIED as error:
            raise self.lost(_reason_of_death(error)) from None
        return self.open(question.method, answer)

    def stream(self, method: str, *arguments: Any) -> Any:
        """Ask for one thing after the other: a generator of references, each due within the time limit."""
        with _store_errors():
            return self.actor.answers.options(num_returns="streaming").remote(method, *arguments)

    def next(self, items: Any, method: str) -> Any:
        """The next thing of a stream, which `ray.wait` has said is there."""
        try:
            answer = ray.get(next(items))
        except DIED as error:
            raise self.lost(_reason_of_death(error)) from None
        except StopIteration:
            raise VlarlError(f"{self.name} ended `{method}` without a result; its log is {self.log_file}.") from None
        return self.open(method, answer)

    def open(self, method: str, answer: Answer) -> Any:
        """The value of an answer that came; what the worker raised is raised here."""
        if answer.error is not None:
            raise answer.error
        if answer.defect is not None:
            what = f"{self.name} failed in `{method}`:\n{answer.defect}\nIts log is {self.log_file}."
            raise WorkerFailedError(what, self.name)
        self.trace.span(self.name, method, answer.began, answer.ended)
        return answer.value

    def lost(self, what: str) -> WorkerLostError:
        """The error for a worker that can't answer any more."""
        where = f" (pid {self.where.pid} on {self.where.host})" if self.where else ""
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
        """End it, wherever it hangs, and start another in its place, which is ready then."""
        self.stop()
        self.start()
        self.wait_started()

    def stop(self) -> None:
        """End it now."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
            self.actor = None


def get_all(questions: Sequence[Question]) -> list[Any]:
    """All answers, in the order of the questions; the first failure counts at once."""
    waiting = {question.reference: question for question in questions}
    values: dict[Any, Any] = {}
    while waiting:
        left = min(question.deadline for question in waiting.values()) - time.monotonic()
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(left, 0.0))
        late = [r for r, q in waiting.items() if not ready and q.deadline <= time.monotonic()]
        for reference in ready or late:
            question = waiting.pop(reference)
            values[reference] = question.worker.get(question)
    return [values[question.reference] for question in questions]


def _reason_of_death(error: Exception) -> str:
    """Ray's account of it, short."""
    text = str(error)
    if "ray.kill" in text:
        return "was stopped"
    if "connection error code 2" in text or "WorkerCrashed" in type(error).__name__:
        return "died (killed, out of memory, or crashed)"
    first = next((line.strip() for line in text.splitlines() if "dead because" in line), text.splitlines()[0])
    return f"died: {first}"


def share(value: object) -> Any:
    """Put something into the object store once, for several workers to read."""
    with _store_errors():
        return ray.put(value)


@contextmanager
def _store_errors() -> Iterator[None]:
    """An object store that is full says what to do about it."""
    try:
        yield
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        raise ClusterError(
            f"Ray's object store is full, and the disk it spills to as well ({type(error).__name__}): raise "
            "distributed.object_store_mb, free some space, or collect fewer or smaller episodes (rollout.num_groups, "
            "env.image_size)."
        ) from None
