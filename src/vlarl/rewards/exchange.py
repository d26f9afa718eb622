"""One HTTP request and its response, over sockets that another thread can shut down.

    RemoteReward ── run ──► thread: name, connection, request, status line, headers, body
                 ── end of the block ──► every socket is shut down: whatever waits for one ends

A socket's timeout applies to each read alone, so a service that sends one byte per second never exceeds it. Hence the
deadline of the whole exchange is kept outside, and the end of the block ends the exchange.
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

REASON_BYTES = 200  # of an error's body, read for the message


class RefusalError(Exception):
    """The service replied with an HTTP error."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class WatchedExchange:
    """A request to be sent once; a context manager that closes its connections at the end."""

    def __init__(self, request: Request, max_response_bytes: int, socket_timeout_s: float) -> None:
        """`socket_timeout_s`: for a thread that was abandoned while it connects, which can't be shut down."""
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
        """The body of the response; RefusalError for an HTTP error, OSError where no response arrives."""
        opener = build_opener(_NoRedirects, _WatchedHttp(self._watch), _WatchedHttps(self._watch))
        try:
            with opener.open(self._request, timeout=self._socket_timeout_s) as response:
                return self._read(response)
        except HTTPError as error:
            with error:
                body = error.read(REASON_BYTES).decode(errors="replace").strip()
                raise RefusalError(f"HTTP {error.code} {error.reason}: {body}", error.code) from None

    def _read(self, response: IO[bytes]) -> bytes:
        parts, size = [], 0
        while part := response.read1(min(self._limit + 1, 65_536)):  # type: ignore[attr-defined]
            parts.append(part)
            size += len(part)
            if size > self._limit:
                raise VlarlError(f"the response is longer than reward.max_response_bytes = {self._limit}.")
        return b"".join(parts)

    def _watch(self, opened: socket.socket) -> None:
        self._sockets.append(opened.dup())  # the original may be wrapped by TLS, or passed to the response
        if self._ended:
            raise TimeoutError("the exchange was abandoned")


class _NoRedirects(HTTPRedirectHandler):
    """A redirected POST would become a GET without its body: redirects are treated as refusals."""

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
    """A connection of http.client that passes its socket to `watch` as soon as there is one."""
    made = kind(host, **options)
    connect = made._create_connection

    def connect_watched(*arguments: Any, **named: Any) -> socket.socket:
        opened: socket.socket = connect(*arguments, **named)
        watch(opened)
        return opened

    made._create_connection = connect_watched
    return made
