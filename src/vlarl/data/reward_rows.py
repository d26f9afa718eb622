"""Rows of texts and images that reward models are trained on, in TRL's columns.

{"prompt": …, "chosen": …, "rejected": …}             preferences: texts or messages; `image` or `images` besides
{"chosen": [ …messages], "rejected": [ …messages]}    the same, whose common beginning is the prompt
{"prompt": …, "completions": […], "labels": […]}      steps: how good each one is, true and false or from 0 to 1
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from vlarl.config.schema import PromptsConfig
from vlarl.envs.prompts.files import Row, as_json, open_rows
from vlarl.envs.prompts.media import MediaError
from vlarl.envs.prompts.responses import response_text
from vlarl.envs.prompts.rows import ParsedRow, RowError, parse_row
from vlarl.envs.prompts.source import PromptError
from vlarl.rewards.reward_model import STEP_SEPARATOR, Candidate

PATH = "reward.path"
CHOSEN, REJECTED = "chosen", "rejected"
PREFERENCE, STEPWISE = ("prompt", CHOSEN, REJECTED), ("prompt", "completions", "labels")

Content = TypeVar("Content")


class JudgedRows(Generic[Content]):
    """The rows of a file, all of them checked as far as that needs no pixels; the first that can't be used is raised.

    Images are decoded when a row is used.
    """

    def __init__(self, path: Path, reads_images: bool = True) -> None:
        """Without `reads_images`, rows with images or videos are refused."""
        self._file = open_rows(path, PATH)
        self._config = PromptsConfig()
        self.contents: list[Content] = []
        for index in range(len(self._file)):
            row = self._file.row(index)
            try:
                content = self.content(row)
                parsed = self._parsed(row)
                if (parsed.images or parsed.videos) and not reads_images:
                    raise RowError(
                        "has images or videos, and policy.path reads texts alone: begin from a vision-language model"
                    )
                parsed.check_files(self._file.folder)
            except (RowError, MediaError) as error:
                raise self._refused(index, error) from error
            self.contents.append(content)

    def content(self, row: Row) -> Content:
        """The responses and labels of a row; RowError where it can't be used."""
        raise NotImplementedError

    def prompt_of(self, row: Row) -> Any:
        """The prompt of a row as it is given: a text or messages."""
        return row.get("prompt")

    def __len__(self) -> int:
        return len(self._file)

    def checksum(self, index: int) -> int:
        """Of a row's prompt with its images: rows of one prompt are held out together."""
        row = self._file.row(index)
        media = {name: row.get(name) for name in ("image", "images", "video", "videos")}
        return zlib.crc32(json.dumps([self.prompt_of(row), media], default=repr, sort_keys=True).encode())

    def candidates(self, index: int, responses: Sequence[str]) -> list[Candidate]:
        """The prompt of a row with each of the responses."""
        try:
            prompt = self._parsed(self._file.row(index)).decoded(self._file.folder, self._config.video_frames)
        except (RowError, MediaError) as error:
            raise self._refused(index, error) from error
        return [Candidate(prompt, response) for response in responses]

    def _parsed(self, row: Row) -> ParsedRow:
        return parse_row(row | {"prompt": self.prompt_of(row)}, self._config)

    def _refused(self, index: int, error: Exception) -> PromptError:
        return PromptError(f"{PATH}: {self._file.where(index)} {error}. Correct the row.")


class PreferenceRows(JudgedRows[tuple[str, str]]):
    """Rows with a chosen and a rejected response."""

    def content(self, row: Row) -> tuple[str, str]:
        """The chosen and the rejected response."""
        _require(row, (CHOSEN, REJECTED) if _is_whole(row) else PREFERENCE)
        chosen, rejected = (_response(row[name], _is_whole(row)) for name in (CHOSEN, REJECTED))
        if chosen == rejected:
            raise RowError(f"has a chosen response that equals the rejected one ({as_json(chosen)})")
        return chosen, rejected

    def prompt_of(self, row: Row) -> Any:
        """The column, or the messages that both conversations begin with."""
        if not _is_whole(row):
            return row.get("prompt")
        chosen, rejected = row[CHOSEN][:-1], row[REJECTED][:-1]
        if chosen != rejected:
            raise RowError(
                "has conversations without a common prompt: chosen and rejected may differ in their last message alone"
            )
        return chosen


class StepRows(JudgedRows[tuple[tuple[str, ...], tuple[float, ...]]]):
    """Rows with the steps of a response, and how good each of them is."""

    def content(self, row: Row) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The response up to the end of each step, and the labels."""
        _require(row, STEPWISE)
        steps, labels = row["completions"], row["labels"]
        if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
            raise RowError(f"has completions that are not a list of texts, one for each step ({as_json(steps)})")
        if not isinstance(labels, list) or len(labels) != len(steps):
            found = f"{len(labels)} labels" if isinstance(labels, list) else f"the labels {as_json(labels)}"
            raise RowError(f"has {found} for {len(steps)} completions: give one for each")
        for label in labels:
            if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
                raise RowError(f"has the label {as_json(label)}: labels are true, false, or from 0 to 1")
        texts = tuple(STEP_SEPARATOR.join(steps[: index + 1]) for index in range(len(steps)))
        return texts, tuple(float(label) for label in labels)


def _is_whole(row: Row) -> bool:
    """Whether chosen and rejected are whole conversations, the prompt included."""
    return row.get("prompt") is None and all(
        isinstance(row.get(name), list) and row[name] for name in (CHOSEN, REJECTED)
    )


def _response(given: Any, is_whole: bool) -> str:
    return response_text(given[-1] if is_whole else given)


def _require(row: Row, names: Sequence[str]) -> None:
    for name in names:
        if row.get(name) is None:
            there = ", ".join(key for key, value in row.items() if value is not None) or "none"
            raise RowError(
                f"has no column {name!r} (its columns: {there}); preferences have {', '.join(PREFERENCE)}, steps have "
                f"{', '.join(STEPWISE)}"
            )
