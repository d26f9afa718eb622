"""Rules of the sections `distributed` and `vllm`: what can't be distributed, and what can't share a GPU.

RANK_RULES are about learner ranks alone, which supervised training has, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from vlarl.config.derive import num_engines, world_size
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import BATCHED_ENVS, decoder_of, is_prompts
from vlarl.config.problems import Problem, shown
from vlarl.config.schema import Config
from vlarl.config.suites import suite_facts
from vlarl.config.words import counted

AnyConfig = Config | FinetuneConfig
Problems = Iterator[Problem]

NEEDS_RAY = (
    "vllm.num_engines",
    "distributed.address",
    "distributed.learners_per_node",
    "distributed.sharding",
    "distributed.torch_num_engines",
    "distributed.num_reward_workers",
    "distributed.asynchronous",
)
"""Options that one process can't use, unless they have their default."""

ADDRESS = re.compile(r"auto|(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH", re.IGNORECASE)
SET_OTHERWISE = {
    "OMP_NUM_THREADS": "run.num_threads sets it",
    "CUDA_VISIBLE_DEVICES": "Ray sets it for each worker by its GPU fraction",
}
ROUNDING = 1e-6  # of GPU fractions that add up to 1


def check_distributed(config: Config) -> Problems:
    """All problems of the two sections."""
    for rule in (*RANK_RULES, *RULES):
        yield from rule(config)


def check_ranks(config: FinetuneConfig) -> Problems:
    """All problems of the section of supervised training."""
    for rule in RANK_RULES:
        yield from rule(config)


def _backend(config: AnyConfig) -> Problems:
    """One process is one learner with one engine; a cluster has an address and enough machines."""
    distributed = config.distributed
    if distributed.backend == "local":
        for path in NEEDS_RAY:
            if _has(config, path) and _is_given(config, path):
                yield _clash(config, "it needs distributed.backend ray; set that, or leave it out", path)
        return
    if not distributed.learners_per_node:
        yield _clash(config, "names no learner; use 1, or a count for each machine", "distributed.learners_per_node")
    if distributed.address is None:
        if len(distributed.learners_per_node) > 1:
            remedy = (
                "a cluster that the run starts has this machine only; run `ray start` on every machine and set "
                "distributed.address to auto, or give one count"
            )
            yield _clash(config, remedy, "distributed.learners_per_node", "distributed.address")
        return
    if not ADDRESS.fullmatch(distributed.address):
        remedy = "must be auto, or host:port of the cluster's head, such as 10.0.0.1:6379"
        yield _clash(config, remedy, "distributed.address")
    if isinstance(config, Config) and config.distributed.object_store_mb is not None:
        remedy = (
            "a running cluster has its own object store; set distributed.object_store_mb to null, and start Ray "
            "with --object-store-memory"
        )
        yield _clash(config, remedy, "distributed.object_store_mb", "distributed.address")


def _sharding(config: AnyConfig) -> Problems:
    """The learners divide into groups evenly, and options of sharded weights need sharding."""
    distributed, learners = config.distributed, sum(config.distributed.learners_per_node)
    size = distributed.shard_group_size
    if distributed.sharding == "none":
        for path in ("distributed.cpu_offload", "distributed.compute_dtype"):
            if _is_given(config, path):
                remedy = "it needs sharded weights; set distributed.sharding to full or hybrid, or leave it out"
                yield _clash(config, remedy, path, "distributed.sharding")
    elif config.policy.heads_device is not None:
        remedy = "heads are sharded with the policy; set policy.heads_device to null, or distributed.sharding to none"
        yield _clash(config, remedy, "policy.heads_device", "distributed.sharding")
    if distributed.sharding != "hybrid":
        if size is not None:
            remedy = "groups share copies in hybrid sharding only; set distributed.sharding to hybrid, or leave it out"
            yield _clash(config, remedy, "distributed.shard_group_size", "distributed.sharding")
    elif learners and (size is None or learners % size):
        fitting = " or ".join(str(n) for n in range(1, learners + 1) if learners % n == 0)
        remedy = (
            f"{counted(learners, 'learner')} (distributed.learners_per_node) make groups of {fitting}; use one of these"
        )
        paths = ("distributed.shard_group_size", "distributed.sharding", "distributed.learners_per_node")
        yield _clash(config, remedy, *paths, num_shown=2)


def _quantized(config: AnyConfig) -> Problems:
    """Each learner and each torch engine quantises the base as it loads it, and adapters travel alone; packed weights
    can be neither sharded nor given to vLLM."""
    if config.policy.quantize is None:
        return
    if config.distributed.sharding != "none":
        remedy = (
            "packed weights can't be sharded; set distributed.sharding to none, so that each learner has the whole "
            "base, or policy.quantize to null"
        )
        yield _clash(config, remedy, "policy.quantize", "distributed.sharding")
    if isinstance(config, Config) and config.vllm.num_engines:
        remedy = (
            "vLLM would run the base in full precision, and its log-probs would not be the learner's; use the torch "
            "engines (vllm.num_engines 0), or set policy.quantize to null"
        )
        yield _clash(config, remedy, "policy.quantize", "vllm.num_engines")


def _vllm_policy(config: Config) -> Problems:
    """vLLM decodes token by token; its own class supports one model."""
    policy, engines = config.policy, "vllm.num_engines"
    if config.vllm.num_engines == 0:
        return
    kind = policy.path.partition(":")[0]
    is_builtin = kind in ("builtin", "init")
    remedy = "policies that decode in parallel can't run in vLLM; use the torch engines: vllm.num_engines 0"
    if policy.decoder == "parallel":
        yield _clash(config, remedy, "policy.decoder", engines)
    elif decoder_of(policy.path) == "parallel":
        yield _clash(config, f"{remedy}, or {kind}:tiny-openvla", "policy.path", engines)
    elif (policy.chunk_length or 1) > 1:
        yield _clash(config, remedy, "policy.chunk_length", engines)
    if config.vllm.model_class != "vllm" or is_prompts(config.env.suite):
        return
    foreign = {
        "policy.path": is_builtin,
        "policy.num_images": (policy.num_images or 1) > 1,
        "policy.use_proprio": policy.use_proprio is True,
    }
    for path in (path for path, is_foreign in foreign.items() if is_foreign):
        remedy = (
            "vLLM's own class supports only the original OpenVLA-7B, with one image and no proprio; set "
            "vllm.model_class to vlarl"
        )
        yield _clash(config, remedy, "vllm.model_class", path)
    if config.lora.enabled or config.lora.adapter is not None:
        path = "lora.enabled" if config.lora.enabled else "lora.adapter"
        remedy = "vLLM's own class has other names for its layers; set vllm.model_class to vlarl"
        yield _clash(config, remedy, "vllm.model_class", path)


def _engine_options(config: Config) -> Problems:
    """Engines are of one kind, and options of the other kind are not read."""
    engines = "vllm.num_engines"
    if config.vllm.num_engines == 0:
        for path in ("vllm.sync_backend", "vllm.tensor_parallel_size"):
            if _is_given(config, path):
                remedy = "only vLLM engines read it, and there are none; set vllm.num_engines, or leave it out"
                yield _clash(config, remedy, path, engines)
        return
    if _is_given(config, "distributed.torch_num_engines"):
        remedy = "the engines are vLLM's; leave it out, or set vllm.num_engines to 0"
        yield _clash(config, remedy, "distributed.torch_num_engines", engines)
    if _is_given(config, "rollout.batch_size"):
        remedy = "vLLM engines read vllm.max_num_seqs instead; set that, and leave this out"
        yield _clash(config, remedy, "rollout.batch_size", engines)


def _sync(config: Config) -> Problems:
    """nccl needs two GPUs, ipc one shared GPU; both are for weights of the model, not for adapters."""
    backend, paths = config.vllm.sync_backend, ("vllm.sync_backend", "distributed.colocate")
    if config.vllm.num_engines == 0 or backend == "object_store":
        return
    if config.run.device == "cpu":
        remedy = f"{backend} moves weights between processes on GPUs; set vllm.sync_backend to object_store"
        yield _clash(config, remedy, "vllm.sync_backend", "run.device")
    if config.lora.enabled or config.lora.adapter is not None:
        path = "lora.enabled" if config.lora.enabled else "lora.adapter"
        remedy = "only adapters are sent, through the object store; leave vllm.sync_backend out"
        yield _clash(config, remedy, "vllm.sync_backend", path)
    if backend == "ipc" and not config.distributed.colocate:
        remedy = "handles are read on the GPU they come from; set distributed.colocate, or use nccl or object_store"
        yield _clash(config, remedy, *paths)
    if backend == "nccl" and config.distributed.colocate:
        remedy = "one GPU can't be two ranks of nccl; set vllm.sync_backend to ipc, or distributed.colocate to false"
        yield _clash(config, remedy, *paths)


def _gpu_sync(config: Config) -> Problems:
    """nccl and ipc send weights from a learner's GPU; each rank of nccl has a GPU of its own."""
    d, backend = config.distributed, config.vllm.sync_backend
    if config.vllm.num_engines == 0 or backend == "object_store":
        return
    if d.cpu_offload:
        remedy = (
            f"offloaded weights are in the host's memory, and {backend} sends from GPUs; set vllm.sync_backend to "
            "object_store, or distributed.cpu_offload to false"
        )
        yield _clash(config, remedy, "vllm.sync_backend", "distributed.cpu_offload")
    if backend != "nccl" or d.colocate or config.vllm.tensor_parallel_size > 1:
        return  # refused, or on whole GPUs
    if config.vllm.num_engines > 1 and d.engine_gpus <= 0.5:
        remedy = (
            "two engines could share one GPU, which can't be two ranks of nccl; make distributed.engine_gpus more than "
            "half of a GPU, or set vllm.sync_backend to object_store"
        )
        yield _clash(config, remedy, "vllm.sync_backend", "distributed.engine_gpus", "vllm.num_engines")
    elif d.learner_gpus + d.engine_gpus <= 1 + ROUNDING:
        remedy = (
            "a learner and an engine could share one GPU, which can't be two ranks of nccl; make the sum more than 1, "
            "or set distributed.colocate and vllm.sync_backend to ipc"
        )
        yield _clash(config, remedy, "vllm.sync_backend", "distributed.learner_gpus", "distributed.engine_gpus")


def _tensor_parallel(config: Config) -> Problems:
    """An engine over several GPUs does not share them."""
    size, sharing = "vllm.tensor_parallel_size", {"distributed.colocate": config.distributed.colocate}
    sharing["distributed.engine_gpus"] = config.distributed.engine_gpus < 1
    path = next((path for path, is_shared in sharing.items() if is_shared), None)
    if config.vllm.num_engines and config.vllm.tensor_parallel_size > 1 and path is not None:
        remedy = (
            "an engine over several GPUs takes whole ones; set distributed.colocate to false and "
            f"distributed.engine_gpus to 1, or {size} to 1"
        )
        yield _clash(config, remedy, size, path)


def _gpu_fractions(config: Config) -> Problems:
    """GPU fractions add up to 1 or less; each colocated engine has a learner's GPU."""
    distributed = config.distributed
    if distributed.backend == "local":
        return
    learners = world_size(config)
    fraction = distributed.learner_gpus + distributed.engine_gpus
    paths = ("distributed.learner_gpus", "distributed.engine_gpus", "distributed.colocate")
    if distributed.colocate and fraction > 1 + ROUNDING:
        remedy = "together they exceed the GPU that they share; make the sum 1 or less, such as 0.5 and 0.5"
        yield _clash(config, remedy, *paths, num_shown=2)
    if distributed.colocate and num_engines(config) > learners:
        path = "vllm.num_engines" if config.vllm.num_engines else "distributed.torch_num_engines"
        remedy = (
            f"each engine shares a GPU with one of the {learners} learners (distributed.learners_per_node); use that "
            "many engines or fewer"
        )
        yield _clash(config, remedy, path, "distributed.colocate", "distributed.learners_per_node", num_shown=2)


def _shared_gpus(config: AnyConfig) -> Problems:
    """Learners never share a GPU."""
    distributed = config.distributed
    if distributed.backend == "local" or config.run.device == "cpu" or world_size(config) == 1:
        return
    paths: tuple[str, ...] = ("distributed.learner_gpus",)
    fraction = distributed.learner_gpus
    if isinstance(config, Config) and config.distributed.colocate:
        paths = (*paths, "distributed.engine_gpus", "distributed.colocate")
        fraction += config.distributed.engine_gpus
    if distributed.learner_gpus and fraction <= 0.5:
        remedy = "two learners could share one GPU, which can't be two ranks of nccl; make it more than half of a GPU"
        yield _clash(config, remedy, *paths, num_shown=2)


def _variables(config: AnyConfig) -> Problems:
    """Environment variables of workers have names, are not secret, and don't contradict other options."""
    for name in config.distributed.env_vars:
        path = "distributed.env_vars"
        if not VARIABLE.fullmatch(name):
            yield Problem(f"{path}: {name!r}", "it is not the name of an environment variable; rename it", (path,))
        elif SECRET.search(name):
            remedy = (
                "it looks like a secret, and the option is saved in config.yaml and shown by Ray; set the variable in "
                "the shell that starts the run, or on every machine where `ray start` is called"
            )
            yield Problem(f"{path}: {name}", remedy, (path,))
        elif name in SET_OTHERWISE:
            yield Problem(f"{path}: {name}", f"{SET_OTHERWISE[name]}; leave it out", (path,))


def _devices(config: AnyConfig) -> Problems:
    """Ray assigns a worker its GPUs, and hides the others."""
    if config.distributed.backend == "local":
        return
    has_reward_workers = isinstance(config, Config) and config.distributed.num_reward_workers > 0
    named = ("run.device", "policy.heads_device", *(("reward.device",) if has_reward_workers else ()))
    for path in named:
        if re.fullmatch(r"cuda:\d+", str(_value(config, path))):
            remedy = f"Ray assigns the GPUs; set {path} to cuda"
            yield _clash(config, remedy, path, "distributed.backend")
    users = [("run.device", "distributed.learner_gpus")]
    users += [("run.device", "distributed.engine_gpus")] if isinstance(config, Config) else []
    users += [("reward.device", "distributed.reward_gpus")] if has_reward_workers else []
    for device, fraction in users:
        if str(_value(config, device)).startswith("cuda") and _value(config, fraction) == 0:
            remedy = f"workers see only GPUs that are assigned to them; set {fraction} above 0, or {device} to cpu"
            yield _clash(config, remedy, device, fraction)


def _workers(config: Config) -> Problems:
    """Each environment worker has at least one environment."""
    facts, workers = suite_facts(config.env, config.gym), config.distributed.num_env_workers
    if config.distributed.backend == "local" or facts is None or facts.in_processes:
        return
    num_envs = config.env.num_envs or BATCHED_ENVS
    if workers > num_envs:
        remedy = f"there are only {num_envs} environments (env.num_envs); use that many workers or fewer"
        yield _clash(config, remedy, "distributed.num_env_workers", "env.num_envs", num_shown=1)


def _asynchronous(config: Config) -> Problems:
    """Rollouts that overlap updates can't be gathered for one update."""
    if config.distributed.asynchronous and config.optim.rollouts_per_update > 1:
        remedy = (
            "rollouts are gathered by the synchronous loop only; set optim.rollouts_per_update to 1 and "
            "rollout.num_groups higher, or distributed.asynchronous to false"
        )
        yield _clash(config, remedy, "distributed.asynchronous", "optim.rollouts_per_update")


def _has(config: AnyConfig, path: str) -> bool:
    """Whether the configuration's schema has an option."""
    section, _, name = path.partition(".")
    return hasattr(getattr(config, section, None), name)


def _value(config: AnyConfig, path: str) -> object:
    section, _, name = path.partition(".")
    value: object = getattr(getattr(config, section), name)
    return value


def _is_given(config: AnyConfig, path: str) -> bool:
    """Whether an option differs from its default."""
    return _value(config, path) != _value(type(config)(), path)


def _clash(config: AnyConfig, message: str, *paths: str, num_shown: int | None = None) -> Problem:
    """A problem of these options; the message shows the first `num_shown` with their values."""
    quoted = [f"{path} = {shown(_value(config, path))}" for path in paths[:num_shown]]
    return Problem(" with ".join(quoted), message, paths)


RANK_RULES: tuple[Callable[[AnyConfig], Problems], ...] = (
    _backend,
    _sharding,
    _quantized,
    _shared_gpus,
    _variables,
    _devices,
)
RULES: tuple[Callable[[Config], Problems], ...] = (
    _vllm_policy,
    _engine_options,
    _sync,
    _gpu_sync,
    _tensor_parallel,
    _gpu_fractions,
    _workers,
    _asynchronous,
)
