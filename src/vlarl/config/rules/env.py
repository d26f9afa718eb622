"""Rules of the sections `env` and `gym`, and of the evaluation options that depend on them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from vlarl.config.callables import is_given
from vlarl.config.known import GYM, KNOWN_SUITES, PROMPTS, TEXT_REWARDS, SuiteFacts, is_prompts, views_of
from vlarl.config.problems import Problem, as_module, shown, unknown
from vlarl.config.schema import Config, EnvConfig
from vlarl.config.suites import each_suite, suite_facts, suites_of

Problems = Iterator[Problem]

LISTED = 10  # tasks that a message lists

UNITED = ("tabletop", "libero", "metaworld")
"""Kinds of suites of which a run may have several: all of a kind have the same robot, views and initial states."""


def check_suite(suite: str, option: str = "env.suite") -> Problems:
    """A suite must be one that exists."""
    if suite not in KNOWN_SUITES:
        family = [name for name in KNOWN_SUITES if name.startswith(f"{suite.lower()}_")]
        message = f"names several suites; choose one: {', '.join(family)}" if family else ""
        yield Problem(f"{option} = {shown(suite)}", message or unknown("suite", suite, KNOWN_SUITES), (option,))


def check_task_ids(
    task_ids: tuple[int, ...] | None, facts: SuiteFacts | None, option: str = "env.task_ids"
) -> Problems:
    """Task ids must not be empty, must exist in the suite, and each be named once."""
    if task_ids is None:
        return
    subject = f"{option} = {shown(task_ids)}"
    if not task_ids:
        yield Problem(subject, "names no task; leave it out for all tasks", (option,))
    if repeated := sorted(task for task, count in Counter(task_ids).items() if count > 1):
        yield Problem(subject, f"task {_and(repeated)} given more than once; name each task once", (option,))
    if facts is not None and (beyond := [task for task in task_ids if task >= facts.num_tasks]):
        yield Problem(subject, f"no task {_and(beyond)}; the suite has tasks 0 to {facts.num_tasks - 1}", (option,))


def check_suites(env: EnvConfig) -> Problems:
    """Several suites are named in one option, each once, and one policy can run them all."""
    if not env.suites:
        return
    option, subject = ("env.suites",), f"env.suites = {shown(env.suites)}"
    if env.suite != env.suites[0]:
        remedy = "name the suites in env.suites only; leave env.suite out"
        yield Problem(f"env.suite = {shown(env.suite)} with {subject}", remedy, ("env.suite", *option))
    if len(set(env.suites)) < len(env.suites):
        yield Problem(subject, "a suite is given twice; name each once", option)
    kinds = {suite.partition("_")[0] for suite in env.suites}
    if len(env.suites) > 1 and not kinds <= set(UNITED):
        remedy = "data of several files is one suite: name them in prompts.path, with prompts.weights"
        if GYM in env.suites:
            remedy = "one Gymnasium environment can have several tasks (gym.instructions, gym.task_option)"
        yield Problem(subject, f"prompts and Gymnasium environments run one suite at a time; {remedy}", option)
    elif len(kinds) > 1:
        message = (
            f"the suites are of different robots ({', '.join(sorted(kinds))}), whose images, states and actions "
            "differ, and a run trains one policy; choose suites of one kind, such as two of libero_*"
        )
        yield Problem(subject, message, option)
    for suite in env.suite_tasks:
        if suite not in env.suites:
            remedy = f"it is not one of env.suites ({', '.join(env.suites)})"
            yield Problem(f"env.suite_tasks.{suite}", remedy, ("env.suite_tasks", *option))


def check_env(config: Config) -> Problems:
    """The suites and their tasks exist, with enough initial states and the needed reward."""
    env, facts = config.env, suite_facts(config.env, config.gym)
    for suite in suites_of(env):
        yield from check_suite(suite, "env.suites" if env.suites else "env.suite")
    yield from check_suites(env)
    for one in each_suite(env):
        named = f"env.suite_tasks.{one.suite}" if one.suite in env.suite_tasks else "env.task_ids"
        yield from check_task_ids(one.task_ids, suite_facts(one, config.gym), named)
    if facts is None:
        return
    states = config.eval.states_per_task
    num_states = facts.num_eval_states if env.protocol == "disjoint" else facts.num_benchmark_states
    if facts.are_states_known and states > num_states:
        message = f"a task has {num_states} evaluation states with env.protocol {env.protocol}; use that many or fewer"
        yield Problem(f"eval.states_per_task = {states}", message, ("eval.states_per_task", "env.protocol"))
    if is_prompts(env.suite) and env.protocol == "benchmark":
        remedy = "prompts have no benchmark's states, and training would use the rows of evaluations; leave it out"
        yield Problem(
            f"env.protocol = 'benchmark' with env.suite = '{env.suite}'", remedy, ("env.protocol", "env.suite")
        )
    used = {config.reward.source, *config.reward.sources}
    if not is_prompts(env.suite) and (texts := sorted(used.intersection(TEXT_REWARDS))):
        subject = f"reward.source = {shown(texts[0])} with env.suite = '{env.suite}'"
        remedy = "it scores texts, and this suite takes actions of a robot; use a suite of prompts, or another reward"
        yield Problem(subject, remedy, ("reward.source", "env.suite"))
    needs_dense = {"dense", "shaped"} & used
    if needs_dense and not facts.has_dense_reward:
        subject = f"reward.source = {shown(config.reward.source)} with env.suite = '{env.suite}'"
        remedy = "this suite rewards success only; use sparse or rules, or your own reward"
        yield Problem(subject, remedy, ("reward.source", "env.suite"))


def check_cameras(config: Config) -> Problems:
    """Views are named once, in the order that policies read them, and as many as a built-in policy reads."""
    env = config.env
    if env.cameras is None:
        return
    subject = f"env.cameras = {shown(env.cameras)}"
    wanted = config.policy.num_images or views_of(config.policy.path)
    if len(set(env.cameras)) < len(env.cameras):
        yield Problem(subject, "a view is given twice; name each once", ("env.cameras",))
    elif env.cameras[:1] != ("agent",):
        yield Problem(subject, "the first view must be agent: use [agent] or [agent, wrist]", ("env.cameras",))
    elif wanted is not None and len(env.cameras) != wanted:
        reads = "one view: use [agent]" if wanted == 1 else f"{wanted} views: use [agent, wrist]"
        remedy = f"{config.policy.path} reads {reads}, or a checkpoint made for {len(env.cameras)} views"
        yield Problem(subject, remedy, ("env.cameras", "policy.path"))


def check_gym(config: Config) -> Problems:
    """The suite gym names an environment, its views and its instructions."""
    gym = config.gym
    if config.env.suite != GYM:
        return
    if gym.env is None:
        remedy = "name the environment: an id, such as --gym.env Reacher-v5, or your own module:factory"
        yield Problem("gym.env = null", remedy, ("gym.env",))
    elif as_named := as_module(gym.env, "FACTORY"):
        yield Problem(f"gym.env = {shown(gym.env)}", as_named, ("gym.env",))
    elif ":" in gym.env and not is_given(gym.env) and not re.fullmatch(r"[\w.]+:[\w./-]+", gym.env):
        yield Problem(f"gym.env = {shown(gym.env)}", "must be an id, module:id or module:factory", ("gym.env",))
    if not gym.images:
        yield Problem("gym.images = []", "a policy needs a view: name one, or render", ("gym.images",))
    if not gym.instructions:
        remedy = (
            "the policy needs instructions; give one sentence for each task, such as --gym.instructions 'reach the "
            "target', or a path such as info.instruction"
        )
        yield Problem("gym.instructions = []", remedy, ("gym.instructions",))
    if len(gym.instructions) > 1 and gym.task_option is None:
        remedy = "several instructions are several tasks; name the reset option that chooses the task"
        yield Problem("gym.task_option = null", remedy, ("gym.task_option", "gym.instructions"))


def check_prompts(config: Config) -> Problems:
    """The suite prompts names its data, with a weight for each part of it."""
    prompts = config.prompts
    if config.env.suite != PROMPTS:
        return
    if not prompts.path:
        remedy = "name the data, such as --prompts.path train.jsonl; docs/prompts.md says what a row holds"
        yield Problem("prompts.path = []", remedy, ("prompts.path",))
    elif prompts.weights and len(prompts.weights) != len(prompts.path):
        subject = f"prompts.weights = {shown(prompts.weights)}"
        remedy = f"give {len(prompts.path)}, one for each of prompts.path, or none for once an epoch each"
        yield Problem(subject, remedy, ("prompts.weights", "prompts.path"))


def _and(values: list[int]) -> str:
    listed = [str(n) for n in values[:LISTED]] + ["more"] * (len(values) > LISTED)
    return " and ".join(listed)
