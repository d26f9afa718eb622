"""The suite `prompts`: the user's rows, of which some are trained on and others evaluated on.

    prompts.path        file 0  │  file 1  │ …     rows 0 to N - 1: a part is held out, or all are trained on
    prompts.eval_path   file 2  │ …                rows N and above: evaluated on

A row's index is the initial state of its episode. Rows are checked when the data is opened, as far as that needs no
pixels; images are decoded when they are used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vlarl.config.known import PROMPTS
from vlarl.config.schema import PromptsConfig
from vlarl.config.words import counted
from vlarl.envs.base import DataFile, SuiteSpec, TaskSpec
from vlarl.envs.prompts.files import Row, RowFile, open_rows
from vlarl.envs.prompts.media import MediaError
from vlarl.envs.prompts.rows import RowError, parse_row
from vlarl.envs.prompts.source import OnError, PromptError
from vlarl.errors import UsageError
from vlarl.solutions import Match, find_solution
from vlarl.types import Prompt

log = logging.getLogger(__name__)

REMEDY = "Correct the row, or leave such rows out with prompts.on_error skip."
DIGEST_BYTES = 16


class PromptDataset:
    """Rows of one or several files as prompts, each decoded when it is used."""

    def __init__(self, config: PromptsConfig) -> None:
        self.config = config
        self.match: Match = config.match
        self.on_error: OnError = config.on_error
        self.files = [open_rows(Path(path)) for path in (*config.path, *config.eval_path)]
        self._first = np.cumsum([0, *(len(file) for file in self.files)]).tolist()
        self.num_skipped = 0
        self._digests: list[bytes] = []  # of each row's content, by state
        self.solved: set[int] = set()  # states of rows that have a solution
        self.with_videos: set[int] = set()  # states of rows whose length can't be told without decoding
        self.column_names: dict[str, None] = {}  # of rows of prompts.path, in their order
        self.reward_columns: set[str] = set()  # those of them that reward functions get
        usable = [self._usable(index) for index in range(len(self.files))]
        self.spec = self._spec(usable)
        if self.num_skipped:
            log.warning("%s can't be used: left out of the prompts", counted(self.num_skipped, "row"))

    def prompt(self, task_id: int, state: int) -> Prompt:
        """The row with this index, decoded."""
        return self._prompt(state, with_pixels=True)

    def outline(self, state: int) -> Prompt:
        """The same with black images of the same sizes, which needs no decoding: enough to tell its length."""
        return self._prompt(state, with_pixels=False)

    def where(self, state: int) -> str:
        """The file and the row of a state, in messages."""
        file, row = self._locate(state)
        return file.where(row)

    def _prompt(self, state: int, with_pixels: bool) -> Prompt:
        file, row = self._locate(state)
        try:
            return parse_row(file.row(row), self.config).decoded(file.folder, self.config.video_frames, with_pixels)
        except (RowError, MediaError) as error:
            raise PromptError(f"{file.where(row)} {error}. {REMEDY}") from error

    def _locate(self, state: int) -> tuple[RowFile, int]:
        if not 0 <= state < self._first[-1]:
            raise ValueError(f"there are rows 0 to {self._first[-1] - 1}, not {state}")
        index = int(np.searchsorted(self._first, state, side="right")) - 1
        return self.files[index], state - self._first[index]

    def _usable(self, index: int) -> list[int]:
        """Indices of the usable rows of a file; the first row that is not, is raised or skipped."""
        file, found = self.files[index], []
        for row in range(len(file)):
            self._digests.append(b"")  # of one that can't be read
            try:
                content = file.row(row)
                self._digests[-1] = row_digest(content)
                parsed = parse_row(content, self.config)
                parsed.check_files(file.folder)
            except (RowError, MediaError, PromptError) as error:
                text = str(error) if isinstance(error, PromptError) else f"{file.where(row)} {error}. {REMEDY}"
                if self.on_error == "stop":
                    raise PromptError(text) from error
                self.num_skipped += 1
                log.warning("left out: %s", text.removesuffix(f" {REMEDY}"))
                continue
            found.append(self._first[index] + row)
            if index < len(self.config.path):
                self.column_names |= dict.fromkeys(name for name, value in content.items() if value is not None)
                self.reward_columns |= parsed.columns.keys()
            if parsed.videos:
                self.with_videos.add(found[-1])
            if find_solution(parsed.columns) is not None:
                self.solved.add(found[-1])
        return found

    def _spec(self, usable: list[list[int]]) -> SuiteSpec:
        config, num_train = self.config, len(self.config.path)
        held_out = [state for states in usable[num_train:] for state in states]
        weights = config.weights or (1.0,) * num_train
        weight_of = {state: w for states, w in zip(usable[:num_train], weights, strict=True) for state in states}
        train = list(weight_of)
        if not config.eval_path:
            digests = {state: self._digests[state] for state in train}
            held_out = _held_out(digests, config.eval_fraction, config.split_seed)
            kept_back = set(held_out)
            train = [state for state in train if state not in kept_back]
        if not train or not held_out:
            what = "train" if not train else "evaluate"
            raise UsageError(
                f"prompts.path: {counted(len(weight_of), 'row')} can be used, and none is left to {what} on; add rows, "
                "or name others with prompts.eval_path."
            )
        return SuiteSpec(
            name=PROMPTS,
            tasks=(TaskSpec(0, f"prompts of {', '.join(Path(path).name for path in config.path)}", 1),),
            train_states=tuple(train),
            eval_states=tuple(held_out),
            benchmark_states=tuple(held_out),
            action_dim=0,
            in_epochs=True,
            data=tuple(self._data_file(index) for index in range(len(self.files))),
            repeats=tuple(weight_of[state] for state in train) if config.weights else (),
        )

    def _data_file(self, index: int) -> DataFile:
        digests = self._digests[self._first[index] : self._first[index + 1]]
        content = hashlib.blake2b(b"".join(digest.ljust(DIGEST_BYTES) for digest in digests), digest_size=DIGEST_BYTES)
        return DataFile(self.files[index].path.name, len(digests), content.hexdigest())


def row_digest(row: Row) -> bytes:
    """What tells the content of a row from others, whatever the order of its columns is."""
    return _digest(json.dumps(row, sort_keys=True, default=_plain).encode())


def _plain(value: object) -> str:
    """A value that JSON has no kind for: the bytes of an image, or a date."""
    return _digest(value).hex() if isinstance(value, bytes) else repr(value)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _held_out(digests: Mapping[int, bytes], fraction: float, seed: int) -> list[int]:
    """The states for evaluation, in their order: those whose content, hashed with the seed, is among the lowest values.

    So rows stay on their side when others are added, and equal rows are on the same side. At least one is held out and
    one is left, where there are two.
    """
    value = {state: int.from_bytes(_digest(b"%d " % seed + digest)) for state, digest in digests.items()}
    order = sorted(value, key=lambda state: (value[state], state))
    count = sum(value[state] < fraction * 256**DIGEST_BYTES for state in order)
    return sorted(order[: max(min(max(count, 1), len(order) - 1), 0)])
