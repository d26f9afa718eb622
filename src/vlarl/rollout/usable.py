"""Leaves out prompts that can't be sampled from: dropped and counted when a run starts, never truncated.

    longer than prompts.max_tokens                              always left out
    refused by the policy's processor or chat template      ┐
    longer than the model reads, less rollout.max_tokens    ├   prompts.on_error: the run ends, or they are left out
    an image that can't be read                             ┘

Lengths are measured once, by the policy's own tokenizer and image processor. Images are not decoded for that: their
sizes, which files have in their headers, determine how many tokens they become. Videos would have to be decoded: rows
that have one are measured if there is a prompts.max_tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlarl.config.known import PROMPTS
from vlarl.config.schema import Config, PromptsConfig
from vlarl.config.words import counted
from vlarl.decisions import Sampling
from vlarl.envs.base import EnvPool, SuiteSpec
from vlarl.envs.prompts.dataset import REMEDY, PromptDataset
from vlarl.envs.prompts.pool import PromptPool
from vlarl.envs.prompts.source import PromptError
from vlarl.errors import UsageError
from vlarl.policies.base import Policy
from vlarl.rollout.reward_data import refuse_missing_columns, refuse_without_solutions
from vlarl.rollout.sampling import rollout_sampling
from vlarl.types import Task

log = logging.getLogger(__name__)


def usable_spec(config: Config, policy: Policy, pool: EnvPool) -> SuiteSpec:
    """The pool's suite without the prompts that can't be sampled from, if it is the user's data; UsageError where none
    are left to train or to evaluate on, or where the reward could not score them."""
    spec = pool.spec
    if spec.name != PROMPTS:
        return spec
    source = _source(pool, config.prompts)
    refuse_without_solutions(config.reward, spec, source)
    if not (config.distributed.backend == "ray" and config.distributed.num_reward_workers):  # they import their own
        refuse_missing_columns(config.reward, source)
    states = (*spec.train_states, *spec.eval_states)
    dropped = left_out(states, source, policy, rollout_sampling(config.rollout))
    kept = [index for index, state in enumerate(spec.train_states) if state not in dropped.states]
    held_out = tuple(state for state in spec.eval_states if state not in dropped.states)
    if not kept or not held_out:
        raise dropped.refusal(len(states), f"none is left to {'train' if not kept else 'evaluate'} on")
    return replace(
        spec,
        train_states=tuple(spec.train_states[index] for index in kept),
        eval_states=held_out,
        benchmark_states=tuple(state for state in spec.benchmark_states if state not in dropped.states),
        repeats=tuple(spec.repeats[index] for index in kept) if spec.repeats else (),
        num_dropped=len(dropped.states),
    )


def usable_tasks(
    tasks: list[Task], prompts: PromptsConfig, policy: Policy, pool: EnvPool, sampling: Sampling
) -> list[Task]:
    """The tasks of an evaluation whose prompts can be sampled from."""
    if pool.spec.name != PROMPTS:
        return tasks
    states = tuple(task.init_state for task in tasks)
    dropped = left_out(states, _source(pool, prompts), policy, sampling)
    if len(dropped.states) == len(set(states)):
        raise dropped.refusal(len(states), "none is left to evaluate on")
    return [task for task in tasks if task.init_state not in dropped.states]


@dataclass(frozen=True)
class LeftOut:
    """The prompts that were left out, and why."""

    limit: int | None  # prompts.max_tokens
    overlong: frozenset[int]  # states of prompts that are longer than it
    refused: dict[int, str]  # the others, with what was said about each

    @property
    def states(self) -> frozenset[int]:
        """All of them."""
        return self.overlong | self.refused.keys()

    def refusal(self, count: int, what: str) -> UsageError:
        """Too many of `count` prompts were left out."""
        if self.overlong:
            longer = f"{len(self.overlong)} of {counted(count, 'prompt')} are longer"
            return UsageError(f"prompts.max_tokens = {self.limit}: {longer}, and {what}; set it higher.")
        first = next(iter(self.refused.values()))
        return UsageError(
            f"prompts.path: {len(self.refused)} of {counted(count, 'prompt')} can't be used, and {what}: {first}"
        )


def left_out(states: Sequence[int], source: PromptDataset, policy: Policy, sampling: Sampling) -> LeftOut:
    """Those of the prompts that can't be sampled from, which is logged. UsageError for the first refused one, unless
    such rows are skipped."""
    limit = source.config.max_tokens
    overlong: set[int] = set()
    refused: dict[int, str] = {}
    for state in dict.fromkeys(states):
        if limit is None and state in source.with_videos:
            continue
        try:
            length = policy.prompt_length(source.outline(state))
            if limit is not None and length > limit:
                overlong.add(state)
            else:
                policy.check_sampling(sampling, length)
        except UsageError as error:
            text = str(error) if isinstance(error, PromptError) else f"{source.where(state)}: {error}"
            if source.on_error == "stop":
                raise PromptError(text if text.endswith(REMEDY) else f"{text} {REMEDY}") from error
            refused[state] = text.removesuffix(f" {REMEDY}")
            log.warning("left out: %s", refused[state])
    if overlong:
        dropped = f"{counted(len(overlong), 'prompt')} of more than {counted(limit or 0, 'token')}"
        log.warning("%s (prompts.max_tokens) dropped, of %d", dropped, len(states))
    if refused:
        log.warning("%s that can't be used dropped, of %d", counted(len(refused), "prompt"), len(states))
    return LeftOut(limit, frozenset(overlong), refused)


def _source(pool: EnvPool, prompts: PromptsConfig) -> PromptDataset:
    """The data behind a pool; workers of a cluster have their own, which can't be reached from here."""
    if isinstance(pool, PromptPool) and isinstance(pool.source, PromptDataset):
        return pool.source
    return PromptDataset(prompts)
