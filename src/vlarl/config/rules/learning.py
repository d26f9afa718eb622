"""Rules of the sections `optim`, `critic`, `ema` and `ptx`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vlarl.config.derive import length_in_words, total_iterations, updates_in
from vlarl.config.known import EXPERTS, GYM, is_prompts
from vlarl.config.problems import Problem, shown
from vlarl.config.schema import Config, CriticConfig

Problems = Iterator[Problem]


def check_updates(config: Config) -> Problems:
    """A run must have at least one update, and more updates than warm-ups take."""
    iterations, gathered = total_iterations(config), config.optim.rollouts_per_update
    if iterations is None:
        return  # unknown for the given run.total_env_steps
    if gathered > iterations:
        length = length_in_words(config)
        subject = f"optim.rollouts_per_update = {gathered} with {length.given}"
        remedy = f"the run ends before the first update; set it to {length.limit} or less{length.more}"
        yield Problem(subject, remedy, ("optim.rollouts_per_update", "run.iterations"))
        return
    if gathered == 1:
        return  # one update per iteration: other rules check the warm-ups
    updates = updates_in(iterations, config)
    paths = ("run.iterations", "optim.rollouts_per_update")
    for path, value, limit in (
        ("algorithm.value_init_steps", config.algorithm.value_init_steps, updates - 1),
        ("optim.warmup_iterations", config.optim.warmup_iterations, updates),
        ("critic.warmup_iterations", config.critic.warmup_iterations or 0, updates),
    ):
        if value > limit:
            subject = f"{path} = {value} with optim.rollouts_per_update = {gathered}"
            message = f"it counts updates, and {iterations} iterations have {updates}; set it to {limit} or less"
            yield Problem(subject, message, (path, *paths))


def check_critic(config: Config) -> Problems:
    """Options of a critic need an algorithm that has one, and a warm-up that ends."""
    name, critic, iterations = config.algorithm.name, config.critic, total_iterations(config) or math.inf
    if name != "ppo" and critic.kind != CriticConfig().kind:
        remedy = "this algorithm has no critic; set critic.kind to head, or algorithm.name to ppo"
        subject = f"critic.kind = '{critic.kind}' with algorithm.name = '{name}'"
        yield Problem(subject, remedy, ("critic.kind", "algorithm.name"))
    if critic.warmup_iterations is not None and critic.warmup_iterations > iterations:
        length = length_in_words(config)
        subject = f"critic.warmup_iterations = {critic.warmup_iterations} with {length.given}"
        remedy = f"the warm-up would never end; set it to {length.limit} or less{length.more}"
        yield Problem(subject, remedy, ("critic.warmup_iterations", "run.iterations"))


def check_ema(config: Config) -> Problems:
    """Evaluating the moving average needs one."""
    if config.eval.use_ema and config.ema.beta is None:
        remedy = "no average of the weights is kept; set ema.beta, such as 0.992, or eval.use_ema to false"
        yield Problem("eval.use_ema = true", remedy, ("eval.use_ema", "ema.beta"))


def check_ptx(config: Config) -> Problems:
    """Scripted experts are those of a robot's suite."""
    suite = config.env.suite
    is_even = suite.startswith("tabletop_") and not config.env.suite_tasks
    if config.ptx.path == EXPERTS and len(config.env.suites) > 1 and not is_even:
        subject = f"ptx.path = {shown(EXPERTS)} with env.suites = {shown(config.env.suites)}"
        remedy = (
            "experts play several suites of the tabletop only, and the same tasks of each; record the others with "
            "`vlarl data record` and name the folder"
        )
        yield Problem(subject, remedy, ("ptx.path", "env.suites"))
        return
    if config.ptx.path != EXPERTS or not (is_prompts(suite) or suite == GYM):
        return
    what = "a file of prompts with responses" if is_prompts(suite) else "the folder of an RLDS dataset"
    subject = f"ptx.path = {shown(EXPERTS)} with env.suite = {shown(suite)}"
    yield Problem(subject, f"it has no scripted experts; name {what}", ("ptx.path", "env.suite"))
