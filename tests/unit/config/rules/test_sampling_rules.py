"""Combinations of the curriculum and of dynamic sampling that make no sense, each with its remedy."""

import pytest

from vlarl.config import Config, ConfigError, load_config
from vlarl.config.rules.across import check


def complaints(overrides: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"curriculum.mode": "weighted"},
            "curriculum.mode = 'weighted': there are no weights; give curriculum.weights, one for each task, or set it "
            "to uniform or adaptive",
        ),
        (
            {"curriculum.weights": (1.0,) * 10},
            "curriculum.weights = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] with curriculum.mode = 'uniform': "
            "uniform sampling reads no weights; set curriculum.mode to weighted or adaptive",
        ),
        (
            {"curriculum.mode": "weighted", "curriculum.weights": (1.0, 2.0), "env.task_ids": (0, 1, 2)},
            "curriculum.weights = [1.0, 2.0]: there are 3 tasks (env.task_ids); give each one weight, in their order",
        ),
        (
            {"curriculum.mode": "adaptive", "curriculum.weights": (0.0, 0.0), "env.task_ids": (0, 1)},
            "curriculum.weights = [0.0, 0.0]: no task would ever be trained on; give one a weight above 0",
        ),
        (
            {"curriculum.skip_solved_above": 0.9},
            "curriculum.skip_solved_above = 0.9 with curriculum.mode = 'uniform': only adaptive sampling reads it; set "
            "curriculum.mode to adaptive, or curriculum.skip_solved_above to null",
        ),
        (
            {"curriculum.mode": "weighted", "curriculum.weights": (1.0,) * 10, "curriculum.start_from": "runs/a"},
            "curriculum.start_from = 'runs/a' with curriculum.mode = 'weighted': only adaptive sampling reads it; set "
            "curriculum.mode to adaptive, or curriculum.start_from to null",
        ),
        (
            {"algorithm.name": "ppo", "rollout.refill": True},
            "rollout.refill = true with algorithm.name = 'ppo': only methods that compare groups drop and replace them; "
            "leave it out, or set algorithm.name to one of grpo, rloo, group_norm, cpgd",
        ),
        (
            {"algorithm.name": "ppo", "rollout.oversample": 1.5},
            "rollout.oversample = 1.5 with algorithm.name = 'ppo': only methods that compare groups drop and replace them; "
            "leave it out, or set algorithm.name to one of grpo, rloo, group_norm, cpgd",
        ),
        (
            {"rollout.accuracy_bounds": (0.5, 0.9), "rollout.group_size": 2},
            "rollout.accuracy_bounds = [0.5, 0.9]: no group of 2 (rollout.group_size) has a success rate strictly "
            "between them, so nothing would be trained on; set them further apart, such as 0 and 1, or make groups larger",
        ),
        ({"curriculum.floor": 0.0}, "curriculum.floor = 0.0: must be a number > 0 and <= 1"),
        ({"rollout.oversample": 0.5}, "rollout.oversample = 0.5: must be a number >= 1"),
    ],
)
def test_nonsense_is_refused_with_its_remedy(overrides, message):
    assert complaints(overrides) == [message]


def test_sense_is_not_refused():
    sections = {
        "env": {"task_ids": (1, 4)},
        "curriculum": {"mode": "adaptive", "weights": (1.0, 0.0), "skip_solved_above": 0.9, "start_from": "runs/a"},
        "rollout": {"refill": True, "oversample": 1.5, "accuracy_bounds": (0.1, 0.9)},
    }
    assert check(Config.model_validate(sections)) == []
    read = load_config(
        None, ["--curriculum.mode", "weighted", "--curriculum.weights", "1", "2", "--env.task_ids", "0", "1"]
    )
    assert read.curriculum.weights == (1.0, 2.0)
