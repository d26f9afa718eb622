"""Writes the tables of options in docs/configuration.md from the schema."""

from pathlib import Path

from vlarl.config.describe import markdown_table
from vlarl.config.source.load import COMMANDS

DOC = Path(__file__).parents[1] / "docs" / "configuration.md"


def updated(text: str) -> str:
    """The document with today's table between each pair of marks."""
    for command, schema in COMMANDS.items():
        head, begin, rest = text.partition(f"<!-- options of {command} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {command} -->")
        text = f"{head}{begin}\n{markdown_table(schema)}\n{end}{tail}"
    return text


if __name__ == "__main__":
    DOC.write_text(updated(DOC.read_text(encoding="utf-8")), encoding="utf-8")
