"""Small static charts as SVG; the colours of text and grid come from the site's style sheet."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WIDTH = 440
HEIGHT = 270
LEFT = 52
RIGHT = 12
TOP = 8
BOTTOM = 38


@dataclass
class Line:
    """A line with a band around it; `steps`: constant between two points."""

    name: str
    color: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    steps: bool = False


@dataclass
class Interval:
    """A point with its interval, in a row of its own."""

    name: str
    color: str
    value: float
    low: float
    high: float


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`."""
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9)) * power
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """1.5M for 1,500,000, 20k for 20,000."""
    for unit, letter in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e6 if letter == 'M' else 1e3):.4g}{letter}"
    return f"{value + 0.0:.4g}"


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    words = html.escape(words)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def box(title: str, body: Sequence[str], height: int = HEIGHT) -> str:
    """A chart with its title."""
    title = html.escape(title)
    shape = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}"'
    return f'<div class="chart"><h2>{title}</h2><svg {shape}>{"".join(body)}</svg></div>'


def path(points: Sequence[str], style: str) -> str:
    return f'<path d="M{"L".join(points)}" {style}/>'


def line_chart(title: str, lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Lines with bands."""
    left = min(line.x[0] for line in lines)
    right = max(line.x[-1] for line in lines)
    low = min(0.0, *(float(line.low.min()) for line in lines))
    high = max(float(line.high.max()) for line in lines)

    def px(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    body = []
    for tick in ticks(low, high):
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"'
        body.append(f'<line {ends} class="grid"/>')
        body.append(text(LEFT - 6, py(tick) + 4, short(tick), "end"))
    for tick in ticks(left, right):
        body.append(text(px(tick), HEIGHT - BOTTOM + 16, short(tick)))
    body.append(text(WIDTH - RIGHT, HEIGHT - 4, f"{y_label} over {x_label}", "end"))
    for line in lines:
        x, y, below, above = (stairs(line) if line.steps else as_drawn(line)).T
        pairs = list(zip(x, above, strict=True)) + list(zip(x, below, strict=True))[::-1]
        area = [f"{px(a):.1f},{py(b):.1f}" for a, b in pairs]
        body.append(path(area, f'fill="{line.color}" opacity=".18" class="band"'))
        points = [f"{px(a):.1f},{py(b):.1f}" for a, b in zip(x, y, strict=True)]
        body.append(path(points, f'fill="none" stroke="{line.color}" stroke-width="1.8"'))
    return box(title, body)


def as_drawn(line: Line) -> np.ndarray:
    return np.stack([line.x, line.y, line.low, line.high], axis=1)


def stairs(line: Line) -> np.ndarray:
    """The points of a line that is constant between two points."""
    rows = as_drawn(line).repeat(2, axis=0)
    rows[1:, 0] = rows[:-1, 0].copy()
    rows[2::2, 0] = line.x[1:]
    rows[1::2, 0] = np.append(line.x[1:], line.x[-1])
    return rows


def interval_chart(title: str, intervals: Sequence[Interval], x_label: str) -> str:
    """A row per interval: its name, the interval as a bar, the point as a stroke."""
    row = 34
    name_width = 92
    height = TOP + row * len(intervals) + BOTTOM
    low = min(interval.low for interval in intervals)
    high = max(interval.high for interval in intervals)
    margin = (high - low) * 0.15 + 1e-9
    low -= margin
    high += margin

    def px(x: float) -> float:
        return name_width + (x - low) / (high - low) * (WIDTH - name_width - RIGHT)

    body = []
    for tick in ticks(low, high):
        ends = f'x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{TOP}" y2="{height - BOTTOM}"'
        body.append(f'<line {ends} class="grid"/>')
        body.append(text(px(tick), height - BOTTOM + 16, short(tick)))
    for i, interval in enumerate(intervals):
        y = TOP + row * i + 8
        width = px(interval.high) - px(interval.low)
        place = f'x="{px(interval.low):.1f}" y="{y}" width="{width:.1f}" height="18"'
        body.append(f'<rect {place} fill="{interval.color}" opacity=".35" class="band"/>')
        at = f'x1="{px(interval.value):.1f}" x2="{px(interval.value):.1f}"'
        stroke = f'stroke="{interval.color}" stroke-width="2.5"'
        body.append(f'<line {at} y1="{y - 3}" y2="{y + 21}" {stroke}/>')
        body.append(text(name_width - 8, y + 13, interval.name, "end"))
    body.append(text(WIDTH - RIGHT, height - 4, x_label, "end"))
    return box(title, body, height)


def legend(names: Sequence[str], colors: Sequence[str]) -> str:
    pairs = zip(names, colors, strict=True)
    keys = (f'<span><i style="background:{c}"></i>{html.escape(n)}</span>' for n, c in pairs)
    return f'<div class="legend">{"".join(keys)}</div>'
