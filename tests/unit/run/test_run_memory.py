"""The memory of a run's GPU: its limit, what is planned of a configuration, and what is refused."""

import logging
from contextlib import closing

import pytest
import torch
from fakes.small_gpu import SmallGpu

import vlarl.run.local
from vlarl.config import load_config
from vlarl.errors import UsageError
from vlarl.loop import collect
from vlarl.policies.openvla.memory import Sizes
from vlarl.policies.tiny import init_tiny
from vlarl.run import memory
from vlarl.run.memory import card_bytes, fit_to_device, limit_memory, planned
from vlarl.run.memory_plan import GIB
from vlarl.run.open import open_run

GPU = torch.device("cuda:0")
MIB = 2**20
ADAPTED = {"lora.enabled": True, "policy.path": "builtin:tiny-oft", "env.num_envs": 64}


@pytest.fixture
def card(monkeypatch):
    """A GPU of 80 GiB, of which 60 are free and 2 are this process's; it notes the limits that are set."""
    limits: list[float] = []

    def limit(part, device):
        assert device is None or isinstance(device, int), "PyTorch refuses a device without an index here"
        limits.append(part)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    return limits


def test_a_card_of_24_gb_has_23_gib_for_tensors(card):
    assert card_bytes(24) == 23 * GIB
    for device in (GPU, torch.device("cuda")):
        assert limit_memory(24, device) == 21 * GIB, "a reward model has two of them"
    assert card == [23 / 80] * 2, "what is refused is refused to all of the process"


def test_without_a_size_the_free_memory_is_planned_with_and_nothing_is_refused(card):
    assert limit_memory(None, GPU) == 60 * GIB - GIB // 2
    assert card == []


def test_other_programs_on_a_card_count(card):
    assert limit_memory(70, GPU) == 60 * GIB


def test_more_than_the_card_has_is_refused(card):
    with pytest.raises(UsageError, match=r"run\.memory_gb = 96: cuda:0 has 80\.0 GiB; leave it out"):
        limit_memory(96, GPU)
    assert card == []


def test_a_card_that_reports_less_than_it_is_sold_with_is_one_of_that_size(card):
    assert limit_memory(84, GPU) == 60 * GIB
    assert card == [79.5 / 80], "such as an A10, which has 22.1 GiB: half a GiB is the context's"


def test_on_a_cpu_nothing_changes(caplog):
    config = load_config("tabletop_grpo", {"run.memory_gb": 24, "run.device": "auto"} | ADAPTED)
    assert fit_to_device(config, torch.device("cpu")) == (config, None)
    assert caplog.messages == ["run.memory_gb = 24: has no effect, because this run is on a CPU"]
    caplog.clear()
    plain = load_config("tabletop_grpo", ADAPTED)
    assert fit_to_device(plain, torch.device("cpu")) == (plain, None) and not caplog.messages


def weights_of(config):
    return Sizes(init_tiny("parallel").config, 1, 32).weights(config.policy.dtype, None)


def test_sizes_that_are_left_open_are_planned_and_logged(monkeypatch, caplog):
    config = load_config("tabletop_grpo", ADAPTED)
    assert planned(config, 400 * MIB).kept > weights_of(config)
    monkeypatch.setattr(memory, "limit_memory", lambda size, device: 340 * MIB)
    with caplog.at_level(logging.INFO, logger="vlarl"):
        fitted, plan = fit_to_device(config, GPU)
    assert plan.fits and fitted.optim.microbatch_size == plan.microbatch_size < 128
    assert fitted.policy.gradient_checkpointing is plan.gradient_checkpointing is True
    assert fitted.rollout.batch_size == plan.batch_size and fitted.rollout.num_groups == config.rollout.num_groups
    assert caplog.messages == plan.lines() and caplog.messages[0].startswith("memory for tensors: 340 MiB; weights")
    assert (config.optim.microbatch_size, config.policy.gradient_checkpointing) == (None, None), "as it is saved"


def test_given_sizes_are_used_though_they_may_not_fit(monkeypatch, caplog):
    config = load_config("tabletop_grpo", ADAPTED | {"optim.microbatch_size": 128, "rollout.batch_size": 64})
    monkeypatch.setattr(memory, "limit_memory", lambda size, device: 320 * MIB)
    fitted, _ = fit_to_device(config, GPU)
    assert fitted.optim.microbatch_size == 128
    (warning,) = caplog.messages
    assert (
        warning.startswith("by estimate this run needs 0.")
        and "cuda:0 has 0.3 GiB: leave optim.microbatch_size out" in warning
    )
    assert "or set policy.quantize 4 for a base in 4 bits (extra quant; presets *_16gb), which would" in warning


def test_a_model_that_can_not_fit_is_refused_before_it_is_loaded(monkeypatch):
    config = load_config("tabletop_grpo", ADAPTED)
    monkeypatch.setattr(memory, "limit_memory", lambda size, device: 200 * MIB)
    with pytest.raises(
        UsageError, match=r"this run needs 0\.3 GiB .* has 0\.2 GiB: set policy\.quantize 4.*or use a larger"
    ):
        fit_to_device(config, GPU)


def test_copies_of_what_is_trained_count():
    def kept(given):
        return planned(load_config("tabletop_ppo", ADAPTED | given), GIB).kept

    ema, apart = kept({"ema.beta": 0.9}) - kept({}), kept({"critic.kind": "separate"}) - kept({})
    trained = Sizes(init_tiny("parallel").config, 1, 32).adapter_weights(32)
    assert ema == 4 * trained
    assert apart == (4 + 4 + 8) * trained, "adapters, gradients, optimizer"


def test_what_is_not_estimated_has_no_plan(tmp_path):
    assert planned(load_config("tabletop_grpo", {"policy.path": "builtin:tiny-oft"}), GIB) is None, "no adapters"
    (tmp_path / "config.json").write_text("{}")
    assert planned(load_config("tabletop_grpo", ADAPTED | {"policy.path": str(tmp_path)}), GIB) is None, "unreadable"
    assert planned(load_config("tabletop_grpo", ADAPTED | {"policy.path": "init:tiny-openvla"}), GIB).fits


@pytest.mark.parametrize(
    ("given", "recorded"), [({}, "kept"), ({"rollout.cuda_graphs": False, "optim.cuda_graphs": False}, "none")]
)
def test_recordings_are_planned_where_there_are_some(given, recorded):
    assert planned(load_config("tabletop_grpo", ADAPTED | given), 20 * GIB).recorded == recorded


def test_recordings_of_texts_end_with_their_batch():
    config = load_config("prompts_grpo", {"lora.enabled": True})
    assert planned(config, 20 * GIB).recorded == "none"


def test_a_run_here_uses_the_planned_sizes(tmp_path, monkeypatch):
    """With the plan of a small GPU on the CPU: learner, policy and engine have its sizes, and recordings make way."""
    given = {"run.device": "cpu", "policy.dtype": "float32", "env.task_ids": [0]}
    config = load_config("tabletop_grpo", ADAPTED | given)

    def small(config, device):
        plan = planned(config, 320 * MIB)
        return memory.fitted(config, plan), plan

    monkeypatch.setattr(vlarl.run.local, "fit_to_device", small)
    plan = planned(config, 320 * MIB)
    parts = vlarl.run.local.launch_here(config)
    try:
        assert parts.learner.microbatches.optim.microbatch_size == plan.microbatch_size < 128
        assert plan.gradient_checkpointing and all(layer.recompute for layer in parts.policy.model.recomputable)
        assert parts.engine.batch_size == plan.batch_size
        assert plan.recorded == "released" and parts.make_way() is False, "there are none on a CPU"
        assert parts.pass_counts() == parts.engine.counts
    finally:
        parts.close()


def test_passes_without_memory_are_counted_in_the_rollouts_row(tmp_path):
    given = {
        "policy.path": "init:tiny-oft",
        "run.root": str(tmp_path),
        "run.name": "quick",
        "run.device": "cpu",
        "env.task_ids": [0],
        "env.num_envs": 2,
        "rollout.num_groups": 1,
        "optim.minibatches": 1,
        "rollout.group_size": 2,
        "env.max_steps": 4,
        "logging.tensorboard": False,
    }
    parts, session = open_run(load_config("tabletop_grpo", given), None)
    with closing(parts), session:
        SmallGpu(parts.policy, 1, "sample")
        metrics = [collect(parts, session, number, session.stopwatch()).metrics for number in (1, 2)]
    assert metrics[0]["rollout/oom_retries"] == 1 and "time/recording" not in metrics[0]
    assert "rollout/oom_retries" not in metrics[1], "passes stay smaller"
