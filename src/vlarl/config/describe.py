"""The description of each option in the schema: for messages, `--help` and docs/configuration.md."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

from vlarl.config.problems import shown
from vlarl.config.schema import LARGEST, Section

PLURALS = {"an integer": "integers", "a number": "numbers", "text": "texts"}


@dataclass(frozen=True)
class Option:
    """One option of a configuration."""

    path: str  # section.field
    allowed: str  # "a number >= 0", "one of grpo, ppo"
    choices: tuple[str, ...]  # of an option, or of the items of a list option
    default: object
    doc: str
    is_flag: bool  # true or false
    is_list: bool
    is_text: bool
    nullable: bool


@cache
def options(schema: type[Section]) -> dict[str, Option]:
    """All options of a configuration by dotted path, in the order of the schema."""
    defaults = schema()
    found: dict[str, Option] = {}
    for section in schema.model_fields:
        values: Section = getattr(defaults, section)
        for name, rules in type(values).model_json_schema()["properties"].items():
            path = f"{section}.{name}"
            found[path] = _option(path, rules, getattr(values, name))
    return found


def sections(schema: type[Section]) -> dict[str, str]:
    """The sections of a configuration with their one-line meaning."""
    defaults = schema()
    return {name: (type(getattr(defaults, name)).__doc__ or "").strip() for name in schema.model_fields}


def plain(value: object) -> str:
    """A value as it is written in YAML, text without quotes."""
    return value if isinstance(value, str) else shown(value).replace("'", "")


def help_text(schema: type[Section], width: int = 110) -> str:
    """Every option by section with its default, meaning and choices, aligned for a terminal."""
    listed = options(schema)
    flag_width = max(len(path) for path in listed) + 4
    default_width = min(18, max(len(plain(option.default)) for option in listed.values())) + 2
    lines: list[str] = []
    for section, meaning in sections(schema).items():
        lines += ["", f"{section}: {meaning}"]
        for option in (o for o in listed.values() if o.path.startswith(f"{section}.")):
            head = f"  --{option.path}".ljust(flag_width + 2) + plain(option.default).ljust(default_width)
            text = f"{option.doc} [{', '.join(option.choices)}]" if option.choices else option.doc
            indent = " " * (flag_width + 2 + default_width)
            if len(head) > len(indent):  # a long default gets its own line
                lines.append(head)
                head = indent
            lines += textwrap.wrap(text, max(width, 90), initial_indent=head, subsequent_indent=indent)
    return "\n".join(lines).lstrip("\n")


def markdown_table(schema: type[Section]) -> str:
    """Every option by section as Markdown, for docs/configuration.md."""
    lines: list[str] = []
    for section, meaning in sections(schema).items():
        lines += [
            f"**`{section}`**: {meaning}",
            "",
            "| option | default | allowed | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for option in (o for o in options(schema).values() if o.path.startswith(f"{section}.")):
            cells = (f"`{option.path}`", f"`{plain(option.default)}`", _bare(option.allowed), option.doc)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _option(path: str, rules: dict[str, Any], default: object) -> Option:
    variants = rules.get("anyOf", [rules])
    nullable = any(v.get("type") == "null" for v in variants)
    (core,) = (v for v in variants if v.get("type") != "null")
    is_list = core["type"] == "array"
    return Option(
        path=path,
        allowed=_allowed(core) + (", or null" if is_list and nullable else " or null" if nullable else ""),
        choices=tuple(str(c) for c in (core.get("items", {}) if is_list else core).get("enum", ())),
        default=default,
        doc=" ".join(str(rules["description"]).split()),
        is_flag=core["type"] == "boolean",
        is_list=is_list,
        is_text=core["type"] == "string",
        nullable=nullable,
    )


def _allowed(rules: dict[str, Any]) -> str:
    """A JSON schema's rules in words."""
    kind = rules["type"]
    if "enum" in rules:
        return "one of " + ", ".join(str(choice) for choice in rules["enum"])
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return "text"
    if kind == "array":
        if "prefixItems" in rules:
            return f"a list of {len(rules['prefixItems'])}, each {_allowed(rules['prefixItems'][0])}"
        return "a list of " + _several(_allowed(rules["items"]))
    if kind == "object":
        return "a mapping such as {name: value}"
    return ("an integer" if kind == "integer" else "a number") + _range(rules)


def _range(rules: dict[str, Any]) -> str:
    bounds = [
        f" {sign} {rules[key]}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
        if key in rules and rules[key] != LARGEST
    ]
    return " and".join(bounds)


def _several(item: str) -> str:
    for one, many in PLURALS.items():
        if item.startswith(one):
            return many + item.removeprefix(one)
    return item.removeprefix("one of ").replace(", ", " or ")


def _bare(allowed: str) -> str:
    return allowed.removeprefix("an ").removeprefix("a ")
