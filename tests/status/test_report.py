"""The report is one self-contained file."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.status.report import LossCurve, LossPoint, Moment, Report, Sheet, format_report, write_report

POINTS = (LossPoint(seconds=0.0, tokens=0.0, loss=5.5), LossPoint(seconds=60.0, tokens=1e6, loss=2.3))
REPORT = Report(
    title="demo <1>",
    verdict="all is well",
    good=True,
    curves=(
        LossCurve(name="anchor", kind="anchor", points=POINTS),
        LossCurve(name="peer-1", kind="peer", points=POINTS),
        LossCurve(name="peer-2", kind="peer", points=POINTS),
        LossCurve(name="alone", kind="lone", points=POINTS),
    ),
    moments=(Moment(seconds=30.0, tokens=5e5, text="peer-2 is killed & gone"),),
    baseline_loss=2.4,
    sheets=(Sheet(title="Peers", columns=("peer", "end"), rows=(("peer-1", "<b>finished</b>"),)),),
    footnote="made by: p2p-diloco demo",
)
VOID_ELEMENTS = {"meta"}


class Balance(HTMLParser):
    """Track which elements are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing() -> None:
    page = format_report(REPORT)
    assert re.search(r"https?:|src=|href=|@import|url\(|<script|<link", page) is None


def test_every_opened_element_is_closed() -> None:
    balance = Balance()
    balance.feed(format_report(REPORT))
    assert balance.open == []


def test_loss_is_drawn_over_time_and_over_tokens_for_the_anchor_and_every_peer() -> None:
    page = format_report(REPORT)
    assert page.count("<svg") == 2
    for name in ("anchor", "peer-1", "peer-2", "alone"):
        assert page.count(f">{name}</text>") == 2
    assert page.count("<title>peer-2 is killed &amp; gone</title>") == 2


def test_peers_have_their_own_colours_and_the_anchor_is_on_top() -> None:
    page = format_report(REPORT)
    assert page.index('"line c0"') < page.index('"line c1"') < page.index('"line anchor"')


def test_names_from_others_are_escaped() -> None:
    page = format_report(REPORT)
    assert "demo &lt;1&gt;" in page
    assert "<b>finished" not in page


def test_a_swarm_without_measurements_has_a_page_too() -> None:
    empty = Report(
        title="t", verdict="v", good=False, curves=(), moments=(), baseline_loss=None, sheets=(), footnote="f"
    )
    assert "nothing was measured" in format_report(empty)


def test_the_folder_is_created(tmp_path: Path) -> None:
    path = write_report(tmp_path / "a" / "b", REPORT)
    assert path == tmp_path / "a" / "b" / "report.html"
    assert path.read_text(encoding="utf-8") == format_report(REPORT)
    assert len(list(path.parent.iterdir())) == 1


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"cannot write .*report\.html: .*; name another folder with --report"):
        write_report(tmp_path / "file", REPORT)
