"""Reads a YAML file into plain values and remembers the line of every key.

Scalars follow YAML 1.2's core rules, not PyYAML's 1.1: `1e-4` is a number (and `1e6` an integer); `no` and
`2024-01-01` are text. A key may include its section: `optim.lr: 1e-4` is `lr` below `optim`.

A file's size, its depth, and the number of values that its anchors and merges expand to are bounded before it is built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from vlarl.config.problems import Problem, shown
from vlarl.errors import UsageError

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_VALUES = 20_000
MAX_DIGITS = 40
"""More than any configuration needs."""
TOO_DEEP = f"more than {MAX_DEPTH} levels of lists and mappings in each other"


SECTION_TAG = "tag:yaml.org,2002:map"

IN_PLAIN_WORDS = {
    "expected <block end>": "this line is indented unlike those above; indent the options of a section by two spaces",
    "mapping values are not allowed": "a colon inside a value; write each option as `name: value`, indent the options "
    "of a section by two spaces, and put quotes around text that holds a colon",
    "character '\\t'": "a tab; indent by spaces",
    "expected ',' or": "a bracket is not closed above this line; close it",
    "unexpected end of stream": "a quote is not closed above this line; close it",
    "found another document": "a second document begins here; delete the line `---`",
    "could not find expected ':'": "the line above is not an option; write `name: value`, with a space after the colon",
}
"""PyYAML's error messages, and what to tell the author of a configuration instead."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules above, and bounds."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node, unless it is nested too deep."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(TOO_DEEP)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Construct a value; one that does not fit its tag is an error with its line, as PyYAML's own errors are."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # PyYAML lets them out
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise _misfit(
                node, f"the value does not fit its tag {tag}; delete the tag, or correct the value"
            ) from error

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


def _misfit(node: yaml.Node, reason: str) -> yaml.constructor.ConstructorError:
    """The error for a value that does not fit its tag, with the value's position."""
    return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits, _, exponent = str(loader.construct_scalar(node)).lower().partition("e")
    if len(digits) > MAX_DIGITS or len(exponent) > len("+99"):
        raise _misfit(node, "an integer of too many digits")
    return int(int(digits) * 10 ** int(exponent))


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > MAX_DIGITS:
        raise _misfit(node, f"an integer of {len(text)} digits")
    return int(text)


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node)).lower()
    if text not in ("true", "false"):
        raise _misfit(node, f"{text[:MAX_DIGITS]!r} is neither true nor false")
    return text == "true"


_Loader.add_constructor("!whole", _whole)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)


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
    """A flag's text as a YAML value, or the text itself if it is not YAML."""
    if len(text) > MAX_BYTES:
        return text
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _check_size(node)
        return as_tuples(None if node is None else loader.construct_document(node))
    except yaml.YAMLError:
        return text
    finally:
        if loader is not None:
            loader.dispose()


def as_tuples(value: object) -> object:
    """The same value with lists as tuples, which is what the schema holds, and every key as text."""
    if isinstance(value, list | tuple):
        return tuple(as_tuples(item) for item in value)
    if isinstance(value, dict):
        return {str(key): as_tuples(item) for key, item in value.items()}
    return value


def read_document(path: Path) -> Document:
    """Read a configuration file; if it is not valid YAML, or not a mapping, UsageError names the line."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES // 1000} kB, so it is not a configuration")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    loader: _Loader | None = None
    try:
        loader = _Loader(text)  # control characters are refused here already
        node = loader.get_single_node()
        if node is None:
            return Document(str(path), {})
        if not isinstance(node, yaml.MappingNode) or node.tag != SECTION_TAG:
            raise UsageError(f"{path}: must hold sections with options, such as `optim:` with `lr: 1e-4` below it")
        _check_size(node)
        lines, problems = _lines_and_repeats(str(path), node)
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UsageError(_syntax_error(path, error)) from error
    finally:
        if loader is not None:
            loader.dispose()
    converted = as_tuples(data)
    assert isinstance(converted, dict)
    return Document(str(path), _nested(converted), lines, tuple(problems))


def _nested(data: dict[str, object]) -> dict[str, object]:
    """The same data with keys such as `optim.lr` below their section."""
    nested: dict[str, object] = {key: value for key, value in data.items() if "." not in key}
    for key, value in data.items():
        section, dot, name = key.partition(".")
        if not dot:
            continue
        content = nested.get(section)
        if content is None or isinstance(content, dict):
            nested[section] = {**(content or {}), name: value}
        else:
            nested[key] = value
    return nested


def _check_size(root: yaml.Node | None) -> None:
    """Refuse anchors that contain themselves, and too many or too deeply nested values. Visits each node once."""
    measured: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Values in a node, and levels."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 1
        if id(node) in open_nodes:
            raise yaml.YAMLError("an anchor holds itself")
        if id(node) not in measured:
            open_nodes.add(id(node))
            size, depth = 1, 1
            for entry in node.value:
                for part in entry if isinstance(entry, tuple) else (entry,):
                    values, levels = measure(part)
                    size, depth = size + values, max(depth, levels + 1)
            if size > MAX_VALUES:
                raise yaml.YAMLError(f"more than {MAX_VALUES} values, with those that its anchors stand for")
            if depth > MAX_DEPTH:
                raise yaml.YAMLError(TOO_DEEP)
            open_nodes.remove(id(node))
            measured[id(node)] = size, depth
        return measured[id(node)]

    if root is not None:
        measure(root)


def _syntax_error(path: Path, error: yaml.YAMLError) -> str:
    """PyYAML's error as one line, with its position."""
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error)
    if isinstance(error, yaml.reader.ReaderError):
        code = error.character if isinstance(error.character, int) else ord(error.character[:1] or "?")
        reason = f"the control character U+{code:04X}, at position {error.position}, is not allowed; delete it"
    reason = " ".join(reason.split())
    reason = next((words for theirs, words in IN_PLAIN_WORDS.items() if theirs in reason), reason)
    if mark is None:
        return f"{path}: not valid YAML: {reason}"
    return f"{path}, line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {reason}"


def _lines_and_repeats(name: str, root: yaml.MappingNode) -> tuple[dict[str, int], list[Problem]]:
    """The line of each section and option, and a problem for each one that is written twice."""
    lines: dict[str, int] = {}
    problems: list[Problem] = []

    def visit(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            path = f"{prefix}{key.value if isinstance(key, yaml.ScalarNode) else '?'}"
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
