"""Actors in this process, whose results are in Ray's object store at once. A call that never returns is a task that no
machine has the resources for. Each call runs in the thread that makes it."""

from functools import cache
from pathlib import Path

import ray

from vlarl.distributed.actor import Call, Host, Worker
from vlarl.observability.trace import NoTrace


@ray.remote(num_cpus=1000)
def never():
    """No machine has the resources for it."""


@ray.remote(num_cpus=1000)
def never_any():
    """Nor for this one, which is expected to yield several results."""
    yield


@cache
def gone():
    """What a call of an actor returns that has been killed."""
    actor = ray.remote(Host).options(num_cpus=0).remote()
    ray.kill(actor)
    return actor.ping.remote()


class Called:
    def __init__(self, part, options=None, method=None):
        self.part, self.streamed, self.method = part, options is not None, method

    def options(self, **options):
        return Called(self.part, options)

    def remote(self, *arguments):
        method, *arguments = arguments if self.method is None else (self.method, *arguments)
        if isinstance(method, Call):
            method, arguments = method.method, method.arguments
        if getattr(self.part, "is_gone", False):
            return gone()
        if method == "ping":
            return ray.put(None)
        host = Host()
        host.part = self.part
        given = [ray.get(a) if isinstance(a, ray.ObjectRef) else a for a in arguments]
        if getattr(self.part, "hangs", None) == method:
            return never_any.options(num_returns="streaming").remote() if self.streamed else never.remote()
        return ray.put(host.call(method, *given))


class Here:
    """An actor in this process."""

    def __init__(self, part):
        self.part, self.call, self.stream = part, Called(part), Called(part)
        self.ping = Called(part, method="ping")


class HereWorker(Worker):
    """A worker whose actor is in this process."""

    def start(self):
        self.actor = Here(self.build())

    def stop(self):
        self.actor = None


def worker(name, build, timeout_s=60.0) -> Worker:
    made = HereWorker(name, lambda: None, build, Path("no.log"), timeout_s, 60.0, NoTrace(), lambda: None, "")
    made.start()
    return made
