"""Loads a policy and prepares it for training."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from vlarl.config.derive import engine_dtype
from vlarl.config.schema import Config, RanksConfig
from vlarl.config.training_data import by_run
from vlarl.errors import UsageError
from vlarl.policies.base import Policy
from vlarl.policies.load import load_acting_policy
from vlarl.training.swap import trained_weights

log = logging.getLogger(__name__)


def load_trained_policy(
    config: Config, checkpoint: Path | None, device: torch.device, deferred: bool = False
) -> Policy:
    """The configured policy, ready to train; `checkpoint` has the weights to resume from. `deferred` weights are read
    when the policy is sharded."""
    settings = config.policy
    policy = load_acting_policy(config, checkpoint, device, deferred)
    # A checkpoint to resume from has its own adapters, whatever adapters the run started with.
    lora = config.lora if checkpoint is None else config.lora.model_copy(update={"adapter": None})
    policy.prepare_training(settings, lora, config.run.seed)
    policy.training_data = policy.training_data.plus(by_run(config.env, config.gym))
    if settings.actions == "hybrid":
        log.warning("policy.actions is hybrid: the regression head is loaded and frozen; RL trains action tokens only")
    refuse_untrainable(policy, config)
    return policy


def load_engine_policy(config: Config, device: torch.device) -> Policy:
    """The configured policy for an engine of its own, with the adapters that the learner's has; on the device `meta` it
    has no weights."""
    settings = config.policy.model_copy(update={"dtype": engine_dtype(config)})
    policy = load_acting_policy(config.model_copy(update={"policy": settings}), None, device)
    policy.adapt(settings, config.lora, config.run.seed)
    return policy


def refuse_unsupported(policy: Policy, config: Config) -> None:
    """Refuse options that need something of a policy that this one does not have."""
    algorithm, optim = config.algorithm, config.optim
    if algorithm.action_reconstruction_coef > 0 and "action_reconstruction" not in policy.extras:
        raise UsageError(
            f"algorithm.action_reconstruction_coef = {algorithm.action_reconstruction_coef:g}: this policy does not "
            "give a distance of its actions; set it to 0."
        )
    if algorithm.aux_loss_coef > 0 and not policy.has_aux_loss:
        raise UsageError(
            f"algorithm.aux_loss_coef = {algorithm.aux_loss_coef:g}: this model reports no auxiliary loss, as mixtures "
            "of experts do; set it to 0."
        )
    refuse_compute_dtype(policy, config.distributed)
    if optim.microbatch_tokens is not None and not policy.differs_in_length:
        raise UsageError(
            f"optim.microbatch_tokens = {optim.microbatch_tokens}: the decisions of this policy all have the same "
            "length; leave it out and set optim.microbatch_size."
        )


def refuse_compute_dtype(policy: Policy, distributed: RanksConfig) -> None:
    """Refuse another precision of gathered weights for a policy that has none but that of its weights."""
    if distributed.compute_dtype is not None and not policy.has_compute_dtype:
        raise UsageError(
            f"distributed.compute_dtype = {distributed.compute_dtype!r}: this policy computes in the types of its "
            "weights; leave it out and set policy.dtype."
        )


def refuse_untrainable(policy: Policy, config: Config) -> None:
    """Refuse a policy of which only the critic would be trained, and options that it does not support."""
    refuse_unsupported(policy, config)
    if not trained_weights(policy):
        raise UsageError(
            f"policy.freeze = '{config.policy.freeze}' leaves nothing for RL to train: set it to none or vision."
        )
