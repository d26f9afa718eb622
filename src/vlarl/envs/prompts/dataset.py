"""The suite `prompts`: the user's rows, of which some are trained on and others evaluated on.

    prompts.path        file 0  │  file 1  │ …     rows 0 to N - 1: a part is held out, or all are trained on
    prompts.eval_path   file 2  │ …                rows N and above: evaluated on

A row's index is the initial state of its episode. Rows are checked when the data is opened, as far as that needs no
pixels; images are decoded when they are used.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from vlarl.config.known import PROMPTS
from vlarl.config.schema import PromptsConfig
from vlarl.config.words import counted
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.envs.prompts.files import RowFile, open_rows
from vlarl.envs.prompts.media import MediaError
from vlarl.envs.prompts.rows import RowError, parse_row
from vlarl.envs.prompts.source import OnError, PromptError
from vlarl.errors import UsageError
from vlarl.solutions import Match, find_solution
from vlarl.types import Prompt

log = logging.getLogger(__name__)

REMEDY = "Correct the row, or leave such rows out with prompts.on_error skip."
_SPLIT = 7  # keeps the seed of the split apart from others


class PromptDataset:
    """Rows of one or several files as prompts, each decoded when it is used."""

    def __init__(self, config: PromptsConfig) -> None:
        self.config = config
        self.match: Match = config.match
        self.on_error: OnError = config.on_error
        self.files = [open_rows(Path(path)) for path in (*config.path, *config.eval_path)]
        self._first = np.cumsum([0, *(len(file) for file in self.files)]).tolist()
        self.num_skipped = 0
        self.solved: set[int] = set()  # states of rows that have a solution
        self.with_videos: set[int] = set()  # states of rows whose length can't be told without decoding
        self.column_names: dict[str, None] = {}  # of rows of prompts.path, in their order
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
            try:
                content = file.row(row)
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
            held_out = _held_out(train, config.eval_fraction, config.split_seed)
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
            repeats=tuple(weight_of[state] for state in train) if config.weights else (),
        )


def _held_out(states: list[int], fraction: float, seed: int) -> list[int]:
    """The states for evaluation, in their order: chosen by the seed, at least one where there are two."""
    count = min(max(round(fraction * len(states)), 1), len(states) - 1)
    rng = np.random.default_rng([_SPLIT, seed])
    return sorted(int(state) for state in rng.choice(states, max(count, 0), replace=False)) if states else []
