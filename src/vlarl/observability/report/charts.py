"""Line charts as SVG text: axes, grid, intervals, and the value under the pointer, without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from vlarl.observability.report.data import Series

MAX_POINTS = 240  # more can't be distinguished, and each takes bytes in the page


@dataclass(frozen=True)
class Line:
    """One line of a chart; `kind` is the class that the style sheet colours."""

    label: str
    points: Series
    kind: str = "main"
    has_dots: bool = False
    intervals: Sequence[tuple[float, float, float]] = ()  # x, low, high


@dataclass(frozen=True)
class Frame:
    """The position of the plot within the image, and the values at its edges."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: int = 46
    right: int = 14
    top: int = 12
    bottom: int = 26

    def x(self, value: float) -> float:
        """The x coordinate of an iteration."""
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """The y coordinate of a value."""
        low, high = self.y_range
        inner = self.height - self.top - self.bottom
        return self.top + inner - (value - low) / ((high - low) or 1) * inner


def curve_svg(
    lines: Sequence[Line],
    width: int = 360,
    height: int = 180,
    y_range: tuple[float, float] | None = None,
    as_percent: bool = False,
) -> str:
    """A chart of the lines over iterations; the y axis covers `y_range`, or all values."""
    lines = [Line(n.label, thin(n.points), n.kind, n.has_dots, n.intervals) for n in lines if n.points]
    if not lines:
        return '<p class="empty">no data yet</p>'
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    y_ticks = ticks(*(y_range or (min(ys), max(ys))), count=5 if height > 240 else 3)
    frame = Frame(width, height, (min(xs), max(xs)), y_range or (y_ticks[0], y_ticks[-1]))
    form = _percent if as_percent else number
    body = [_grid(frame, y_ticks, form), _x_axis(frame)]
    body += [_line(frame, line) for line in lines]
    body.append(_hover(frame, lines, form))
    label = escape(", ".join(line.label for line in lines), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{label} over iterations">'
        f"{''.join(body)}</svg>"
    )


def thin(points: Series, limit: int = MAX_POINTS) -> Series:
    """At most about `limit` points, evenly spaced, with the last one."""
    if len(points) <= limit:
        return points
    stride = math.ceil(len(points) / limit)
    kept = points[::stride]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values that enclose the range."""
    if low == high:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Three significant digits, in the shortest readable form."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.2g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%" if abs(100 * value - round(100 * value)) < 1e-6 else f"{100 * value:.1f}%"


def _grid(frame: Frame, values: Sequence[float], form: Callable[[float], str]) -> str:
    right = frame.width - frame.right
    parts = []
    for value in values:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        at = f'x="{frame.left - 7}" y="{y + 3.5:.1f}"'
        parts.append(f'<text class="tick" {at} text-anchor="end">{form(value)}</text>')
    return "".join(parts)


def _x_axis(frame: Frame) -> str:
    low, high = frame.x_range
    count = max(2, frame.width // 64)
    values = [v for v in ticks(low, high, count) if low <= v <= high and v == int(v)]
    y = frame.height - 8
    return "".join(
        f'<text class="tick" x="{frame.x(v):.1f}" y="{y}" text-anchor="middle">{v:.0f}</text>' for v in values
    )


def _line(frame: Frame, line: Line) -> str:
    low, high = frame.y_range
    bars = "".join(
        f'<line class="interval {line.kind}" x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" '
        f'y1="{frame.y(bottom):.1f}" y2="{frame.y(top):.1f}"/>'
        for x, bottom, top in line.intervals
    )
    points = [(frame.x(x), frame.y(min(max(y, low), high))) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dotted = points if line.has_dots or len(points) == 1 else []
    dots = "".join(f'<circle class="dot {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dotted)
    return f'{bars}<polyline class="line {line.kind}" points="{path}"/>{dots}'


def _hover(frame: Frame, lines: Sequence[Line], form: Callable[[float], str]) -> str:
    """A band for each iteration: under the pointer it shows the values there."""
    values: dict[float, list[tuple[Line, float]]] = {}
    for line in lines:
        for x, y in line.points:
            values.setdefault(x, []).append((line, y))
    xs = sorted(values)
    bounds = [frame.left, *((frame.x(a) + frame.x(b)) / 2 for a, b in zip(xs, xs[1:], strict=False))]
    bounds.append(frame.width - frame.right)
    parts = []
    for x, start, end in zip(xs, bounds, bounds[1:], strict=False):
        shown = [f"{line.label} {form(y)}" if len(lines) > 1 else form(y) for line, y in values[x]]
        text = escape(f"iteration {x:.0f}:  " + ",  ".join(shown))
        at = frame.x(x)
        anchor = "start" if at < frame.width * 0.3 else "end" if at > frame.width * 0.7 else "middle"
        marks = "".join(
            f'<circle class="mark {line.kind}" cx="{at:.1f}" cy="{frame.y(y):.1f}" r="3.5"/>' for line, y in values[x]
        )
        parts.append(
            f'<g class="point"><rect x="{start:.1f}" y="0" width="{max(end - start, 0.5):.1f}" '
            f'height="{frame.height}"/><line class="cursor" x1="{at:.1f}" x2="{at:.1f}" y1="{frame.top}" '
            f'y2="{frame.height - frame.bottom}"/>{marks}'
            f'<text class="tip" x="{at:.1f}" y="{frame.top - 2}" text-anchor="{anchor}">{text}</text></g>'
        )
    return "".join(parts)
