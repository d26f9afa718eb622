"""As many simulator processes as fit into memory: the machine's, or what a container leaves of it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.worker_envs import SPEC

from vlarl.config.finetune import DemoConfig
from vlarl.config.schema import DistributedConfig, EnvConfig, GymConfig
from vlarl.config.source.load import load_config
from vlarl.data.demos import SimulatorSource
from vlarl.errors import UsageError
from vlarl.evaluation import run as evaluation
from vlarl.evaluation.request import eval_request
from vlarl.observability import capacity
from vlarl.observability.capacity import READER_MIB, check_memory_for_config, check_memory_for_envs, fitting_envs
from vlarl.observability.machine import available_memory
from vlarl.run import parts

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
        (
            "0::/\n",
            {
                "memory.max": str(4 * GIB),
                "memory.current": str(4 * GIB),
                "memory.stat": f"inactive_file {GIB}\nactive_file {2 * GIB}\nactive_anon {GIB}\n",
            },
            3 * GIB,
        ),
        (
            "5:memory:/\n",
            {
                "memory/memory.limit_in_bytes": str(4 * GIB),
                "memory/memory.usage_in_bytes": str(4 * GIB),
                "memory/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file {2 * GIB}\n",
            },
            3 * GIB,
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
    check_memory_for_envs("libero_spatial", 10**6)


@pytest.fixture
def six_gib(monkeypatch):
    monkeypatch.setattr(capacity, "available_memory", lambda: 6 * GIB)


def test_more_processes_than_fit_are_refused_with_the_number_that_fits(six_gib):
    assert fitting_envs("libero_spatial") == 10
    check_memory_for_envs("libero_spatial", 10)
    message = r"env.num_envs = 64: .* take 38 GiB of memory, 0.6 GiB each, and 6 GiB are free here; set env.num_envs to 10 or less"
    with pytest.raises(UsageError, match=message):
        check_memory_for_envs("libero_spatial", 64)
    check_memory_for_envs("tabletop_spatial", 10**6)  # no process each
    check_memory_for_envs("gym", 10**6)  # of unknown size


def test_workers_of_a_cluster_also_hold_the_policy_that_reads_their_observations(six_gib, monkeypatch):
    assert fitting_envs("libero_spatial", READER_MIB) == 6 * 1024 // (600 + 363) == 6
    check_memory_for_envs("libero_spatial", 6, reader_mib=READER_MIB)
    message = r"env.num_envs = 7: .* take 7 GiB of memory, 0.9 GiB each, .* set env.num_envs to 6 or less"
    with pytest.raises(UsageError, match=message):
        check_memory_for_envs("libero_spatial", 7, reader_mib=READER_MIB)
    monkeypatch.setattr(capacity, "available_cores", lambda: 16)
    assert parts.num_envs(EnvConfig(suite="libero_spatial"), GymConfig(), READER_MIB) == 6


def test_an_evaluation_counts_what_its_workers_hold(six_gib):
    request = eval_request("builtin:tiny-oft", {"env.suite": "libero_spatial", "env.num_envs": 8}, states_per_task=5)
    assert evaluation._pool_size(request) == 8
    on_ray = replace(request, distributed=DistributedConfig(backend="ray"))
    with pytest.raises(UsageError, match="set env.num_envs to 6 or less"):
        evaluation._pool_size(on_ray)
    elsewhere = replace(request, distributed=DistributedConfig(backend="ray", address="auto"))
    assert evaluation._pool_size(elsewhere) == 8, "it has memory of its own"


def test_a_cluster_elsewhere_has_memory_of_its_own(six_gib):
    with pytest.raises(UsageError, match="set env.num_envs to 10 or less"):
        check_memory_for_config(load_config("libero_spatial_grpo_oft", {"env.num_envs": 64}))
    check_memory_for_config(load_config("libero_10_cluster"))


def test_the_default_is_what_fits(monkeypatch):
    monkeypatch.setattr(capacity, "available_cores", lambda: 16)
    monkeypatch.setattr(capacity, "available_memory", lambda: 6 * GIB)
    env = EnvConfig(suite="libero_spatial")
    assert parts.num_envs(env, GymConfig()) == 10
    assert parts.num_envs(env.model_copy(update={"num_envs": 3}), GymConfig()) == 3
    monkeypatch.setattr(capacity, "available_memory", lambda: 600 * GIB)
    assert parts.num_envs(env, GymConfig()) == 16
    monkeypatch.setattr(capacity, "available_memory", lambda: 0)
    assert parts.num_envs(env, GymConfig()) == 1


@pytest.fixture
def nothing_free(monkeypatch):
    monkeypatch.setattr(capacity, "available_memory", lambda: 0)


def test_where_not_even_one_fits_no_smaller_number_is_advised(nothing_free):
    message = r"env.num_envs = 1: a process of libero_spatial takes 0.6 GiB of memory, and less than that is free here; free some memory"
    with pytest.raises(UsageError, match=message) as error:
        check_memory_for_envs("libero_spatial", 1)
    assert "set env.num_envs" not in str(error.value)


def test_a_number_that_the_user_has_not_set_is_not_refused(nothing_free):
    check_memory_for_envs("libero_spatial", None)
    check_memory_for_config(load_config("libero_spatial_grpo_oft", {"env.num_envs": None}))
    request = eval_request("builtin:tiny-oft", {"env.suite": "libero_spatial"})
    assert evaluation._pool_size(request) == 1
    with pytest.raises(UsageError, match="env.num_envs = 2: a process of libero_spatial"):
        evaluation._pool_size(replace(request, env=request.env.model_copy(update={"num_envs": 2})))


def test_processes_that_play_demonstrations_are_by_default_as_many_as_fit(monkeypatch, six_gib):
    monkeypatch.setattr(capacity, "available_cores", lambda: 64)
    factory = SimpleNamespace(spec=replace(SPEC, name="libero_spatial"))
    assert SimulatorSource(DemoConfig(episodes_per_task=50), factory, seed=0)._num_workers == 10
    with pytest.raises(UsageError, match="demos.num_workers = 64: .* set demos.num_workers to 10 or less"):
        SimulatorSource(DemoConfig(num_workers=64, episodes_per_task=50), factory, seed=0)
