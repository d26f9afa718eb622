"""What is due when. It follows from the configuration and the counters alone."""

from __future__ import annotations

from dataclasses import dataclass

from vlarl.config.derive import total_iterations
from vlarl.config.known import is_prompts
from vlarl.config.schema import Config
from vlarl.observability.samples import PER_EVALUATION
from vlarl.training.state import TrainerState


@dataclass(frozen=True)
class Schedule:
    """Says what is due in the iteration that `state` has counted last.

    With `optim.rollouts_per_update: 2` and `run.iterations: 5`, updates are due after the iterations 2, 4 and 5.
    """

    config: Config

    def finished(self, state: TrainerState) -> bool:
        """Whether the run has had all its iterations, or all its environment steps."""
        limit, budget = self.config.run.iterations, self.config.run.total_env_steps
        return (limit is not None and state.iteration >= limit) or (budget is not None and state.env_steps >= budget)

    def update_due(self, state: TrainerState) -> bool:
        """Whether enough rollouts are gathered for an update; at the end, any number of them is."""
        return self.finished(state) or state.iteration % self.config.optim.rollouts_per_update == 0

    def evaluation_due(self, state: TrainerState) -> bool:
        """Whether the iteration ends with an evaluation."""
        interval, steps = self.config.eval.interval, self.config.eval.interval_steps
        if steps is not None:
            return self.finished(state) or _passed(steps, state.env_steps - state.rollout_steps, state.env_steps)
        return self.finished(state) or (interval > 0 and state.iteration % interval == 0)

    def num_videos(self, state: TrainerState) -> int:
        """How many episodes of the evaluation are recorded as videos: some of the first and of the last evaluation.
        Prompts have samples instead."""
        if is_prompts(self.config.env.suite):
            return 0
        return self.config.eval.videos if state.iteration == 0 or self.finished(state) else 0

    @property
    def num_eval_samples(self) -> int:
        """How many responses of an evaluation are kept as samples."""
        return PER_EVALUATION if self.config.logging.samples else 0

    def checkpoint_due(self, state: TrainerState, saved: TrainerState) -> bool:
        """Whether a periodic checkpoint of this state is due, when `saved` is the newest one."""
        interval, steps = self.config.checkpoint.interval, self.config.checkpoint.interval_steps
        if steps is not None:
            return _passed(steps, saved.env_steps, state.env_steps)
        return interval > 0 and _passed(interval, saved.iteration, state.iteration)

    def total_iterations(self, state: TrainerState) -> int:
        """How many iterations the run takes, as far as its environment steps tell by now."""
        return total_iterations(self.config, state.iteration, state.env_steps) or state.iteration + 1

    def iterations_left(self, state: TrainerState) -> int | None:
        """How many iterations are left at most; None where environment steps alone end the run."""
        limit = self.config.run.iterations
        return None if limit is None else limit - state.iteration


def _passed(interval: int, before: int, now: int) -> bool:
    """Whether a multiple of the interval lies after `before`, up to `now`."""
    return now // interval > before // interval
