"""A cluster that a run starts can be reached only from this machine, and only by its user."""

import os
import stat

import psutil
import pytest
import ray
from ray._private import ray_constants

from vlarl.config.schema import DistributedConfig
from vlarl.distributed.cluster import Cluster, make_token_private, on_loopback
from vlarl.observability.trace import NoTrace


@pytest.fixture
def token(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_token_is_the_users_alone(token):
    make_token_private(create=False)
    assert not token.exists(), "joining a cluster makes no token"
    make_token_private(create=True)
    assert mode(token) == 0o600 and len(token.read_text()) == 64
    text = token.read_text()
    make_token_private(create=True)
    assert token.read_text() == text


def test_a_token_that_others_can_read_is_made_private(token):
    token.parent.mkdir()
    token.write_text("word")
    token.chmod(0o644)
    make_token_private(create=False)
    assert mode(token) == 0o600 and token.read_text() == "word"


def test_without_authentication_there_is_no_token(token, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    make_token_private(create=True)
    assert not token.exists()


def test_only_the_start_of_a_cluster_is_kept_on_the_loopback(monkeypatch):
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    monkeypatch.setenv(name, "1")
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    with on_loopback(True):
        assert os.environ[name] == "0" and not ray_constants.ENABLE_RAY_CLUSTER
    assert os.environ[name] == "1" and enabled == ray_constants.ENABLE_RAY_CLUSTER
    with on_loopback(False):
        assert os.environ[name] == "1" and enabled == ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.slow
def test_no_port_of_a_cluster_started_here_is_open_to_others(tmp_path):
    cluster = Cluster(DistributedConfig(backend="ray", object_store_mb=100), tmp_path, 1, NoTrace())
    cluster.connect(1.0)
    try:
        assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
        me = psutil.Process()
        found = [
            (process.name(), c.laddr.ip)
            for process in (me, *me.children(recursive=True))
            for c in process.net_connections(kind="inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert any("gcs" in name for name, _ in found)
        assert {ip.removeprefix("::ffff:") for _, ip in found} <= {"127.0.0.1", "::1"}, found
    finally:
        cluster.close()
