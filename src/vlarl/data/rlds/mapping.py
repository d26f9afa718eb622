"""What the fields of a dataset mean, declared as data: views, robot state, action, instruction.

    fields of a dataset ─► Mapping ─► StandardEpisode: actions [T, D], states [T, P], instructions, steps that are kept

A policy's action is the movement of the end effector and, in its last dimension, the gripper: 1 open, 0 closed. Names
of fields are relative to the steps: `observation/state` is `steps/observation/state` in features.json, and
`observation.state` is LeRobot's feature of this name (lerobot/mapped.py).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from vlarl.data.recorded import MappableDataset, MappableEpisode
from vlarl.data.rlds.features import UNKNOWN, Field
from vlarl.data.rlds.reader import STEPS
from vlarl.data.rlds.transforms import TRANSFORMS
from vlarl.errors import UsageError
from vlarl.types import FloatArray, IntArray

View = Literal["primary", "wrist", "secondary"]
NoOps = Literal["keep", "idle", "motionless"]
VIEWS: tuple[View, ...] = get_args(View)  # in the order in which a policy reads them

CONSTANTS = {"zeros": 0.0, "ones": 1.0}
UNZIP = "unzip"  # float32 values that are stored compressed, as text
MAX_UNZIPPED = 1 << 16  # bytes of one step
MOVEMENT = 6  # dimensions of an end effector's movement
STILL = 1e-5  # motionless: no dimension moves by more
IDLE = 1e-4  # idle: the norm of the movement is less

_PART = re.compile(r"^(?P<field>[\w./-]+)(?:\[(?P<start>-?\d*):(?P<stop>-?\d*)\]|\[(?P<count>\d+)\])?$")


@dataclass(frozen=True)
class Part:
    """Some columns of a field, through transforms; or columns of a constant.

    >>> Part.parse("action[6:7] | clip | invert")
    Part(field='action', start=6, stop=7, through=('clip', 'invert'))
    >>> Part.parse("zeros[3]")
    Part(field='zeros', start=0, stop=3, through=())
    """

    field: str
    start: int | None = None
    stop: int | None = None
    through: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read the short form; ValueError names what is wrong in it."""
        source, *through = (piece.strip() for piece in text.split("|"))
        found = _PART.match(source)
        if found is None:
            raise ValueError(f"{text!r} is not FIELD, FIELD[START:STOP] or zeros[COUNT], with transforms after |")
        if unknown := [name for name in through if name not in (*TRANSFORMS, UNZIP)]:
            raise ValueError(f"{text!r} has the unknown transform {unknown[0]!r}; known: {', '.join(TRANSFORMS)}")
        if UNZIP in through[1:]:
            raise ValueError(f"{text!r}: {UNZIP} comes first")
        is_constant = found["field"] in CONSTANTS
        if is_constant != (found["count"] is not None):
            raise ValueError(f"{text!r}: write zeros[COUNT] for a constant and FIELD[START:STOP] for columns")
        if is_constant:
            return cls(found["field"], 0, int(found["count"]), tuple(through))
        start, stop = (int(bound) if bound else None for bound in (found["start"], found["stop"]))
        return cls(found["field"], start, stop, tuple(through))

    @property
    def is_constant(self) -> bool:
        """Whether its values are not read from a field."""
        return self.field in CONSTANTS

    def width(self, fields: dict[str, Field]) -> int:
        """How many columns it gives; ValueError where the field does not have them."""
        if self.is_constant:
            return int(self.stop or 0)
        size = self._size(fields)
        start, stop, _ = slice(self.start, self.stop).indices(size)
        reaches = [bound for bound in (self.start, self.stop) if bound is not None and not -size <= bound <= size]
        if reaches or start >= stop:
            raise ValueError(f"{self.field} has {size} columns, not [{_shown(self.start)}:{_shown(self.stop)}]")
        columns = stop - start
        if "euler" in self.through:
            if columns != 4:
                raise ValueError(f"{self.field}: euler reads the 4 columns of a quaternion, not {columns}")
            return 3
        return columns

    def _size(self, fields: dict[str, Field]) -> int:
        field = fields.get(STEPS + self.field)
        wanted = "text" if self.through[:1] == (UNZIP,) else "tensor"
        if field is None or field.kind != wanted:
            fitting = [name.removeprefix(STEPS) for name, one in fields.items() if one.kind == wanted]
            raise ValueError(f"there is no {wanted} field {self.field!r}; there are {', '.join(fitting)}")
        if wanted == "text":
            if self.stop is None:
                raise ValueError(f"{self.field}: say how many values {UNZIP} finds, as {self.field}[0:COUNT]")
            return self.stop
        if UNKNOWN in field.shape:
            raise ValueError(f"{self.field} has a shape that differs from step to step: {list(field.shape)}")
        return int(np.prod(field.shape, dtype=np.int64))

    def read(self, episode: MappableEpisode, first: int) -> FloatArray:
        """[T, C] its values from step `first` on."""
        length = len(episode) - first
        if self.is_constant:
            return np.full((length, int(self.stop or 0)), CONSTANTS[self.field], np.float32)
        if self.through[:1] == (UNZIP,):
            raw = _unzipped(episode, STEPS + self.field)
        else:
            raw = episode.values(STEPS + self.field).reshape(len(episode), -1)
        values: FloatArray = raw[first:, self.start : self.stop].astype(np.float32)
        for name in self.through:
            if name != UNZIP:
                values = TRANSFORMS[name](values)
        return values


@dataclass(frozen=True)
class Mapping:
    """What the fields of a dataset mean."""

    action: tuple[Part, ...]  # joined; the last dimension is the gripper
    state: tuple[Part, ...]  # joined
    primary: str | None = None  # a camera that sees the scene
    wrist: str | None = None
    secondary: str | None = None
    instruction: str = "language_instruction"  # text, or its code points with zeros at the end
    success: str | None = "is_terminal"  # true in the last step of an episode that reached its goal
    skip_first: int = 0  # steps at the beginning that have no action
    movement_from_state: bool = False  # the movement is that of the state to the next step; the last step is left out
    noops: NoOps = "keep"
    gripper_is_absolute: bool | None = True  # and is therefore not normalised; None: if it only opens and closes

    def view(self, name: View) -> str | None:
        """The field of a view; None where the dataset has none."""
        return {"primary": self.primary, "wrist": self.wrist, "secondary": self.secondary}[name]

    def action_mask(self, action_dim: int) -> tuple[bool, ...] | None:
        """Which dimensions of an action are normalised; None: that follows from the actions."""
        if self.gripper_is_absolute is None:
            return None
        return (*[True] * (action_dim - 1), not self.gripper_is_absolute)


@dataclass(frozen=True)
class StandardEpisode:
    """An episode in a policy's conventions."""

    actions: FloatArray  # [T, D]
    state: FloatArray  # [T, P]
    instructions: tuple[str, ...]  # of each step
    steps: IntArray  # [T] which steps of the recording these are
    success: bool


def parts(*texts: str) -> tuple[Part, ...]:
    """Several parts in their short form."""
    return tuple(Part.parse(text) for text in texts)


def check_mapping(mapping: Mapping, dataset: MappableDataset, option: str) -> tuple[int, int]:
    """The dimensions of action and state; UsageError where the dataset has no such fields."""
    fields = dataset.fields
    try:
        action_dim, state_dim = (sum(part.width(fields) for part in each) for each in (mapping.action, mapping.state))
        if action_dim < 2 or not state_dim:
            raise ValueError(f"an action has movement and gripper, but {action_dim} dimensions are mapped")
        if mapping.movement_from_state and (action_dim != MOVEMENT + 1 or state_dim < MOVEMENT):
            raise ValueError(f"movement_from_state needs {MOVEMENT} dimensions of movement in action and state")
        text = fields.get(_located(mapping.instruction, fields))
        if text is None or not (text.kind == "text" or _is_code_points(text)):
            texts = [name.removeprefix(STEPS) for name, one in fields.items() if one.kind == "text"]
            raise ValueError(f"there is no text field {mapping.instruction!r}; there are {', '.join(texts) or 'none'}")
        if mapping.success is not None and mapping.success != "is_terminal":
            Part(mapping.success).width(fields)
    except ValueError as error:
        raise UsageError(
            f"{option}: the mapping of {dataset.name} does not fit {dataset.folder}: {error}. Correct it, or declare "
            "one with demos.mapping (docs/data.md)."
        ) from error
    return action_dim, state_dim


def standardise(
    episode: MappableEpisode, mapping: Mapping, fields: dict[str, Field], noops: NoOps
) -> StandardEpisode | None:
    """An episode in a policy's conventions; None where no step is left."""
    first = mapping.skip_first
    if len(episode) - first - mapping.movement_from_state < 1:
        return None
    actions = np.concatenate([part.read(episode, first) for part in mapping.action], axis=1)
    state = np.concatenate([part.read(episode, first) for part in mapping.state], axis=1)
    texts = _instructions(episode, mapping, fields)[first:]
    if mapping.movement_from_state:
        moved = np.diff(state[:, :MOVEMENT], axis=0)
        actions = np.concatenate([moved, actions[:-1, MOVEMENT:]], axis=1)
        state, texts = state[:-1], texts[:-1]
    kept = _without_noops(actions, noops)
    if not len(kept):
        return None
    return StandardEpisode(
        actions=actions[kept],
        state=state[kept],
        instructions=tuple(texts[index] for index in kept),
        steps=kept + first,
        success=_succeeded(episode, mapping, fields),
    )


def _without_noops(actions: FloatArray, noops: NoOps) -> IntArray:
    """The steps that do something."""
    movement = actions[:, :-1].astype(np.float64)
    if noops == "keep":
        return np.arange(len(actions))
    if noops == "motionless":
        return np.flatnonzero((np.abs(movement) > STILL).any(axis=1))
    kept: list[int] = []
    for index, norm in enumerate(np.linalg.norm(movement, axis=1)):
        same_gripper = not kept or actions[index, -1] == actions[kept[-1], -1]
        if norm >= IDLE or not same_gripper:
            kept.append(index)
    return np.array(kept, np.int64)


def _instructions(episode: MappableEpisode, mapping: Mapping, fields: dict[str, Field]) -> Sequence[str]:
    name = _located(mapping.instruction, fields)
    if fields[name].kind == "tensor":
        try:
            return [_text(row) for row in episode.values(name).reshape(len(episode), -1)]
        except (ValueError, OverflowError) as error:
            raise episode.unreadable(f"{name} holds values that are not characters: {error}") from error
    texts = episode.texts(name)
    return texts if name.startswith(STEPS) else texts[:1] * len(episode)


def _text(codes: IntArray) -> str:
    """A text out of its code points, up to the first 0."""
    return "".join(map(chr, codes[: np.flatnonzero(np.append(codes, 0) == 0)[0]]))


def _succeeded(episode: MappableEpisode, mapping: Mapping, fields: dict[str, Field]) -> bool:
    name = None if mapping.success is None else STEPS + mapping.success
    return name is None or name not in fields or bool(np.all(episode.values(name)[-1]))


def _located(name: str, fields: dict[str, Field]) -> str:
    """The full name of a field of the steps or, if there is none, of the episode."""
    return name if STEPS + name not in fields and name in fields else STEPS + name


def _is_code_points(field: Field) -> bool:
    return field.kind == "tensor" and not field.is_float and len(field.shape) == 1


def _unzipped(episode: MappableEpisode, name: str) -> FloatArray:
    rows = []
    for step, packed in enumerate(episode.blobs(name)):
        try:
            rows.append(np.frombuffer(zlib.decompressobj().decompress(packed, MAX_UNZIPPED), "<f4"))
        except (zlib.error, ValueError) as error:
            raise episode.unreadable(f"{name} in step {step}: {error}") from error
    if len({len(row) for row in rows}) != 1:
        raise episode.unreadable(f"{name} has steps with different counts of values")
    values: FloatArray = np.stack(rows)
    if not np.isfinite(values).all():
        raise episode.unreadable(f"{name} holds NaN or infinity")
    return values


def _shown(bound: int | None) -> str:
    return "" if bound is None else str(bound)
