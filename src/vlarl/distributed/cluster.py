"""The Ray cluster of one run: joined or started, with resources reserved before any worker starts.

    machine 0:    [learner 0] [learner 1] …   one group a machine (distributed.learners_per_node), a bundle for each
    machine 1:    [learner 8] [learner 9] …   learner: with an engine in it (distributed.colocate), they share its GPU
    any machine:  [engine 0] … [environments 0] … [reward 0] …   one group for all others

These placement groups reserve the resources of all workers first; the error names what is missing. A cluster that was
started here ends with the run. Of one that existed before, only this run's workers end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vlarl.config.derive import num_engines
from vlarl.config.schema import Config, DistributedConfig
from vlarl.distributed.actor import Build, Host, Worker
from vlarl.errors import UsageError, excerpt
from vlarl.observability.files import write_atomically
from vlarl.observability.machine import available_cores
from vlarl.observability.trace import NoTrace

Placement = tuple[PlacementGroup, int]
"""A placement group, and the index of a bundle in it."""

MIB = 1 << 20
DEFAULT_STORE_MIB = 2048  # of a cluster started here; Ray's default is a third of the machine's memory
WORKERS_FILE = "workers.json"  # in logs/: pid and host of each worker
RAY_FILE = "ray.log"  # in logs/: what Ray printed while it started
STDERR = 2  # the file descriptor, which compiled code writes to
RELEASE_S = 10.0  # how long to wait for resources that a finished run still holds
RESERVE_S = 60.0  # how long to wait for resources that are free already


@dataclass(frozen=True)
class Resources:
    """What one worker reserves."""

    cpus: float
    gpus: float

    def bundle(self) -> dict[str, float]:
        """In Ray's format."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True)
class Demand:
    """The workers of a run by role, and the resources of each."""

    learners_per_node: tuple[int, ...]
    learner: Resources
    num_engines: int
    engine: Resources
    num_envs: int
    env: Resources
    num_rewards: int
    reward: Resources
    colocate: bool

    @classmethod
    def of(cls, config: Config, num_env_workers: int, on_gpus: bool) -> Demand:
        """What a configuration needs."""
        d, cpus = config.distributed, config.distributed.worker_cpus
        size = config.vllm.tensor_parallel_size
        engine_gpus = d.engine_gpus if size == 1 else float(size)
        return cls(
            learners_per_node=d.learners_per_node,
            learner=Resources(cpus, d.learner_gpus if on_gpus else 0.0),
            num_engines=num_engines(config),
            engine=Resources(cpus, engine_gpus if on_gpus else 0.0),
            num_envs=num_env_workers,
            env=Resources(cpus, d.env_gpus if on_gpus else 0.0),
            num_rewards=d.num_reward_workers,
            reward=Resources(cpus, d.reward_gpus if on_gpus else 0.0),
            colocate=d.colocate,
        )

    @property
    def num_learners(self) -> int:
        """Learner ranks on all machines."""
        return sum(self.learners_per_node)

    def learner_bundle(self) -> dict[str, float]:
        """The bundle of one learner, with an engine in it where they are colocated."""
        shared = self.engine if self.colocate else Resources(0.0, 0.0)
        return Resources(self.learner.cpus + shared.cpus, self.learner.gpus + shared.gpus).bundle()

    def other_bundles(self) -> list[dict[str, float]]:
        """One bundle for each of the others: engines, environments, rewards."""
        engines = 0 if self.colocate else self.num_engines
        workers = [self.engine] * engines + [self.env] * self.num_envs + [self.reward] * self.num_rewards
        return [resources.bundle() for resources in workers]

    def total(self, resource: str) -> float:
        """CPUs or GPUs of all workers together."""
        bundles = [self.learner_bundle()] * self.num_learners + self.other_bundles()
        return sum(bundle.get(resource, 0.0) for bundle in bundles)

    def describe(self) -> str:
        """The workers in words, for messages."""
        counts = {
            "learner": self.num_learners,
            "engine": self.num_engines,
            "environment worker": self.num_envs,
            "reward worker": self.num_rewards,
        }
        return ", ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in counts.items() if count)


class Cluster:
    """The Ray cluster that a run's workers run on."""

    def __init__(self, config: DistributedConfig, logs: Path, num_threads: int, trace: NoTrace) -> None:
        self.config = config
        self.logs = logs
        self.workers: list[Worker] = []
        self.trace = trace
        self._groups: list[PlacementGroup] = []
        self._variables = {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
        self._found = ray.is_initialized()  # started by the program that uses vlarl, which also ends it

    def connect(self, demand_here: float) -> None:
        """Join the cluster at the configured address, or start one on this machine with at least this many CPUs."""
        if self._found:
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        address = self.config.address
        if address is None:
            store = (self.config.object_store_mb or DEFAULT_STORE_MIB) * MIB
            options |= {
                "address": "local",
                "num_cpus": max(available_cores(), math.ceil(demand_here)),
                "include_dashboard": False,
                "object_store_memory": store,
            }
        else:
            options["address"] = address
        make_token_private(create=address is None)
        try:
            with on_loopback(address is None), redirect_stderr(self.logs / RAY_FILE):
                ray.init(**options)
        except (ConnectionError, exceptions.RaySystemError, OSError, RuntimeError, ValueError) as error:
            what = "a Ray cluster can't be started here" if address is None else f"no Ray cluster responds at {address}"
            more = f" Ray's last message: {said}" if (said := _last_line(self.logs / RAY_FILE)) else ""
            raise UsageError(
                f"distributed.address = {address}: {what} ({' '.join(str(error).split())}). Start one with `ray start "
                f"--head` (and set RAY_AUTH_MODE here as it was set there), or leave the address out.{more}"
            ) from error

    @property
    def num_gpus(self) -> float:
        """GPUs of all machines."""
        return float(ray.cluster_resources().get("GPU", 0.0))

    def reserve(self, demand: Demand) -> None:
        """Reserve the resources of all workers, or raise an error that says what is missing."""
        self._check_resources(demand)
        bundle = demand.learner_bundle()
        for node, count in zip(self._machines(demand), demand.learners_per_node, strict=True):
            here = [{"ray.io/node-id": node}] * count
            self._groups.append(placement_group([bundle] * count, "STRICT_PACK", bundle_label_selector=here))
        if others := demand.other_bundles():
            self._groups.append(placement_group(others, "PACK"))
        for group in self._groups:
            try:
                ray.get(group.ready(), timeout=RESERVE_S)
            except exceptions.GetTimeoutError:
                raise UsageError(
                    f"distributed: the cluster has not reserved {demand.describe()} within {RESERVE_S:g} s. "
                    f"Free now: {_describe(ray.available_resources())}. See `ray status`."
                ) from None

    def _check_resources(self, demand: Demand) -> None:
        """Refuse what does not fit; wait a little for resources that another run is just releasing."""
        end = time.monotonic() + RELEASE_S
        while missing := self._missing(demand, ray.available_resources()):
            if self._missing(demand, ray.cluster_resources()) or time.monotonic() > end:
                break
            time.sleep(0.25)
        free = ray.available_resources()
        if missing:
            raise UsageError(
                f"distributed: {demand.describe()} take {_describe({k: demand.total(k) for k in ('CPU', 'GPU')})}; "
                f"the cluster has {_describe(free)} free of {_describe(ray.cluster_resources())}: "
                f"{' and '.join(missing)} missing. Add machines, or lower distributed.worker_cpus, the number of "
                "workers or their GPU fractions."
            )

    def _missing(self, demand: Demand, resources: Mapping[str, float]) -> list[str]:
        return [
            _amount(demand.total(kind) - resources.get(kind, 0.0), kind)
            for kind in ("CPU", "GPU")
            if demand.total(kind) > resources.get(kind, 0.0) + 1e-6
        ]

    def _machines(self, demand: Demand) -> list[str]:
        """A machine for each entry of learners_per_node, the largest machine for the largest entry."""
        free = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        bundle = demand.learner_bundle()
        chosen: dict[int, str] = {}
        for index in sorted(range(len(demand.learners_per_node)), key=lambda index: -demand.learners_per_node[index]):
            wanted = {kind: amount * demand.learners_per_node[index] for kind, amount in bundle.items()}
            fitting = [node for node, has in free.items() if node not in chosen.values() and _fits(wanted, has)]
            if not fitting:
                found = ", ".join(_describe(has) for has in free.values())
                raise UsageError(
                    f"distributed.learners_per_node = {list(demand.learners_per_node)}: that takes "
                    f"{len(demand.learners_per_node)} machines, one of them with {_describe(wanted)}; the cluster's "
                    f"{len(free)} have {found}."
                )
            chosen[index] = max(fitting, key=lambda node: (free[node].get("GPU", 0.0), free[node].get("CPU", 0.0)))
        return [chosen[index] for index in range(len(demand.learners_per_node))]

    def learner_placements(self, demand: Demand) -> list[Placement]:
        """The placement of each learner, machine by machine."""
        return [
            (group, index)
            for group, count in zip(self._groups, demand.learners_per_node, strict=False)
            for index in range(count)
        ]

    def other_placements(self, demand: Demand) -> tuple[list[Placement], list[Placement], list[Placement]]:
        """The placements of engines, environments and rewards."""
        others = [(self._groups[-1], index) for index in range(len(demand.other_bundles()))]
        num_engines = 0 if demand.colocate else demand.num_engines
        engines = self.learner_placements(demand)[: demand.num_engines] if demand.colocate else others[:num_engines]
        last = num_engines + demand.num_envs
        return engines, others[num_engines:last], others[last:]

    def worker(
        self,
        name: str,
        build: Build,
        resources: Resources,
        placement: Placement | None = None,
        variables: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Worker:
        """Start a worker, in its reserved bundle where it has one; it is ready after `wait_started`."""
        options: dict[str, Any] = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": {**self._variables, **(variables or {})}},
        }
        if placement is not None:
            group, bundle = placement
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
        started = Worker(
            name=name,
            create=lambda: ray.remote(Host).options(**options).remote(),
            build=build,
            log_file=self.logs / f"{name.replace(' ', '-')}.log",
            timeout_s=timeout_s or self.config.timeout_s,
            start_timeout_s=self.config.start_timeout_s,
            trace=self.trace,
            on_start=self._write_workers,
        )
        started.start()
        self.workers.append(started)
        return started

    def _write_workers(self) -> None:
        """Write where each worker runs, for people and for tools."""
        found = {worker.name: asdict(worker.location) for worker in self.workers if worker.location is not None}
        write_atomically(self.logs / WORKERS_FILE, json.dumps(found, indent=2) + "\n")

    def close(self) -> None:
        """End all workers, release their resources, and end the cluster if it was started here."""
        if not ray.is_initialized():
            return
        for worker in self.workers:
            with suppress(exceptions.RayError, ValueError):
                worker.stop()
        for group in self._groups:
            with suppress(exceptions.RayError):
                remove_placement_group(group)
        self.workers, self._groups = [], []
        if not self._found:
            ray.shutdown()


@contextmanager
def on_loopback(wanted: bool) -> Iterator[None]:
    """Make a cluster that is started in the block listen on this machine's loopback address only.

    By default Ray does so on macOS and Windows only, and reads 127.0.0.1 as a request for the external address. The
    variable is for the processes that Ray starts; this process has read it already.
    """
    if not wanted:
        yield
        return
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, enabled = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _last_line(file: Path) -> str:
    """The last line that was printed; the file itself is removed with the folder of a run that could not start."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else []
    return excerpt(next((line.strip() for line in reversed(lines) if line.strip()), ""), 300)


@contextmanager
def redirect_stderr(file: Path) -> Iterator[None]:
    """Append what is written to stderr in the block to a file, including what compiled code writes.

    Ray prints a warning there for every attempt to connect, and none of its options turns these off.
    """
    if sys.stderr is None:  # the process was started without one
        yield
        return
    sys.stderr.flush()
    file.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.dup(STDERR)
    with file.open("ab") as log:
        os.dup2(log.fileno(), STDERR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, STDERR)
        os.close(terminal)
        if not file.stat().st_size:
            file.unlink()


def make_token_private(create: bool) -> None:
    """Make the token of Ray's clusters readable by the user only; `create` makes one where there is none.

    Ray itself would write it with default permissions.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    with suppress(OSError, RuntimeError):  # Ray itself reports what it can't read or write
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        elif path.stat().st_uid == os.getuid():
            path.chmod(0o600)


def wait_started(workers: Sequence[Worker]) -> None:
    """Wait until all of them are ready."""
    for worker in workers:
        worker.wait_started()


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(kind, 0.0) + 1e-6 >= amount for kind, amount in bundle.items())


def _describe(resources: Mapping[str, float]) -> str:
    return " and ".join(_amount(resources.get(kind, 0.0), kind) for kind in ("CPU", "GPU"))


def _amount(amount: float, kind: str) -> str:
    return f"{amount:g} {kind}{'' if amount == 1 else 's'}"
