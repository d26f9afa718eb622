"""Connecting to Ray: what Ray itself prints while it fails does not reach the terminal."""

import os
from types import SimpleNamespace

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


def test_a_node_that_does_not_start_in_time_is_one_message(tmp_path, monkeypatch):
    def fail(**options):
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr("vlarl.distributed.cluster.make_token_private", lambda create: None)
    here = Cluster(DistributedConfig(backend="ray"), tmp_path / "logs", 1, NoTrace())
    with pytest.raises(UsageError, match=r"can't be started here \(The current node timed out during startup.\)"):
        here.connect(1.0)


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


def test_the_dashboard_is_started_on_request_and_its_address_is_shown(tmp_path, monkeypatch, caplog):
    given = []
    monkeypatch.setattr(
        ray, "init", lambda **options: given.append(options) or SimpleNamespace(dashboard_url="127.0.0.1:8265")
    )
    monkeypatch.setattr("vlarl.distributed.cluster.make_token_private", lambda create: None)
    for wanted in (False, True):
        Cluster(DistributedConfig(backend="ray", dashboard=wanted), tmp_path / "logs", 1, NoTrace()).connect(1.0)
    assert [options["include_dashboard"] for options in given] == [False, True]
    assert [record.getMessage() for record in caplog.records] == ["Ray's dashboard is at http://127.0.0.1:8265"]


def test_workers_get_the_variables_of_the_configuration(tmp_path):
    config = DistributedConfig(
        backend="ray", env_vars={"NCCL_CUMEM_ENABLE": 0, "TOKENIZERS_PARALLELISM": True, "LP_NUM_THREADS": 4}
    )
    made = Cluster(config, tmp_path / "logs", 3, NoTrace())
    assert made.variables({"LP_NUM_THREADS": "1", "MUJOCO_GL": "egl"}) == {
        "NCCL_CUMEM_ENABLE": "0",
        "TOKENIZERS_PARALLELISM": "1",
        "LP_NUM_THREADS": "4",
        "MUJOCO_GL": "egl",
        "OMP_NUM_THREADS": "3",
    }
