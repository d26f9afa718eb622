"""How rollouts and evaluations sample, and what is refused before a run starts."""

import pytest
from fakes.kinds import TextPolicy

from vlarl.config.problems import ConfigError
from vlarl.config.schema import Config, RolloutConfig
from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.rollout.sampling import check_sampling, evaluation_sampling, rollout_sampling

OPTIONS = RolloutConfig(
    temperature=0.7, top_p=0.9, top_k=5, max_tokens=12, min_tokens=2, stop=("</answer>",), stop_token_ids=(3,)
)
PROMPTS = {"env.suite": "prompts_arithmetic", "policy.path": "some/model"}


def test_a_rollout_samples_as_configured():
    given = Sampling(0.7, 0.9, 5, max_tokens=12, min_tokens=2, stop=(3,), stop_strings=("</answer>",))
    assert rollout_sampling(OPTIONS) == given
    assert not rollout_sampling(RolloutConfig()).chosen(), "by default no policy is given what it does not take"


def test_an_evaluation_has_the_lengths_and_ends_of_a_rollout_and_its_own_temperature():
    expected = Sampling(0.0, max_tokens=12, min_tokens=2, stop=(3,), stop_strings=("</answer>",))
    assert evaluation_sampling(OPTIONS, 0.0) == expected


def test_what_a_policy_does_not_take_is_refused_by_the_options_name():
    check_sampling(TextPolicy(), Sampling(0.5, max_tokens=3))
    with pytest.raises(
        UsageError, match=r"rollout.stop_token_ids, rollout.top_p: this policy is not sampled with that"
    ):
        check_sampling(TextPolicy(), Sampling(top_p=0.5, stop=(1,)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout.top_p": 0.0}, "rollout.top_p"),
        ({"rollout.top_p": 1.5}, "rollout.top_p"),
        ({"rollout.top_k": -1}, "rollout.top_k"),
        ({"rollout.max_tokens": 4, "rollout.min_tokens": 5}, "a text would be cut off before it may end"),
        ({"rollout.stop": ("",)}, "an empty string can't end a text"),
        ({"policy.chunk_length": 4}, "policy.chunk_length = 4: has no effect with prompts, whose policies write texts"),
    ],
)
def test_values_that_make_no_sense_for_texts_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=PROMPTS | given)


@pytest.mark.parametrize("name", ["top_p", "top_k", "max_tokens", "min_tokens", "stop", "stop_token_ids"])
def test_options_of_texts_have_no_effect_on_a_robot(name):
    value = getattr(OPTIONS, name)
    with pytest.raises(ConfigError, match=f"rollout.{name} = .*: has no effect without a suite of prompts"):
        load_config(overrides={f"rollout.{name}": value})
    assert getattr(load_config(overrides=PROMPTS | {f"rollout.{name}": value}).rollout, name) == value


def test_a_default_configuration_names_no_option_of_texts():
    assert Config().rollout.max_tokens is None
