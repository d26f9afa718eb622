"""The curriculum: moving success, probabilities, how tasks are sampled by them, and reading it from a file."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vlarl.config.schema import CurriculumConfig
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.errors import UsageError
from vlarl.rollout.curriculum import Curriculum, TaskRecord, entropy, read_curriculum, sample_indices
from vlarl.rollout.tasks import TaskSampler

SPEC = SuiteSpec(
    "suite",
    tuple(TaskSpec(i, f"do {i}", 10) for i in range(4)),
    train_states=(3, 4, 5),
    eval_states=(0,),
    benchmark_states=(0,),
)


def adaptive(**options) -> CurriculumConfig:
    return CurriculumConfig(mode="adaptive", **options)


def curriculum(config: CurriculumConfig, *records: TaskRecord) -> Curriculum:
    made = Curriculum(config, range(len(records)))
    made.records = dict(enumerate(records))
    return made


def sampler(configure, num_groups: int = 8, **options) -> TaskSampler:
    config = configure(rollout={"num_groups": num_groups, "group_size": 2}, curriculum={"mode": "adaptive", **options})
    return TaskSampler(config, SPEC)


# Moving success


def test_the_moving_success_weighs_each_episode_by_its_age():
    record = TaskRecord()
    for success in (True, False, True):
        record = record.after(success, alpha=0.5)
    assert record.success == pytest.approx((0.25 * 1 + 0.5 * 0 + 1 * 1) / (0.25 + 0.5 + 1))
    assert (record.weight, record.episodes) == (1.75, 3)
    for _ in range(200):
        record = record.after(False, alpha=0.95)
    assert record.weight == pytest.approx(20.0, rel=1e-3) and record.success == pytest.approx(0.0, abs=1e-4)


def test_the_first_episode_has_no_extra_weight():
    """An average initialised with its first value would still be 0.95^9 = 63% here."""
    record = TaskRecord().after(True, 0.95)
    for _ in range(9):
        record = record.after(False, 0.95)
    assert record.success == pytest.approx(0.95**9 / sum(0.95**n for n in range(10)))
    assert record.success < 0.08


def test_few_episodes_are_pulled_to_one_half():
    assert TaskRecord().estimate == 0.5
    assert TaskRecord(1.0, 1.0, 1).estimate == pytest.approx(2 / 3)
    assert TaskRecord(0.0, 18.0, 40).estimate == pytest.approx(1 / 20)


# Probabilities


def test_probabilities_follow_the_formula():
    half, never, mostly = TaskRecord(0.5, 18.0, 40), TaskRecord(0.0, 18.0, 40), TaskRecord(0.8, 18.0, 40)
    interests = np.array([1.0, 4 * 0.05 * 0.95, 4 * 0.77 * 0.23])  # estimates 0.5, 0.05, 0.77
    expected = 0.2 / 3 + 0.8 * interests / interests.sum()
    assert curriculum(adaptive(), half, never, mostly).probabilities() == pytest.approx(expected)
    sharp = interests**2
    expected = 0.2 / 3 + 0.8 * sharp / sharp.sum()
    assert curriculum(adaptive(tau=0.5), half, never, mostly).probabilities() == pytest.approx(expected)


def test_the_temperature_goes_from_the_best_task_to_all_of_them():
    records = [TaskRecord(success, 18.0, 40) for success in (0.5, 0.9, 0.0)]
    cold = curriculum(adaptive(tau=0.01, floor=0.3), *records).probabilities()
    assert cold == pytest.approx([0.1 + 0.7, 0.1, 0.1], abs=1e-9)
    warm = curriculum(adaptive(tau=1e6), *records).probabilities()
    assert warm == pytest.approx([1 / 3] * 3, abs=1e-5)


def test_success_and_failure_are_equally_uninteresting():
    probabilities = curriculum(adaptive(), *(TaskRecord(s, 18.0, 40) for s in (0.1, 0.9, 0.5))).probabilities()
    assert probabilities[0] == pytest.approx(probabilities[1]) and probabilities[2] > 1.5 * probabilities[0]


def test_no_task_starves():
    hopeless = [TaskRecord(0.0, 1e4, 10**4)] * 9
    made = curriculum(adaptive(floor=0.2, tau=0.1, ema_alpha=0.9999), TaskRecord(0.5, 1e4, 10**4), *hopeless)
    assert made.probabilities()[1:] == pytest.approx([0.02] * 9, abs=1e-9)
    assert made.probabilities()[0] == pytest.approx(0.82)


def test_a_static_mixture_is_used_as_it_is_or_multiplied_with_the_interest():
    config = CurriculumConfig(mode="weighted", weights=(1.0, 3.0, 0.0))
    records = (TaskRecord(0.5, 18.0, 40), TaskRecord(0.0, 18.0, 40), TaskRecord())
    assert curriculum(config, *records).probabilities() == pytest.approx([0.25, 0.75, 0.0])
    both = np.array([1 * 1.0, 3 * 0.19, 0.0])
    expected = 0.2 * np.array([0.25, 0.75, 0.0]) + 0.8 * both / both.sum()
    assert curriculum(adaptive(weights=(1.0, 3.0, 0.0)), *records).probabilities() == pytest.approx(expected)


def test_a_solved_task_is_skipped_but_for_the_floor():
    solved, open_task = TaskRecord(0.96, 20.0, 30), TaskRecord(0.9, 20.0, 30)
    config = adaptive(skip_solved_above=0.95, floor=0.1)
    assert curriculum(config, solved, open_task).probabilities() == pytest.approx([0.05, 0.95])
    assert curriculum(config, solved, solved).probabilities() == pytest.approx([0.5, 0.5]), "when all are solved"
    lucky = TaskRecord(1.0, 4.0, 4)
    assert curriculum(config, lucky, open_task).probabilities()[0] > 0.05, "four episodes are not enough"
    exact = TaskRecord(1.0, 12.8, 20)
    assert curriculum(config, exact, open_task).is_solved(0), "1 / (1 - alpha) episodes are enough"


def test_the_metrics_hold_the_records():
    made = curriculum(adaptive(ema_alpha=0.5), TaskRecord(0.95, 2.0, 9), TaskRecord(), TaskRecord(0.5, 2.0, 2))
    row = made.metrics()
    assert row["curriculum/task_00_success"] == 0.95 and "curriculum/task_01_success" not in row
    probabilities = [row[f"curriculum/task_{i:02d}_probability"] for i in range(3)]
    assert probabilities == pytest.approx(made.probabilities()) and sum(probabilities) == pytest.approx(1.0)
    assert row["curriculum/num_solved"] == 1.0
    assert row["curriculum/entropy"] == pytest.approx(-sum(p * math.log(p) for p in probabilities))
    assert entropy(np.full(8, 1 / 8)) == pytest.approx(math.log(8)) and entropy(np.array([1.0, 0.0])) == 0.0


# Sampling


def test_counts_are_the_probabilities_rounded_up_or_down_and_exact_on_average():
    probabilities = np.array([0.5, 0.3, 0.13, 0.07, 0.0])
    total = np.zeros(5)
    for seed in range(2000):
        counts = np.bincount(sample_indices(probabilities, 10, np.random.default_rng(seed)), minlength=5)
        assert counts.sum() == 10
        assert (np.abs(counts - 10 * probabilities) < 1).all()
        total += counts
    assert total / 2000 == pytest.approx(10 * probabilities, abs=0.04)
    assert total[4] == 0


def test_the_order_is_shuffled():
    """So that the first groups, which oversampling prefers, are not all of one task."""
    orders = {
        tuple(sample_indices(np.array([0.5, 0.5]), 4, np.random.default_rng(seed)).tolist()) for seed in range(100)
    }
    assert len(orders) == 6, "every order of two and two"


def test_adaptive_sampling_follows_the_results(configure, episodes):
    source = sampler(configure, num_groups=16, floor=0.1)
    assert Counter(t.task_id for t in source.get_batch(1) if t.member == 0) == {0: 4, 1: 4, 2: 4, 3: 4}
    source.report_results(episodes(0, [True] * 40) + episodes(1, [False] * 40) + episodes(2, [True, False] * 20))
    counts = Counter(t.task_id for n in range(1, 41) for t in source.get_batch(n) if t.member == 0)
    assert {task: counts[task] / 640 for task in range(4)} == pytest.approx(
        dict(enumerate(source.curriculum.probabilities())), abs=0.01
    )
    assert counts[2] > 3 * counts[0] and counts[3] > 3 * counts[1], "near 50%, and never tried"


def test_crashed_episodes_are_ignored_and_unscored_ones_count(configure, episodes):
    source = sampler(configure)
    source.report_results(episodes(0, [False] * 5, status="crashed"))
    assert source.curriculum.records[0] == TaskRecord()
    source.report_results(episodes(0, [True] * 5, status="reward_failed"))
    assert source.curriculum.records[0].episodes == 5 and source.curriculum.records[0].success == 1.0


# Persistence


def test_groups_follow_from_seed_iteration_and_state(configure, episodes):
    source, resumed = sampler(configure), sampler(configure)
    source.report_results(episodes(0, [True, False, True]) + episodes(3, [False] * 7))
    assert source.get_batch(5) != resumed.get_batch(5)
    resumed.restore(json.loads(json.dumps(source.state())))
    assert resumed.state() == source.state(), "to the last bit"
    assert resumed.get_batch(5) == source.get_batch(5) and resumed.refill(5, 8, 3) == source.refill(5, 8, 3)
    resumed.restore({})
    assert resumed.state() == source.state(), "checkpoints of earlier releases hold none"


def test_a_new_run_starts_from_the_records_of_the_old_one(configure, episodes, tmp_path):
    old = sampler(configure)
    old.report_results(episodes(0, [True] * 3) + episodes(2, [False] * 4))
    description = old.describe()
    assert description["tasks"]["2"] == {
        "instruction": "do 2",
        "success": 0.0,
        "weight": old.curriculum.records[2].weight,
        "episodes": 4,
        "probability": old.curriculum.probabilities()[2],
        "solved": False,
    }
    (tmp_path / "curriculum.json").write_text(json.dumps({"iteration": 3, **description}))
    config = configure(env={"task_ids": (2, 3)}, curriculum={"mode": "adaptive"})
    for source in (tmp_path, tmp_path / "curriculum.json"):
        new = TaskSampler(config, SPEC)
        new.restore(read_curriculum(source, ["suite"]))
        assert new.curriculum.records == {2: old.curriculum.records[2], 3: TaskRecord()}


def damaged(folder: Path, content: str) -> Path:
    path = folder / "curriculum.json"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"suite": "suite"}', "KeyError: 'tasks'"),
        ('{"suite": "suite", "tasks": {"0": {"success": 0.5}}}', "KeyError: 'weight'"),
        ('{"suite": "suite", "tasks": {"0": {"success": 1.5, "weight": 1, "episodes": 1}}}', "not a mean of outcomes"),
        ('{"suite": "suite", "tasks": {"0": {"success": 0.5, "weight": 9, "episodes": 1}}}', "not a mean of outcomes"),
    ],
)
def test_a_file_that_is_not_a_curriculum_is_refused(tmp_path, content, reason):
    with pytest.raises(
        UsageError, match=f"curriculum.json is not a curriculum .*{reason}.*curriculum.start_from must name"
    ):
        read_curriculum(damaged(tmp_path, content), ["suite"])


def test_a_curriculum_that_is_missing_or_of_another_suite_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*curriculum.json \(No such file or directory\)"):
        read_curriculum(tmp_path, ["suite"])
    with pytest.raises(UsageError, match="is for other, and env.suite is suite"):
        read_curriculum(damaged(tmp_path, '{"suite": "other", "tasks": {}}'), ["suite"])
