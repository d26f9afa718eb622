"""A policy and an environment that don't fit are told apart before a run, with what to type next."""

from types import SimpleNamespace

import pytest

from vlarl.errors import UsageError
from vlarl.run.parts import check_fit


@pytest.mark.parametrize(
    ("suite", "num_actions", "words"),
    [
        ("gym", 2, "policy.path: the policy's actions have 7 dimensions, those of gym have 2; "),
        ("gym", 2, "such as --gym.actions 0 1."),
        ("gym", 9, "choose a checkpoint made for this suite."),
        ("libero_spatial", 2, "choose a checkpoint made for this suite."),
    ],
)
def test_actions_of_another_size_are_refused(suite, num_actions, words):
    pool = SimpleNamespace(spec=SimpleNamespace(name=suite, action_dim=num_actions))
    with pytest.raises(UsageError) as refusal:
        check_fit(SimpleNamespace(action_dim=7), pool, None)
    assert words in str(refusal.value)
