"""Tracks which of a run's policies had the best training returns."""

from __future__ import annotations

from collections.abc import Iterable

from vlarl.training.state import TrainerState
from vlarl.types import Trajectory

NEGLIGIBLE = 1e-12  # episodes whose weight falls below it no longer matter


class BestReturn:
    """Detects when the moving averages of episodic returns have risen enough to keep the policy.

    Each task has its own average, in which an episode has the weight `alpha ** age`, its age counted in episodes of all
    tasks. The weights are divided by their sum, as Adam divides by 1 - beta^n: an average that started at the first
    return instead would be dominated by it for about 1 / (1 - alpha) episodes, and a run whose first episode succeeds
    would keep the policy of iteration 1 forever.

    Two policies are compared task by task, with equal weights. A mean over all episodes would follow the mixture of
    tasks: under an adaptive curriculum, which moves to hard tasks, it falls while the policy improves on every task.
    If the kept policy was never measured on a task, the first average of that task stands in for it; a task that is no
    longer sampled keeps its average and adds nothing to the difference.

    Example with alpha 0.5: returns 1, 0 of task 3 and then 1 of task 4 give the averages
    (1 x 0.25 + 0 x 0.5) / 0.75 = 1/3 of task 3 and 1 of task 4, hence `ema_return` 2/3.
    """

    def __init__(self, alpha: float, min_delta: float, patience: int, several_suites: bool = False) -> None:
        """`several_suites`: tasks are told apart by suite and index, not by their index alone."""
        self.several_suites = several_suites
        self.alpha = alpha
        self.min_delta = min_delta
        self.patience = patience

    def improved(self, state: TrainerState, trajectories: Iterable[Trajectory], iteration: int) -> bool:
        """Add an iteration's episodes to the averages, one by one; True if its policy should be kept.

        Episodes that crashed or could not be scored are left out: they carry no information about the policy.
        """
        scored = [(self._task(t), t.episode_return) for t in trajectories if t.status == "ok"]
        if not scored:
            return False
        averages = self._averages(state, scored)
        state.ema_return = sum(averages.values()) / len(averages)
        first = state.best_iteration is None
        state.best_returns = averages | state.best_returns  # the kept policy's averages stay
        gains = [average - state.best_returns[task] for task, average in averages.items()]
        if state.best_iteration is not None and iteration - state.best_iteration <= self.patience:
            return False
        if not first and sum(gains) / len(gains) <= self.min_delta:
            return False
        state.best_returns, state.best_ema_return, state.best_iteration = averages, state.ema_return, iteration
        return True

    def _task(self, trajectory: Trajectory) -> str:
        suite, task_id = trajectory.task.key
        return f"{suite}/{task_id}" if self.several_suites else str(task_id)

    def _averages(self, state: TrainerState, scored: list[tuple[str, float]]) -> dict[str, float]:
        """Each task's average after these episodes; `state` keeps the sums that the next ones are added to."""
        sums, weights = dict(state.return_sums), dict(state.return_weights)
        for task, value in scored:
            for known in sums:
                sums[known] *= self.alpha
                weights[known] *= self.alpha
            sums[task] = sums.get(task, 0.0) + (1 - self.alpha) * value
            weights[task] = weights.get(task, 0.0) + (1 - self.alpha)
        kept = [task for task, weight in weights.items() if weight > NEGLIGIBLE * (1 - self.alpha)]
        state.return_sums = {task: sums[task] for task in kept}
        state.return_weights = {task: weights[task] for task in kept}
        return {task: sums[task] / weights[task] for task in kept}
