"""Videos of episodes: mp4 that every browser plays, with a caption that shows the instruction and the outcome."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vlarl.errors import VlarlError
from vlarl.types import UInt8Array

MIN_WIDTH = 320  # smaller frames are enlarged: a caption needs space
HOLD_SECONDS = 1.0

_BAR = (22, 24, 29)
_INK = (240, 241, 243)
_MUTED = (150, 156, 166)
_TRACK = (52, 56, 64)
_COLORS = {"success": (52, 168, 105), "failure": (219, 84, 80), "crashed": (214, 154, 60)}

Outcome = Literal["success", "failure", "crashed"]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


GIF_FRAMES = 48  # at most, of an animated image: TensorBoard stores the whole image in its event file


@dataclass(frozen=True)
class Video:
    """A video that was written, with its frames, for sinks that show it elsewhere."""

    path: Path
    frames: tuple[UInt8Array, ...] = field(repr=False)  # [H, W, 3] each, without captions
    instruction: str
    outcome: Outcome
    fps: int = 10

    @property
    def caption(self) -> str:
        """`pick up the red cube: success`."""
        return f"{self.instruction}: {self.outcome}"

    @property
    def last_frame(self) -> UInt8Array:
        """The last frame with its caption."""
        return self._painted([len(self.frames) - 1])[0]

    def as_gif(self) -> tuple[bytes, tuple[int, int]]:
        """The same as an animated GIF of at most `GIF_FRAMES` frames in the same time; and its width and height.

        All frames have the same 256 colours, those of the first, the middle and the last frame: a GIF with colours of
        its own for every frame takes six times as long to make and is fourteen times as large.
        """
        count = min(len(self.frames), GIF_FRAMES)
        steps = [round(i * (len(self.frames) - 1) / max(1, count - 1)) for i in range(count)]
        painted = self._painted(steps)
        chosen = Image.fromarray(np.concatenate([painted[0], painted[count // 2], painted[-1]]))
        colors = chosen.quantize(256, method=Image.Quantize.MEDIANCUT)
        none = Image.Dither.NONE
        first, *others = (Image.fromarray(frame).quantize(palette=colors, dither=none) for frame in painted)
        duration = round(1000 * len(self.frames) / (self.fps * count))  # milliseconds per frame
        file = io.BytesIO()
        first.save(file, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
        return file.getvalue(), first.size

    def _painted(self, steps: Sequence[int]) -> list[UInt8Array]:
        painter = CaptionPainter(self.instruction, self.outcome, len(self.frames) - 1, _video_size(self.frames[0]))
        return [painter.paint(self.frames[step], step) for step in steps]


def write_video(path: Path, frames: Sequence[UInt8Array], instruction: str, outcome: Outcome, fps: int = 10) -> None:
    """Write frames [H, W, 3] as H.264 with a caption bar, holding the last frame for a second."""
    if not frames:
        raise ValueError("a video needs at least one frame")
    import imageio.v2 as imageio

    painter = CaptionPainter(instruction, outcome, len(frames) - 1, _video_size(frames[0]))
    # The suffix decides the container, so the temporary name keeps it.
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        writer = imageio.get_writer(
            temporary,
            format="FFMPEG",
            fps=fps,
            codec="libx264",
            pixelformat="yuv420p",
            macro_block_size=2,
            ffmpeg_log_level="error",
            output_params=["-crf", "22", "-preset", "veryfast", "-movflags", "+faststart"],
        )
        with writer:
            for step, frame in enumerate(frames):
                writer.append_data(painter.paint(frame, step))
            last = painter.paint(frames[-1], len(frames) - 1)
            for _ in range(round(HOLD_SECONDS * fps)):
                writer.append_data(last)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        raise VlarlError(f"cannot write the video {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def caption_height(width: int) -> int:
    """Height of the caption bar under a video of this width; even, as yuv420p requires."""
    return 2 * round(width * 0.12)


class CaptionPainter:
    """Renders the caption bar of one video: the instruction, a step counter, and the outcome once it is known."""

    def __init__(self, instruction: str, outcome: Outcome, last_step: int, size: tuple[int, int]) -> None:
        self._width, self._scene_height = size
        self._height = caption_height(self._width)
        self._last_step = last_step
        self._word, self._color = outcome.upper(), _COLORS[outcome]
        self._margin = max(8, self._width // 32)
        self._font = ImageFont.load_default(size=self._width * 0.04)
        self._small = ImageFont.load_default(size=self._width * 0.035)
        self.lines = _wrap(instruction, self._font, self._width - 2 * self._margin, limit=2)

    def paint(self, frame: UInt8Array, step: int) -> UInt8Array:
        """The frame with its caption below."""
        scene = Image.fromarray(np.ascontiguousarray(frame))
        size = (self._width, self._scene_height)
        if scene.size != size:
            scene = scene.resize(size, Image.Resampling.BILINEAR)  # slower methods don't enlarge better
        canvas = Image.new("RGB", (self._width, self._scene_height + self._height), _BAR)
        canvas.paste(scene, (0, 0))
        self._render_bar(ImageDraw.Draw(canvas), step)
        return np.asarray(canvas)

    def _render_bar(self, draw: ImageDraw.ImageDraw, step: int) -> None:
        top, left, right = self._scene_height, self._margin, self._width - self._margin
        ended = step >= self._last_step
        fraction = 1.0 if ended else step / self._last_step
        thickness = max(2, self._width // 160)
        draw.rectangle((0, top, self._width, top + thickness - 1), fill=_TRACK)
        draw.rectangle(
            (0, top, round(self._width * fraction), top + thickness - 1), fill=self._color if ended else _MUTED
        )
        # Two lines at most, centred in the upper two thirds.
        spacing = self._height * 0.24
        first_line = top + self._height * 0.37 - spacing * (len(self.lines) - 1) / 2
        for i, line in enumerate(self.lines):
            draw.text((left, first_line + i * spacing), line, font=self._font, fill=_INK, anchor="lm")
        last_line = top + self._height * 0.8
        draw.text((left, last_line), f"step {step}", font=self._small, fill=_MUTED, anchor="lm")
        if ended:
            # Before the end the outcome is not known yet.
            x = right - draw.textlength(self._word, font=self._small)
            draw.text((x, last_line), self._word, font=self._small, fill=self._color, anchor="lm")


def _video_size(frame: UInt8Array) -> tuple[int, int]:
    height, width = frame.shape[:2]
    scale = -(-MIN_WIDTH // width) if width < MIN_WIDTH else 1
    return width * scale // 2 * 2, height * scale // 2 * 2


def _wrap(text: str, font: Font, width: float, limit: int) -> list[str]:
    """The text in at most `limit` lines; the last one takes the rest, truncated if necessary."""
    lines, words = [""], text.split()
    while words:
        longer = f"{lines[-1]} {words[0]}".strip()
        if lines[-1] and font.getlength(longer) > width:
            if len(lines) == limit:
                break
            lines.append("")
            continue
        lines[-1] = longer
        words.pop(0)
    return [*lines[:-1], _fit(" ".join([lines[-1], *words]), font, width)]


def _fit(text: str, font: Font, width: float) -> str:
    """The text, truncated with an ellipsis where it would leave the bar."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."
