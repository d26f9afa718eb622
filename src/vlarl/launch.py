"""From a configuration to the parts of a run. Whatever can be refused is refused here, before anything starts."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from vlarl.algorithms import ALGORITHMS, build_algorithm
from vlarl.algorithms.base import Algorithm
from vlarl.config.checks import check
from vlarl.config.derive import default_run_name
from vlarl.config.load import to_yaml
from vlarl.config.problems import ConfigError
from vlarl.config.schema import Config, EnvConfig, GymConfig
from vlarl.config.suites import cameras_of, suite_facts
from vlarl.envs.base import EnvPool
from vlarl.envs.build import build_pool
from vlarl.errors import UsageError
from vlarl.observability.files import write_atomically
from vlarl.observability.machine import available_cores
from vlarl.observability.run_dir import RunDirectory
from vlarl.policies import load_configured
from vlarl.policies.base import Policy
from vlarl.rewards import Surroundings, build_reward
from vlarl.rewards.base import Reward
from vlarl.rollout.collector import Collector
from vlarl.rollout.curriculum import read_curriculum
from vlarl.rollout.engine import Engine
from vlarl.rollout.tasks import TaskSampler, evaluation_tasks
from vlarl.rollout.torch_engine import TorchEngine
from vlarl.session import Session
from vlarl.training.checkpoint import CheckpointStore, TrainerState, policy_folder, restore
from vlarl.training.learner import Learner
from vlarl.training.swap import trained_weights
from vlarl.types import Task

log = logging.getLogger(__name__)

TABLETOPS = 64  # where env.num_envs is not given: an array operation each, whatever their number


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    policy: Policy
    pool: EnvPool
    engine: Engine
    collector: Collector
    sampler: TaskSampler
    reward: Reward
    algorithm: Algorithm
    learner: Learner
    eval_tasks: list[Task]


def launch(config: Config, checkpoint: Path | None = None) -> Parts:
    """Build everything in this process; `checkpoint` holds the weights to go on from instead of `policy.path`."""
    device = choose_device(config.run.device)
    torch.set_num_threads(config.run.num_threads or available_cores())
    torch.manual_seed(config.run.seed)
    kind = ALGORITHMS[config.algorithm.name]
    surroundings = Surroundings(device, kind.discount(config.algorithm), bootstraps=kind.needs_critic)
    reward = build_reward(config.reward, surroundings)
    policy = build_policy(config, policy_folder(checkpoint) if checkpoint else None, device)
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl, policy)
    refuse_untrainable(policy, config)
    engine = TorchEngine(policy, device, config.rollout.batch_size, config.rollout.cuda_graphs)
    # Rendered at the size that the policy reads, nothing has to be resized in between.
    image_size = config.env.image_size or policy.image_size
    with ExitStack() as stack:
        env = config.env.model_copy(update={"cameras": cameras_of(config.env, policy.num_images)})
        pool = build_pool(env, config.gym, num_envs(env, config.gym), image_size, reward.env_reward)
        stack.callback(pool.close)  # its processes must not outlive a run that is refused
        eval_tasks = evaluation_tasks(
            pool.spec, config.env.task_ids, config.eval.states_per_task, config.run.seed, config.env.protocol
        )
        check_fit(policy, pool, eval_tasks[0])
        parts = Parts(
            policy=policy,
            pool=pool,
            engine=engine,
            collector=Collector(pool, policy, engine, config.env.retries),
            sampler=build_sampler(config, pool, is_new=checkpoint is None),
            reward=reward,
            algorithm=algorithm,
            learner=Learner(policy, algorithm, config, device),
            eval_tasks=eval_tasks,
        )
        stack.pop_all()
    return parts


def num_envs(env: EnvConfig, gym: GymConfig) -> int:
    """How many environments run side by side: as configured, or what suits the suite."""
    facts = suite_facts(env, gym)
    in_processes = facts is not None and facts.in_processes
    return env.num_envs or (available_cores() if in_processes else TABLETOPS)


def build_policy(config: Config, checkpoint: Path | None, device: torch.device) -> Policy:
    """The policy as configured, ready to train; `checkpoint` holds weights to go on from."""
    settings = config.policy
    path = checkpoint or settings.path
    policy = load_configured(settings, path, device, settings.decoder, settings.actions)
    policy.use_statistics(settings.unnorm_key, config.env.suite)
    # A checkpoint to go on from brings its adapters, whatever adapters the run began with.
    lora = config.lora if checkpoint is None else config.lora.model_copy(update={"adapter": None})
    policy.prepare_training(settings, lora, config.run.seed)
    if settings.actions == "hybrid":
        log.warning("policy.actions is hybrid: the regression head is loaded and frozen; RL trains action tokens only")
    return policy


def build_sampler(config: Config, pool: EnvPool, is_new: bool) -> TaskSampler:
    """The task sampler as configured; a new run may begin with what an earlier one learnt about the tasks."""
    sampler = TaskSampler(config, pool.spec)
    if is_new and config.curriculum.start_from is not None:
        sampler.restore(read_curriculum(Path(config.curriculum.start_from), pool.spec.name))
    return sampler


def refuse_untrainable(policy: Policy, config: Config) -> None:
    """Refuse a policy of which nothing but the critic would learn."""
    if not trained_weights(policy):
        raise UsageError(
            f"policy.freeze = '{config.policy.freeze}' leaves nothing for RL to train: set it to none or vision."
        )


def check_fit(policy: Policy, pool: EnvPool, task: Task) -> None:
    """Let the policy read one observation: what does not fit is refused before the run starts."""
    if policy.action_dim != pool.spec.action_dim:
        raise UsageError(
            f"policy.path: the policy's actions have {policy.action_dim} numbers, those of {pool.spec.name} have "
            f"{pool.spec.action_dim}; choose a checkpoint made for this suite."
        )
    try:
        policy.process(pool.reset([0], [task]))
    except ValueError as error:
        raise UsageError(f"policy.path: the policy can't read what {pool.spec.name} shows it: {error}") from error


def open_run(config: Config, resume: Path | None) -> tuple[Parts, Session]:
    """The parts of a run and its session: a new one, or one that goes on from its newest checkpoint."""
    if problems := check(config):  # a configuration made in Python has met the schema alone
        raise ConfigError(problems)
    if resume is None:
        label = f"{config.env.suite}_{config.algorithm.name}"
        root, name = config.run.root, config.run.name or default_run_name(label, config.run.seed, datetime.now())
        RunDirectory.refuse_existing(root, name)
        parts = launch(config)
        directory, state = RunDirectory.create(root, name), TrainerState()
        lock = directory.lock()
    else:
        directory = RunDirectory.open(resume)
        lock = directory.lock()
        checkpoint = CheckpointStore(directory.checkpoints, config.checkpoint.keep).latest()
        parts = launch(config, checkpoint)
        state = restore(parts.learner, checkpoint) if checkpoint else TrainerState()
        parts.sampler.restore(state.sampler)
        parts.engine.load_weights(parts.learner.named_weights(), parts.learner.version)
        directory.truncate_after(state.iteration or -1)  # a run that learnt nothing yet evaluates anew
    write_atomically(directory.config_file, to_yaml(config))
    return parts, Session(config, directory, parts.learner, state, lock, created=resume is None)


def choose_device(wanted: str) -> torch.device:
    """The device asked for; `auto` is a GPU when there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"run.device: {wanted!r} can't be used here ({reason}); try `cpu`.") from error
    return device
