"""Images for a README: a run's success curve with frames of an episode before and after, or several curves."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from vlarl.observability.files import write_atomically
from vlarl.observability.report.charts import Line, curve_svg
from vlarl.observability.report.data import RunData, Video, load_run
from vlarl.observability.report.sections import success_curve
from vlarl.observability.video import caption_height
from vlarl.types import UInt8Array

NUM_FRAMES = 6
_WIDTH, _MARGIN = 960, 28
_CURVE_HEIGHT = 260

# An image in a page can't use the page's style, and the page may be light or dark: hence its own background.
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
.title { font-size: 19px; font-weight: 600; fill: #1c1f23; } .note { font-size: 13px; fill: #5c636d; }
.grid { stroke: #e6e3dd; } .tick { fill: #8b929c; font-size: 11px; }
.line { fill: none; stroke: #0d7a6c; stroke-width: 2.2; stroke-linejoin: round; } .line.train { stroke: #c07f2c; }
.dot { fill: #fff; stroke: #0d7a6c; stroke-width: 2; } .dot.train { stroke: #c07f2c; }
.interval { stroke: #0d7a6c; stroke-width: 7; opacity: 0.16; stroke-linecap: round; }
.interval.train { stroke: #c07f2c; }
.point { display: none; } .good { fill: #1d8a4f; } .bad { fill: #c2413b; } .side { font-size: 13px; font-weight: 600; }
"""


def write_curve(run_dir: Path, path: Path) -> Path:
    """Write a standalone SVG of a run to `path`: it needs no other file, and GitHub shows it in a README."""
    data = load_run(Path(run_dir))
    strips = _strips(data)
    height = 76 + _CURVE_HEIGHT + sum(strip_height for _, strip_height in strips) + 20
    parts = [_heading(data)]
    curve = success_curve(data, _WIDTH - 2 * _MARGIN, _CURVE_HEIGHT)
    parts.append(f'<g transform="translate({_MARGIN},70)">{_inner(curve)}</g>')
    y = 76 + _CURVE_HEIGHT
    for strip, strip_height in strips:
        parts.append(f'<g transform="translate({_MARGIN},{y})">{strip}</g>')
        y += strip_height
    write_atomically(Path(path), _card("".join(parts), height))
    return Path(path)


def write_comparison(path: Path, title: str, note: str, lines: Sequence[Line]) -> Path:
    """Write a standalone SVG of values between 0 and 1, such as the success of two ways to train, to `path`."""
    curve = curve_svg(lines, _WIDTH - 2 * _MARGIN, _CURVE_HEIGHT, y_range=(0.0, 1.0), as_percent=True)
    legend = "".join(
        f'<g transform="translate({_WIDTH - _MARGIN - 140 * (len(lines) - i)},34)">'
        f'<line class="line {line.kind}" x1="0" x2="18" y1="0" y2="0"/>'
        f'<text class="note" x="25" y="4">{escape(line.label)}</text></g>'
        for i, line in enumerate(lines)
    )
    body = (
        f'<text class="title" x="{_MARGIN}" y="38">{escape(title)}</text>'
        f'<text class="note" x="{_MARGIN}" y="59">{escape(note)}</text>{legend}'
        f'<g transform="translate({_MARGIN},70)">{_inner(curve)}</g>'
    )
    write_atomically(Path(path), _card(body, 76 + _CURVE_HEIGHT + 20))
    return Path(path)


def _card(body: str, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
        f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" rx="14" fill="#fcfbf9" stroke="#e6e3dd"/>'
        f"{body}</svg>\n"
    )


def _heading(data: RunData) -> str:
    first, last = data.first, data.last
    title = "Success over iterations"
    if first and last:
        kind = data.seen.kind
        states = "possibly trained" if kind == "not known" else kind
        change = f"{first.score.rate:.1%} to {last.score.rate:.1%}"
        title = f"{data.decoding.capitalize()} success on {states} initial states: {change}"
    algorithm = str(data.option("algorithm", "name") or "").upper()
    facts = [str(data.option("env", "suite") or ""), algorithm, f"seed {data.option('run', 'seed')}"]
    note = " · ".join(fact for fact in facts if fact and fact != "seed None")
    legend_x = _WIDTH - _MARGIN - 14
    return (
        f'<text class="title" x="{_MARGIN}" y="38">{title}</text>'
        f'<text class="note" x="{_MARGIN}" y="59">{escape(note)}</text>'
        f'<g transform="translate({legend_x - 190},55)"><line class="line" x1="0" x2="18" y1="0" y2="0"/>'
        '<text class="note" x="25" y="4">evaluation</text><line class="line train" x1="112" x2="130" y1="0" y2="0"/>'
        '<text class="note" x="137" y="4">training</text></g>'
    )


def _strips(data: RunData) -> list[tuple[str, int]]:
    """Rows of frames from one state, preferably one that changed from failure to success."""
    pairs = [(before, after) for before, after in data.video_pairs() if before and after]
    if not pairs:
        return []
    before, after = min(pairs, key=lambda pair: (pair[0].success, not pair[1].success))
    instruction = data.instructions.get(before.task_id, "")
    return [_strip(before, "before", instruction), _strip(after, "after", instruction)]


def _strip(video: Video, name: str, instruction: str) -> tuple[str, int]:
    gap = 8
    side = (_WIDTH - 2 * _MARGIN - gap * (NUM_FRAMES - 1)) // NUM_FRAMES
    outcome, kind = ("success", "good") if video.success else ("failure", "bad")
    head = f'<text class="note" x="0" y="18">{name}: {escape(instruction)}</text>'
    head += f'<text class="side {kind}" x="{_WIDTH - 2 * _MARGIN}" y="18" text-anchor="end">{outcome}</text>'
    images = "".join(
        f'<image x="{i * (side + gap)}" y="28" width="{side}" height="{side}" preserveAspectRatio="xMidYMid slice" '
        f'href="data:image/png;base64,{_png(frame, 2 * side)}"/>'
        for i, frame in enumerate(_frames(video.path))
    )
    return head + images, side + 40


def _frames(path: Path) -> list[UInt8Array]:
    """Frames at equal distances, the last one included, without their captions."""
    import imageio.v2 as imageio

    reader = imageio.get_reader(path, format="FFMPEG")
    with reader:
        frames = [np.asarray(frame) for frame in reader.iter_data()]
    height = frames[0].shape[0] - caption_height(frames[0].shape[1])
    # The video holds its last frame for a second.
    moving = max(1, len(frames) - 10)
    picks = np.linspace(0, moving - 1, NUM_FRAMES).round().astype(int)
    return [frames[i][:height] for i in picks]


def _png(frame: UInt8Array, width: int) -> str:
    image = Image.fromarray(frame)
    image = image.resize((width, round(width * image.height / image.width)), Image.Resampling.LANCZOS)
    # Few colours are enough for a thumbnail and make the file four times smaller.
    buffer = io.BytesIO()
    image.quantize(128).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _inner(svg: str) -> str:
    """A chart's content without its own svg element, to be placed in another."""
    return svg.partition(">")[2].rpartition("</svg>")[0] if svg.startswith("<svg") else ""
