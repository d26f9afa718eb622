"""Callables in a configuration: what stands for them in its YAML, where they go, and what is said when one is missing."""

import functools
import pickle
import threading

import pytest

from vlarl.config.callables import GivenCallable, find_given, refuse_unsendable
from vlarl.config.schema import Config
from vlarl.config.source.load import load_config, to_yaml
from vlarl.errors import UsageError


def quick(trajectory):
    return 1.0 - trajectory.length / 100


class Scorer:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, trajectory):
        return self.scale

    def method(self, trajectory):
        return -self.scale


HERE = f"python:{__name__}"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (quick, "quick"),
        (lambda t: 0.0, "<lambda>"),
        ((lambda: lambda t: 0.0)(), "<lambda>"),
        (functools.partial(quick, 1), "quick"),
        (Scorer(2.0), "Scorer"),
        (Scorer, "Scorer"),
        (Scorer(2.0).method, "Scorer.method"),
    ],
)
def test_each_has_a_readable_name(function, name):
    assert GivenCallable(function).name == f"{HERE}.{name}"


def test_the_configuration_keeps_it_and_its_yaml_names_it(tmp_path):
    config = load_config(None, {"reward.source": quick, "run.seed": 3})
    assert config.reward.source == f"{HERE}.quick"
    assert config.reward.given[config.reward.source].function is quick
    assert config.run.given == {} and Config().reward.given == {}
    text = to_yaml(config)
    assert f"source: {HERE}.quick" in text and "given" not in text
    (tmp_path / "config.yaml").write_text(text)
    again = load_config(tmp_path / "config.yaml")
    assert again.model_dump() == config.model_dump() and again.reward.given == {}


def test_it_stays_when_a_configuration_is_changed_copied_or_sent_to_another_process():
    factor = 3.0
    config = load_config(None, {"reward": {"source": lambda trajectory: factor * trajectory}})
    changed = load_config(config, {"run.seed": 9})
    assert changed.run.seed == 9 and changed.reward.given == config.reward.given
    copied = config.model_copy(update={"run": changed.run})
    sent = pickle.loads(pickle.dumps(copied))
    assert sent.reward.given[sent.reward.source](7.0) == 21.0


def test_two_of_one_name_are_kept_apart():
    config = load_config(
        None, {"reward.source": "combined", "reward.sources": ["sparse", lambda t: 1.0, lambda t: 2.0]}
    )
    _, one, two = config.reward.sources
    assert one.endswith(".<lambda>") and two == f"{one}_2"
    assert [config.reward.given[name](None) for name in (one, two)] == [1.0, 2.0]


def test_an_option_that_takes_no_callable_says_what_it_takes():
    with pytest.raises(UsageError, match=rf"optim.lr = '{HERE}.quick'.*must be a number"):
        load_config(None, {"optim.lr": quick})


def test_a_mapping_stays_the_value_of_its_option():
    options = {
        "env.suite": "gym",
        "gym.env": "CartPole-v1",
        "gym.instructions": ["balance"],
        "policy.path": "init:tiny-oft",
    }
    config = load_config(Config(), options | {"gym.kwargs": {"sutton_barto_reward": True}})
    assert config.gym.kwargs == {"sutton_barto_reward": True}


@pytest.mark.parametrize("source", [3, {"run.seed": 1}])
def test_what_is_no_configuration_is_refused(source):
    with pytest.raises(UsageError, match="a preset, a YAML file.*options go into the second argument"):
        load_config(source)


@pytest.mark.parametrize(
    ("option", "argument", "evaluates"), [("reward.source", "reward", False), ("gym.env", "env", True)]
)
def test_a_missing_callable_is_refused_with_the_python_call(option, argument, evaluates):
    with pytest.raises(UsageError) as caught:
        find_given(option, "python:mine.f", {}, argument)
    said = str(caught.value)
    assert f"{option} = 'python:mine.f'" in said and f"vlarl.train(resume=RUN, {argument}=...)" in said
    assert ("vlarl.evaluate(CHECKPOINT, env=...)" in said) == evaluates


def test_what_cannot_be_sent_to_a_process_says_why():
    lock = threading.Lock()

    def make_env():
        return lock

    with pytest.raises(UsageError, match=r"env: .*make_env cannot be sent.*cannot pickle.*inside the function"):
        refuse_unsendable("env", make_env)
    refuse_unsendable("env", quick)
