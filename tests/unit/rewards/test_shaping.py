"""Potential-based shaping: the terms telescope, so that the return of an episode does not change."""

import numpy as np
import pytest

from vlarl.algorithms.advantages import chunk_rewards, discounted_return
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.rewards.outcome import SparseReward
from vlarl.rewards.shaping import ShapedReward, shaping_terms
from vlarl.types import Task


def steps(trajectory) -> list[float]:
    return np.concatenate([t.rewards[: t.num_executed] for t in trajectory.transitions]).tolist()


def test_terms_of_known_potentials():
    assert shaping_terms(np.array([0.0, 1.0, 3.0, 2.0]), 0.5).tolist() == [0.5, 0.5, -2.0]
    assert shaping_terms(np.array([2.0, 2.0]), 1.0).tolist() == [0.0]


def test_an_episode_that_succeeds(trajectory):
    """Progress 0.25 and 0.5, then the goal: the potential of the end is 0, whatever the last dense reward."""
    won = trajectory([[0.25, 0.25], [0.5, 0.0]], num_executed=[2, 1], terminated=True, success=True)
    reward = ShapedReward(gamma=0.5, scale=2.0)
    assert reward.env_reward == "dense"
    assert steps(reward.score(won)) == [0.5 * 0.5, 0.5 * 1.0 - 0.5, 0.0 - 1.0 + 1.0]
    assert reward.score(won).transitions[1].rewards.tolist() == [0.0, 0.0], "steps that did not run get no reward"
    assert steps(won) == [0.25, 0.25, 0.5], "the original stays as it was"


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.9, 0.5])
@pytest.mark.parametrize("terminated", [True, False])
def test_the_discounted_return_is_that_of_success_alone(trajectory, gamma, terminated):
    rng = np.random.default_rng(4)
    reward = ShapedReward(gamma, scale=3.0)
    for seed in range(5):
        progress = rng.normal(size=(6, 4)).astype(np.float32)
        progress[-1, 2:] = 0.0
        executed = [4] * 5 + [2]
        episode = trajectory(progress, num_executed=executed, terminated=terminated, success=terminated, seed=seed)
        sparse = discounted_return(SparseReward().score(episode), gamma)
        assert discounted_return(reward.score(episode), gamma) == pytest.approx(sparse, abs=1e-5)


def test_from_every_decision_on_only_the_potential_of_its_own_state_is_missing(trajectory):
    """Reward to go changes by -phi(s), which no action changes: the best action stays the best, and no policy gradient
    is moved in expectation. With a critic the cut-off end keeps its potential, which its value lacks by as much."""
    gamma, progress = 0.9, np.random.default_rng(5).normal(size=(4, 3)).astype(np.float32)
    potential = np.concatenate([[0.0], progress.reshape(-1).cumsum()])
    for terminated, bootstraps in ((True, True), (False, True), (False, False)):
        episode = trajectory(progress, terminated=terminated, success=terminated)
        shaped, sparse = ShapedReward(gamma, 1.0, bootstraps).score(episode), SparseReward().score(episode)
        end_potential = potential[-1] if bootstraps and not terminated else 0.0
        for first in range(4):
            rest = [
                sum(chunk_rewards(e, gamma)[0][t] * gamma ** (3 * (t - first)) for t in range(first, 4))
                for e in (shaped, sparse)
            ]
            expected = gamma ** (12 - 3 * first) * end_potential - potential[3 * first]
            assert rest[0] - rest[1] == pytest.approx(expected, abs=1e-5)


def test_the_tabletops_dense_reward_is_progress_that_shaping_can_read(trajectory):
    """The environment's dense rewards add up to the progress, so the potential is the progress since the start."""
    pool = TabletopPool("tabletop_spatial", 1, image_size=8, reward="dense")
    pool.reset([0], [Task("tabletop_spatial", 0, 0, 0)])
    before = pool.world.progress(np.array([0]))[0]
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 8, 7)).astype(np.float32)
    (outcome,) = pool.step_chunk([0], actions)
    now = pool.world.progress(np.array([0]))[0]
    assert abs(now - before) > 1e-3
    shaped = ShapedReward(1.0, bootstraps=True).score(trajectory([outcome.rewards]))
    assert sum(steps(shaped)) == pytest.approx(now - before, abs=1e-6)
