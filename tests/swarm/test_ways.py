"""Three ways through the code, as listed in docs/how-it-works.md: of a pseudo-gradient, a heartbeat and a joiner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gauges.ways import Recording, record

PROJECT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(240)

Way = list[tuple[str, str]]


def ways() -> dict[str, Way]:
    """Return the lists of the page, by their first words."""
    text = (PROJECT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split("## The way through the code")[1]
    blocks = re.findall(r"\n\n(A [\w-]+)[^`]*?\n```\n(.*?)```", text, re.DOTALL)
    return {name: [tuple(line.split()[:2]) for line in lines.splitlines()] for name, lines in blocks}  # type: ignore[misc]


WAYS = ways()


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Return the calls in this package while a second peer joins the first and trains with it."""
    return record()


def test_the_page_lists_three_ways() -> None:
    assert list(WAYS) == ["A pseudo-gradient", "A heartbeat", "A joiner"]


def test_a_heartbeat_touches_no_vector_and_a_pseudo_gradient_does(recording: Recording) -> None:
    vectors = {"span/reduce", "span/fused", "island/local_spans"}
    on = {way: {module for stage in stages for module in stage} for way, stages in recording.ways.items()}
    assert vectors <= on["pseudo-gradient"]
    assert not vectors & on["heartbeat"]


@pytest.mark.parametrize("name", WAYS)
def test_a_way_goes_through_these_functions_in_this_order(recording: Recording, name: str) -> None:
    calls, at = recording.calls, 0
    for place, function in enumerate(WAYS[name]):
        try:
            at = calls.index(function, at) + 1
        except ValueError:
            known = function in calls
            pytest.fail(
                f"{function} is {'not called after' if known else 'never called, nor after'} {WAYS[name][:place]}"
            )
