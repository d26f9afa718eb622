"""Machines of a cluster: raylets on this machine, of which one may see other files, or lie behind a network to cut."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from fakes.cluster_runs import wait_for
from ray.cluster_utils import Cluster as Raylets

STORE = 80 << 20
QUIET: dict[str, Any] = {"object_store_memory": STORE, "include_log_monitor": False}  # nothing is printed here
SOON = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 4000, "failure_threshold": 4}  # instead of a minute
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class Machines:
    """A head with some CPUs, which this process is connected to, and further machines."""

    def __init__(self, num_cpus: float, address: str | None = None) -> None:
        arguments: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False, **QUIET}
        if address is not None:
            arguments["node_ip_address"] = address
        self.raylets = Raylets(
            initialize_head=True,
            head_node_args={
                **arguments,
                "_system_config": {f"health_check_{name}": value for name, value in SOON.items()},
            },
        )
        self.started: list[subprocess.Popen[bytes]] = []
        named = {} if address is None else {"_node_ip_address": address}
        ray.init(address=self.raylets.address, log_to_driver=False, **named)
        self.head = ray.get_runtime_context().get_node_id()

    def add(self, num_cpus: float) -> Any:
        """Another machine, which `lose` ends."""
        return self.raylets.add_node(num_cpus=num_cpus, **QUIET)

    def add_within(self, prefix: list[str], num_cpus: float, address: str | None = None) -> str:
        """Another machine, started by a command with this prefix; its id."""
        before = self.alive()
        where = [] if address is None else [f"--node-ip-address={address}"]
        self.started.append(
            subprocess.Popen(
                [*prefix, *RAY, "start", f"--address={self.raylets.address}", f"--num-cpus={num_cpus}", "--block"]
                + [f"--object-store-memory={STORE}", "--disable-usage-stats", *where],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        wait_for(lambda: len(self.alive()) > len(before), 60)
        (new,) = self.alive() - before
        return new

    def lose(self, node: Any) -> None:
        """End a machine as a power failure would."""
        self.raylets.remove_node(node, allow_graceful=False)

    def alive(self) -> set[str]:
        """Ids of the machines that the cluster believes to be alive."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def close(self) -> None:
        """End all of them."""
        ray.shutdown()
        self.raylets.shutdown()
        for process in self.started:
            for pid in _session(process.pid):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, 9)
            process.wait(30)


def _session(leader: int) -> list[int]:
    """All processes of a session: a raylet and its workers."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(place.name))
    return found


@contextmanager
def network(name: str, delay: float = 0.0) -> Iterator[tuple[list[str], str, str]]:
    """A network namespace: the prefix of commands that run in it, the address out here, and the one in there.

    With a delay each packet arrives so many seconds late, in either direction.
    """
    name, pid = _own(name), os.getpid()
    link, peer = f"{name}a", f"{name}b"
    here, there = (f"10.199.{pid // 64 % 256}.{2 * (pid % 64) + side}" for side in (1, 2))
    carrier = None
    try:
        _permitted(f"ip netns add {name}")
        if delay:
            carrier = _carrier(name, delay)
        else:
            _permitted(f"ip link add {link} type veth peer name {peer}")
            _permitted(f"ip link set {peer} netns {name}")
        _permitted(f"ip addr add {here} peer {there} dev {link}")
        _permitted(f"ip link set {link} up")
        _permitted(f"ip netns exec {name} ip addr add {there} peer {here} dev {peer}")
        _permitted(f"ip netns exec {name} ip link set {peer} up")
        _permitted(f"ip netns exec {name} ip link set lo up")
        yield ["ip", "netns", "exec", name], here, there
    finally:
        if carrier is not None:
            carrier.communicate(timeout=30)  # closes its input
        _runs(f"ip link del {link}")
        _runs(f"ip netns del {name}")


def _own(name: str) -> str:
    """The name in this process: another test run on the machine has others."""
    return f"{name}{os.getpid() % 100_000}"


def _carrier(name: str, delay: float) -> subprocess.Popen[str]:
    """The process that carries packets with a delay; its devices are there when this returns."""
    script = str(Path(__file__).with_name("slow_link.py"))
    carrier = subprocess.Popen(
        [sys.executable, script, name, str(delay)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert carrier.stdout is not None
    if carrier.stdout.readline() != "ready\n":
        pytest.skip(f"no networks with a delay here: {carrier.communicate()[1].strip().splitlines()[-1]}")
    return carrier


def _permitted(command: str) -> None:
    if not _runs(command):
        pytest.skip(f"no network namespaces here: `{command}` is not permitted")


def round_trip_s(prefix: list[str], address: str) -> float:
    """Seconds until a process in there hears that nothing listens on a port out here."""
    program = (
        "import socket, time\nbegun = time.monotonic()\n"
        f"assert socket.socket().connect_ex(({address!r}, 9)), 'port 9 is in use'\nprint(time.monotonic() - begun)"
    )
    return float(subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, check=True).stdout)


def cut(name: str) -> None:
    """Separate the two sides of the network: nothing is refused, and nothing arrives."""
    assert _runs(f"ip link set {_own(name)}a down")


def other_files(folder: Path) -> list[str]:
    """The prefix of commands that see an empty disk in place of this folder."""
    prefix = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$0" "$@"']
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here: `unshare --mount` is not permitted")
    return prefix


def _runs(command: str) -> bool:
    try:
        return subprocess.run(command.split(), capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
