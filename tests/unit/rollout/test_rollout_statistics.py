"""Metrics of texts, by hand: lengths, what was cut off, how members of a group differ, rewards by part."""

import math

import numpy as np
import pytest
from fakes.responses import prompt_of, responded, text_trajectory

from vlarl.rollout.statistics import evaluation_metrics, rollout_metrics
from vlarl.types import EvalResult

SUM = prompt_of("What is 3 plus 4?", "7")
OPEN = prompt_of("Write a poem.")


def test_lengths_count_the_tokens_of_a_text_without_its_padding_and_with_its_stop_token():
    texts = [("7", 2, True), ("8", 4, True), ("9 9 9", 6, False)]
    metrics = rollout_metrics([text_trajectory(t, SUM, 0.0, n, ended) for t, n, ended in texts], seconds=2.0)
    assert metrics["rollout/response_length"] == 4.0 and metrics["rollout/response_length_max"] == 6.0
    assert metrics["rollout/truncated_fraction"] == pytest.approx(1 / 3)
    assert metrics["perf/response_tokens_per_s"] == 6.0


def test_members_of_a_group_are_compared_with_each_other_only():
    """Group 0 has rewards 0 and 1, a std of 0.5; group 1 has equal ones; the texts of group 1 are equal, too."""
    given = [("a", 0.0, 0), ("b", 1.0, 0), ("c", 5.0, 1), ("c", 5.0, 1)]
    episodes = [text_trajectory(t, SUM, r, 2, group=g, member=i) for i, (t, r, g) in enumerate(given)]
    metrics = rollout_metrics(episodes, seconds=1.0)
    assert metrics["rollout/group_std_return"] == 0.25
    assert metrics["rollout/unique_responses"] == 0.75
    assert metrics["rollout/std_return"] == pytest.approx(np.std([0, 1, 5, 5]))
    alone = rollout_metrics([text_trajectory("a", SUM, 1.0, 2)], seconds=1.0)
    assert "rollout/group_std_return" not in alone and "rollout/unique_responses" not in alone


def test_prompts_without_a_solution_have_no_success_rate():
    """Their reward judges them; 0% would say that the policy fails."""
    judged = text_trajectory("7", SUM, 1.0, 2)
    unjudged = text_trajectory("roses are red", OPEN, 0.3, 5)
    assert "rollout/success_rate" not in rollout_metrics([unjudged], 1.0)
    assert rollout_metrics([unjudged, judged], 1.0)["rollout/success_rate"] == 1.0
    metrics = evaluation_metrics(EvalResult((responded("roses", OPEN, reward=0.3),)))
    assert "val/success_rate" not in metrics and metrics["val/mean_reward"] == 0.3


def test_an_evaluation_has_its_rewards_by_part_and_its_lengths():
    parts = [{"accuracy": 1.0, "my:format": 0.0}, {"accuracy": 0.0, "my:format": 0.5}, {"accuracy": 9.0}, {}]
    episodes = (
        responded("7", SUM, True, 1.0, num_tokens=2, reward_parts=parts[0]),
        responded("8 and", SUM, False, 0.5, num_tokens=6, cut_off=True, reward_parts=parts[1]),
        responded("8", SUM, False, 0.0, num_tokens=1, reward_parts=parts[2], reward_error="it failed"),
        responded("", SUM, False, 7.0, num_tokens=99, reward_parts=parts[2], status="crashed"),
    )
    metrics = evaluation_metrics(EvalResult(episodes))
    assert metrics["val/success_rate"] == pytest.approx(1 / 3)
    assert (metrics["val/mean_reward"], metrics["val/std_reward"]) == (0.75, 0.25), "what failed is left out"
    assert metrics["val/response_length"] == 3.0 and metrics["val/response_length_max"] == 6.0
    assert metrics["val/truncated_fraction"] == pytest.approx(1 / 3)
    assert metrics["val/reward/accuracy/mean"] == 0.5 and metrics["val/reward/accuracy/std"] == 0.5
    assert metrics["val/reward/my_format/mean"] == 0.25
    assert (metrics["val/crashed"], metrics["val/reward_failures"]) == (1.0, 1.0)


def test_an_evaluation_of_which_nothing_ran_has_no_figures():
    metrics = evaluation_metrics(EvalResult((responded("", SUM, status="crashed"),)))
    assert math.isnan(metrics["val/mean_reward"]) and math.isnan(metrics["val/std_reward"])
    assert "val/response_length" not in metrics
