"""The groups of workers: simulators and parts of a pool, and engines of which one is lost in a sync."""

import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from fakes import adapter_movement as movement
from fakes.cluster_runs import SMALL, wait_for
from fakes.float_error import check_logprobs
from fakes.worker_envs import SPEC, CountingFactory

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling
from vlarl.distributed.cluster import Cluster, wait_started
from vlarl.distributed.demand import Resources
from vlarl.distributed.engines import EngineGroup, build_torch_engine, build_vllm_engine
from vlarl.distributed.environments import EnvWorkerSpec, PoolGroup, Simulator, pool_parts
from vlarl.distributed.learners import LearnerGroup, Rank
from vlarl.envs.base import Record
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.errors import UsageError
from vlarl.observability.trace import NoTrace
from vlarl.policies.load import load_acting_policy
from vlarl.rollout.engines.replica import ReplicaEngine
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.prepare import load_trained_policy
from vlarl.types import Task

NO_RESOURCES = Resources(0.0, 0.0)
CPU = torch.device("cpu")


class Faulty(ReplicaEngine):
    """Fails in a sync once if a file exists."""

    def __init__(self, config, trouble):
        built = build_torch_engine(config, on_gpu=False)
        super().__init__(built.policy, torch.device("cpu"))
        self.trouble = trouble

    def update_weights(self, update_info):
        if self.trouble.exists():
            self.trouble.unlink()
            raise MemoryError("no memory for this bucket")
        super().update_weights(update_info)


@pytest.fixture
def cluster(ray_here, tmp_path):
    config = load_config("tabletop_grpo", {**SMALL, "distributed.backend": "ray", "distributed.timeout_s": 30.0})
    made = Cluster(config.distributed, tmp_path, 1, NoTrace())
    yield made
    made.close()


def counting(cluster, *troubles, timeout_s=60.0):
    """A pool with one simulator for each of the troubles."""
    diary = str(cluster.logs / "diary")
    factories = [CountingFactory(trouble, f"{diary}-{i}") for i, trouble in enumerate(troubles)]
    builds = [EnvWorkerSpec(Simulator, (factory,), {}).build for factory in factories]
    workers = [
        cluster.worker(f"environments {i}", build, NO_RESOURCES, timeout_s=timeout_s) for i, build in enumerate(builds)
    ]
    wait_started(workers)
    return PoolGroup(workers, [1] * len(workers), lockstep=True)


def ones(count, steps=4):
    return np.ones((count, steps, 2), np.float32)


def test_simulators_run_in_workers_of_their_own(cluster):
    pool = counting(cluster, (), ())
    assert pool.spec == SPEC and pool.num_envs == 2
    first, second = pool.reset([0, 1], [Task("counting", 0, 1, 7), Task("counting", 2, 2, 7)])
    assert (first.instruction, second.instruction) == ("count to 5", "count to 7")
    one, other = pool.step_chunk([0, 1], ones(2), Record(frozenset({1}), frozenset({1})))
    assert one.passed == () and [int(each.images.max()) for each in other.passed] == [1, 2, 3]
    assert one.rewards.tolist() == other.rewards.tolist() == [1, 2, 3, 4] and not one.frames and len(other.frames) == 4
    one, other = pool.step_chunk([0, 1], ones(2))
    assert (one.success, one.num_executed) == (True, 1) and (other.success, other.num_executed) == (True, 3)
    assert pool.frame(0)[0, 0, 0] == 105, "five steps"
    pids = {worker.location.pid for worker in pool.workers}
    assert len(pids) == 2 and os.getpid() not in pids


def test_simulators_that_fail_are_replaced_and_can_be_reset(cluster):
    reasons = {"raise": "the joints exploded", "die": "died", "hang": "has not replied to `step` in time: it hangs"}
    pool = counting(cluster, (), *(((trouble, 2),) for trouble in reasons), timeout_s=5.0)
    slots, tasks = range(4), [Task("counting", 0, 1, 7)] * 4
    before = [worker.location.pid for worker in pool.workers]
    pool.reset(slots, tasks)
    fine, *failed = pool.step_chunk(slots, ones(4))
    assert fine.error is None
    assert all(reason in outcome.error for outcome, reason in zip(failed, reasons.values(), strict=True))
    pool.send_chunk([1], ones(1))
    assert reasons["raise"] in pool.receive()[0][1].error, "its episode is lost with it"
    pool.reset(slots[1:], tasks[1:])
    assert [outcome.error for outcome in pool.step_chunk(slots[1:], ones(3))] == [None] * 3
    assert all(worker.location.pid != pid for worker, pid in zip(pool.workers[1:], before[1:], strict=True))


@pytest.mark.timeout(120)
def test_what_a_simulator_has_started_ends_with_its_worker(cluster):
    """Both hold a pipe open for as long as they live."""
    os.mkfifo(pipe := cluster.logs / "diary-0.pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    pool = counting(cluster, (("child", 0),))
    pool.reset([0], [Task("counting", 0, 1, 7)])
    os.kill(pool.workers[0].location.pid, signal.SIGSTOP)
    pool.workers[0].stop()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_what_a_simulator_refuses_is_reported_to_the_user(cluster):
    pool = counting(cluster, (("refuse", 0),))
    with pytest.raises(UsageError, match="the assets are missing: fetch them"):
        pool.reset([0], [Task("counting", 0, 1, 7)])


def test_slots_of_one_pool_are_the_same_wherever_they_are(cluster):
    env, whole = EnvConfig(suite="tabletop_spatial"), TabletopPool("tabletop_spatial", 5, 24)
    specs = pool_parts(env, GymConfig(), [3, 2], 24, "sparse")
    workers = [cluster.worker(f"environments {i}", spec.build, NO_RESOURCES) for i, spec in enumerate(specs)]
    wait_started(workers)
    pool = PoolGroup(workers, [3, 2], lockstep=True)
    tasks = [Task("tabletop_spatial", i, i, i) for i in range(5)]
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 4, 7)).astype(np.float32)
    for ours, theirs in zip(pool.reset(range(5), tasks), whole.reset(range(5), tasks), strict=True):
        np.testing.assert_array_equal(ours.images, theirs.images)
    for ours, theirs in zip(pool.step_chunk(range(5), actions), whole.step_chunk(range(5), actions), strict=True):
        np.testing.assert_array_equal(ours.observation.images, theirs.observation.images)

    os.kill(workers[1].location.pid, signal.SIGKILL)
    lost = pool.step_chunk([0, 3], actions[[0, 3]])
    assert lost[0].error is None and "died" in lost[1].error
    idle = pool.step_chunk([4], actions[[4]])[0]
    assert "died" in idle.error, "the other slot of the lost worker has no episode either"


def test_an_engine_that_is_lost_in_a_sync_is_replaced_and_the_others_get_all_weights(cluster, observation):
    """The engine that survives has started the sync: it abandons it, and acts again once it has all weights."""
    autoregressive = {"policy.path": "builtin:tiny-openvla", "distributed.backend": "ray"}
    config = load_config("tabletop_grpo", {**SMALL, **autoregressive, "distributed.timeout_s": 30.0})
    reader = load_acting_policy(config, None, torch.device("meta"))
    learner = cluster.worker("learner 0", partial(Rank, config, 1, False, 0), NO_RESOURCES)
    trouble = cluster.logs / "trouble"
    builds = [partial(Faulty, config, trouble), partial(build_torch_engine, config, False)]
    workers = [cluster.worker(f"engine {i}", build, NO_RESOURCES) for i, build in enumerate(builds)]
    wait_started([learner, *workers])
    group, engines = LearnerGroup([learner], config, reader), EngineGroup(workers)
    group.join(None)
    group.send_weights(engines)
    inputs, seeds = reader.process([observation(i) for i in range(4)]), [1, 2, 3, 4]
    before = engines.generate(inputs, Sampling(1.0), seeds)
    alone = TorchEngine(load_acting_policy(config, None, torch.device("cpu")), torch.device("cpu"))
    torch.testing.assert_close(before.sample.ids, alone.generate(inputs, Sampling(1.0), seeds).sample.ids)

    dead = workers[1].location.pid
    os.kill(dead, signal.SIGKILL)
    wait_for(lambda: not os.path.exists(f"/proc/{dead}"), 20)
    group.send_weights(engines)
    assert workers[1].location.pid != dead
    after = engines.generate(inputs, Sampling(1.0), seeds)
    torch.testing.assert_close(after.sample.ids, before.sample.ids)
    for found in (before, after):
        check_logprobs(found.engine_logprobs, alone.policy, inputs, found.sample.ids, 1.0)

    failing = workers[0].location.pid
    trouble.touch()
    group.send_weights(engines)
    assert workers[0].location.pid != failing, "one that fails in a sync is replaced as well"
    assert "no memory for this bucket" in learner.log_file.read_text()
    torch.testing.assert_close(engines.generate(inputs, Sampling(1.0), seeds).sample.ids, before.sample.ids)

    config = load_config("tabletop_grpo", {**SMALL, **autoregressive, "distributed.asynchronous": True})
    cost = LearnerGroup([learner], config, reader).send_weights(engines)  # staged
    torch.testing.assert_close(engines.generate(inputs, Sampling(1.0), seeds).sample.ids, before.sample.ids)
    assert cost.num_bytes == sum(
        p.nbytes for p in load_trained_policy(config, None, CPU).parameters() if p.requires_grad
    )
    assert 0 < cost.commit_seconds < cost.seconds and cost.num_resent == 0


class TrainedRank(Rank):
    """Takes optimizer steps without a batch of episodes."""

    def train(self, inputs, tokens, rate):
        return movement.train(self.learner.policy, inputs, tokens, rate)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_an_early_update_of_adapters_reaches_a_bfloat16_engine(cluster, engine):
    """At least 0.95, within three standard errors, of what four optimizer steps move the log-probs by in float32; a small
    part of it would be left if the adapters were folded into bfloat16 weights, or added to outputs that are rounded
    already. Of larger updates, where rounding matters little, at least 0.97 without allowance."""
    options = {"policy.path": movement.MODEL, "policy.dtype": "bfloat16", "lora.enabled": True}
    options |= {"lora.rank": movement.LORA["rank"], "distributed.backend": "ray", "distributed.timeout_s": 60.0}
    if engine == "vllm":
        options |= {"vllm.num_engines": 1, "vllm.enforce_eager": True}
    config = load_config("tabletop_ppo_openvla", {**SMALL, **options})
    build = partial(build_vllm_engine, sleeps=False) if engine == "vllm" else partial(build_torch_engine, on_gpu=False)
    learner = cluster.worker("learner 0", partial(TrainedRank, config, 1, False, 0), NO_RESOURCES)
    worker = cluster.worker("engine 0", partial(build, config), NO_RESOURCES)
    wait_started([learner, worker])
    group = LearnerGroup([learner], config, load_acting_policy(config, None, torch.device("meta")))
    engines = EngineGroup([worker])
    group.join(None)

    def update(rate, inputs, tokens):
        adapters = group.call_all("train", inputs, tokens, rate)
        cost = group.send_weights(engines)
        assert all(".lora_" in name for name in adapters)
        assert cost.num_bytes == sum(4 * tensor.numel() for tensor in adapters.values()), "adapters, and nothing else"
        return adapters

    group.send_weights(engines)
    found = {
        rate: movement.fraction_moved(engines.generate, partial(update, rate), updates)
        for rate, updates in movement.UPDATES.items()
    }
    print("\n".join(f"lr {rate:g}: {fraction:.3f} ± {error:.3f}" for rate, (fraction, error) in found.items()))
    (early, error), (large, small_error) = found[movement.EARLY], found[movement.LARGE]
    assert error < 0.1, "enough updates to tell"
    assert early + 3 * error >= 0.95
    assert small_error < 0.015 and 0.97 <= large <= 1.03
