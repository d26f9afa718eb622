"""An address at which no Ray cluster responds is refused before Ray waits for it."""

import socket
import threading

import pytest

from vlarl.distributed.address import SETTINGS, check_address
from vlarl.errors import UsageError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def reply(server: socket.socket, content: bytes) -> threading.Thread:
    """Accept one connection, send this, and close it."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(content)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_nothing_listens(listener):
    place = address(listener)
    listener.close()
    with pytest.raises(UsageError) as refused:
        check_address(place)
    message = str(refused.value)
    assert f"distributed.address = {place}: nothing responds at {place}" in message and "refused" in message
    assert f"`ray start --head --port={place.split(':')[1]}`" in message and "leave distributed.address out" in message


def test_a_listener_that_sends_nothing_is_given_up(listener):
    with pytest.raises(UsageError, match="nothing responds"):
        check_address(address(listener), timeout_s=0.3)


@pytest.mark.parametrize("content", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"short"])
def test_a_listener_that_is_not_ray(listener, content):
    reply(listener, content)
    with pytest.raises(UsageError, match=r"is not a Ray cluster"):
        check_address(address(listener))


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_a_cluster_is_accepted(listener, form, monkeypatch):
    frame = bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
    reply(listener, frame)
    check_address(form.format(address(listener)))
    monkeypatch.setenv("RAY_ADDRESS", form.format(address(listener)))
    reply(listener, frame)
    check_address("auto")


def test_auto_means_the_address_that_ray_wrote(listener, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    check_address("auto")  # there is no address: Ray itself reports that at once
    place = address(listener)
    listener.close()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(place)
    with pytest.raises(UsageError, match=f"auto, which means {place}: nothing responds"):
        check_address("auto")


@pytest.mark.parametrize("given", ["somewhere", "http://127.0.0.1:80", "host:port", "host:99999"])
def test_an_invalid_address(monkeypatch, given):
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(UsageError, match="RAY_ADDRESS = .*must be host:port"):
        check_address("auto")
