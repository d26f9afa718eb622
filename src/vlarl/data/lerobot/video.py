"""Videos of LeRobot datasets: frames of many episodes in one mp4, by the ffmpeg that imageio brings along."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from vlarl.data.lerobot.info import AGAIN
from vlarl.data.lerobot.tables import refuse_missing
from vlarl.errors import UsageError, VlarlError
from vlarl.types import UInt8Array

TOLERANCE = (
    1e-3  # seconds between a frame's time and the expected one; lerobot's own tolerance is 1e-4, of what it wrote
)
DECODE_TIMEOUT = 600.0  # seconds for the frames of one episode
CODEC, PIXEL_FORMAT = "h264", "yuv420p"
# A key frame at every second frame makes reading at any step fast, as lerobot has it; without B-frames the first frame
# is at time 0 for every decoder.
ENCODING = ("-c:v", "libx264", "-preset", "medium", "-crf", "16", "-g", "2", "-bf", "0", "-pix_fmt", PIXEL_FORMAT)
# The default conversion to RGB is fast and up to a grey level less exact.
CONVERSION = ("-sws_flags", "bicubic+accurate_rnd+full_chroma_int")

_TIME = re.compile(rb"pts_time:\s*(-?[\d.]+)")


def ffmpeg() -> str:
    """The program."""
    import imageio_ffmpeg

    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise VlarlError(
            f"ffmpeg can't be found ({error}): install it with pip install --force-reinstall imageio-ffmpeg."
        ) from error


def decode(path: Path, start: float, count: int, fps: int, size: tuple[int, int]) -> UInt8Array:
    """[count, H, W, 3] the frames from a time in seconds on, at which a frame begins."""
    refuse_missing(path)
    height, width = size
    command = [
        *(ffmpeg(), "-nostdin", "-hide_banner", "-loglevel", "info", "-xerror", "-copyts"),
        *("-ss", f"{max(0.0, start - 0.5 / fps):.6f}"),  # between two frames: the first one after it is the wanted one
        *("-f", "mp4", "-protocol_whitelist", "file", "-i", f"file:{path}", "-map", "0:v:0"),
        *("-frames:v", str(count), "-fps_mode", "passthrough", "-vf", "showinfo=checksum=0"),
        *CONVERSION,
        *("-pix_fmt", "rgb24", "-f", "rawvideo", "-"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=DECODE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{path} could not be decoded in {DECODE_TIMEOUT:.0f} s: {AGAIN}.") from error
    num_bytes = height * width * 3
    times = np.array([float(time) for time in _TIME.findall(done.stderr)][: len(done.stdout) // max(1, num_bytes)])
    if done.returncode or len(done.stdout) != count * num_bytes or len(times) != count:
        raise UsageError(f"{path} can't be read ({_reason(done, count, start, size)}): {AGAIN}.")
    wanted = start + np.arange(count) / fps
    if (off := np.abs(times - wanted)).max() > TOLERANCE:
        worst = int(off.argmax())
        raise UsageError(
            f"{path} can't be read (a frame is at {times[worst]:.4f} s, and at {fps} frames a second it is expected at "
            f"{wanted[worst]:.4f} s): {AGAIN}."
        )
    return np.frombuffer(done.stdout, np.uint8).reshape(count, height, width, 3)


def _reason(done: subprocess.CompletedProcess[bytes], count: int, start: float, size: tuple[int, int]) -> str:
    if done.returncode:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else f"ffmpeg exited with {done.returncode}"
    got = len(done.stdout) // (size[0] * size[1] * 3)
    return (
        f"there are {got} frames of {size[0]} x {size[1]} pixels from {start:.2f} s on, and the episode has {count} of "
        "them"
    )


class VideoWriter:
    """One mp4 that frames are appended to."""

    def __init__(self, path: Path, fps: int, size: tuple[int, int]) -> None:
        self.path, self.num_frames = path, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = size
        command = [
            *(ffmpeg(), "-nostdin", "-hide_banner", "-loglevel", "error", "-y"),
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"),
            *(*CONVERSION, *ENCODING, "-movflags", "+faststart", str(path)),
        ]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the video
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors)

    def add(self, frames: Sequence[UInt8Array] | UInt8Array) -> None:
        """Append frames [H, W, 3]."""
        assert self._process.stdin is not None
        try:
            for frame in frames:
                self._process.stdin.write(np.ascontiguousarray(frame).tobytes())
        except OSError:
            self.close()
            raise VlarlError(f"cannot write the video {self.path}: ffmpeg ended early.") from None
        self.num_frames += len(frames)

    @property
    def num_bytes(self) -> int:
        """What has reached the file so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def close(self) -> None:
        """Complete the file."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it ended early, which its exit code shows
            self._process.stdin.close()
        if self._process.wait():
            self._errors.seek(0)
            reason = self._errors.read().decode(errors="replace").strip()[-300:]
            self._errors.close()
            raise VlarlError(f"cannot write the video {self.path}: {reason or 'ffmpeg failed'}")
        self._errors.close()

    def discard(self) -> None:
        """End the program without completing the file."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):  # the program is gone, and with it the reader of the pipe
                self._process.stdin.close()
        self._errors.close()
