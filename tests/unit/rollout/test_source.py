"""RolloutSource in turn with the update, and what waits in any source until its update is due."""

import pytest
from fakes.streaming import Stream

from vlarl.rollout.source import RolloutsInTurn, RolloutSource
from vlarl.types import Rollout


def test_in_turn_nothing_is_collected_before_it_is_wanted():
    began: list[int] = []

    def collect(iteration: int) -> Rollout:
        began.append(iteration)
        return Rollout(iteration, (), (), {}, {}, {}, {}, 0)

    source: RolloutSource
    with RolloutsInTurn(collect) as source:
        assert began == []
        assert source.get(1).iteration == 1
        source.updated()
        with source.paused():
            assert began == [1]


@pytest.mark.parametrize("kind", ["in turn", "ahead"])
def test_rollouts_wait_until_their_update_is_due(trajectory, kind):
    """In the order of the rollouts, each one once, and without what was left out of a rollout."""
    episodes = [trajectory([[1]], seed=seed) for seed in range(5)]

    def collected(*kept: int) -> Rollout:
        return Rollout(1, tuple(episodes), tuple(episodes[index] for index in kept), {}, {}, {}, {}, 0)

    source: RolloutSource = RolloutsInTurn(lambda iteration: collected()) if kind == "in turn" else Stream().open()
    assert source.gather(collected(3, 0), update_due=False) == [] and source.num_waiting == 2
    assert source.gather(collected(), update_due=False) == [] and source.num_waiting == 2
    assert source.gather(collected(1), update_due=True) == [episodes[3], episodes[0], episodes[1]]
    assert source.num_waiting == 0
    assert source.gather(collected(4), update_due=True) == [episodes[4]]
