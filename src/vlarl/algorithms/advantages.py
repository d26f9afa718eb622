"""Advantage estimators: pure functions over returns, rewards and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vlarl.policies.base import Level
from vlarl.types import BoolArray, FloatArray, IntArray, Trajectory, Transition, group_members

EQUAL_RETURNS = 1e-6  # float32 sums of equal rewards differ by less


def discounted_return(trajectory: Trajectory, gamma: float) -> float:
    """Sum of the rewards, each discounted by the environment steps before it."""
    rewards, _ = step_rewards(trajectory, gamma)
    return float(rewards @ gamma ** np.arange(len(rewards)))


def outcomes(trajectories: Sequence[Trajectory], gamma: float) -> FloatArray:
    """[N] the discounted return of each trajectory; below 1, `gamma` makes sooner better."""
    return np.array([discounted_return(trajectory, gamma) for trajectory in trajectories], dtype=np.float32)


def returns_differ(returns: FloatArray) -> bool:
    """Whether the members of a group differ, without which a group has no learning signal."""
    return len(returns) == 1 or bool(returns.max() - returns.min() > EQUAL_RETURNS)


def by_group(
    trajectories: Sequence[Trajectory], returns: FloatArray, advantage: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """[N] what `advantage` makes of the returns [G] of each group, in the order of the trajectories."""
    advantages = np.zeros_like(returns)
    for members in group_members(trajectories):
        advantages[members] = advantage(returns[members])
    return advantages


def group_relative(returns: FloatArray, normalize_std: bool, eps: float = 1e-6) -> FloatArray:
    """[G] returns of one group -> how much better each was than the group (GRPO, arXiv:2402.03300).

    The std is the unbiased one. A group of one has mean 0 and std 1: its advantage is its return.
    """
    if len(returns) == 1:
        return returns.astype(np.float32)
    scale = returns.std(ddof=1) + eps if normalize_std else 1.0
    return np.asarray((returns - returns.mean()) / scale, dtype=np.float32)


def leave_one_out(returns: FloatArray) -> FloatArray:
    """[G] returns of one group -> each against the mean of the others (RLOO, arXiv:2402.14740); one alone against 0."""
    others = (returns.sum() - returns) / max(len(returns) - 1, 1)
    return np.asarray(returns - others, dtype=np.float32)


def against_mean(returns: FloatArray, groups: Sequence[IntArray]) -> FloatArray:
    """[N] returns, each against the mean of its group (REINFORCE++ with baseline, arXiv:2501.03262).

    Where a group is a single episode, the mean over the batch is the baseline (Williams 1992).
    """
    advantages = np.zeros_like(returns)
    for members in groups:
        own = returns[members]
        advantages[members] = own - (own.mean() if len(own) > 1 else returns.mean())
    return advantages


def throughout(trajectories: Sequence[Trajectory], advantages: FloatArray) -> list[FloatArray]:
    """One advantage [N] an episode as [T, 1] for each trajectory: the same at every decision."""
    return [
        np.full((len(trajectory.transitions), 1), advantage, dtype=np.float32)
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]


def chunk_rewards(trajectory: Trajectory, gamma: float) -> tuple[FloatArray, FloatArray]:
    """Each decision as one long step: its discounted reward [T] and the discount that lies across it [T]."""
    rewards = [float(t.rewards @ gamma ** np.arange(len(t.rewards))) for t in trajectory.transitions]
    discounts = [gamma**t.num_executed for t in trajectory.transitions]
    return np.array(rewards, dtype=np.float32), np.array(discounts, dtype=np.float32)


def step_rewards(trajectory: Trajectory, gamma: float) -> tuple[FloatArray, FloatArray]:
    """Rewards of the executed steps [S], and the discount after each [S]."""
    rewards = np.concatenate([t.rewards[: t.num_executed] for t in trajectory.transitions])
    return rewards, np.full(len(rewards), gamma, dtype=np.float32)


def token_rewards(trajectory: Trajectory, gamma: float) -> tuple[FloatArray, FloatArray]:
    """Rewards of the executed elements [E], and the discount after each [E].

    A step's reward falls on its last element, and time passes after that one alone.
    """
    rewards, discounts = [], []
    for t in trajectory.transitions:
        steps = t.decided.batch.step[t.decided.index].numpy()[executed_elements(t)]
        is_last = np.ones(len(steps), dtype=np.bool_)
        is_last[:-1] = steps[1:] != steps[:-1]
        rewards.append(np.where(is_last, t.rewards[steps], np.float32(0)))
        discounts.append(np.where(is_last, np.float32(gamma), np.float32(1)))
    return np.concatenate(rewards), np.concatenate(discounts)


REWARDS = {"chunk": chunk_rewards, "step": step_rewards, "token": token_rewards}


def executed_elements(t: Transition) -> BoolArray:
    """[L] which elements of a decision belong to environment steps that ran."""
    made, row = t.decided.batch, t.decided.index
    found: BoolArray = (made.mask[row] & (made.step[row] < t.num_executed)).numpy()
    return found


def executed(trajectory: Trajectory, level: Level, width: int) -> IntArray:
    """[T, V] how many executed steps each value of the decisions stands for: all of a decision, or 1, or 0.

    `width` is V: 1, the steps of a decision, or as many elements as the longest decision of the batch has.
    """
    if level == "chunk":
        return np.array([[t.num_executed] for t in trajectory.transitions])
    counts = np.zeros((len(trajectory.transitions), width), dtype=np.int64)
    for row, t in zip(counts, trajectory.transitions, strict=True):
        if level == "step":
            row[: t.num_executed] = 1
        else:
            row[: t.decided.batch.mask.shape[1]] = executed_elements(t)
    return counts


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


def trajectory_gae(trajectory: Trajectory, values: FloatArray, level: Level, gamma: float, lam: float) -> FloatArray:
    """GAE of a trajectory whose decisions have one value each, one a step or one an element: [T+1, V] -> [T, V].

    The value that follows a decision's last executed step is the first one of the next decision.
    """
    rewards, discounts = REWARDS[level](trajectory, gamma)
    counted = executed(trajectory, level, values.shape[1]) > 0
    if counted.shape[1] != values.shape[1] or counted.sum() != len(rewards):
        raise ValueError(
            f"{values.shape[1]} values a decision don't fit gae_level {level!r}, which has {len(rewards)} in this "
            f"episode where they give {counted.sum()}: attach a critic for this level"
        )
    advantages = np.zeros(counted.shape, dtype=np.float32)
    along = np.append(values[:-1][counted], values[-1, 0])
    advantages[counted] = gae(rewards, discounts, along, trajectory.terminated, lam)
    return advantages


def returns_to_go(trajectory: Trajectory, gamma: float) -> FloatArray:
    """[T, K] the discounted rewards from each executed step on (REINFORCE, Williams 1992; doi:10.1007/BF00992696)."""
    rewards, discounts = step_rewards(trajectory, gamma)
    counted = executed(trajectory, "step", len(trajectory.transitions[0].rewards)) > 0
    returns = np.zeros(counted.shape, dtype=np.float32)
    # Without a critic, with nothing after the end and all of the future counted, GAE is the return.
    returns[counted] = gae(rewards, discounts, np.zeros(len(rewards) + 1, dtype=np.float32), terminated=True, lam=1.0)
    return returns


def discounted_back(trajectory: Trajectory, outcome: float, gamma: float) -> FloatArray:
    """[T, K] an outcome that falls on the last step, as each executed step sees it."""
    rewards = [np.zeros_like(t.rewards) for t in trajectory.transitions]
    rewards[-1][trajectory.transitions[-1].num_executed - 1] = outcome
    return returns_to_go(trajectory.with_rewards(rewards), gamma)


def whiten(
    parts: Sequence[FloatArray],
    counts: Sequence[IntArray],
    *,
    shift_mean: bool,
    lost_degrees: int = 0,
    eps: float = 1e-8,
) -> list[FloatArray]:
    """Arrays of a whole batch brought to std 1, and to mean 0 with `shift_mean`; each value counts as often as `counts`
    says, and one that doesn't count becomes 0."""
    weights = np.concatenate([count.ravel() for count in counts])
    counted = weights > 0
    everything, weights = np.concatenate([part.ravel() for part in parts])[counted], weights[counted]
    if not len(everything):
        return [np.zeros_like(part, dtype=np.float32) for part in parts]
    mean = np.average(everything, weights=weights)
    variance = np.average((everything - mean) ** 2, weights=weights)
    total = weights.sum()
    std = np.sqrt(variance * (total / max(total - lost_degrees, 1)))
    shift = mean if shift_mean else 0.0
    return [
        np.where(count > 0, (part - shift) / (std + eps), 0.0).astype(np.float32)
        for part, count in zip(parts, counts, strict=True)
    ]


def penalize(trajectories: Sequence[Trajectory], ref_kl: Sequence[FloatArray], kl_coef: float) -> list[Trajectory]:
    """The trajectories with a KL penalty in their rewards (arXiv:1909.08593).

    `ref_kl` holds [T, L] for each trajectory; what the elements of a step sum up to is subtracted from its reward.
    """

    def penalized(t: Transition, kl: FloatArray) -> FloatArray:
        step = t.decided.batch.step[t.decided.index].numpy()
        by_step = np.bincount(step, kl[: len(step)], minlength=len(t.rewards))
        return (t.rewards - kl_coef * by_step).astype(np.float32)

    return [
        trajectory.with_rewards([penalized(t, kl) for t, kl in zip(trajectory.transitions, rows, strict=True)])
        for trajectory, rows in zip(trajectories, ref_kl, strict=True)
    ]
