"""Rewards: functions that score trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlarl.config.callables import find_given, is_given
from vlarl.config.recipe import parse_rule
from vlarl.config.reward_module import import_function, style_of
from vlarl.config.schema import RewardConfig
from vlarl.devices import usable_device
from vlarl.rewards.base import Reward
from vlarl.rewards.combined import CombinedReward
from vlarl.rewards.function import FunctionReward
from vlarl.rewards.judge import PATTERN, TEMPLATE, JudgeOptions
from vlarl.rewards.model_kinds import load_reward_model
from vlarl.rewards.outcome import DenseReward, SparseReward
from vlarl.rewards.remote import REMOTE_TIMEOUT_S, RemoteReward
from vlarl.rewards.rules import RulesReward
from vlarl.rewards.safe import SafeReward
from vlarl.rewards.shaping import ShapedReward
from vlarl.rewards.text import TextReward, format_reward, length_reward, match_reward, overlong_reward
from vlarl.rewards.text_function import TextFunctionReward


@dataclass(frozen=True)
class RewardContext:
    """What a reward must know about its run."""

    device: torch.device
    discount: float  # the algorithm's, for each environment step
    bootstraps: bool  # whether a value replaces the rest of an episode that the time limit cut off


def build_reward(config: RewardConfig, run: RewardContext) -> SafeReward:
    """The configured reward, with its failures handled."""
    return contained(build_bare_reward(config, run), config)


def contained(reward: Reward, config: RewardConfig) -> SafeReward:
    """A reward with its failures handled as configured."""
    return SafeReward(reward, config.retries, config.fallback, config.max_failure_rate)


def build_bare_reward(config: RewardConfig, run: RewardContext) -> Reward:
    """The configured reward itself."""
    return _combined(config, run) if config.source == "combined" else _single(config.source, config, run)


def _single(source: str, config: RewardConfig, run: RewardContext) -> Reward:
    """The reward, model or service of that name, the user's own `module:function`, or the function that was given in
    Python."""
    if source in REWARDS:
        return REWARDS[source](config, run)
    if source in config.models:
        return _model_at(config.models[source], config, run)
    if source in config.urls:
        return _remote_at(config.urls[source], config)
    given = find_given("reward.source", source, config.given, "reward").function if is_given(source) else None
    function = import_function(source) if given is None else given
    style = style_of(function)
    if style == "trajectory":
        return FunctionReward(source, function, config.timeout_s)
    return TextFunctionReward(source, function, style, config.timeout_s)


def _combined(config: RewardConfig, run: RewardContext) -> CombinedReward:
    weights = config.weights or (1.0,) * len(config.sources)
    return CombinedReward(
        {source: _single(source, config, run) for source in config.sources},
        dict(zip(config.sources, weights, strict=True)),
        [parse_rule(line) for line in config.recipe],
    )


def _shaped(config: RewardConfig, run: RewardContext) -> ShapedReward:
    gamma = run.discount if config.shaping_gamma is None else config.shaping_gamma
    return ShapedReward(gamma, config.shaping_scale, run.bootstraps)


def _rules(config: RewardConfig, run: RewardContext) -> RulesReward:
    return RulesReward(
        config.success_value,
        config.failure_value,
        config.length_penalty,
        config.length_limit,
        config.idle_penalty,
        config.idle_tolerance,
    )


def _model(config: RewardConfig, run: RewardContext) -> Reward:
    assert config.model is not None, "checked with the configuration"
    return _model_at(config.model, config, run)


def _model_at(path: str, config: RewardConfig, run: RewardContext) -> Reward:
    device = run.device if config.device is None else usable_device("reward.device", config.device)
    judge = JudgeOptions(config.judge_template or TEMPLATE, config.judge_pattern or PATTERN, config.judge_max_tokens)
    return load_reward_model(path, device, config.scoring, config.batch_size, judge)


def _remote(config: RewardConfig, run: RewardContext) -> RemoteReward:
    assert config.url is not None, "checked with the configuration"
    return _remote_at(config.url, config)


def _remote_at(url: str, config: RewardConfig) -> RemoteReward:
    return RemoteReward(
        url,
        config.scoring,
        config.batch_size,
        config.images,
        REMOTE_TIMEOUT_S if config.timeout_s is None else config.timeout_s,
        config.retries,
        config.max_request_bytes,
        config.max_response_bytes,
        headers_env=config.headers_env,
    )


def _overlong(config: RewardConfig, run: RewardContext) -> TextReward:
    assert config.max_tokens is not None, "checked with the configuration"
    return overlong_reward(config.max_tokens, config.overlong_buffer)


REWARDS: dict[str, Callable[[RewardConfig, RewardContext], Reward]] = {
    "sparse": lambda config, run: SparseReward(),
    "dense": lambda config, run: DenseReward(),
    "shaped": _shaped,
    "rules": _rules,
    "model": _model,
    "remote": _remote,
    "exact_match": lambda config, run: match_reward("exact"),
    "number_match": lambda config, run: match_reward("number"),
    "choice": lambda config, run: match_reward("choice"),
    "format": lambda config, run: format_reward(config.pattern),
    "length": lambda config, run: length_reward(config.length_limit, config.length_penalty),
    "overlong": _overlong,
}
