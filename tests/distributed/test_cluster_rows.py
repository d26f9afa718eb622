"""Observations stay where they were made: the driver gets names, and engines, ranks and rewards fetch by them."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from fakes.cluster_runs import wait_for
from ray._private.serialization import SerializationContext
from ray._private.worker import Worker
from ray.util.placement_group import placement_group

from vlarl.config.source.load import load_config
from vlarl.decisions import PickedRows, Sampling
from vlarl.distributed.cluster import Cluster, Resources, wait_started
from vlarl.distributed.engines import EngineGroup, build_torch_engine
from vlarl.distributed.environments import PoolGroup, pool_parts
from vlarl.distributed.reading import Reading
from vlarl.distributed.stored_rows import StoredBatch, readable
from vlarl.envs.build import build_pool
from vlarl.errors import RowsLostError
from vlarl.observability.trace import NoTrace
from vlarl.policies.load import load_acting_policy
from vlarl.rollout.collector import Collector
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.types import Task

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from driver import Machines, Meter, addresses, save_policy, store_stats  # noqa: E402
from image_env import SIZE  # noqa: E402

ONE_CORE = Resources(1.0, 0.0)
STORE = 80 << 20  # the smallest that Ray starts; a row has 192 KiB
SLOTS, DECISIONS = 8, 50  # twice as many rows as a store holds


@pytest.fixture(scope="module")
def machines():
    """The driver's machine, and one for environments."""
    fake = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    fake.add_node(num_cpus=1, resources={"environments": 1.0}, object_store_memory=STORE)
    ray.init(address=fake.address, log_to_driver=False)
    yield fake
    ray.shutdown()
    fake.shutdown()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    save_policy(folder)
    gym = {"gym.env": "image_env:Images", "gym.batched": True, "gym.images": ("pixels",), "env.image_size": SIZE}
    gym |= {"gym.instructions": ("look at the noise",), "env.max_steps": 4 * DECISIONS, "env.num_envs": SLOTS}
    options = {"env.suite": "gym", "policy.path": str(folder), "run.num_threads": 1, "run.device": "cpu"}
    return load_config("tabletop_grpo", {**gym, **options, "env.task_ids": None, "distributed.backend": "ray"})


@pytest.fixture(scope="module")
def policy(config):
    return load_acting_policy(config, None, torch.device("cpu"))


@pytest.fixture(scope="module")
def cluster(machines, config, tmp_path_factory):
    made = Cluster(config.distributed, tmp_path_factory.mktemp("logs"), 1, NoTrace())
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool(cluster, config):
    """Environments on the second machine; their images are kept."""
    there = placement_group([{"CPU": 1.0, "environments": 1.0}])
    reading = Reading(config, keeps_images=True)
    (part,) = pool_parts(config.env, config.gym, [SLOTS], SIZE, "sparse", reading=reading)
    worker = cluster.worker("environments 0", part.build, ONE_CORE, (there, 0))
    wait_started([worker])
    return PoolGroup([worker], [SLOTS], lockstep=True, reading=reading)


def tasks(count):
    return [Task("gym", 0, i, seed=i) for i in range(count)]


def collected(collector, count):
    found = dict(collector.episodes(tasks(count), Sampling(1.0)))
    return [found[index].trajectory for index in range(count)]


@pytest.fixture(scope="module")
def here(config, policy):
    """The same episodes in one process, with their images."""
    pool = build_pool(config.env, config.gym, SLOTS, SIZE, "sparse")
    return collected(Collector(pool, policy, TorchEngine(policy, torch.device("cpu"))), 2 * SLOTS)


@pytest.fixture(scope="module")
def there(cluster, config, pool):
    """Two episodes in each slot, twice what the store holds: the trajectories, and what the driver did for them."""
    worker = cluster.worker("engine 0", partial(build_torch_engine, config, False), ONE_CORE)
    wait_started([worker])
    meter, reader = Meter(), load_acting_policy(config, None, torch.device("meta"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SerializationContext, "serialize", SerializationContext.serialize)
        patch.setattr(Worker, "deserialize_objects", Worker.deserialize_objects)
        meter.install()
        with meter.measuring("rollout"):
            trajectories = collected(Collector(pool, reader, EngineGroup([worker])), 2 * SLOTS)
    return trajectories, meter.phases["rollout"]


def test_no_pixels_pass_through_the_driver(there):
    trajectories, driver = there
    decisions = sum(len(trajectory.transitions) for trajectory in trajectories)
    assert decisions == 2 * SLOTS * DECISIONS
    assert driver.received / decisions < 2048 and driver.sent / decisions < 2048
    seen = [transition.observation for trajectory in trajectories for transition in trajectory.transitions]
    assert not any(observation.images.size for observation in seen)
    assert all(isinstance(t.inputs.batch, StoredBatch) for trajectory in trajectories for t in trajectory.transitions)


def test_engines_decide_as_in_one_process(there, here):
    for ours, theirs in zip(there[0], here, strict=True):
        for one, other in zip(ours.transitions, theirs.transitions, strict=True):
            assert torch.equal(one.decision.sample.ids, other.decision.sample.ids)


def test_rows_that_were_spilled_are_read_back(there, here):
    """In any order, as a microbatch reads them, by another machine than theirs: from the files, without a restore."""
    ours = [t.inputs for trajectory in there[0] for t in trajectory.transitions]
    theirs = [t.inputs for trajectory in here for t in trajectory.transitions]
    spilled = sum(stats.spilled_bytes_total for stats in store_stats(addresses()))
    assert spilled > len(ours) * 3 * SIZE**2 - STORE, "more than what the store holds"
    order = np.random.default_rng(0).permutation(len(ours))
    for rows in np.array_split(order, 10):
        found = PickedRows.of([ours[i] for i in rows]).joined()
        assert torch.equal(found.pixels, PickedRows.of([theirs[i] for i in rows]).joined().pixels)


def test_images_that_are_kept_are_fetched_where_they_are_read(there, here):
    ours, theirs = there[0][0].whole(), here[0]
    for one, other in zip(ours.transitions, theirs.transitions, strict=True):
        np.testing.assert_array_equal(one.observation.images, other.observation.images)
    np.testing.assert_array_equal(ours.final_observation.images, theirs.final_observation.images)


def test_rows_of_a_machine_that_is_gone_are_missed_by_name(there, machines):
    """The last test: it takes the machine away."""
    trajectories, _ = there
    row = trajectories[0].transitions[0].inputs
    assert readable(trajectories) == trajectories and not row.batch.gone("another object")
    machines.remove_node(machines.list_all_nodes()[-1])
    wait_for(lambda: not readable(trajectories), 60)
    with pytest.raises(RowsLostError, match="lost with the machine that they were made on") as lost:
        row.alone()
    assert lost.value.name == row.batch.reference.hex() and row.batch.gone("another object")
