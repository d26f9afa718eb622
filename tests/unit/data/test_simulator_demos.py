"""Demonstrations of simulators: which episodes are played, what is kept of them, and a fresh policy made for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.worker_envs import SPEC, CountingFactory

from vlarl.config.finetune import DemoConfig, FinetuneConfig, FinetunePolicyConfig
from vlarl.data.batches import DemoBatches
from vlarl.data.demo_set import DemoSet, from_demonstrations
from vlarl.data.demos import SimulatorSource, collect_demos, demonstration_tasks, play_tasks
from vlarl.data.finetune import demo_statistics, fresh_policy, refuse_other_robot
from vlarl.data.mixtures import MixtureSampler
from vlarl.envs.base import Demonstration, ExpertFlaws
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.load import load_policy
from vlarl.training.sft import Imitation, imitate
from vlarl.types import Task


def episode(task: Task, length: int, success: bool) -> Demonstration:
    rng = np.random.default_rng(task.seed)
    return Demonstration(
        task=task,
        instruction=SPEC.tasks[task.task_id].instruction,
        images=rng.integers(0, 256, (length, 1, 56, 56, 3), dtype=np.uint8),
        proprio=rng.normal(size=(length, 3)).astype(np.float32),
        actions=rng.normal(size=(length, 2)).astype(np.float32),
        rewards=np.zeros(length, np.float32),
        success=success,
    )


class FakeExperts:
    """Fail at task 1, take task_id + 2 steps."""

    spec = SPEC

    def demonstrate(self, tasks, flaws):
        self.played_with = flaws
        return (episode(task, task.task_id + 2, task.task_id != 1) for task in tasks)


def test_episodes_start_from_training_states_in_turn_and_never_from_those_of_evaluation():
    tasks = demonstration_tasks(SPEC, [2, 0], episodes_per_task=4, seed=5)
    assert [(task.task_id, task.init_state) for task in tasks] == [
        (2, 0), (2, 1), (2, 2), (2, 0), (0, 0), (0, 1), (0, 2), (0, 0),
    ]  # fmt: skip
    assert len({task.seed for task in tasks}) == 8
    assert tasks == demonstration_tasks(SPEC, [2, 0], 4, 5) != demonstration_tasks(SPEC, [2, 0], 4, 6)
    longer = demonstration_tasks(SPEC, None, 2, 5)
    assert longer[0] == next(task for task in tasks if task.task_id == 0)  # whatever the other tasks
    with pytest.raises(UsageError, match=r"no task \[4\]"):
        demonstration_tasks(SPEC, [4], 1, 0)
    more = replace(SPEC, first_fresh_state=50)
    assert [task.init_state for task in demonstration_tasks(more, [2, 0], 2, 5)] == [50, 51, 50, 51]


def test_what_was_played_becomes_one_flat_set():
    notes: list[str] = []
    experts = FakeExperts()
    tasks = demonstration_tasks(SPEC, [0, 1], 2, 0)
    demos = from_demonstrations(
        "counting", play_tasks(experts, tasks, ExpertFlaws(action_noise=0.25, hesitation=0.5), notes.append)
    )
    alone = [episode(task, task.task_id + 2, task.task_id != 1) for task in tasks]
    assert experts.played_with == ExpertFlaws(action_noise=0.25, hesitation=0.5)
    np.testing.assert_array_equal(demos.episode_lengths, [2, 2, 3, 3])
    np.testing.assert_array_equal(demos.episode_starts, [0, 2, 4, 7])
    np.testing.assert_array_equal(demos.actions, np.concatenate([e.actions for e in alone]))
    np.testing.assert_array_equal(demos.images, np.concatenate([e.images for e in alone]))
    assert demos.instructions == ("count to 5", "count to 6")
    np.testing.assert_array_equal(demos.instruction_ids, [0] * 4 + [1] * 6)
    assert notes == [
        "counting task 0: 2 of 2 succeed (count to 5)",
        "counting task 1: 0 of 2 succeed (count to 6)",
    ]


class FakeSource:
    name, action_dim, proprio_dim = "counting", 2, 3

    def __init__(self, demos: DemoSet, only_successful: bool) -> None:
        self.demos, self.only_successful = demos, only_successful

    def collect(self, note):
        return self.demos


def made(task_ids: list[int], episodes: int = 2) -> DemoSet:
    tasks = demonstration_tasks(SPEC, task_ids, episodes, 0)
    return from_demonstrations("counting", play_tasks(FakeExperts(), tasks, DemoConfig(), lambda text: None))


def test_failures_are_counted_and_left_out():
    demos = made([0, 1, 2])
    (kept,), share = collect_demos([FakeSource(demos, only_successful=True)], note=lambda text: None)
    assert share == pytest.approx(4 / 6)
    np.testing.assert_array_equal(kept.episode_lengths, [2, 2, 4, 4])
    np.testing.assert_array_equal(kept.images, demos.images[[0, 1, 2, 3, *range(10, 18)]])
    np.testing.assert_array_equal(kept.instruction_ids, [0] * 4 + [2] * 8)
    assert kept.success.all()
    (everything,), same = collect_demos([FakeSource(demos, only_successful=False)], note=lambda text: None)
    assert len(everything) == len(demos) and same == share


def test_nothing_but_failures_is_nothing_to_imitate():
    with pytest.raises(VlarlError, match="none of 2 demonstrations of counting succeeded"):
        collect_demos([FakeSource(made([1]), only_successful=True)], note=lambda text: None)


def test_a_source_keeps_only_successes_unless_configured_otherwise():
    for given, expected in ((None, True), (True, True), (False, False)):
        assert SimulatorSource(DemoConfig(only_successful=given), CountingFactory(), 0).only_successful is expected


def test_a_chunk_past_the_end_stands_still_and_keeps_the_gripper():
    demos = made([0])
    chunk = demos.chunks(np.array([1]), 3)
    np.testing.assert_array_equal(chunk[0], [demos.actions[1], [0, demos.actions[1, 1]], [0, demos.actions[1, 1]]])


def in_turn(*demos: DemoSet) -> MixtureSampler:
    return MixtureSampler([len(part) for part in demos], [1.0] * len(demos), seed=0)


def test_sets_are_normalised_each_by_its_own_statistics():
    policy = fresh_policy(FinetunePolicyConfig(chunk_length=1), 0, FakeSource(made([0]), True))
    one, other = made([0]), replace(made([0]), name="other", actions=10 * made([0]).actions)
    for part in (one, other):
        policy.add_statistics(part.name, demo_statistics(part))
    assert set(policy.config.norm_stats) == {"counting", "other"}
    apart = [DemoBatches([part], policy, torch.device("cpu"), in_turn(part)) for part in (one, other)]
    both = DemoBatches([one, other], policy, torch.device("cpu"), in_turn(one, other))
    first, second = (batches._rows.actions for batches in apart)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(both._rows.actions, torch.cat([first, second]))


def test_statistics_of_a_checkpoint_stay():
    policy = fresh_policy(FinetunePolicyConfig(), 0, FakeSource(made([0]), True))
    own = {"action": {"q01": [0.0] * 2, "q99": [1.0] * 2}, "proprio": {"q01": [0.0] * 3, "q99": [1.0] * 3}}
    policy.config.norm_stats["counting_no_noops"] = own
    policy.add_statistics("counting", demo_statistics(made([0])))
    assert policy.config.norm_stats == {"counting_no_noops": own}


def test_demonstrations_of_another_robot_are_refused():
    policy = fresh_policy(FinetunePolicyConfig(), 0, FakeSource(made([0]), True))
    tabletop = FakeSource(made([0]), True)
    tabletop.name, tabletop.action_dim, tabletop.proprio_dim = "tabletop", 7, 8
    with pytest.raises(UsageError, match="the policy has 2 action dimensions and 3 of the robot's state, the demon.*7"):
        refuse_other_robot(policy, tabletop)


def test_too_long_a_chunk_is_refused_before_anything_is_played():
    with pytest.raises(UsageError, match="chunk_length 40 needs 80 learned slots"):
        fresh_policy(FinetunePolicyConfig(chunk_length=40), 0, FakeSource(made([0]), True))


def test_a_fresh_policy_is_trained_by_processes_and_finds_its_statistics_again(tmp_path):
    """Actions are [1, init_state]: the policy learns them in units that it never saw before."""
    config = DemoConfig(episodes_per_task=3, task_ids=(0, 1), action_noise=0.0, num_workers=1)
    source = SimulatorSource(config, CountingFactory(), seed=0)
    policy = fresh_policy(FinetunePolicyConfig(chunk_length=2), 0, source, image_size=28)
    demos, share = collect_demos([source], note=lambda text: None)
    assert share == 1.0 and len(demos[0]) == 3 * 5 + 3 * 6
    np.testing.assert_array_equal(np.unique(demos[0].actions, axis=0), [[1, 0], [1, 1], [1, 2]])
    policy.add_statistics(demos[0].name, demo_statistics(demos[0]))
    statistics = policy.config.norm_stats["counting"]
    assert statistics["action"]["q01"] == [1.0, 0.0] and statistics["action"]["q99"] == [1.0, 2.0]
    assert statistics["num_trajectories"] == 6 and statistics["num_transitions"] == 33
    train = FinetuneConfig.model_validate(
        {"optim": {"steps": 30, "batch_size": 16, "lr": 2e-3, "warmup_steps": 3, "log_interval": 10}}
    )
    rows: list[dict[str, float]] = []
    batches = DemoBatches(demos, policy, torch.device("cpu"), in_turn(*demos))
    first, last = imitate(
        Imitation(policy, train.optim, batches, torch.device("cpu")), lambda step, row: rows.append(row)
    )
    assert last < 0.5 * first and [row["train/skipped_steps"] for row in rows] == [0, 0, 0]
    policy.save(tmp_path / "trained")
    again = load_policy(tmp_path / "trained")
    again.use_statistics(None, "counting")
    assert again.image_size == 28 and again.action_dim == 2 and again.config.proprio_dim == 3
    done = again.predict_action(demos[0].images[0], "count to 5", demos[0].proprio[0])
    np.testing.assert_allclose(done, demos[0].chunks(np.array([0]), 2)[0], atol=0.3)
