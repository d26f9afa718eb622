"""The critic: a head on the policy's states, or a separate network that shares the policy's frozen weights."""

from __future__ import annotations

import copy

from vlarl.algorithms.base import Algorithm
from vlarl.config.schema import Config
from vlarl.policies.base import Policy
from vlarl.policies.deferred import copied, stored_weight
from vlarl.rollout.tasks import derive_seed

ADAPTER_SEED = 3  # distinct from the seeds of tasks, episodes and evaluations


def build_critic(policy: Policy, algorithm: Algorithm, config: Config) -> Policy | None:
    """Give the policy a value head; or return a separate critic and remove the policy's value head, if any."""
    if not algorithm.needs_critic:
        return None
    hidden, level = config.algorithm.critic_hidden, config.algorithm.gae_level
    if config.critic.kind == "head":
        policy.attach_value_head(hidden, config.run.seed, level)
        return None
    policy.detach_value_head()
    critic = copy_sharing_frozen(policy)
    critic.reset_adapters(derive_seed(config.run.seed, ADAPTER_SEED) % 2**63)
    critic.attach_value_head(hidden, config.run.seed, level)
    critic.eval()
    return critic


def copy_sharing_frozen(policy: Policy) -> Policy:
    """A copy whose frozen weights are the policy's own, in the same memory; weights that are not read yet stay so."""
    shared = {id(p): p for p in policy.parameters() if not p.requires_grad}
    unread = {id(p): copied(p) for p in policy.parameters() if p.requires_grad and stored_weight(p) is not None}
    return copy.deepcopy(policy, memo=shared | unread)
