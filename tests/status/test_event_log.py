"""`events.jsonl` has one line per event, in order, and a torn line affects no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.status.event_log import (
    EVENTS_FILE,
    MOST_EVENT_BYTES,
    OLD_EVENTS_FILE,
    PeerEvent,
    append_event,
    event_line,
    format_event,
)
from tests.status.kept_events import MAX_LINE_CHARACTERS, parse_event, read_events

READY = PeerEvent(time=1.5, topic="ready", text="compared with 2 peers", figures={"peers": 2})
SKIPPED = PeerEvent(time=2.5, topic="skipped", text="fragment 0 span 1", figures={"share": 0.5, "why": "nobody"})


def test_events_are_read_in_order(tmp_path: Path) -> None:
    append_event(tmp_path, READY)
    append_event(tmp_path, SKIPPED)
    assert read_events(tmp_path) == (READY, SKIPPED)


def test_only_the_requested_topics_are_read(tmp_path: Path) -> None:
    append_event(tmp_path, READY)
    append_event(tmp_path, SKIPPED)
    assert read_events(tmp_path, "skipped", "branch") == (SKIPPED,)


def test_a_line_break_in_a_text_does_not_break_the_line() -> None:
    event = PeerEvent(time=0.0, topic="link", text="lost\nthe\u2028link")
    assert "\n" not in format_event(event)
    assert parse_event(format_event(event)) == event


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    append_event(tmp_path, READY)
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": 2.0, "top')
    append_event(tmp_path, SKIPPED)
    assert read_events(tmp_path) == (READY, SKIPPED)


@pytest.mark.parametrize(
    ("topic", "text", "line"),
    [
        ("good-bye", "12D3..9fQ leaves", "good-bye: 12D3..9fQ leaves"),
        ("finished", "finished with state ab", "finished with state ab"),
        ("checkpoints", "checkpoints go to peer-1", "checkpoints go to peer-1"),
        ("reach", "reachable at 192.0.2.10:31337", "reachable at 192.0.2.10:31337"),
        ("roster", "round 3: no contribution", "roster: round 3: no contribution"),
    ],
)
def test_a_line_for_people_names_its_topic_once(topic: str, text: str, line: str) -> None:
    assert event_line(PeerEvent(time=0.0, topic=topic, text=text)) == line


@pytest.mark.parametrize(
    "line", ["", "  ", "{", "3", "[]", "{}", '{"time": null, "topic": "a", "text": "b", "figures": {}}', "[" * 60_000]
)
def test_lines_that_are_not_events_are_skipped(line: str) -> None:
    assert parse_event(line) is None


def test_a_line_that_is_too_long_is_skipped() -> None:
    assert parse_event(format_event(PeerEvent(time=0.0, topic="a", text="b" * MAX_LINE_CHARACTERS))) is None


def test_numbers_that_are_not_finite_are_written_as_text() -> None:
    event = parse_event(format_event(PeerEvent(time=0.0, topic="a", text="b", figures={"loss": float("nan")})))
    assert event is not None
    assert event.figures == {"loss": "nan"}


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == ()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot write .*events\.jsonl: No such file or directory; check"):
        append_event(tmp_path / "gone", READY)


def test_a_long_log_is_begun_anew_and_the_last_one_is_kept(tmp_path: Path) -> None:
    for time in range(3):
        append_event(tmp_path, PeerEvent(time=float(time), topic="round", text="over"))
        with (tmp_path / EVENTS_FILE).open("ab") as file:
            file.truncate(MOST_EVENT_BYTES - 1)
            file.write(b"\n")
    assert (tmp_path / EVENTS_FILE).read_bytes().startswith(b'{"time": 2.0')
    assert (tmp_path / OLD_EVENTS_FILE).read_bytes().startswith(b'{"time": 1.0')
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((EVENTS_FILE, OLD_EVENTS_FILE))
