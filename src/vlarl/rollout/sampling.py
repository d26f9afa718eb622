"""How decisions are sampled, from a configuration: in rollouts, and in evaluations.

A policy takes some of these options (`Policy.sampling_options`); what it would not read is refused before a run starts.
"""

from __future__ import annotations

from vlarl.config.schema import RolloutConfig, TextConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.policies.base import Policy

OPTIONS = {"stop": "stop_token_ids", "stop_strings": "stop"}  # fields of `Sampling` that the options name differently


def rollout_sampling(rollout: RolloutConfig) -> Sampling:
    """How a rollout samples."""
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        min_tokens=rollout.min_tokens,
        stop=rollout.stop_token_ids,
        stop_strings=rollout.stop,
    )


def evaluation_sampling(texts: TextConfig, temperature: float) -> Sampling:
    """How an evaluation samples: texts end as in a rollout, and no token is left out."""
    return Sampling(
        temperature=temperature,
        max_tokens=texts.max_tokens,
        min_tokens=texts.min_tokens,
        stop=texts.stop_token_ids,
        stop_strings=texts.stop,
    )


def check_sampling(policy: Policy, sampling: Sampling, prompt_tokens: int = 0) -> None:
    """Refuse options that the policy does not take, and values that it can't use after prompts of so many tokens."""
    unread = sorted(sampling.chosen() - policy.sampling_options)
    if unread:
        named = ", ".join(f"rollout.{OPTIONS.get(name, name)}" for name in unread)
        raise UsageError(f"{named}: this policy is not sampled with that; leave it out.")
    policy.check_sampling(sampling, prompt_tokens)
