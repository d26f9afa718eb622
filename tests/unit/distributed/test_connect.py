"""Connecting to Ray: what Ray itself prints while it fails does not reach the terminal."""

import os

import pytest
import ray

from vlarl.config.schema import DistributedConfig
from vlarl.distributed.cluster import Cluster, redirect_stderr
from vlarl.errors import UsageError
from vlarl.observability.trace import NoTrace

WARNING = b"[2026-01-01 00:00:00,000 W 1 1] gcs_client.cc:210: Failed to get cluster ID from GCS server\n"


@pytest.fixture
def cluster(tmp_path):
    return Cluster(DistributedConfig(backend="ray", address="10.0.0.1:6379"), tmp_path / "logs", 1, NoTrace())


def test_a_failed_connection_is_one_message(cluster, tmp_path, monkeypatch, capfd):
    def fail(**options):
        os.write(2, WARNING)  # as compiled code does
        raise ConnectionError("timed out")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(
        UsageError,
        match=r"no Ray cluster responds at 10.0.0.1:6379 \(timed out\).*message: .*cluster ID from GCS server$",
    ):
        cluster.connect(1.0)
    assert capfd.readouterr().err == ""
    assert (tmp_path / "logs" / "ray.log").read_bytes() == WARNING


def test_nothing_is_left_where_nothing_was_printed(cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ray, "init", lambda **options: None)
    cluster.connect(1.0)
    assert list((tmp_path / "logs").iterdir()) == []
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n", "stderr is the terminal again"


def test_a_process_without_stderr_connects(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with redirect_stderr(tmp_path / "ray.log"):
        pass
    assert not (tmp_path / "ray.log").exists()


def test_a_file_is_appended_to(tmp_path):
    for text in (b"one\n", b"two\n"):
        with redirect_stderr(tmp_path / "ray.log"):
            os.write(2, text)
    assert (tmp_path / "ray.log").read_bytes() == b"one\ntwo\n"
