"""Environments as processes, one for each slot, kept warm for a whole run.

    Collector ── send_reset, send_chunk ──► WorkerPool ──► worker 0, worker 1 … (`envs/worker.py`)
              ◄── receive ────────────────

Nobody waits for the slowest: `receive` returns as soon as one worker has answered, with all that have; in lock-step,
with all that were asked. A worker that dies, or doesn't answer before its deadline, is killed and replaced, and its
slot answers with an error: the collector runs that episode again. A worker has a session of its own and is killed with
all that it has started; when the trainer itself is killed, its guardian does that (`envs/guardian.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait

import numpy as np

from vlarl.envs.base import AsyncPool, Demonstration, EnvFactory, fitting, started
from vlarl.envs.env_process import LENGTH, Answer, Chunk, Demonstrate, Frame, Message, Reset, SharedObservation, arrived
from vlarl.envs.guardian import Guardian, kill_group
from vlarl.envs.process_log import appended_file, last_lines, shorten
from vlarl.errors import UsageError, VlarlError
from vlarl.types import ChunkOutcome, FloatArray, Observation, Task, UInt8Array

log = logging.getLogger(__name__)

PROGRAM = "from vlarl.envs.env_process import main; main()"
LOG_TAIL_LINES = 12
LOG_CHECK_S = 10.0  # how often the logs of workers that say nothing else are kept within bounds
CLOSE_S = 5.0
MAX_ANSWER_BYTES = 1 << 36  # no answer is longer: the length in front of it is none
READ_BYTES = 1 << 20  # read at a time


class WorkerError(Exception):
    """A worker died, hung, or its environment raised."""


class WorkerProcess:
    """One process with its connection, its shared memory and its log."""

    def __init__(self, factory: EnvFactory, slot: int, timeout_s: float, guardian: Guardian) -> None:
        self.slot = slot
        self._guardian = guardian
        self.deadline: float | None = None  # when its answer is due; None: nothing was asked
        self._timeout_s = timeout_s
        self._log = appended_file()  # closed by `kill`
        ours, theirs = socket.socketpair()
        # A worker that hangs does not read, either.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", math.ceil(timeout_s), 0))
        size = SharedObservation.size(factory.image_shape, factory.spec.proprio_dim)
        with tempfile.TemporaryFile(dir=_memory_folder()) as memory, theirs:
            memory.truncate(size)
            # The system can end it with the thread that starts it: of use where that thread lasts as long as we do.
            lasting = int(threading.current_thread() is threading.main_thread())
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(memory.fileno()), str(lasting)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), memory.fileno()),
                env={**os.environ, **factory.variables(slot), **guardian.variables},
                start_new_session=True,
            )
            guardian.watch(self._process.pid)
            self.shared = SharedObservation(memory.fileno(), factory.image_shape, factory.spec.proprio_dim)
        self.connection = Connection(ours.detach())
        self._tell(list(sys.path))
        self._tell(factory)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Ask for something; the answer is due within the time limit."""
        if self.deadline is not None:
            raise RuntimeError(f"slot {self.slot} has not answered yet: receive its answer before asking again")
        self.deadline = time.monotonic() + self._timeout_s
        self.shorten_log()
        self._tell(message)

    def _tell(self, message: Message | EnvFactory | list[str]) -> None:
        with contextlib.suppress(OSError):  # it has died: the closed connection says so when the answer is read
            self.connection.send(message)

    def receive(self) -> Answer:
        """The answer that has arrived; `WorkerError` if there is none."""
        self.deadline = None
        if not self.connection.poll():
            late = f"process {self.pid} did not answer within {self._timeout_s:g} s and was stopped"
            raise WorkerError(f"{late}{self.log_tail()}")
        answer = self._read_answer()
        if answer.refusal is not None:
            raise UsageError(answer.refusal)
        if answer.error is not None:
            raise WorkerError(answer.error)
        return answer

    def _read_answer(self) -> Answer:
        """The answer that has begun to come, which has the time limit once more to be whole."""
        limit = time.monotonic() + self._timeout_s
        try:
            (size,) = LENGTH.unpack(self._read(LENGTH.size, limit))
            content = self._read(size, limit) if size <= MAX_ANSWER_BYTES else b""
        except (EOFError, OSError) as error:
            raise WorkerError(f"{self._end()}{self.log_tail()}") from error
        try:
            answer = pickle.loads(content)
        except Exception as error:  # noqa: BLE001 - a process border: a broken pickle raises anything
            answer = error
        if not isinstance(answer, Answer):
            told = f"process {self.pid} sent what is no answer ({str(answer)[:80]!r}) and was stopped"
            raise WorkerError(f"{told}{self.log_tail()}")
        return answer

    def _read(self, size: int, limit: float) -> bytearray:
        content = bytearray()
        while len(content) < size:
            if not self.connection.poll(max(0.0, limit - time.monotonic())):
                late = f"stopped in the middle of an answer and has not ended it within {self._timeout_s:g} s"
                raise WorkerError(f"process {self.pid} {late}{self.log_tail()}")
            part = os.read(self.connection.fileno(), min(size - len(content), READ_BYTES))
            if not part:
                raise EOFError
            content += part
        return content

    def _end(self) -> str:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return f"process {self.pid} closed its connection"
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"process {self.pid} {reason}"

    def log_tail(self) -> str:
        """The last lines that it wrote, for a message; empty if it wrote nothing."""
        return "".join(f"\n    {line}" for line in last_lines(self._log, LOG_TAIL_LINES))

    def shorten_log(self) -> None:
        """Keep what it has written within bounds."""
        shorten(self._log)

    def stop(self) -> None:
        """Ask it to end by closing the connection."""
        self.connection.close()

    def kill(self, grace_s: float = 0.0) -> None:
        """End it now with all that it has started, unless it ends by itself within so many seconds."""
        self.connection.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            log.debug("process %d did not end by itself", self.pid)
        kill_group(self.pid)
        self._process.wait()
        self._guardian.forget(self.pid)
        self._log.close()


def _memory_folder() -> str | None:
    """Where a file is memory; elsewhere it is an ordinary file that the system keeps in memory as it sees fit."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


class WorkerPool(AsyncPool):
    """`num_envs` environments of one factory, each in a process of its own."""

    def __init__(self, factory: EnvFactory, num_envs: int, timeout_s: float = 180.0, lockstep: bool = False) -> None:
        self.spec = factory.spec
        self.num_envs = num_envs
        self._factory = factory
        self._timeout_s = timeout_s
        self.lockstep = lockstep
        self._ended = [True] * num_envs
        self._last_seen = [self._blank()] * num_envs
        self._guardian = Guardian()
        self._workers: list[WorkerProcess] = []
        for slot in range(num_envs):
            self._workers.append(WorkerProcess(factory, slot, timeout_s, self._guardian))

    @property
    def pids(self) -> list[int]:
        """The ids of the processes, by slot."""
        return [worker.pid for worker in self._workers]

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: frozenset[int] = frozenset()) -> None:
        """Start each task in its slot; film the named slots' first pictures."""
        for slot, task in zip(slots, tasks, strict=True):
            if task.suite != self.spec.name:
                raise ValueError(f"this pool runs {self.spec.name}, but the task is of {task.suite}")
            self._ended[slot] = False
            self._workers[slot].send(Reset(task, slot in record))

    def send_chunk(self, slots: Sequence[int], actions: FloatArray, record: frozenset[int] = frozenset()) -> None:
        """Run one chunk [len(slots), K, D] in each slot, stopping a slot at its first end; film the named slots."""
        if actions.ndim != 3 or actions.shape[0] != len(slots) or actions.shape[2] != self.spec.action_dim:
            raise ValueError(f"actions must be [{len(slots)}, K, {self.spec.action_dim}], not {list(actions.shape)}")
        if idle := [slot for slot in slots if self._ended[slot]]:
            raise RuntimeError(f"slots {idle} run no episode: reset them before stepping")
        for slot, chunk in zip(slots, np.asarray(actions, np.float32), strict=True):
            self._workers[slot].send(Chunk(chunk, slot in record))

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """The answers of the slots that are ready, by slot; in lock-step, of all that were asked."""
        answers: dict[int, ChunkOutcome] = {}
        while self._asked() and (self.lockstep or not answers):
            for slot in self._ready():
                answers[slot] = self._outcome(slot)
        if not answers:
            raise RuntimeError("nothing was sent that could be received")
        return sorted(answers.items())

    def frame(self, slot: int) -> UInt8Array:
        """A large picture [H, W, 3] of a slot as it is now, for videos."""
        self._workers[slot].send(Frame())
        while slot not in self._ready([slot]):
            pass
        try:
            picture: UInt8Array = self._workers[slot].receive().content
        except WorkerError as failure:
            self._replace(slot)
            raise VlarlError(f"slot {slot} of {self.spec.name} can't be drawn: {failure}") from failure
        return picture

    def demonstrate(
        self, tasks: Sequence[Task], action_noise: float, hesitation: float = 0.0, retries: int = 3
    ) -> Iterator[Demonstration]:
        """Let the factory's expert play every task, and give the episodes in the order of the tasks."""
        waiting, playing = deque(enumerate(tasks)), {}
        played: dict[int, Demonstration] = {}
        attempts, last = [0] * len(tasks), [-1] * self.num_envs
        given = 0
        while given < len(tasks):
            for slot in range(self.num_envs):
                if slot not in playing and waiting:
                    place = fitting([task for _, task in waiting], last[slot], set(last))
                    playing[slot], last[slot] = waiting[place], waiting[place][1].task_id
                    del waiting[place]
                    self._workers[slot].send(Demonstrate(playing[slot][1], action_noise, hesitation))
            for slot in self._ready():
                index, task = playing.pop(slot)
                try:
                    played[index] = self._workers[slot].receive().content
                except WorkerError as failure:
                    self._replace(slot)
                    attempts[index] += 1
                    log.warning("the demonstration %s failed in slot %d: %s", task.episode_id, slot, failure)
                    if attempts[index] > retries:
                        raise VlarlError(f"the demonstration {task.episode_id} can't be played: {failure}") from failure
                    waiting.appendleft((index, task))
            while given in played:
                yield played.pop(given)
                given += 1

    def close(self) -> None:
        """End all processes: they have a few seconds together to end by themselves."""
        end = time.monotonic() + CLOSE_S
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.kill(max(0.0, end - time.monotonic()))
        self._workers = []
        self._guardian.close()

    def _asked(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.deadline is not None]

    def _ready(self, slots: Sequence[int] | None = None) -> list[int]:
        """Wait until a slot has answered or missed its deadline; all such slots. None after a while without either."""
        due = {w.connection: w.deadline for w in self._asked() if w.deadline and (slots is None or w.slot in slots)}
        answered = wait(list(due), min(LOG_CHECK_S, max(0.0, min(due.values()) - time.monotonic())))
        now = time.monotonic()
        if not answered:
            for worker in self._workers:
                worker.shorten_log()
        ready = {connection for connection, deadline in due.items() if connection in answered or now >= deadline}
        return [worker.slot for worker in self._workers if worker.connection in ready]

    def _outcome(self, slot: int) -> ChunkOutcome:
        """The answer of a slot that is ready; a failed one is replaced and answers with its error."""
        worker = self._workers[slot]
        try:
            outcome = arrived(worker.receive(), worker.shared)
        except WorkerError as failure:
            self._replace(slot)
            self._ended[slot] = True
            return started(self._last_seen[slot], error=str(failure))
        self._last_seen[slot] = outcome.observation
        self._ended[slot] = outcome.terminated or outcome.truncated
        return outcome

    def receive_all(self, slots: Sequence[int]) -> list[ChunkOutcome]:
        """The answers of these slots, in their order."""
        answers: dict[int, ChunkOutcome] = {}
        while len(answers) < len(slots):
            for slot in self._ready(slots):
                answers[slot] = self._outcome(slot)
        return [answers[slot] for slot in slots]

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = WorkerProcess(self._factory, slot, self._timeout_s, self._guardian)

    def _blank(self) -> Observation:
        images = np.zeros(self._factory.image_shape, np.uint8)
        return Observation(images, np.zeros(self.spec.proprio_dim, np.float32), "")
