"""The traffic of a month survives restarts, and a new month begins at zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.guest.owner_files import TRAFFIC_FILE, MonthTraffic, read_traffic, write_traffic


def test_traffic_adds_up_within_a_month_and_begins_again_with_the_next() -> None:
    november = MonthTraffic().plus("2026-11", 10.0, 5.0).plus("2026-11", 1.0, 2.0)
    assert (november.sent, november.received, november.total) == (11.0, 7.0, 18.0)
    assert november.plus("2026-12", 1.0, 0.0) == MonthTraffic(month="2026-12", sent=1.0)


def test_traffic_is_read_back(tmp_path: Path) -> None:
    assert read_traffic(tmp_path) == MonthTraffic()
    traffic = MonthTraffic(month="2026-11", sent=12.5e9, received=3.0)
    write_traffic(tmp_path, traffic)
    assert read_traffic(tmp_path) == traffic
    write_traffic(tmp_path / "gone", traffic)  # a disk that fails stops no peer


@pytest.mark.parametrize("content", ["", "{", "[]", '{"month": "2026-11", "sent": -1, "received": 0}', '{"sent": NaN}'])
def test_a_broken_file_is_recognised(tmp_path: Path, content: str) -> None:
    (tmp_path / TRAFFIC_FILE).write_text(content)
    assert read_traffic(tmp_path) is None


def test_a_clock_that_is_not_set_yet_does_not_begin_another_month() -> None:
    saved = MonthTraffic(month="2026-11", sent=18e9, received=1e9)
    booted = saved.plus("1970-01", 5.0, 6.0)
    assert booted == MonthTraffic(month="2026-11", sent=18e9 + 5.0, received=1e9 + 6.0)
    assert booted.plus("2026-12", 1.0, 2.0) == MonthTraffic(month="2026-12", sent=1.0, received=2.0)
    ahead = MonthTraffic().plus("2099-01", 1.0, 1.0)
    assert ahead.plus("2026-12", 2.0, 2.0).month == "2026-12", "a clock that was ahead must not count for ever"
