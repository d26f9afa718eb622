"""Refuses the user's data where the reward could not score it: looked at when a run starts, before any episode."""

from __future__ import annotations

import logging

from vlarl.config.rules.reward import used_rewards
from vlarl.config.schema import RewardConfig
from vlarl.config.words import counted
from vlarl.envs.base import SuiteSpec
from vlarl.envs.prompts.dataset import PromptDataset
from vlarl.errors import UsageError

log = logging.getLogger(__name__)

READ_SOLUTIONS = frozenset({"sparse", "dense", "exact_match", "number_match", "choice"})
"""Rewards that are 0 for every text where a prompt has no solution."""


def refuse_without_solutions(reward: RewardConfig, spec: SuiteSpec, data: PromptDataset) -> None:
    """Refuse a reward that would be 0 for every text; where some rows have a solution, say how many have none."""
    used = [name for name in used_rewards(reward) if name != "combined"]
    if not READ_SOLUTIONS.issuperset(used):
        return
    without = sum(state not in data.solved for state in spec.train_states)
    if without == len(spec.train_states):
        raise UsageError(
            f"reward.source = {reward.source!r}: it compares texts with a solution, and none of "
            f"{counted(without, 'row')} to train on has one (their columns: {', '.join(data.column_names)}); name the "
            "column that holds it with prompts.solution_column, or choose another reward.source."
        )
    if without:
        log.warning(
            "%d of %s to train on have no solution: their reward is 0 whatever the text is",
            without,
            counted(len(spec.train_states), "row"),
        )
