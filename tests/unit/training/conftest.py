"""Learners with real tiny models, and batches with random targets for their critics."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.base import Estimate
from vlarl.config.schema import Config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.training.batch import build_batch
from vlarl.training.critic import values_per_decision
from vlarl.training.learner import Learner
from vlarl.types import TrainBatch, Trajectory


@pytest.fixture
def build() -> Callable[[OpenVLAPolicy, Config], Learner]:
    """build(policy, config): a learner on the CPU; give small `algorithm.critic_hidden` for a small critic."""

    def make(policy: OpenVLAPolicy, config: Config) -> Learner:
        algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl, policy)
        return Learner(policy, algorithm, config, torch.device("cpu"))

    return make


@pytest.fixture
def learner_batch() -> Callable[[Learner, Sequence[Trajectory]], TrainBatch]:
    """learner_batch(learner, episodes): a batch with random advantages, and value targets if there is a critic."""

    def make(learner: Learner, episodes: Sequence[Trajectory]) -> TrainBatch:
        rng = np.random.default_rng(1)
        width = values_per_decision(learner.policy, learner.config)
        estimates = []
        for episode in episodes:
            count = len(episode.transitions)
            advantages, returns, values = (rng.normal(size=(count, width)).astype(np.float32) for _ in range(3))
            targets = (returns, values) if learner.algorithm.needs_critic else (None, None)
            estimates.append(Estimate(episode, advantages, *targets))
        return build_batch(estimates, learner.policy)

    return make
