"""Rules of sampling: the section `curriculum`, dynamic sampling, and in `rollout` what is recorded and the lengths of
texts."""

from __future__ import annotations

from collections.abc import Iterator

from vlarl.config.known import GROUP_METHODS, is_prompts
from vlarl.config.problems import Problem, shown
from vlarl.config.rules.reward import used_rewards
from vlarl.config.schema import Config, TextConfig
from vlarl.config.suites import num_configured_tasks

Problems = Iterator[Problem]


def check_curriculum(config: Config) -> Problems:
    """The weights fit the tasks, and no option is given that the mode does not read."""
    curriculum, mode = config.curriculum, ("curriculum.mode",)
    if curriculum.mode == "weighted" and curriculum.weights is None:
        remedy = "there are no weights; give curriculum.weights, one for each task, or set it to uniform or adaptive"
        yield Problem("curriculum.mode = 'weighted'", remedy, (*mode, "curriculum.weights"))
    if curriculum.weights is not None:
        yield from _weights(config, curriculum.weights)
    for name, value in (("skip_solved_above", curriculum.skip_solved_above), ("start_from", curriculum.start_from)):
        if value is not None and curriculum.mode != "adaptive":
            remedy = f"only adaptive sampling reads it; set curriculum.mode to adaptive, or curriculum.{name} to null"
            subject = f"curriculum.{name} = {shown(value)} with curriculum.mode = '{curriculum.mode}'"
            yield Problem(subject, remedy, (f"curriculum.{name}", *mode))


def _weights(config: Config, weights: tuple[float, ...]) -> Problems:
    subject = f"curriculum.weights = {shown(weights)}"
    num_tasks = num_configured_tasks(config.env, config.gym)
    if num_tasks is None:
        return
    if config.curriculum.mode == "uniform":
        remedy = "uniform sampling reads no weights; set curriculum.mode to weighted or adaptive"
        yield Problem(f"{subject} with curriculum.mode = 'uniform'", remedy, ("curriculum.weights", "curriculum.mode"))
    elif len(weights) != num_tasks:
        remedy = f"there are {num_tasks} tasks (env.task_ids); give each one weight, in their order"
        yield Problem(subject, remedy, ("curriculum.weights", "env.task_ids"))
    elif not any(weights):
        yield Problem(subject, "no task would ever be trained on; give one a weight above 0", ("curriculum.weights",))


def check_dynamic_sampling(config: Config) -> Problems:
    """Only methods with groups drop and replace groups, and the bounds must admit some group."""
    rollout, name = config.rollout, config.algorithm.name
    requested = {
        "rollout.refill": rollout.refill,
        "rollout.oversample": rollout.oversample > 1,
        "rollout.accuracy_bounds": rollout.accuracy_bounds is not None,
    }
    for path in (path for path, is_set in requested.items() if is_set and name not in GROUP_METHODS):
        value = shown(getattr(rollout, path.removeprefix("rollout.")))
        remedy = (
            "only methods that compare groups drop and replace them; leave it out, or set algorithm.name to one of "
            + ", ".join(GROUP_METHODS)
        )
        yield Problem(f"{path} = {value} with algorithm.name = '{name}'", remedy, (path, "algorithm.name"))
    if rollout.accuracy_bounds is not None:
        low, high = rollout.accuracy_bounds
        size = rollout.group_size
        if not any(low < won / size < high for won in range(size + 1)):
            remedy = (
                f"no group of {size} (rollout.group_size) has a success rate strictly between them, so nothing would "
                "be trained on; set them further apart, such as 0 and 1, or make groups larger"
            )
            subject = f"rollout.accuracy_bounds = {shown(rollout.accuracy_bounds)}"
            yield Problem(subject, remedy, ("rollout.accuracy_bounds", "rollout.group_size"))


STEP_REWARDS = ("sparse", "dense", "shaped", "rules")
"""Rewards that score a segment as they score that part of a whole episode."""


def check_segments(config: Config) -> Problems:
    """Segments of episodes are learned from with a critic alone, and nothing may look at whole episodes."""
    num_steps = config.rollout.num_steps
    if num_steps is None:
        return
    given, path = f"rollout.num_steps = {num_steps}", "rollout.num_steps"
    name, size = config.algorithm.name, config.rollout.group_size
    if name != "ppo":
        remedy = (
            "the rest of an episode that has not ended is known by a critic's value alone, which only ppo has; set "
            "algorithm.name to ppo, or leave rollout.num_steps out, so that episodes run to their end"
        )
        yield Problem(f"{given} with algorithm.name = '{name}'", remedy, (path, "algorithm.name"))
    elif size > 1:
        remedy = "segments are not compared in groups; set rollout.group_size to 1"
        yield Problem(f"{given} with rollout.group_size = {size}", remedy, (path, "rollout.group_size"))
    if is_prompts(config.env.suite):
        remedy = "a prompt is an episode of one step; leave rollout.num_steps out, and set rollout.num_groups"
        yield Problem(f"{given} with env.suite = {shown(config.env.suite)}", remedy, (path, "env.suite"))
        return
    for reward in (reward for reward in used_rewards(config.reward) if reward not in (*STEP_REWARDS, "combined")):
        remedy = (
            "it scores whole episodes, and a segment may end before its episode does; use "
            f"{', '.join(STEP_REWARDS)} or a combination of them, or leave rollout.num_steps out"
        )
        option = "reward.source" if reward == config.reward.source else "reward.sources"
        yield Problem(f"{given} with the reward {shown(reward)}", remedy, (path, option))
    if config.distributed.asynchronous:
        remedy = "segments are collected in turn with the update; set distributed.asynchronous to false"
        yield Problem(f"{given} with distributed.asynchronous = true", remedy, (path, "distributed.asynchronous"))


def check_recording(config: Config) -> Problems:
    """Datasets and videos are of robots, and a format is described as it needs to be."""
    rollout, suite = config.rollout, config.env.suite
    if rollout.save != "none" and is_prompts(suite):
        remedy = "responses to prompts are texts, which samples.jsonl has (logging.samples says how many); leave it out"
        subject = f"rollout.save = {shown(rollout.save)} with env.suite = {shown(suite)}"
        yield Problem(subject, remedy, ("rollout.save", "env.suite"))
    elif rollout.save == "lerobot" and rollout.save_fps is None:
        remedy = "a LeRobot dataset says how many steps a second has; give rollout.save_fps, or set it to rlds"
        yield Problem("rollout.save = 'lerobot'", remedy, ("rollout.save", "rollout.save_fps"))
    if rollout.videos and rollout.num_steps is not None:
        remedy = (
            "an iteration then has parts of episodes, and no number of episodes that videos could be chosen from; "
            "leave it out (eval.videos records evaluated episodes)"
        )
        subject = f"rollout.videos = {rollout.videos} with rollout.num_steps = {rollout.num_steps}"
        yield Problem(subject, remedy, ("rollout.videos", "rollout.num_steps"))


def check_texts(texts: TextConfig) -> Problems:
    """A text can reach its shortest length, and what ends it is not empty."""
    if texts.max_tokens is not None and texts.min_tokens > texts.max_tokens:
        subject = f"rollout.min_tokens = {texts.min_tokens} with rollout.max_tokens = {texts.max_tokens}"
        remedy = "a text would be cut off before it may end; set min_tokens to max_tokens or less"
        yield Problem(subject, remedy, ("rollout.min_tokens", "rollout.max_tokens"))
    if "" in texts.stop:
        yield Problem(f"rollout.stop = {shown(texts.stop)}", "an empty string can't end a text", ("rollout.stop",))
