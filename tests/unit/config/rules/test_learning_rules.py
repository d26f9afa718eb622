"""Combinations of `optim`, `critic` and `ema` that make no sense, each with its remedy."""

import pytest

from vlarl.config import ConfigError, load_config

SIZES = {"run.iterations": 20, "rollout.num_groups": 24, "rollout.group_size": 8}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"eval.use_ema": True},
            "eval.use_ema = true: no average of the weights is kept; set ema.beta, such as 0.992, or eval.use_ema to "
            "false",
        ),
        (
            {"critic.kind": "separate"},
            "critic.kind = 'separate' with algorithm.name = 'grpo': this algorithm has no critic; set critic.kind to "
            "head, or algorithm.name to ppo",
        ),
        (
            {"algorithm.name": "ppo", "critic.warmup_iterations": 21},
            "critic.warmup_iterations = 21 with run.iterations = 20: the warm-up would never end; set it to "
            "run.iterations or less",
        ),
        (
            {"optim.rollouts_per_update": 21},
            "optim.rollouts_per_update = 21 with run.iterations = 20: the run ends before the first update; set it to "
            "run.iterations or less",
        ),
        (
            {"optim.rollouts_per_update": 8, "optim.warmup_iterations": 4},
            "optim.warmup_iterations = 4 with optim.rollouts_per_update = 8: it counts updates, and 20 iterations have 3; set it to 3 or less",
        ),
        (
            {"optim.rollouts_per_update": 8, "algorithm.name": "ppo", "algorithm.value_init_steps": 3},
            "algorithm.value_init_steps = 3 with optim.rollouts_per_update = 8: it counts updates, and 20 iterations have 3; set it to 2 or less",
        ),
        (
            {"optim.rollouts_per_update": 2, "optim.minibatches": 7},
            "optim.minibatches = 7: 384 episodes per update (rollout.num_groups 24 x rollout.group_size 8 x "
            "optim.rollouts_per_update 2) can't be divided evenly; use 4 or 6 or 8 minibatches",
        ),
    ],
)
def test_combinations_that_cannot_work(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, SIZES | overrides)
    assert [str(problem) for problem in caught.value.problems] == [message]


def test_combinations_that_work():
    load_config(None, SIZES | {"optim.rollouts_per_update": 2, "optim.minibatches": 384})
    load_config(None, SIZES | {"ema.beta": 0.992, "eval.use_ema": True})
    load_config("tabletop_ppo", {"critic.kind": "separate", "critic.warmup_iterations": 3})
