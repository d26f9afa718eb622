"""Addresses: whether a Ray cluster responds at one, and one of this machine at which ranks can meet.

An address is checked before Ray is given it, since Ray itself would wait for many minutes.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import ray

from vlarl.deadline import call_in_time
from vlarl.errors import UsageError

RESPONSE_S = 10.0  # in total: resolving the name, connecting, the first frame
CLIENT_PORT = 10001  # of ray://
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and empty settings
SETTINGS = 4  # type of the frame that every HTTP/2 server replies with; Ray's gRPC runs over HTTP/2


def check_address(address: str, timeout_s: float = RESPONSE_S) -> None:
    """Refuse an address, `auto` or host:port, at which no Ray cluster responds."""
    endpoint = _host_and_port(address)
    if endpoint is None:
        return  # Ray finds the cluster of this machine by itself, or says at once that there is none
    host, port = endpoint
    try:
        is_ray = call_in_time(lambda: _speaks_http2(host, port, timeout_s), timeout_s, "Ray's address")
    except OSError as error:
        raise _refused(address, host, port, f"nothing responds at {host}:{port} ({error})") from error
    if not is_ray:
        raise _refused(address, host, port, f"what responds at {host}:{port} is not a Ray cluster")


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Where to connect; None where only Ray knows."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "") or _cluster_of_this_machine()
    if address in ("", "auto", "local"):
        return None
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port or (CLIENT_PORT if parts.scheme == "ray" else None)
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme not in ("", "ray"):
        raise UsageError(f"RAY_ADDRESS = {address}: must be host:port of the cluster's head, such as 10.0.0.1:6379.")
    return host, port


def _cluster_of_this_machine() -> str:
    """The address that `ray start` wrote last; empty if there is none, or no permission to read it."""
    folder = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray"
    try:
        return (folder / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _speaks_http2(host: str, port: int, timeout_s: float) -> bool:
    """Whether the listener speaks Ray's protocol. Raises OSError if nothing listens, or nothing is sent back."""
    with socket.create_connection((host, port), timeout_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return True  # it would not reply in plain text
        connection.sendall(HTTP2_PREFACE)
        frame = b""
        while len(frame) < 9:
            part = connection.recv(9 - len(frame))
            if not part:
                return False
            frame += part
        return frame[3] == SETTINGS


def _refused(address: str, host: str, port: int, what: str) -> UsageError:
    named = address if address != "auto" else f"auto, which means {host}:{port}"
    return UsageError(
        f"distributed.address = {named}: {what}. Start the cluster with `ray start --head --port={port}` on that "
        "machine, check that its port can be reached from here, or leave distributed.address out: then a cluster is "
        "started here."
    )


def free_address() -> tuple[str, int]:
    """Address of this machine in the cluster, and a port that is free now."""
    address: str = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return address, int(probe.getsockname()[1])
