"""The parts of a run in this process."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config
from vlarl.data.imitation import build_ptx
from vlarl.devices import choose_device
from vlarl.envs.build import build_pool
from vlarl.recording import graph_recorder, release_recordings
from vlarl.rewards import build_reward
from vlarl.rollout.collector import Collector
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.sampling import check_sampling, rollout_sampling
from vlarl.rollout.tasks import evaluations_of
from vlarl.rollout.usable import usable_spec
from vlarl.run.memory import fit_to_device
from vlarl.run.parts import (
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
from vlarl.training.checkpoint import CheckpointStore, policy_folder
from vlarl.training.learner import Learner
from vlarl.training.prepare import load_trained_policy
from vlarl.weights.sync import WeightSync


def launch_here(config: Config, checkpoint: Path | None = None) -> Parts:
    """Build everything in this process."""
    device = choose_device(config.run.device)
    torch.manual_seed(config.run.seed)
    reward = build_reward(config.reward, reward_context(config, device))
    config, plan = fit_to_device(config, device)
    policy = load_trained_policy(config, policy_folder(checkpoint) if checkpoint else None, device)
    check_sampling(policy, rollout_sampling(config.rollout), config.prompts.max_tokens or 0)
    if checkpoint is None:
        log_training_warning(config)
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
    is_scarce = plan is not None and plan.recorded == "released"
    if is_scarce and device.type == "cuda":
        graph_recorder(device).scarce = True
    engine = TorchEngine(policy, device, config.rollout.batch_size, config.rollout.cuda_graphs)
    # Rendered at the size that the policy reads, nothing has to be resized in between.
    image_size = config.env.image_size or policy.image_size
    with ExitStack() as stack:
        env = env_with_cameras(config, policy)
        pool = build_pool(env, config.gym, num_envs(env, config.gym), image_size, reward.env_reward, config.prompts)
        stack.callback(pool.close)  # its processes must not outlive a run that is refused
        spec = usable_spec(config, policy, pool)
        eval_tasks = evaluations_of(config, spec)
        check_fit(policy, pool, eval_tasks[0])
        collector = Collector(pool, policy, engine, config.env.retries)
        sampler = build_sampler(config, spec, is_new=checkpoint is None)
        learner = Learner(policy, algorithm, config, device, ptx=build_ptx(config, policy))
        parts = Parts(
            policy=policy,
            pool=pool,
            engine=engine,
            collector=collector,
            sampler=sampler,
            reward=reward,
            algorithm=algorithm,
            learner=learner,
            # The engine runs the learner's own policy: a sync copies nothing.
            weights=WeightSync(
                learner, engine, lambda: engine.weights_changed(learner.version), evaluated_average(learner)
            ),
            eval_tasks=eval_tasks,
            open_store=lambda folder: CheckpointStore(
                folder, config.checkpoint.keep, max_total_gib=config.checkpoint.max_total_gib
            ),
            close=pool.close,
            segments=build_segments(config, collector, sampler),
            pass_counts=lambda: engine.counts,
            make_way=partial(release_recordings, device) if is_scarce else lambda: False,
        )
        stack.pop_all()
    return parts
