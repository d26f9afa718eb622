"""Summarizes an RLDS dataset for `vlarl data inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vlarl.data.conventions import policy_actions
from vlarl.data.rlds.demos import ACTION, INSTRUCTION, STATE, reached_goal
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.statistics import dataset_statistics

SHEET_EPISODES, SHEET_FRAMES, SHEET_SIZE, SHEET_GAP = 8, 8, 128, 4  # rows, frames a row, pixels
BACKGROUND = (255, 255, 255)


@dataclass(frozen=True)
class DatasetSummary:
    """Statistics of a dataset."""

    episode_lengths: tuple[int, ...]
    num_successes: int
    instructions: Mapping[str, int]  # text -> how many episodes
    statistics: Mapping[str, Any] | None  # of actions in the policy's convention; None without actions and states


def summarize(dataset: RldsDataset) -> DatasetSummary:
    """Read every episode, but no image."""
    lengths: list[int] = []
    instructions: Counter[str] = Counter()
    actions, states = [], []
    num_successes = 0
    for episode in dataset:
        lengths.append(len(episode))
        num_successes += reached_goal(episode)
        if INSTRUCTION in dataset.fields:
            instructions[episode.texts(INSTRUCTION)[0]] += 1
        if {ACTION, STATE} <= set(dataset.fields):
            actions.append(episode.values(ACTION))
            states.append(episode.values(STATE))
    statistics = None
    if actions:
        given = policy_actions(dataset.name, np.concatenate(actions))
        statistics = dataset_statistics(given, np.concatenate(states), len(lengths))
    return DatasetSummary(tuple(lengths), num_successes, dict(instructions.most_common()), statistics)


def contact_sheet(dataset: RldsDataset) -> Image.Image:
    """Frames of the first episodes from beginning to end, a row for each camera."""
    cameras = [name for name, field in dataset.fields.items() if field.kind == "image"]
    rows = [
        dataset[index].images(camera, np.linspace(0, len(dataset[index]) - 1, SHEET_FRAMES).round().astype(np.int64))
        for index in range(min(len(dataset), SHEET_EPISODES))
        for camera in cameras
    ]
    step = SHEET_SIZE + SHEET_GAP
    sheet = Image.new("RGB", (SHEET_FRAMES * step + SHEET_GAP, len(rows) * step + SHEET_GAP), BACKGROUND)
    for row, frames in enumerate(rows):
        for column, frame in enumerate(frames):
            tile = Image.fromarray(frame).resize((SHEET_SIZE, SHEET_SIZE))
            sheet.paste(tile, (SHEET_GAP + column * step, SHEET_GAP + row * step))
    return sheet
