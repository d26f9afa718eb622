"""Summarizes a recorded dataset for `vlarl data inspect`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlarl.config.dataset_folder import find_recording
from vlarl.data.lerobot.declared import SUCCESS, policy_gripper
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.recorded import RecordedDataset, RecordedEpisode, Roles
from vlarl.data.rlds.demos import ACTION, INSTRUCTION, STATE, TERMINAL
from vlarl.data.rlds.mapping import Mapping, check_mapping, standardise
from vlarl.data.rlds.reader import Episode, RldsDataset
from vlarl.data.rlds.ready import ready_mapping
from vlarl.data.statistics import dataset_statistics
from vlarl.errors import UsageError
from vlarl.types import FloatArray, UInt8Array

SHEET_EPISODES, SHEET_FRAMES, SHEET_SIZE, SHEET_GAP = 8, 8, 128, 4  # rows, frames a row, pixels
BACKGROUND = (255, 255, 255)


@dataclass(frozen=True)
class DatasetSummary:
    """Statistics of a dataset."""

    episode_lengths: tuple[int, ...]
    num_successes: int | None  # None if the dataset does not say
    instructions: dict[str, int]  # text -> how many episodes
    statistics: dict[str, Any] | None  # None without actions and states
    convention: str  # of the actions that the statistics are of


def open_dataset(path: str | Path) -> RldsDataset | LeRobotDataset:
    """A recorded dataset of either format."""
    kind, folder = find_recording(Path(path))
    return LeRobotDataset(folder) if kind == "lerobot" else RldsDataset(path)


def roles_of(dataset: RldsDataset | LeRobotDataset) -> Roles:
    """What the fields of a dataset mean."""
    if isinstance(dataset, LeRobotDataset):
        return dataset.declared.roles(dataset.fields)
    known = {name: name if name in dataset.fields else None for name in (STATE, ACTION, INSTRUCTION)}
    return Roles(cameras_of(dataset), known[STATE], known[ACTION], known[INSTRUCTION])


def cameras_of(dataset: RecordedDataset) -> tuple[str, ...]:
    """The fields of the steps that are images."""
    return tuple(name for name, field in dataset.fields.items() if field.kind == "image")


def summarize(dataset: RldsDataset | LeRobotDataset) -> DatasetSummary:
    """Read every episode, but no image."""
    lengths: list[int] = []
    instructions: Counter[str] = Counter()
    actions, states = [], []
    roles, mapping = roles_of(dataset), _fitting_mapping(dataset)
    succeeded = SUCCESS if isinstance(dataset, LeRobotDataset) else TERMINAL
    num_successes = 0 if succeeded in dataset.fields else None
    episode: RecordedEpisode
    for episode in dataset:
        lengths.append(len(episode))
        if num_successes is not None:
            num_successes += bool(np.all(episode.values(succeeded)[-1]))
        if roles.instruction is not None:
            instructions[episode.texts(roles.instruction)[0]] += 1
        if mapping is not None and isinstance(episode, Episode):
            standard = standardise(episode, mapping, dict(dataset.fields), mapping.noops)
            if standard is not None:
                actions.append(standard.actions)
                states.append(standard.state)
        elif roles.action is not None and roles.state is not None:
            actions.append(episode.values(roles.action))
            states.append(episode.values(roles.state))
    statistics, convention = None, ""
    if actions:
        given, convention = _given_actions(dataset, mapping, np.concatenate(actions))
        mask = None if mapping is None else mapping.action_mask(given.shape[1])
        statistics = dataset_statistics(given, np.concatenate(states), len(lengths), mask)
    return DatasetSummary(tuple(lengths), num_successes, dict(instructions.most_common()), statistics, convention)


def _fitting_mapping(dataset: RldsDataset | LeRobotDataset) -> Mapping | None:
    """The ready mapping by which `vlarl finetune` reads an RLDS dataset; None where its fields don't fit."""
    if isinstance(dataset, LeRobotDataset):
        return None
    mapping = ready_mapping(dataset.name)
    try:
        check_mapping(mapping, dataset, "demos.mapping")
    except UsageError:
        return None
    return mapping


def _given_actions(
    dataset: RldsDataset | LeRobotDataset, mapping: Mapping | None, actions: FloatArray
) -> tuple[FloatArray, str]:
    """Actions in the policy's convention, as far as it is known; and which convention they are in."""
    as_given = "as a policy gives them"
    if isinstance(dataset, RldsDataset):
        return actions, as_given if mapping is not None else "as recorded, because no ready mapping fits the fields"
    if dataset.declared.gripper is None:
        return actions, "as recorded, because the gripper's convention is not declared"
    return policy_gripper(dataset.declared.gripper, actions), as_given


def contact_sheet(dataset: RecordedDataset) -> Image.Image:
    """Frames of the first episodes from beginning to end, a row for each camera."""
    cameras = cameras_of(dataset)
    rows = [
        dataset[index].images(camera, np.linspace(0, len(dataset[index]) - 1, SHEET_FRAMES).round().astype(np.int64))
        for index in range(min(len(dataset), SHEET_EPISODES))
        for camera in cameras
    ]
    step = SHEET_SIZE + SHEET_GAP
    sheet = Image.new("RGB", (SHEET_FRAMES * step + SHEET_GAP, len(rows) * step + SHEET_GAP), BACKGROUND)
    for row, frames in enumerate(rows):
        for column, frame in enumerate(frames):
            tile = _tile(frame)
            left, top = (SHEET_SIZE - tile.width) // 2, (SHEET_SIZE - tile.height) // 2
            sheet.paste(tile, (SHEET_GAP + column * step + left, SHEET_GAP + row * step + top))
    return sheet


def _tile(frame: UInt8Array) -> Image.Image:
    """A frame in the largest size that fits, with its proportions."""
    height, width = frame.shape[:2]
    scale = SHEET_SIZE / max(height, width)
    return Image.fromarray(frame).resize((max(1, round(width * scale)), max(1, round(height * scale))))
