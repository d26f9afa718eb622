"""The section `reward`: what is built of it, and what is refused with the fix."""

import numpy as np
import pytest
import torch

from vlarl.algorithms import ALGORITHMS, build_algorithm
from vlarl.config.problems import ConfigError
from vlarl.config.rules.reward import STEPWISE_METHODS
from vlarl.config.schema import AlgorithmConfig, RewardConfig
from vlarl.config.source.load import load_config, to_yaml
from vlarl.config.trust import effects_of
from vlarl.errors import UsageError
from vlarl.rewards import RewardContext, build_reward
from vlarl.rewards.combined import CombinedReward
from vlarl.rewards.outcome import SparseReward
from vlarl.rewards.remote import RemoteReward
from vlarl.rewards.rules import RulesReward
from vlarl.rewards.shaping import ShapedReward

RUN = RewardContext(torch.device("cpu"), discount=0.75, bootstraps=True)


def built(**options):
    return build_reward(RewardConfig(**options), RUN)


def complaints(**options) -> list[str]:
    overrides = {name.replace("__", "."): value for name, value in options.items() if "__" in name}
    overrides |= {f"reward.{name}": value for name, value in options.items() if "__" not in name}
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides=overrides)
    return [str(problem) for problem in refusal.value.problems]


def test_options_reach_the_reward_they_are_for():
    safe = built(retries=5, fallback="zero", max_failure_rate=0.125)
    assert (safe.retries, safe.fallback, safe.max_failure_rate) == (5, "zero", 0.125)
    shaped = built(source="shaped", shaping_scale=2.0).reward
    assert isinstance(shaped, ShapedReward) and (shaped.gamma, shaped.scale, shaped.bootstraps) == (0.75, 2.0, True)
    assert built(source="shaped", shaping_gamma=0.5).reward.gamma == 0.5
    rules = built(
        source="rules",
        success_value=4.0,
        failure_value=-2.0,
        length_penalty=0.5,
        length_limit=7,
        idle_penalty=0.25,
        idle_tolerance=0.1,
    ).reward
    assert isinstance(rules, RulesReward)
    assert vars(rules) == {
        "success_value": 4.0, "failure_value": -2.0, "length_penalty": 0.5, "length_limit": 7, "idle_penalty": 0.25, "idle_tolerance": 0.1,
    }  # fmt: skip
    remote = built(
        source="remote", url="http://localhost:1/x", scoring="steps", batch_size=3, images="last", timeout_s=4.0, retries=1,
        max_request_bytes=5, max_response_bytes=6,
    ).reward  # fmt: skip
    assert isinstance(remote, RemoteReward)
    assert (remote.url, remote.scoring, remote.batch_size, remote.images) == (
        "http://localhost:1/x",
        "steps",
        3,
        "last",
    )
    assert (remote.timeout_s, remote.retries, remote.max_request_bytes, remote.max_response_bytes) == (4.0, 1, 5, 6)


def test_combined_takes_weights_and_recipe():
    reward = built(
        source="combined", sources=("sparse", "rules"), weights=(1.0, 0.5), recipe=("*x* -> rules=2",)
    ).reward
    assert isinstance(reward, CombinedReward) and list(reward.parts) == ["sparse", "rules"]
    assert reward.weights == {"sparse": 1.0, "rules": 0.5} and reward.recipe[0].weights == {"rules": 2.0}
    assert built(source="combined", sources=("sparse", "dense")).reward.weights == {"sparse": 1.0, "dense": 1.0}


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(UsageError, match="reward.device: 'cuda' can't be used here"):
        built(source="model", model="x", device="cuda")


def test_flags_read_well(tmp_path):
    config = load_config(
        overrides=[
            *("--reward.source", "combined"),
            *("--reward.sources", "sparse", "mine.rewards:smooth", "rules"),
            *("--reward.weights", "1", "-0.5", "0.1"),
            *("--reward.recipe", "tabletop_goal/3 -> sparse=1 mine.rewards:smooth=2", "*drawer* -> rules=1"),
            *("--reward.failure_value", "-1"),
        ]
    )
    assert config.reward.weights == (1.0, -0.5, 0.1)
    assert config.reward.recipe == ("tabletop_goal/3 -> sparse=1 mine.rewards:smooth=2", "*drawer* -> rules=1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source": "combined", "sources": ["sparse", "densse"]},
            "reward.sources = 'densse': unknown reward; did you mean 'dense'? Known: sparse, dense, shaped, rules, model, remote, "
            "exact_match, number_match, choice, format, length, overlong, combined, or your own module:function",
        ),
        (
            {"source": "combined"},
            "reward.sources = []: name the rewards to combine, such as [sparse, shaped], and their reward.weights",
        ),
        (
            {"source": "combined", "sources": ["sparse", "sparse"]},
            "reward.sources = ['sparse', 'sparse']: name each reward once, and combined not at all",
        ),
        (
            {"source": "combined", "sources": ["sparse", "combined"]},
            "reward.sources = ['sparse', 'combined']: name each reward once, and combined not at all",
        ),
        (
            {"source": "combined", "sources": ["sparse", "dense"], "weights": [1]},
            "reward.weights = [1.0]: give 2 weights, one for each of reward.sources, or none for 1 each",
        ),
        (
            {"source": "combined", "sources": ["sparse", "dense"], "weights": [0, 0]},
            "reward.weights = [0.0, 0.0]: the reward would always be 0; give one weight that is not 0",
        ),
        (
            {"source": "combined", "sources": ["sparse"], "recipe": ["x -> dense=1"]},
            "reward.recipe: 'x -> dense=1': dense is none of reward.sources; add it there",
        ),
        (
            {"source": "combined", "sources": ["sparse"], "recipe": ["x"]},
            "reward.recipe: 'x': write it as `LABEL -> NAME=WEIGHT NAME=WEIGHT`, such as `tabletop_goal/3 -> sparse=1 shaped=0.5`",
        ),
        (
            {"source": "combined", "sources": ["sparse"], "recipe": ["x -> sparse=0"]},
            "reward.recipe: 'x -> sparse=0': the reward would always be 0; give one weight that is not 0",
        ),
        (
            {"source": "combined", "sources": ["sparse"], "recipe": ["x -> sparse=1", "x -> sparse=2"]},
            "reward.recipe: the label 'x' is given twice, and only the first would apply; keep one of them",
        ),
        (
            {"weights": [1]},
            "reward.weights = [1.0]: has no effect without reward.source combined; set that, or leave reward.weights out",
        ),
        (
            {"failure_value": -1},
            "reward.failure_value = -1.0: has no effect without reward.source rules; set that, or leave reward.failure_value out",
        ),
        (
            {"scoring": "sum"},
            "reward.scoring = 'sum': has no effect without reward.source model or remote; set that, or leave reward.scoring out",
        ),
        (
            {"url": "http://x?token=secret"},
            "reward.url = 'http://x?token=***': has no effect without reward.source remote; set that, or leave reward.url out",
        ),
        (
            {"source": "helpful", "models": {"helpful": "x", "safe": "y"}},
            "reward.models: 'safe': it is not used; name it in reward.source or reward.sources, or leave it out",
        ),
        (
            {"source": "combined", "sources": ["sparse", "a"], "models": {"a": "x"}, "urls": {"a": "http://x/score"}},
            "reward.urls: 'a': another reward has this name; choose another one",
        ),
        (
            {"source": "dense", "models": {"dense": "x"}},
            "reward.models: 'dense': another reward has this name; choose another one",
        ),
        (
            {"source": "sparse", "models": {"my model": "x"}},
            "reward.models: 'my model': a name has letters, digits, _ and - only",
        ),
        (
            {"source": "grader", "urls": {"grader": "http://me:secret@x/score"}},
            "reward.urls: grader = 'http://***@x/score': a user name and password in an address end up in logs; leave them out, put "
            "`Authorization: Basic …` into an environment variable, and name that variable with reward.headers_env",
        ),
        (
            {"source": "grader", "urls": {"grader": "http://x/score?token=***"}},
            "reward.urls: grader = 'http://x/score?token=***': the part after `?` was not saved with the run; give the whole address "
            "again with --reward.urls, or send the token in a header with reward.headers_env",
        ),
        (
            {"source": "combined", "sources": ["sparse", "a"], "models": {"a": "x"}, "model": "y"},
            "reward.model = 'y': has no effect without reward.source model; set that, or leave reward.model out",
        ),
        (
            {"source": "model", "model": "x", "judge_pattern": "("},
            "reward.judge_pattern = '(': is not a regular expression: missing ), unterminated subpattern at position 0",
        ),
        (
            {"source": "sparse", "judge_template": "{prompt} {response}"},
            "reward.judge_template = '{prompt} {response}': has no effect without reward.source model; set that, or leave "
            "reward.judge_template out",
        ),
        ({"source": "model"}, "reward.model = null with the reward model: name a folder or hub id of a reward model"),
        (
            {"source": "model", "model": "x", "device": "gpu"},
            "reward.device = 'gpu': unknown device; use cpu, cuda or cuda:N, or null for the run's",
        ),
        *(
            (
                {"source": "remote"} | given,
                f"reward.url = {shown}: give the service's address, such as http://localhost:8000/score",
            )
            for given, shown in (
                ({}, "null"),
                ({"url": "localhost:8000"}, "'localhost:8000'"),
                ({"url": "file:///etc/passwd"}, "'file:///etc/passwd'"),
                ({"url": "http://"}, "'http://'"),
                ({"url": "http://x:port/"}, "'http://x:port/'"),
            )
        ),
        (
            {"source": "rules", "success_value": -1.0},
            "reward.success_value = -1.0: success must be worth more than failure, reward.failure_value = 0.0",
        ),
        (
            {"source": "rules", "length_limit": 5},
            "reward.length_limit = 5: has no effect without reward.length_penalty above 0; set that, or leave reward.length_limit out",
        ),
        (
            {"source": "rules", "length_limit": 32, "length_penalty": 0.1},
            "reward.length_limit = 32: no episode of tabletop_spatial is longer than 32 steps; set it lower",
        ),
        (
            {"source": "shaped", "algorithm__name": "grpo"},
            "reward.source = 'shaped' with algorithm.name = 'grpo': grpo uses the returns of whole episodes, which potential-based shaping does not change; set algorithm.name to ppo, reinforce or reinforce_pp, or use the "
            "reward dense",
        ),
    ],
)
def test_nonsense_is_refused_with_the_fix(options, message):
    assert complaints(**options) == [message]


def test_models_and_services_may_have_names_of_their_own(tmp_path, monkeypatch):
    """Relative folders become absolute, and the secret of an address is not written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    config = load_config(
        overrides=[
            *("--reward.source", "combined"),
            *("--reward.sources", "helpful", "grader", "sparse"),
            *("--reward.models", "{helpful: judge}"),
            *("--reward.urls", "{grader: 'http://x/score?token=secret'}"),
            *("--reward.judge_max_tokens", "8"),
            *("--reward.images", "last"),
        ]
    )
    assert config.reward.models == {"helpful": str(tmp_path / "judge")}
    assert "secret" not in to_yaml(config) and "token=***" in to_yaml(config)
    saved = config.model_dump()
    assert list(effects_of(saved, ())) == [
        "reward.urls: grader = 'http://x/score?token=***': posts every episode to this address"
    ]
    assert list(effects_of(saved, ("reward.urls",))) == []


def test_what_works():
    load_config("tabletop_ppo", {"reward.source": "shaped"})
    load_config(
        overrides={"reward.source": "combined", "reward.sources": ["sparse", "rules"], "reward.length_penalty": 0.1}
    )
    load_config(overrides={"reward.source": "remote", "reward.url": "https://host:8443/score?model=a"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shaping_is_refused_where_it_would_change_nothing(name, trajectory):
    """Advantages of the same episodes with shaping and without: algorithms that look at whole episodes see no change."""
    options = AlgorithmConfig(name=name, normalize_advantages="none", verifier_gamma=0.9)
    algorithm = build_algorithm(options, temperature=1.0)
    episodes = [
        trajectory([[0.5], [0.25], [0.25]], terminated=True, success=True),
        trajectory([[0.5], [-0.25], [-0.5]]),
    ]
    shaped = ShapedReward(algorithm.discount(options), bootstraps=algorithm.needs_critic)
    values = [np.zeros((4, 1), dtype=np.float32)] * 2 if algorithm.needs_critic else None
    with_shaping, without = (
        algorithm.estimate(reward.score_all(episodes), values) for reward in (shaped, SparseReward())
    )
    unchanged = all(
        np.allclose(a.advantages, b.advantages, atol=1e-5) for a, b in zip(with_shaping, without, strict=True)
    )
    assert unchanged is (name not in STEPWISE_METHODS)
