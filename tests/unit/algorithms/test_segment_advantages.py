"""GAE of segments, against sums by hand in float64."""

from dataclasses import replace

import numpy as np
import pytest
from fakes.decisions import transition

from vlarl.algorithms.advantages import trajectory_gae
from vlarl.rewards.base import Reward
from vlarl.rewards.combined import CombinedReward
from vlarl.rewards.outcome import DenseReward, SparseReward
from vlarl.rewards.rules import RulesReward
from vlarl.rewards.shaping import ShapedReward
from vlarl.types import Earlier, Observation, Task, Trajectory

K, D = 4, 3  # steps of a decision, dimensions of an action
GAMMA, LAM = 0.97, 0.9
WIDTH = {"chunk": 1, "step": K, "token": K * D}


def observed(step: int) -> Observation:
    return Observation(np.zeros((1, 1, 1, 3), np.uint8), np.full(8, step // 6, np.float32), "")


def episode(rng: np.random.Generator, num_decisions: int, last: int = K, terminated: bool = False) -> Trajectory:
    """Decisions of K steps each, of which the last one runs `last`; the others are never cut short."""
    executed = [K] * (num_decisions - 1) + [last]
    transitions = []
    for index, count in enumerate(executed):
        rewards = np.where(np.arange(K) < count, rng.normal(size=K), 0).astype(np.float32)
        transitions.append(
            transition(observed(index * K), np.arange(K * D), np.zeros(K * D, np.float32), rewards, count)
        )
    return Trajectory(
        Task("fake", 0, 0, 0), tuple(transitions), observed(99), terminated, not terminated, terminated, 0
    )


def segments(whole: Trajectory, *cuts: int) -> list[Trajectory]:
    """The episode cut before these decisions."""
    ends, parts, earlier = [*cuts, len(whole.transitions)], [], Earlier()
    for start, end in zip([0, *cuts], ends, strict=True):
        part = replace(whole, transitions=whole.transitions[start:end], earlier=earlier)
        if end < len(whole.transitions):
            last = whole.transitions[end].observation
            part = replace(
                part, final_observation=last, terminated=False, truncated=False, success=False, continues=True
            )
        parts.append(part)
        earlier = Earlier(part.episode_length, earlier.progress + part.env_return)
    return parts


def timeline(part: Trajectory, level: str) -> list[tuple[float, float, int, int]]:
    """Each value of a segment in order: its reward, the discount after it, its decision and its column."""
    found = []
    for row, t in enumerate(part.transitions):
        rewards = t.rewards.astype(np.float64)
        if level == "chunk":
            found.append((sum(GAMMA**k * rewards[k] for k in range(t.num_executed)), GAMMA**t.num_executed, row, 0))
        elif level == "step":
            found += [(rewards[k], GAMMA, row, k) for k in range(t.num_executed)]
        else:
            for k in range(t.num_executed):
                found += [(0.0, 1.0, row, k * D + d) for d in range(D - 1)]
                found.append((rewards[k], GAMMA, row, k * D + D - 1))
    return found


def brute_force(part: Trajectory, values: np.ndarray, level: str, lam: float) -> np.ndarray:
    """Sums of the temporal differences that follow, each weighted by hand; after the last the value of the end."""
    line = timeline(part, level)
    along = [float(values[row, column]) for _, _, row, column in line]
    along.append(0.0 if part.terminated else float(values[-1, 0]))
    deltas = [reward + discount * along[i + 1] - along[i] for i, (reward, discount, _, _) in enumerate(line)]
    advantages = np.zeros((len(part.transitions), WIDTH[level]))
    for i, (_, _, row, column) in enumerate(line):
        weight = 1.0
        for j in range(i, len(line)):
            advantages[row, column] += weight * deltas[j]
            weight *= line[j][1] * lam
    return advantages


def rounding(reference: np.ndarray, num_values: int) -> float:
    """What float32 may be off after so many sums and products of values of this size."""
    return 4 * num_values * np.finfo(np.float32).eps * max(float(np.abs(reference).max()), 1.0)


@pytest.mark.parametrize("level", WIDTH)
@pytest.mark.parametrize("num_decisions", [1, 16])  # 16 decisions of four steps are 64 steps
def test_gae_of_a_segment_ends_with_the_value_of_its_last_observation(level, num_decisions):
    rng = np.random.default_rng(3)
    part = segments(episode(rng, num_decisions + 3), num_decisions)[0]
    assert part.continues and part.length == num_decisions * K
    values = rng.normal(size=(num_decisions + 1, WIDTH[level])).astype(np.float32)
    expected = brute_force(part, values, level, LAM)
    found = trajectory_gae(part, values, level, GAMMA, LAM)
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding(expected, num_decisions * WIDTH[level]))
    without = brute_force(replace(part, terminated=True), values, level, LAM)
    assert np.abs(expected - without).max() > 0.01, "the value at the end matters"


@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("level", WIDTH)
def test_segments_with_true_values_at_their_ends_have_the_advantages_of_the_whole_episode(level, terminated):
    """With lambda 1 an advantage is the return minus a value: it does not matter where the episode was cut."""
    rng = np.random.default_rng(4)
    whole = episode(rng, 11, last=2, terminated=terminated)
    values = rng.normal(size=(12, WIDTH[level]))
    cuts = (3, 4, 9)
    for cut in cuts:  # what follows there, from the rewards
        rest = replace(whole, transitions=whole.transitions[cut:])
        tail = np.concatenate([values[cut:-1] * 0, values[-1:]])
        values[cut, 0] = brute_force(rest, tail, level, 1.0)[0, 0]
    expected = brute_force(whole, values, level, 1.0)
    single = values.astype(np.float32)
    found = [
        trajectory_gae(part, single[start : start + len(part.transitions) + 1], level, GAMMA, 1.0)
        for start, part in zip((0, *cuts), segments(whole, *cuts), strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=rounding(expected, 11 * WIDTH[level]))


REWARDS: dict[str, Reward] = {
    "sparse": SparseReward(),
    "dense": DenseReward(),
    "shaped": ShapedReward(GAMMA, scale=2.0, bootstraps=True),
    "rules": RulesReward(2.0, -1.0, length_penalty=0.25, length_limit=18, idle_penalty=0.5),
}
REWARDS["combined"] = CombinedReward(dict(REWARDS), {"sparse": 1.0, "shaped": 0.5, "rules": 3.0})


@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("name", REWARDS)
def test_rewards_of_segments_are_those_of_the_episode(name, terminated):
    whole = episode(np.random.default_rng(5), 9, last=3, terminated=terminated)
    expected = np.stack([t.rewards for t in REWARDS[name].score(whole).transitions])
    parts = segments(whole, 2, 3, 7)
    assert parts[2].earlier.num_steps == 12 and parts[2].episode_length == 28, "the limit of lengths is in its middle"
    found = [t.rewards for part in parts for t in REWARDS[name].score(part).transitions]
    scale = np.finfo(np.float32).eps * max(float(np.abs(expected).max()), 1.0)
    np.testing.assert_allclose(np.stack(found), expected, rtol=0, atol=16 * scale)
    assert np.abs(expected).max() > 0.1 or name == "sparse"
