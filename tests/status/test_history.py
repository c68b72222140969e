"""History: what a peer writes is read back, survives a restart and a broken file, and stays small for years."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.history import HISTORY_FILE, HistoryWriter, RoundRow, read_points, read_rounds
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus

RUN = "ab" * 32
START = 1_764_000_000


def status(at: float, **changes: object) -> PeerStatus:
    facts: dict[str, object] = {"run": RUN, "updated": START + at, "tokens_per_second": 10.0, **changes}
    return PeerStatus(**facts)  # type: ignore[arg-type]


def round_event(index: int) -> PeerEvent:
    figures = {"round": index, "num_spans": 4, "num_entries": 3, "num_included": 6, "num_ready": 3, "num_members": 3}
    return PeerEvent(time=START, topic="round", text="round", figures=figures)


def test_a_point_is_added_every_ten_seconds(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    for at in range(31):
        writer.status(status(at, tokens=at, loss=2.5, bytes_sent=ByteCounts(vectors=7)))
    points = read_points(tmp_path, RUN)
    assert [(point.at - START, point.tokens) for point in points] == [(0, 0), (10, 10), (20, 20), (30, 30)]
    assert (points[0].loss, points[0].anchor_loss, points[0].sent) == (2.5, None, 7)
    assert read_points(tmp_path, "cd" * 32) == ()


def test_tokens_of_all_members_grow_by_the_rates_of_those_that_are_there_also_after_a_restart(tmp_path: Path) -> None:
    peers = (
        PeerLine(peer="b", tokens_per_second=5.0, seconds_since_heard=1.0),
        PeerLine(peer="gone", tokens_per_second=100.0, seconds_since_heard=60.0),
        PeerLine(peer="bootstrap", trains=False, tokens_per_second=100.0, seconds_since_heard=1.0),
    )
    HistoryWriter(tmp_path).status(status(0, peers=peers))
    writer = HistoryWriter(tmp_path)
    writer.status(status(10, peers=peers))
    writer.status(status(7200, peers=peers))  # nobody followed the run in between
    writer.status(status(7210, peers=peers, role="archivist"))
    assert [point.swarm_tokens for point in read_points(tmp_path, RUN)] == [0.0, 150.0, 150.0, 200.0]
    assert [point.swarm_rate for point in read_points(tmp_path, RUN)] == [15.0, 15.0, 15.0, 5.0]


def test_all_members_together_have_at_least_the_tokens_of_this_peer(tmp_path: Path) -> None:
    HistoryWriter(tmp_path).status(status(0, tokens=19_100))
    assert [point.swarm_tokens for point in read_points(tmp_path, RUN)] == [19_100.0]


def test_rounds_are_kept_in_order_and_the_last_are_read(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.event(round_event(0))  # the run is not known yet
    writer.status(status(0, degraded_rosters=1))
    for index in (2, 3, 1):
        writer.event(round_event(index))
    writer.event(PeerEvent(time=START, topic="roster", text="roster"))
    assert [row.round for row in read_rounds(tmp_path, RUN, 2)] == [2, 3]
    assert read_rounds(tmp_path, RUN, 9)[0] == RoundRow(
        round=1, spans=4, entries=3, included=6, possible=12, degraded=1
    )


@pytest.mark.slow
def test_points_of_a_year_are_few_and_those_of_the_last_two_hours_all(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    for at in range(0, 365 * 86400, 3600):
        writer.status(status(at))
    for at in range(365 * 86400, 365 * 86400 + 7200, 10):
        writer.status(status(at))
    points = read_points(tmp_path, RUN)
    ages = [points[-1].at - point.at for point in points]
    assert sum(age < 7200 for age in ages) == 720
    assert len(points) < 9_000 + 2_900 + 720
    assert (tmp_path / HISTORY_FILE).stat().st_size < 5_000_000


def test_a_broken_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).write_bytes(b"no database" * 1000)
    assert read_points(tmp_path, RUN) == ()
    writer = HistoryWriter(tmp_path)
    writer.status(status(0))
    assert len(read_points(tmp_path, RUN)) == 1
    assert (tmp_path / "history.broken").read_bytes().startswith(b"no database")


def test_a_file_of_another_version_is_set_aside(tmp_path: Path) -> None:
    base = sqlite3.connect(tmp_path / HISTORY_FILE)
    base.execute("PRAGMA user_version = 99")
    base.close()
    HistoryWriter(tmp_path).status(status(0))
    assert len(read_points(tmp_path, RUN)) == 1


def test_a_folder_that_is_gone_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot write .*history\.sqlite: unable to open database file"):
        HistoryWriter(tmp_path / "gone").status(status(0))
