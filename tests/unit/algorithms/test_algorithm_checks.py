"""Options of algorithms that don't go together are refused with the remedy; names agree across the packages."""

from typing import get_args

import pytest

from vlarl.algorithms import ALGORITHMS
from vlarl.config import Config, ConfigError, FinetuneConfig, derive, load_config
from vlarl.config.derive import clip_range, derived_lines, kl_estimator
from vlarl.config.rules.across import check
from vlarl.config.schema import AlgorithmName


def complaints(**overrides: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {key.replace("__", "."): value for key, value in overrides.items()})
    return [str(problem) for problem in caught.value.problems]


def test_every_algorithm_of_the_schema_exists():
    assert set(get_args(AlgorithmName)) == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("name", "title"), [("grpo", "GRPO"), ("rloo", "RLOO"), ("group_norm", "group norm"), ("cpgd", "CPGD")]
)
def test_group_methods_refuse_groups_of_one(name, title):
    assert complaints(algorithm__name=name, rollout__group_size=1) == [
        f"rollout.group_size = 1 with algorithm.name = '{name}': {title} compares the episodes of a group with each "
        "other; set rollout.group_size to 2 or more, or algorithm.name to ppo"
    ]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "reinforce_pp", "ppo"])
def test_other_methods_take_groups_of_one(name):
    assert load_config(None, {"algorithm.name": name, "rollout.group_size": 1}).algorithm.name == name


def test_only_ppo_has_a_critic_to_train_first():
    (problem,) = complaints(algorithm__name="reinforce_pp", algorithm__value_init_steps=2)
    assert "REINFORCE++ has no critic to train first; set it to 0, or algorithm.name to ppo" in problem
    assert [name for name, kind in ALGORITHMS.items() if kind.needs_critic] == ["ppo"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"algorithm__name": "ppo", "algorithm__ratio_level": "sequence"},
            "algorithm.ratio_level = 'sequence' with algorithm.name = 'ppo': the critic credits single decisions, which the ratio of a whole episode can't distinguish; set algorithm.ratio_level to token, action or chunk, or algorithm.name to "
            "grpo",
        ),
        (
            {"algorithm__name": "cpgd", "algorithm__ratio_level": "chunk"},
            "algorithm.ratio_level = 'chunk' with algorithm.name = 'cpgd': CPGD clips the log-prob of each token; set "
            "algorithm.ratio_level to token, or algorithm.name to grpo",
        ),
        (
            {"algorithm__name": "cpgd", "algorithm__dual_clip": 3.0},
            "algorithm.dual_clip = 3.0 with algorithm.name = 'cpgd': CPGD's gradient has no ratio to bound; set "
            "algorithm.dual_clip to null, or algorithm.name to grpo",
        ),
        (
            {"algorithm__entropy_top_fraction": 0.2, "algorithm__old_logprobs": "engine"},
            "algorithm.entropy_top_fraction = 0.2 with algorithm.old_logprobs = 'engine': the entropies come from the "
            "learner's own pass before its first step; set algorithm.old_logprobs to learner, or "
            "algorithm.entropy_top_fraction to 1",
        ),
        (
            {"algorithm__importance": "truncated", "algorithm__old_logprobs": "engine"},
            "algorithm.importance = 'truncated' with algorithm.old_logprobs = 'engine': the ratio already starts at the policy that sampled, so there is nothing left to weight; set algorithm.old_logprobs to learner, or "
            "algorithm.importance to none",
        ),
        (
            {"kl__target": 0.1},
            "kl.target = 0.1 with kl.coef = 0: an adaptive coefficient is multiplied from kl.coef, which is 0; set kl.coef "
            "above 0 or kl.target to null",
        ),
        (
            {"kl__coef": 0.1, "kl__estimator": "k1"},
            "kl.place = 'loss' with kl.estimator = 'k1': the gradient of k1 is zero in expectation; set kl.estimator to k2 "
            "or k3, or kl.place to reward",
        ),
        (
            {"kl__coef": 0.1, "kl__place": "reward", "kl__estimator": "k3"},
            "kl.place = 'reward' with kl.estimator = 'k3': k3 in the reward is not an unbiased penalty; set kl.estimator to "
            "k1, or kl.place to loss",
        ),
        (
            {"lora__enabled": True, "lora__dropout": 0.1},
            "lora.dropout = 0.1: with dropout the log-probs before and after a step would be those of different networks, "
            "and their ratio would not start at 1; set it to 0. `vlarl finetune` trains with dropout",
        ),
    ],
)
def test_combinations_that_make_no_sense(overrides, message):
    assert complaints(**overrides) == [message]


@pytest.mark.parametrize("bound", [1.0, 0.5])
def test_a_second_clip_lies_above_one(bound):
    (problem,) = complaints(algorithm__dual_clip=bound)
    assert problem.endswith("must be a number > 1 or null")


def test_what_makes_sense_is_taken():
    load_config(None, {"kl.coef": 0.1, "kl.place": "reward", "kl.estimator": "k1", "kl.target": 0.1})
    load_config(None, {"algorithm.ratio_level": "sequence", "algorithm.aggregate": "sequence_mean"})
    load_config(None, {"algorithm.name": "cpgd", "algorithm.clip_low": 1.0})
    assert check(FinetuneConfig.model_validate({"lora": {"dropout": 0.1}})) == []
    assert Config().kl.coef == 0


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ({}, "k2"),
        ({"place": "reward"}, "k1"),
        ({"estimator": "k3"}, "k3"),
        ({"place": "reward", "estimator": "k1"}, "k1"),
    ],
)
def test_the_estimator_follows_from_the_place_unless_it_is_set(kl, expected):
    config = load_config(None, {"kl": {"coef": 0.1} | kl})
    assert kl_estimator(config.kl) == expected
    assert f"kl_estimator: {expected}" in derived_lines(derive(config))
    assert not any(line.startswith("kl_estimator") for line in derived_lines(derive(load_config())))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, (0.2, 0.28)),
        ({"ratio_level": "chunk"}, (0.2, 0.28)),
        ({"ratio_level": "sequence"}, (3e-4, 4e-4)),  # GSPO's paper, arXiv:2507.18071
        ({"ratio_level": "sequence", "clip_high": 0.1}, (3e-4, 0.1)),
        ({"ratio_level": "sequence", "clip_low": 0.2, "clip_high": 0.28}, (0.2, 0.28)),
    ],
)
def test_the_clip_range_follows_from_the_ratio_unless_it_is_set(algorithm, expected):
    config = Config.model_validate({"algorithm": algorithm})
    assert clip_range(config.algorithm) == expected
    assert f"clip_low: {expected[0]:g}" in derived_lines(derive(config))
    assert f"clip_high: {expected[1]:g}" in derived_lines(derive(config))


def test_presets_that_have_the_default_range_get_the_sequences_with_its_ratio():
    config = load_config("tabletop_grpo", {"algorithm.ratio_level": "sequence"})
    assert clip_range(config.algorithm) == (3e-4, 4e-4)
    published = load_config("simplevla_rl", {"algorithm.ratio_level": "sequence"})
    assert clip_range(published.algorithm) == (0.2, 0.28), "a published recipe keeps its own"
