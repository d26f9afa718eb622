"""Demonstrations that fail on purpose: how often, and what is recorded of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes.worker_envs import CountingExpert, CountingFactory

from vlarl.config.finetune import DemoConfig
from vlarl.data.demos import SimulatorSource, simulator_flaws, tabletop_flaws
from vlarl.envs.base import ExpertFlaws, Mistakes
from vlarl.envs.env_process import IDLE_STEPS, EnvRunner
from vlarl.errors import UsageError
from vlarl.types import Task


class GivesUp(CountingExpert):
    """Counts to two and stands still, if it has to make a mistake."""

    def reset(self) -> None:
        self.steps, self.mistakes = 0, None

    def err(self, mistakes: Mistakes) -> None:
        self.mistakes = mistakes

    @property
    def finished(self) -> bool:
        return self.mistakes is not None and self.steps >= 2

    def act(self) -> np.ndarray:
        self.steps += 1
        return super().act() if self.steps <= 2 or self.mistakes is None else np.zeros(2, np.float32)


class FallibleFactory(CountingFactory):
    def build_expert(self, env):
        return GivesUp(env)


def test_an_episode_ends_soon_after_its_expert_has_given_up():
    runner = EnvRunner(FallibleFactory())
    clean = runner.demonstrate(Task("counting", 0, 2, seed=3), ExpertFlaws())
    assert clean.success and len(clean.actions) == 5  # counts to five
    failed = runner.demonstrate(Task("counting", 0, 2, seed=3), ExpertFlaws(close_high=1.0))
    assert not failed.success and len(failed.actions) == 1 + IDLE_STEPS
    assert not failed.actions[2:].any() and len(failed.images) == len(failed.rewards) == 1 + IDLE_STEPS


def test_experts_that_make_no_mistakes_refuse_to():
    runner = EnvRunner(CountingFactory())
    with pytest.raises(UsageError, match="the experts of counting make no mistakes on purpose"):
        runner.demonstrate(Task("counting", 0, 2, seed=3), ExpertFlaws(release_early=1.0))


def test_mistakes_follow_from_the_seed_and_are_as_frequent_as_configured():
    flaws = ExpertFlaws(close_high=0.2, release_early=0.5)
    found = [flaws.mistakes(seed) for seed in range(2000)]
    assert found[:50] == [flaws.mistakes(seed) for seed in range(50)]
    for fraction, name in ((0.2, "closes_high"), (0.5, "releases_early")):
        count = sum(getattr(each, name) for each in found)
        assert abs(count - 2000 * fraction) < 4 * np.sqrt(2000 * fraction * (1 - fraction))
    # The two are independent: 40% of the episodes have neither.
    assert abs(sum(not each for each in found) - 800) < 4 * np.sqrt(2000 * 0.4 * 0.6)
    assert {each.goal % 2 for each in found} == {0, 1}


def test_libero_fails_on_purpose_if_configured_and_the_tabletop_by_default():
    assert simulator_flaws(DemoConfig(), "libero_spatial") == ExpertFlaws(action_noise=0.1)
    flawed = DemoConfig(close_high=0.1, release_early=0.3, hesitation=0.2)
    assert simulator_flaws(flawed, "libero_spatial") == ExpertFlaws(0.1, 0.3, 0.1, 0.2)
    assert simulator_flaws(flawed, "metaworld_mt10") == ExpertFlaws(action_noise=0.1, hesitation=0.2)
    assert tabletop_flaws(DemoConfig()) == ExpertFlaws(0.35, 0.55, 0.1)
    assert tabletop_flaws(flawed) == ExpertFlaws(0.1, 0.3, 0.1)


@pytest.mark.parametrize(
    ("options", "only_successful"),
    [({}, True), ({"release_early": 0.3}, False), ({"release_early": 0.3, "only_successful": True}, True)],
)
def test_failures_on_purpose_are_imitated_unless_they_are_excluded(options, only_successful):
    factory = CountingFactory(spec=replace(CountingFactory().spec, name="libero_spatial"))
    source = SimulatorSource(DemoConfig(episodes_per_task=1, num_workers=1, **options), factory, seed=0)
    assert source.only_successful is only_successful
