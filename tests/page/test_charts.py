"""Charts: well-formed pictures whose points have their values, and that say in words what they show."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest

from p2p_diloco.app.page.charts import HEIGHT, MOST_POINTS, WIDTH, Line, chart

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*lines: Line, is_log: bool = False) -> ET.Element:
    text = chart("loss <&>", lines, x_text="{:g} s".format, y_text="{:.2f}".format, is_log=is_log)
    return ET.fromstring(text)


def a_line(*points: tuple[float, float], name: str = "a") -> Line:
    return Line(name=name, kind="first", points=points)


def test_each_point_has_its_value() -> None:
    root = drawn(a_line((0.0, 3.0), (10.0, 1.0)))
    assert [title.text for title in root.iter(f"{SVG}title")] == ["a: 3.00 at 0 s", "a: 1.00 at 10 s"]
    assert root.attrib["aria-label"] == "loss <&>: a from 3.00 to 1.00"


def test_lower_values_are_further_down_and_all_are_inside() -> None:
    circles = [
        (float(dot.attrib["cx"]), float(dot.attrib["cy"]))
        for dot in drawn(a_line((0, 3), (5, 2), (9, 1))).iter(f"{SVG}circle")
    ]
    assert [x for x, _ in circles] == sorted(x for x, _ in circles)
    assert [y for _, y in circles] == sorted(y for _, y in circles)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in circles)


def test_a_logarithmic_axis_puts_equal_ratios_at_equal_distances() -> None:
    heights = [
        float(dot.attrib["cy"])
        for dot in drawn(a_line((0, 8), (1, 4), (2, 2), (3, 0)), is_log=True).iter(f"{SVG}circle")
    ]
    assert len(heights) == 3, "zero has no logarithm"
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.11)


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    root = drawn(a_line(*((float(x), float(x * x)) for x in range(10_000))))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == MOST_POINTS
    assert (titles[0], titles[-1]) == ("a: 0.00 at 0 s", "a: 99980001.00 at 9999 s")


def test_values_that_are_not_finite_are_left_out() -> None:
    root = drawn(a_line((0, 1), (1, math.nan), (2, math.inf), (3, 2)))
    assert len(list(root.iter(f"{SVG}circle"))) == 2


@pytest.mark.parametrize("points", [(), ((0.0, 1.0),), ((5.0, 1.0), (5.0, 2.0))])
def test_there_is_no_chart_without_two_times(points: tuple[tuple[float, float], ...]) -> None:
    assert chart("t", [a_line(*points)], x_text=str, y_text=str) == ""


def test_a_constant_line_has_a_chart() -> None:
    assert len(list(drawn(a_line((0, 2), (1, 2))).iter(f"{SVG}circle"))) == 2
