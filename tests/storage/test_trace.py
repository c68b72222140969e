"""Traces are read back as written; a torn end is skipped, and disk errors are reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.storage.trace import TRACE_FILE, Trace
from research.trace import chosen_spans, read_trace

SPAN, ENTRY = SpanId(1, 2), Digest(b"\1" * 32)


def test_a_trace_of_two_starts_is_read_back(tmp_path: Path) -> None:
    first = Trace(tmp_path)
    first.began(0)
    first.loaded({SPAN: ENTRY})
    first.contributed(3, 7, 1)
    second = Trace(tmp_path)
    second.began(1 << 40)
    second.absorbed(5, SPAN, ENTRY, True)
    second.took(6, SPAN, ENTRY)
    assert list(read_trace(tmp_path)) == [
        {"what": "began", "position": 0},
        {"what": "loaded", "heads": [[1, 2, ENTRY.hex()]]},
        {"what": "contributed", "steps": 3, "round": 7, "fragment": 1},
        {"what": "began", "position": 1 << 40},
        {"what": "absorbed", "steps": 5, "span": [1, 2], "entry": ENTRY.hex(), "own": True},
        {"what": "took", "steps": 6, "span": [1, 2], "head": ENTRY.hex()},
    ]


def test_a_torn_end_is_skipped_and_a_torn_middle_is_refused(tmp_path: Path) -> None:
    Trace(tmp_path).began(0)
    path = tmp_path / TRACE_FILE
    whole = path.read_text()
    path.write_text(whole + '{"what":"abso')
    assert len(list(read_trace(tmp_path))) == 1
    path.write_text('{"what":"abso\n' + whole)
    with pytest.raises(StateError, match=r"line 1 of .* is not a trace record"):
        list(read_trace(tmp_path))


def test_disk_errors_are_reported(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="was the peer started with keep_trace"):
        list(read_trace(tmp_path))
    with pytest.raises(StateError, match=r"cannot write .*; free some space"):
        Trace(tmp_path / "missing").began(0)
    if Path("/dev/full").exists() and os.access("/dev/full", os.W_OK):
        (tmp_path / TRACE_FILE).symlink_to("/dev/full")
        with pytest.raises(StateError, match="free some space or leave keep_trace out"):
            Trace(tmp_path).began(0)


def test_a_contribution_of_some_spans_names_them(tmp_path: Path) -> None:
    Trace(tmp_path).contributed(3, 7, 1, frozenset({SpanId(1, 4), SpanId(1, 0)}))
    Trace(tmp_path).contributed(4, 8, 1, frozenset())
    Trace(tmp_path).contributed(5, 9, 1)
    chosen = [chosen_spans(line) for line in read_trace(tmp_path)]
    assert chosen == [{SpanId(1, 0), SpanId(1, 4)}, frozenset(), None]
