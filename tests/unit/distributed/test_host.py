"""The actor's side of a worker, without Ray's processes."""

import io
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlarl.distributed import actor as worker
from vlarl.distributed.actor import Host
from vlarl.distributed.shared_folder import EVALUATION_FOLDER, RUN_FOLDER
from vlarl.envs import process_log
from vlarl.errors import UsageError


def test_the_log_is_kept_within_bounds_and_not_opened_again_for_each_call(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_write_to", lambda log_file: Path(log_file).touch())  # stdout stays this process's
    monkeypatch.setattr(process_log, "LARGEST", 100)
    monkeypatch.setattr(process_log, "KEPT", 10)
    log, opened, open_file = tmp_path / "worker.log", [], io.open
    host = Host()
    (tmp_path / worker.SHARED_FILE).write_text("nonce")
    host.prepare(str(log), "", [], "nonce")
    host.part = SimpleNamespace(double=lambda value: 2 * value)

    def recording_open(file, *arguments, **named):
        opened.append(str(file))
        return open_file(file, *arguments, **named)

    for last in (b"the first", b"the other"):
        with log.open("ab") as file:
            file.write(b"x" * 200 + last + b"\n")
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", recording_open)
            patch.setattr(io, "open", recording_open)  # what pathlib opens with
            assert host.call("double", 4).value == 8
        assert log.read_bytes() == b"(older output was left out)\n" + last + b"\n"
    assert str(log) not in opened


@pytest.mark.parametrize("content", [None, "of another run"])
@pytest.mark.parametrize(
    ("shared", "whose", "option"), [(RUN_FOLDER, "run's", "run.root"), (EVALUATION_FOLDER, "evaluation's", "--out")]
)
def test_a_worker_that_does_not_see_the_shared_folder_is_refused_and_writes_nothing(
    tmp_path, monkeypatch, content, shared, whose, option
):
    monkeypatch.setattr(worker, "VISIBLE_S", 0.0)
    logs = tmp_path / "runs" / "mine" / "logs"
    if content is not None:
        logs.mkdir(parents=True)
        (logs / worker.SHARED_FILE).write_text(content)
    host = Host()
    host.prepare(str(logs / "engine-1.log"), "", [], "nonce", shared)
    error = host.begin(lambda: SimpleNamespace()).error
    assert isinstance(error, UsageError)
    here = f"{option}: engine-1 runs on {socket.gethostname()}, which does not see the {whose} folder {logs.parent}"
    assert here in str(error)
    assert f"set {option} to a folder that they all mount under the same path" in str(error)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ([".shared"] if content else [])


def test_a_worker_that_can_not_write_its_log_is_refused(tmp_path, monkeypatch):
    """As where the machine's root user has no rights on a folder of another one's."""

    def refused(log_file: str) -> None:
        raise PermissionError(13, "Permission denied", log_file)

    monkeypatch.setattr(worker, "_write_to", refused)
    (tmp_path / worker.SHARED_FILE).write_text("nonce")
    host = Host()
    host.prepare(str(tmp_path / "engine-1.log"), "", [], "nonce")
    error = host.begin(lambda: SimpleNamespace()).error
    assert isinstance(error, UsageError)
    assert f"engine-1.log can't be written on {socket.gethostname()} (Permission denied)" in str(error)


def test_arguments_travel_as_one_object_unless_one_of_them_is_of_the_store():
    """Ray fetches what is an argument itself, and serializes each argument by itself."""
    host = Host()
    host.part = SimpleNamespace(sum=lambda *values: sum(values))
    (call,) = worker.packed("sum", (1, 2, 3))
    assert host.call(call).value == 6
    reference = worker.ray.ObjectRef.nil()
    assert worker.packed("sum", (1, reference)) == ("sum", 1, reference)
    assert host.call("sum", 1, 4).value == 5
