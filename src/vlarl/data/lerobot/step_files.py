"""The files that a LeRobot dataset is written into: steps in Parquet files, frames in videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlarl.data.lerobot.info import DATA_PATH, VIDEO_PATH
from vlarl.data.lerobot.tables import arrow
from vlarl.data.lerobot.video import VideoWriter
from vlarl.types import UInt8Array

CHUNK_FILES = 1000  # files in a folder
PARQUET = {"compression": "snappy", "write_page_checksum": True}


def data_path(index: int) -> str:
    """The path of a file of steps in its dataset."""
    chunk, file = divmod(index, CHUNK_FILES)
    return DATA_PATH.format(chunk_index=chunk, file_index=file)


class DataFiles:
    """Files of steps, a group of rows for each episode, so that an episode can be read alone."""

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self.count = 0
        self._writer: Any = None
        self._path = folder

    def write(self, table: Any) -> tuple[int, int]:
        """Append an episode; return the indices of chunk and file."""
        if self._writer is not None and self._path.stat().st_size >= self._max_bytes:
            self.close()
        if self._writer is None:
            self._path = self._folder / data_path(self.count)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = arrow().parquet.ParquetWriter(self._path, table.schema, **PARQUET)
            self.count += 1
        self._writer.write_table(table)
        return divmod(self.count - 1, CHUNK_FILES)

    def close(self) -> None:
        """Complete the file that is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class VideoFiles:
    """Videos of a camera, the episodes one after the other."""

    def __init__(self, folder: Path, name: str, fps: int, size: tuple[int, ...], max_bytes: float) -> None:
        self._folder, self._name, self._fps = folder, name, fps
        self._size, self._max_bytes = (size[0], size[1]), max_bytes
        self._count = 0
        self._video: VideoWriter | None = None

    def write(self, frames: UInt8Array) -> dict[str, Any]:
        """Append an episode; return its columns in meta/episodes."""
        if self._video is not None and self._video.num_bytes >= self._max_bytes:
            self.close()
        if self._video is None:
            chunk, file = divmod(self._count, CHUNK_FILES)
            name = VIDEO_PATH.format(video_key=self._name, chunk_index=chunk, file_index=file)
            self._video = VideoWriter(self._folder / name, self._fps, self._size)
            self._count += 1
        start = self._video.num_frames
        self._video.add(frames)
        chunk, file = divmod(self._count - 1, CHUNK_FILES)
        columns = {
            "chunk_index": chunk,
            "file_index": file,
            "from_timestamp": start / self._fps,
            "to_timestamp": self._video.num_frames / self._fps,
        }
        return {f"videos/{self._name}/{column}": value for column, value in columns.items()}

    def close(self) -> None:
        """Complete the video that is open."""
        if self._video is not None:
            self._video.close()
            self._video = None

    def discard(self) -> None:
        """End without completing the video that is open."""
        if self._video is not None:
            self._video.discard()
            self._video = None
