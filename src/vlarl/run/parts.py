"""What a run is made of, and how each part is made from a configuration.

local.py puts them together in this process, cluster.py on the workers of a Ray cluster.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlarl.algorithms import ALGORITHMS
from vlarl.algorithms.base import Algorithm
from vlarl.config.known import BATCHED_ENVS, GYM
from vlarl.config.schema import Config, EnvConfig, GymConfig
from vlarl.config.suites import cameras_of, suite_facts, suites_of
from vlarl.envs.base import EnvPool, SuiteSpec
from vlarl.errors import UsageError
from vlarl.observability.capacity import default_processes
from vlarl.observability.samples import evenly_chosen
from vlarl.policies.base import Policy
from vlarl.policies.load import training_warning
from vlarl.rewards import RewardContext
from vlarl.rewards.safe import SafeReward
from vlarl.rollout.collector import Collector
from vlarl.rollout.curriculum import read_curriculum
from vlarl.rollout.engines.base import Engine
from vlarl.rollout.engines.torch import PassCounts
from vlarl.rollout.epochs import build_task_sampler
from vlarl.rollout.segments import Segments
from vlarl.rollout.steps import NO_RECORDING, RecordingPlan
from vlarl.rollout.tasks import Sampler, TaskSampler
from vlarl.training.base import Store, Trainer
from vlarl.types import Task, Trajectory
from vlarl.weights.sync import Average, WeightSync

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a run is made of. The policy reads observations and codes actions; it need not have weights."""

    policy: Policy
    pool: EnvPool
    engine: Engine
    collector: Collector
    sampler: Sampler
    reward: SafeReward
    algorithm: Algorithm
    learner: Trainer
    weights: WeightSync  # keeps the engine at the learner's weights
    eval_tasks: list[Task]
    open_store: Callable[[Path], Store]  # of the folder for checkpoints
    close: Callable[[], None]  # ends everything that was started
    readable: Callable[[Sequence[Trajectory]], list[Trajectory]] = list  # those whose inputs are still there
    segments: Segments | None = None  # of rollouts of a fixed length; None: rollouts are whole episodes
    pass_counts: Callable[[], PassCounts] = PassCounts  # what the engine's passes have taken so far, where it is here
    make_way: Callable[[], bool] = lambda: False  # called around updates, which may need the memory of rollouts


@dataclass(frozen=True)
class ActingParts:
    """What an evaluation is made of. The policy reads observations and codes actions; it need not have weights."""

    policy: Policy
    pool: EnvPool
    engine: Engine
    close: Callable[[], None]  # ends everything that was started


def num_envs(env: EnvConfig, gym: GymConfig, reader_mib: int = 0) -> int:
    """How many environments run side by side: as configured, or what suits the suite. `reader_mib` is the memory of the
    policy beside each simulator."""
    facts = suite_facts(env, gym)
    if env.num_envs is not None:
        return env.num_envs
    if facts is None or not facts.in_processes:
        return BATCHED_ENVS
    return default_processes(env.suite, reader_mib)


def env_with_cameras(config: Config, policy: Policy) -> EnvConfig:
    """The environments with as many cameras as the policy reads."""
    return config.env.model_copy(update={"cameras": cameras_of(config.env, policy.num_images)})


def reward_context(config: Config, device: torch.device) -> RewardContext:
    """What a reward must know of the run."""
    kind = ALGORITHMS[config.algorithm.name]
    return RewardContext(device, kind.discount(config.algorithm), bootstraps=kind.needs_critic)


def log_training_warning(config: Config) -> None:
    """Say what the family of the initial policy knows to be wrong with it as a start of RL."""
    path = config.policy.path
    if (warning := training_warning(path, config.policy.base)) is not None:
        log.warning("policy.path = %r: %s", path, warning)


def evaluated_average(learner: Trainer) -> Average | None:
    """The average of the weights that evaluations use; None where they use the newest weights."""
    return learner.average if learner.config.eval.use_ema else None


def build_sampler(config: Config, spec: SuiteSpec, is_new: bool) -> TaskSampler:
    """The task sampler as configured; a new run may begin with what an earlier one found about the tasks."""
    sampler = build_task_sampler(config, spec)
    if is_new and config.curriculum.start_from is not None:
        sampler.restore(read_curriculum(Path(config.curriculum.start_from), suites_of(config.env)))
    return sampler


def recording_plan(config: Config) -> RecordingPlan:
    """Which training episodes are recorded: one in so many is saved, counted over the run, and some of an iteration
    become videos."""
    rollout = config.rollout
    count = math.ceil(rollout.num_groups * rollout.oversample) * rollout.group_size  # episodes of a batch
    shown = frozenset(evenly_chosen(count, rollout.videos))

    def index(task: Task) -> int:
        """The episode's index in its batch; segments count their episodes as groups, over the run."""
        return task.group * task.group_size + task.member

    def is_saved(task: Task) -> bool:
        return (max(task.iteration - 1, 0) * count + index(task)) % rollout.save_every == 0

    if rollout.save == "none":
        return RecordingPlan(video=lambda task: index(task) in shown) if shown else NO_RECORDING
    return RecordingPlan(lambda task: index(task) in shown, is_saved)


def build_segments(config: Config, collector: Collector, sampler: Sampler) -> Segments | None:
    """What collects rollouts of a fixed length, where they are configured."""
    num_steps = config.rollout.num_steps
    return None if num_steps is None else Segments(collector, sampler, num_steps, recording_plan(config))


def check_fit(policy: Policy, pool: EnvPool, task: Task) -> None:
    """Let the policy read one observation: what does not fit is refused before the run starts."""
    if policy.action_dim != pool.spec.action_dim:
        remedy = "choose a checkpoint made for this suite"
        if pool.spec.name == GYM and pool.spec.action_dim < policy.action_dim:
            chosen = " ".join(str(index) for index in range(pool.spec.action_dim))
            remedy += f", or say which of the policy's dimensions the environment takes, such as --gym.actions {chosen}"
        raise UsageError(
            f"policy.path: the policy's actions have {policy.action_dim} dimensions, those of {pool.spec.name} have "
            f"{pool.spec.action_dim}; {remedy}."
        )
    try:
        (seen,) = pool.reset([0], [task])
        if seen.inputs is None:  # otherwise it was read beside the environment
            policy.process([seen])
    except ValueError as error:
        raise UsageError(f"policy.path: the policy can't read what {pool.spec.name} shows it: {error}") from error
