"""A line chart as inline SVG, made only of text and paths: no script, no font, no external link.

Colours come from the page's CSS variables, so that the same chart works on light and dark pages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 920, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 110, 26, 46
_LABEL_GAP = 14.0
NUM_COLOURS = 8
"""CSS classes `.c0` to `.c7` of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: points (x, y) in order of x, and the CSS class that colours it."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A moment on the x axis, with its number in the list under the chart."""

    x: float
    number: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The contents of a chart.

    Attributes:
        title: label for screen readers.
        x_name: name of the x axis, with its unit.
        y_name: name of the y axis, with its unit.
        lines: the curves; those without points are omitted.
        flags: marked moments.
        level: a horizontal line and its name, such as a baseline.
    """

    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]
    flags: tuple[Flag, ...] = ()
    level: tuple[float, str] | None = None


def draw_chart(chart: Chart) -> str:
    """Return the `<svg>` element, or a paragraph if there is nothing to draw."""
    lines = [line for line in map(_finite, chart.lines) if line.points]
    if not lines:
        return '<p class="nothing">nothing was measured</p>'
    plane = _plane(chart, lines)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}">',
        *_axes(chart, plane),
        *(_flag(flag, plane) for flag in chart.flags if plane.x_low <= flag.x <= plane.x_high),
        *(_level(chart.level, plane) if chart.level is not None else ()),
        *(_curve(line, plane) for line in lines),
        *_names(lines, plane),
        "</svg>",
    ]
    return "\n".join(parts)


def round_steps(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return at most about `most` round numbers within [low, high], evenly spaced by 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    if not raw >= sys.float_info.min:  # zero, or too small for distinct steps
        return (low,)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (self.y_high - value) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)


def _plane(chart: Chart, lines: Sequence[Line]) -> _Plane:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + ([chart.level[0]] if chart.level is not None else [])
    margin = 0.04 * (max(ys) - min(ys)) or 0.5
    x_low, x_high = min(0.0, *xs), max(xs)
    return _Plane(
        x_low=x_low,
        x_high=x_high if x_high > x_low else x_low + 1.0,
        y_low=min(ys) - margin,
        y_high=max(ys) + margin,
    )


def _finite(line: Line) -> Line:
    points = tuple((x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y))
    return Line(name=line.name, points=points, style=line.style)


def _axes(chart: Chart, plane: _Plane) -> list[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for value in round_steps(plane.y_low, plane.y_high, 6):
        y = plane.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in round_steps(plane.x_low, plane.x_high, 8):
        x = plane.x(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_number(value)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_name)}</text>'
    )
    parts.append(f'<text class="name" x="{_LEFT - 40}" y="14">{escape(chart.y_name)}</text>')
    return parts


def _flag(flag: Flag, plane: _Plane) -> str:
    x = plane.x(flag.x)
    return (
        f'<g class="flag"><title>{escape(flag.text)}</title><path d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>'
        f'<text x="{x:.1f}" y="{_TOP - 5}" text-anchor="middle">{flag.number}</text></g>'
    )


def _level(level: tuple[float, str], plane: _Plane) -> tuple[str, str]:
    value, name = level
    y = plane.y(value)
    return (
        f'<path class="level" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>',
        f'<text class="levelname" x="{_LEFT + 6}" y="{y - 5:.1f}">{escape(name)} {value:.3f}</text>',
    )


def _curve(line: Line, plane: _Plane) -> str:
    places = [(plane.x(x), plane.y(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{escape(line.name)}: {_number(x)}, {y:.4f}</title></circle>'
        for (px, py), (x, y) in zip(places, line.points, strict=True)
    )
    return f'<g class="line {line.style}"><path d="{path}"/>{dots}</g>'


def _names(lines: Sequence[Line], plane: _Plane) -> list[str]:
    """Label each curve at its end; move labels apart so that they do not overlap."""
    ends = [(plane.y(line.points[-1][1]), line) for line in _by_height(lines)]
    parts, last = [], -math.inf
    room = HEIGHT - _BOTTOM - _LABEL_GAP * len(ends)
    for index, (y, line) in enumerate(ends):
        last = max(min(y, room + _LABEL_GAP * (index + 1)), last + _LABEL_GAP)
        parts.append(
            f'<text class="label {line.style}" x="{WIDTH - _RIGHT + 10}" y="{last + 4:.1f}">{escape(line.name)}</text>'
        )
    return parts


def _by_height(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: -line.points[-1][1])


def _number(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}" if abs(value) < 1e-9 or abs(value) >= 0.001 else f"{value:.1e}"
