"""The values derived from a configuration, against ones computed by hand."""

from datetime import datetime

import pytest

from vlarl.config import Derived, FinetuneConfig, derive, load_config
from vlarl.config.derive import (
    default_run_name,
    derive_finetune,
    derived_lines,
    engine_memory_fraction,
    staged_syncs,
)

OVERRIDES = {
    "run.iterations": 10,
    "rollout": {"num_groups": 6, "group_size": 4},
    "algorithm.epochs": 3,
    "optim.minibatches": 8,
    "env": {"suite": "tabletop_long", "task_ids": [0, 2, 5]},
    "eval": {"interval": 4, "states_per_task": 7},
    "policy.path": "builtin:tiny-oft",
}


def test_derived_values_of_a_training_run():
    assert derive(load_config(overrides=OVERRIDES)) == Derived(
        world_size=1,
        num_engines=None,
        num_env_workers=None,
        num_tasks=3,
        episodes_per_iteration=24,
        episodes_per_iteration_and_env_worker=None,
        decisions_per_iteration_max=24 * 16,  # 64 steps in chunks of 4
        iterations_per_update=1,
        episodes_per_update=24,
        episodes_per_minibatch=3,
        episodes_per_minibatch_and_rank=None,
        decisions_per_microbatch_max=128,
        tokens_per_microbatch_max=None,
        optimizer_steps_per_update=24,
        total_iterations=10,
        total_env_steps_max=10 * 24 * 64,
        total_updates=10,
        total_optimizer_steps=240,
        total_episodes=240,
        num_evaluations=4,  # start, 4, 8, end
        episodes_per_evaluation=21,
        clip_low=0.2,
        clip_high=0.28,
        kl_estimator=None,
    )


@pytest.mark.parametrize(
    ("minibatches", "gathered", "per_minibatch", "per_update", "updates", "steps"),
    [
        (8, 1, 3, 24, 10, 8 * 10),  # a train batch smaller than the rollout's: several steps a rollout
        (1, 1, 24, 24, 10, 10),  # equal
        (1, 5, 120, 120, 2, 2),  # larger: one step for several rollouts
        (2, 4, 48, 96, 3, 2 * 3),  # 4 + 4 + 2: the last two rollouts are not left over
    ],
)
def test_a_train_batch_may_be_smaller_than_equal_to_or_larger_than_a_rollout(
    minibatches, gathered, per_minibatch, per_update, updates, steps
):
    optim = {"minibatches": minibatches, "rollouts_per_update": gathered, "microbatch_size": 16}
    derived = derive(load_config(overrides=OVERRIDES | {"optim": optim, "algorithm.epochs": 1}))
    assert derived.episodes_per_iteration == 24 and derived.total_episodes == 240
    assert (derived.episodes_per_minibatch, derived.episodes_per_update) == (per_minibatch, per_update)
    assert (derived.total_updates, derived.total_optimizer_steps) == (updates, steps)
    assert "decisions_per_microbatch_max: 16" in derived_lines(derived)


@pytest.mark.parametrize(("interval", "evaluations"), [(0, 2), (5, 3), (10, 2), (1, 11)])
def test_evaluations_at_start_interval_and_end(interval, evaluations):
    assert derive(load_config(overrides=OVERRIDES | {"eval.interval": interval})).num_evaluations == evaluations


def test_a_chunk_that_does_not_divide_the_episode_counts_its_last_part():
    config = load_config(overrides=OVERRIDES | {"policy.chunk_length": 7})
    assert derive(config).decisions_per_iteration_max == 24 * 10


def test_a_text_is_one_decision():
    overrides = {"env.suite": "prompts_shapes", "rollout.num_groups": 6, "rollout.group_size": 4}
    for path in ("builtin:tiny-qwen2.5-vl", "my/checkpoint"):
        assert derive(load_config(overrides=overrides | {"policy.path": path})).decisions_per_iteration_max == 24


def test_what_only_the_checkpoint_knows_is_left_out():
    derived = derive(load_config(overrides=OVERRIDES | {"policy.path": "my/checkpoint"}))
    assert derived.decisions_per_iteration_max is None
    assert not any("decisions_per_iteration" in line for line in derived_lines(derived))
    assert "total_episodes: 240" in derived_lines(derived)


CLUSTER = {"backend": "ray", "address": "auto", "learners_per_node": [3, 2], "num_env_workers": 5}


def test_a_cluster_shares_minibatches_between_ranks_and_episodes_between_environment_workers():
    derived = derive(load_config(overrides=OVERRIDES | {"distributed": CLUSTER}))
    assert (derived.world_size, derived.num_engines, derived.num_env_workers) == (5, 1, 5)
    assert derived.episodes_per_iteration_and_env_worker == 24 / 5
    assert derived.episodes_per_minibatch_and_rank == 3 / 5
    alone = derive(load_config(overrides=OVERRIDES))
    assert derived.total_optimizer_steps == alone.total_optimizer_steps  # ranks share work, and add none
    lines = derived_lines(derived)
    assert "episodes_per_iteration_and_env_worker: 4.8" in lines and "episodes_per_minibatch_and_rank: 0.6" in lines
    assert len(lines) == len(derived_lines(alone)) + 4


def test_engines_are_those_of_vllm_or_of_torch():
    policy = {"policy.path": "builtin:tiny-openvla"}
    torch = load_config(overrides=OVERRIDES | policy | {"distributed": CLUSTER | {"torch_num_engines": 3}})
    vllm = load_config(overrides=OVERRIDES | policy | {"distributed": CLUSTER, "vllm.num_engines": 2})
    assert (derive(torch).num_engines, derive(vllm).num_engines) == (3, 2)


def test_a_vllm_engine_fills_its_fraction_of_the_gpu_and_no_more():
    cluster = OVERRIDES | {"policy.path": "builtin:tiny-openvla", "distributed": CLUSTER, "vllm.num_engines": 1}
    shared = {"distributed.colocate": True, "distributed.learner_gpus": 0.6, "distributed.engine_gpus": 0.4}
    alone, beside = load_config(overrides=cluster), load_config(overrides=cluster | shared)
    assert engine_memory_fraction(alone) == pytest.approx(0.9) and engine_memory_fraction(beside) == pytest.approx(0.36)
    configured = load_config(overrides=cluster | shared | {"vllm.gpu_memory_utilization": 0.25})
    assert engine_memory_fraction(configured) == 0.25


def test_a_simulator_is_a_worker_of_its_own():
    cluster = {name: value for name, value in CLUSTER.items() if name != "num_env_workers"}
    libero = OVERRIDES | {"env": {"suite": "libero_10", "num_envs": 12}, "distributed": cluster}
    derived = derive(load_config(overrides=libero))
    assert (derived.num_env_workers, derived.episodes_per_iteration_and_env_worker) == (12, 2)
    libero["env"] = {"suite": "libero_10", "num_envs": None}  # one for each core, which only the machine knows
    assert not any("env_worker" in line for line in derived_lines(derive(load_config(overrides=libero))))


def test_derived_values_of_a_supervised_run():
    overrides = {"demos": {"suites": ["tabletop_goal"], "episodes_per_task": 5}}
    derived = derive_finetune(
        load_config("tabletop_base", overrides | {"optim": {"steps": 700, "batch_size": 3}}, schema=FinetuneConfig)
    )
    assert derived.num_demonstrations == 50
    assert derived.total_samples == 2100


def test_a_run_without_a_name_gets_preset_seed_and_time():
    assert default_run_name("tabletop_ppo", 3, datetime(2025, 1, 2, 3, 4, 5)) == "tabletop_ppo_seed3_20250102_030405"


@pytest.mark.parametrize(
    ("preset", "options", "expected"),
    [
        ("tabletop_grpo", {}, False),
        ("tabletop_grpo", {"distributed.asynchronous": True}, True),
        ("tabletop_grpo", {"distributed.asynchronous": True, "lora.enabled": True}, True),
        ("prompts_grpo", {"distributed.asynchronous": True}, False),
        ("prompts_grpo", {"distributed.asynchronous": True, "lora.enabled": True}, True),
        ("prompts_grpo", {"lora.enabled": True}, False),
    ],
)
def test_syncs_are_staged_where_engines_may_act_with_older_weights(preset, options, expected):
    config = load_config(preset, {"distributed.backend": "ray", **options})
    assert staged_syncs(config) == expected
    by_gpu = config.model_copy(update={"vllm": config.vllm.model_copy(update={"sync_backend": "nccl"})})
    assert not staged_syncs(by_gpu), "what is loaded as it is sent"
