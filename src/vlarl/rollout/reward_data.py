"""Refuses the user's data where the reward could not score it: looked at when a run starts, before any episode."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable

from vlarl.config.callables import is_given
from vlarl.config.reward_module import import_function, style_of
from vlarl.config.rules.reward import own_rewards, used_rewards
from vlarl.config.schema import RewardConfig
from vlarl.config.words import counted
from vlarl.envs.base import SuiteSpec
from vlarl.envs.prompts.dataset import PromptDataset
from vlarl.errors import UsageError
from vlarl.rewards.text_function import TRL_NAMES, VERL_NAMES

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


def refuse_missing_columns(reward: RewardConfig, data: PromptDataset) -> None:
    """Refuse the user's functions that need an argument which neither the run nor the data has."""
    given = [name for name in used_rewards(reward) if is_given(name) and name in reward.given]
    functions = {name: reward.given[name].function for name in given}
    functions |= {name: import_function(name) for name in own_rewards(reward)}
    for source, function in functions.items():
        missing = missing_arguments(function, data.reward_columns)
        if missing:
            raise UsageError(
                f"reward.source: {source} needs the argument{'s' * (len(missing) > 1)} {', '.join(missing)}, and the "
                f"data has no such column (its columns: {', '.join(data.column_names)}); rename the parameter or the "
                "column, or give the parameter a default."
            )


def missing_arguments(function: Callable[..., object], columns: Iterable[str]) -> list[str]:
    """Parameters without a default that a function for texts would not be given."""
    style = style_of(function)
    if style == "trajectory":
        return []
    known = {*TRL_NAMES, *columns} if style == "trl" else set(VERL_NAMES)
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in known
    ]
