"""The parts of a run on the workers of a Ray cluster."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import ray
import torch

from vlarl.algorithms import build_algorithm
from vlarl.config.derive import engines_sleep
from vlarl.config.known import is_prompts
from vlarl.config.schema import Config
from vlarl.config.suites import suite_facts
from vlarl.distributed.address import check_address
from vlarl.distributed.cluster import Cluster, Placement, wait_started
from vlarl.distributed.curriculum import CurriculumWorker
from vlarl.distributed.demand import Demand, Resources
from vlarl.distributed.engine_start import EngineStart
from vlarl.distributed.engines import EngineGroup, build_acting_engine, build_torch_engine, build_vllm_engine
from vlarl.distributed.environments import PoolGroup, part_sizes, pool_parts
from vlarl.distributed.learners import LearnerGroup, Rank, RankStore
from vlarl.distributed.reading import Reading
from vlarl.distributed.rewards import RewardGroup, RewardPart, with_images
from vlarl.distributed.shared_folder import EVALUATION_FOLDER
from vlarl.distributed.store_size import bytes_needed, check_stores, default_store_mib, rows_at_once, steps_at_once
from vlarl.distributed.stored_rows import readable
from vlarl.errors import UsageError
from vlarl.observability.capacity import READER_MIB, check_memory_for_envs
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.trace import NoTrace
from vlarl.policies.base import Policy
from vlarl.policies.load import load_acting_policy
from vlarl.rewards import build_bare_reward, contained
from vlarl.rewards.safe import SafeReward
from vlarl.rollout.collector import Collector
from vlarl.rollout.sampling import check_sampling, rollout_sampling
from vlarl.rollout.tasks import evaluations_of
from vlarl.rollout.usable import usable_spec
from vlarl.run.memory import ON_A_CLUSTER
from vlarl.run.parts import (
    ActingParts,
    Parts,
    build_sampler,
    build_segments,
    check_fit,
    env_with_cameras,
    evaluated_average,
    log_training_warning,
    num_envs,
    reward_context,
)
from vlarl.training.checkpoint import policy_folder
from vlarl.weights.sync import WeightSync

log = logging.getLogger(__name__)

SMALL = Resources(0.0, 0.0)  # what the curriculum takes


def launch_cluster(config: Config, directory: RunDirectory, trace: NoTrace, checkpoint: Path | None) -> Parts:
    """Start all workers; `checkpoint` holds the weights to resume from instead of `policy.path`."""
    if config.distributed.address is not None and not ray.is_initialized():
        check_address(config.distributed.address)
    if config.run.memory_gb is not None:  # of a preset: given as an option it is refused
        log.warning(ON_A_CLUSTER, config.run.memory_gb)
    checkpoint = checkpoint and checkpoint.absolute()  # workers may be elsewhere
    folder = policy_folder(checkpoint) if checkpoint else None
    policy = load_acting_policy(config, folder, torch.device("meta"))
    check_sampling(policy, rollout_sampling(config.rollout), config.prompts.max_tokens or 0)
    if folder is None:
        log_training_warning(config)
    env = env_with_cameras(config, policy)
    slots = num_envs(env, config.gym, READER_MIB)
    if config.distributed.address is None:  # the cluster is this machine
        check_memory_for_envs(env.suite, env.num_envs, reader_mib=READER_MIB)
    with ExitStack() as stack:
        cluster = Cluster(config.distributed, directory.logs.absolute(), config.run.num_threads or 1, trace)
        stack.callback(cluster.close)
        image_size = config.env.image_size or policy.image_size
        sizes = part_sizes(env, config.gym, slots, config.distributed.num_env_workers)
        reward = None if config.distributed.num_reward_workers else _reward_here(config)
        # What can't be built is refused before anything starts. A reward worker may say later what environments give.
        env_reward = reward.env_reward if reward else "sparse"
        pool_parts(env, config.gym, sizes, image_size, env_reward, config.prompts)
        cluster.connect(
            Demand.of(config, len(sizes), on_gpus=False).total("CPU"),
            _store_here(config, slots, policy, reward is None or reward.reads_images),
        )
        on_gpus = choose_gpus(config.run.device, cluster.num_gpus)
        demand = Demand.of(config, len(sizes), on_gpus)
        cluster.reserve(demand)
        engine_placements, env_placements, reward_placements = cluster.other_placements(demand)
        build_rank = partial(Rank, config, demand.num_learners, demand.learner.gpus > 0)
        learners = [
            cluster.worker(f"learner {rank}", partial(build_rank, rank), demand.learner, place)
            for rank, place in enumerate(cluster.learner_placements(demand))
        ]
        sleeps = _sleeps(config, demand)
        build_engine = (
            partial(build_vllm_engine, config, sleeps)
            if config.vllm.num_engines
            else partial(build_torch_engine, config, demand.engine.gpus > 0)
        )
        # vLLM takes its fraction of the memory that is free when it starts.
        engine_start = EngineStart(
            lambda: [
                cluster.worker(f"engine {index}", build_engine, demand.engine, place)
                for index, place in enumerate(engine_placements)
            ],
            after_learners=config.vllm.num_engines > 0 and demand.fit_on_one_gpu,
        )
        if reward is None:
            reward = _reward_there(config, cluster, demand, reward_placements)
        reading = Reading(config, _keeps_images(config, reward))
        env_parts = pool_parts(env, config.gym, sizes, image_size, reward.env_reward, config.prompts, reading)
        envs = [
            cluster.worker(
                f"environments {index}", part.build, demand.env, place, part.variables, timeout_s=config.env.timeout_s
            )
            for index, (part, place) in enumerate(zip(env_parts, env_placements, strict=True))
        ]
        wait_started(envs)
        pool = PoolGroup(envs, sizes, config.env.lockstep, reading)
        spec = usable_spec(config, policy, pool)
        eval_tasks = evaluations_of(config, spec)
        check_fit(policy, pool, eval_tasks[0])
        longest = max(task.max_steps for suite in spec.suites for task in suite.tasks)
        rows = rows_at_once(config, slots, longest, policy.num_steps)
        saved = steps_at_once(config, slots, longest) * 3 * policy.num_images * image_size**2
        check_stores(config, bytes_needed(config, rows, pool.row_bytes, saved), pool.machines())
        curriculum = cluster.worker("curriculum", partial(build_sampler, config, spec, checkpoint is None), SMALL)
        wait_started(learners)
        group = LearnerGroup(learners, config, policy)
        engines = engine_start.with_learners(partial(group.join, checkpoint))
        wait_started([curriculum, *engines])
        engine = EngineGroup(engines)
        engine.refresh = partial(group.refresh, engine)
        if sleeps:
            group.before_training = engine.sleep
        collector, sampler = Collector(pool, policy, engine, config.env.retries), CurriculumWorker(curriculum)
        parts = Parts(
            policy=policy,
            pool=pool,
            engine=engine,
            collector=collector,
            sampler=sampler,
            reward=reward,
            algorithm=build_algorithm(config.algorithm, config.rollout.temperature, config.kl),
            learner=group,
            weights=WeightSync(group, engine, partial(group.send_weights, engine), evaluated_average(group)),
            eval_tasks=eval_tasks,
            open_store=partial(RankStore, group),
            close=cluster.close,
            readable=readable,
            segments=build_segments(config, collector, sampler),
        )
        stack.pop_all()
    return parts


def launch_evaluation(config: Config, num_slots: int, logs: Path) -> ActingParts:
    """Start environments and engines alone, for an evaluation of `policy.path`, whose weights each engine reads."""
    if config.distributed.address is not None and not ray.is_initialized():
        check_address(config.distributed.address)
    policy = load_acting_policy(config, None, torch.device("meta"))
    env = env_with_cameras(config, policy)
    sizes = part_sizes(env, config.gym, num_slots, config.distributed.num_env_workers)
    image_size = config.env.image_size or policy.image_size
    reading = Reading(config, _keeps_samples(config))
    parts = pool_parts(env, config.gym, sizes, image_size, "sparse", config.prompts, reading)
    with ExitStack() as stack:
        threads = config.run.num_threads or 1
        cluster = Cluster(config.distributed, logs.absolute(), threads, NoTrace(), EVALUATION_FOLDER)
        stack.callback(cluster.close)
        cluster.connect(Demand.of(config, len(sizes), on_gpus=False).without_learners().total("CPU"))
        on_gpus = choose_gpus(config.run.device, cluster.num_gpus)
        demand = Demand.of(config, len(sizes), on_gpus).without_learners()
        cluster.reserve(demand)
        engine_placements, env_placements, _ = cluster.other_placements(demand)
        build = (
            partial(build_vllm_engine, config, sleeps=False)
            if config.vllm.num_engines
            else partial(build_acting_engine, config, demand.engine.gpus > 0)
        )
        engines = [
            cluster.worker(f"engine {index}", build, demand.engine, place)
            for index, place in enumerate(engine_placements)
        ]
        envs = [
            cluster.worker(
                f"environments {index}", part.build, demand.env, place, part.variables, timeout_s=config.env.timeout_s
            )
            for index, (part, place) in enumerate(zip(parts, env_placements, strict=True))
        ]
        wait_started([*envs, *engines])
        engine = EngineGroup(engines)
        engine.refresh = _nothing_to_send
        pool = PoolGroup(envs, sizes, config.env.lockstep, reading)
        acting = ActingParts(policy, pool, engine, cluster.close)
        stack.pop_all()
    return acting


def _sleeps(config: Config, demand: Demand) -> bool:
    """Whether vLLM engines release their GPU's memory during updates."""
    sleeps = engines_sleep(config, demand.share_gpus)
    if config.vllm.sleep and not sleeps:
        raise UsageError(
            "vllm.sleep = true: engines and learners don't share GPUs here, since no machine of the cluster has one or "
            "distributed.learner_gpus or engine_gpus is 0; leave vllm.sleep out."
        )
    return sleeps


def _nothing_to_send() -> None:
    """An engine that was replaced has read the weights of the checkpoint already."""


def _reward_here(config: Config) -> SafeReward:
    """The reward, in the driver."""
    reward = build_bare_reward(config.reward, reward_context(config, torch.device("cpu")))
    return contained(with_images(reward), config.reward)


def _reward_there(config: Config, cluster: Cluster, demand: Demand, places: list[Placement]) -> SafeReward:
    """The reward of workers."""
    there = reward_context(config, torch.device("cuda" if demand.reward.gpus else "cpu"))
    build = partial(RewardPart, config.reward, there)
    workers = [cluster.worker(f"reward {i}", build, demand.reward, place) for i, place in enumerate(places)]
    wait_started(workers)
    return contained(RewardGroup(workers), config.reward)


def _store_here(config: Config, slots: int, policy: Policy, with_images: bool) -> int:
    """MiB of the object store of a cluster that this run starts."""
    facts = suite_facts(config.env, config.gym)
    rows = rows_at_once(config, slots, facts.max_steps, policy.num_steps) if facts and facts.max_steps else None
    steps = steps_at_once(config, slots, facts.max_steps) if facts and facts.max_steps else 0
    return default_store_mib(config, rows, 3 * policy.num_images * policy.image_size**2, with_images, steps)


def _keeps_images(config: Config, reward: SafeReward) -> bool:
    """Whether images are read after the policy has read them: by the reward, or for samples of prompts."""
    return reward.reads_images or _keeps_samples(config)


def _keeps_samples(config: Config) -> bool:
    return is_prompts(config.env.suite) and config.logging.samples > 0


def choose_gpus(device: str, num_gpus: float) -> bool:
    """Whether learners and engines run on GPUs: as configured, or where the cluster has some."""
    if device == "auto":
        return num_gpus > 0
    wanted = device.startswith("cuda")
    if wanted and not num_gpus:
        raise UsageError(f"run.device = {device!r}: no machine of the cluster has a GPU; use cpu, or auto.")
    return wanted
