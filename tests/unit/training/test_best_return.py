"""The policy with the best training returns: averages by hand, and simulated runs whose best policy is known."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from vlarl.training.best_return import BestReturn
from vlarl.training.state import TrainerState
from vlarl.types import EpisodeStatus, Observation, Task, Trajectory, Transition

SEEN = Observation(np.zeros((1, 1, 1, 3), dtype=np.uint8), np.zeros(8, dtype=np.float32), "open the drawer")


def episode(value: float, task: int = 0, status: EpisodeStatus = "ok") -> Trajectory:
    rewards = np.array([value], dtype=np.float32)
    step = Transition(SEEN, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32), rewards, 1)
    return Trajectory(Task("tabletop_spatial", task, 0, 0), (step,), SEEN, True, False, value > 0, 0, status)


def episodes(*values: float, task: int = 0) -> list[Trajectory]:
    return [episode(value, task) for value in values]


def test_the_average_weighs_the_past_by_alpha_and_begins_without_a_past():
    state, best = TrainerState(), BestReturn(alpha=0.5, min_delta=0.0, patience=0)
    assert best.improved(state, episodes(1.0), 1)
    assert state.ema_return == 1.0
    assert not best.improved(state, episodes(0.0, 0.5), 2)
    # Weights 1/8, 1/4, 1/2 of returns 1, 0, 0.5, divided by their sum.
    assert state.ema_return == pytest.approx((0.125 * 1 + 0.5 * 0.5) / 0.875)
    assert (state.best_ema_return, state.best_iteration) == (1.0, 1)
    assert best.improved(state, episodes(2.0, 2.0), 3)
    assert state.best_iteration == 3 and state.best_ema_return == state.ema_return > 1.0


def test_with_one_task_it_is_adams_correction():
    state, best, alpha = TrainerState(), BestReturn(alpha=0.9, min_delta=0.0, patience=0), 0.9
    values = [1.0, 0.0, 0.0, 1.0, 0.0]
    best.improved(state, episodes(*values), 1)
    biased = 0.0
    for value in values:
        biased = alpha * biased + (1 - alpha) * value
    assert state.ema_return == pytest.approx(biased / (1 - alpha ** len(values)))


def test_each_task_has_its_own_average_and_they_count_alike():
    """The example of the docstring."""
    state = TrainerState()
    BestReturn(alpha=0.5, min_delta=0.0, patience=0).improved(state, [*episodes(1, 0, task=3), episode(1, 4)], 1)
    assert state.best_returns == pytest.approx({"3": 1 / 3, "4": 1.0})
    assert state.ema_return == pytest.approx(2 / 3)


def test_tasks_of_several_suites_have_averages_of_their_own():
    state, other = TrainerState(), episode(1, 3)
    other = replace(other, task=replace(other.task, suite="tabletop_goal"))
    BestReturn(alpha=0.5, min_delta=0.0, patience=0, several_suites=True).improved(state, [episode(0, 3), other], 1)
    assert state.best_returns == {"tabletop_spatial/3": 0.0, "tabletop_goal/3": 1.0}


def test_an_improvement_smaller_than_min_delta_is_none():
    state, best = TrainerState(), BestReturn(alpha=0.0, min_delta=0.25, patience=0)
    assert best.improved(state, episodes(0.0), 1)
    assert not best.improved(state, episodes(0.25), 2)
    assert best.improved(state, episodes(0.5), 3)
    assert state.best_ema_return == 0.5


def test_patience_waits_after_a_save():
    state, best = TrainerState(), BestReturn(alpha=0.0, min_delta=0.0, patience=2)
    saves = [best.improved(state, episodes(float(n)), n) for n in range(1, 8)]
    assert saves == [True, False, False, True, False, False, True]
    assert state.ema_return == 7.0


def test_episodes_that_could_not_be_run_or_scored_do_not_count():
    state, best = TrainerState(), BestReturn(alpha=0.5, min_delta=0.0, patience=0)
    assert not best.improved(state, [], 1)
    assert not best.improved(state, [episode(1.0, status="crashed"), episode(1.0, status="reward_failed")], 1)
    assert state == TrainerState(), "nothing is known of the policy"
    assert best.improved(state, episodes(0.5), 2)
    before = (state.ema_return, state.return_sums, state.return_weights)
    assert not best.improved(state, [episode(9.0, status="crashed"), episode(9.0, status="reward_failed")], 3)
    assert (state.ema_return, state.return_sums, state.return_weights) == before
    mixed = [episode(0.0, status="reward_failed"), episode(1.0), episode(0.0, status="crashed")]
    assert best.improved(state, mixed, 4)
    assert state.ema_return == pytest.approx((0.25 * 0.5 + 0.5 * 1.0) / 0.75)


def test_an_earlier_state_is_left_as_it_was():
    """A checkpoint may hold the state of the last update, while the loop has recorded more rollouts."""
    from dataclasses import asdict, replace

    state, best = TrainerState(), BestReturn(alpha=0.9, min_delta=0.0, patience=0)
    best.improved(state, episodes(1.0, 0.0), 1)
    held, expected = replace(state), asdict(state)
    best.improved(state, [*episodes(1.0, task=0), *episodes(1.0, task=5)], 2)
    assert asdict(held) == expected


def test_a_task_that_is_long_gone_is_forgotten():
    state, best = TrainerState(), BestReturn(alpha=0.5, min_delta=0.0, patience=0)
    best.improved(state, episodes(1.0, task=1), 1)
    best.improved(state, episodes(*[0.25] * 2000, task=2), 2)
    assert state.return_weights.keys() == {"2"} and state.ema_return == pytest.approx(0.25)
    assert not best.improved(state, episodes(0.5, task=1), 3), "what the kept policy had for it is not forgotten"


def test_the_state_of_an_older_checkpoint_is_continued():
    """It has no averages by task: they start here, and the kept policy is replaced once they rise."""
    state = TrainerState(iteration=7, ema_return=0.9, best_ema_return=0.9, best_iteration=1)
    best = BestReturn(alpha=0.9, min_delta=0.0, patience=0)
    assert not best.improved(state, episodes(0.0, 1.0), 8)
    assert best.improved(state, episodes(1.0, 1.0), 9)
    assert state.best_iteration == 9


# Simulated runs: success rates by iteration and task are given, and with them which policy is the best.

RUNS, ITERATIONS = 60, 20
Rates = Callable[[int, int], float]


def best_iterations(rate: Rates, tasks: Callable[[int], Sequence[int]], alpha: float = 0.99) -> np.ndarray:
    """Which iteration's policy each of several runs keeps; the first episode of all succeeds."""
    kept = []
    for seed in range(RUNS):
        rng, state, best = np.random.default_rng(seed), TrainerState(), BestReturn(alpha, min_delta=0.0, patience=0)
        for iteration in range(1, ITERATIONS + 1):
            lucky = iteration == 1
            rollout = []
            for number, task in enumerate(tasks(iteration)):
                success = rng.random() < rate(iteration, task) or (lucky and number == 0)
                rollout.append(episode(float(success), task))
            best.improved(state, rollout, iteration)
        kept.append(state.best_iteration)
    return np.array(kept)


@pytest.mark.parametrize("size", [8, 32])
def test_a_policy_that_improves_is_kept_though_the_first_episode_succeeded(size):
    """From 5% to 90%: the last policy is the best one."""
    kept = best_iterations(lambda iteration, task: 0.05 + 0.85 * iteration / ITERATIONS, lambda iteration: [0] * size)
    assert (kept == 1).mean() < 0.1
    assert (kept > ITERATIONS - 5).mean() > 0.9


def test_a_policy_that_collapses_is_not_kept():
    """Up to 80% in iteration 10, then down to 10%."""

    def rate(iteration: int, task: int) -> float:
        return 0.2 + 0.06 * iteration if iteration <= 10 else 0.8 - 0.07 * (iteration - 10)

    kept = best_iterations(rate, lambda iteration: [0] * 32)
    assert ((kept >= 7) & (kept <= 14)).mean() > 0.9


def test_a_curriculum_that_moves_to_harder_tasks_does_not_hide_that_the_policy_improves():
    """Each task goes better from iteration to iteration, but more and more episodes are of the hard ones: the mean over
    all episodes falls from about 85% to about 50%."""

    def rate(iteration: int, task: int) -> float:
        progress = iteration / ITERATIONS
        return 0.85 + 0.1 * progress if task < 2 else 0.05 + 0.45 * progress

    def tasks(iteration: int) -> list[int]:
        hard = round(30 * iteration / ITERATIONS)
        return [number % 2 for number in range(32 - hard)] + [2 + number % 3 for number in range(hard)]

    kept = best_iterations(rate, tasks)
    assert (kept > ITERATIONS - 5).mean() > 0.9


def test_a_curriculum_that_leaves_solved_tasks_behind_does_not_keep_the_policy_that_solved_them():
    """From iteration 6 on all episodes are of a task that the kept policy was never measured on."""
    kept = best_iterations(
        lambda iteration, task: 0.95 if task == 0 else 0.05 + 0.04 * iteration,
        lambda iteration: [0] * 16 if iteration <= 5 else [1] * 16,
    )
    assert (kept > ITERATIONS - 6).mean() > 0.9
