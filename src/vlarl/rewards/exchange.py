"""One HTTP request and its answer, over sockets that another thread can shut down.

    RemoteReward ── run ──► thread: name, connection, request, status line, headers, body
                 ── end of the block ──► every socket is shut down: whatever waits for it ends

Timeouts of sockets are for each read by itself, and a service that sends a byte a second never misses one. So the
deadline for the whole is kept outside, and the block ends the exchange.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from vlarl.errors import VlarlError

REASON_BYTES = 200  # of an error's body that are read for the message


class RefusalError(Exception):
    """The service answered with an HTTP error."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class WatchedExchange:
    """A request to be sent once; a context manager whose end is the end of its connections."""

    def __init__(self, request: Request, max_response_bytes: int, socket_timeout_s: float) -> None:
        """`socket_timeout_s`: for a thread that was given up while it connects, which can't be shut down."""
        self._request = request
        self._limit = max_response_bytes
        self._socket_timeout_s = socket_timeout_s
        self._sockets: list[socket.socket] = []
        self._ended = False

    def __enter__(self) -> WatchedExchange:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        for opened in self._sockets:
            with opened, suppress(OSError):  # it is closed already
                opened.shutdown(socket.SHUT_RDWR)

    def run(self) -> bytes:
        """The content of the answer; RefusalError for an HTTP error, OSError where no answer comes."""
        opener = build_opener(_NoRedirects, _WatchedHttp(self._watch), _WatchedHttps(self._watch))
        try:
            with opener.open(self._request, timeout=self._socket_timeout_s) as response:
                return self._read(response)
        except HTTPError as error:
            with error:
                told = error.read(REASON_BYTES).decode(errors="replace").strip()
                raise RefusalError(f"HTTP {error.code} {error.reason}: {told}", error.code) from None

    def _read(self, response: IO[bytes]) -> bytes:
        parts, size = [], 0
        while part := response.read1(min(self._limit + 1, 65_536)):  # type: ignore[attr-defined]
            parts.append(part)
            size += len(part)
            if size > self._limit:
                raise VlarlError(f"the answer is longer than reward.max_response_bytes = {self._limit}.")
        return b"".join(parts)

    def _watch(self, opened: socket.socket) -> None:
        self._sockets.append(opened.dup())  # its own may be wrapped by TLS, or handed on to the response
        if self._ended:
            raise TimeoutError("the exchange was given up")


class _NoRedirects(HTTPRedirectHandler):
    """A redirected POST becomes a GET without its content: treated as the refusal that it is."""

    def redirect_request(self, *_: object) -> None:
        """Follow nothing."""


Watch = Callable[[socket.socket], None]


class _WatchedHttp(HTTPHandler):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(partial(_connection, HTTPConnection, self._watch), request)


class _WatchedHttps(HTTPSHandler):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def https_open(self, request: Request) -> HTTPResponse:
        kind = partial(_connection, HTTPSConnection, self._watch)
        return self.do_open(kind, request, context=self._context)  # type: ignore[attr-defined]


def _connection(kind: Callable[..., Any], watch: Watch, host: str, **options: Any) -> Any:
    """A connection of http.client's that shows its socket as soon as there is one."""
    made = kind(host, **options)
    connect = made._create_connection

    def connect_watched(*arguments: Any, **named: Any) -> socket.socket:
        opened: socket.socket = connect(*arguments, **named)
        watch(opened)
        return opened

    made._create_connection = connect_watched
    return made
