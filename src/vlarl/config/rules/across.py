"""Rules that span several options: pure functions from a configuration to problems with their remedies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from vlarl.config.derive import kl_estimator, length_in_words, policy_loss_of, total_iterations
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import (
    GROUP_METHODS,
    decoder_of,
)
from vlarl.config.problems import Problem, shown
from vlarl.config.rules.distributed import check_distributed, check_ranks
from vlarl.config.rules.env import check_cameras, check_env, check_gym, check_prompts
from vlarl.config.rules.finetune import (
    check_batch,
    check_crops,
    check_demos,
    check_fresh_images,
    check_reward_training,
    check_warmup,
)
from vlarl.config.rules.learning import check_critic, check_ema, check_ptx, check_updates
from vlarl.config.rules.reward import check_reward
from vlarl.config.rules.sampling import (
    check_curriculum,
    check_dynamic_sampling,
    check_recording,
    check_segments,
    check_texts,
)
from vlarl.config.run_checkpoints import misspelt_builtin
from vlarl.config.schema import AlgorithmConfig, Config, PolicyConfig

Problems = Iterator[Problem]

LONGEST_RUN_NAME = 200  # file systems take 255 bytes, and files beside the folder add to its name
LARGEST_SEED = 2**63 - 1  # torch's generators hold 64 bits


def check(config: Config | FinetuneConfig) -> list[Problem]:
    """All problems of a configuration whose single options are valid."""
    if isinstance(config, FinetuneConfig):
        return [problem for rule in FINETUNE_RULES for problem in rule(config)]
    return [problem for rule in TRAIN_RULES for problem in rule(config)]


def _policy_name(config: Config | FinetuneConfig) -> Problems:
    if message := misspelt_builtin(config.policy.path):
        yield Problem(f"policy.path = {shown(config.policy.path)}", message, ("policy.path",))


def _decoder(config: Config | FinetuneConfig) -> Problems:
    policy = config.policy
    own = decoder_of(policy.path)
    decoder = own
    if isinstance(policy, PolicyConfig) and policy.decoder != "auto":
        decoder = policy.decoder
    if own and decoder != own:
        kind = policy.path.partition(":")[0]
        other = f"{kind}:tiny-oft" if own == "autoregressive" else f"{kind}:tiny-openvla"
        subject = f"policy.decoder = '{decoder}' with policy.path = '{policy.path}'"
        remedy = f"this policy decodes {own}; set policy.decoder to {own} or policy.path to {other}"
        yield Problem(subject, remedy, ("policy.decoder", "policy.path"))
    if decoder == "autoregressive" and (policy.chunk_length or 1) > 1:
        subject = f"policy.chunk_length = {policy.chunk_length} with an autoregressive decoder"
        remedy = (
            "it predicts one action at a time; set policy.chunk_length to 1, or use policy.decoder parallel with an "
            "OpenVLA-OFT checkpoint such as builtin:tiny-oft"
        )
        yield Problem(subject, remedy, ("policy.chunk_length", "policy.decoder", "policy.path"))


def _device(config: Config | FinetuneConfig) -> Problems:
    for path, device in (("run.device", config.run.device), ("policy.heads_device", config.policy.heads_device)):
        if device is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            message = "unknown device; use auto, cpu, cuda or cuda:N"
            yield Problem(f"{path} = {shown(device)}", message, (path,))


def _trained_weights(config: Config | FinetuneConfig) -> Problems:
    """Weights that can't be trained in the precision in which they are stored."""
    policy, adapted = config.policy, config.lora.enabled or config.lora.adapter is not None
    # Any other path may be an adapter, which is known after loading.
    builtin = policy.path.startswith(("builtin:", "init:"))
    if policy.quantize is not None and builtin and not adapted:
        remedy = "quantised weights can't be trained; set lora.enabled, or policy.quantize to null"
        yield Problem(f"policy.quantize = {policy.quantize}", remedy, ("policy.quantize", "lora.enabled"))
    if policy.dtype == "bfloat16" and builtin and not adapted and policy.freeze != "backbone":
        remedy = "trained weights stay float32; set lora.enabled, or policy.dtype to float32"
        yield Problem("policy.dtype = 'bfloat16'", remedy, ("policy.dtype", "lora.enabled"))
    if policy.freeze == "backbone" and adapted:
        remedy = "adapters train the backbone; set policy.freeze to none or vision, or lora.enabled to false"
        yield Problem("policy.freeze = 'backbone' with adapters", remedy, ("policy.freeze", "lora.enabled"))
    if not config.lora.target_modules:
        remedy = "names no layer; use all-linear, or suffixes of names such as q_proj"
        yield Problem("lora.target_modules = []", remedy, ("lora.target_modules",))


def _flow(config: Config) -> Problems:
    """Noise of a flow policy that no denoising step can have."""
    policy = config.policy
    if policy.flow_noise == "cps" and policy.flow_level > 1:
        remedy = "Flow-CPS replaces at most all of the noise; set it to 1 or less"
        yield Problem(f"policy.flow_level = {policy.flow_level:g}", remedy, ("policy.flow_level", "policy.flow_noise"))
    if policy.flow_std[0] >= policy.flow_std[1]:
        remedy = "the first bound must be below the second"
        yield Problem(f"policy.flow_std = {shown(policy.flow_std)}", remedy, ("policy.flow_std",))
    if policy.flow_steps is not None:
        choices = policy.flow_steps - (policy.flow_noise == "cps")  # whose last step has no noise
        if choices < 1:
            remedy = "the last step of Flow-CPS has no noise; take 2 steps or more"
            yield Problem("policy.flow_steps = 1", remedy, ("policy.flow_steps", "policy.flow_noise"))
        elif policy.flow_stochastic_step is not None and policy.flow_stochastic_step >= choices:
            remedy = f"steps that can be stochastic are 0 to {choices - 1}; choose one of them"
            subject = f"policy.flow_stochastic_step = {policy.flow_stochastic_step}"
            yield Problem(subject, remedy, ("policy.flow_stochastic_step", "policy.flow_steps"))


def _dropout(config: Config) -> Problems:
    if config.lora.dropout > 0:
        remedy = (
            "with dropout the log-probs before and after a step would be those of different networks, and their ratio "
            "would not start at 1; set it to 0. `vlarl finetune` trains with dropout"
        )
        yield Problem(f"lora.dropout = {config.lora.dropout}", remedy, ("lora.dropout",))


def _regression(config: Config) -> Problems:
    if config.policy.actions == "l1":
        remedy = (
            "the regression head gives one action and no probabilities, so there is no policy gradient to take; use "
            "tokens, or hybrid to load the head beside them. `vlarl eval --policy.actions l1` evaluates it and `vlarl "
            "finetune --policy.actions l1` trains it"
        )
        yield Problem("policy.actions = 'l1'", remedy, ("policy.actions",))


def _seed(config: Config | FinetuneConfig) -> Problems:
    if config.run.seed > LARGEST_SEED:
        message = f"must be {LARGEST_SEED} or less: random number generators accept no larger seed"
        yield Problem(f"run.seed = {config.run.seed}", message, ("run.seed",))


def _run_name(config: Config | FinetuneConfig) -> Problems:
    name = config.run.name
    if name is not None and (not re.fullmatch(r"[\w.+=-]+", name) or set(name) == {"."}):
        message = "must be a folder's name: letters, digits and . _ + = - only; the folder above is run.root"
        yield Problem(f"run.name = {shown(name)}", message, ("run.name",))
    elif name is not None and len(name.encode()) > LONGEST_RUN_NAME:
        message = f"must be {LONGEST_RUN_NAME} bytes or shorter, as file systems accept no longer names"
        yield Problem(f"run.name = {shown(name)}", message, ("run.name",))


def _groups(config: Config) -> Problems:
    name = config.algorithm.name
    if name in GROUP_METHODS and config.rollout.group_size == 1:
        remedy = (
            f"{_title(name)} compares the episodes of a group with each other; set rollout.group_size to 2 or more, "
            "or algorithm.name to ppo"
        )
        subject = f"rollout.group_size = 1 with algorithm.name = '{name}'"
        yield Problem(subject, remedy, ("rollout.group_size", "algorithm.name"))


def _value_init(config: Config) -> Problems:
    steps, name = config.algorithm.value_init_steps, config.algorithm.name
    subject = f"algorithm.value_init_steps = {steps}"
    if steps and name != "ppo":
        remedy = f"{_title(name)} has no critic to train first; set it to 0, or algorithm.name to ppo"
        yield Problem(
            f"{subject} with algorithm.name = '{name}'", remedy, ("algorithm.value_init_steps", "algorithm.name")
        )
    elif steps >= (total_iterations(config) or math.inf):
        length = length_in_words(config)
        remedy = f"the policy would never be trained; set it below {length.limit}{length.more}"
        paths = ("algorithm.value_init_steps", "run.iterations", "run.total_env_steps")
        yield Problem(f"{subject} with {length.given}", remedy, paths)


def _surrogate(config: Config) -> Problems:
    """Ratios and gradients that don't work with the chosen algorithm."""
    algorithm = config.algorithm
    level = f"algorithm.ratio_level = '{algorithm.ratio_level}' with algorithm.name = '{algorithm.name}'"
    if algorithm.name == "ppo" and algorithm.ratio_level == "sequence":
        remedy = (
            "the critic credits single decisions, which the ratio of a whole episode can't distinguish; set "
            "algorithm.ratio_level to token, action or chunk, or algorithm.name to grpo"
        )
        yield Problem(level, remedy, ("algorithm.ratio_level", "algorithm.name"))
    if policy_loss_of(algorithm) == "cpg":
        yield from _clipped_gradient(algorithm)
    elif algorithm.name == "cpgd":
        subject = "algorithm.policy_loss = 'clip' with algorithm.name = 'cpgd'"
        remedy = "CPGD's advantages with the clipped ratio are GRPO; set algorithm.name to grpo"
        yield Problem(subject, remedy, ("algorithm.policy_loss", "algorithm.name"))
    if algorithm.entropy_top_fraction < 1 and algorithm.old_logprobs == "engine":
        subject = (
            f"algorithm.entropy_top_fraction = {algorithm.entropy_top_fraction} with algorithm.old_logprobs = 'engine'"
        )
        remedy = (
            "the entropies come from the learner's own pass before its first step; set algorithm.old_logprobs to "
            "learner, or algorithm.entropy_top_fraction to 1"
        )
        yield Problem(subject, remedy, ("algorithm.entropy_top_fraction", "algorithm.old_logprobs"))
    if algorithm.importance == "truncated" and algorithm.old_logprobs == "engine":
        remedy = (
            "the ratio already starts at the policy that sampled, so there is nothing left to weight; set "
            "algorithm.old_logprobs to learner, or algorithm.importance to none"
        )
        subject = "algorithm.importance = 'truncated' with algorithm.old_logprobs = 'engine'"
        yield Problem(subject, remedy, ("algorithm.importance", "algorithm.old_logprobs"))


def _clipped_gradient(algorithm: AlgorithmConfig) -> Problems:
    """CPGD's loss has the ratio of no group of tokens, and bounds no ratio."""
    chosen = "algorithm.name = 'cpgd'" if algorithm.name == "cpgd" else "algorithm.policy_loss = 'cpg'"
    other = "algorithm.name to grpo" if algorithm.name == "cpgd" else "algorithm.policy_loss to clip"
    paths = ("algorithm.name", "algorithm.policy_loss")
    if algorithm.ratio_level != "token":
        subject = f"algorithm.ratio_level = '{algorithm.ratio_level}' with {chosen}"
        remedy = f"CPGD clips the log-prob of each token; set algorithm.ratio_level to token, or {other}"
        yield Problem(subject, remedy, ("algorithm.ratio_level", *paths))
    if algorithm.dual_clip is not None:
        subject = f"algorithm.dual_clip = {algorithm.dual_clip} with {chosen}"
        remedy = f"CPGD's gradient has no ratio to bound; set algorithm.dual_clip to null, or {other}"
        yield Problem(subject, remedy, ("algorithm.dual_clip", *paths))


def _kl(config: Config) -> Problems:
    """KL penalties without effect, or with a wrong estimator."""
    kl, estimator = config.kl, kl_estimator(config.kl)
    if kl.target is not None and kl.coef == 0:
        remedy = (
            "an adaptive coefficient is multiplied from kl.coef, which is 0; set kl.coef above 0 or kl.target to null"
        )
        yield Problem(f"kl.target = {kl.target} with kl.coef = 0", remedy, ("kl.target", "kl.coef"))
    if kl.coef == 0:
        return
    subject = f"kl.place = '{kl.place}' with kl.estimator = '{estimator}'"
    if kl.place == "loss" and estimator == "k1":
        remedy = "the gradient of k1 is zero in expectation; set kl.estimator to k2 or k3, or kl.place to reward"
        yield Problem(subject, remedy, ("kl.place", "kl.estimator"))
    if kl.place == "reward" and estimator != "k1":
        remedy = f"{estimator} in the reward is not an unbiased penalty; set kl.estimator to k1, or kl.place to loss"
        yield Problem(subject, remedy, ("kl.place", "kl.estimator"))


def _title(algorithm: str) -> str:
    """An algorithm as its paper spells it."""
    return {
        "group_norm": "group norm",
        "reinforce_baseline": "REINFORCE with baseline",
        "reinforce_pp": "REINFORCE++",
    }.get(algorithm, algorithm.upper())


def _minibatches(config: Config) -> Problems:
    groups, size, parts = config.rollout.num_groups, config.rollout.group_size, config.optim.minibatches
    gathered = config.optim.rollouts_per_update
    episodes = groups * size * gathered
    if episodes % parts and config.rollout.num_steps is None:
        fitting = [n for n in range(1, min(episodes, 10_000) + 1) if episodes % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - parts))[:3])
        when = "per iteration" if gathered == 1 else "per update"
        several = "" if gathered == 1 else f" x optim.rollouts_per_update {gathered}"
        remedy = (
            f"{episodes} episodes {when} (rollout.num_groups {groups} x rollout.group_size {size}{several}) can't be "
            f"divided evenly; use {_or(near)} minibatches"
        )
        paths = ("optim.minibatches", "rollout.num_groups", "rollout.group_size", "optim.rollouts_per_update")
        yield Problem(f"optim.minibatches = {parts}", remedy, paths)


def _schedule_lengths(config: Config) -> Problems:
    if config.run.iterations is None and config.run.total_env_steps is None:
        remedy = "there is no length of training; set run.iterations, or run.total_env_steps"
        yield Problem("run.iterations = null", remedy, ("run.iterations", "run.total_env_steps"))
    iterations = total_iterations(config) or math.inf
    for path, value, remedy in (
        ("optim.warmup_iterations", config.optim.warmup_iterations, "the warm-up would never end"),
        (
            "checkpoint.best_return_patience",
            config.checkpoint.best_return_patience,
            "the best policy would only be saved once",
        ),
    ):
        if value > iterations:
            length = length_in_words(config)
            message = f"{remedy}; set it to {length.limit} or less{length.more}"
            yield Problem(f"{path} = {value} with {length.given}", message, (path, "run.iterations"))


def _or(values: list[int]) -> str:
    return " or ".join(str(n) for n in values)


TRAIN_RULES: tuple[Callable[[Config], Problems], ...] = (
    _run_name,
    _seed,
    _device,
    check_env,
    check_cameras,
    check_gym,
    check_prompts,
    _policy_name,
    _decoder,
    _trained_weights,
    _flow,
    _dropout,
    _regression,
    check_reward,
    _groups,
    _value_init,
    _surrogate,
    _kl,
    _minibatches,
    _schedule_lengths,
    check_updates,
    check_critic,
    check_ema,
    check_ptx,
    check_curriculum,
    check_dynamic_sampling,
    check_segments,
    check_recording,
    lambda config: check_texts(config.rollout),
    check_distributed,
)
FINETUNE_RULES: tuple[Callable[[FinetuneConfig], Problems], ...] = (
    _run_name,
    _seed,
    _device,
    _policy_name,
    _decoder,
    _trained_weights,
    check_demos,
    check_reward_training,
    check_fresh_images,
    check_warmup,
    check_batch,
    check_crops,
    check_ranks,
)
