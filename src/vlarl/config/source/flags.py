"""Parses command-line flags `--section.field value` by the schema's types, and suggests names for unknown ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlarl.config.callables import GivenCallable, named
from vlarl.config.describe import Option, options
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import KNOWN_SUITES
from vlarl.config.problems import Problem, nearest
from vlarl.config.schema import Config, Section
from vlarl.config.source.aliases import (
    ALIASES,
    MEANINGS,
    NEEDLESS,
    OF_TRAIN,
    SINGLE_VALUE,
    SOURCES,
    advice_for,
    alias_of,
    names_only,
    plain_name,
    translation_of,
)
from vlarl.config.source.presets import is_source, may_be_source
from vlarl.config.source.spelling import SUITE_OPTIONS, suite_name
from vlarl.config.source.translations import OFF, Translation
from vlarl.config.source.yaml_file import as_tuples, parse_value

MODELS = {"tiny": "init:tiny-oft", "tiny-openvla": "init:tiny-openvla"}
"""Short names that `--model` accepts besides paths, in every command: fresh weights, for trying out a configuration."""

BOOLEANS = {"true": True, "false": False}
NOT_BOOLEANS = ("yes", "no", "on", "off", "y", "n", "1", "0")
"""Other common spellings of true and false."""

ASSIGNMENT = re.compile(r"\+{0,2}[A-Za-z_][\w-]*(\.[\w-]+)*=")

AFTER_SWITCHES = {
    "logging.wandb": "the key is read from WANDB_API_KEY, or from the file that `wandb login` saved",
    "lora.enabled": "the rank is --lora.rank",
}
"""Switches that take a value in other systems, and where that value is given here."""

HABITS: dict[str, str] = {
    "learning_rate": "lr",
    "total_timesteps": "total_env_steps",
    "grad_clip": "max_grad_norm",
    "minibatch_size": "minibatches",
    "model_path": "path",
    "model": "path",
}
"""Field names of other systems, for suggestions only."""


@dataclass
class Flags:
    """The options that a command line sets."""

    values: dict[str, object] = field(default_factory=dict)  # dotted path -> value
    spelled: dict[str, str] = field(default_factory=dict)  # dotted path -> the flag as written
    positionals: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # flags that were accepted and have no effect, and why
    given: dict[str, dict[str, GivenCallable]] = field(default_factory=dict)  # section -> callables by their names

    def set(self, option: Option, spelled: str, value: object) -> None:
        """Give an option its value; the last flag wins."""
        self.values[option.path] = value
        self.spelled[option.path] = spelled


def parse_flags(tokens: Sequence[str], schema: type[Section], own: Sequence[str] = ()) -> Flags:
    """Read flags; a word that is neither a flag nor a flag's value is a positional. Errors are collected, not raised.

    `a.b=c` is read as `--a.b=c`, and names of other systems are translated (`aliases`). `own` are flags of the command
    itself, such as `--dry-run`, which are not options but may have been meant.
    """
    flags = Flags()
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-") and not _is_assignment(token):
            flags.positionals.append(token)
            continue
        spelled, has_value, value = token.partition("=")
        if has_value:
            rest.insert(0, value)
        option, negated = _find(spelled, schema)
        if option is None:
            _other_system(flags, spelled, rest, bool(has_value), schema, own)
        elif negated or option.is_flag:
            _switch(flags, option, spelled, rest, negated, bool(has_value))
        else:
            several = option.is_list and not has_value and plain_name(spelled) not in SINGLE_VALUE
            texts = [rest.pop(0)] if has_value else _take(rest, several)
            if texts:
                if not several:
                    _refuse_more(flags, spelled, rest, option)
                if plain_name(spelled) == "model":
                    texts = [model_path(text) for text in texts]
                flags.set(option, spelled, _value(option, texts))
                if meaning := MEANINGS.get(plain_name(spelled)):
                    flags.notes.append(f"{spelled} sets --{option.path}, {meaning}")
            else:
                flags.problems.append(Problem(spelled, f"needs a value: {option.allowed}", (option.path,)))
    return flags


def model_path(name: str) -> str:
    """The policy that `--model` names: a checkpoint, or one of the short names."""
    return MODELS.get(name, name)


def _switch(flags: Flags, option: Option, spelled: str, rest: list[str], negated: bool, has_value: bool) -> None:
    """Set an option that is true or false: by itself, by the word after it, or by its `--no-` form."""
    if negated or not (has_value or (rest and rest[0].lower() in (*BOOLEANS, *NOT_BOOLEANS))):
        flags.set(option, spelled, not negated)
        if _is_stray(rest, None):
            rest.pop(0)
            flags.problems.append(_no_switch(option, spelled, "leave out the word after it"))
        return
    text = rest.pop(0)
    value = BOOLEANS.get(text.lower(), parse_value(text))
    if text.lower() in NOT_BOOLEANS:
        remedy = f"must be true or false; write {spelled} for true, or --no-{option.path} for false"
        flags.problems.append(Problem(f"{spelled} {text}", remedy, (option.path,)))
    elif isinstance(value, bool) or (value is None and option.nullable):
        flags.set(option, spelled, value)
    else:
        flags.problems.append(_no_switch(option, spelled, f"write {spelled}, or --no-{option.path}"))


def _no_switch(option: Option, spelled: str, remedy: str) -> Problem:
    """The problem of a word after a switch. The word is not repeated: in other systems it is W&B's key."""
    remedy = AFTER_SWITCHES.get(option.path, remedy)
    return Problem(spelled, f"is true or false, and takes no other value; {remedy}", (option.path,))


def _refuse_more(flags: Flags, spelled: str, rest: list[str], option: Option | None) -> None:
    """Refuse the words after an option's one value, up to the next flag, override, preset or file."""
    more: list[str] = []
    while _is_stray(rest, option):
        more.append(rest.pop(0))
    if more:
        quotes = "; put quotes around text with spaces" if option and option.is_text and not _choices(option) else ""
        problem = f"unexpected argument; {spelled} takes one value{quotes}"
        flags.problems.append(Problem(" ".join(more), problem, (option.path,) if option else ()))


def _is_stray(rest: list[str], option: Option | None) -> bool:
    """Whether the next word belongs to nothing: it is not a flag, a preset or a file, not even a misspelt one.

    A second value for the option before it is stray too: a second suite, a second algorithm.
    """
    if not rest or _is_flag(rest[0]) or _is_assignment(rest[0]) or is_source(rest[0]):
        return False
    return suite_name(rest[0]) in _choices(option) or not may_be_source(rest[0])


def _choices(option: Option | None) -> Sequence[str]:
    """The values that an option accepts, if they are known."""
    return () if option is None else KNOWN_SUITES if option.path in SUITE_OPTIONS else option.choices


def _other_system(
    flags: Flags, spelled: str, rest: list[str], has_value: bool, schema: type[Section], own: Sequence[str]
) -> None:
    """A flag that is not an option: translated if another system has it, otherwise a problem with its remedy."""
    name, known = plain_name(spelled), frozenset(options(schema))
    negated = name.startswith("no_") and translation_of(name.removeprefix("no_"), known) is not None
    found = translation_of(name.removeprefix("no_") if negated else name, known)
    takes = bool(rest) and not negated and (has_value or not _is_flag(rest[0]))
    if found is not None and found.is_flag and not has_value:
        takes = takes and rest[0].lower() in (*BOOLEANS, "none", "group", "batch")
    if name in NEEDLESS and takes and not has_value:
        takes = not is_source(rest[0])
    text = rest.pop(0) if takes else None
    if found is not None and text is not None:
        _refuse_more(flags, spelled, rest, None)
    if name in SOURCES and text is not None:
        flags.positionals.append(text)
    elif found is not None:
        _translate(flags, found, spelled, "false" if negated else text, schema)
    elif name in NEEDLESS and advice_for(name, known, "--") == f"not needed: {NEEDLESS[name]}":
        flags.notes.append(f"{spelled} is not needed: {NEEDLESS[name]}")
    elif (advice := advice_for(name, known, "--")) is not None:
        if text is None or parse_value(text) not in OFF:  # switching a missing feature off is fine
            flags.problems.append(Problem(spelled, advice, (spelled,)))
    elif match := nearest(name, [plain_name(flag) for flag in own], cutoff=0.75):
        flags.problems.append(
            Problem(spelled, f"unknown option; did you mean --{match.replace('_', '-')}?", (spelled,))
        )
    else:
        flags.problems.append(Problem(spelled, "unknown option" + suggestion(name, schema, prefix="--"), (spelled,)))


def _translate(flags: Flags, found: Translation, spelled: str, text: str | None, schema: type[Section]) -> None:
    if text is None and not found.is_flag:
        flags.problems.append(Problem(spelled, "needs a value", found.options))
        return
    word = (text or "true").lower()
    value = BOOLEANS.get(word, parse_value(text or "true"))
    values = found.read(value, flags.values)
    if isinstance(values, str):
        subject = spelled if text is None else f"{spelled} {text}"
        known_paths = frozenset(options(schema))
        fits = names_only(values, known_paths)
        advice = values if fits else advice_for(plain_name(spelled), known_paths, "--") or OF_TRAIN
        flags.problems.append(Problem(subject, advice, found.options))
        return
    known = options(schema)
    for path, item in values.items():
        flags.set(known[path], spelled, item)


def from_mapping(overrides: Mapping[str, object]) -> Flags:
    """Flags from a mapping: `{"optim.lr": 1e-3}` or `{"optim": {"lr": 1e-3}}`; callables are kept by their names."""
    flags = Flags()
    for key, value in overrides.items():
        # A section's options; gym.kwargs is an option itself, and a mapping.
        nested = value if isinstance(value, Mapping) and "." not in key else None
        entries = {key: value} if nested is None else {f"{key}.{k}": v for k, v in nested.items()}
        for path, item in entries.items():
            given = flags.given.setdefault(path.partition(".")[0], {})
            flags.values[path] = as_tuples(named(item, given))
    return flags


def suggestion(name: str, schema: type[Section], prefix: str = "") -> str:
    """`; did you mean …?` for an unknown option name, its name in vlarl, or the existing names."""
    name = name.replace("-", "_")
    if advice := advice_for(plain_name(name), frozenset(options(schema)), prefix):
        return f"; {advice}"
    commands = {"train": Config, "finetune": FinetuneConfig}
    if command := next((command for command, other in commands.items() if name in options(other)), None):
        return f"; it is one of `vlarl {command}`"
    section = name.rpartition(".")[0]
    siblings = [path.partition(".")[2] for path in options(schema) if path.startswith(f"{section}.")]
    if matches := _matches(name, schema, with_aliases=bool(prefix)):
        return "; did you mean " + " or ".join(prefix + match for match in matches) + "?"
    if siblings:
        return f"; options of {section}: " + ", ".join(siblings)
    return "; sections: " + ", ".join(schema.model_fields)


def _matches(name: str, schema: type[Section], with_aliases: bool) -> list[str]:
    """The options, or the alias, that an unknown name may refer to."""
    known = options(schema)
    section, _, leaf = name.rpartition(".")
    leaf = HABITS.get(nearest(leaf, HABITS, cutoff=0.85) or leaf, leaf)
    by_leaf: dict[str, list[str]] = {}
    for path in known:
        by_leaf.setdefault(path.partition(".")[2], []).append(path)
    siblings = {path.partition(".")[2]: path for path in known if path.startswith(f"{section}.")}
    alias = nearest(name, ALIASES, cutoff=0.8) if with_aliases and not section else None
    if leaf in siblings:
        return [siblings[leaf]]
    if leaf in by_leaf:
        return by_leaf[leaf]
    if alias and ALIASES[alias] in known:
        return [alias.replace("_", "-")]
    if found := nearest(leaf, siblings):
        return [siblings[found]]
    if found := nearest(name, known, cutoff=0.75):
        return [found]
    if found := nearest(leaf, by_leaf, cutoff=0.75):
        return by_leaf[found]
    return []


def _is_flag(token: str) -> bool:
    """Whether a token starts a new flag; a negative number does not."""
    return token.startswith("-") and not isinstance(parse_value(token), int | float)


def _is_assignment(token: str) -> bool:
    """Whether a token is written like Hydra's overrides, `a.b=c` or `+a.b=c`, and is not a file."""
    return ASSIGNMENT.match(token) is not None and not is_source(token)


def _find(spelled: str, schema: type[Section]) -> tuple[Option | None, bool]:
    """The option a flag names, and whether the flag is its `--no-` form."""
    known = options(schema)
    paths = frozenset(known)

    def look_up(name: str) -> Option | None:
        return known.get(name) or known.get(alias_of(name, paths) or "")

    if spelled.startswith("-") and not spelled.startswith("--"):
        return None, False
    name = plain_name(spelled)
    if option := look_up(name):
        return option, False
    option = look_up(name.removeprefix("no_")) if name.startswith("no_") else None
    return (option, True) if option is not None and option.is_flag else (None, False)


def _take(rest: list[str], several: bool) -> list[str]:
    """The values that follow a flag: one, or for a list all up to the next flag, override, preset or file."""
    taken: list[str] = []
    while rest and not _is_flag(rest[0]) and (several or not taken):
        if taken and (_is_assignment(rest[0]) or is_source(rest[0])):
            break
        taken.append(rest.pop(0))
    return taken


def _value(option: Option, texts: list[str]) -> object:
    """A flag's texts as the option's type reads them: text stays text, `0 1`, `0,1` and `[0, 1]` are lists."""
    first = texts[0]
    if option.nullable and texts == ["null"]:
        return None
    if option.is_text:
        return first
    if not option.is_list:
        return parse_value(first)
    if len(texts) == 1 and first.startswith("["):
        return parse_value(first)
    # A comma with a space after it belongs to a sentence, such as an instruction.
    items = [item for text in texts for item in ([text] if ", " in text else text.split(","))]
    return tuple(parse_value(item) for item in items)
