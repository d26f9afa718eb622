"""Learners with real tiny models, and batches with random targets for their critics."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.base import Estimate
from vlarl.config.schema import Config
from vlarl.decisions import TrainBatch
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.training.batch import build_batch, with_estimates
from vlarl.training.learner import Learner
from vlarl.types import Trajectory


@pytest.fixture
def build() -> Callable[[OpenVLAPolicy, Config], Learner]:
    """build(policy, config): a learner on the CPU; give small `algorithm.critic_hidden` for a small critic."""

    def make(policy: OpenVLAPolicy, config: Config) -> Learner:
        algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
        return Learner(policy, algorithm, config, torch.device("cpu"))

    return make


@pytest.fixture
def learner_batch() -> Callable[[Learner, Sequence[Trajectory]], TrainBatch]:
    """learner_batch(learner, episodes): a batch with random advantages, and value targets if there is a critic."""

    def make(learner: Learner, episodes: Sequence[Trajectory]) -> TrainBatch:
        rng = np.random.default_rng(1)
        level, policy = learner.algorithm.level, learner.policy
        width = {"chunk": 1, "step": policy.num_steps, "token": policy.num_steps * policy.action_dim}[level]
        estimates, values = [], []
        for episode in episodes:
            shape = (len(episode.transitions), width)
            advantages, returns, old_values = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
            estimates.append(Estimate(advantages, returns if learner.algorithm.needs_critic else None))
            values.append(torch.from_numpy(old_values))
        batch = with_estimates(build_batch(episodes), episodes, estimates, level).to("cpu")  # with its inputs joined
        return replace(batch, old_values=torch.cat(values)) if learner.algorithm.needs_critic else batch

    return make
