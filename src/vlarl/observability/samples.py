"""Samples of a run on prompts: what the policy was given, what it wrote and what that earned, for people to read.

<folder>/  samples.jsonl   one row per sample
           samples/        their images, reduced, each stored once
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np
from PIL import Image

from vlarl.errors import RowsLostError
from vlarl.observability.files import disk_errors, read_jsonl
from vlarl.solutions import find_solution
from vlarl.types import EpisodeResult, Prompt, Response, Trajectory, UInt8Array

log = logging.getLogger(__name__)

Phase = Literal["rollout", "eval"]

PER_EVALUATION = 256  # samples of an evaluation, at most
IMAGES_PER_SAMPLE = 4
IMAGE_SIDE = 256  # pixels, at most
PNG_BYTES = 32 * 2**10  # larger images, which are photographs, are stored as JPEG
FOLDER_BYTES = 256 * 2**20  # of all images of a run; samples are kept without images from there on
TEXT_LENGTH = 20_000  # characters of a prompt or a response that are kept


@dataclass(frozen=True)
class Sample:
    """One row of samples.jsonl; iteration, phase and episode_id identify the episode in episodes.jsonl.

    `Sample(20, "eval", "prompts_shapes-t01-s1003-…", 1, 1003, "Which colour?", ("samples/3f2a….png",), "red.", "red",
    reward=1.0, reward_parts={}, success=True, length=3, truncated=False)`
    """

    iteration: int
    phase: Phase
    episode_id: str
    task_id: int
    init_state: int  # index of the prompt
    prompt: str  # the text of its message, or all messages with their roles
    images: tuple[str, ...]  # paths below the folder: images of the prompt, and the middle frames of its videos
    response: str
    solution: str | None
    reward: float | None  # None: the reward failed
    reward_parts: Mapping[str, float]  # combined rewards: the value of each, without weights
    success: bool
    length: int  # tokens of the response
    truncated: bool  # it reached the limit of tokens

    @property
    def summary(self) -> str:
        """`reward 1.000, correct, 12 tokens`."""
        parts = ["the reward failed" if self.reward is None else f"reward {self.reward:.3f}"]
        if self.solution is not None:
            parts.append("correct" if self.success else "wrong")
        parts.append(f"{self.length} token{'' if self.length == 1 else 's'}")
        return ", ".join([*parts, *(["cut off"] if self.truncated else [])])


class SampleFolder(Protocol):
    """Where samples are written: the folder of a run, or of an evaluation."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    @property
    def samples_file(self) -> Path:
        """One row per sample."""
        ...

    @property
    def sample_images(self) -> Path:
        """Folder of their images."""
        ...


class SampleRecorder:
    """Writes samples into a folder; without samples, nothing is made there."""

    def __init__(self, folder: SampleFolder) -> None:
        self._folder = folder
        self._file: IO[str] | None = None
        stored = folder.sample_images.iterdir() if folder.sample_images.is_dir() else ()
        self._image_bytes = sum(path.stat().st_size for path in stored)

    def record(self, iteration: int, phase: Phase, episodes: Sequence[EpisodeResult]) -> list[Sample]:
        """Append one row for each episode that has a response."""
        samples = [self._sample(iteration, phase, e, e.response) for e in episodes if e.response is not None]
        path = self._folder.samples_file
        with disk_errors(path):
            for sample in samples:
                if self._file is None:
                    self._file = path.open("a", buffering=1, encoding="utf-8")
                self._file.write(json.dumps(asdict(sample), allow_nan=False) + "\n")
        return samples

    def _sample(self, iteration: int, phase: Phase, episode: EpisodeResult, response: Response) -> Sample:
        task, prompt = episode.task, response.prompt
        solution = find_solution(prompt.columns)
        scored = episode.reward_error is None and math.isfinite(episode.episode_return)
        return Sample(
            iteration=iteration,
            phase=phase,
            episode_id=task.episode_id,
            task_id=task.task_id,
            init_state=task.init_state,
            prompt=_kept(prompt.conversation),
            images=tuple(self._stored(reduced(prompt).images)),
            response=_kept(response.text),
            solution=None if solution is None else _kept(solution),
            reward=float(episode.episode_return) if scored else None,
            reward_parts={name: float(v) for name, v in episode.reward_parts.items() if math.isfinite(v)},
            success=bool(episode.success),
            length=response.num_tokens,
            truncated=response.cut_off,
        )

    def _stored(self, images: Sequence[UInt8Array]) -> Iterator[str]:
        """Write images that are not there yet, and return their paths below the folder."""
        folder = self._folder.sample_images
        for image in images:
            name = hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()[:16]
            known = next((path for path in (folder / f"{name}.png", folder / f"{name}.jpg") if path.is_file()), None)
            if known is None:
                content, suffix = _encoded(image)
                if self._image_bytes + len(content) > FOLDER_BYTES:
                    if self._image_bytes <= FOLDER_BYTES:
                        log.warning("%s is full: further samples are kept without images", folder)
                    self._image_bytes = FOLDER_BYTES + 1
                    return
                known = folder / f"{name}{suffix}"
                with disk_errors(known):
                    folder.mkdir(exist_ok=True)
                    known.write_bytes(content)
                self._image_bytes += len(content)
            yield str(known.relative_to(self._folder.path))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with disk_errors(self._folder.samples_file):
                self._file.close()

    def __enter__(self) -> SampleRecorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _kept(text: str) -> str:
    """The text as it is stored: not too long, and valid Unicode."""
    return text[:TEXT_LENGTH].encode("utf-8", errors="replace").decode("utf-8")


def _encoded(image: UInt8Array) -> tuple[bytes, str]:
    """The file of an image, and its suffix."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    if len(file.getvalue()) <= PNG_BYTES:
        return file.getvalue(), ".png"
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=90)
    return file.getvalue(), ".jpg"


def evenly_chosen(total: int, count: int) -> list[int]:
    """At most `count` indices below `total`, evenly distributed.

    >>> evenly_chosen(10, 3)
    [0, 3, 6]
    """
    count = min(count, total)
    return [i * total // count for i in range(count)]


def shown_prompt(trajectory: Trajectory) -> Prompt | None:
    """The prompt of an episode with its images, from wherever they are; None where they are lost with a machine."""
    try:
        return trajectory.transitions[-1].observation.whole().prompt if trajectory.transitions else None
    except RowsLostError:
        return None


def reduced(prompt: Prompt) -> Prompt:
    """The same prompt with few and small images, the middle frame of each video among them."""
    images = [*prompt.images, *(video[len(video) // 2] for video in prompt.videos if len(video))]
    return replace(prompt, images=tuple(_small(image) for image in images[:IMAGES_PER_SAMPLE]), videos=())


def _small(image: UInt8Array) -> UInt8Array:
    if max(image.shape[:2]) <= IMAGE_SIDE:
        return np.ascontiguousarray(image)
    small = Image.fromarray(image)
    small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    return np.asarray(small)


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file; rows that are not complete are skipped."""
    names = [field.name for field in fields(Sample)]
    for row in read_jsonl(path):
        if all(name in row and _is_of_kind(name, row[name]) for name in names):
            values: dict[str, Any] = {n: _kept(row[n]) if isinstance(row[n], str) else row[n] for n in names}
            yield Sample(**values | {"images": tuple(_kept(name) for name in row["images"])})


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("iteration", "task_id", "init_state", "length"), int),
    **dict.fromkeys(("episode_id", "prompt", "response"), str),
    **dict.fromkeys(("success", "truncated"), bool),
    "solution": (str, type(None)),
    "reward": (int, float, type(None)),
}


def _is_of_kind(name: str, value: Any) -> bool:
    if name == "phase":
        return value in ("rollout", "eval")
    if name == "images":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if name == "reward_parts":
        return isinstance(value, dict) and all(_is_number(each) for each in value.values())
    if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and _KINDS[name] is not bool):
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
