"""Prompts with their responses, for losses that imitate them: rows as TRL's and verl's supervised training reads them.

{"prompt": …, "completion": …}      texts, or messages
{"messages": [ …, {"role": "assistant", "content": …}]}      the last message is the response
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlarl.config.schema import PromptsConfig, PtxConfig
from vlarl.envs.prompts.files import Row, as_json, open_rows
from vlarl.envs.prompts.media import MediaError
from vlarl.envs.prompts.rows import ParsedRow, RowError, parse_row
from vlarl.envs.prompts.source import PromptError
from vlarl.types import Action, Observation, message_text

PROMPTS, MESSAGES = ("prompt", "messages"), "messages"
RESPONSES = ("completion", "response")


class PromptedResponses:
    """The rows of a file as prompts and responses; images are decoded when they are used."""

    def __init__(self, path: Path, ptx: PtxConfig, prompts: PromptsConfig) -> None:
        """Rows are checked as far as that needs no pixels; the first that can't be used is raised."""
        self._ptx = ptx
        self._prompts = PromptsConfig(system=prompts.system, video_frames=prompts.video_frames)
        self._file = open_rows(path, "ptx.path")
        for index in range(len(self._file)):
            try:
                self._parsed(index)[0].check_files(self._file.folder)
            except (RowError, MediaError) as error:
                raise self._refused(index, error) from error

    def __len__(self) -> int:
        return len(self._file)

    def sample(self, index: int) -> tuple[Observation, Action]:
        """The prompt of a row, and its response."""
        row, text = self._parsed(index)
        try:
            prompt = row.decoded(self._file.folder, self._prompts.video_frames)
        except MediaError as error:
            raise self._refused(index, error) from error
        return Observation.of_prompt(prompt), text

    def _parsed(self, index: int) -> tuple[ParsedRow, str]:
        row = self._file.row(index)
        prompt_column = _column(row, self._ptx.prompt_column, PROMPTS, "prompt")
        given = row[prompt_column]
        if prompt_column == MESSAGES and self._ptx.response_column is None:
            if not isinstance(given, list) or len(given) < 2:
                raise RowError("has fewer than two messages: a prompt and its response")
            given, response = given[:-1], given[-1]
        else:
            response = row[_column(row, self._ptx.response_column, RESPONSES, "response")]
        others = {name: value for name, value in row.items() if name != prompt_column}
        return parse_row(others | {self._prompts.prompt_column: given}, self._prompts), response_text(response)

    def _refused(self, index: int, error: Exception) -> PromptError:
        return PromptError(f"ptx.path: {self._file.where(index)} {error}. Correct the row.")


def _column(row: Row, named: str | None, usual: tuple[str, ...], what: str) -> str:
    names = usual if named is None else (named,)
    found = next((name for name in names if row.get(name) is not None), None)
    if found is None:
        there = ", ".join(key for key, value in row.items() if value is not None) or "none"
        missing = " or ".join(repr(name) for name in names)
        raise RowError(
            f"has no column {missing}; name the one with the {what} with ptx.{what}_column (its columns: {there})"
        )
    return found


def response_text(response: Any) -> str:
    """The text of a response: as it is, or of one message of the assistant."""
    message = response[0] if isinstance(response, list) and len(response) == 1 else response
    if isinstance(message, str):
        return message
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise RowError(f"has a response that is neither a text nor one message of the assistant ({as_json(response)})")
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list) or any(not isinstance(p, dict) or p.get("type") != "text" for p in parts):
        raise RowError(f"has a response that is not a text ({as_json(content)})")
    return message_text(message)
