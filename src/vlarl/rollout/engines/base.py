"""The engine contract: an engine turns what a policy reads into sampled decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import DivergedError, UsageError


class Engine(Protocol):
    """Generates decisions with a versioned copy of the policy's weights, or with the learner's own."""

    version: int

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        ...


def refuse_sampling(sampling: Sampling, taken: frozenset[str]) -> None:
    """UsageError for options of sampling that the policy does not take, unless they are left at their defaults."""
    if unknown := sampling.chosen() - taken:
        raise UsageError(f"this policy is not sampled with {', '.join(sorted(unknown))}: leave it at its default.")


def not_finite(version: int) -> DivergedError:
    """The error for action probabilities that are not finite, after training or with the weights as loaded."""
    subject = "the policy's action probabilities are not finite"
    if version == 0:
        return DivergedError(
            f"{subject} with the weights that it was loaded with: set policy.dtype to float32, or use another "
            "checkpoint."
        )
    remedy = "Lower optim.lr and start again from an earlier checkpoint."
    return DivergedError(f"{subject} (weights of version {version}): it diverged. {remedy}")
