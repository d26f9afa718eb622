"""Environments as processes, one for each slot, kept warm for a whole run.

    Collector ── send_reset, send_chunk ──► WorkerPool ──► worker 0, worker 1 … (`envs/env_process.py`)
              ◄── receive ────────────────

`receive` returns as soon as one worker has replied, with all that have; in lock-step, once all have. A worker that
dies or misses its deadline is killed and replaced, and its slot returns an error: the collector runs that episode
again. A worker has a session of its own and is killed with all its children; if the trainer itself is killed, its
guardian does that (`envs/guardian.py`).
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

from vlarl.envs.base import (
    NOTHING,
    Actions,
    AsyncPool,
    Demonstration,
    EnvFactory,
    ExpertFlaws,
    Record,
    as_chunks,
    fitting,
    started,
)
from vlarl.envs.env_process import (
    LENGTH,
    Chunk,
    Demonstrate,
    Frame,
    Message,
    Reply,
    Reset,
    SharedObservation,
    from_reply,
)
from vlarl.envs.guardian import Guardian, kill_group
from vlarl.envs.process_log import appended_file, last_lines, shorten
from vlarl.errors import UsageError, VlarlError
from vlarl.types import ChunkOutcome, Observation, Task, TaskKey, UInt8Array

log = logging.getLogger(__name__)

PROGRAM = "from vlarl.envs.env_process import main; main()"
LOG_TAIL_LINES = 12
LOG_CHECK_S = 10.0  # how often logs are shortened while no worker replies
CLOSE_S = 5.0
MAX_REPLY_BYTES = 1 << 36  # a longer length is garbage
READ_BYTES = 1 << 20  # read at a time


class WorkerError(Exception):
    """A worker died, hung, or its environment raised."""


class WorkerProcess:
    """One process with its connection, its shared memory and its log."""

    def __init__(self, factory: EnvFactory, slot: int, timeout_s: float, guardian: Guardian) -> None:
        self.slot = slot
        self._guardian = guardian
        self.deadline: float | None = None  # when its reply is due; None: no request is open
        self._timeout_s = timeout_s
        self._log = appended_file()  # closed by `kill`
        ours, theirs = socket.socketpair()
        # A worker that hangs does not read either.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", math.ceil(timeout_s), 0))
        size = SharedObservation.size(factory.image_shape, factory.spec.proprio_dim)
        with tempfile.TemporaryFile(dir=_memory_folder()) as memory, theirs:
            memory.truncate(size)
            # The system can kill it with the thread that starts it, if that thread lives as long as this process.
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
        self._send(list(sys.path))
        self._send(factory)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a request; the reply is due within the time limit."""
        if self.deadline is not None:
            raise RuntimeError(f"slot {self.slot} has not replied yet: receive its reply before sending again")
        self.deadline = time.monotonic() + self._timeout_s
        self.shorten_log()
        self._send(message)

    def _send(self, message: Message | EnvFactory | list[str]) -> None:
        with contextlib.suppress(OSError):  # it has died: reading the reply will raise
            self.connection.send(message)

    def receive(self) -> Reply:
        """The reply that has arrived; `WorkerError` if there is none."""
        self.deadline = None
        if not self.connection.poll():
            late = f"process {self.pid} did not reply within {self._timeout_s:g} s and was stopped"
            raise WorkerError(f"{late}{self.log_tail()}")
        reply = self._read_reply()
        if reply.refusal is not None:
            raise UsageError(reply.refusal)
        if reply.error is not None:
            raise WorkerError(reply.error)
        return reply

    def _read_reply(self) -> Reply:
        """The reply that has begun to arrive; the time limit applies again until it is complete."""
        limit = time.monotonic() + self._timeout_s
        try:
            (size,) = LENGTH.unpack(self._read(LENGTH.size, limit))
            content = self._read(size, limit) if size <= MAX_REPLY_BYTES else b""
        except (EOFError, OSError) as error:
            raise WorkerError(f"{self._end()}{self.log_tail()}") from error
        try:
            reply = pickle.loads(content)
        except Exception as error:  # noqa: BLE001 - a process boundary: a broken pickle raises anything
            reply = error
        if not isinstance(reply, Reply):
            message = f"process {self.pid} sent an invalid reply ({str(reply)[:80]!r}) and was stopped"
            raise WorkerError(f"{message}{self.log_tail()}")
        return reply

    def _read(self, size: int, limit: float) -> bytearray:
        content = bytearray()
        while len(content) < size:
            if not self.connection.poll(max(0.0, limit - time.monotonic())):
                late = f"stopped in the middle of a reply and has not finished it within {self._timeout_s:g} s"
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
        """Keep its log within bounds."""
        shorten(self._log)

    def stop(self) -> None:
        """Close the connection, at which it ends by itself."""
        self.connection.close()

    def kill(self, grace_s: float = 0.0) -> None:
        """Kill it with all its children, unless it ends by itself within `grace_s`."""
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
    """A folder whose files are in memory; None if there is none: an ordinary file is cached by the system."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


class WorkerPool(AsyncPool):
    """`num_envs` environments of one factory, each in a process of its own."""

    def __init__(self, factory: EnvFactory, num_envs: int, timeout_s: float = 180.0, lockstep: bool = False) -> None:
        self.spec = factory.spec
        self.num_envs = num_envs
        self._factory = factory
        self._timeout_s = timeout_s
        self.lockstep = lockstep
        self.num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.busy_s: float = 0.0
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

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        """Start each task in its slot; `record.frames` are the slots whose first frame is returned, too."""
        for slot, task in zip(slots, tasks, strict=True):
            self.spec.of(task.suite)
            self._ended[slot] = False
            self._workers[slot].send(Reset(task, slot in record.frames))

    def send_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> None:
        """Run one chunk [len(slots), K, D] in each slot, stopping at a slot's first end; return what `record` says."""
        chunks = as_chunks(actions, len(slots), self.spec.action_dim)
        if idle := [slot for slot in slots if self._ended[slot]]:
            raise RuntimeError(f"slots {idle} run no episode: reset them before stepping")
        for slot, chunk in zip(slots, chunks, strict=True):
            self._workers[slot].send(Chunk(chunk, slot in record.frames, slot in record.steps))

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """The outcomes of the slots that are ready, by slot; in lock-step, of all that were sent something."""
        outcomes: dict[int, ChunkOutcome] = {}
        while self._busy() and (self.lockstep or not outcomes):
            for slot in self._ready():
                outcomes[slot] = self._outcome(slot)
        if not outcomes:
            raise RuntimeError("nothing was sent that could be received")
        return sorted(outcomes.items())

    def frame(self, slot: int) -> UInt8Array:
        """A large image [H, W, 3] of the slot's current state, for videos."""
        self._workers[slot].send(Frame())
        while slot not in self._ready([slot]):
            pass
        try:
            image: UInt8Array = self._workers[slot].receive().content
        except WorkerError as failure:
            self._replace(slot)
            raise VlarlError(f"slot {slot} of {self.spec.name} can't be rendered: {failure}") from failure
        return image

    def demonstrate(self, tasks: Sequence[Task], flaws: ExpertFlaws, retries: int = 3) -> Iterator[Demonstration]:
        """Let the factory's expert play every task, and yield the episodes in the order of the tasks."""
        waiting, playing = deque(enumerate(tasks)), {}
        played: dict[int, Demonstration] = {}
        attempts = [0] * len(tasks)
        last: list[TaskKey | None] = [None] * self.num_envs
        given = 0
        while given < len(tasks):
            for slot in range(self.num_envs):
                if slot not in playing and waiting:
                    index = fitting([task for _, task in waiting], last[slot], set(last))
                    playing[slot], last[slot] = waiting[index], waiting[index][1].key
                    del waiting[index]
                    self._workers[slot].send(Demonstrate(playing[slot][1], flaws))
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

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.deadline is not None]

    def _ready(self, slots: Sequence[int] | None = None) -> list[int]:
        """Wait until slots have replied or missed their deadlines, and return them; none after `LOG_CHECK_S`."""
        due = {w.connection: w.deadline for w in self._busy() if w.deadline and (slots is None or w.slot in slots)}
        replied = wait(list(due), min(LOG_CHECK_S, max(0.0, min(due.values()) - time.monotonic())))
        now = time.monotonic()
        if not replied:
            for worker in self._workers:
                worker.shorten_log()
        ready = {connection for connection, deadline in due.items() if connection in replied or now >= deadline}
        return [worker.slot for worker in self._workers if worker.connection in ready]

    def _outcome(self, slot: int) -> ChunkOutcome:
        """The outcome of a slot that is ready; a failed worker is replaced, and its outcome has the error."""
        worker = self._workers[slot]
        try:
            reply = worker.receive()
            self.busy_s += reply.seconds
            outcome = from_reply(reply, worker.shared)
        except WorkerError as failure:
            self._replace(slot)
            self._ended[slot] = True
            return started(self._last_seen[slot], error=str(failure))
        self._last_seen[slot] = outcome.observation
        self._ended[slot] = outcome.terminated or outcome.truncated
        return outcome

    def receive_all(self, slots: Sequence[int]) -> list[ChunkOutcome]:
        """The outcomes of these slots, in their order."""
        outcomes: dict[int, ChunkOutcome] = {}
        while len(outcomes) < len(slots):
            for slot in self._ready(slots):
                outcomes[slot] = self._outcome(slot)
        return [outcomes[slot] for slot in slots]

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = WorkerProcess(self._factory, slot, self._timeout_s, self._guardian)

    def _blank(self) -> Observation:
        images = np.zeros(self._factory.image_shape, np.uint8)
        return Observation(images, np.zeros(self.spec.proprio_dim, np.float32), "")
