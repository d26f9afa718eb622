"""Rewards: their values, the step they are assigned to, and how a user's own function is found."""

import numpy as np
import pytest

from vlarl.config.known import KNOWN_REWARDS
from vlarl.errors import UsageError, VlarlError
from vlarl.rewards import REWARDS
from vlarl.rewards.function import FunctionReward
from vlarl.rewards.outcome import DenseReward, SparseReward


def test_the_names_that_configurations_may_use_are_those_there_are():
    assert set(KNOWN_REWARDS) == {*REWARDS, "combined"}


def assigned(trajectory) -> list[list[float]]:
    return [t.rewards.tolist() for t in trajectory.transitions]


def test_sparse_rewards_success_on_the_last_executed_step_and_nothing_else(trajectory):
    reward = SparseReward()
    assert reward.env_reward == "sparse"
    won = trajectory([[5, 5, 5], [5, 5, 0]], num_executed=[3, 2], terminated=True, success=True)
    assert assigned(reward.score(won)) == [[0, 0, 0], [0, 1, 0]]
    lost = trajectory([[5, 5, 5], [5, 5, 0]], num_executed=[3, 2])
    assert assigned(reward.score(lost)) == [[0, 0, 0], [0, 0, 0]]
    assert assigned(won) == [[5, 5, 5], [5, 5, 0]], "the original stays as it was"
    assert reward.score(won).env_return == 1.0 and reward.score(won).task == won.task


def test_dense_keeps_the_environments_rewards(trajectory):
    reward = DenseReward()
    assert reward.env_reward == "dense"
    episode = trajectory([[0.1, 0.2], [0.3, -0.1]])
    assert reward.score(episode) is episode


def test_the_value_of_a_users_function_is_assigned_to_the_last_executed_step(trajectory, tmp_path, monkeypatch):
    """Found from the folder that the program is called from."""
    (tmp_path / "rewards_of_mine.py").write_text(
        "import numpy\n"
        "def haste(trajectory):\n    return 10 - trajectory.length\n"
        "def numpy_number(trajectory):\n    return numpy.float32(0.5)\n"
        "def nothing(trajectory):\n    pass\n"
        "def not_a_number(trajectory):\n    return float('nan')\n"
        "constant = 3\n"
    )
    (tmp_path / "broken_rewards.py").write_text("def half(\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    episode = trajectory([[1, 1], [1, 0]], num_executed=[2, 1])
    reward = FunctionReward("rewards_of_mine:haste")
    assert reward.env_reward == "sparse"
    assert assigned(reward.score(episode)) == [[0, 0], [7, 0]]
    assert FunctionReward("rewards_of_mine:numpy_number").score(episode).env_return == 0.5
    for name, shown in (("nothing", "None"), ("not_a_number", "nan")):
        with pytest.raises(
            VlarlError, match=f"rewards_of_mine:{name} returned {shown}; it must return a finite number"
        ):
            FunctionReward(f"rewards_of_mine:{name}").score(episode)
    with pytest.raises(UsageError, match=r"'rewards_of_mine' has no function 'speed'; .*It has haste, "):
        FunctionReward("rewards_of_mine:speed")
    with pytest.raises(UsageError, match="has no function 'constant'"):
        FunctionReward("rewards_of_mine:constant")
    with pytest.raises(UsageError, match="cannot import the module 'broken_rewards'"):
        FunctionReward("broken_rewards:half")


def test_a_module_that_is_not_there_is_named_with_the_remedy():
    with pytest.raises(UsageError, match=r"reward.source: cannot import the module 'nowhere_at_all' of .*PYTHONPATH"):
        FunctionReward("nowhere_at_all:f")


def test_rewards_are_float32_like_the_environments(trajectory):
    scored = SparseReward().score(trajectory([[0.0]], terminated=True, success=True))
    assert scored.transitions[0].rewards.dtype == np.float32
