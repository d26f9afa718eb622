"""Resources of a cluster: reserved machine by machine, shared as configured, and errors name what is missing."""

import time

import pytest
from fakes.cluster_runs import wait_for
from ray.cluster_utils import Cluster as FakeMachines

from vlarl.config.source.load import load_config
from vlarl.distributed import cluster as cluster_module
from vlarl.distributed.cluster import RESERVE_S, Cluster
from vlarl.distributed.demand import Demand, Resources
from vlarl.errors import UsageError
from vlarl.observability.trace import NoTrace

GPUS = 2  # of each machine; declared, there are none


class Witness:
    """A worker's part that returns its location."""

    def where(self) -> tuple[str, list[int]]:
        import ray

        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


@pytest.fixture(scope="module")
def machines():
    import ray

    fake = FakeMachines(
        initialize_head=True,
        head_node_args={"num_cpus": 8, "num_gpus": GPUS, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    fake.add_node(num_cpus=8, num_gpus=GPUS, object_store_memory=80 << 20)
    ray.init(address=fake.address, log_to_driver=False)
    yield fake
    ray.shutdown()
    fake.shutdown()


@pytest.fixture
def cluster(machines, tmp_path):
    import ray

    made = []

    def make(**options):
        config = load_config("tabletop_grpo", {"distributed.backend": "ray", "distributed.address": "auto", **options})
        cluster = Cluster(config.distributed, tmp_path, 1, NoTrace())
        cluster.connect(0.0)
        made.append(cluster)
        return cluster, Demand.of(config, num_env_workers=2, on_gpus=True)

    yield make
    for each in made:
        each.close()
    wait_for(lambda: ray.available_resources().get("GPU") == 2 * GPUS, 10)


def locations(workers):
    for worker in workers:
        worker.wait_started()
    return [worker.get(worker.call("where")) for worker in workers]


def test_learners_are_distributed_as_configured_and_engines_share_their_gpus(cluster):
    options = {
        "distributed.learners_per_node": (2, 1),
        "distributed.colocate": True,
        "distributed.torch_num_engines": 3,
        "distributed.learner_gpus": 0.6,
        "distributed.engine_gpus": 0.4,
    }
    reserved, demand = cluster(**options)
    reserved.reserve(demand)
    engine_placements, env_placements, reward_placements = reserved.other_placements(demand)
    assert len(env_placements) == 2 and not reward_placements
    learners = [
        reserved.worker(f"learner {i}", Witness, demand.learner, p)
        for i, p in enumerate(reserved.learner_placements(demand))
    ]
    engines = [reserved.worker(f"engine {i}", Witness, demand.engine, p) for i, p in enumerate(engine_placements)]
    found = locations(learners)
    assert locations(engines) == found, "each engine on its learner's GPU"
    first, second, third = found
    assert first[0] == second[0] != third[0], "two on one machine, one on the other"
    assert first[1] != second[1], "each learner has a GPU of its own"


def test_resources_are_released(cluster):
    import ray

    reserved, demand = cluster()
    reserved.reserve(demand)
    locations(
        [reserved.worker("environments 0", Witness, Resources(1.0, 0.0), reserved.other_placements(demand)[1][0])]
    )
    reserved.close()
    wait_for(lambda: ray.available_resources().get("GPU") == 2 * GPUS, 10)


def test_two_runs_share_a_cluster_and_a_third_is_refused_by_what_is_free(cluster, monkeypatch):
    """Each has two learners on one machine. By what a machine has in total, both would choose the same one."""
    options = {
        "distributed.learners_per_node": (2,),
        "distributed.colocate": True,
        "distributed.learner_gpus": 0.6,
        "distributed.engine_gpus": 0.4,
    }
    nodes = []
    for _ in range(2):
        reserved, demand = cluster(**options)
        began = time.monotonic()
        reserved.reserve(demand)
        assert time.monotonic() - began < RESERVE_S
        places = reserved.learner_placements(demand)
        found = locations([reserved.worker(f"learner {i}", Witness, demand.learner, p) for i, p in enumerate(places)])
        assert found[0][0] == found[1][0], "both learners of a run on one machine"
        nodes.append(found[0][0])
    assert nodes[0] != nodes[1]
    monkeypatch.setattr(cluster_module, "RELEASE_S", 0.5)
    third, demand = cluster(**options)
    with pytest.raises(
        UsageError, match=r"the cluster has \d+ CPUs and 0 GPUs free of 16 CPUs and 4 GPUs: .*2 GPUs missing"
    ):
        third.reserve(demand)


def test_free_resources_on_two_machines_are_not_those_of_one(cluster, monkeypatch):
    """Two GPUs are free, one on each machine: the message says so, and does not name what the machines have in all."""
    first, demand = cluster(
        **{
            "distributed.learners_per_node": (1, 1),
            "distributed.torch_num_engines": 1,
            "distributed.colocate": True,
            "distributed.learner_gpus": 0.5,
            "distributed.engine_gpus": 0.5,
        }
    )
    first.reserve(demand)
    monkeypatch.setattr(cluster_module, "RELEASE_S", 0.5)
    second, demand = cluster(**{"distributed.learners_per_node": (2,), "distributed.engine_gpus": 0.0})
    with pytest.raises(
        UsageError, match=r"one of them with 2 CPUs and 2 GPUs; the cluster's 2 have (\d CPUs and 1 GPU(, )?){2} free"
    ):
        second.reserve(demand)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed.learners_per_node": (2, 2), "distributed.torch_num_engines": 3}, "3 GPUs missing"),
        ({"distributed.learners_per_node": (3,)}, "one of them with 3 CPUs and 3 GPUs; the cluster's 2 have"),
        ({"distributed.learners_per_node": (1, 1, 1)}, "that takes 3 machines"),
        ({"distributed.worker_cpus": 8.0}, "take 32 CPUs and 2 GPUs; the cluster has 16 CPUs and 4 GPUs free"),
    ],
)
def test_missing_resources_are_named_before_anything_starts(cluster, options, message):
    reserved, demand = cluster(**options)
    with pytest.raises(UsageError) as refused:
        reserved.reserve(demand)
    assert message in str(refused.value)
