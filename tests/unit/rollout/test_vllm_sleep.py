"""A vLLM engine that sleeps during updates: the order of its calls, what it keeps, and that it does not act asleep."""

import pytest
import torch
from fakes.sleeping_llm import FakeLLM
from fakes.syncing import all_weights, messages, only, sync

from vlarl.config.schema import LoraConfig, ModelConfig, VllmConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.load import load_policy
from vlarl.rollout.engines.sleep import Sleep
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.engines.vllm import VllmEngine
from vlarl.weights.stream import is_adapter_weight, weights_to_send

BUILTIN = "builtin:tiny-openvla"
LOADED = ["start", "load", "finish"]


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN)


def engine_of(policy, sleep: bool | None = True) -> tuple[VllmEngine, FakeLLM]:
    llm = FakeLLM(set(policy.engine_weights()))
    return VllmEngine(policy, VllmConfig(sleep=sleep), torch.float32, start=lambda *arguments: llm), llm


def test_memory_is_released_in_an_update_and_the_cache_comes_back_after_the_weights(policy):
    engine, llm = engine_of(policy)
    sync(engine, all_weights(policy), 1)
    assert llm.calls == [*LOADED, "reset"]
    llm.calls.clear()
    engine.sleep()
    assert llm.asleep == {"weights", "kv_cache"}
    engine.sleep()  # annotate and update both call it
    assert llm.calls == ["sleep 2"]
    sync(engine, all_weights(policy), 2)
    assert llm.calls == ["sleep 2", "wake weights", *LOADED, "wake kv_cache", "reset"]
    engine.check_usable()
    assert engine.version == 2 and not llm.asleep and not llm.garbage


def test_an_engine_that_sleeps_does_not_act(policy):
    engine, llm = engine_of(policy)
    sync(engine, all_weights(policy), 1)
    engine.sleep()
    with pytest.raises(VlarlError, match=r"the engine can't act: it is asleep. A weight sync wakes it"):
        engine.generate(None, Sampling(1.0), [1])
    stream = all_weights(policy)
    engine.start_sync(dict(stream.shapes), 2)
    with pytest.raises(VlarlError, match="it is loading"):
        engine.generate(None, Sampling(1.0), [1])
    with pytest.raises(VlarlError, match="can't sleep: the sync to version 2 has not ended"):
        engine.sleep()


def test_weights_that_no_sync_brings_are_kept(policy):
    """Before the first sync nothing is known of what syncs bring; a sync of a part brings that part again."""
    engine, llm = engine_of(policy)
    engine.sleep()
    assert llm.calls == ["sleep 1"]
    part = only(all_weights(policy), [name for name in policy.engine_weights() if "layers.1." in name])
    sync(engine, part, 1)
    llm.calls.clear()
    engine.sleep()
    assert llm.calls == ["sleep 1"]
    sync(engine, part, 2)
    engine.check_usable()
    assert not llm.garbage


def test_with_adapters_the_base_is_kept():
    adapted = load_policy(BUILTIN, device="meta")
    adapted.adapt(ModelConfig(), LoraConfig(enabled=True), seed=0)
    engine, llm = engine_of(adapted)
    learner = load_policy(BUILTIN)
    learner.adapt(ModelConfig(), LoraConfig(enabled=True), seed=0)
    stream = weights_to_send(learner)
    assert all(map(is_adapter_weight, stream.shapes))
    sync(engine, stream, 1)
    llm.calls.clear()
    engine.sleep()
    sync(engine, stream, 2)
    assert llm.calls == ["sleep 1", "wake weights", "load adapters", "wake kv_cache", "reset"]
    engine.check_usable()


def test_full_training_sends_all_that_an_engine_forgets(policy):
    trained = load_policy(BUILTIN)
    trained.prepare_training(ModelConfig(), LoraConfig(), 0)
    sent = weights_to_send(trained)
    unread = policy.unused_weights()
    assert sent.shapes.keys() | unread == policy.engine_weights().keys() and not sent.shapes.keys() & unread
    engine, llm = engine_of(policy)
    sync(engine, sent, 1)
    engine.sleep()
    assert llm.calls[-1] == "sleep 2"
    sync(engine, sent, 2)
    assert llm.garbage == unread


def test_no_pass_reads_what_is_called_unused(policy, observation):
    damaged = load_policy(BUILTIN)
    with torch.no_grad():
        for name in damaged.unused_weights():
            damaged.engine_weights()[name].fill_(torch.nan)
    inputs = policy.process([observation(0), observation(1)])
    cpu = torch.device("cpu")
    ours, theirs = (TorchEngine(p, cpu).generate(inputs, Sampling(1.6), [3, 4]) for p in (damaged, policy))
    assert len(damaged.unused_weights()) > 10
    assert torch.equal(ours.engine_logprobs, theirs.engine_logprobs)


def test_weights_that_were_forgotten_must_all_come_back(policy):
    engine, llm = engine_of(policy)
    whole = all_weights(policy)
    sync(engine, whole, 1)
    engine.sleep()
    part = only(whole, [name for name in whole.shapes if "layers.1." in name])
    with pytest.raises(UsageError, match="is missing, and the engine can't act without it"):
        engine.start_sync(dict(part.shapes), 2)
    assert llm.asleep == {"weights", "kv_cache"}, "a sync that is refused changes nothing"


def test_a_sync_that_fails_leaves_an_engine_that_can_be_synced_or_sleep(policy):
    engine, llm = engine_of(policy)
    whole = all_weights(policy)
    sync(engine, whole, 1)
    engine.sleep()
    engine.start_sync(dict(whole.shapes), 2)
    engine.update_weights(messages(whole)[0])
    engine.abandon_sync()
    with pytest.raises(VlarlError, match="can't act"):
        engine.check_usable()
    llm.calls.clear()
    sync(engine, whole, 2)
    assert llm.calls == [*LOADED, "wake kv_cache", "reset"], "the weights' memory is there already"
    engine.check_usable()
    assert not llm.garbage
    engine.sleep()
    engine.start_sync(dict(whole.shapes), 3)
    engine.abandon_sync()
    engine.sleep()
    assert llm.asleep == {"weights", "kv_cache"}


def test_an_engine_that_was_started_without_sleep_refuses(policy):
    engine, llm = engine_of(policy, sleep=None)
    with pytest.raises(VlarlError, match=r"started without vllm.sleep"):
        engine.sleep()
    assert llm.calls == []


def test_an_engine_that_vllm_does_not_wake_is_an_error():
    llm = FakeLLM(set())
    sleep = Sleep(llm, enabled=True)
    sleep.fall_asleep(1)
    with pytest.raises(VlarlError, match="before the weights"):
        sleep.wake_cache()
    sleep.wake_weights()
    llm.asleep.add("other")
    with pytest.raises(VlarlError, match="still sleeps"):
        sleep.wake_cache()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_there_is_no_sleep_on_a_cpu(policy):
    with pytest.raises(UsageError, match=r"vllm.sleep = true: vLLM releases the memory of GPUs only"):
        VllmEngine(policy, VllmConfig(sleep=True), torch.float32)
