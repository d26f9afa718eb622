"""Advantage estimators: pure functions over returns, rewards and values."""

from __future__ import annotations

import numpy as np

from vlarl.types import FloatArray, Trajectory

SPREAD = 1e-6  # float32 sums of equal rewards differ by less


def group_relative(returns: FloatArray, normalize_std: bool, eps: float = 1e-6) -> FloatArray:
    """[G] returns of one group -> how much better each was than the group (GRPO, arXiv:2402.03300).

    The standard deviation is the unbiased one. A group of one has mean 0 and deviation 1: its advantage is its return.
    """
    if len(returns) == 1:
        return returns.astype(np.float32)
    scale = returns.std(ddof=1) + eps if normalize_std else 1.0
    return np.asarray((returns - returns.mean()) / scale, dtype=np.float32)


def discounted_return(trajectory: Trajectory, gamma: float) -> float:
    """Sum of the rewards, each discounted by the environment steps before it."""
    rewards = np.concatenate([t.rewards[: t.num_executed] for t in trajectory.transitions])
    return float(rewards @ gamma ** np.arange(len(rewards)))


def has_spread(returns: FloatArray) -> bool:
    """Whether the members of a group differ, without which a group teaches nothing."""
    return len(returns) == 1 or bool(returns.max() - returns.min() > SPREAD)


def chunk_rewards(trajectory: Trajectory, gamma: float) -> tuple[FloatArray, FloatArray]:
    """Each decision as one long step: its discounted reward [T] and the discount that lies across it [T]."""
    rewards = [float(t.rewards @ gamma ** np.arange(len(t.rewards))) for t in trajectory.transitions]
    discounts = [gamma**t.num_executed for t in trajectory.transitions]
    return np.array(rewards, dtype=np.float32), np.array(discounts, dtype=np.float32)


def gae(rewards: FloatArray, discounts: FloatArray, values: FloatArray, terminated: bool, lam: float) -> FloatArray:
    """Generalised advantage estimate (arXiv:1506.02438) of one trajectory.

    `values` [T+1] ends with the value of the last observation: it stands for the rest of an episode that the time limit
    cut off, and counts for nothing after one that terminated.
    """
    advantages = np.zeros_like(rewards)
    last = np.float32(0.0)
    for t in reversed(range(len(rewards))):
        goes_on = np.float32(0.0 if terminated and t == len(rewards) - 1 else 1.0)
        delta = rewards[t] + discounts[t] * goes_on * values[t + 1] - values[t]
        last = delta + discounts[t] * lam * goes_on * last
        advantages[t] = last
    return advantages
