"""The Ray cluster of one run: joined or started, with resources reserved before any worker starts.

    machine 0:    [learner 0] [learner 1] …   one group a machine (distributed.learners_per_node), a bundle for each
    machine 1:    [learner 8] [learner 9] …   learner: with an engine in it (distributed.colocate), they share its GPU
    any machine:  [engine 0] … [environments 0] … [reward 0] …   one group for all others

These placement groups reserve the resources of all workers first; the error names what is missing. A cluster that was
started here ends with the run. Of one that existed before, only this run's workers end.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray._private import ray_constants
from ray._private.state import available_resources_per_node  # of Ray's developer API: the public one has no parts
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vlarl.config.schema import RanksConfig
from vlarl.distributed.actor import SHARED_FILE, Build, Host, Worker
from vlarl.distributed.demand import Demand, Resources, choose_machines, describe, fits
from vlarl.distributed.shared_folder import RUN_FOLDER, SharedFolder
from vlarl.distributed.store_size import DEFAULT_STORE_MIB, MIB
from vlarl.errors import UsageError, excerpt
from vlarl.observability.files import write_atomically
from vlarl.observability.machine import available_cores
from vlarl.observability.trace import NoTrace

log = logging.getLogger(__name__)

Placement = tuple[PlacementGroup, int]
"""A placement group, and the index of a bundle in it."""

WORKERS_FILE = "workers.json"  # in logs/: pid and host of each worker
RAY_FILE = "ray.log"  # in logs/: what Ray printed while it started
STDERR = 2  # the file descriptor, which compiled code writes to
RELEASE_S = 10.0  # how long to wait for resources that a finished run still holds
RESERVE_S = 60.0  # how long to wait for resources that are free already


class Cluster:
    """The Ray cluster that a run's workers run on."""

    def __init__(
        self,
        config: RanksConfig,
        logs: Path,
        num_threads: int,
        trace: NoTrace,
        folder: SharedFolder = RUN_FOLDER,
    ) -> None:
        """`folder` is the one that the logs are in."""
        self.config = config
        self.logs = logs
        self.folder = folder
        self.workers: list[Worker] = []
        self.trace = trace
        self._groups: list[PlacementGroup] = []
        self._lock = threading.Lock()
        self._variables = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(num_threads)}
        self._given = {name: str(int(v) if isinstance(v, bool) else v) for name, v in config.env_vars.items()}
        self._nonce = secrets.token_hex(16)
        self._exempts = False  # whether objects of this process are left out of garbage collections
        self._found = ray.is_initialized()  # started by the program that uses vlarl, which also ends it

    def connect(self, demand_here: float, store_mib: int = DEFAULT_STORE_MIB) -> None:
        """Join the cluster at the configured address, or start one on this machine with at least this many CPUs and
        this object store."""
        self._exempt_from_collections()
        if self._found:
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        address = self.config.address
        if address is None:
            options |= {
                "address": "local",
                "num_cpus": max(available_cores(), math.ceil(demand_here)),
                "include_dashboard": self.config.dashboard,
                "object_store_memory": store_mib * MIB,
            }
        else:
            options["address"] = address
        make_token_private(create=address is None)
        try:
            with on_loopback(address is None), redirect_stderr(self.logs / RAY_FILE):
                connected = ray.init(**options)
        except Exception as error:  # noqa: BLE001 - Ray raises plain ones, too: for a node that is slow to start
            what = "a Ray cluster can't be started here" if address is None else f"no Ray cluster responds at {address}"
            more = f" Ray's last message: {said}" if (said := _last_line(self.logs / RAY_FILE)) else ""
            raise UsageError(
                f"distributed.address = {address}: {what} ({' '.join(str(error).split())}). Start one with `ray start "
                f"--head` (and set RAY_AUTH_MODE here as it was set there), or leave the address out.{more}"
            ) from error

        if address is None and self.config.dashboard:
            log.warning("Ray's dashboard is at http://%s", connected.dashboard_url)

    def _exempt_from_collections(self) -> None:
        """Leave what was loaded by now, mostly modules, out of the garbage collector's work until the run ends.

        While a store is nearly full, Ray makes every process of the cluster collect its garbage again and again. In
        the driver that took longer than everything else that it does in an update.
        """
        if gc.get_freeze_count() == 0:  # else the program that uses vlarl did the same
            gc.collect()
            gc.freeze()
            self._exempts = True

    @property
    def num_gpus(self) -> float:
        """GPUs of all machines."""
        return float(ray.cluster_resources().get("GPU", 0.0))

    def reserve(self, demand: Demand) -> None:
        """Reserve the resources of all workers, or raise an error that says what is missing."""
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
                    f"Free now: {describe(ray.available_resources())}. See `ray status`."
                ) from None

    def _machines(self, demand: Demand) -> list[str]:
        """The machines of the learners; waits a little for resources that another run is just releasing."""
        end = time.monotonic() + RELEASE_S
        whole = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        while True:
            free = available_resources_per_node()
            try:
                return choose_machines(demand, {node: free.get(node, {}) for node in whole}, ray.cluster_resources())
            except UsageError:
                if time.monotonic() > end or not fits(demand, whole):
                    raise
            time.sleep(0.25)

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

    def variables(self, own: Mapping[str, str]) -> dict[str, str]:
        """The environment variables of a worker; those of the configuration win over its own, such as a renderer's."""
        return {**self._variables, **own, **self._given}

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
            "runtime_env": {"env_vars": self.variables(variables or {})},
        }
        if placement is not None:
            group, bundle = placement
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
        if not self.workers:  # the first: all of them look for it
            self.logs.mkdir(parents=True, exist_ok=True)
            write_atomically(self.logs / SHARED_FILE, self._nonce)
        started = Worker(
            name=name,
            create=lambda: ray.remote(Host).options(**options).remote(),
            build=build,
            log_file=self.logs / f"{name.replace(' ', '-')}.log",
            timeout_s=timeout_s or self.config.timeout_s,
            start_timeout_s=self.config.start_timeout_s,
            trace=self.trace,
            on_start=self._write_workers,
            nonce=self._nonce,
            folder=self.folder,
        )
        started.start()
        self.workers.append(started)
        return started

    def _write_workers(self) -> None:
        """Write where each worker runs, for people and for tools."""
        with self._lock:  # several may start at the same time
            found = {worker.name: asdict(at) for worker in self.workers if (at := worker.location) is not None}
            write_atomically(self.logs / WORKERS_FILE, json.dumps(found, indent=2) + "\n")

    def close(self) -> None:
        """End all workers, release their resources, and end the cluster if it was started here."""
        if self._exempts:
            gc.unfreeze()
            self._exempts = False
        if not ray.is_initialized():
            return
        for worker in self.workers:
            with suppress(exceptions.RayError, ValueError):
                worker.end()
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
