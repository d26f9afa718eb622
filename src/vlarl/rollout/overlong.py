"""Leaves out prompts that are longer than `prompts.max_tokens`: dropped and counted, never truncated.

Lengths are measured once, when a run starts, by the policy's own tokenizer and image processor. Images are not decoded
for that: their sizes, which files have in their headers, determine how many tokens they become.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from vlarl.config.known import PROMPTS
from vlarl.config.schema import Config, PromptsConfig
from vlarl.config.words import counted
from vlarl.envs.base import EnvPool, SuiteSpec
from vlarl.envs.prompts.dataset import PromptDataset
from vlarl.envs.prompts.pool import PromptPool
from vlarl.envs.prompts.source import PromptError
from vlarl.errors import UsageError
from vlarl.policies.base import Policy
from vlarl.rollout.reward_data import refuse_without_solutions
from vlarl.types import Task

log = logging.getLogger(__name__)


def usable_spec(config: Config, policy: Policy, pool: EnvPool) -> SuiteSpec:
    """The pool's suite without the prompts that are too long, if there is such a limit; UsageError where none are left
    to train or to evaluate on."""
    spec, limit = pool.spec, config.prompts.max_tokens
    if spec.name != PROMPTS:
        return spec
    source = _source(pool, config.prompts)
    refuse_without_solutions(config.reward, spec, source)
    if limit is None:
        return spec
    states = (*spec.train_states, *spec.eval_states)
    dropped = overlong_states(states, source, policy, limit)
    kept = [index for index, state in enumerate(spec.train_states) if state not in dropped]
    held_out = tuple(state for state in spec.eval_states if state not in dropped)
    if not kept or not held_out:
        what = "train" if not kept else "evaluate"
        raise UsageError(
            f"prompts.max_tokens = {limit}: {len(dropped)} of {counted(len(states), 'prompt')} are longer, and none is "
            f"left to {what} on; set it higher."
        )
    return replace(
        spec,
        train_states=tuple(spec.train_states[index] for index in kept),
        eval_states=held_out,
        benchmark_states=tuple(state for state in spec.benchmark_states if state not in dropped),
        repeats=tuple(spec.repeats[index] for index in kept) if spec.repeats else (),
        num_dropped=len(dropped),
    )


def usable_tasks(tasks: list[Task], prompts: PromptsConfig, policy: Policy, pool: EnvPool) -> list[Task]:
    """The tasks of an evaluation whose prompts are not too long."""
    if prompts.max_tokens is None or pool.spec.name != PROMPTS:
        return tasks
    states = tuple(task.init_state for task in tasks)
    dropped = overlong_states(states, _source(pool, prompts), policy, prompts.max_tokens)
    if len(dropped) == len(set(states)):
        raise UsageError(f"prompts.max_tokens = {prompts.max_tokens}: all prompts are longer; set it higher.")
    return [task for task in tasks if task.init_state not in dropped]


def overlong_states(states: Sequence[int], source: PromptDataset, policy: Policy, limit: int) -> frozenset[int]:
    """Those of the prompts that have more tokens, which is logged; one that can't be read is reported when it is
    used."""
    found = set()
    for state in dict.fromkeys(states):
        with suppress(PromptError):
            if policy.prompt_length(source.outline(state)) > limit:
                found.add(state)
    if found:
        dropped = f"{counted(len(found), 'prompt')} of more than {counted(limit, 'token')}"
        log.warning("%s (prompts.max_tokens) dropped, of %d", dropped, len(states))
    return frozenset(found)


def _source(pool: EnvPool, prompts: PromptsConfig) -> PromptDataset:
    """The data behind a pool; workers of a cluster have their own, which can't be reached from here."""
    if isinstance(pool, PromptPool) and isinstance(pool.source, PromptDataset):
        return pool.source
    return PromptDataset(prompts)
