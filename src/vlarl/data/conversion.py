"""Converts recorded datasets between RLDS and LeRobot, for `vlarl data convert`.

All values stay equal. Frames become PNG in both directions, equal to the decoded ones; as videos they lose a little.
What the other format can't hold is refused before anything is written, and can be left out by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.finetune import Gripper
from vlarl.data.conventions import policy_actions
from vlarl.data.field_names import EPISODE, FIRST, INSTRUCTION, INSTRUCTIONS, LAST, TERMINAL, feature_of, field_of
from vlarl.data.lerobot.declared import DONE, Declared, suite_gripper
from vlarl.data.lerobot.episodes import metadata_fields
from vlarl.data.lerobot.info import Feature
from vlarl.data.lerobot.reader import LeRobotDataset, LeRobotEpisode
from vlarl.data.lerobot.writer import LeRobotWriter
from vlarl.data.rlds.demos import ACTION, STATE
from vlarl.data.rlds.features import UNKNOWN, Field
from vlarl.data.rlds.reader import STEPS, Episode, RldsDataset
from vlarl.data.rlds.tf_example import Feature as Encoded
from vlarl.data.rlds.writer import RldsWriter
from vlarl.errors import UsageError
from vlarl.images.jpeg import encode_png
from vlarl.observability.machine import available_cores

OnEpisode = Callable[[int, int, int], None]  # how many are done, the total, steps of the last one

TIMESTAMPS = 1e-3  # seconds by which a timestamp may differ from that of its step


@dataclass(frozen=True)
class Conversion:
    """What `vlarl data convert` was called with."""

    drop: Collection[str] = ()  # fields or features that are left out
    overwrite: bool = False
    fps: int | None = None  # to LeRobot: steps per second
    video: bool = False  # to LeRobot: frames as videos
    instruction: str | None = None  # to LeRobot: the field that is the task
    gripper: Gripper | None = None  # what it means, if it is known
    name: str | None = None  # of the result


def to_lerobot(source: RldsDataset, folder: Path, given: Conversion, on_episode: OnEpisode) -> Path:
    """Write an RLDS dataset as a LeRobot dataset in this folder."""
    if given.fps is None:
        raise UsageError(
            "an RLDS dataset does not say how many steps a second has, and a LeRobot dataset must: give --fps "
            "(LIBERO's controller runs at 20)."
        )
    _refuse_unknown(given.drop, source.fields, source.folder)
    instruction = _instruction(source, given)
    fields = {name: field for name, field in source.fields.items() if name not in given.drop}
    steps = {
        name: field
        for name, field in fields.items()
        if name.startswith(STEPS) and name not in (FIRST, LAST, instruction)
    }
    features = {name: _feature(source, name, field, given.video) for name, field in steps.items()}
    names = {name: feature_of(name, field.kind == "image") for name, field in steps.items()}
    for name, feature in names.items():
        if field_of(feature, steps[name].kind == "image") != name or list(names.values()).count(feature) > 1:
            raise _unrepresentable(name, f"its name would be {feature}, which has another meaning")
    metadata = [name for name in fields if not name.startswith(STEPS)]
    for name in metadata:
        if not name.startswith(EPISODE) or fields[name].shape:
            raise _unrepresentable(name, f"only texts and single values in {EPISODE} can describe an episode")
    name = given.name or source.name
    declared = Declared(name=name, gripper=given.gripper or suite_gripper(name))
    written = {names[field]: feature for field, feature in features.items()}
    with LeRobotWriter(folder, written, given.fps, declared, overwrite=given.overwrite) as writer:
        for index, episode in enumerate(source):
            _check_flags(episode, fields, f"{source.folder}, episode {index}")
            try:
                writer.add(
                    {
                        names[field]: _values(episode, field, steps[field])
                        for field in steps
                        if steps[field].kind != "image"
                    },
                    {names[field]: episode.images(field) for field in steps if steps[field].kind == "image"},
                    episode.texts(instruction),
                    {field.removeprefix(EPISODE): _metadata(episode, field, fields[field]) for field in metadata},
                )
            except ValueError as error:
                raise UsageError(f"{source.folder}, episode {index} can't be converted: {error}.") from error
            on_episode(index + 1, len(source), len(episode))
    return folder


def to_rlds(source: LeRobotDataset, root: Path, given: Conversion, on_episode: OnEpisode) -> Path:
    """Write a LeRobot dataset as an RLDS dataset below this folder."""
    for option, value in (("--fps", given.fps), ("--video", given.video or None), ("--instruction", given.instruction)):
        if value is not None:
            raise UsageError(f"{option} describes a LeRobot dataset that is written, and {source.folder} is read.")
    described = metadata_fields(source.folder)
    _refuse_unknown(given.drop, [*source.info.own_features, *described], source.folder)
    name = given.name or source.name
    _check_gripper(name, given.gripper or source.declared.gripper)
    features = {key: one for key, one in source.info.own_features.items() if key not in (*given.drop, DONE)}
    fields: dict[str, Field] = {field: Field("tensor", "bool") for field in (FIRST, LAST, TERMINAL)}
    fields[INSTRUCTION] = Field("text")
    names: dict[str, str] = {}
    for key, feature in features.items():
        names[key] = field_of(key, feature.kind == "image")
        if (names[key] in fields and names[key] != TERMINAL) or feature_of(names[key], feature.kind == "image") != key:
            raise _unrepresentable(key, f"its name would be {names[key]}, which has another meaning")
        if feature.kind == "image" and feature.shape[2] != 3:
            raise _unrepresentable(key, f"its frames have {feature.shape[2]} channels")
        fields[names[key]] = replace(feature.field(), encoding="png")
    described = {key: one for key, one in described.items() if key not in given.drop}
    writer = RldsWriter(root, name, overwrite=given.overwrite)
    try:
        for index, episode in enumerate(source):
            where = f"{source.folder}, episode {index}"
            _check_times(source, episode, where, DONE in source.fields and DONE not in given.drop)
            values = {names[key]: _encoded(episode, key, feature, where) for key, feature in features.items()}
            writer.add_values(
                {**fields, **described},
                {**_flags(len(episode)), **values, INSTRUCTION: [text.encode() for text in episode.texts()]}
                | {key: _encoded_metadata(episode, key, one) for key, one in described.items()},
                *_learned(name, names, episode),
            )
            on_episode(index + 1, len(source), len(episode))
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    return writer.folder


def _instruction(source: RldsDataset, given: Conversion) -> str:
    texts = [name for name, field in source.fields.items() if field.kind == "text" and name.startswith(STEPS)]
    wanted = (given.instruction,) if given.instruction else INSTRUCTIONS
    found = next((name for name in wanted if name in texts), None)
    if found is None:
        raise UsageError(
            f"{source.folder} has no text field {' or '.join(wanted)}, and a LeRobot dataset has a task at every step: "
            f"name it with --instruction, one of {', '.join(texts) or 'none'}."
        )
    return found


def _feature(source: RldsDataset, name: str, field: Field, video: bool) -> Feature:
    """The feature that a field becomes."""
    if field.kind == "text":
        return Feature("string", (1,))
    if field.kind == "image":
        shape = field.shape
        if len(shape) != 3 or shape[2] not in (3, UNKNOWN) or field.dtype != "uint8":
            raise _unrepresentable(name, f"it is {field.dtype} {list(shape)}, and frames are uint8 of 3 channels")
        if UNKNOWN in shape:
            shape = source[0].images(name, [0])[0].shape
        return Feature("video" if video else "image", shape, ["height", "width", "channels"])
    if UNKNOWN in field.shape or len(field.shape) > 1:
        raise _unrepresentable(
            name, f"its shape is {list(field.shape)}, and values are written as vectors of one length"
        )
    leaf = name.rpartition("/")[2]
    if not field.shape:
        return Feature(field.dtype, (1,))
    return Feature(field.dtype, field.shape, [f"{leaf}_{index}" for index in range(field.shape[0])])


def _values(episode: Episode, name: str, field: Field) -> NDArray[Any] | list[str]:
    return episode.texts(name) if field.kind == "text" else episode.values(name)


def _metadata(episode: Episode, name: str, field: Field) -> object:
    return episode.texts(name)[0] if field.kind == "text" else episode.values(name)[()]


def _check_flags(episode: Episode, fields: Mapping[str, Field], where: str) -> None:
    """The flags that are not written must follow from the episode's length."""
    expected = _flags(len(episode))
    for name in (FIRST, LAST):
        if name in fields and not np.array_equal(episode.values(name).astype(np.int64), expected[name]):
            raise UsageError(
                f"{where}: {name} does not mark the {'first' if name == FIRST else 'last'} step alone, which a LeRobot "
                f"dataset can't hold: leave it out with --drop {name}."
            )


def _flags(length: int) -> dict[str, NDArray[np.int64]]:
    steps = np.arange(length)
    last = (steps == length - 1).astype(np.int64)
    return {FIRST: (steps == 0).astype(np.int64), LAST: last, TERMINAL: last}


def _check_gripper(name: str, declared: Gripper | None) -> None:
    """An RLDS dataset says what its gripper means by its name alone."""
    meant: Gripper = "closed_is_1" if name.startswith("libero") else "as_recorded"
    if declared not in (None, meant):
        raise UsageError(
            f"the gripper is declared to be {declared}, and that of an RLDS dataset with the name {name} is {meant}: "
            "give another --name (names that begin with libero mean closed_is_1)."
        )


def _check_times(source: LeRobotDataset, episode: LeRobotEpisode, where: str, has_done: bool) -> None:
    """What RLDS has no field for must follow from the rest."""
    regular = np.arange(len(episode)) / source.fps
    if np.abs(episode.values("timestamp") - regular).max() > TIMESTAMPS:
        raise UsageError(
            f"{where}: its timestamps are not those of {source.fps} steps a second; RLDS can't hold others."
        )
    if has_done and not np.array_equal(episode.values(DONE).astype(np.int64), _flags(len(episode))[LAST]):
        raise UsageError(f"{where}: {DONE} does not mark the last step alone: leave it out with --drop {DONE}.")


def _encoded(episode: LeRobotEpisode, name: str, feature: Feature, where: str) -> Encoded:
    """A feature's values as a record of RLDS holds them."""
    if feature.kind == "image":
        with ThreadPoolExecutor(available_cores()) as pool:
            return list(pool.map(encode_png, episode.images(name)))
    if feature.kind == "text":
        return [text.encode() for text in episode.texts(name)]
    return _stored(episode.values(name), f"{where}: {name}")


def _encoded_metadata(episode: LeRobotEpisode, name: str, field: Field) -> Encoded:
    value = episode.row.metadata[name]
    if field.kind == "text":
        return [str(value).encode()]
    return _stored(np.array([value], field.dtype), name)


def _stored(values: NDArray[Any], where: str) -> NDArray[Any]:
    """float32 or int64, the only values of a record; others must not lose anything by it."""
    kind = np.float32 if np.issubdtype(values.dtype, np.floating) else np.int64
    stored = values.astype(kind)
    if not np.array_equal(stored.astype(values.dtype), values):
        raise UsageError(f"{where} has values of {values.dtype} that RLDS, which stores {np.dtype(kind)}, can't hold.")
    return stored


def _learned(
    name: str, names: Mapping[str, str], episode: LeRobotEpisode
) -> tuple[NDArray[Any], NDArray[Any]] | tuple[()]:
    """The actions, as a policy has them, and states of an episode, of which statistics are written."""
    by_field = {field: key for key, field in names.items()}
    if ACTION not in by_field or STATE not in by_field:
        return ()
    return policy_actions(name, episode.values(by_field[ACTION])), episode.values(by_field[STATE])


def _refuse_unknown(drop: Collection[str], known: Collection[str], folder: Path) -> None:
    if unknown := [name for name in drop if name not in known]:
        raise UsageError(f"--drop: {folder} has no {', '.join(unknown)}; it has {', '.join(known)}.")


def _unrepresentable(name: str, reason: str) -> UsageError:
    return UsageError(f"{name} can't be converted, because {reason}: leave it out with --drop {name}.")
