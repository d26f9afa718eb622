"""Weights that learners send to a torch engine: complete, undamaged and of the announced version, or not used."""

import pytest
import torch
from fakes.syncing import all_weights, messages, only, sync

from vlarl.decisions import Sampling
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.replica import ReplicaEngine
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.weights.buckets import DamagedBucketError, bucket_message
from vlarl.weights.receiver import WeightReceiver

CPU = torch.device("cpu")
HALT = "the engine can't act"


@pytest.fixture(scope="module")
def learner() -> OpenVLAPolicy:
    return init_tiny("parallel", seed=1)


@pytest.fixture
def engine() -> ReplicaEngine:
    return ReplicaEngine(init_tiny("parallel", seed=2), CPU)


@pytest.fixture
def inputs(learner, observation):
    return learner.process([observation(0), observation(1)])


def damaged(message: dict) -> dict:
    payload = message["payload"]
    return message | {"payload": payload[:-1] + bytes([payload[-1] ^ 1])}


def assert_acts_as(engine: ReplicaEngine, learner: OpenVLAPolicy, inputs, version: int) -> None:
    ours, theirs = (
        engine.generate(inputs, Sampling(1.0), [3, 4]),
        TorchEngine(learner, CPU).generate(inputs, Sampling(1.0), [3, 4]),
    )
    assert ours.version.tolist() == [version, version]
    assert torch.equal(ours.sample.ids, theirs.sample.ids) and torch.equal(ours.engine_logprobs, theirs.engine_logprobs)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_sync_brings_the_learners_weights_to_the_bit(engine, learner, inputs, checksum):
    before = engine.generate(inputs, Sampling(1.0), [3, 4])
    stream = all_weights(learner)
    engine.start_sync(dict(stream.shapes), 5)
    for message in messages(stream, 2 << 20, checksum):
        assert (message["checksum"] is not None) == checksum
        engine.update_weights(message)
    engine.finish_sync(5)
    assert engine.version == 5
    assert_acts_as(engine, learner, inputs, 5)
    assert before.version.tolist() == [0, 0] and not torch.equal(
        before.engine_logprobs, engine.generate(inputs, Sampling(1.0), [3, 4]).engine_logprobs
    )


def test_a_message_has_the_checksum_of_its_bytes_if_configured():
    assert bucket_message(b"123456789", True) == {"payload": b"123456789", "checksum": 0xCBF43926}  # CRC-32's own check
    assert bucket_message(b"123456789", False)["checksum"] is None


def test_a_damaged_bucket_is_refused_and_can_be_sent_again(engine, learner, inputs):
    stream = all_weights(learner)
    first, second, *others = messages(stream)
    engine.start_sync(dict(stream.shapes), 6)
    engine.update_weights(first)
    with pytest.raises(DamagedBucketError, match=r"a bucket of \d+ bytes arrived damaged"):
        engine.update_weights(damaged(second))
    with pytest.raises(VlarlError, match=HALT):
        engine.generate(inputs, Sampling(1.0), [3, 4])
    with pytest.raises(VlarlError, match="version 6 is incomplete"):
        engine.finish_sync(6)
    assert engine.version == 0
    for message in (second, *others):
        engine.update_weights(message)
    engine.finish_sync(6)
    assert_acts_as(engine, learner, inputs, 6)


def test_a_sync_that_fails_is_repaired_by_one_that_brings_all_of_it(engine, learner, inputs):
    stream = all_weights(learner)
    first, *_ = messages(stream)
    engine.start_sync(dict(stream.shapes), 6)
    engine.update_weights(first)
    with pytest.raises(VlarlError, match="was not announced"):
        engine.update_weights(first)  # a second time
    with pytest.raises(VlarlError, match="version 6 was not started"):
        engine.finish_sync(6)
    part = only(stream, [name for name in stream.shapes if "projector" in name])
    with pytest.raises(UsageError, match=r"is missing, and the engine can't act without it"):
        engine.start_sync(dict(part.shapes), 7)
    with pytest.raises(VlarlError, match=HALT):
        engine.generate(inputs, Sampling(1.0), [3, 4])
    sync(engine, stream, 7)
    assert_acts_as(engine, learner, inputs, 7)


def test_nothing_of_a_damaged_bucket_is_loaded(engine, learner):
    stream = all_weights(learner)
    before = {name: p.detach().clone() for name, p in engine.policy.named_parameters()}
    engine.start_sync(dict(stream.shapes), 6)
    with pytest.raises(VlarlError, match="arrived damaged"):
        engine.update_weights(damaged(messages(stream)[0]))
    assert all(torch.equal(before[name], p) for name, p in engine.policy.named_parameters())


def test_an_abandoned_sync_leaves_an_engine_that_refuses_to_act(engine, learner, inputs):
    stream = all_weights(learner)
    sent = messages(stream)
    engine.start_sync(dict(stream.shapes), 3)
    with pytest.raises(VlarlError, match=HALT):  # nothing has arrived, but the sync may be writing
        engine.generate(inputs, Sampling(1.0), [3, 4])
    engine.update_weights(sent[0])
    engine.abandon_sync()
    with pytest.raises(VlarlError, match=HALT):
        engine.generate(inputs, Sampling(1.0), [3, 4])
    sync(engine, stream, 4)
    assert_acts_as(engine, learner, inputs, 4)
    engine.abandon_sync()  # no sync is in progress: nothing is lost
    assert_acts_as(engine, learner, inputs, 4)


def test_a_sync_without_one_of_its_buckets_can_not_be_finished(engine, learner, inputs):
    stream = all_weights(learner)
    sent = messages(stream)
    engine.start_sync(dict(stream.shapes), 3)
    for message in sent[:-1]:
        engine.update_weights(message)
    with pytest.raises(VlarlError, match=r"version 3 is incomplete: \d+ weights have not arrived, such as "):
        engine.finish_sync(3)
    assert engine.version == 0
    with pytest.raises(VlarlError, match=HALT):
        engine.generate(inputs, Sampling(1.0), [3, 4])
    engine.update_weights(sent[-1])  # it arrives later
    engine.finish_sync(3)
    assert_acts_as(engine, learner, inputs, 3)


def test_weights_outside_a_sync_or_not_announced_are_refused(engine, learner, inputs):
    stream = all_weights(learner)
    sent = messages(stream)
    before = engine.generate(inputs, Sampling(1.0), [3, 4])
    with pytest.raises(VlarlError, match="no sync is in progress"):
        engine.update_weights(sent[0])
    after = engine.generate(inputs, Sampling(1.0), [3, 4])
    assert torch.equal(before.engine_logprobs, after.engine_logprobs) and after.version.tolist() == [0, 0]
    layers = only(stream, [name for name in stream.shapes if ".layers.1." in name])
    engine.start_sync(dict(layers.shapes), 1)
    with pytest.raises(VlarlError, match="was not announced"):
        engine.update_weights(sent[0])


def test_a_version_has_to_be_the_one_that_was_started(engine, learner, inputs):
    stream = all_weights(learner)
    engine.start_sync(dict(stream.shapes), 8)
    with pytest.raises(VlarlError, match="version 9 can't be loaded: the sync to version 8 has not ended"):
        engine.start_sync(dict(stream.shapes), 9)
    for message in messages(stream):
        engine.update_weights(message)
    with pytest.raises(VlarlError, match="version 7 was not started: the sync in progress is to version 8"):
        engine.finish_sync(7)
    with pytest.raises(VlarlError, match=HALT):
        engine.generate(inputs, Sampling(1.0), [3, 4])
    engine.finish_sync(8)
    assert_acts_as(engine, learner, inputs, 8)


def test_part_of_the_layers_may_be_sent(engine, learner, inputs):
    stream = all_weights(learner)
    names = [name for name in stream.shapes if ".layers.1." in name]
    part = only(stream, names)
    mixed = init_tiny("parallel", seed=2)
    with torch.no_grad():
        for name, tensor in part:
            mixed.get_parameter(f"model.{name}").copy_(tensor)
    sync(engine, part, 2)
    assert_acts_as(engine, mixed, inputs, 2)


# Staged syncs


def started(engine, learner, version=6):
    """A staged sync to the learner's weights that has brought all buckets but the last; and that one."""
    stream = all_weights(learner)
    *first, last = messages(stream)
    engine.start_sync(dict(stream.shapes), version, staged=True)
    for message in first:
        engine.update_weights(message)
    return last


def test_an_engine_acts_with_its_old_weights_until_a_staged_sync_is_finished(engine, learner, inputs):
    old = init_tiny("parallel", seed=2)
    stream = all_weights(learner)
    engine.start_sync(dict(stream.shapes), 5, staged=True)
    for message in messages(stream, 2 << 20):
        assert_acts_as(engine, old, inputs, 0)
        engine.update_weights(message)
    assert_acts_as(engine, old, inputs, 0)
    engine.finish_sync(5)
    assert_acts_as(engine, learner, inputs, 5)


@pytest.mark.parametrize("cause", ["abandoned", "refused"])
def test_a_staged_sync_that_is_not_finished_changes_nothing(engine, learner, inputs, cause):
    old, stream = init_tiny("parallel", seed=2), all_weights(learner)
    last = started(engine, learner)
    if cause == "abandoned":
        engine.abandon_sync()
    else:
        with pytest.raises(VlarlError, match="was not announced"):
            engine.update_weights(messages(stream)[0])  # a second time
    assert_acts_as(engine, old, inputs, 0)
    with pytest.raises(VlarlError, match="no sync is in progress"):
        engine.update_weights(last)
    part = only(stream, [name for name in stream.shapes if "projector" in name])
    engine.start_sync(dict(part.shapes), 7)  # nothing was left halfway that this one would have to bring
    engine.abandon_sync()
    sync(engine, stream, 8)
    assert_acts_as(engine, learner, inputs, 8)


def test_a_bucket_of_a_staged_sync_that_arrives_damaged_is_sent_again(engine, learner, inputs):
    last = started(engine, learner)
    with pytest.raises(DamagedBucketError, match="arrived damaged"):
        engine.update_weights(damaged(last))
    with pytest.raises(VlarlError, match="version 6 is incomplete"):
        engine.finish_sync(6)
    assert_acts_as(engine, init_tiny("parallel", seed=2), inputs, 0)
    engine.update_weights(last)
    engine.finish_sync(6)
    assert_acts_as(engine, learner, inputs, 6)


class Failing(ReplicaEngine):
    """Can't load its second bucket."""

    num_loaded = 0

    def load(self, message):
        self.num_loaded += 1
        if self.num_loaded == 2:
            raise MemoryError("no memory for this bucket")
        return super().load(message)


def test_a_staged_sync_that_fails_while_it_is_loaded_leaves_the_engine_halfway(learner, inputs):
    engine = Failing(init_tiny("parallel", seed=2), CPU)
    engine.update_weights(started(engine, learner))
    with pytest.raises(MemoryError):
        engine.finish_sync(6)
    with pytest.raises(VlarlError, match="the sync to version 6 failed halfway"):
        engine.generate(inputs, Sampling(1.0), [3, 4])
    last = started(engine, learner, 7)
    with pytest.raises(VlarlError, match="the sync to version 6 failed halfway"):
        engine.generate(inputs, Sampling(1.0), [3, 4])  # a staged sync has changed nothing yet
    engine.update_weights(last)
    engine.finish_sync(7)
    assert_acts_as(engine, learner, inputs, 7)


class OnlyBase(ReplicaEngine):
    """Has only its base, as an engine with adapters when it starts."""

    def __init__(self):
        super().__init__(init_tiny("parallel", seed=2), CPU)
        WeightReceiver.__init__(self, self.shapes, missing=set(self.shapes))


@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_that_has_only_its_base_acts_after_its_first_sync(learner, inputs, staged):
    engine, stream = OnlyBase(), all_weights(learner)

    def refuses():
        with pytest.raises(VlarlError, match=HALT):
            engine.generate(inputs, Sampling(1.0), [3, 4])

    refuses()
    engine.start_sync(dict(stream.shapes), 1, staged)
    for message in messages(stream):
        refuses()
        engine.update_weights(message)
    refuses()
    engine.abandon_sync()
    refuses()
    engine.start_sync(dict(stream.shapes), 2, staged)
    for message in messages(stream):
        engine.update_weights(message)
    engine.finish_sync(2)
    assert_acts_as(engine, learner, inputs, 2)
