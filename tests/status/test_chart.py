"""Charts are well-formed SVG that contains every point."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.status.chart import HEIGHT, WIDTH, Chart, Flag, Line, draw_chart, round_steps

NAMESPACE = "{http://www.w3.org/2000/svg}"
VALUES = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


def chart(*lines: Line, flags: tuple[Flag, ...] = (), level: tuple[float, str] | None = None) -> Chart:
    return Chart(title="loss", x_name="seconds", y_name="nats", lines=lines, flags=flags, level=level)


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)


def test_every_point_is_a_dot_with_its_numbers_as_title() -> None:
    svg = parsed(draw_chart(chart(Line(name="peer-1", points=((0.0, 5.5), (60.0, 2.5)), style="c0"))))
    assert [title.text for title in svg.iter("title")] == ["peer-1: 0, 5.5000", "peer-1: 60, 2.5000"]


def test_names_are_escaped() -> None:
    text = draw_chart(chart(Line(name="<script>&", points=((0.0, 1.0),), style="c0"), level=(0.5, "a<b")))
    assert "<script>" not in text
    parsed(text)


def test_a_chart_without_values_shows_that_nothing_was_measured() -> None:
    assert "nothing was measured" in draw_chart(chart(Line(name="peer-1", points=(), style="c0")))
    assert "nothing was measured" in draw_chart(chart(Line(name="a", points=((1.0, float("nan")),), style="c0")))


def test_moments_within_the_time_are_numbered_and_others_are_left_out() -> None:
    line = Line(name="a", points=((0.0, 1.0), (10.0, 0.5)), style="c0")
    flags = (Flag(x=5.0, number=1, text="killed"), Flag(x=11.0, number=2, text="over"))
    text = draw_chart(chart(line, flags=flags))
    assert "<title>killed</title>" in text
    assert "<title>over</title>" not in text


def test_names_at_line_ends_do_not_overlap() -> None:
    lines = [Line(name=str(number), points=((0.0, 1.0), (1.0, 0.5)), style="c0") for number in range(8)]
    svg = parsed(draw_chart(chart(*lines)))
    heights = sorted(float(text.get("y", "")) for text in svg.iter("text") if text.get("class") == "label c0")
    assert len(heights) == 8
    assert all(lower - upper >= 13.9 for upper, lower in itertools.pairwise(heights))
    assert heights[-1] < HEIGHT


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=8))
def test_all_dots_are_within_the_picture(points: list[tuple[float, float]]) -> None:
    svg = parsed(draw_chart(chart(Line(name="a", points=tuple(sorted(points)), style="c0"))))
    dots = list(svg.iter("circle"))
    assert len(dots) == len(points)
    assert all(0 <= float(dot.get("cx", "-1")) <= WIDTH and 0 <= float(dot.get("cy", "-1")) <= HEIGHT for dot in dots)


@pytest.mark.parametrize(
    ("low", "high", "steps"),
    [(0.0, 60.0, (0, 10, 20, 30, 40, 50, 60)), (2.3, 2.6, (2.3, 2.35, 2.4, 2.45, 2.5, 2.55, 2.6))],
)
def test_ticks_are_round(low: float, high: float, steps: tuple[float, ...]) -> None:
    assert round_steps(low, high, 6) == pytest.approx(steps)


def test_an_empty_range_has_one_tick() -> None:
    assert round_steps(2.0, 2.0, 6) == (2.0,)
