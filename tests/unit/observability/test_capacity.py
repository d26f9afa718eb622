"""As many simulator processes as fit into memory: the machine's, or what a container leaves of it."""

from pathlib import Path

import pytest

from vlarl import parts
from vlarl.config.load import load_config
from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.errors import UsageError
from vlarl.observability import capacity
from vlarl.observability.capacity import fitting_envs, refuse_crowd, refuse_crowd_here
from vlarl.observability.machine import available_memory

GIB = 1 << 30


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


MACHINE = {"meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}


@pytest.mark.parametrize(
    ("own", "groups", "expected"),
    [
        ("0::/\n", {}, 8 * GIB),
        ("0::/\n", {"memory.max": "max", "memory.current": "7"}, 8 * GIB),
        ("0::/\n", {"memory.max": str(4 * GIB), "memory.current": str(GIB)}, 3 * GIB),
        (
            "0::/job\n",
            {
                "job/memory.max": str(4 * GIB),
                "job/memory.current": str(3 * GIB),
                "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        ("0::/job/step\n", {"job/memory.max": str(2 * GIB), "job/memory.current": str(GIB)}, GIB),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": "0"}, GIB),
        ("0::/\n", {"memory.max": "5", "memory.current": "7"}, 0),
    ],
)
def test_free_memory_is_the_smallest_of_what_limits_it(tmp_path, own, groups, expected):
    proc = written(tmp_path / "proc", MACHINE | {"self/cgroup": own})
    assert available_memory(proc, written(tmp_path / "groups", groups)) == expected


def test_a_machine_that_does_not_say_refuses_nothing(tmp_path, monkeypatch):
    assert available_memory(tmp_path, tmp_path) is None
    monkeypatch.setattr(capacity, "available_memory", lambda: None)
    assert fitting_envs("libero_spatial") is None
    refuse_crowd("libero_spatial", 10**6)


@pytest.fixture
def six_gib(monkeypatch):
    monkeypatch.setattr(capacity, "available_memory", lambda: 6 * GIB)


def test_more_processes_than_fit_are_refused_with_the_number_that_fits(six_gib):
    assert fitting_envs("libero_spatial") == 10
    refuse_crowd("libero_spatial", 10)
    message = r"env.num_envs = 64: .* take 38 GiB of memory, 0.6 GiB each, and 6 GiB are free here; set env.num_envs to 10 or less"
    with pytest.raises(UsageError, match=message):
        refuse_crowd("libero_spatial", 64)
    refuse_crowd("tabletop_spatial", 10**6)  # no process each
    refuse_crowd("gym", 10**6)  # of unknown size


def test_a_cluster_elsewhere_has_memory_of_its_own(six_gib):
    with pytest.raises(UsageError, match="set env.num_envs to 10 or less"):
        refuse_crowd_here(load_config("libero_spatial_grpo_oft", {"env.num_envs": 64}))
    refuse_crowd_here(load_config("libero_10_cluster"))


def test_the_default_is_what_fits(monkeypatch):
    monkeypatch.setattr(parts, "available_cores", lambda: 16)
    monkeypatch.setattr(capacity, "available_memory", lambda: 6 * GIB)
    env = EnvConfig(suite="libero_spatial")
    assert parts.num_envs(env, GymConfig()) == 10
    assert parts.num_envs(env.model_copy(update={"num_envs": 3}), GymConfig()) == 3
    monkeypatch.setattr(capacity, "available_memory", lambda: 600 * GIB)
    assert parts.num_envs(env, GymConfig()) == 16
    monkeypatch.setattr(capacity, "available_memory", lambda: 0)
    assert parts.num_envs(env, GymConfig()) == 1
