"""The actor's side of a worker, without Ray's processes."""

import io
from pathlib import Path
from types import SimpleNamespace

from vlarl.distributed import actor as worker
from vlarl.distributed.actor import Host
from vlarl.envs import process_log


def test_the_log_is_kept_within_bounds_and_not_opened_again_for_each_call(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_write_to", lambda log_file: Path(log_file).touch())  # stdout stays this process's
    monkeypatch.setattr(process_log, "LARGEST", 100)
    monkeypatch.setattr(process_log, "KEPT", 10)
    log, opened, open_file = tmp_path / "worker.log", [], io.open
    host = Host()
    host.prepare(str(log), "", [])
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
