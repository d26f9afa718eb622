"""Error messages of the Python interface: with arguments and overrides in place of command-line flags.

Messages are written for the command line. `explained` turns their flags into Python: `--trust` into `trust=True`,
`--optim.lr 0.1` into `{'optim.lr': 0.1}`; and commands that are one call with one name, `vlarl train --resume
runs/mine`, into that call. Other commands (`vlarl push RUN ORG/NAME`) stay.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from vlarl.cli import COMMANDS, limit_spinning
from vlarl.config.describe import Option, options
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.problems import nearest
from vlarl.config.schema import Config, Section
from vlarl.config.source.aliases import advice_for
from vlarl.config.source.yaml_file import parse_value
from vlarl.errors import UsageError, VlarlError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Parameters = Mapping[str, inspect.Parameter]

HABITS = {
    "config": "source",
    "preset": "source",
    "reward_fn": "reward",
    "reward_funcs": "reward",
    "env_fn": "env",
    "make_env": "env",
    "callback": "on_iteration",
    "callbacks": "on_iteration",
    "task_ids": "tasks",
    "task_suite": "suite",
    "states_per_task": "episodes",
    "n_episodes": "episodes",
    "num_episodes": "episodes",
    "n_eval_episodes": "episodes",
    "on_result": "on_episode",
    "resume_from_checkpoint": "resume",
    "model": "checkpoint",
    "policy": "checkpoint",
    "policy_path": "checkpoint",
    "pretrained_checkpoint": "checkpoint",
}
"""Names of arguments in other systems, for suggestions only."""

OPTIONS: dict[str, Option] = {**options(FinetuneConfig), **options(Config)}

PHRASES = {
    "or null": "or None",
    "must be true or false": "must be True or False",
    "yourself on the command line": "yourself",
}
"""Other phrases that differ in Python."""

_QUOTED = r"`(?:vlarl|ray|hf|pip) [^`]*`"
_BARE = rf"\b(?:vlarl (?:{'|'.join(COMMANDS)})|ray start|hf download|pip install)\b[^\n;`)]*"
_WORD = r"'[^'\n]*'|(?!--)[^\s'`,;()]+"
_FLAG = rf"(?<![\w-])--(?P<name>[a-z][a-z_-]*(?:\.[a-z][a-z_0-9]*)?)(?P<words>(?: (?:{_WORD}))*)"
_CALL = re.compile(r"vlarl (?P<function>train|finetune)(?:(?P<resume> --resume)? (?P<word>[^-\s'\"]\S*))?")
_SPANS = re.compile(f"(?P<command>{_QUOTED}|{_BARE})|{_FLAG}")


class UnknownArgumentError(UsageError, TypeError):
    """A keyword argument that a function does not have; the message names the nearest one that it has."""


def explained(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function with its error messages translated to Python, set up like a command."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        limit_spinning()
        try:
            for name, value in kwargs.items():
                if name not in parameters:
                    raise UnknownArgumentError(_unknown(function.__name__, name, value, list(parameters)))
            return function(*args, **kwargs)
        except VlarlError as error:
            error.args = (in_python(str(error), parameters),)
            raise

    return call


def in_python(text: str, parameters: Parameters) -> str:
    """A message with its flags as arguments of a function, or as overrides; commands stay as they are."""

    def translated(span: re.Match[str]) -> str:
        if (command := span["command"]) is not None:
            is_whole = command.startswith("`") or text[: span.start()].endswith("run: ")
            call = _CALL.fullmatch(command.strip("`")) if is_whole else None
            return command if call is None else _as_call(command, call)
        name, words = span["name"].replace("-", "_"), re.findall(_WORD, span["words"])
        if option := OPTIONS.get("run.root" if name == "root" else name):
            taken, written = _value(option, words)
            form = f"{{{option.path!r}: {written}}}" if taken else option.path
        elif name in parameters:
            taken, form = _argument(parameters[name], words, span["words"][:2] + text[span.end() : span.end() + 1])
        else:
            return span[0]
        left = span["words"]
        for word in words[:taken]:
            left = left.removeprefix(f" {word}")
        ending = words[taken - 1][len(_bare(words[taken - 1])) :] if taken else ""  # the end of a sentence
        return f"{form}{ending}{left}"

    text = _SPANS.sub(translated, text)
    for words, python in PHRASES.items():
        text = re.sub(rf"\b{words}\b", python, text)
    return text


def _as_call(command: str, call: re.Match[str]) -> str:
    """The command as a call of the function that has its name, in the same quotes."""
    argument = "" if call["word"] is None else f"({'resume=' if call['resume'] else ''}{call['word']!r})"
    quote = "`" if command.startswith("`") else ""
    return f"{quote}vlarl.{call['function']}{argument}{quote}"


def _argument(parameter: inspect.Parameter, words: Sequence[str], around: str) -> tuple[int, str]:
    """The number of words that are an argument's value, and the argument with it; `around` follows flag and words."""
    if around.startswith(" =") or around == ":":  # `--tasks = [99]: no task 99` is about what was given
        return 0, parameter.name
    if parameter.annotation in (bool, "bool"):
        return 0, f"{parameter.name}=True"
    value = _bare(words[0]) if words else ""
    ends_there = len(words) == 1 and around.endswith(("`", ")"))
    if value and (ends_there or value.isupper() or re.search(r"[/_\d']", value)):
        return 1, f"{parameter.name}={_written(value)}"
    return 0, f"{parameter.name}="


def _value(option: Option, words: Sequence[str]) -> tuple[int, str]:
    """The number of words that are a value of an option, and the value as it is written in Python."""
    taken = 0
    while taken < len(words) and (option.is_list or not taken) and _is_value(option, _bare(words[taken])):
        taken += 1
    written = [_written(_bare(word)) for word in words[:taken]]
    return taken, f"[{', '.join(written)}]" if option.is_list else "".join(written)


def _is_value(option: Option, word: str) -> bool:
    """Whether a word after a flag is its value, and not the next word of the sentence."""
    if word.startswith("'") or word in option.choices or word.isupper():
        return True
    if option.is_text:
        return re.search(r"[:/]", word) is not None
    return isinstance(parse_value(word), bool if option.is_flag else int | float)


def _bare(word: str) -> str:
    """A word without the end of its sentence."""
    return word.rstrip(".:?")


def _written(word: str) -> str:
    """A word of a command line as a Python literal; PLACEHOLDERS stay."""
    if re.fullmatch(r"[A-Z/]+", word):
        return word
    return repr(parse_value(word.strip("'")))


def _unknown(function: str, name: str, value: object, known: Sequence[str]) -> str:
    """The message for a keyword argument that a function does not have."""
    subject = f"vlarl.{function}: unknown argument {name!r}"
    if function == "evaluate" and name == "against":
        return f"{subject}; two checkpoints are compared by vlarl.compare(FIRST, SECOND)"
    habit = HABITS.get(name)
    if habit not in known:
        habit = None
    if match := habit or nearest(name, known, cutoff=0.75):
        return f"{subject}; did you mean {match!r}?"
    schema: type[Section] = FinetuneConfig if function == "finetune" else Config
    if "overrides" in known and (advice := _as_option(name, value, schema, function in ("evaluate", "compare"))):
        return f"{subject}; {advice}"
    if match := nearest(name, known, cutoff=0.5):
        return f"{subject}; did you mean {match!r}? Arguments: {', '.join(known)}"
    return f"{subject}; arguments: {', '.join(known)}"


def _as_option(name: str, value: object, schema: type[Section], by_keyword: bool) -> str | None:
    """The options of the configuration that a keyword argument may refer to; None if there is none."""
    paths = list(options(schema))
    if name in schema.model_fields:
        own = [path for path in paths if path.startswith(f"{name}.")]
        first = f"{name}.path" if f"{name}.path" in own else own[0]
        examples = [f"{{{name!r}: {{...}}}}" if isinstance(value, Mapping) else f"{{{first!r}: ...}}"]
    else:
        folded = name.replace("__", "_")
        meant = [path for path in paths if path.replace(".", "_") == folded]
        advice = advice_for(name, frozenset(paths))
        if not meant and advice is not None:
            meant = [path for path in paths if advice == f"here it is {path}"]
            if not meant:
                return advice
        meant = meant or [path for path in paths if path.partition(".")[2] == name]
        examples = [f"{{{path!r}: ...}}" for path in meant]
    argument = "overrides=" if by_keyword else ""
    written = " or ".join(argument + example for example in examples)
    return f"options of the configuration go into the overrides: {written}" if examples else None
