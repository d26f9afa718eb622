"""Calls of workers, without processes of their own: deadlines, versions, and syncs that fail halfway.

The actors are in this process, and their results are in Ray's object store at once; a call that never returns is a task
that no machine has the resources for.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from fakes.cluster_runs import SMALL

from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling, TrainBatch
from vlarl.distributed.actor import Host, Worker, get_all
from vlarl.distributed.engines import EngineCalls, EngineGroup
from vlarl.distributed.environments import PoolGroup
from vlarl.distributed.learners import LearnerGroup, transport_of
from vlarl.distributed.learners import Rank as LearnerRank
from vlarl.envs.base import started
from vlarl.errors import ClusterError, UsageError, VlarlError, WorkerFailedError, WorkerLostError
from vlarl.observability.trace import NoTrace
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.replica import ReplicaEngine
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.annotate import Annotations
from vlarl.training.ranks import SingleRank
from vlarl.types import Observation, Task
from vlarl.weights import sender as sender_module
from vlarl.weights.buckets import bucket_names
from vlarl.weights.sender import EngineLostError, WeightSender
from vlarl.weights.stream import weights_to_send

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60, func_only=True)


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    yield ray
    ray.shutdown()


@ray.remote(num_cpus=1000)
def never():
    """No machine has the resources for it."""


@ray.remote(num_cpus=1000)
def never_any():
    """Nor for this one, which is expected to yield several results."""
    yield


class Called:
    def __init__(self, part, options=None):
        self.part, self.streamed = part, options is not None

    def options(self, **options):
        return Called(self.part, options)

    def remote(self, method, *arguments):
        host = Host()
        host.part = self.part
        given = [ray.get(a) if isinstance(a, ray.ObjectRef) else a for a in arguments]
        if getattr(self.part, "hangs", None) == method:
            return never_any.options(num_returns="streaming").remote() if self.streamed else never.remote()
        return ray.put(host.call(method, *given))


class Here:
    """An actor in this process."""

    def __init__(self, part):
        self.part, self.call, self.stream = part, Called(part), Called(part)


class HereWorker(Worker):
    """A worker whose actor is in this process."""

    def start(self):
        self.actor = Here(self.build())

    def stop(self):
        self.actor = None


def worker(name, build, timeout_s=60.0) -> Worker:
    made = HereWorker(name, lambda: None, build, Path("no.log"), timeout_s, 60.0, NoTrace(), lambda: None)
    made.start()
    return made


# Deadlines


class Part:
    def __init__(self, hangs=None):
        self.hangs = hangs

    def double(self, value):
        return 2 * value

    def refuse(self):
        raise UsageError("not like this")

    def fail(self):
        raise ArithmeticError("the joints exploded")


def test_results_come_in_the_order_of_the_requests():
    workers = [worker(f"worker {i}", Part) for i in range(3)]
    assert get_all([w.call("double", i) for i, w in enumerate(workers)]) == [0, 2, 4]


def test_a_worker_that_hangs_is_lost_when_its_time_is_up_and_the_others_are_not():
    hung = worker("worker 1", lambda: Part("double"), timeout_s=0.3)
    fine = worker("worker 0", Part)
    with pytest.raises(WorkerLostError, match="worker 1 has not replied to `double` in time: it hangs") as lost:
        get_all([fine.call("double", 3), hung.call("double", 3)])
    assert lost.value.worker == "worker 1" and not isinstance(lost.value, WorkerFailedError)
    assert fine.get(fine.call("double", 4)) == 8


def test_what_a_worker_raises_is_raised_here():
    with pytest.raises(UsageError, match="not like this"):
        get_all([worker("worker 0", Part).call("refuse")])
    with pytest.raises(WorkerFailedError, match=r"worker 0 failed in `fail`:\n(.|\n)*the joints exploded"):
        get_all([worker("worker 0", Part).call("fail")])


class Slot(Part):
    """A pool of one slot."""

    def spec(self):
        from fakes.worker_envs import SPEC

        return SPEC

    def reset(self, slots, tasks, record):
        seen = Observation(torch.zeros(1, 4, 6, 3, dtype=torch.uint8).numpy(), torch.zeros(3).numpy(), "count")
        return [started(seen)]


@pytest.mark.parametrize("lockstep", [True, False])
def test_an_environment_that_hangs_is_replaced_and_its_episode_is_an_error(lockstep):
    parts = iter([Slot("reset"), Slot()])
    hung = worker("environments 0", lambda: next(parts), timeout_s=0.3)
    pool = PoolGroup([hung, worker("environments 1", Slot)], [1, 1], lockstep=lockstep)
    pool.send_reset([0, 1], [Task("counting", 0, 0, 0)] * 2)
    outcomes = dict(pool.receive())
    if not lockstep:
        assert set(outcomes) == {1}, "receive does not wait for the one that hangs"
        outcomes |= dict(pool.receive())
    assert outcomes[1].error is None and "has not replied to `reset` in time" in outcomes[0].error
    pool.send_reset([0], [Task("counting", 0, 0, 0)])
    assert pool.receive()[0][1].error is None


def test_learners_that_make_no_step_are_given_up():
    config = load_config("tabletop_grpo", SMALL)
    group = LearnerGroup([worker("learner 0", lambda: Part("updating"), timeout_s=0.3)], config, None)
    with pytest.raises(WorkerLostError, match=r"learner 0 has made no optimizer step for 0.3 s: it hangs"):
        group.update(_batch(), 1, lambda done, total: None)


def _batch():
    """A batch that never reaches the learner."""
    inputs = OpenVLAInputs(*(torch.zeros(1, 1) for _ in range(2)), torch.zeros(1, 1, 3, 2, 2), None)
    decisions = token_decisions(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), action_dim=1)
    return TrainBatch(inputs, decisions, trajectory=torch.zeros(1, dtype=torch.int64))


class Annotating:
    """A learner, or a rank of one, that records the inputs it trains on."""

    def __init__(self):
        self.trained_on = []

    def annotate(self, batch, iteration, last):
        return Annotations(logprobs=batch.decisions.engine_logprobs)

    def update(self, batch, iteration, on_step, iterations):
        self.trained_on.append(batch.inputs)


def test_inputs_that_the_ranks_have_kept_are_not_sent_again():
    group = LearnerGroup([worker("learner 0", Annotating)], load_config("tabletop_grpo", SMALL), None)
    batch = _batch()
    annotated = group.annotate(batch, 1).onto(batch, group.config)
    assert annotated.old_logprobs is not None
    assert len(group._without_inputs(annotated).inputs) == 0
    assert group._without_inputs(annotated).inputs is batch.inputs, "the ranks keep them for one update"
    group.annotate(batch, 2)
    assert len(group._without_inputs(_batch()).inputs) == 1, "another batch than they have kept"


def test_a_rank_trains_on_the_inputs_that_it_annotated():
    rank = LearnerRank(load_config("tabletop_grpo", SMALL), 1, False, 0)
    rank.learner, batch, other = Annotating(), _batch(), _batch()
    rank.annotate(batch, 1, None)
    rank.update(replace(batch, inputs=batch.inputs.rows(slice(0, 0))), 1, None)
    rank.annotate(batch, 2, None)
    rank.update(other, 2, None)
    assert [id(inputs) for inputs in rank.learner.trained_on] == [id(batch.inputs), id(other.inputs)]


# Versions


class Sampler:
    """An engine that returns the first pixel value and the seed, and the version of its weights."""

    def __init__(self, version, hangs=None):
        self.version, self.hangs = version, hangs

    def generate(self, inputs, sampling, seeds):
        ids = torch.stack([inputs.pixels[:, 0, 0, 0, 0].long(), torch.tensor(seeds)], 1)
        logprobs = torch.full(ids.shape, -sampling.temperature)
        return token_decisions(ids, logprobs, action_dim=2).of_version(self.version)


def rows(count) -> OpenVLAInputs:
    pixels = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1, 1)
    return OpenVLAInputs(torch.zeros(count, 2, dtype=torch.int64), torch.ones(count, 2, dtype=torch.bool), pixels, None)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_are_split_and_joined_in_their_order(count):
    engines = EngineGroup([worker(f"engine {i}", lambda: Sampler(0)) for i in range(2)])
    tokens = engines.generate(rows(count), Sampling(1.6), [10 + i for i in range(count)])
    assert tokens.sample.ids.tolist() == [[i, 10 + i] for i in range(count)]
    assert tokens.version.tolist() == [0] * count
    assert (tokens.engine_logprobs == -1.6).all()


def test_rows_that_another_version_sampled_are_refused():
    engines = EngineGroup([worker("engine 0", lambda: Sampler(4)), worker("engine 1", lambda: Sampler(3))])
    engines.version = 4
    assert engines.generate(rows(1), Sampling(1.0), [1]).version.tolist() == [4]  # the first engine alone
    with pytest.raises(VlarlError, match="engine 1 sampled with weights of version 3, not 4"):
        engines.generate(rows(2), Sampling(1.0), [1, 2])


def test_an_engine_that_hangs_is_replaced_refreshed_and_called_again():
    parts = iter([Sampler(4, "generate"), Sampler(0)])
    hung = worker("engine 0", lambda: next(parts), timeout_s=0.3)
    engines = EngineGroup([hung])
    engines.version = 4
    refreshed = []

    def refresh():
        refreshed.append(hung.actor.part)
        hung.actor.part.version = 4

    engines.refresh = refresh
    assert engines.generate(rows(2), Sampling(1.0), [7, 8]).sample.ids.tolist() == [[0, 7], [1, 8]]
    assert len(refreshed) == 1 and refreshed[0].hangs is None


def test_an_engine_that_hangs_again_and_again_ends_the_run():
    started_parts = []

    def build():
        started_parts.append(Sampler(0, "generate"))
        return started_parts[-1]

    engines = EngineGroup([worker("engine 0", build, timeout_s=0.1)])
    engines.refresh = lambda: None
    with pytest.raises(WorkerLostError, match="engine 0 has not replied to `generate`"):
        engines.generate(rows(1), Sampling(1.0), [1])
    assert len(started_parts) == 3


# Syncs


class Engine(ReplicaEngine):
    """Fails in a sync as a test wants it to, and records what it received."""

    def __init__(self, trouble=None):
        super().__init__(init_tiny("parallel", seed=2), CPU)
        self.trouble, self.hangs = trouble, "update_weights" if trouble == "hang" else None
        self.names, self.sizes, self.checksums = [], [], []

    def update_weights(self, update_info):
        self.names.append(bucket_names(update_info["payload"]))
        self.sizes.append(len(update_info["payload"]))
        self.checksums.append(update_info["checksum"])
        if self.trouble == "raise" and len(self.names) == 2:
            raise MemoryError("no memory for this bucket")
        if self.trouble == "damage" and len(self.names) == 2:
            payload = update_info["payload"]
            update_info = update_info | {"payload": payload[:-1] + bytes([payload[-1] ^ 1])}
        super().update_weights(update_info)

    def finish_sync(self, version):
        super().finish_sync(version + 1 if self.trouble == "version" else version)


@pytest.fixture(scope="module")
def learner():
    return init_tiny("parallel", seed=1)


@pytest.fixture
def inputs(learner, observation):
    return learner.process([observation(0), observation(1)])


def sync_config(**options):
    return load_config("tabletop_grpo", {**SMALL, "distributed.backend": "ray", **options})


def calls(*engines, timeout_s=60.0) -> EngineCalls:
    return EngineCalls([f"engine {i}" for i in range(len(engines))], [Here(e) for e in engines], timeout_s)


@pytest.mark.parametrize("checksum", [True, False])
def test_buckets_are_bounded_and_bring_everything_to_every_engine(learner, inputs, checksum):
    config = sync_config(**{"distributed.sync_bucket_mb": 1, "distributed.sync_checksum": checksum})
    engines = [Engine(), Engine()]
    assert WeightSender(learner, SingleRank(), transport_of(config)).send(calls(*engines), 3) is None
    num_bytes = {name: 4 * tensor.numel() for name, tensor in weights_to_send(learner)}
    expected = TorchEngine(learner, CPU).generate(inputs, Sampling(1.0), [1, 2])
    for engine in engines:
        assert len(engine.names) > 3
        assert all(len(names) == 1 or sum(num_bytes[name] for name in names) <= 10**6 for names in engine.names)
        assert any(len(names) == 1 and size > 10**6 for names, size in zip(engine.names, engine.sizes, strict=True))
        assert all((found is not None) == checksum for found in engine.checksums)
        assert engine.version == 3
        assert torch.equal(engine.generate(inputs, Sampling(1.0), [1, 2]).engine_logprobs, expected.engine_logprobs)


@pytest.mark.parametrize("trouble", ["raise", "damage", "hang", "version"])
def test_a_sync_that_fails_halfway_names_the_engine_and_none_acts_with_mixed_weights(learner, inputs, trouble):
    options = {"distributed.sync_bucket_mb": 1, "distributed.sync_checksum": True}
    sender = WeightSender(learner, SingleRank(), transport_of(sync_config(**options)))
    bad, good = Engine(trouble), Engine()
    assert sender.send(calls(good, bad, timeout_s=1.0), 3) == "engine 1"
    partial = {"hang": [good], "version": [bad]}.get(trouble, [good, bad])  # the last one: good has all weights by then
    for engine in partial:
        with pytest.raises(VlarlError, match="the engine can't act"):
            engine.generate(inputs, Sampling(1.0), [1, 2])
        assert engine.version == 0
    replaced = Engine()
    assert sender.send(calls(good, replaced), 4) is None
    expected = TorchEngine(learner, CPU).generate(inputs, Sampling(1.0), [1, 2])
    for engine in (good, replaced):
        acted = engine.generate(inputs, Sampling(1.0), [1, 2])
        assert acted.version.tolist() == [4, 4] and torch.equal(acted.engine_logprobs, expected.engine_logprobs)


def test_every_sync_sends_what_training_moves_and_nothing_else():
    """A replaced engine has read the rest from the same checkpoint."""
    policy = init_tiny("parallel", seed=1)
    moved = {name for name, p in policy.named_parameters() if "layers.1." in name}
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name in moved)
    sender = WeightSender(policy, SingleRank(), transport_of(sync_config(**{"distributed.sync_bucket_mb": 1})))
    engine = Engine()

    def sent(engine):
        engine.names.clear()
        lost = sender.send(calls(engine), 1)
        return lost, set().union(*engine.names)

    trained = {name.removeprefix("model.") for name in moved}
    assert sent(engine) == (None, trained)
    assert sent(Engine("raise"))[0] == "engine 0"
    assert sent(engine) == (None, trained)


class Second(SingleRank):
    """The second of two ranks, which gathers with the first and sends nothing."""

    rank = 1

    def any(self, flag):
        return flag


@pytest.fixture
def gathered(monkeypatch):
    """Names of the tensors that a sender has gathered, in their order."""
    made: list[str] = []

    def recorded(policy, dtype):
        stream = weights_to_send(policy, dtype)
        return replace(stream, make=lambda name: made.append(name) or stream.make(name))

    monkeypatch.setattr(sender_module, "weights_to_send", recorded)
    return made


def test_all_ranks_gather_the_same_tensors_in_the_same_order(learner, gathered):
    transport = transport_of(sync_config(**{"distributed.sync_bucket_mb": 1}))
    made = []
    for ranks in (SingleRank(), Second()):
        engine = Engine()
        assert WeightSender(learner, ranks, transport).send(calls(engine), 1) is None
        assert bool(engine.names) == (ranks.rank == 0), "rank 0 sends, and it alone"
        made.append([*gathered])
        gathered.clear()
    assert made[0] == made[1] and len(made[0]) > 20


def test_ranks_gather_all_tensors_even_when_an_engine_is_lost(learner, gathered):
    """The other ranks wait for this one in every gather."""
    transport = transport_of(sync_config(**{"distributed.sync_bucket_mb": 1}))
    assert WeightSender(learner, SingleRank(), transport).send(calls(Engine("raise")), 1) == "engine 0"
    assert gathered == list(weights_to_send(learner).shapes)


def test_adapters_are_not_sent_between_gpus(learner):
    class Adapted:
        has_adapter = True

    transport = replace(transport_of(sync_config()), backend="nccl")
    with pytest.raises(UsageError, match="vllm.sync_backend = 'nccl': the policy is an adapter"):
        WeightSender(Adapted(), SingleRank(), transport)


def test_shapes_that_do_not_fit_end_the_run_and_no_engine_is_replaced_for_it():
    other = init_tiny("parallel", seed=1)
    other.model.projector.fc9 = torch.nn.Linear(2, 2)
    sender = WeightSender(other, SingleRank(), transport_of(sync_config()))
    with pytest.raises(UsageError, match="the weight sync is refused and nothing was changed"):
        sender.send(calls(Engine()), 1)


def test_an_engine_that_does_not_reply_is_named():
    with pytest.raises(EngineLostError, match="engine 1 did not reply in a sync") as lost:
        calls(Part(), Part("double"), timeout_s=0.3).call("double", 2)
    assert lost.value.engine == "engine 1"


class Rank:
    """A learner's rank that can't bring an engine to its weights."""

    def __init__(self, results):
        self.results, self.num_calls = results, 0

    def send_weights(self, engines):
        self.num_calls += 1
        return self.results.pop(0)


def test_engines_lost_in_a_sync_are_replaced_and_the_version_is_what_the_ranks_sent():
    config = sync_config()
    rank = Rank([(5, "engine 0"), (5, None)])
    group = LearnerGroup([worker("learner 0", lambda: rank)], config, None)
    built = []
    engines = EngineGroup([worker("engine 0", lambda: built.append(1) or Sampler(5))])
    group.send_weights(engines)
    assert engines.version == 5 and len(built) == 2 and rank.num_calls == 2
    assert engines.generate(rows(1), Sampling(1.0), [1]).version.tolist() == [5]


def test_an_engine_that_is_lost_in_every_sync_ends_the_run():
    rank = Rank([(5, "engine 0")] * 9)
    group = LearnerGroup([worker("learner 0", lambda: rank)], sync_config(), None)
    engines = EngineGroup([worker("engine 0", lambda: Sampler(0))])
    with pytest.raises(ClusterError, match="engine 0 could not be brought to the learners' weights, 3 times over"):
        group.send_weights(engines)
    assert rank.num_calls == 3 and engines.version == 0
