"""Several rewards by weights, and recipes that weigh them task by task."""

from dataclasses import replace

import pytest

from vlarl.config.recipe import RecipeRule, parse_rule
from vlarl.rewards.base import Reward, reward_at_end
from vlarl.rewards.combined import CombinedReward
from vlarl.rewards.outcome import DenseReward, SparseReward
from vlarl.rewards.remote import RemoteReward
from vlarl.rewards.rules import RulesReward
from vlarl.rewards.safe import SafeReward
from vlarl.rollout.statistics import reward_part_metrics, rollout_metrics


class Counting(Reward):
    """Rewards 1, and notes which tasks it scored."""

    batch_size = 5

    def __init__(self):
        self.scored = []

    def score(self, trajectory):
        self.scored.append(trajectory.task.task_id)
        return reward_at_end(trajectory, 1.0)


def assigned(trajectory) -> list[list[float]]:
    return [t.rewards.tolist() for t in trajectory.transitions]


def test_weighted_sum_step_by_step(trajectory):
    parts = {"sparse": SparseReward(), "dense": DenseReward(), "rules": RulesReward(failure_value=-4.0)}
    reward = CombinedReward(parts, {"sparse": 2.0, "dense": -0.5, "rules": 0.25})
    assert reward.env_reward == "dense" and reward.batch_size == 1
    won = trajectory([[1, 2], [4, 0]], num_executed=[2, 1], terminated=True, success=True)
    lost = trajectory([[1, 2], [4, 8]])
    first, second = reward.score_all([won, lost])
    assert assigned(first) == [[-0.5, -1], [-2 + 2 + 0.25, 0]]
    assert assigned(second) == [[-0.5, -1], [-2, -4 - 1]]
    assert assigned(won) == [[1, 2], [4, 0]]
    assert CombinedReward({"sparse": SparseReward()}, {"sparse": 1.0}).env_reward == "sparse"


def test_a_recipe_weighs_by_task_and_scores_only_where_it_counts(trajectory):
    episodes = [
        replace(e, task=replace(e.task, task_id=n))
        for n, e in enumerate([trajectory([[0.0]], seed=s) for s in (0, 0, 2)])
    ]
    counting = Counting()
    rules = [parse_rule("tabletop_spatial/1 -> counting=3"), parse_rule("*red cube* -> counting=0.5 sparse=1")]
    reward = CombinedReward({"sparse": SparseReward(), "counting": counting}, {"sparse": 1.0}, rules)
    assert reward.batch_size == 5
    assert [e.env_return for e in reward.score_all(episodes)] == [0, 3, 0.5]
    assert counting.scored == [1, 2]
    assert reward.score(episodes[0]).env_return == 0 and counting.scored == [1, 2]


def test_the_first_matching_line_counts(trajectory):
    lines = ["tabletop_spatial/0 -> sparse=2", "tabletop_spatial -> sparse=3", "* -> sparse=4"]
    rules = [parse_rule(line) for line in lines]
    reward = CombinedReward({"sparse": SparseReward()}, {"sparse": 1.0}, rules)
    won = trajectory([[0.0]], success=True, terminated=True)
    other = replace(won, task=replace(won.task, task_id=1))
    elsewhere = replace(won, task=replace(won.task, suite="tabletop_goal"))
    assert [e.env_return for e in reward.score_all([won, other, elsewhere])] == [2, 3, 4]


@pytest.mark.parametrize(
    ("label", "fits"),
    [
        ("tabletop_goal", True),
        ("tabletop_goal/3", True),
        ("tabletop_goal/*", True),
        ("*drawer*", True),
        ("OPEN THE*", True),
        ("tabletop_goal/30", False),
        ("drawer", False),
        ("tabletop", False),
    ],
)
def test_labels(label, fits):
    assert RecipeRule(label, {"sparse": 1.0}).fits("tabletop_goal", 3, "Open the drawer") is fits


def test_lines_of_a_recipe():
    rule = parse_rule(" *put the bowl* ->  sparse=1  my.rewards:smooth=-0.5 ")
    assert rule == RecipeRule("*put the bowl*", {"sparse": 1.0, "my.rewards:smooth": -0.5})
    for line, complaint in (
        ("sparse=1", "write it as"),
        ("-> sparse=1", "write it as"),
        ("a ->", "write it as"),
        ("a -> sparse", "'sparse' gives no weight"),
        ("a -> sparse=much", "'sparse=much' gives no weight"),
        ("a -> =1", "'=1' gives no weight"),
        ("a -> sparse=nan", "'sparse=nan' gives no weight"),
        ("a -> sparse=1 sparse=2", "gives sparse two weights"),
    ):
        with pytest.raises(ValueError, match=complaint):
            parse_rule(line)


def test_the_return_of_each_part_is_unweighted(trajectory):
    parts = {"sparse": SparseReward(), "dense": DenseReward(), "mine:f": Counting()}
    rule = parse_rule("tabletop_spatial/1 -> sparse=2 dense=-1")
    reward = CombinedReward(parts, {"sparse": 2.0, "mine:f": 0.5}, [rule])
    by_default = trajectory([[0.5], [0.25]], success=True)
    by_rule = replace(by_default, task=replace(by_default.task, task_id=1), success=False)
    first, second = SafeReward(reward).score_all([by_default, by_rule])
    assert first.reward_parts == {"sparse": 1.0, "mine:f": 1.0} and first.env_return == 2.5
    assert second.reward_parts == {"sparse": 0.0, "dense": 0.75} and second.env_return == -0.75
    dropped = replace(first, status="reward_failed", reward_parts={"sparse": 99.0})
    assert reward_part_metrics([first, second, dropped]) == {
        "reward/sparse/mean": 0.5,
        "reward/sparse/std": 0.5,
        "reward/mine_f/mean": 1.0,
        "reward/mine_f/std": 0.0,
        "reward/dense/mean": 0.75,
        "reward/dense/std": 0.0,
    }
    assert reward_part_metrics([by_default]) == {}
    assert rollout_metrics([first, second, dropped], seconds=1.0)["rollout/std_return"] == pytest.approx(1.625)


def test_images_are_kept_for_evaluation_only_where_a_reward_reads_them():
    blind = {"sparse": SparseReward(), "rules": RulesReward(), "dense": DenseReward()}
    assert not SafeReward(CombinedReward(blind, {"sparse": 1.0})).reads_images
    assert SafeReward(CombinedReward(blind | {"mine:f": Counting()}, {"sparse": 1.0})).reads_images
    assert RemoteReward("http://localhost", images="last").reads_images
    assert not RemoteReward("http://localhost", images="none").reads_images
