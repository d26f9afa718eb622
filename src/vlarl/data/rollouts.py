"""Episodes of a policy as datasets: `rollout.save` of `vlarl train`, `--save` of `vlarl eval`.

    rollout ── ended ──► take: filter, fetch, encode ─┐                                       run/data/SUITE/…
    loop ── the iteration that the episode counts in ──► record ── its update is done ──► settle ──► commit

An episode is encoded as soon as it ends, and waits for the iteration that it counts in: with rollouts ahead of the
update that may be a later one. A file holds episodes of one iteration. Datasets are completed with every checkpoint,
just before it, and are then as new as the checkpoint: a run that was killed resumes from there, drops the episodes of
later iterations where there are any, and saves them when it collects them again.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from vlarl.config.dataset_folder import INFO, LEROBOT_INFO
from vlarl.config.schema import SaveFilter, SaveFormat
from vlarl.data.lerobot.demonstrations import DemonstrationWriter
from vlarl.data.lerobot.demonstrations import EncodedEpisode as LeRobotEpisode
from vlarl.data.parts import Part, last_part, read_parts, recover
from vlarl.data.rlds.writer import VERSION, RldsWriter
from vlarl.data.rlds.writer import EncodedEpisode as RldsEpisode
from vlarl.errors import RowsLostError, UsageError, VlarlError
from vlarl.observability.files import disk_errors
from vlarl.rollout.collector import Episode
from vlarl.types import Task, Trajectory

log = logging.getLogger(__name__)

Encoded = RldsEpisode | LeRobotEpisode


class GrowingDataset(Protocol):
    """A dataset of one suite that is written."""

    folder: Path

    def add_encoded(self, episode: Any) -> None:
        """Write an episode that was encoded for this format."""
        ...

    def end_part(self, iteration: int) -> None:
        """Note that the episodes of a training iteration are complete."""
        ...

    def finish(self) -> None:
        """Complete the dataset and give it its name."""
        ...

    def grow(self) -> None:
        """Continue a dataset that is finished."""
        ...

    def discard(self) -> None:
        """Remove what was written since the dataset was finished."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish a dataset whose last episode is whole."""
        ...


class EpisodeSaver:
    """Encodes episodes that ended, and writes them into one dataset for each suite, below one folder."""

    def __init__(self, root: Path, kind: SaveFormat, fps: int | None, which: SaveFilter) -> None:
        self.root = root
        self.num_saved = 0
        self._kind, self._fps, self._which = kind, fps, which
        self._writers: dict[str, GrowingDataset] = {}  # by suite

    def encode(self, episode: Episode) -> Encoded | None:
        """An episode as it is written; None where it is not saved."""
        trajectory, steps = episode.trajectory, episode.steps
        if steps is None or trajectory.status == "crashed" or not len(steps):
            return None
        if self._which == "successes" and not trajectory.success:
            return None
        task = trajectory.task
        try:
            whole = steps.demonstration(task, trajectory.success)
        except RowsLostError as error:
            log.warning("the episode %s is not saved: %s", task.episode_id, error)
            return None
        return RldsEpisode.of(task.suite, whole) if self._kind == "rlds" else LeRobotEpisode.of(task.suite, whole)

    def write(self, suite: str, encoded: Encoded) -> None:
        """Write an episode into the dataset of its suite."""
        writer = self._writers.get(suite)
        if writer is None:
            writer = self._writers[suite] = self._open(suite)
        with disk_errors(writer.folder):
            writer.add_encoded(encoded)
        self.num_saved += 1

    def _open(self, suite: str) -> GrowingDataset:
        if self._kind == "rlds":
            return RldsWriter(self.root, suite)
        return DemonstrationWriter(self.root, suite, _checked(self._fps), video=False)


class EvaluatedEpisodes(EpisodeSaver):
    """The episodes of an evaluation. Use it as a context manager: however its block ends, what was added is kept."""

    def add(self, episode: Episode) -> None:
        """Save an episode, if it is one to save."""
        if (encoded := self.encode(episode)) is not None:
            self.write(episode.trajectory.task.suite, encoded)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            with disk_errors(writer.folder):
                writer.__exit__(kind, error, trace)


class TrainingEpisodes(EpisodeSaver):
    """The episodes of a run, in datasets that are complete with every checkpoint. Use it as a context manager."""

    def __init__(self, root: Path, kind: SaveFormat, fps: int | None, which: SaveFilter) -> None:
        super().__init__(root, kind, fps, which)
        self._lock = threading.Lock()
        self._ended: dict[Task, Encoded] = {}  # whose iteration is not known yet
        self._waiting: list[tuple[int, str, Encoded]] = []  # iteration, suite: until the update is done
        self._growing: set[str] = set()  # suites whose datasets have episodes that are not committed
        self._failure: Exception | None = None

    def take(self, episode: Episode) -> None:
        """Encode an episode that has ended; called by the thread that collects."""
        if (encoded := self.encode(episode)) is not None:
            with self._lock:
                self._ended[episode.trajectory.task] = encoded

    def record(self, iteration: int, trajectories: Sequence[Trajectory]) -> None:
        """Note the iteration that these episodes count in."""
        with self._lock:
            for trajectory in trajectories:
                encoded = self._ended.pop(trajectory.task, None)
                if encoded is not None:
                    self._waiting.append((iteration, trajectory.task.suite, encoded))

    def settle(self) -> None:
        """Write what waits: the policy has been trained on it, so that a checkpoint may follow."""
        waiting, self._waiting = self._waiting, []
        try:
            for iteration in dict.fromkeys(each for each, _, _ in waiting):
                suites = [suite for each, suite, _ in waiting if each == iteration]
                for each, suite, encoded in waiting:
                    if each == iteration:
                        self._write_part(suite, encoded)
                for suite in dict.fromkeys(suites):
                    self._writers[suite].end_part(iteration)
        except Exception as error:
            self._failure = error
            raise

    def _write_part(self, suite: str, encoded: Encoded) -> None:
        if suite not in self._growing:
            if suite in self._writers:
                with disk_errors(self._writers[suite].folder):
                    self._writers[suite].grow()
            else:
                self._writers[suite] = self._open(suite)
            self._growing.add(suite)
        self.write(suite, encoded)

    def commit(self) -> None:
        """Complete the datasets with all that was settled."""
        if self._failure is not None:
            raise VlarlError(f"the episodes of this run could not be saved: {self._failure}")
        for suite in sorted(self._growing):
            try:
                with disk_errors(self._writers[suite].folder):
                    self._writers[suite].finish()
            except Exception as error:
                self._failure = error
                raise
        self._growing.clear()

    def _open(self, suite: str) -> GrowingDataset:
        folder = dataset_folder(self.root, suite, self._kind)
        if not folder.exists():
            return super()._open(suite)
        parts = read_parts(_noted_in(folder))
        if not parts:
            raise UsageError(f"{folder} was not saved by this run: move it away, then resume the run.")
        return _reopened(self.root, suite, parts[-1], self._kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove what no checkpoint follows."""
        for suite in self._growing:
            with suppress(OSError):
                self._writers[suite].discard()


def dataset_folder(root: Path, suite: str, kind: SaveFormat) -> Path:
    """The folder of a suite's dataset."""
    return root / suite / VERSION if kind == "rlds" else root / suite


def refuse_other_format(root: Path, kind: SaveFormat, fps: int | None) -> None:
    """Refuse to resume in another format, or with another frame rate, than the run has saved its episodes in."""
    for suite, found in _datasets(root):
        if found != kind and kind != "none":
            raise UsageError(
                f"rollout.save = {kind!r}: this run has saved its episodes as {found}: resume it with --rollout.save "
                f"{found}, or move {root / suite} away."
            )
        if found == kind == "lerobot":
            from vlarl.data.lerobot.reader import LeRobotDataset

            rate = LeRobotDataset(root / suite).fps
            if rate != fps:
                raise UsageError(
                    f"rollout.save_fps = {fps}: this run has saved its episodes with {rate} steps a second: resume it "
                    f"with --rollout.save_fps {rate}."
                )


def drop_after(root: Path, iteration: int) -> None:
    """Remove the episodes of later iterations, which a resumed run collects again, and what a killed process left."""
    for suite, kind in _datasets(root):
        folder = dataset_folder(root, suite, kind)
        parts = read_parts(_noted_in(folder))
        if not parts or parts[-1].iteration <= iteration:
            continue
        kept = last_part(parts, iteration)
        with disk_errors(folder):
            if kept is None or not kept.episodes:
                shutil.rmtree(root / suite)
                continue
            _reopened(root, suite, kept, kind).finish()


def _datasets(root: Path) -> list[tuple[str, SaveFormat]]:
    """The datasets below a folder, by suite and format."""
    if not root.is_dir():
        return []
    with disk_errors(root):
        for hidden in [*root.glob(".*.old"), *root.glob("*/.*.old")]:
            recover(hidden.with_name(hidden.name.removeprefix(".").removesuffix(".old")))
        for hidden in (path for kind in ("old", "partial") for path in root.glob(f"**/.*.{kind}")):
            shutil.rmtree(hidden, ignore_errors=True)
    found: list[tuple[str, SaveFormat]] = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if (folder / LEROBOT_INFO).is_file():
            found.append((folder.name, "lerobot"))
        elif (folder / VERSION / INFO).is_file():
            found.append((folder.name, "rlds"))
    return found


def _reopened(root: Path, suite: str, part: Part, kind: SaveFormat) -> GrowingDataset:
    if kind == "rlds":
        return RldsWriter.reopened(root, suite, part)
    return DemonstrationWriter.reopened(root, suite, part)


def _noted_in(folder: Path) -> Path:
    """Where the parts of a dataset are noted."""
    return folder / "meta" if (folder / LEROBOT_INFO).is_file() else folder


def _checked(fps: int | None) -> int:
    if fps is None:
        raise ValueError("a LeRobot dataset says how many steps a second has")
    return fps
