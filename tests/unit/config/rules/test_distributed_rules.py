"""What can't be distributed or share a GPU is refused with its remedy, and the fixed configuration is accepted."""

import pytest

from vlarl.config import ConfigError, load_config
from vlarl.config.known import BATCHED_ENVS
from vlarl.config.rules.across import check

RAY = {"distributed.backend": "ray"}
LEARNERS = RAY | {"distributed.learners_per_node": [4]}
SHARDED = LEARNERS | {"distributed.sharding": "full"}
VLLM = RAY | {"vllm.num_engines": 2}
SHARED = RAY | {"distributed.colocate": True, "distributed.learner_gpus": 0.5, "distributed.engine_gpus": 0.5}
FOLDER = {"policy.path": "some/folder"}
FULL = {"lora.enabled": False, "policy.dtype": "float32"}
REWARDER = RAY | {"reward.source": "model", "reward.model": "org/judge", "distributed.num_reward_workers": 1}
IN_PARALLEL = "policies that decode in parallel can't run in vLLM; use the torch engines: vllm.num_engines 0"
ALONE = "it needs distributed.backend ray; set that, or leave it out"
WHOLE_GPUS = (
    "an engine over several GPUs takes whole ones; set distributed.colocate to false and distributed.engine_gpus to 1, "
    "or vllm.tensor_parallel_size to 1"
)
UNREAD = "only vLLM engines read it, and there are none; set vllm.num_engines, or leave it out"
UNSHARDED = "it needs sharded weights; set distributed.sharding to full or hybrid, or leave it out"
PACKED = (
    "packed weights can't be sharded; set distributed.sharding to none, so that each learner has the whole base, or "
    "policy.quantize to null"
)
UNPACKED = (
    "vLLM would run the base in full precision, and its log-probs would not be the learner's; use the torch engines "
    "(vllm.num_engines 0), or set policy.quantize to null"
)
LORA_4_BIT = {"policy.quantize": 4, "lora.enabled": True}
OWN_CLASS = "vLLM's own class supports only the original OpenVLA-7B, with one image and no proprio; set vllm.model_class to vlarl"


# What is refused, what is said, and the change that makes it work.
CASES = [
    ({"vllm.num_engines": 1}, f"vllm.num_engines = 1: {ALONE}", RAY),
    ({"distributed.asynchronous": True}, f"distributed.asynchronous = true: {ALONE}", RAY),
    ({"distributed.sharding": "full"}, f"distributed.sharding = 'full': {ALONE}", RAY),
    ({"distributed.learners_per_node": [2]}, f"distributed.learners_per_node = [2]: {ALONE}", RAY),
    ({"distributed.num_reward_workers": 1}, f"distributed.num_reward_workers = 1: {ALONE}", RAY),
    ({"distributed.address": "auto"}, f"distributed.address = 'auto': {ALONE}", RAY),
    ({"distributed.torch_num_engines": 2}, f"distributed.torch_num_engines = 2: {ALONE}", RAY),
    (
        RAY | {"distributed.learners_per_node": []},
        "distributed.learners_per_node = []: names no learner; use 1, or a count for each machine",
        {"distributed.learners_per_node": [1]},
    ),
    (
        RAY | {"distributed.learners_per_node": [8, 8]},
        "distributed.learners_per_node = [8, 8] with distributed.address = null: a cluster that the run starts has this machine only; run `ray start` on every machine and set distributed.address to auto, or give one count",
        {"distributed.address": "auto"},
    ),
    (
        RAY | {"distributed.address": "10.0.0.1"},
        "distributed.address = '10.0.0.1': must be auto, or host:port of the cluster's head, such as 10.0.0.1:6379",
        {"distributed.address": "10.0.0.1:6379"},
    ),
    (
        RAY | {"distributed.address": "auto", "distributed.object_store_mb": 300},
        "distributed.object_store_mb = 300 with distributed.address = 'auto': a running cluster has its own object store; set distributed.object_store_mb to null, and start Ray with --object-store-memory",
        {"distributed.address": None},
    ),
    (
        SHARDED | {"policy.heads_device": "cpu", "policy.actions": "hybrid"},
        "policy.heads_device = 'cpu' with distributed.sharding = 'full': heads are sharded with the policy; set "
        "policy.heads_device to null, or distributed.sharding to none",
        {"distributed.sharding": "none"},
    ),
    (
        LEARNERS | {"distributed.cpu_offload": True},
        f"distributed.cpu_offload = true with distributed.sharding = 'none': {UNSHARDED}",
        {"distributed.sharding": "full"},
    ),
    (
        LEARNERS | {"distributed.compute_dtype": "bfloat16"},
        f"distributed.compute_dtype = 'bfloat16' with distributed.sharding = 'none': {UNSHARDED}",
        {"distributed.sharding": "full"},
    ),
    (
        LEARNERS | {"distributed.sharding": "hybrid"},
        "distributed.shard_group_size = null with distributed.sharding = 'hybrid': 4 learners "
        "(distributed.learners_per_node) make groups of 1 or 2 or 4; use one of these",
        {"distributed.shard_group_size": 2},
    ),
    (
        LEARNERS | {"distributed.sharding": "hybrid", "distributed.shard_group_size": 3},
        "distributed.shard_group_size = 3 with distributed.sharding = 'hybrid': 4 learners "
        "(distributed.learners_per_node) make groups of 1 or 2 or 4; use one of these",
        {"distributed.learners_per_node": [6]},
    ),
    (
        SHARDED | {"distributed.shard_group_size": 2},
        "distributed.shard_group_size = 2 with distributed.sharding = 'full': groups share copies in hybrid sharding "
        "only; set distributed.sharding to hybrid, or leave it out",
        {"distributed.sharding": "hybrid"},
    ),
    (
        SHARDED | LORA_4_BIT,
        f"policy.quantize = 4 with distributed.sharding = 'full': {PACKED}",
        {"distributed.sharding": "none"},
    ),
    (
        VLLM | FOLDER | LORA_4_BIT,
        f"policy.quantize = 4 with vllm.num_engines = 2: {UNPACKED}",
        {"vllm.num_engines": 0},
    ),
    (
        VLLM | {"policy.path": "builtin:tiny-oft"},
        f"policy.path = 'builtin:tiny-oft' with vllm.num_engines = 2: {IN_PARALLEL}, or builtin:tiny-openvla",
        {"policy.path": "builtin:tiny-openvla"},
    ),
    (
        VLLM | {"policy.path": "init:tiny-oft"},
        f"policy.path = 'init:tiny-oft' with vllm.num_engines = 2: {IN_PARALLEL}, or init:tiny-openvla",
        {"vllm.num_engines": 0},
    ),
    (
        VLLM | FOLDER | {"policy.decoder": "parallel", "policy.chunk_length": 8},
        f"policy.decoder = 'parallel' with vllm.num_engines = 2: {IN_PARALLEL}",
        {"vllm.num_engines": 0},
    ),
    (
        VLLM | FOLDER | {"policy.chunk_length": 8},
        f"policy.chunk_length = 8 with vllm.num_engines = 2: {IN_PARALLEL}",
        {"policy.chunk_length": 1},
    ),
    (
        VLLM | {"vllm.model_class": "vllm"},
        f"vllm.model_class = 'vllm' with policy.path = 'builtin:tiny-openvla': {OWN_CLASS}",
        FOLDER | FULL,
    ),
    (
        VLLM | FOLDER | FULL | {"vllm.model_class": "vllm", "policy.num_images": 2},
        f"vllm.model_class = 'vllm' with policy.num_images = 2: {OWN_CLASS}",
        {"policy.num_images": 1},
    ),
    (
        VLLM | FOLDER | FULL | {"vllm.model_class": "vllm", "policy.use_proprio": True},
        f"vllm.model_class = 'vllm' with policy.use_proprio = true: {OWN_CLASS}",
        {"vllm.model_class": "vlarl"},
    ),
    (
        VLLM | {"distributed.torch_num_engines": 2},
        "distributed.torch_num_engines = 2 with vllm.num_engines = 2: the engines are vLLM's; leave it out, or set "
        "vllm.num_engines to 0",
        {"vllm.num_engines": 0},
    ),
    (
        VLLM | {"rollout.batch_size": 8},
        "rollout.batch_size = 8 with vllm.num_engines = 2: vLLM engines read vllm.max_num_seqs instead; set that, "
        "and leave this out",
        {"vllm.num_engines": 0},
    ),
    (
        RAY | {"vllm.sync_backend": "nccl"},
        f"vllm.sync_backend = 'nccl' with vllm.num_engines = 0: {UNREAD}",
        {"vllm.num_engines": 1},
    ),
    (
        RAY | {"vllm.tensor_parallel_size": 2},
        f"vllm.tensor_parallel_size = 2 with vllm.num_engines = 0: {UNREAD}",
        {"vllm.num_engines": 1},
    ),
    (
        VLLM | {"vllm.sync_backend": "nccl", "run.device": "cpu"},
        "vllm.sync_backend = 'nccl' with run.device = 'cpu': nccl moves weights between processes on GPUs; set "
        "vllm.sync_backend to object_store",
        {"vllm.sync_backend": "object_store"},
    ),
    (
        VLLM | {"vllm.sync_backend": "ipc"},
        "vllm.sync_backend = 'ipc' with distributed.colocate = false: handles are read on the GPU they come from; set "
        "distributed.colocate, or use nccl or object_store",
        SHARED | {"distributed.learners_per_node": [2]},
    ),
    (
        VLLM | FOLDER | {"vllm.model_class": "vllm", "lora.enabled": True},
        "vllm.model_class = 'vllm' with lora.enabled = true: vLLM's own class has other names for its layers; set "
        "vllm.model_class to vlarl",
        {"vllm.model_class": "vlarl"},
    ),
    (
        VLLM | {"vllm.sync_backend": "nccl", "lora.enabled": True},
        "vllm.sync_backend = 'nccl' with lora.enabled = true: only adapters are sent, through the object store; leave "
        "vllm.sync_backend out",
        {"vllm.sync_backend": "object_store"},
    ),
    (
        VLLM | SHARED | {"vllm.sync_backend": "nccl", "distributed.learners_per_node": [2]},
        "vllm.sync_backend = 'nccl' with distributed.colocate = true: one GPU can't be two ranks of nccl; set "
        "vllm.sync_backend to ipc, or distributed.colocate to false",
        {"vllm.sync_backend": "ipc"},
    ),
    (
        VLLM | {"vllm.tensor_parallel_size": 2, "distributed.engine_gpus": 0.5},
        f"vllm.tensor_parallel_size = 2 with distributed.engine_gpus = 0.5: {WHOLE_GPUS}",
        {"distributed.engine_gpus": 1.0},
    ),
    (
        VLLM | SHARED | {"vllm.tensor_parallel_size": 2, "distributed.learners_per_node": [2]},
        f"vllm.tensor_parallel_size = 2 with distributed.colocate = true: {WHOLE_GPUS}",
        {"vllm.tensor_parallel_size": 1},
    ),
    (
        SHARED | {"distributed.learner_gpus": 0.7},
        "distributed.learner_gpus = 0.7 with distributed.engine_gpus = 0.5: together they exceed the GPU that they share; make the sum 1 or less, such as 0.5 and 0.5",
        {"distributed.engine_gpus": 0.3},
    ),
    (
        LEARNERS | {"distributed.learner_gpus": 0.5},
        "distributed.learner_gpus = 0.5: two learners could share one GPU, which can't be two ranks of nccl; make it "
        "more than half of a GPU",
        {"distributed.learner_gpus": 0.6},
    ),
    (
        LEARNERS | {"distributed.learner_gpus": 0.5},
        "distributed.learner_gpus = 0.5: two learners could share one GPU, which can't be two ranks of nccl; make it "
        "more than half of a GPU",
        {"distributed.learners_per_node": [1]},
    ),
    (
        SHARED
        | {"distributed.learners_per_node": [2], "distributed.learner_gpus": 0.2, "distributed.engine_gpus": 0.3},
        "distributed.learner_gpus = 0.2 with distributed.engine_gpus = 0.3: two learners could share one GPU, which "
        "can't be two ranks of nccl; make it more than half of a GPU",
        {"distributed.engine_gpus": 0.4},
    ),
    (
        VLLM | SHARED,
        "vllm.num_engines = 2 with distributed.colocate = true: each engine shares a GPU with one of the 1 learners "
        "(distributed.learners_per_node); use that many engines or fewer",
        {"vllm.num_engines": 1},
    ),
    (
        SHARED | {"distributed.torch_num_engines": 3, "distributed.learners_per_node": [2]},
        "distributed.torch_num_engines = 3 with distributed.colocate = true: each engine shares a GPU with one of the 2 "
        "learners (distributed.learners_per_node); use that many engines or fewer",
        {"distributed.torch_num_engines": 2},
    ),
    (
        RAY | {"run.device": "cuda:1"},
        "run.device = 'cuda:1' with distributed.backend = 'ray': Ray assigns the GPUs; set run.device to cuda",
        {"run.device": "cuda"},
    ),
    (
        RAY | {"policy.heads_device": "cuda:1", "policy.actions": "hybrid"},
        "policy.heads_device = 'cuda:1' with distributed.backend = 'ray': Ray assigns the GPUs; set policy.heads_device "
        "to cuda",
        {"distributed.backend": "local"},
    ),
    (
        REWARDER | {"reward.device": "cuda:1", "distributed.reward_gpus": 0.5},
        "reward.device = 'cuda:1' with distributed.backend = 'ray': Ray assigns the GPUs; set reward.device to cuda",
        {"reward.device": "cuda"},
    ),
    (
        RAY | {"run.device": "cuda", "distributed.engine_gpus": 0.0},
        "run.device = 'cuda' with distributed.engine_gpus = 0.0: workers see only GPUs that are assigned to them; set "
        "distributed.engine_gpus above 0, or run.device to cpu",
        {"distributed.engine_gpus": 0.5},
    ),
    (
        REWARDER | {"reward.device": "cuda"},
        "reward.device = 'cuda' with distributed.reward_gpus = 0.0: workers see only GPUs that are assigned to them; set "
        "distributed.reward_gpus above 0, or reward.device to cpu",
        {"distributed.reward_gpus": 0.25},
    ),
    (
        RAY | {"env.num_envs": 2, "distributed.num_env_workers": 3},
        "distributed.num_env_workers = 3: there are only 2 environments (env.num_envs); use that many workers or fewer",
        {"distributed.num_env_workers": 2},
    ),
    (
        RAY | {"env.num_envs": None, "distributed.num_env_workers": 65},
        "distributed.num_env_workers = 65: there are only 64 environments (env.num_envs); use that many workers or "
        "fewer",
        {"distributed.num_env_workers": 64},
    ),
    (
        RAY | {"distributed.asynchronous": True, "optim.rollouts_per_update": 2},
        "distributed.asynchronous = true with optim.rollouts_per_update = 2: rollouts are gathered by the synchronous "
        "loop only; set optim.rollouts_per_update to 1 and rollout.num_groups higher, or distributed.asynchronous to "
        "false",
        {"optim.rollouts_per_update": 1},
    ),
]


@pytest.mark.parametrize(("overrides", "message", "fixed"), CASES)
def test_what_can_not_work_is_refused_and_its_fix_is_accepted(overrides, message, fixed):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert [str(problem) for problem in caught.value.problems] == [message]
    assert check(load_config(overrides=overrides | fixed)) == []


@pytest.mark.parametrize(
    "overrides",
    [
        RAY | {"env.num_envs": 2, "distributed.num_env_workers": 2},
        RAY | {"env.suite": "libero_10", "env.num_envs": 1, **FOLDER},  # each of its simulators is a worker
        SHARDED | {"distributed.cpu_offload": True, "distributed.compute_dtype": "bfloat16"},
        LEARNERS | {"distributed.sharding": "hybrid", "distributed.shard_group_size": 4},
        SHARED | {"distributed.learner_gpus": 0.7, "distributed.engine_gpus": 0.3},
        SHARED | {"distributed.learner_gpus": 0.9, "distributed.engine_gpus": 0.1},
        RAY | {"distributed.address": "[fe80::1]:6379"},
        VLLM | FOLDER | {"vllm.tensor_parallel_size": 4, "vllm.sync_backend": "nccl", **FULL},
        VLLM | FOLDER | {"policy.actions": "hybrid"},  # the head stays with the learner
    ],
)
def test_what_works(overrides):
    assert check(load_config(overrides=overrides)) == []


def test_all_that_is_wrong_is_said_at_once():
    overrides = {"distributed.sharding": "full", "vllm.num_engines": 1, "policy.path": "builtin:tiny-oft"}
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides | LORA_4_BIT)
    assert [problem.subject for problem in caught.value.problems] == [
        "vllm.num_engines = 1",
        "distributed.sharding = 'full'",
        "policy.quantize = 4 with distributed.sharding = 'full'",
        "policy.quantize = 4 with vllm.num_engines = 1",
        "policy.path = 'builtin:tiny-oft' with vllm.num_engines = 1",
    ]


def test_the_default_number_of_environments_is_that_of_a_run():
    from vlarl.run.parts import num_envs

    config = load_config(overrides={"env.num_envs": None})
    assert num_envs(config.env, config.gym) == BATCHED_ENVS
