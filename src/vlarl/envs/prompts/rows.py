"""From a row of data to a prompt: messages, images and videos in their order, and the other columns.

TRL's rows have `prompt`, a text or messages, and `image` or `images`; verl's have messages with `<image>` in their
texts. Images that no message mentions stand before the text of the first message of the user, as in TRL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlarl.config.schema import PromptsConfig
from vlarl.envs.prompts.files import Row, as_json
from vlarl.envs.prompts.media import blank_image, check_reference, decode_image, decode_video
from vlarl.solutions import SOLUTION
from vlarl.types import Prompt

MEDIA = {"image": ("image", "images"), "video": ("video", "videos")}
"""Columns that hold each kind, the first that is there."""

_PLACEHOLDER = re.compile(r"(<image>|<video>)")
_ROLES = ("system", "user", "assistant", "tool", "developer")


class RowError(Exception):
    """A row can't be used; the message is the end of a sentence that begins with its file and index."""


@dataclass(frozen=True)
class ParsedRow:
    """A row whose images and videos are not decoded yet."""

    messages: tuple[Mapping[str, Any], ...]
    images: tuple[Any, ...]
    videos: tuple[Any, ...]
    columns: dict[str, Any]
    conversational: bool

    def check_files(self, folder: Path) -> None:
        """Refuse files that are not there, without reading any; MediaError."""
        for kind, values in (("image", self.images), ("video", self.videos)):
            for value in values:
                check_reference(value, folder, kind)

    def decoded(self, folder: Path, video_frames: int, with_pixels: bool = True) -> Prompt:
        """The prompt with its pixels; MediaError where they can't be decoded. Without them, images are black."""
        image = decode_image if with_pixels else blank_image
        videos = [decode_video(value, folder, video_frames) for value in self.videos]
        return Prompt(
            messages=self.messages,
            images=tuple(image(value, folder) for value in self.images),
            videos=tuple(frames for frames, _ in videos),
            video_fps=tuple(rate for _, rate in videos),
            columns=self.columns,
            conversational=self.conversational,
        )


def parse_row(row: Row, config: PromptsConfig) -> ParsedRow:
    """What a row says; RowError where a column is missing or its prompt can't be used."""
    name = config.prompt_column
    if row.get(name) is None:
        there = ", ".join(key for key, value in row.items() if value is not None) or "none"
        remedy = "name the one with the prompt with prompts.prompt_column"
        raise RowError(f"has no column {name!r}; {remedy} (its columns: {there})")
    given = row[name]
    if not isinstance(given, str | list):
        raise RowError(f"has a prompt that is neither a text nor a list of messages ({as_json(given)})")
    media = {kind: _media(row, names) for kind, names in MEDIA.items()}
    is_chat = not isinstance(given, str)
    messages = [_message(each) for each in (given if is_chat else [{"role": "user", "content": given}])]
    if not any(_has_text(message) for message in messages):
        raise RowError(f"has an empty prompt ({as_json(given)})")
    inline: dict[str, list[Any]] = {"image": [], "video": []}
    messages = [_split(message, media, inline) for message in messages]
    for kind, found in inline.items():
        media[kind] = media[kind] or found
    for kind, values in media.items():
        messages = _placed(messages, kind, len(values))
    if config.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
        is_chat = True
    return ParsedRow(tuple(messages), tuple(media["image"]), tuple(media["video"]), _columns(row, config), is_chat)


def _columns(row: Row, config: PromptsConfig) -> dict[str, Any]:
    """All columns but the prompt and its media."""
    taken = {config.prompt_column, *(name for names in MEDIA.values() for name in names)}
    columns = {name: value for name, value in row.items() if name not in taken}
    if config.solution_column is not None:
        if columns.get(config.solution_column) is None:
            raise RowError(f"has no column {config.solution_column!r}, which prompts.solution_column names")
        columns[SOLUTION] = columns[config.solution_column]
    return columns


def _media(row: Row, names: Sequence[str]) -> list[Any]:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        return []
    value = row[name]
    is_one = name == "video" or _is_pixels(value)  # a list in the column `video` holds the frames of one
    return list(value) if isinstance(value, list) and not is_one else [value]


def _is_pixels(value: Any) -> bool:
    """Whether nested lists are one image [H, W, 3], and not a list of images."""
    depth, inner = 0, value
    while isinstance(inner, list) and inner:
        depth, inner = depth + 1, inner[0]
    return depth == 3 and isinstance(inner, int | float)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise RowError(f"has a message without role and content ({as_json(message)})")
    if message["role"] not in _ROLES:
        raise RowError(f"has a message of the role {message['role']!r}; use one of {', '.join(_ROLES)}")
    content = message["content"]
    if not isinstance(content, str | list):
        raise RowError(f"has a message whose content is neither a text nor a list of parts ({as_json(content)})")
    return {"role": message["role"], "content": content}


def _has_text(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    if message["role"] == "system":
        return False
    if isinstance(content, str):
        return bool(_PLACEHOLDER.sub("", content).strip())
    return any(isinstance(part, Mapping) and str(part.get("text") or "").strip() for part in content)


def _split(message: dict[str, Any], media: Mapping[str, list[Any]], inline: dict[str, list[Any]]) -> dict[str, Any]:
    """The message with a part for each placeholder of its text; images inside of parts are added to `inline`."""
    content = message["content"]
    if isinstance(content, str):
        named = [part[1:-1] for part in _PLACEHOLDER.findall(content)]
        if not any(media[kind] for kind in named):
            return message
        pieces = [piece for piece in _PLACEHOLDER.split(content) if piece]
        parts = [{"type": p[1:-1]} if _PLACEHOLDER.fullmatch(p) else {"type": "text", "text": p} for p in pieces]
        return {**message, "content": parts}
    return {**message, "content": [_part(part, inline) for part in content]}


def _part(part: Any, inline: dict[str, list[Any]]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in MEDIA:
        if part.get(kind) is not None:
            inline[kind].append(part[kind])
        return {"type": kind}
    raise RowError(f"has a part of a message that is neither a text, an image nor a video ({as_json(part)})")


def _placed(messages: list[dict[str, Any]], kind: str, count: int) -> list[dict[str, Any]]:
    """The messages with a part for each image or video; those that none mentions come first in the user's message."""
    mentioned = sum(
        part["type"] == kind for m in messages if not isinstance(m["content"], str) for part in m["content"]
    )
    if mentioned == count:
        return messages
    if mentioned:
        raise RowError(f"has {count} {kind}(s), and its messages mention {mentioned}")
    first = next((index for index, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise RowError(f"has {count} {kind}(s), and no message of the user to put them in")
    content = messages[first]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    placed = {**messages[first], "content": [*({"type": kind} for _ in range(count)), *parts]}
    return [*messages[:first], placed, *messages[first + 1 :]]
