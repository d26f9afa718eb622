"""Rules of the section `reward`: what a reward needs, and which rewards read an option."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from vlarl.config.callables import is_given
from vlarl.config.known import KNOWN_REWARDS, is_prompts
from vlarl.config.problems import Problem, as_module, shown, unknown
from vlarl.config.recipe import RecipeRule, parse_rule
from vlarl.config.schema import Config, RewardConfig
from vlarl.config.secrets import has_user, is_masked, masked_url
from vlarl.config.suites import suite_facts

Problems = Iterator[Problem]

OWN = "module:function"  # any reward of the user's own

READ_BY: dict[str, tuple[str, ...]] = {
    "sources": ("combined",),
    "weights": ("combined",),
    "recipe": ("combined",),
    "shaping_gamma": ("shaped",),
    "shaping_scale": ("shaped",),
    "success_value": ("rules",),
    "failure_value": ("rules",),
    "length_penalty": ("rules", "length"),
    "length_limit": ("rules", "length"),
    "pattern": ("format",),
    "max_tokens": ("overlong",),
    "overlong_buffer": ("overlong",),
    "idle_penalty": ("rules",),
    "idle_tolerance": ("rules",),
    "judge_template": ("model",),
    "judge_pattern": ("model",),
    "judge_max_tokens": ("model",),
    "device": ("model",),
    "scoring": ("model", "remote"),
    "batch_size": ("model", "remote"),
    "headers_env": ("remote",),
    "images": ("remote",),
    "timeout_s": ("remote", OWN),
    "max_request_bytes": ("remote",),
    "max_response_bytes": ("remote",),
}
"""The kinds of rewards that read an option; all rewards read the others. effects_table.py refuses options without
effect."""

NAMED_BY = {"model": "model", "url": "remote"}
"""Options that one reward reads, by its name."""

SAME_REWARDS = dict.fromkeys(
    ("success", "binary", "outcome"), "a reward of 1 for success and 0 otherwise is --reward.source sparse"
)
"""Names of vlarl's rewards in other systems."""

STEPWISE_METHODS = ("ppo", "reinforce", "reinforce_pp")
"""Algorithms that credit a decision with the rewards after it; the others use the return of the whole episode."""


def check_reward(config: Config) -> Problems:
    """All problems of the section."""
    reward = config.reward
    names = [name for name in own_rewards(reward) if not _is_own(name)]
    for name in names:
        option = "reward.source" if name == reward.source else "reward.sources"
        message = (
            unknown("reward", name, (*KNOWN_REWARDS, *reward.models, *reward.urls)) + ", or your own module:function"
        )
        message = SAME_REWARDS.get(name.lower()) or message
        yield Problem(f"{option} = {shown(name)}", as_module(name, "FUNCTION") or message, (option,))
    if not names:
        yield from _combination(reward)
        yield from _needs(reward)
        yield from _rule_values(config)
        yield from _text_values(reward)
        yield from _judge(config)
        yield from _shaping(config)


def _is_own(name: str) -> bool:
    """Whether a reward is named as `module:function`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None and not name.partition(":")[0].endswith(".py")


def used_rewards(reward: RewardConfig) -> list[str]:
    """Names of the rewards that are in use."""
    return [reward.source, *(reward.sources if reward.source == "combined" else ())]


def used_kinds(reward: RewardConfig) -> set[str]:
    """The same in READ_BY's terms: every reward of the user is OWN."""
    named = dict.fromkeys(reward.models, "model") | dict.fromkeys(reward.urls, "remote")
    return {name if name in KNOWN_REWARDS else named.get(name, OWN) for name in used_rewards(reward)}


def own_rewards(reward: RewardConfig) -> list[str]:
    """Those that are imported by their names, `module:function`."""
    known = {*KNOWN_REWARDS, *reward.models, *reward.urls}
    return [name for name in used_rewards(reward) if name not in known and not is_given(name)]


def _combination(reward: RewardConfig) -> Problems:
    if reward.source != "combined":
        return
    subject = f"reward.sources = {shown(reward.sources)}"
    if not reward.sources:
        remedy = "name the rewards to combine, such as [sparse, shaped], and their reward.weights"
        yield Problem(subject, remedy, ("reward.sources",))
    elif "combined" in reward.sources or len(set(reward.sources)) < len(reward.sources):
        yield Problem(subject, "name each reward once, and combined not at all", ("reward.sources",))
    elif reward.weights and len(reward.weights) != len(reward.sources):
        subject = f"reward.weights = {shown(reward.weights)}"
        remedy = f"give {len(reward.sources)} weights, one for each of reward.sources, or none for 1 each"
        yield Problem(subject, remedy, ("reward.weights", "reward.sources"))
    else:
        yield from _recipe(reward)


def _recipe(reward: RewardConfig) -> Problems:
    rules: list[RecipeRule] = []
    for line in reward.recipe:
        subject = f"reward.recipe: {shown(line)}"
        try:
            rule = parse_rule(line)
        except ValueError as error:
            yield Problem(subject, str(error), ("reward.recipe",))
            continue
        rules.append(rule)
        for name in rule.weights.keys() - set(reward.sources):
            remedy = f"{name} is none of reward.sources; add it there"
            yield Problem(subject, remedy, ("reward.recipe", "reward.sources"))
        if not any(rule.weights.values()):
            yield Problem(subject, "the reward would always be 0; give one weight that is not 0", ("reward.recipe",))
    labels = [rule.label for rule in rules]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        message = f"the label {label!r} is given twice, and only the first would apply; keep one of them"
        yield Problem("reward.recipe", message, ("reward.recipe",))
    if reward.weights and not any(reward.weights) and not reward.recipe:
        subject = f"reward.weights = {shown(reward.weights)}"
        yield Problem(subject, "the reward would always be 0; give one weight that is not 0", ("reward.weights",))


def _needs(reward: RewardConfig) -> Problems:
    used = used_rewards(reward)
    if "model" in used and reward.model is None:
        remedy = "name a folder or hub id of a reward model"
        yield Problem("reward.model = null with the reward model", remedy, ("reward.model", "reward.source"))
    if reward.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", reward.device):
        message = "unknown device; use cpu, cuda or cuda:N, or null for the run's"
        yield Problem(f"reward.device = {shown(reward.device)}", message, ("reward.device",))
    yield from _names(reward)
    if "remote" in used:
        yield from _address("reward.url", "reward.url", reward.url)
    for name, url in reward.urls.items():
        yield from _address("reward.urls", f"reward.urls: {name}", url)
    if reward.headers_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", reward.headers_env):
        remedy = "name an environment variable that holds the headers, such as REWARD_HEADERS; not the headers"
        yield Problem("reward.headers_env", remedy, ("reward.headers_env",))


def _names(reward: RewardConfig) -> Problems:
    """Models and services have names that nothing else has, and are used."""
    used = used_rewards(reward)
    for option, named in (("reward.models", reward.models), ("reward.urls", reward.urls)):
        for name in named:
            subject = f"{option}: {shown(name)}"
            if not re.fullmatch(r"[\w-]+", name):
                yield Problem(subject, "a name has letters, digits, _ and - only", (option,))
            elif name in KNOWN_REWARDS or (option == "reward.urls" and name in reward.models):
                yield Problem(subject, "another reward has this name; choose another one", (option,))
            elif name not in used:
                remedy = "it is not used; name it in reward.source or reward.sources, or leave it out"
                yield Problem(subject, remedy, (option, "reward.sources", "reward.source"))


def _address(option: str, what: str, url: str | None) -> Problems:
    """A service's address, which messages show without its secrets."""
    subject = f"{what} = {shown(None if url is None else masked_url(url))}"
    if url is not None and has_user(url):
        remedy = (
            "a user name and password in an address end up in logs; leave them out, put `Authorization: Basic …` into "
            "an environment variable, and name that variable with reward.headers_env"
        )
        yield Problem(subject, remedy, (option,))
    elif url is not None and is_masked(url):
        remedy = (
            f"the part after `?` was not saved with the run; give the whole address again with --{option}, or send "
            "the token in a header with reward.headers_env"
        )
        yield Problem(subject, remedy, (option,))
    elif not _is_address(url):
        remedy = "give the service's address, such as http://localhost:8000/score"
        yield Problem(subject, remedy, (option, "reward.source"))


def _is_address(url: str | None) -> bool:
    try:
        parts = urlsplit(url or "")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        return False


def _rule_values(config: Config) -> Problems:
    reward = config.reward
    if "rules" not in used_rewards(reward):
        return
    if reward.success_value <= reward.failure_value:
        subject = f"reward.success_value = {reward.success_value}"
        remedy = f"success must be worth more than failure, reward.failure_value = {reward.failure_value}"
        yield Problem(subject, remedy, ("reward.success_value", "reward.failure_value"))
    facts = suite_facts(config.env, config.gym)
    limit, longest = reward.length_limit, facts.max_steps if facts else None
    if reward.length_penalty and longest is not None and limit >= longest:
        remedy = f"no episode of {config.env.suite} is longer than {longest} steps; set it lower"
        yield Problem(f"reward.length_limit = {limit}", remedy, ("reward.length_limit", "env.suite"))


def _judge(config: Config) -> Problems:
    """What a judge is given, and how its score is found."""
    reward = config.reward
    if "model" not in used_kinds(reward):
        return
    try:
        re.compile(reward.judge_pattern or "")
    except re.error as error:
        message = f"is not a regular expression: {error}"
        yield Problem(f"reward.judge_pattern = {shown(reward.judge_pattern)}", message, ("reward.judge_pattern",))
    template = reward.judge_template
    if template is not None and is_prompts(config.env.suite) and "{response}" not in template:
        remedy = "the judge would not read the response; write {response} where it stands"
        subject = f"reward.judge_template = {shown(template)}"
        yield Problem(subject, remedy, ("reward.judge_template",))


def _text_values(reward: RewardConfig) -> Problems:
    """What the rewards for texts need."""
    used = used_rewards(reward)
    if "format" in used:
        try:
            re.compile(reward.pattern)
        except re.error as error:
            message = f"is not a regular expression: {error}"
            yield Problem(f"reward.pattern = {shown(reward.pattern)}", message, ("reward.pattern",))
    if "length" in used and reward.length_penalty == 0:
        remedy = "set what each token above reward.length_limit costs, such as 0.01"
        yield Problem("reward.length_penalty = 0 with the reward length", remedy, ("reward.length_penalty",))
    if "overlong" in used and reward.max_tokens is None:
        remedy = "set the number of tokens that a text may have, such as 1024"
        yield Problem("reward.max_tokens = null with the reward overlong", remedy, ("reward.max_tokens",))
    elif "overlong" in used and (reward.overlong_buffer or 0) > (reward.max_tokens or 0):
        remedy = f"must not be larger than reward.max_tokens = {reward.max_tokens}"
        yield Problem(f"reward.overlong_buffer = {reward.overlong_buffer}", remedy, ("reward.overlong_buffer",))


def _shaping(config: Config) -> Problems:
    name = config.algorithm.name
    if "shaped" in used_rewards(config.reward) and name not in STEPWISE_METHODS:
        subject = f"reward.source = '{config.reward.source}' with algorithm.name = '{name}'"
        remedy = (
            f"{name} uses the returns of whole episodes, which potential-based shaping does not change; set "
            f"algorithm.name to {', '.join(STEPWISE_METHODS[:-1])} or {STEPWISE_METHODS[-1]}, or use the reward dense"
        )
        yield Problem(subject, remedy, ("reward.source", "algorithm.name"))
