"""Rewards by rule, for episodes and for text responses."""

from dataclasses import replace

import numpy as np
import pytest

from vlarl.rewards.rules import RulesReward, format_rule, idle_decisions, length_rule, stop_token_rule


def assigned(trajectory) -> list[list[float]]:
    return [t.rewards.tolist() for t in trajectory.transitions]


def moving(trajectory, states):
    """The episode with the robot's states given: one for each decision, and the last."""
    seen = [np.full(8, state, dtype=np.float32) for state in states]
    transitions = tuple(
        replace(t, observation=replace(t.observation, proprio=state))
        for t, state in zip(trajectory.transitions, seen[:-1], strict=True)
    )
    last = replace(trajectory.final_observation, proprio=seen[-1])
    return replace(trajectory, transitions=transitions, final_observation=last)


def test_values_of_success_and_failure(trajectory):
    reward = RulesReward(success_value=10.0, failure_value=-5.0)
    won = trajectory([[3, 3], [3, 0]], num_executed=[2, 1], terminated=True, success=True)
    assert assigned(reward.score(won)) == [[0, 0], [10, 0]]
    assert assigned(reward.score(trajectory([[3, 3], [3, 3]]))) == [[0, 0], [0, -5]]
    assert reward.env_reward == "sparse"


def test_steps_above_the_limit_cost_where_they_are_taken(trajectory):
    reward = RulesReward(length_penalty=0.25, length_limit=3)
    won = trajectory([[0, 0], [0, 0], [0, 0]], num_executed=[2, 2, 1], terminated=True, success=True)
    assert assigned(reward.score(won)) == [[0, 0], [0, -0.25], [1 - 0.25, 0]]
    short = trajectory([[0, 0], [0, 0]], num_executed=[2, 1])
    assert reward.score(short).env_return == 0
    assert RulesReward(length_penalty=0.25).score(short).env_return == -0.75


def test_idle_decisions_cost_on_their_last_step(trajectory):
    episode = moving(trajectory([[0, 0], [0, 0], [0, 0]], num_executed=[2, 2, 1]), [0.5, 0.5, 0.9, 0.9005])
    assert idle_decisions(episode, 1e-3) == [0, 2]
    assert idle_decisions(episode, 0.0) == [0]
    reward = RulesReward(idle_penalty=0.5, idle_tolerance=1e-3)
    assert assigned(reward.score(episode)) == [[0, -0.5], [0, 0], [-0.5, 0]]


@pytest.mark.parametrize(
    ("response", "expected"),
    [([5, 6, 2], 0.0), ([2], 0.0), ([5, 6], -3.0), ([5, 2, 6], -3.0), ([2, 5, 2], -3.0), ([], -3.0)],
)
def test_a_response_must_have_one_stop_token_at_its_end(response, expected):
    assert stop_token_rule(response, stop_id=2, missing=-3.0) == expected


def test_a_response_is_penalised_for_each_token_above_the_limit():
    assert [length_rule(n, limit=10, penalty=0.5) for n in (0, 10, 11, 14)] == [0, 0, -0.5, -2]


def test_a_response_must_have_the_format():
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert format_rule("<think>a\nb</think>\n<answer>4</answer>\n", pattern, right=0.5) == 0.5
    assert format_rule("so <think>a</think><answer>4</answer>", pattern) == -1.0
