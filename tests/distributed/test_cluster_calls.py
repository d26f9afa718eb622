"""Calls of workers, without processes of their own: deadlines, versions, syncs that fail halfway, and syncs while
engines act. The actors are in this process (fakes/actors.py).
"""

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray
import torch
from fakes.actors import Called, Here, HereWorker, never, worker
from fakes.cluster_runs import SMALL
from fakes.sleeping_llm import FakeLLM

from vlarl.config.schema import VllmConfig
from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling, TrainBatch
from vlarl.distributed import actor, learners, rank_group
from vlarl.distributed.actor import Result, Worker, get_all
from vlarl.distributed.engines import EngineCalls, EngineGroup
from vlarl.distributed.environments import PoolGroup
from vlarl.distributed.learners import SYNC_LIMITS, LearnerGroup, Sent, transport_of
from vlarl.envs.base import started
from vlarl.errors import ClusterError, UsageError, VlarlError, WorkerFailedError, WorkerLostError
from vlarl.observability.trace import NoTrace
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.replica import ReplicaEngine
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.engines.vllm import VllmEngine
from vlarl.training.ranks import SingleRank
from vlarl.types import Observation, Task
from vlarl.weights import sender as sender_module
from vlarl.weights.buckets import bucket_names
from vlarl.weights.sender import EngineLostError, WeightSender
from vlarl.weights.stream import weights_to_send

CPU = torch.device("cpu")
pytestmark = [pytest.mark.timeout(60, func_only=True), pytest.mark.usefixtures("ray_here")]


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


class SlowToStart:
    """Builds slots; all but the first of each wait until two of them are being built at the same time."""

    def __init__(self):
        self.together, self.may_go_on = threading.Barrier(2), threading.Event()

    def parts(self, hangs):
        yield Slot(hangs)
        self.together.wait(20)
        assert self.may_go_on.wait(20)
        while True:
            yield Slot()


def test_lost_environments_are_replaced_side_by_side_while_the_others_are_served():
    slow = SlowToStart()
    parts = [slow.parts("reset") for _ in range(2)]
    lost = [worker(f"environments {i}", partial(next, parts[i]), timeout_s=0.3) for i in range(2)]
    pool = PoolGroup([*lost, worker("environments 2", Slot)], [1, 1, 1], lockstep=False)
    task = Task("counting", 0, 0, 0)
    pool.send_reset([0, 1, 2], [task] * 3)
    outcomes = {}
    while len(outcomes) < 3:
        outcomes |= dict(pool.receive())
    assert [outcomes[slot].error is None for slot in range(3)] == [False, False, True]
    pool.send_reset([0, 1], [task] * 2)  # retried: they wait for the replacements, which can't start yet
    for _ in range(5):
        pool.send_reset([2], [task])
        assert [slot for slot, outcome in pool.receive() if outcome.error is None] == [2]
    slow.may_go_on.set()
    outcomes = {}
    while len(outcomes) < 2:
        outcomes |= dict(pool.receive())
    assert [outcomes[slot].error for slot in (0, 1)] == [None, None]
    with pytest.raises(RuntimeError, match="nothing was sent"):
        pool.receive()


def test_an_environment_that_can_not_start_again_ends_the_run():
    def parts():
        yield Slot("reset")
        raise UsageError("the assets are gone: fetch them")

    pool = PoolGroup([worker("environments 0", partial(next, parts()), timeout_s=0.3)], [1], lockstep=False)
    pool.send_reset([0], [Task("counting", 0, 0, 0)])
    assert pool.receive()[0][1].error is not None
    pool.send_reset([0], [Task("counting", 0, 0, 0)])
    with pytest.raises(UsageError, match="the assets are gone"):
        pool.receive()


class Dying(HereWorker):
    """A worker whose first replacements die while they start: their machine is gone, and Ray does not know it yet."""

    num_deaths = 2

    def wait_started(self):
        if self.num_deaths:
            self.num_deaths -= 1
            raise self.lost("died")


def test_a_replacement_that_dies_while_it_starts_is_started_again(monkeypatch):
    monkeypatch.setattr(actor, "PAUSES_S", (0.0,) * 3)
    dying = Dying("environments 0", lambda: None, Part, Path("no.log"), 60.0, 60.0, NoTrace(), lambda: None, "")
    dying.replace()
    assert dying.get(dying.call("double", 3)) == 6
    dying.num_deaths = 4
    with pytest.raises(WorkerLostError, match="environments 0 died"):
        dying.replace()


def test_a_worker_is_not_started_again_when_the_run_has_ended():
    ended = Worker(
        "environments 0",
        lambda: pytest.fail("it is started"),
        Part,
        Path("no.log"),
        60.0,
        60.0,
        NoTrace(),
        lambda: None,
        "",
    )
    ended.end()
    with pytest.raises(WorkerLostError, match="was ended with the run"):
        ended.replace()


def test_engines_that_died_together_are_replaced_side_by_side():
    together, built = threading.Barrier(2), []

    def build(index):
        built.append(index)
        if built.count(index) > 1:
            together.wait(20)
        part = Sampler(0)
        part.is_gone = index < 2 and built.count(index) == 1
        return part

    engines = EngineGroup([worker(f"engine {i}", partial(build, i)) for i in range(3)])
    engines.restart("engine 0")
    assert sorted(built) == [0, 0, 1, 1, 2], "the third is alive"


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
        if (self.trouble == "damage" and len(self.names) == 2) or (self.trouble == "wreck" and len(self.names) > 1):
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


@pytest.mark.parametrize("trouble", ["raise", "wreck", "hang", "version"])
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


def test_a_damaged_bucket_is_sent_again_to_the_engine_where_it_was_damaged(learner, inputs):
    options = {"distributed.sync_bucket_mb": 1, "distributed.sync_checksum": True}
    sender = WeightSender(learner, SingleRank(), transport_of(sync_config(**options)))
    damaged, fine = Engine("damage"), Engine()
    sent = calls(fine, damaged)
    assert sender.send(sent, 3) is None
    assert sent.num_resent == 1
    assert len(damaged.names) == len(fine.names) + 1 and damaged.names[1] == damaged.names[2] == fine.names[1]
    expected = TorchEngine(learner, CPU).generate(inputs, Sampling(1.0), [1, 2])
    for engine in (fine, damaged):
        acted = engine.generate(inputs, Sampling(1.0), [1, 2])
        assert acted.version.tolist() == [3, 3] and torch.equal(acted.engine_logprobs, expected.engine_logprobs)


def test_an_engine_where_a_bucket_is_damaged_every_time_is_lost(learner):
    options = {"distributed.sync_bucket_mb": 1, "distributed.sync_checksum": True}
    sender = WeightSender(learner, SingleRank(), transport_of(sync_config(**options)))
    wrecked, fine = Engine("wreck"), Engine()
    sent = calls(wrecked, fine)
    assert sender.send(sent, 3) == "engine 0"
    assert sent.num_resent == 2 and len(wrecked.names) == 1 + 3, "the first bucket, and three times the second"


def test_buckets_that_were_sent_again_are_counted(caplog):
    rank = Rank([Sent(5, None, 9, 2), Sent(6, None, 9, 0), Sent(7, None, 9, 1)])
    group = LearnerGroup([worker("learner 0", lambda: rank)], sync_config(), None)
    engines = EngineGroup([worker("engine 0", lambda: Sampler(5))])
    for _ in range(3):
        group.send_weights(engines)
    assert group.num_resent_buckets == 3
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "2 buckets of weights arrived damaged and were sent again, 2 in this session",
        "1 buckets of weights arrived damaged and were sent again, 3 in this session",
    ]


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

    def send_weights(self, engines, staged):
        assert not staged
        self.num_calls += 1
        return self.results.pop(0)


def test_engines_lost_in_a_sync_are_replaced_and_the_version_is_what_the_ranks_sent():
    config = sync_config()
    rank = Rank([Sent(5, "engine 0", 9, 0), Sent(5, None, 9, 0)])
    group = LearnerGroup([worker("learner 0", lambda: rank)], config, None)
    built = []
    engines = EngineGroup([worker("engine 0", lambda: built.append(1) or Sampler(5))])
    group.send_weights(engines)
    assert engines.version == 5 and len(built) == 2 and rank.num_calls == 2
    assert engines.generate(rows(1), Sampling(1.0), [1]).version.tolist() == [5]


def test_an_engine_that_is_lost_in_every_sync_ends_the_run():
    rank = Rank([Sent(5, "engine 0", 9, 0)] * 9)
    group = LearnerGroup([worker("learner 0", lambda: rank)], sync_config(), None)
    engines = EngineGroup([worker("engine 0", lambda: Sampler(0))])
    with pytest.raises(ClusterError, match="engine 0 could not be brought to the learners' weights, 3 times over"):
        group.send_weights(engines)
    assert rank.num_calls == 3 and engines.version == 0


# Syncs while engines act


class SendingRank:
    """Rank 0: sends a policy's weights, and stops after the first bucket if a test wants it to."""

    def __init__(self, policy, config):
        self.sender = WeightSender(policy, SingleRank(), transport_of(config))
        self.halfway, self.released, self.sent = threading.Event(), threading.Event(), threading.Event()

    def send_weights(self, engines, staged):
        send_bucket = engines.update_weights_later

        def send_and_stop(message):
            send_bucket(message)
            self.halfway.set()
            assert self.released.wait(30)

        engines.update_weights_later = send_and_stop
        lost = self.sender.send(engines, 1, staged)
        self.sent.set()
        return Sent(1, lost, self.sender.num_bytes, engines.num_resent)


class Acting(ReplicaEngine):
    """Fails once in each method that is named, and is held in a generation if a test wants it to."""

    def __init__(self, troubles):
        super().__init__(init_tiny("parallel", seed=2), CPU)
        self.troubles, self.deciding, self.may_decide = troubles, threading.Event(), threading.Event()
        self.may_decide.set()

    def fail(self, method):
        if method in self.troubles:
            self.troubles.remove(method)
            raise MemoryError(f"no memory in {method}")

    def start_sync(self, *arguments):
        self.fail("start_sync")
        super().start_sync(*arguments)

    def update_weights(self, message):
        self.fail("update_weights")
        super().update_weights(message)

    def finish_sync(self, version):
        self.fail("finish_sync")
        super().finish_sync(version)

    def generate(self, *arguments):
        self.fail("generate")
        self.deciding.set()
        assert self.may_decide.wait(30)
        return super().generate(*arguments)


class Running:
    """Learners and two engines, of which the first has troubles; as in a run, without processes."""

    def __init__(self, learner, inputs, asynchronous, troubles=()):
        options = {"distributed.asynchronous": asynchronous, "distributed.sync_bucket_mb": 1}
        config = sync_config(**options)
        self.rank, self.inputs = SendingRank(learner, config), inputs
        self.group = LearnerGroup([worker("learner 0", lambda: self.rank)], config, None)
        self.troubles, self.built = list(troubles), []
        self.engines = EngineGroup([worker(f"engine {i}", partial(self.build, i)) for i in range(2)])
        self.engines.refresh = partial(self.group.refresh, self.engines)

    def build(self, index):
        self.built.append(index)
        return Acting(self.troubles if index == 0 else [])

    @property
    def parts(self):
        return [worker.actor.part for worker in self.engines.workers]

    def generate(self):
        return self.engines.generate(self.inputs, Sampling(1.0), [1, 2])

    def send(self):
        return self.group.send_weights(self.engines)

    def assert_all_act_with(self, learner):
        expected = TorchEngine(learner, CPU).generate(self.inputs, Sampling(1.0), [1, 2])
        assert self.engines.version == 1
        for part in self.parts:
            acted = part.generate(self.inputs, Sampling(1.0), [1, 2])
            assert acted.version.tolist() == [1, 1] and torch.equal(acted.engine_logprobs, expected.engine_logprobs)


def in_thread(work) -> Future:
    """The result of work in another thread, which ends with the tests however it goes."""
    future: Future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def num_trained(policy) -> int:
    return sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)


def is_waiting(future, seconds=0.4) -> bool:
    return not wait([future], timeout=seconds).done


@pytest.mark.parametrize("asynchronous", [True, False])
def test_engines_decide_during_a_send_only_in_an_asynchronous_run(learner, inputs, asynchronous):
    run = Running(learner, inputs, asynchronous)
    began, sending = time.monotonic(), in_thread(run.send)
    assert run.rank.halfway.wait(30)
    held = time.monotonic()
    deciding = in_thread(run.generate)
    if asynchronous:
        assert deciding.result(30).version.tolist() == [0, 0], "with the old weights, between two buckets"
        assert [part.version for part in run.parts] == [0, 0]
    else:
        assert is_waiting(deciding)
    held_s = time.monotonic() - held
    run.rank.released.set()
    cost = sending.result(30)
    run.assert_all_act_with(learner)
    decided = run.generate() if asynchronous else deciding.result(30)
    assert decided.version.tolist() == [1, 1]
    assert held_s <= cost.seconds <= time.monotonic() - began
    assert cost.commit_seconds <= cost.seconds - held_s if asynchronous else cost.commit_seconds >= held_s


@pytest.mark.parametrize("phase", ["start_sync", "update_weights", "finish_sync"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_all_engines_have_the_new_weights_whenever_one_is_lost_in_a_sync(learner, inputs, asynchronous, phase):
    run = Running(learner, inputs, asynchronous, [phase])
    run.rank.released.set()
    cost = run.send()
    assert sorted(run.built) == [0, 0, 1], "the first is replaced, once"
    run.assert_all_act_with(learner)
    assert run.generate().version.tolist() == [1, 1]
    whole = num_trained(learner) * 4
    if phase == "start_sync":
        assert cost.num_bytes == whole
    elif phase == "finish_sync":
        assert cost.num_bytes == 2 * whole, "all was sent in vain"
    else:
        assert whole < cost.num_bytes < 2 * whole


@pytest.mark.parametrize("trouble", ["dies", "fails"])
def test_an_engine_that_is_lost_in_a_generation_during_a_send_is_replaced_once(learner, inputs, trouble):
    run = Running(learner, inputs, asynchronous=True)
    sending = in_thread(run.send)
    assert run.rank.halfway.wait(30)
    if trouble == "dies":
        run.parts[0].is_gone = True
    else:
        run.troubles.append("generate")
    deciding = in_thread(run.generate)
    assert is_waiting(deciding), "nobody replaces an engine in the middle of a sync"
    run.rank.released.set()
    sending.result(30)
    assert deciding.result(30).version.tolist() == [1, 1]
    assert sorted(run.built) == [0, 0, 1]
    run.assert_all_act_with(learner)


def test_engines_switch_to_new_weights_between_two_batches(learner, inputs):
    run = Running(learner, inputs, asynchronous=True)
    run.rank.released.set()
    run.parts[1].may_decide.clear()
    deciding = in_thread(run.generate)
    assert run.parts[1].deciding.wait(30), "the first engine has decided"
    sending = in_thread(run.send)
    assert run.rank.sent.wait(30), "buckets arrive"
    assert is_waiting(sending)
    assert [part.version for part in run.parts] == [0, 0]
    run.parts[1].may_decide.set()
    assert deciding.result(30).version.tolist() == [0, 0]
    sending.result(30)
    run.assert_all_act_with(learner)


def test_a_commit_ends_when_all_engines_have_replied():
    """The sync that follows must not reach one that is still loading."""
    replied = ray.remote(num_cpus=0)(lambda: time.sleep(1) or Result())
    references = []

    class Loading(Called):
        def remote(self, method, *arguments):
            references.append(replied.remote())
            return references[0]

    lost, loading = Here(Part()), Here(Part())
    lost.part.is_gone, loading.call = True, Loading(Part())
    with pytest.raises(EngineLostError, match="engine 0 did not reply in a sync"):
        EngineCalls(["engine 0", "engine 1"], [lost, loading], 60.0).commit(1)
    ready, _ = ray.wait(references, timeout=0)
    assert ready == references


def test_engines_that_hang_are_given_one_limit_together_to_abandon_a_sync():
    """One limit each would exceed that of the sync, and the learners would be taken for hanging."""
    references = []

    class Hanging(Called):
        def remote(self, method, *arguments):
            assert method == "abandon_sync"
            references.append(never.remote())
            return references[-1]

    actors = [Here(Part()) for _ in range(5)]
    for each in actors:
        each.call = Hanging(each.part)
    began = time.monotonic()
    EngineCalls([f"engine {i}" for i in range(5)], actors, 1.0).abandon("engine 3")
    waited = time.monotonic() - began
    for reference in references:
        ray.cancel(reference)
    assert waited < SYNC_LIMITS * 1.0 and len(references) == 4


def test_ranks_that_wait_for_a_sync_outlast_the_engines_that_rank_0_waits_for(monkeypatch):
    """Otherwise an engine that hangs ends the learners, instead of being replaced."""
    joined = []

    def join(*arguments):
        joined.append(arguments[-1].total_seconds())
        raise StopIteration

    monkeypatch.setattr(rank_group.ProcessGroup, "join", join)
    config = sync_config(**{"distributed.timeout_s": 7.0})
    with pytest.raises(StopIteration):
        learners.Rank(config, 2, False, 1).join("127.0.0.1", 1, None)
    assert joined == [SYNC_LIMITS * 7.0] and SYNC_LIMITS > 2, (
        "a limit for its call, and one for the others to abandon it"
    )


@pytest.mark.parametrize("count", [1, 3])
def test_a_bucket_is_put_into_the_object_store_once_for_all_engines(learner, count):
    """So that it travels to each machine once, whose engines read the same copy."""
    given = []

    class Noted(Called):
        def remote(self, method, *arguments):
            if method == "update_weights":
                given.append(arguments[0].hex())
            return super().remote(method, *arguments)

    engines = [Engine() for _ in range(count)]
    actors = [Here(engine) for engine in engines]
    for each in actors:
        each.call = Noted(each.part)
    sender = WeightSender(learner, SingleRank(), transport_of(sync_config(**{"distributed.sync_bucket_mb": 1})))
    assert sender.send(EngineCalls([f"engine {i}" for i in range(count)], actors, 60.0), 1) is None
    num_buckets = len(engines[0].names)
    assert num_buckets > 3 and len(given) == count * num_buckets and len(set(given)) == num_buckets


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_bytes_of_a_sync_are_those_of_the_weights(learner, dtype, bytes_each):
    transport = replace(transport_of(sync_config(**{"distributed.sync_bucket_mb": 1})), dtype=dtype)
    sender = WeightSender(learner, SingleRank(), transport)
    for _ in range(2):
        assert sender.send(calls(Engine(), Engine()), 1) is None
        assert sender.num_bytes == bytes_each * num_trained(learner)


# Engines that sleep during updates


class SleepingEngine(VllmEngine):
    """A vLLM engine without a model."""

    def __init__(self, policy, hangs=None):
        self.llm, self.hangs = FakeLLM(set(policy.engine_weights())), hangs
        super().__init__(policy, VllmConfig(sleep=True), torch.float32, start=lambda *arguments: self.llm)

    def generate(self, inputs, sampling, seeds):
        self.check_usable()
        return Sampler(self.version).generate(inputs, sampling, seeds)


class TrainingRank:
    """A rank with weights to send; it notes which part of the engines' memory is free when it computes."""

    def __init__(self, policy, engines):
        self.sender = WeightSender(policy, SingleRank(), transport_of(sync_config()))
        self.engines, self.version, self.released = engines, 0, []

    def annotate(self, batch, iteration, last):
        self.released.append([sorted(engine.llm.asleep) for engine in self.engines])
        self.version += 1

    def send_weights(self, calls, staged):
        lost = self.sender.send(calls, self.version, staged)
        return Sent(self.version, lost, self.sender.num_bytes, 0)


@pytest.fixture(scope="module")
def in_turns():
    """Decodes token by token, all of it trained."""
    return load_policy("builtin:tiny-openvla")


def sleeping_group(policy, parts):
    engines = EngineGroup([worker(f"engine {i}", part, timeout_s=0.5) for i, part in enumerate(parts)])
    rank = TrainingRank(policy, [])
    group = LearnerGroup([worker("learner 0", lambda: rank)], sync_config(), None)
    group.before_training = engines.sleep
    return group, engines, rank


def test_engines_sleep_while_the_ranks_compute_and_can_be_evaluated_right_after_the_sync(in_turns):
    made = [SleepingEngine(in_turns) for _ in range(2)]
    group, engines, rank = sleeping_group(in_turns, [lambda: made[0], lambda: made[1]])
    rank.engines = made
    group.send_weights(engines)
    for version in (1, 2):
        assert engines.generate(rows(2), Sampling(1.6), [1, 2]).version.tolist() == [version - 1] * 2  # a rollout
        group.annotate(_batch(), version)
        with pytest.raises(VlarlError, match="it is asleep"):
            engines.generate(rows(2), Sampling(1.6), [1, 2])
        group.send_weights(engines)
        assert engines.generate(rows(2), Sampling(0.0), [1, 2]).version.tolist() == [version] * 2  # an evaluation
    assert rank.released == [[["kv_cache", "weights"]] * 2] * 2
    assert made[0].llm.calls == made[1].llm.calls
    one_round = ["sleep 2", "wake weights", "start", "load", "finish", "wake kv_cache", "reset"]
    assert made[0].llm.calls == ["start", "load", "finish", "reset", *one_round, *one_round]


def test_an_update_waits_until_the_engines_sleep():
    class NotYetError(Exception):
        pass

    def refuse():
        raise NotYetError

    group = LearnerGroup([worker("learner 0", lambda: Part("updating"), timeout_s=0.3)], sync_config(), None)
    group.before_training = refuse
    with pytest.raises(NotYetError):
        group.update(_batch(), 1, lambda done, total: None)


def test_an_engine_that_hangs_when_it_should_sleep_is_replaced_by_one_that_does(in_turns):
    parts = iter([SleepingEngine(in_turns, "sleep"), replaced := SleepingEngine(in_turns)])
    group, engines, rank = sleeping_group(in_turns, [lambda: next(parts)])
    rank.engines = [replaced]
    group.annotate(_batch(), 1)
    assert rank.released == [[["kv_cache", "weights"]]] and replaced.llm.calls == ["sleep 1"]
    group.send_weights(engines)
    assert engines.generate(rows(1), Sampling(1.6), [1]).version.tolist() == [1]
