"""The parts of a run on the workers of a Ray cluster."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import ray
import torch

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config
from vlarl.distributed.address import check_address
from vlarl.distributed.cluster import Cluster, Demand, Placement, Resources, wait_started
from vlarl.distributed.curriculum import CurriculumWorker
from vlarl.distributed.engines import EngineGroup, build_torch_engine, build_vllm_engine
from vlarl.distributed.environments import PoolGroup, part_sizes, pool_parts
from vlarl.distributed.learners import LearnerGroup, Rank, RankStore
from vlarl.distributed.rewards import RewardGroup, RewardPart
from vlarl.errors import UsageError
from vlarl.observability.capacity import check_memory_for_envs
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.trace import NoTrace
from vlarl.policies.load import load_acting_policy
from vlarl.rewards import build_bare_reward, contained
from vlarl.rewards.safe import SafeReward
from vlarl.rollout.collector import Collector
from vlarl.rollout.overlong import usable_spec
from vlarl.rollout.sampling import check_sampling, rollout_sampling
from vlarl.rollout.tasks import evaluation_tasks
from vlarl.run.parts import (
    Parts,
    build_sampler,
    check_fit,
    env_with_cameras,
    evaluated_average,
    log_training_warning,
    num_envs,
    reward_context,
)
from vlarl.training.checkpoint import policy_folder
from vlarl.weights.sync import WeightSync

SMALL = Resources(0.0, 0.0)  # what the curriculum takes


def launch_cluster(config: Config, directory: RunDirectory, trace: NoTrace, checkpoint: Path | None) -> Parts:
    """Start all workers; `checkpoint` holds the weights to resume from instead of `policy.path`."""
    if config.distributed.address is not None and not ray.is_initialized():
        check_address(config.distributed.address)
    checkpoint = checkpoint and checkpoint.absolute()  # workers may be elsewhere
    folder = policy_folder(checkpoint) if checkpoint else None
    policy = load_acting_policy(config, folder, torch.device("meta"))
    check_sampling(policy, rollout_sampling(config.rollout), config.prompts.max_tokens or 0)
    if folder is None:
        log_training_warning(config)
    env = env_with_cameras(config, policy)
    slots = num_envs(env, config.gym)
    if config.distributed.address is None:  # the cluster is this machine
        check_memory_for_envs(env.suite, env.num_envs)
    with ExitStack() as stack:
        cluster = Cluster(config.distributed, directory.logs.absolute(), config.run.num_threads or 1, trace)
        stack.callback(cluster.close)
        image_size = config.env.image_size or policy.image_size
        sizes = part_sizes(env, config.gym, slots, config.distributed.num_env_workers)
        reward = None if config.distributed.num_reward_workers else _reward_here(config)
        # What can't be built is refused before anything starts. A reward worker may say later what environments give.
        env_reward = reward.env_reward if reward else "sparse"
        shares = pool_parts(env, config.gym, sizes, image_size, env_reward, config.prompts)
        cluster.connect(Demand.of(config, len(sizes), on_gpus=False).total("CPU"))
        on_gpus = _on_gpus(config.run.device, cluster.num_gpus)
        demand = Demand.of(config, len(sizes), on_gpus)
        cluster.reserve(demand)
        engine_placements, env_placements, reward_placements = cluster.other_placements(demand)
        build_rank = partial(Rank, config, demand.num_learners, demand.learner.gpus > 0)
        learners = [
            cluster.worker(f"learner {rank}", partial(build_rank, rank), demand.learner, place)
            for rank, place in enumerate(cluster.learner_placements(demand))
        ]
        build_engine = (
            partial(build_vllm_engine, config)
            if config.vllm.num_engines
            else partial(build_torch_engine, config, demand.engine.gpus > 0)
        )
        engines = [
            cluster.worker(f"engine {index}", build_engine, demand.engine, place)
            for index, place in enumerate(engine_placements)
        ]
        if reward is None:
            reward = _reward_there(config, cluster, demand, reward_placements)
            shares = pool_parts(env, config.gym, sizes, image_size, reward.env_reward, config.prompts)
        envs = [
            cluster.worker(
                f"environments {index}", share.build, demand.env, place, share.variables, timeout_s=config.env.timeout_s
            )
            for index, (share, place) in enumerate(zip(shares, env_placements, strict=True))
        ]
        wait_started(envs)
        pool = PoolGroup(envs, sizes, config.env.lockstep)
        spec = usable_spec(config, policy, pool)
        eval_tasks = evaluation_tasks(
            spec, config.env.task_ids, config.eval.states_per_task, config.run.seed, config.env.protocol
        )
        check_fit(policy, pool, eval_tasks[0])
        curriculum = cluster.worker("curriculum", partial(build_sampler, config, spec, checkpoint is None), SMALL)
        wait_started(learners)
        group = LearnerGroup(learners, config, policy)
        group.join(checkpoint)
        wait_started([curriculum, *engines])
        engine = EngineGroup(engines)
        engine.refresh = partial(group.send_weights, engine)
        parts = Parts(
            policy=policy,
            pool=pool,
            engine=engine,
            collector=Collector(pool, policy, engine, config.env.retries),
            sampler=CurriculumWorker(curriculum),
            reward=reward,
            algorithm=build_algorithm(config.algorithm, config.rollout.temperature, config.kl),
            learner=group,
            weights=WeightSync(group, engine, engine.refresh, evaluated_average(group)),
            eval_tasks=eval_tasks,
            open_store=partial(RankStore, group),
            close=cluster.close,
        )
        stack.pop_all()
    return parts


def _reward_here(config: Config) -> SafeReward:
    """The reward, in the driver."""
    return contained(build_bare_reward(config.reward, reward_context(config, torch.device("cpu"))), config.reward)


def _reward_there(config: Config, cluster: Cluster, demand: Demand, places: list[Placement]) -> SafeReward:
    """The reward of workers."""
    there = reward_context(config, torch.device("cuda" if demand.reward.gpus else "cpu"))
    build = partial(RewardPart, config.reward, there)
    workers = [cluster.worker(f"reward {i}", build, demand.reward, place) for i, place in enumerate(places)]
    wait_started(workers)
    return contained(RewardGroup(workers), config.reward)


def _on_gpus(device: str, num_gpus: float) -> bool:
    """Whether learners and engines run on GPUs: as configured, or where the cluster has some."""
    if device == "auto":
        return num_gpus > 0
    wanted = device.startswith("cuda")
    if wanted and not num_gpus:
        raise UsageError(f"run.device = {device!r}: no machine of the cluster has a GPU; use cpu, or auto.")
    return wanted
