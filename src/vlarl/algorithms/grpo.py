"""GRPO (arXiv:2402.03300): an episode's advantage is its return relative to the others of its group. No critic.

A group that always succeeds or always fails has no learning signal: it is left out, also of the denominators. With
`ratio_level: sequence` and `aggregate: sequence_mean` this is GSPO (arXiv:2507.18071), with `normalize_std: false` it
is Dr. GRPO's advantage (arXiv:2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from vlarl.algorithms.advantages import by_group, group_relative, outcomes, throughout
from vlarl.algorithms.surrogate import CriticFree
from vlarl.types import FloatArray, Trajectory


class GRPO(CriticFree):
    """Group-relative policy optimisation."""

    compares_groups = True

    def advantages(self, trajectories: Sequence[Trajectory], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """Every decision of an episode gets the episode's advantage within its group."""
        returns = outcomes(trajectories, self.config.verifier_gamma)
        relative = partial(group_relative, normalize_std=self.config.normalize_std)
        return throughout(trajectories, by_group(trajectories, returns, relative))
