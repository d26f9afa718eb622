"""An engine with weights of its own in another process, which weights are sent to through a pipe.

    this process                                 the engine's process
    start_sync, update_weights … ──messages──►   ReplicaEngine does the same
    finish_sync, generate        ──message───►   … and returns a reply
                                 ◄──reply─────   (or the text of an error, which is raised here)

The pipe holds little: a bucket is sent while the engine loads the one before, and the sender waits when it is full. A
process that has ended closes the pipe, which the other side reads as the end.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from vlarl.bench.request import Bench, BenchRequest
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import VlarlError, describe_error
from vlarl.rollout.engines.replica import ReplicaEngine

CLOSE_TIMEOUT_S = 30


class ProcessReplica:
    """The calls of a sync, made in the engine's process."""

    def __init__(self, connection: Connection, end: Callable[[], None]) -> None:
        """`end` waits for the process, once the pipe is closed."""
        self._connection, self._end = connection, end
        self._reply()  # it is loaded

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Announce the weights of a sync."""
        self._send("start_sync", dict(shapes), version)

    def update_weights(self, message: dict[str, Any]) -> None:
        """Send a bucket; it may still be on its way when this returns."""
        self._send("update_weights", message)

    def finish_sync(self, version: int) -> None:
        """Wait until the engine has loaded everything."""
        self._send("finish_sync", version)
        self._reply()

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Decisions of the engine's weights."""
        self._send("generate", inputs, sampling, list(seeds))
        found: Decisions = self._reply()
        return found

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._end()

    def _send(self, name: str, *arguments: Any) -> None:
        try:
            self._connection.send((name, arguments))
        except OSError:  # it has ended: its error is in the pipe
            self._reply()

    def _reply(self) -> Any:
        try:
            error, result = self._connection.recv()
        except (EOFError, OSError):
            raise VlarlError("the process of the replica engine has ended; its output says why.") from None
        if error is not None:
            raise VlarlError(f"the replica engine: {error}")
        return result


def start_replica(request: BenchRequest, *, adapters: bool) -> ProcessReplica:
    """An engine that has loaded the policy, in a process of its own."""
    spawn = multiprocessing.get_context("spawn")  # a fork could not use the GPU
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, request, adapters), daemon=True)
    process.start()
    theirs.close()

    def end() -> None:
        process.join(CLOSE_TIMEOUT_S)
        if process.is_alive():
            process.kill()

    return ProcessReplica(ours, end)


def serve(connection: Connection, request: BenchRequest, adapters: bool) -> None:
    """The engine's process: load, then make the calls that arrive."""
    try:
        bench = Bench(request, measured=False)
        policy = bench.load()
        if adapters:
            bench.adapt(policy)
        engine = ReplicaEngine(policy, bench.device)
        connection.send((None, None))
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                return
            result = getattr(engine, name)(*arguments)
            if name in ("finish_sync", "generate"):
                connection.send((None, result.to("cpu") if isinstance(result, Decisions) else None))
    except Exception as error:  # noqa: BLE001 - at the border of a process: raised again on the other side
        connection.send((describe_error(error), None))
