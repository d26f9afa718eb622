"""Samples of a dataset: every one once an epoch, and a resumed run continues at the next one."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.kinds import TextPolicy, WordPool

from vlarl.config.schema import Config, PromptsConfig
from vlarl.decisions import Sampling
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.envs.prompts.arithmetic import ArithmeticPrompts
from vlarl.envs.prompts.dataset import PromptDataset
from vlarl.envs.prompts.pool import PromptPool
from vlarl.errors import UsageError
from vlarl.rewards.text_function import TextFunctionReward
from vlarl.rollout.collector import Collector
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.epochs import Epochs, EpochSampler, build_task_sampler
from vlarl.rollout.tasks import TaskSampler
from vlarl.types import Task, Trajectory

SPEC = SuiteSpec("prompts", (TaskSpec(0, "a prompt", 1),), tuple(range(10)), (10, 11), (10, 11), 0, in_epochs=True)


def config(**rollout) -> Config:
    return Config.model_validate({"rollout": {"num_groups": 4, "group_size": 2, **rollout}, "run": {"seed": 5}})


def ended(tasks: list[Task], trajectory: Trajectory) -> list[Trajectory]:
    return [replace(trajectory, task=task) for task in tasks]


def states(tasks: list[Task]) -> list[int]:
    return [task.init_state for task in tasks if task.member == 0]


@pytest.fixture
def episode(trajectory):
    return trajectory([[1.0]])


def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(episode):
    sampler = build_task_sampler(config(), SPEC)
    seen: list[int] = []
    for iteration in range(1, 6):  # 20 groups: two epochs
        tasks = sampler.get_batch(iteration)
        assert [(t.group, t.member) for t in tasks] == [(g, m) for g in range(4) for m in range(2)]
        assert all(
            a.init_state == b.init_state and a.seed != b.seed for a, b in zip(tasks[::2], tasks[1::2], strict=True)
        )
        seen += states(tasks)
        sampler.report_results(ended(tasks, episode))
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:] and seen[:10] != list(range(10))
    assert sampler.metrics()["rollout/consumed_samples"] == 20 and sampler.metrics()["rollout/epoch"] == 2


def test_all_tasks_of_a_suite_are_one_dataset(episode):
    source = ArithmeticPrompts()
    sampler = EpochSampler(config(num_groups=3200), source.spec)
    pairs = Counter((task.task_id, task.init_state) for task in sampler.get_batch(1) if task.member == 0)
    assert len(pairs) == 4 * 800 and set(pairs.values()) == {1}


def test_a_resumed_run_continues_at_the_next_sample_also_after_refills(episode):
    sampler = EpochSampler(config(), SPEC)
    taken: list[list[int]] = []
    for iteration, refilled in ((1, 3), (2, 0), (3, 1)):
        tasks = sampler.get_batch(iteration)
        assert states(sampler.get_batch(iteration)) == states(tasks), "an interrupted iteration takes the same again"
        tasks += sampler.refill(iteration, 4, refilled)
        taken.append(states(tasks))
        saved = sampler.state()
        sampler.report_results(ended(tasks, episode))
    assert sorted(taken[0] + taken[1][:3]) == list(range(10)), "refilled groups take the next samples"
    resumed = EpochSampler(config(), SPEC)
    resumed.restore(saved)
    assert saved["consumed_samples"] == 11
    assert states(resumed.get_batch(3)) + states(resumed.refill(3, 4, 1)) == taken[2]


@pytest.mark.parametrize("mode", ["uniform", "adaptive"])
def test_a_run_is_not_resumed_on_other_data(tmp_path, mode):
    options = Config.model_validate({"curriculum": {"mode": mode}})

    def opened(*texts: str) -> TaskSampler:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        return build_task_sampler(options, PromptDataset(PromptsConfig(path=(str(tmp_path / "data.jsonl"),))).spec)

    saved = json.loads(json.dumps(opened("a", "b", "c").state()))
    opened("a", "b", "c").restore(saved)
    with pytest.raises(
        UsageError, match=r"data.jsonl had 3 rows, and data.jsonl has 4\). Restore it, or start a new run"
    ):
        opened("a", "b", "c", "d").restore(saved)
    with pytest.raises(UsageError, match="data.jsonl had 3 rows of other content"):
        opened("a", "c", "b").restore(saved)
    with pytest.raises(UsageError, match="the run had 1 file, and now has 2"):
        spec = opened("a", "b", "c").spec
        build_task_sampler(options, replace(spec, data=spec.data * 2)).restore(saved)
    opened("a", "b").restore(
        {key: value for key, value in saved.items() if key != "data"}
    )  # saved before data was recorded


def test_another_seed_is_another_order_and_a_curriculum_chooses_for_itself():
    assert [Epochs(1, 20).sample(i) for i in range(20)] != [Epochs(2, 20).sample(i) for i in range(20)]
    weighted = Config.model_validate({"curriculum": {"mode": "adaptive"}})
    assert type(build_task_sampler(weighted, SPEC)) is TaskSampler
    assert type(build_task_sampler(config(), replace(SPEC, in_epochs=False))) is TaskSampler


def test_an_epoch_has_each_sample_as_often_as_its_weight_says():
    epochs = Epochs(0, 12, (1.0,) * 2 + (2.0,) * 2 + (0.5,) * 8)
    orders = [epochs.order(epoch) for epoch in range(2)]
    for order in orders:
        counts = np.bincount(order, minlength=12)
        assert counts[:4].tolist() == [1, 1, 2, 2] and counts[4:].sum() == 4 and counts[4:].max() == 1
    assert set(orders[0][orders[0] > 3]) != set(orders[1][orders[1] > 3]), "another half in another epoch"
    assert {epochs.sample(10 + i) for i in range(10)} == set(orders[1].tolist())


def test_a_transition_has_the_text_of_its_decision():
    policy, pool = TextPolicy(), WordPool()
    collector = Collector(pool, policy, TorchEngine(policy, torch.device("cpu")))
    episodes = list(collector.episodes([Task("words", i, 0, i) for i in range(3)], Sampling(1.0)))
    for _, each in episodes:
        (transition,) = each.trajectory.transitions
        assert transition.text == policy.act(transition.decision)[0]
        ids = transition.decision.token_ids()[0]
        assert len(ids) == int(transition.decision.mask.sum())
        assert "".join(" abc"[i] for i in ids).rstrip() == transition.text


def test_rows_of_a_file_become_episodes_that_a_function_of_trl_scores(tmp_path):
    """The whole way: file, sampler, collector, environment and reward, with a policy that writes letters."""
    rows = [{"prompt": f"write {word}", "solution": word} for word in ("a", "b", "c", "ab")]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def accuracy(completions, solution, **kwargs):
        return [2.0 if text == right else 0.0 for text, right in zip(completions, solution, strict=True)]

    pool = PromptPool(PromptDataset(PromptsConfig(path=(str(path),))), 3)
    sampler = build_task_sampler(config(num_groups=3, group_size=16), pool.spec)
    policy = TextPolicy()
    collector = Collector(pool, policy, TorchEngine(policy, torch.device("cpu")))
    episodes = [each.trajectory for _, each in collector.episodes(sampler.get_batch(1), Sampling(1.0))]
    assert {t.task.init_state for t in episodes} == set(pool.spec.train_states)
    scored = TextFunctionReward("accuracy", accuracy, "trl").score_all(episodes)
    for episode in scored:
        (transition,) = episode.transitions
        right = rows[episode.task.init_state]["solution"]
        assert episode.env_return == (2.0 if transition.text == right else 0.0)
        assert episode.success == (transition.text.strip() == right)
    assert 0 < sum(t.success for t in scored) < len(scored), "both occur"


def test_groups_of_batches_that_overlap_are_counted_each(episode):
    """Two batches are handed out before any result is reported; an update then takes the first group of each."""
    sampler = EpochSampler(config(), SPEC)
    first, second = sampler.get_batch(1), sampler.get_batch(2, unreported=4)
    assert len(set(states(first) + states(second))) == 8, "no sample twice"
    sampler.report_results(ended(first[:2] + second[:2], episode))
    assert sampler.consumed == 2
    third = sampler.get_batch(3, unreported=6)
    assert sorted(states(first) + states(second) + states(third)[:2]) == list(range(10))
