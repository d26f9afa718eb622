"""Reads a YAML file into plain values and remembers the line of every key.

Scalars follow YAML 1.2's core rules, not PyYAML's 1.1: `1e-4` is a number (and `1e6` a whole one); `no` and
`2024-01-01` are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from vlarl.config.problems import Problem, shown
from vlarl.errors import UsageError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules above."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), "-+0123456789")
_Loader.add_implicit_resolver("!whole", re.compile(r"^[-+]?[0-9]+[eE]\+?[0-9]{1,2}$"), "-+0123456789")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|nan))$"),
    "-+0123456789.",
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Loader.add_constructor("!whole", lambda _, node: int(float(node.value)))


@dataclass(frozen=True)
class Document:
    """The content of a configuration file."""

    name: str  # as messages call it
    data: dict[str, object]  # sections, with lists as tuples
    lines: dict[str, int] = field(default_factory=dict)  # dotted path -> line
    problems: tuple[Problem, ...] = ()

    def place(self, path: str) -> str:
        """Where a dotted path is written: `my.yaml, line 4`; empty when it is not in the file."""
        return f"{self.name}, line {self.lines[path]}" if path in self.lines else ""


def parse_value(text: str) -> object:
    """A flag's text as a YAML value, or the text itself where it is not YAML."""
    try:
        return as_tuples(yaml.load(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError):  # ValueError: a tag that its text does not fit, such as `!!int x`
        return text


def as_tuples(value: object) -> object:
    """The same value with lists as tuples, which is what the schema holds, and every key as text."""
    if isinstance(value, list | tuple):
        return tuple(as_tuples(item) for item in value)
    if isinstance(value, dict):
        return {str(key): as_tuples(item) for key, item in value.items()}
    return value


def read_document(path: Path) -> Document:
    """Read a configuration file; a file that is no YAML, or no mapping, is a UsageError with its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(str(path), {})
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"{path}: must hold sections with options, such as `optim:` with `lr: 1e-4` below it")
        lines, problems = _lines_and_repeats(str(path), node)
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UsageError(_syntax_error(path, error)) from error
    except ValueError as error:  # a tag that its text does not fit, such as `!!int x`
        raise UsageError(f"{path}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
    converted = as_tuples(data)
    assert isinstance(converted, dict)
    return Document(str(path), converted, lines, tuple(problems))


def _syntax_error(path: Path, error: yaml.YAMLError) -> str:
    """One line for PyYAML's report, with the place."""
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error)
    if mark is None:
        return f"{path}: not valid YAML: {reason}"
    return f"{path}, line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {reason}"


def _lines_and_repeats(name: str, root: yaml.MappingNode) -> tuple[dict[str, int], list[Problem]]:
    """The line of each section and option, and a problem for each one that is written twice."""
    lines: dict[str, int] = {}
    problems: list[Problem] = []

    def visit(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            line = key.start_mark.line + 1
            if path in lines:
                subject = f"{path} ({name}, line {line})"
                problems.append(Problem(subject, f"already given in line {lines[path]}; keep one of them", (path,)))
            lines[path] = line
            if isinstance(value, yaml.MappingNode) and not prefix:
                visit(value, f"{path}.")

    visit(root, "")
    return lines, problems


def describe_value(value: object) -> str:
    """A value for a message; a whole section is not spelled out."""
    return "{…}" if isinstance(value, dict) else shown(value)
