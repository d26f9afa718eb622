"""Values derived from a configuration. Pure functions; nothing is stored back into the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal, NamedTuple

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import BATCHED_ENVS, BUILTINS, SUITES, is_prompts
from vlarl.config.schema import AlgorithmConfig, Config, KlConfig, OptimConfig
from vlarl.config.suites import num_configured_tasks, suite_facts


@dataclass(frozen=True)
class Derived:
    """Sizes and counts of a training run. None: not known before the checkpoint is loaded."""

    world_size: int  # learner processes
    num_engines: int | None  # on a cluster; None: all in one process
    num_env_workers: int | None  # on a cluster; None also if each core has a simulator
    num_tasks: int
    episodes_per_iteration: int | None  # the rollout batch; None, like all counts of episodes: rollout.num_steps is set
    episodes_per_iteration_and_env_worker: float | None  # on average: a free worker takes the next one
    decisions_per_iteration_max: int | None  # if every episode lasts to the time limit
    iterations_per_update: int
    episodes_per_update: int | None  # the train batch
    episodes_per_minibatch: int | None  # on average: minibatches are split from shuffled decisions
    episodes_per_minibatch_and_rank: float | None  # on average: microbatches are distributed
    decisions_per_microbatch_max: int | None
    tokens_per_microbatch_max: int | None
    optimizer_steps_per_update: int
    total_iterations: int | None  # None, like the totals below: not known for the given run.total_env_steps
    total_env_steps_max: int | None  # if every episode lasts to the time limit
    total_updates: int | None
    total_optimizer_steps: int | None
    total_episodes: int | None
    num_evaluations: int | None
    episodes_per_evaluation: int
    clip_low: float
    clip_high: float
    kl_estimator: str | None  # None without a KL penalty


@dataclass(frozen=True)
class FinetuneDerived:
    """Sizes and counts of a supervised run. None: not known before the recordings are read."""

    world_size: int
    num_tasks: int | None
    num_demonstrations: int | None
    samples_per_rank: int  # of each batch
    total_samples: int  # over all steps


def num_slots(config: Config) -> int | None:
    """Environments that run in parallel; None: as many as the machine has cores for."""
    facts = suite_facts(config.env, config.gym)
    if config.env.num_envs is None and facts is not None and not facts.in_processes:
        return BATCHED_ENVS
    return config.env.num_envs


def env_steps_per_iteration(config: Config) -> int | None:
    """Environment steps of an iteration whose episodes all last to the time limit; None: not known."""
    if config.rollout.num_steps is not None:
        slots = num_slots(config)
        return None if slots is None else slots * config.rollout.num_steps
    facts = suite_facts(config.env, config.gym)
    if facts is None or facts.max_steps is None:
        return None
    return config.rollout.num_groups * config.rollout.group_size * facts.max_steps


def total_iterations(config: Config, done: int = 0, env_steps: int = 0) -> int | None:
    """How many iterations a run takes: run.iterations, or as many as reach run.total_env_steps.

    The latter is estimated from the `env_steps` of the `done` iterations; before the first one, as if every episode
    lasted to its time limit, which is a lower bound. None: nothing is known yet.
    """
    limit, budget = config.run.iterations, config.run.total_env_steps
    if budget is None:
        return limit
    per_iteration = env_steps / done if done and env_steps else env_steps_per_iteration(config)
    if not per_iteration:
        return limit
    estimate = done if done and env_steps >= budget else max(done, math.ceil(budget / per_iteration), 1)
    return estimate if limit is None else min(limit, estimate)


class LengthWords(NamedTuple):
    """The length of training in the wording of messages about options that exceed it."""

    given: str  # the option that sets it
    limit: str  # the number of iterations
    more: str  # another remedy


def length_in_words(config: Config) -> LengthWords:
    """The wording of a run's length in messages."""
    budget, iterations = config.run.total_env_steps, total_iterations(config)
    if budget is None or iterations is None or iterations == config.run.iterations:
        return LengthWords(f"run.iterations = {config.run.iterations}", "run.iterations", "")
    counted = f"{iterations} iteration{'s' * (iterations != 1)}"
    given = f"run.total_env_steps = {budget}, which {counted} may reach"
    return LengthWords(given, str(iterations), ", or raise run.total_env_steps")


def updates_in(iterations: int, config: Config) -> int:
    """How many updates a run has: one per iteration, or one per several; the episodes left at the end make one too."""
    return math.ceil(iterations / config.optim.rollouts_per_update)


CLIP_RANGE = (0.2, 0.28)  # DAPO's, arXiv:2503.14476
SEQUENCE_CLIP_RANGE = (3e-4, 4e-4)  # GSPO's, arXiv:2507.18071: the mean over an episode moves far less than a token


def clip_range(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio is clipped: as configured, or the default for the ratio's level."""
    low, high = SEQUENCE_CLIP_RANGE if algorithm.ratio_level == "sequence" else CLIP_RANGE
    return algorithm.clip_low or low, algorithm.clip_high or high


LARGEST_MICROBATCH = 128


def microbatch_size(optim: OptimConfig) -> int:
    """Decisions in one pass of an update: as configured, or the default."""
    return optim.microbatch_size or LARGEST_MICROBATCH


PolicyLoss = Literal["clip", "cpg"]


def policy_loss_of(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The surrogate of the policy gradient: as configured, or the algorithm's own."""
    if algorithm.policy_loss == "auto":
        return "cpg" if algorithm.name == "cpgd" else "clip"
    return algorithm.policy_loss


def kl_estimator(kl: KlConfig) -> Literal["k1", "k2", "k3"]:
    """How the KL is estimated: as configured, or the default for kl.place."""
    return kl.estimator or ("k1" if kl.place == "reward" else "k2")


def world_size(config: Config | FinetuneConfig) -> int:
    """How many learner processes there are."""
    return sum(config.distributed.learners_per_node) if config.distributed.backend == "ray" else 1


def num_engines(config: Config) -> int:
    """How many engines generate decisions: vLLM's if there are any, else PyTorch's."""
    return config.vllm.num_engines or config.distributed.torch_num_engines


def staged_syncs(config: Config) -> bool:
    """Whether engines keep acting while weights arrive, and switch at the end of a sync.

    Only where decisions may be of older weights, and not by nccl and ipc, which load what they send. A batch of texts
    takes as long as a rollout and every bucket would wait for one, so whole models that write texts are sent directly;
    adapters are few buckets.
    """
    if not config.distributed.asynchronous or config.vllm.sync_backend != "object_store":
        return False
    return config.lora.enabled or not is_prompts(config.env.suite)


def engine_dtype(config: Config) -> Literal["float32", "bfloat16"]:
    """The precision of engines on a cluster: the same as of the learners' passes."""
    return config.distributed.compute_dtype or config.policy.dtype


def engine_memory_fraction(config: Config) -> float:
    """The fraction of a GPU's memory for a vLLM engine: as configured, or nine tenths of its engine_gpus."""
    return config.vllm.gpu_memory_utilization or 0.9 * (config.distributed.engine_gpus or 1.0)


def engines_sleep(config: Config, share_gpus: bool) -> bool:
    """Whether vLLM engines release their GPU's memory during updates; `share_gpus`: they run on the learners' GPUs."""
    possible = config.vllm.num_engines > 0 and share_gpus and not config.distributed.asynchronous
    return possible and config.vllm.sleep is not False


def derive(config: Config) -> Derived:
    """The derived values of a training run."""
    num_steps = config.rollout.num_steps
    episodes = None if num_steps is not None else config.rollout.num_groups * config.rollout.group_size
    gathered = config.optim.rollouts_per_update
    iterations, interval, per_iteration = (
        total_iterations(config),
        config.eval.interval,
        env_steps_per_iteration(config),
    )
    in_steps = config.eval.interval_steps is not None
    updates = None if iterations is None else updates_in(iterations, config)
    steps = config.algorithm.epochs * config.optim.minibatches
    facts = suite_facts(config.env, config.gym)
    assert facts is not None, "a checked configuration names a suite that exists"
    num_tasks = num_configured_tasks(config.env, config.gym) or facts.num_tasks
    builtin = BUILTINS.get(config.policy.path.removeprefix("builtin:"))
    chunk = config.policy.chunk_length or (builtin.chunk_length if builtin else None)
    chunk = 1 if is_prompts(config.env.suite) else chunk  # a text is one decision
    runs, steps_each = (episodes, facts.max_steps) if num_steps is None else (num_slots(config), num_steps)
    decisions = runs * math.ceil(steps_each / chunk) if runs and steps_each and chunk else None
    per_update = None if episodes is None else episodes * gathered
    per_minibatch = None if per_update is None else per_update // config.optim.minibatches
    on_cluster, env_workers = config.distributed.backend == "ray", None
    if on_cluster:  # each simulator is its own worker
        env_workers = config.env.num_envs if facts.in_processes else config.distributed.num_env_workers
    return Derived(
        world_size=world_size(config),
        num_engines=num_engines(config) if on_cluster else None,
        num_env_workers=env_workers,
        num_tasks=num_tasks,
        episodes_per_iteration=episodes,
        episodes_per_iteration_and_env_worker=episodes / env_workers if episodes and env_workers else None,
        decisions_per_iteration_max=decisions,
        iterations_per_update=gathered,
        episodes_per_update=per_update,
        episodes_per_minibatch=per_minibatch,
        episodes_per_minibatch_and_rank=per_minibatch / world_size(config) if per_minibatch and on_cluster else None,
        decisions_per_microbatch_max=microbatch_size(config.optim) if config.optim.microbatch_tokens is None else None,
        tokens_per_microbatch_max=config.optim.microbatch_tokens,
        optimizer_steps_per_update=steps,
        total_iterations=iterations,
        total_env_steps_max=None if iterations is None or per_iteration is None else iterations * per_iteration,
        total_updates=updates,
        total_optimizer_steps=None if updates is None else steps * updates,
        total_episodes=None if iterations is None or episodes is None else episodes * iterations,
        num_evaluations=None
        if iterations is None or in_steps
        else 2 + ((iterations - 1) // interval if interval else 0),
        episodes_per_evaluation=num_tasks * config.eval.states_per_task,
        clip_low=clip_range(config.algorithm)[0],
        clip_high=clip_range(config.algorithm)[1],
        kl_estimator=kl_estimator(config.kl) if config.kl.coef > 0 else None,
    )


def derive_finetune(config: FinetuneConfig) -> FinetuneDerived:
    """The derived values of a supervised run."""
    demos = config.demos
    num_tasks = None
    if demos.path is None and config.reward.labels not in ("pairs", "steps"):
        chosen = [SUITES[suite].num_tasks if demos.task_ids is None else len(demos.task_ids) for suite in demos.suites]
        num_tasks = sum(chosen)
    return FinetuneDerived(
        world_size=world_size(config),
        num_tasks=num_tasks,
        num_demonstrations=None if num_tasks is None else num_tasks * demos.episodes_per_task,
        samples_per_rank=config.optim.batch_size // world_size(config),
        total_samples=config.optim.steps * config.optim.batch_size,
    )


def derived_lines(derived: Derived | FinetuneDerived) -> list[str]:
    """`name: value` for each value that is known."""
    values = ((f.name, getattr(derived, f.name)) for f in fields(derived))
    shown = ((name, f"{value:g}" if isinstance(value, float) else value) for name, value in values)
    return [f"{name}: {value}" for name, value in shown if value is not None]


def length_lines(config: Config) -> list[str]:
    """Notes on the totals of a run whose length is given in environment steps."""
    budget, iterations = config.run.total_env_steps, total_iterations(config)
    if budget is None:
        return []
    ends = f"the run ends with the iteration that reaches run.total_env_steps = {budget}"
    if iterations is None:
        return [f"{ends}; how many iterations that takes is not known, as env.max_steps is not set"]
    if config.run.iterations is not None:
        ends += f", or after run.iterations = {config.run.iterations}"
    return [
        f"{ends}; the totals are for episodes that last to the time limit, and are larger where episodes end sooner"
    ]


def default_run_name(label: str, seed: int, now: datetime) -> str:
    """The default name of a run: the preset's or file's name, the seed and the time."""
    return f"{label}_seed{seed}_{now:%Y%m%d_%H%M%S}"
