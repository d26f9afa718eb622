"""Options that the user gave and that the resolved configuration would not use: without effect, or another robot's.

Only what the user gave is checked: flags, overrides in Python, and the user's own configuration file. Values of a
shipped preset are not, nor those of a saved configuration (a run's config.yaml, the output of --dry-run), which has
all sections; and an option that is given its default counts as left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import BUILTINS, CHECKPOINT_SERIES, GYM, KNOWN_SUITES, PROMPTS
from vlarl.config.problems import Problem, shown
from vlarl.config.rules.effects_table import FINETUNE, TRAIN, Condition
from vlarl.config.schema import Config
from vlarl.config.secrets import masked
from vlarl.config.source.flags import Flags
from vlarl.config.source.presets import PRESET_FOLDER, presets_for_suite
from vlarl.config.source.yaml_file import Document

TRAINED_ON = {"tabletop_": "on the tabletop's robot", "prompts_": "on the built-in prompts"}
"""What the built-in weights were trained on, in words."""


def check_given(
    config: Config | FinetuneConfig, document: Document, flags: Flags, with_policy: bool = True
) -> list[Problem]:
    """Problems of the options that the user gave; each has the option first in its paths and the switches after it.

    `with_policy`: the command runs the policy, so its weights must fit the suite.
    """
    written = _written(document) if _is_own(document) and not _is_saved(document, config) else []

    def place(path: str) -> str:
        return flags.spelled.get(path) or ("" if path in flags.values else document.place(path))

    problems = list(without_effect(config, [*written, *flags.values], place))
    if isinstance(config, Config) and with_policy:
        problems += _foreign_weights(config, document, flags)
    return problems


def without_effect(
    config: Config | FinetuneConfig, given: Iterable[str], place: Callable[[str], str] = lambda path: ""
) -> Iterator[Problem]:
    """Problems of the given options (section.field) that this configuration does not read; `place` says where each was
    written."""
    table: Sequence[Condition[Any]] = TRAIN if isinstance(config, Config) else FINETUNE
    defaults = type(config)()
    for path in dict.fromkeys(given):
        section, _, name = path.partition(".")
        if section not in type(config).model_fields or name not in type(getattr(config, section)).model_fields:
            continue  # an unknown option, which is refused already
        value = getattr(getattr(config, section), name)
        if value == getattr(getattr(defaults, section), name):
            continue
        failed = next((c for c in table if c.concerns(path) and not c.holds(config)), None)
        if failed is not None:
            subject = f"{path} = {masked(shown(value))}" + (f" ({place(path)})" if place(path) else "")
            remedy = "set that, or leave" if "without" in failed.otherwise and failed.switches else "leave"
            message = f"has no effect {failed.otherwise}; {remedy} {path} out"
            yield Problem(subject, message, (path, *failed.switches))


def _foreign_weights(config: Config, document: Document, flags: Flags) -> Iterator[Problem]:
    """Weights that were trained for another suite are used only if the user named them: the built-in ones on another
    robot or other prompts, a preset's checkpoint if there is none of its series for the suite."""
    path, suite = config.policy.path, config.env.suite
    named = "policy.path" in flags.values or (_is_own(document) and "policy.path" in _written(document))
    # A Config in place of a file has no document; its combination was checked when it was made.
    named = named or (not document.name and "env.suite" not in flags.values)
    home = next((own for series in CHECKPOINT_SERIES.values() for own, name in series.items() if name == path), None)
    kind, _, name = path.partition(":")
    if kind == "builtin":
        home = BUILTINS[name].home if name in BUILTINS else None
    is_foreign = home is not None and suite in KNOWN_SUITES and not suite.startswith(home)
    if suite == GYM and config.gym.env is None:  # which is refused already
        return
    if not is_foreign or named:
        return
    own = {GYM: config.gym.env, PROMPTS: "your data"}
    world, fitting = (own[suite], []) if suite in own else (suite, presets_for_suite(suite))
    start = f", start from the preset {' or '.join(fitting)}" if fitting and home in TRAINED_ON else ""
    trained = TRAINED_ON.get(str(home), f"for {home}")
    remedy = (
        f"these weights were trained {trained}, not for {world}; name a checkpoint made for "
        f"it with --policy.path{start}, or say --policy.path {path} to train these anyway"
    )
    yield Problem(f"policy.path = {shown(path)} with env.suite = {shown(suite)}", remedy, ("policy.path", "env.suite"))


def _is_own(document: Document) -> bool:
    """Whether a configuration file is the user's and not a shipped preset."""
    return Path(document.name).resolve().parent != PRESET_FOLDER.resolve()


def _is_saved(document: Document, config: Config | FinetuneConfig) -> bool:
    """Whether a file was written by vlarl: it names every section."""
    return set(type(config).model_fields) <= set(document.data)


def _written(document: Document) -> list[str]:
    """The options that a file gives a value, as section.field."""
    return [
        f"{section}.{name}"
        for section, content in document.data.items()
        if isinstance(content, dict)
        for name in content
    ]
