"""Builds a configuration: defaults of the schema < the file < the flags; reports all its problems at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vlarl.config.describe import options, plain
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.paths import located
from vlarl.config.problems import MAX_PROBLEMS, ConfigError, Problem, nearest, shown
from vlarl.config.rules.across import check
from vlarl.config.rules.effects import check_given
from vlarl.config.run_checkpoints import check_models, with_located
from vlarl.config.schema import LARGEST, Config
from vlarl.config.secrets import public
from vlarl.config.source.aliases import ALIASES, advice_for, plain_name
from vlarl.config.source.flags import Flags, from_mapping, parse_flags, suggestion
from vlarl.config.source.presets import find_source
from vlarl.config.source.spelling import recipe, respelled
from vlarl.config.source.start import Start, read_start, start_of
from vlarl.config.source.translations import PairItem
from vlarl.config.source.yaml_file import Document, describe_value
from vlarl.config.trust import is_of_run, refuse_untrusted
from vlarl.errors import UsageError

Overrides = Sequence[str] | Mapping[str, object] | Flags
Tree = dict[str, Any]

COMMANDS: dict[str, type[Config] | type[FinetuneConfig]] = {"train": Config, "finetune": FinetuneConfig}
"""The command that each kind of configuration is for."""

MAX_ADVICE = 5
"""Options of another system's section for which a message names vlarl's option."""


@overload
def load_config(
    source: str | Path | Config | None = None,
    overrides: Overrides = (),
    *,
    schema: type[Config] = Config,
    with_policy: bool = True,
    trust: bool = False,
) -> Config: ...
@overload
def load_config(
    source: str | Path | FinetuneConfig | None = None,
    overrides: Overrides = (),
    *,
    schema: type[FinetuneConfig],
    trust: bool = False,
) -> FinetuneConfig: ...


def load_config(
    source: str | Path | Config | FinetuneConfig | None = None,
    overrides: Overrides = (),
    *,
    schema: type[Config] | type[FinetuneConfig] = Config,
    with_policy: bool = True,
    trust: bool = False,
) -> Config | FinetuneConfig:
    """Read a preset or YAML file and apply flags (`["--optim.lr", "1e-3"]`) or values (`{"optim.lr": 1e-3}`) to it.

    A configuration can be given in place of a file. Raises ConfigError with all problems: unknown names, wrong values,
    combinations that can't work, options that the user gave and that have no effect. `with_policy` False is for
    commands that use the environment alone. A configuration that another user's run has saved may name code only with
    `trust`: see docs/security.md.

    >>> config = load_config("tabletop_grpo", {"run.seed": 1, "optim.lr": 1e-4})
    >>> config.run.seed, config.optim.lr
    (1, 0.0001)
    """
    flags = as_flags(overrides, schema)
    if isinstance(source, schema):
        base, file, document = source, None, Document("", {})
    else:
        start = start_of(_path_of(source), flags.values)
        base, file, document = schema(), _found(start, schema, flags), read_start(start, flags.values)
        _refuse_other_kind(document, schema, start.source)
    stray = [Problem(text, "unexpected argument") for text in flags.positionals]
    data = _respelled(_merged(base.model_dump(), document.data, flags.values), schema)
    config, problems = _validated(data, schema, document, flags)
    for section in schema.model_fields if config is not None else ():
        getattr(config, section).given.update(getattr(base, section).given | flags.given.get(section, {}))
    problems = [*document.problems, *flags.problems, *stray, *problems]
    if config is not None:
        config = with_located(config) if isinstance(config, Config) else with_located(config)
        wrong = {path for problem in problems for path in problem.paths}
        found = [
            problem for problem in [*check(config), *check_models(config)] if not wrong.intersection(problem.paths)
        ]
        problems += [_with_spelling(problem, flags) for problem in found]
        reported = {path for problem in problems for path in problem.paths}
        given = check_given(config, document, flags, with_policy)
        problems += [p for p in given if p.paths[0] not in reported and not wrong.intersection(p.paths)]
    if problems or config is None:
        raise ConfigError(problems)
    if file is not None and not trust and is_of_run(file):
        refuse_untrusted(file, config.model_dump(), flags.values)
    return located(config)


def _with_spelling(problem: Problem, flags: Flags) -> Problem:
    """A problem whose option was set by another name, with that name: `policy.dtype = 'bfloat16' (--bf16)`."""
    set_by = {path: flags.spelled[path] for path in problem.paths if path in flags.spelled and path in problem.subject}
    names = [spelled for path, spelled in set_by.items() if plain_name(spelled) != path]
    return replace(problem, subject=f"{problem.subject} ({', '.join(names)})") if names else problem


def _path_of(source: object) -> str | Path | None:
    """The name of a preset or the path of a file; UsageError for any other object."""
    if source is None or isinstance(source, str | Path):
        return source
    kind = type(source).__name__
    remedy = "give the name of a preset, a YAML file, or what vlarl.load_config returns for this command"
    raise UsageError(f"a configuration cannot be read from {kind}: {remedy}; options go into the second argument.")


def to_yaml(config: Config | FinetuneConfig) -> str:
    """The configuration as a YAML file that `load_config` reads back to the same values, but for masked secrets."""
    return yaml.dump(public(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)
)
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _float(value)))


def _float(value: float) -> str:
    """A number that every YAML reader reads as a number: `1.0e-07`; some read `1e-07` as text."""
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


def as_flags(overrides: Overrides, schema: type[Config] | type[FinetuneConfig]) -> Flags:
    """Overrides in any of their forms as flags."""
    if isinstance(overrides, Flags):
        return overrides
    if isinstance(overrides, Mapping):
        return from_mapping(overrides)
    remedy = "give options as a mapping, such as {'run.seed': 1}"
    if isinstance(overrides, str | bytes) or not isinstance(overrides, Sequence):
        raise UsageError(f"overrides cannot be read from {type(overrides).__name__}: {remedy}")
    if others := [item for item in overrides if not isinstance(item, str)]:
        raise UsageError(f"overrides: {shown(others[0])} in a list of flags is not text; {remedy}")
    return parse_flags(overrides, schema)


def _found(start: Start, schema: type[Config] | type[FinetuneConfig], flags: Flags) -> Path:
    return find_source(start.source, schema, str(flags.values.get("run.root", schema().run.root)))


def _refuse_other_kind(document: Document, schema: type[Config] | type[FinetuneConfig], source: str | Path) -> None:
    """Refuse a file whose sections are those of another command, and name that command."""
    given = set(document.data)
    for command, other in COMMANDS.items():
        if given - set(schema.model_fields) and given <= set(other.model_fields):
            remedy = f"this is a configuration for `vlarl {command}`; run: vlarl {command} {source}"
            raise ConfigError([Problem(str(source), remedy)])


def _merged(defaults: Tree, file: Mapping[str, object], flags: Mapping[str, object]) -> Tree:
    """One tree from the three layers; an empty section of the file stands for its defaults."""
    merged = dict(defaults)
    for section, content in file.items():
        if isinstance(content, dict):
            base = merged.get(section)
            merged[section] = {**(base if isinstance(base, dict) else {}), **content}
        elif content is not None or section not in defaults:
            merged[section] = content
    for path, value in flags.items():
        section, _, name = path.partition(".")
        if not name or not isinstance(merged.get(section, {}), dict):
            merged[section] = value if not name else merged[section]
        else:
            below = merged.get(section, {})
            merged[section] = {**below, name: value.of(below.get(name)) if isinstance(value, PairItem) else value}
    given = {path.removeprefix("run."): value for path, value in flags.items() if path.startswith("run.")}
    _set_length(merged, [file.get("run"), given])
    given = {path.removeprefix("env."): value for path, value in flags.items() if path.startswith("env.")}
    _set_suites(merged, [file.get("env"), given])
    return merged


def _set_length(merged: Tree, layers: Sequence[object]) -> None:
    """A length of training that a layer sets replaces the other kind of length in the layers below it."""
    lengths = ("iterations", "total_env_steps")
    run = merged.get("run")
    if not isinstance(run, dict) or not set(lengths) <= set(run):
        return
    for layer in layers:
        given = [name for name in lengths if isinstance(layer, dict) and layer.get(name) is not None]
        absent = [name for name in lengths if isinstance(layer, dict) and name not in layer]
        if given and absent:
            run = {**run, absent[0]: None}
        if isinstance(layer, dict):
            run = {**run, **{name: layer[name] for name in lengths if name in layer}}
    merged["run"] = run


def _set_suites(merged: Tree, layers: Sequence[object]) -> None:
    """One suite that a layer names replaces several in the layers below it, and several replace one."""
    env = merged.get("env")
    if not isinstance(env, dict) or "suites" not in env:
        return
    for layer in (layer for layer in layers if isinstance(layer, dict)):
        several = layer.get("suites")
        if "suite" in layer and "suites" not in layer:
            env = {**env, "suites": (), "suite_tasks": layer.get("suite_tasks", {})}
        elif "suite" not in layer and isinstance(several, list | tuple) and several:
            env = {**env, "suite": several[0], "suite_tasks": layer.get("suite_tasks", {})}
        env = {**env, **{name: layer[name] for name in ("suite", "suites", "suite_tasks") if name in layer}}
    merged["env"] = env


def _respelled(data: Tree, schema: type[Config] | type[FinetuneConfig]) -> Tree:
    """The same data with values in the spelling of the schema."""
    return {
        section: {name: respelled(f"{section}.{name}", value, schema) for name, value in content.items()}
        if isinstance(content, dict)
        else content
        for section, content in data.items()
    }


def _validated(
    data: Tree, schema: type[Config] | type[FinetuneConfig], document: Document, flags: Flags
) -> tuple[Config | FinetuneConfig | None, list[Problem]]:
    """The configuration and its problems; wrong values are replaced by defaults, so that the rest can be checked."""
    try:
        return schema.model_validate(data), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems = {_path(detail): _problem(detail, schema, document, flags) for detail in details[:MAX_PROBLEMS]}
    problems |= {_path(detail): Problem(_path(detail), "unknown or wrong") for detail in details[MAX_PROBLEMS:]}
    defaults = schema().model_dump()
    for detail in details:
        section, *rest = (str(part) for part in detail["loc"])
        if rest and section in defaults:
            data[section] = {**data[section]}
            data[section].pop(rest[0], None)
            if rest[0] in defaults[section]:
                data[section][rest[0]] = defaults[section][rest[0]]
        else:
            data.pop(section, None)
    return schema.model_validate(data), list(problems.values())


def _path(detail: ErrorDetails) -> str:
    """`env.task_ids[1]` for the location of an error."""
    section, *rest = detail["loc"]
    return str(section) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)


def _problem(
    detail: ErrorDetails, schema: type[Config] | type[FinetuneConfig], document: Document, flags: Flags
) -> Problem:
    """Pydantic's error in terms of the schema."""
    path, value = _path(detail), detail["input"]
    option_path = ".".join(str(part) for part in detail["loc"][:2])
    place = flags.spelled.get(option_path) or ("" if option_path in flags.values else document.place(option_path))
    option = options(schema).get(option_path)
    may_be_secret = option is not None and option.is_flag and isinstance(value, str)  # W&B's key, in other systems
    subject = (path if may_be_secret else f"{path} = {describe_value(value)}") + (f" ({place})" if place else "")
    if option is not None:
        message = f"must be {option.allowed}"
        if detail["type"] == "less_than_equal" and detail["ctx"]["le"] == LARGEST:
            message += f", and {LARGEST} at most"
        match = nearest(value, option.choices) if isinstance(value, str) else None
        message += f"; did you mean '{match}'?" if match else ""
        message = recipe(option_path, value) or message
    elif path in schema.model_fields:
        message = f"must be a section: options of {path} below it" + _as_section(path, value, schema)
    elif path.partition(".")[0] in schema.model_fields or not isinstance(value, dict):
        message = "unknown option" + suggestion(path, schema)
    else:
        match = nearest(path, schema.model_fields)
        hint = f"; did you mean {match}?" if match else "; sections: " + ", ".join(schema.model_fields)
        message = "unknown section" + (_section_advice(path, value, schema) or hint)
    return Problem(subject, message, (option_path,))


def _as_section(section: str, value: object, schema: type[Config] | type[FinetuneConfig]) -> str:
    """The advice for a value in the place of a section, if it is clear how it was meant."""
    if isinstance(value, str) and f"{section}.{value.partition(':')[0]}" in options(schema):
        return "; write a space after the colon"
    option = ALIASES.get(section, "").removeprefix(f"{section}.")
    return f", such as `{option}: {plain(value)}`" if option and isinstance(value, str | bool) else ""


def _section_advice(section: str, content: Mapping[str, object], schema: type[Config] | type[FinetuneConfig]) -> str:
    """vlarl's counterparts of the options in another system's section, as far as they are known."""
    known = frozenset(options(schema))
    named = ((path, advice_for(path, known)) for path in _leaves(section, content))
    found = [f"{path}: {advice}" for path, advice in named if advice]
    return "".join(f"; {advice}" for advice in found[:MAX_ADVICE])


def _leaves(prefix: str, content: Mapping[str, object]) -> Iterator[str]:
    """Dotted names of the values in a nested mapping."""
    for name, value in content.items():
        path = f"{prefix}.{name}"
        yield from _leaves(path, value) if isinstance(value, dict) else [path]
