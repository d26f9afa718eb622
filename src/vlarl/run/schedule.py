"""What is due when. It follows from the configuration and the counters alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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
        interval = self.config.eval.interval
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

    def checkpoint_due(self, iteration: int, saved: int) -> bool:
        """Whether a periodic checkpoint of this iteration is due, when the newest one is of the iteration `saved`."""
        interval = self.config.checkpoint.interval
        return interval > 0 and iteration // interval > saved // interval

    def total_iterations(self, state: TrainerState) -> int:
        """How many iterations the run takes, as far as its environment steps tell by now."""
        return total_iterations(self.config, state.iteration, state.env_steps) or state.iteration + 1

    def iterations_left(self, state: TrainerState) -> Iterable[int]:
        """The iterations that are left; without end where environment steps end the run."""
        following, limit = state.iteration + 1, self.config.run.iterations
        return itertools.count(following) if limit is None else range(following, limit + 1)
