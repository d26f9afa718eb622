"""Recorded episodes of any format as demonstrations: values are read at once, frames when a batch needs them.

rlds/demos.py     fields as they are ──────────────┐
lerobot/demos.py  features, by lerobot/mapped.py ──┴─► a mapping (rlds/mapping.py) ─► DemoSet
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vlarl.config.finetune import DemoConfig
from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet
from vlarl.data.recorded import MappableDataset, MappableEpisode, RecordedEpisode
from vlarl.data.rlds.features import UNKNOWN, Field
from vlarl.data.rlds.mapping import VIEWS, Mapping, StandardEpisode, check_mapping, standardise
from vlarl.data.rlds.reader import STEPS
from vlarl.data.rlds.ready import NO_NOOPS
from vlarl.data.rlds.tfrecord import DamagedRecordError
from vlarl.data.tabletop_demos import TABLETOP
from vlarl.envs.tabletop.tasks import SUITES as TABLETOP_SUITES
from vlarl.errors import UsageError
from vlarl.images.lanczos import lanczos_resize
from vlarl.observability.machine import available_cores
from vlarl.types import IntArray, UInt8Array

log = logging.getLogger(__name__)

SHOWN_DAMAGE = 5  # messages on damaged episodes that are logged for each dataset


class NothingLeftError(UsageError):
    """No episode of a dataset is imitated."""


class RecordedFrames:
    """Frames of a dataset, decoded when they are read.

    Views of one size are returned as they are recorded; otherwise each is resized to the policy's, as OpenVLA does.
    """

    def __init__(
        self,
        episodes: Sequence[RecordedEpisode],
        cameras: Sequence[str | None],
        size: tuple[int, int],
        resize: bool,
        steps: IntArray,
    ) -> None:
        self._episodes, self._cameras, self._steps = episodes, cameras, steps  # [N, 2]: episode, step
        self._size, self._resize = size, resize
        self.shape: tuple[int, ...] = (len(steps), len(cameras), *size, 3)

    def __getitem__(self, index: int) -> UInt8Array:
        episode, step = self._steps[index]
        return np.stack([self._frame(self._episodes[episode], camera, int(step)) for camera in self._cameras])

    def _frame(self, episode: RecordedEpisode, camera: str | None, step: int) -> UInt8Array:
        if camera is None:
            return np.zeros((*self._size, 3), np.uint8)
        frame: UInt8Array = episode.images(camera, [step])[0]
        return lanczos_resize(frame, self._size[0]) if self._resize else frame

    def select(self, rows: IntArray) -> RecordedFrames:
        """Some of the frames."""
        return RecordedFrames(self._episodes, self._cameras, self._size, self._resize, self._steps[rows])


@dataclass(frozen=True)
class Reading:
    """An episode that was read, or why it is left out."""

    episode: MappableEpisode | None = None
    standard: StandardEpisode | None = None
    left_out: str = ""
    damage: str = ""


class RecordedSource:
    """A recorded dataset, in as many of its views as a policy reads."""

    def __init__(
        self,
        config: DemoConfig,
        dataset: MappableDataset,
        mapping: Mapping,
        num_images: int,
        option: str,
        image_size: int,
        name: str,
    ) -> None:
        """`option` names the path in messages; `image_size` is that of views which are resized; `name` the suite."""
        self._config, self._option = config, option
        self.dataset, self.mapping = dataset, mapping
        self.suite = name.removesuffix(NO_NOOPS)
        self.name = TABLETOP if self.suite in TABLETOP_SUITES else self.suite
        self.only_successful = bool(config.only_successful)
        self._cameras = self._views(num_images)
        self.action_dim, self.proprio_dim = check_mapping(mapping, dataset, option)
        self._check_success()
        self._size, self._resize = self._frame_size(image_size)
        self.num_damaged = 0  # episodes that were skipped

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width of the frames that are read."""
        return self._size

    @property
    def cameras(self) -> list[str]:
        """The fields of the views that are read."""
        return [camera for camera in self._cameras if camera is not None]

    def _views(self, num_images: int) -> list[str | None]:
        """The fields of the views; None for one that is black."""
        chosen = self._config.views or VIEWS[:num_images]
        if len(chosen) != num_images:
            raise UsageError(
                f"demos.views: the policy reads {counted(num_images, 'view')}, and {len(chosen)} are named: name as "
                "many, or set policy.num_images."
            )
        fields = self.dataset.fields
        named = {view: field and STEPS + field for view, field in ((view, self.mapping.view(view)) for view in chosen)}
        missing = [view for view, field in named.items() if field is None or field not in fields]
        if missing and (self._config.missing_views == "stop" or len(missing) == len(named)):
            lacking = ", ".join((named[view] or f"a {view} view").removeprefix(STEPS) for view in missing)
            images = [name.removeprefix(STEPS) for name, field in fields.items() if field.kind == "image"]
            raise UsageError(
                f"{self._option}: {self.dataset.folder} lacks {lacking}; it has {', '.join(images) or 'no images'}. "
                "Set policy.num_images to the views that it has, choose some with demos.views, map them with "
                "demos.mapping, or set demos.missing_views to black."
            )
        for field in named.values():
            if field is not None and field in fields:
                self._check_images(field.removeprefix(STEPS), fields[field])
        return [None if view in missing else named[view] for view in chosen]

    def _check_images(self, name: str, field: Field) -> None:
        if field.kind != "image" or len(field.shape) != 3 or field.shape[2] not in (3, UNKNOWN):
            raise UsageError(
                f"{self._option}: {self.dataset.folder} describes {name} as {field.kind} {list(field.shape)}, but a "
                "view is an image [height, width, 3]. Map another field with demos.mapping."
            )

    @property
    def _says_success(self) -> bool:
        return self.mapping.success is not None and STEPS + self.mapping.success in self.dataset.fields

    def _check_success(self) -> None:
        if self.only_successful and not self._says_success:
            raise UsageError(
                f"demos.only_successful: {self.dataset.folder} does not say which episodes reached their goal: leave "
                "the option out, or name the field as `success` of demos.mapping."
            )

    def _frame_size(self, image_size: int) -> tuple[tuple[int, int], bool]:
        """The size of all frames, and whether they are resized to it."""
        shapes = {self.dataset.fields[camera].shape[:2] for camera in self.cameras}
        height, width = next(iter(shapes))
        if len(shapes) > 1 or UNKNOWN in (height, width):
            return (image_size, image_size), True
        return (height, width), False

    def collect(self, note: Callable[[str], None], held_out: bool = False) -> DemoSet:
        """Read the values of all episodes that are trained on, or of those that are held out; frames stay on the
        disk."""
        note(f"reading {counted(len(self.dataset), 'episode')} of {self.dataset.name}")
        with ThreadPoolExecutor(available_cores()) as pool:
            readings = list(pool.map(lambda index: self._read(index, held_out), range(len(self.dataset))))
        self._report(readings, note)
        kept = [(r.episode, r.standard) for r in readings if r.episode is not None and r.standard is not None]
        if not kept:
            raise NothingLeftError(
                f"{self._option}: no episode of {self.dataset.folder} is left ({_counts(readings)}): change "
                "demos.damaged, demos.noops, demos.unlabeled or demos.holdout, or download the dataset again."
            )
        standard = [one for _, one in kept]
        lengths = np.array([len(one.actions) for one in standard], np.int64)
        steps = np.stack([np.repeat(np.arange(len(kept)), lengths), np.concatenate([one.steps for one in standard])], 1)
        texts = [text for one in standard for text in one.instructions]
        ids = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        return DemoSet(
            name=self.name,
            images=RecordedFrames([episode for episode, _ in kept], self._cameras, self._size, self._resize, steps),
            proprio=np.concatenate([one.state for one in standard]),
            actions=np.concatenate([one.actions for one in standard]),
            instruction_ids=np.array([ids[text] for text in texts], np.int64),
            instructions=tuple(ids),
            episode_lengths=lengths,
            success=np.array([one.success for one in standard]),
            action_mask=self.mapping.action_mask(self.action_dim),
        )

    def _read(self, index: int, held_out: bool) -> Reading:
        try:
            episode = self.dataset[index]
            if is_held_out(episode, self._config.holdout) != held_out:
                return Reading(left_out="trained on" if held_out else "held out")
            noops = self._config.noops or self.mapping.noops
            standard = standardise(episode, self.mapping, self.dataset.fields, noops)
        except DamagedRecordError as error:
            if self._config.damaged == "stop":
                raise DamagedRecordError(f"{error} Or set demos.damaged to skip.") from error
            return Reading(left_out="damaged", damage=str(error))
        if standard is None:
            return Reading(left_out="without steps")
        if self._config.unlabeled == "skip" and not any(standard.instructions):
            return Reading(left_out="without instruction")
        return Reading(episode, standard)

    def _report(self, readings: Sequence[Reading], note: Callable[[str], None]) -> None:
        damage = [reading.damage for reading in readings if reading.damage]
        self.num_damaged = len(damage)
        for message in damage[:SHOWN_DAMAGE]:
            log.warning("skipped: %s", message)
        if counts := _counts(readings):
            note(f"{self.dataset.name}: left out {counts} of {counted(len(readings), 'episode')}")
        if not self._says_success:
            note(f"{self.dataset.name} does not say which episodes succeeded: all are taken to be successful")


def is_held_out(episode: MappableEpisode, fraction: float) -> bool:
    """Whether an episode is one of the fraction that is held out."""
    return fraction > 0 and is_in_fraction(episode.checksum, fraction)


def is_in_fraction(checksum: int, fraction: float) -> bool:
    """Whether a checksum belongs to a fraction of all checksums."""
    digest = hashlib.blake2b(struct.pack("<I", checksum), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _counts(readings: Sequence[Reading]) -> str:
    counts = Counter(reading.left_out for reading in readings if reading.left_out)
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
