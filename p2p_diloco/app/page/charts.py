"""Pictures of the page as SVG, made here so that a page without scripts shows them, with values at each point."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 30
MOST_POINTS = 160
"""Points of a line: more are nearer to each other than a finger, and make the page large."""
_TICKS = 5

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart, with points in ascending order of x.

    Attributes:
        kind: the class of its colour in the style sheet.
    """

    name: str
    kind: str
    points: Sequence[Pair]


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    is_log: bool = False,
) -> str:
    """Return a chart as SVG; empty if there are fewer than two points.

    Args:
        title: what it shows, for people who do not see it.
        x_text, y_text: format a value of an axis.
        is_log: whether the y axis is logarithmic; points that are not positive are left out.
    """
    drawn = [_thinned(line, is_log) for line in lines]
    points = [point for line in drawn for point in line.points]
    if len({x for x, _ in points}) < 2:
        return ""
    scale = math.log if is_log else float
    across = _Axis.over([x for x, _ in points], _LEFT, WIDTH - _RIGHT)
    upward = _Axis.over(
        [scale(y) for _, y in points], HEIGHT - _BOTTOM, _TOP, margin=0.06, least=-math.inf if is_log else 0.0
    )
    words = escape(_in_words(title, drawn, y_text))
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {box}>']
    for value in upward.ticks():
        y, label = upward.place(value), y_text(math.exp(value) if is_log else value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    ticks = across.ticks()
    for place, value in enumerate(ticks):
        anchor = "start" if place == 0 else "end" if place == len(ticks) - 1 else "middle"
        label = escape(x_text(value))
        parts.append(
            f'<text class="tick" x="{across.place(value):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{label}</text>'
        )
    for line in drawn:
        placed = [(across.place(x), upward.place(scale(y)), x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in placed)
        parts.append(f'<polyline class="line {line.kind}" points="{path}"/>')
        for x, y, at, value in placed:
            label = escape(f"{line.name}: {y_text(value)} at {x_text(at)}")
            parts.append(
                f'<circle class="dot {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{label}</title></circle>'
            )
    return "".join((*parts, "</svg>"))


@dataclass(frozen=True, slots=True)
class _Axis:
    """A range of values, and the pixels of its ends."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(
        cls, values: Sequence[float], first: float, last: float, *, margin: float = 0.0, least: float = -math.inf
    ) -> _Axis:
        low, high = min(values), max(values)
        more = (high - low) * margin or (abs(high) * 0.01 + 1e-9 if high == low else 0.0)
        return cls(max(low - more, min(low, least)), high + more, first, last)

    def place(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * step / (_TICKS - 1) for step in range(_TICKS)]


def _thinned(line: Line, is_log: bool) -> Line:
    """Return the line with at most `MOST_POINTS` points, the first and the last among them."""
    points = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y) and (y > 0.0 or not is_log)]
    if len(points) > MOST_POINTS:
        places = {round(step * (len(points) - 1) / (MOST_POINTS - 1)) for step in range(MOST_POINTS)}
        points = [points[place] for place in sorted(places)]
    return Line(name=line.name, kind=line.kind, points=points)


def _in_words(title: str, lines: Sequence[Line], y_text: Callable[[float], str]) -> str:
    """Return the chart in words."""
    ends = [
        f"{line.name} from {y_text(line.points[0][1])} to {y_text(line.points[-1][1])}" for line in lines if line.points
    ]
    return f"{title}: {'; '.join(ends)}"
