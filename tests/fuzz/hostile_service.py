"""A service on the loopback that speaks HTTP badly on purpose."""

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat

DRIP_S = 0.1
Behaviour = Callable[[socket.socket, int], None]  # (connection, episodes of the request)


def read_request(connection: socket.socket) -> int:
    """Read a request to its end; the number of its episodes."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(65536)
    return len(json.loads(body)["episodes"])


def send(data: bytes) -> Behaviour:
    """Send these bytes and close."""
    return lambda connection, count: connection.sendall(data)


def answer(body: bytes, status: str = "200 OK", headers: str = "") -> Behaviour:
    """A whole response."""
    return send(f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def stream(begin: bytes, parts: Callable[[], Iterator[bytes]], pause_s: float = 0.0) -> Behaviour:
    """A response that does not end."""

    def behave(connection: socket.socket, count: int) -> None:
        connection.sendall(begin)
        for part in parts():
            connection.sendall(part)
            time.sleep(pause_s)

    return behave


def scores(value: object) -> Behaviour:
    """A response with this for every episode."""
    return lambda connection, count: answer(json.dumps({"rewards": [value] * count}).encode())(connection, count)


def raw_scores(text: str) -> Behaviour:
    """The same with text that JSON can't write."""
    return lambda connection, count: answer(f'{{"rewards": [{", ".join([text] * count)}]}}'.encode())(connection, count)


OK = b"HTTP/1.1 200 OK\r\n"
BEHAVIOURS: dict[str, Behaviour] = {
    "answers": scores(0.5),
    "closes at once": lambda connection, count: None,
    "never answers": lambda connection, count: time.sleep(60),
    "drips its status line": stream(b"H", lambda: repeat(b"T"), DRIP_S),
    "drips its headers": stream(OK + b"X-Slow: ", lambda: repeat(b"x"), DRIP_S),
    "sends headers without end": stream(OK, lambda: repeat(b"X-More: x\r\n" * 100)),
    "sends a header line without end": stream(OK + b"X: ", lambda: repeat(b"x" * 4096)),
    "says continue without end": stream(b"", lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n")),
    "drips that it continues": stream(b"", lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n"), DRIP_S),
    "drips its body": stream(OK + b"Content-Length: 100000\r\n\r\n", lambda: repeat(b" "), DRIP_S),
    "drips the body of an error": stream(
        b"HTTP/1.1 500 Oh\r\nContent-Length: 100000\r\n\r\n", lambda: repeat(b" "), DRIP_S
    ),
    "drips the body of a refusal": stream(
        b"HTTP/1.1 400 No\r\nContent-Length: 100000\r\n\r\n", lambda: repeat(b" "), DRIP_S
    ),
    "drips chunks": stream(OK + b"Transfer-Encoding: chunked\r\n\r\n", lambda: repeat(b"1\r\n \r\n"), DRIP_S),
    "drips the length of a chunk": stream(OK + b"Transfer-Encoding: chunked\r\n\r\n", lambda: repeat(b"0"), DRIP_S),
    "sends chunks without end": stream(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", lambda: repeat(b"400\r\n" + b" " * 1024 + b"\r\n")
    ),
    "sends a body without end": stream(OK + b"\r\n", lambda: repeat(b" " * 65536)),
    "sends a refusal without end": stream(b"HTTP/1.1 403 No\r\n\r\n", lambda: repeat(b" " * 65536)),
    "sends chunks that are none": send(OK + b"Transfer-Encoding: chunked\r\n\r\nbanana\r\n"),
    "promises more than it sends": send(OK + b'Content-Length: 9999\r\n\r\n{"rewards": [1'),
    "promises petabytes": send(OK + b"Content-Length: 99999999999999999\r\n\r\n{}"),
    "promises less than nothing": send(OK + b"Content-Length: -5\r\n\r\n{}"),
    "promises bananas": send(OK + b"Content-Length: banana\r\n\r\n{}"),
    "sends a status that is none": send(b"HTTP/1.1 banana\r\n\r\n"),
    "speaks another protocol": send(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "sends bytes": send(bytes(range(256)) * 20),
    "sends nothing": answer(b""),
    "has no content": answer(b"", "204 No Content"),
    "redirects to itself": answer(b"", "302 Found", "Location: /score\r\n"),
    "wants a password": answer(b"who are you?", "401 Unauthorized", 'WWW-Authenticate: Basic realm="x"\r\n'),
    "is not there": answer(b"x" * 500_000, "404 Not Found"),
    "is busy": answer(b"later", "429 Too Many Requests", "Retry-After: 99999\r\n"),
    "fails": answer(b"\xff\xfe broken", "500 Internal Server Error"),
    "sends no JSON": answer(b"<html>"),
    "sends a list": answer(b"[1, 2]"),
    "sends too few": answer(b'{"rewards": []}'),
    "sends text": scores("good"),
    "sends truth values": scores(True),
    "sends lists": scores([1.0, 2.0]),
    "sends null": scores(None),
    "sends NaN": raw_scores("NaN"),
    "sends infinity": raw_scores("1e999"),
    "sends an integer of 400 digits": raw_scores("9" * 400),
    "sends an integer of 9000 digits": raw_scores("9" * 9000),
    "sends deep JSON": answer(b'{"rewards": ' + b"[" * 100_000),
    "sends bytes that are no text": answer(b'{"rewards": ["\xff\xfe"]}'),
    "sends gzip": answer(gzip.compress(b'{"rewards": [1]}'), headers="Content-Encoding: gzip\r\n"),
    "sends too much": answer(b" " * 2_000_000),
}


class HostileService:
    """Behaves as named, to every request; as a context manager."""

    def __init__(self, behaviour: str) -> None:
        self._behave = BEHAVIOURS[behaviour]
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/score"

    def __enter__(self) -> "HostileService":
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:  # the client has given up
            self._behave(connection, read_request(connection))
