"""The memory of a run's GPU: its limit, the plan of what fits into it, and the configuration with what was planned."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import torch
from huggingface_hub.errors import StrictDataclassError

from vlarl.config.known import BUILTINS, is_prompts
from vlarl.config.schema import Config
from vlarl.errors import UsageError
from vlarl.policies.family import Description, MemoryEstimate
from vlarl.policies.fresh import FRESH, fresh_checkpoint
from vlarl.policies.load import describe_checkpoint
from vlarl.run.memory_plan import GIB, Estimates, MemoryPlan, Wanted, plan_memory
from vlarl.run.parts import num_envs

log = logging.getLogger(__name__)

CONTEXT_BYTES = GIB
"""Of a card, memory that tensors can't have: half a GiB that driver and display keep, so that a card of 24 GB reports
about 23.5; and half a GiB of the CUDA context with its kernels and libraries."""
NEARLY = 0.88
"""Cards of 24 GB report from 22 to 24 GiB: one that has this fraction of `run.memory_gb` is of that size."""
LATER_BYTES = GIB // 2
"""Of memory that is free at the start, what is taken later: by kernels that are loaded when they are first used, and by
simulators that render on the same GPU."""

ON_A_CPU = "run.memory_gb = %g: has no effect, because this run is on a CPU"
ON_A_CLUSTER = "run.memory_gb = %g: has no effect on a Ray cluster; set optim.microbatch_size there"


def card_bytes(size_gb: float) -> int:
    """Bytes for tensors on a card that is sold with so many GB, which are GiB for its driver."""
    return round(size_gb * GIB) - CONTEXT_BYTES


def fit_to_device(config: Config, device: torch.device) -> tuple[Config, MemoryPlan | None]:
    """Limit the GPU's memory as configured, and plan what fits: the configuration with the planned sizes, and the plan;
    None where there is none: on a CPU, and without adapters, as updates of whole models are not estimated."""
    if device.type != "cuda":
        if config.run.memory_gb is not None:
            log.warning(ON_A_CPU, config.run.memory_gb)
        return config, None
    plan = planned(config, limit_memory(config.run.memory_gb, device))
    if plan is None:
        return config, None
    for line in plan.lines():
        log.info("%s", line)
    if not plan.fits:
        needed = (
            f"{max(plan.update, plan.rollout) / GIB:.1f} GiB for tensors, and {device} has {plan.limit / GIB:.1f} GiB"
        )
        message = f"by estimate this run needs {needed}: {', or '.join(plan.advice)}."
        if plan.is_hopeless:
            raise UsageError(message)
        log.warning("%s", message)
    return fitted(config, plan), plan


def limit_memory(size_gb: float | None, device: torch.device) -> int:
    """Bytes that tensors of this process can still take; with a size, more is refused to them from now on."""
    free, total = torch.cuda.mem_get_info(device)  # makes the context, which takes its own part
    reserved = torch.cuda.memory_reserved(device)  # by this process, such as a reward model's
    if size_gb is None:
        return free - LATER_BYTES
    limit = min(card_bytes(size_gb), total - CONTEXT_BYTES // 2)  # a whole card reports less than it is sold with
    if size_gb * GIB * NEARLY > total:
        raise UsageError(
            f"run.memory_gb = {size_gb:g}: {device} has {total / GIB:.1f} GiB; leave it out, or set it to the size of "
            "a smaller card."
        )
    if limit < card_bytes(size_gb):
        log.info("run.memory_gb = %g: %s has %.1f GiB, tensors get %.1f", size_gb, device, total / GIB, limit / GIB)
    torch.cuda.set_per_process_memory_fraction(limit / total, device.index)  # which takes no `cuda` without an index
    return min(limit - reserved, free)


def fitted(config: Config, plan: MemoryPlan) -> Config:
    """The configuration with the sizes that the plan chose."""
    optim, policy, rollout = config.optim, config.policy, config.rollout
    return config.model_copy(
        update={
            "optim": optim.model_copy(update={"microbatch_size": plan.microbatch_size}),
            "policy": policy.model_copy(update={"gradient_checkpointing": plan.gradient_checkpointing}),
            "rollout": rollout.model_copy(update={"batch_size": plan.batch_size}),
        }
    )


def planned(config: Config, limit: int) -> MemoryPlan | None:
    """The plan for the configured policy; None if it is trained without adapters, or can't be described."""
    try:
        description = describe_policy(config)
        rank = _rank(config, description)
    except (OSError, ValueError, StrictDataclassError) as error:  # loading it says what is wrong
        log.info("the memory is not planned: %s", error)
        return None
    return None if rank is None else plan_for(config, description, rank, limit)


def plan_for(config: Config, description: Description, rank: int, limit: int) -> MemoryPlan:
    """The plan for adapters of this rank on the described policy."""
    optim = config.optim
    wanted = Wanted(
        slots=decisions_at_once(config),
        microbatch_size=optim.microbatch_size,
        gradient_checkpointing=config.policy.gradient_checkpointing,
        batch_size=config.rollout.batch_size,
        by_tokens=optim.microbatch_tokens is not None,
        recorded=config.rollout.cuda_graphs and _is_recordable(config),
        recorded_update=optim.cuda_graphs and _is_recordable(config) and config.policy.quantize is None,
    )
    quantize = config.policy.quantize
    plan = plan_memory(limit, estimates_of(config, description, rank, quantize), wanted)
    if plan.fits:
        return plan
    smaller = None if quantize else plan_memory(limit, estimates_of(config, description, rank, 4), wanted)
    return replace(plan, advice=_advice(config, plan, smaller))


def estimates_of(config: Config, description: Description, rank: int, quantize: Literal[4, 8] | None) -> Estimates:
    """What the family says of the checkpoint, with this base."""
    dtype = config.policy.dtype
    # Adapters of a quantised base are trained in float32, so rollouts between updates are float32, too.
    acting = "float32" if quantize else dtype

    def update(size: int, recompute: bool) -> MemoryEstimate:
        return description.estimate_lora_update(size, dtype, rank, recompute, quantize)

    smallest, copies = update(1, True), 0
    if config.ema.beta is not None:
        copies += smallest.gradients  # as many float32 values as are trained
    if config.kl.coef > 0 and (description.adapter is not None or config.lora.adapter is not None):
        copies += smallest.gradients  # the reference: adapters as they were at the start
    is_apart = config.algorithm.name == "ppo" and config.critic.kind == "separate"
    copies += smallest.lasting if is_apart else 0
    return Estimates(
        lambda size: description.estimate_rollout(size, acting, quantize), update, copies, 2 if is_apart else 1
    )


def _advice(config: Config, plan: MemoryPlan, with_4_bits: MemoryPlan | None) -> tuple[str, ...]:
    """What to change where a run does not fit."""
    said = {
        "optim.microbatch_size": config.optim.microbatch_size is not None and plan.update > plan.limit,
        "policy.gradient_checkpointing": config.policy.gradient_checkpointing is False and plan.update > plan.limit,
        "rollout.batch_size": config.rollout.batch_size is not None and plan.rollout > plan.limit,
    }
    remedies = [f"leave {option} out" for option, is_given in said.items() if is_given]
    if with_4_bits is not None:
        how = "fit" if with_4_bits.fits else f"need {max(with_4_bits.update, with_4_bits.rollout) / GIB:.1f} GiB"
        remedies.append(f"set policy.quantize 4 for a base in 4 bits (extra quant; presets *_16gb), which would {how}")
    return (*remedies, "use a larger GPU")


def _is_recordable(config: Config) -> bool:
    """Whether recordings of passes stay: those of texts end with their batch, others can't be made."""
    policy = config.policy
    return policy.quantize != 8 and policy.attention != "flash_attention_2" and not is_prompts(config.env.suite)


def decisions_at_once(config: Config) -> int:
    """Decisions that may wait for the engine at a time."""
    slots = num_envs(config.env, config.gym)
    if config.rollout.num_steps is None:
        slots = min(slots, config.rollout.num_groups * config.rollout.group_size)
    return slots


def describe_policy(config: Config) -> Description:
    """The configured policy as its files describe it."""
    policy, path = config.policy, config.policy.path
    decoder = None if policy.decoder == "auto" else policy.decoder
    return describe_checkpoint(described_path(path, policy.num_images), decoder, policy.num_images)


def described_path(path: str, num_images: int | None) -> str:
    """Where the sizes of a model are read: those of a fresh one are a built-in's, where there is one."""
    if path not in FRESH:
        return path
    size = path.removeprefix("init:")
    is_like_it = size in BUILTINS and not BUILTINS[size].is_flow  # whose number of views is in its files
    return f"builtin:{size}" if is_like_it else str(fresh_checkpoint(path, None, num_images, None))


def _rank(config: Config, description: Description) -> int | None:
    """The rank of the adapters that are trained; None: there are none."""
    if description.adapter is not None:
        return description.adapter.rank
    if config.lora.adapter is not None:
        trained = describe_checkpoint(config.lora.adapter).adapter
        return config.lora.rank if trained is None else trained.rank
    return config.lora.rank if config.lora.enabled else None
