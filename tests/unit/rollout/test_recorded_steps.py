"""Recorded episodes: every executed step with what was seen before it, and recording changes no episode."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vlarl.config.schema import Config, RolloutConfig
from vlarl.decisions import Sampling
from vlarl.envs.tabletop import TabletopPool
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.decisions import token_ids
from vlarl.rollout.collector import Collector
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.steps import NO_RECORDING, EpisodeSteps, RecordingPlan
from vlarl.run.parts import recording_plan
from vlarl.types import ChunkOutcome, Observation, Task

SUITE = "tabletop_spatial"
TASKS = [Task(SUITE, index % 3, 1 + index // 3, seed=index, member=index) for index in range(6)]
CAMERAS = ("agent", "wrist")


@pytest.fixture(scope="module")
def policy():
    return load_policy("builtin:tiny-oft")


def played(policy, plan):
    """Episodes of the built-in policy, in fewer slots than there are episodes."""
    pool = TabletopPool(SUITE, 4, policy.image_size, CAMERAS[: policy.num_images], reward="dense")
    collector = Collector(pool, policy, TorchEngine(policy, torch.device("cpu")))
    ended = dict(collector.episodes(TASKS, Sampling(0.0), plan))
    return [ended[index] for index in range(len(TASKS))]


@pytest.fixture(scope="module")
def recorded(policy):
    return played(policy, RecordingPlan(steps=lambda task: task.member != 2))


def test_the_recorded_actions_lead_to_the_recorded_frames_and_the_same_success(policy, recorded):
    """Run again, one step at a time, from the initial state that the task names."""
    assert recorded[2].steps is None
    assert {each.trajectory.success for each in recorded} == {True, False}, "both outcomes are there"
    pool = TabletopPool(SUITE, 1, policy.image_size, CAMERAS[: policy.num_images], reward="dense")
    for episode in (each for each in recorded if each.steps is not None):
        trajectory = episode.trajectory
        whole = episode.steps.demonstration(trajectory.task, trajectory.success)
        assert len(whole.actions) == trajectory.length > 8 and whole.instruction
        (seen,) = pool.reset([0], [trajectory.task])
        outcome = None
        for image, state, action, reward in zip(whole.images, whole.proprio, whole.actions, whole.rewards, strict=True):
            np.testing.assert_array_equal(seen.images, image)
            np.testing.assert_array_equal(seen.proprio, state)
            (outcome,) = pool.step_chunk([0], action[None, None])
            assert outcome.rewards[0] == reward
            seen = outcome.observation
        assert outcome is not None and outcome.success == trajectory.success == whole.success
        assert outcome.terminated == trajectory.terminated and outcome.truncated == trajectory.truncated


def test_recording_changes_no_episode(policy, recorded):
    for ours, theirs in zip(recorded, played(policy, NO_RECORDING), strict=True):
        assert theirs.steps is None
        assert [t.num_executed for t in ours.trajectory.transitions] == [
            t.num_executed for t in theirs.trajectory.transitions
        ]
        for one, other in zip(ours.trajectory.transitions, theirs.trajectory.transitions, strict=True):
            np.testing.assert_array_equal(one.observation.images, other.observation.images)
            np.testing.assert_array_equal(one.rewards, other.rewards)
            assert torch.equal(token_ids(one.decision), token_ids(other.decision))


def test_steps_without_an_observation_of_each_are_refused():
    seen = Observation(np.zeros((1, 2, 2, 3), np.uint8), np.zeros(8, np.float32), "it")
    outcome = ChunkOutcome(np.zeros(4, np.float32), 3, False, False, False, seen, passed=(seen,))
    with pytest.raises(ValueError, match="3 steps were executed, and 2 observations are there"):
        EpisodeSteps().add(seen, np.zeros((4, 7), np.float32), outcome)
    steps = EpisodeSteps()
    steps.add(seen, np.zeros((4, 7), np.float32), replace(outcome, error="it died"))
    assert len(steps) == 0


def plan_of(**rollout):
    return recording_plan(Config(rollout=RolloutConfig(num_groups=3, group_size=2, **rollout)))


def batch(iteration, groups=3):
    return [Task(SUITE, 0, 0, 0, group, member, 2, iteration) for group in range(groups) for member in range(2)]


@pytest.mark.parametrize(("every", "expected"), [(1, range(18)), (4, (0, 4, 8, 12, 16)), (7, (0, 7, 14))])
def test_exactly_one_in_so_many_episodes_is_saved_counted_over_the_run(every, expected):
    plan = plan_of(save="rlds", save_every=every)
    tasks = [task for iteration in (1, 2, 3) for task in batch(iteration)]
    assert [index for index, task in enumerate(tasks) if plan.steps(task)] == list(expected)


def test_segments_count_their_episodes_over_the_run():
    plan = plan_of(save="rlds", save_every=3, num_steps=8)
    tasks = [Task(SUITE, 0, 0, 0, group=index) for index in range(7)]
    assert [index for index, task in enumerate(tasks) if plan.steps(task)] == [0, 3, 6]


def test_videos_are_of_every_iteration_and_are_distributed_over_it():
    plan = plan_of(videos=2)
    for iteration in (1, 2):
        assert [index for index, task in enumerate(batch(iteration)) if plan.video(task)] == [0, 3]
        assert not any(plan.steps(task) for task in batch(iteration))
    assert not any(plan_of().video(task) or plan_of().steps(task) for task in batch(1))
