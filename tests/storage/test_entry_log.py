"""Entries are read from disk unchanged or not at all; a torn write loses no whole entry."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from kept_entries import log_of
from small_run import small_plan, start_states

from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.storage import entry_log
from p2p_diloco.storage.entry_log import EntryLog

PLAN = small_plan()
SPAN, OTHER = SpanId(0, 0), SpanId(1, 1)
START = start_states(PLAN)
ENTRIES, _ = log_of(PLAN, SPAN, START[SPAN], 6)


def log_in(folder: Path, keep_cycles: int = 16) -> EntryLog:
    return EntryLog(folder, keep_cycles=keep_cycles)


def filled(folder: Path, entries: list[Entry] = ENTRIES, keep_cycles: int = 16) -> EntryLog:
    log = log_in(folder, keep_cycles)
    log.keep(entries)
    log.sync()
    return log


def found(log: EntryLog, entries: list[Entry] = ENTRIES) -> list[Entry | None]:
    return [log.entry_after(entry.span, entry.parent) for entry in entries]


def test_entries_are_readable_at_once_and_after_a_restart(tmp_path: Path) -> None:
    others, _ = log_of(PLAN, OTHER, START[OTHER], 3)
    both = [*ENTRIES, *others]
    assert found(filled(tmp_path, both), both) == both
    assert found(log_in(tmp_path), both) == both
    assert log_in(tmp_path).entry_after(OTHER, sha256(b"unknown")) is None


def test_a_repeated_entry_is_kept_once(tmp_path: Path) -> None:
    log = filled(tmp_path)
    before = sum(path.stat().st_size for path in tmp_path.iterdir())
    log.keep(ENTRIES)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == before
    assert log.num_entries() == len(ENTRIES)


def test_an_entry_repeated_in_one_call_is_written_once(tmp_path: Path) -> None:
    filled(tmp_path / "once", ENTRIES)
    log = filled(tmp_path / "twice", [*ENTRIES, *ENTRIES])
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in ("once", "twice")]
    assert sizes[0] == sizes[1]
    assert found(log) == ENTRIES


def test_entries_below_the_kept_heights_are_deleted(tmp_path: Path) -> None:
    log = filled(tmp_path, keep_cycles=2)
    assert found(log) == [None] * 4 + ENTRIES[4:]
    assert len(list(tmp_path.iterdir())) == 2
    log.keep([ENTRIES[0]])
    assert found(log)[0] is None, "too old to be kept"
    assert found(log_in(tmp_path, 2)) == [None] * 4 + ENTRIES[4:]


@pytest.mark.parametrize("far", [2**60, 2**62 - 1, -(2**62)])
def test_an_entry_with_a_distant_round_does_not_empty_the_log(tmp_path: Path, far: int) -> None:
    others, _ = log_of(PLAN, OTHER, START[OTHER], 3)
    claims = replace(ENTRIES[-1], round=far)
    log = filled(tmp_path, [*ENTRIES[:-1], *others, claims], keep_cycles=4)
    log.keep([others[-1]])
    for each in (log, log_in(tmp_path, 4)):
        assert found(each, others) == others
        assert found(each, ENTRIES[2:-1]) == ENTRIES[2:-1]


def test_entries_of_spans_that_lag_or_are_far_ahead_are_kept(tmp_path: Path) -> None:
    """A transfer may leave a span at any height; the other spans keep their entries."""
    lagging, _ = log_of(PLAN, OTHER, START[OTHER], 2)
    ahead = replace(log_of(PLAN, SpanId(0, 1), START[SpanId(0, 1)], 1)[0][0], height=2**62 - 1)
    log = filled(tmp_path, [*lagging, *ENTRIES, ahead], keep_cycles=2)
    for each in (log, log_in(tmp_path, 2)):
        assert found(each, [*lagging, ahead]) == [*lagging, ahead]
        assert found(each) == [None] * 4 + ENTRIES[4:]
    assert sorted(int(path.stem[7:]) for path in tmp_path.iterdir()) == [1, 2, 5, 6, 2**62 - 1]


def test_a_discarded_span_is_not_served_any_more_even_after_a_restart(tmp_path: Path) -> None:
    others, _ = log_of(PLAN, OTHER, START[OTHER], 3)
    branch, _ = log_of(PLAN, SPAN, START[SPAN], 2, seed=9)
    log = filled(tmp_path, [*ENTRIES, *others])
    log.give_up(SPAN)
    log.give_up(SpanId(0, 1))
    log.keep(branch)
    for each in (log, log_in(tmp_path)):
        assert found(each, branch) == branch
        assert found(each)[1:] == [None] * 5
        assert found(each, others) == others


def test_the_log_of_a_peer_that_may_be_running_is_not_changed(tmp_path: Path) -> None:
    filled(tmp_path)
    path = sorted(tmp_path.iterdir())[-1]
    under_way = path.read_bytes()[:-8]
    path.write_bytes(under_way)
    log = EntryLog(tmp_path, keep_cycles=16, mends=False)
    assert found(log) == [*ENTRIES[:-1], None]
    assert path.read_bytes() == under_way


@pytest.mark.parametrize("cut", [1, 8, 19, 100])
def test_a_torn_end_is_cut_off_and_later_entries_follow_the_last_whole_one(tmp_path: Path, cut: int) -> None:
    fragment_entries = [log_of(PLAN, SpanId(0, index), START[SpanId(0, index)], 1)[0][0] for index in range(3)]
    filled(tmp_path, fragment_entries)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    log = log_in(tmp_path)
    assert found(log, fragment_entries) == [*fragment_entries[:2], None]
    log.keep([fragment_entries[2]])
    for each in (log, log_in(tmp_path)):
        assert found(each, fragment_entries) == fragment_entries


def test_a_flipped_bit_costs_one_entry(tmp_path: Path) -> None:
    fragment_entries = [log_of(PLAN, SpanId(0, index), START[SpanId(0, index)], 1)[0][0] for index in range(3)]
    log = filled(tmp_path, fragment_entries)
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    expected = [fragment_entries[0], None, fragment_entries[2]]
    for each in (log, log_in(tmp_path)):
        assert found(each, fragment_entries) == expected
    log = log_in(tmp_path)
    log.keep([fragment_entries[1]])
    for each in (log, log_in(tmp_path)):
        assert found(each, fragment_entries) == fragment_entries


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\xff" * 1000, b"\0" * 1000, b"\x80\x04pickle" * 9])
def test_foreign_bytes_are_not_entries(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "height-00000000000000000000.log").write_bytes(content)
    (tmp_path / "notes.txt").write_bytes(content)
    log = log_in(tmp_path)
    assert log.num_entries() == 0
    log.keep([ENTRIES[0]])
    assert found(log_in(tmp_path))[0] == ENTRIES[0]


def test_a_valid_frame_without_an_entry_is_skipped(tmp_path: Path) -> None:
    filled(tmp_path, ENTRIES[:1])
    (path,) = tmp_path.iterdir()
    checksum = sha256((2).to_bytes(8, "little"), sha256(b"hello"))[:8]
    path.write_bytes(path.read_bytes() + struct.pack("<IQ8s", 5, 2, checksum) + b"hello")
    assert log_in(tmp_path).num_entries() == 1


def test_a_missing_file_is_not_an_error(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.keep([ENTRIES[0]])
    for path in tmp_path.iterdir():
        path.unlink()
    assert found(log)[0] is None
    log.sync()
    log = filled(tmp_path / "other")
    for path in (tmp_path / "other").iterdir():
        path.unlink()
    log.make_room()
    assert found(log) == [None] * 6


def refuse_writes(monkeypatch: pytest.MonkeyPatch, number: int, *, after_bytes: int = 0, times: int = 10**9) -> None:
    """Let writes fail, after some bytes, the given number of times."""
    real, left, is_begun = os.pwritev, [times], [False]

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        if left[0] <= 0:
            return real(descriptor, buffers, offset)
        if after_bytes and not is_begun[0]:
            is_begun[0] = True
            return os.pwrite(descriptor, b"".join(buffers)[:after_bytes], offset)
        left[0] -= 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(entry_log.os, "pwritev", pwritev)  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", [1, 7, 100, 1000])
def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        return os.pwrite(descriptor, b"".join(buffers)[:most], offset)

    monkeypatch.setattr(entry_log.os, "pwritev", pwritev)  # type: ignore[attr-defined]
    for each in (filled(tmp_path), log_in(tmp_path)):
        assert found(each) == ENTRIES


def test_a_full_disk_is_reported_and_stored_entries_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(tmp_path, ENTRIES[:1])
    with monkeypatch.context() as patch:
        refuse_writes(patch, errno.ENOSPC, after_bytes=30)
        with pytest.raises(StateError, match="No space left on device; stored entries are still served"):
            log.keep([ENTRIES[1]])
    assert found(log, ENTRIES[:2]) == [ENTRIES[0], None]
    log.keep([ENTRIES[1]])
    for each in (log, log_in(tmp_path)):
        assert found(each, ENTRIES[:2]) == ENTRIES[:2]


def test_on_a_full_disk_the_oldest_cycle_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(tmp_path, ENTRIES[:3])
    refuse_writes(monkeypatch, errno.ENOSPC, times=1)
    log.keep([ENTRIES[3]])
    assert found(log, ENTRIES[:4]) == [None, *ENTRIES[1:4]]
    assert log.num_given_up == 1


def test_on_a_full_disk_no_later_cycle_is_deleted_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, ENTRIES[2:4])
    refuse_writes(monkeypatch, errno.ENOSPC, times=1)
    with pytest.raises(StateError, match="No space left on device"):
        log.keep([ENTRIES[1]])
    assert found(log, ENTRIES[1:4]) == [None, *ENTRIES[2:4]]
    assert log.num_given_up == 0


@pytest.mark.parametrize(("checkpointed", "given_up"), [(0, 0), (1, 1), (2, 2), (5, 3)])
def test_on_a_full_disk_entries_since_the_checkpoint_are_not_deleted_for_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointed: int, given_up: int
) -> None:
    first = ENTRIES[0].height
    log = filled(tmp_path, ENTRIES[:4])
    log.note_checkpoint({SPAN: first - 1 + checkpointed})
    refuse_writes(monkeypatch, errno.ENOSPC)
    with pytest.raises(StateError, match="No space left on device"):
        log.keep([ENTRIES[4]])
    assert found(log, ENTRIES[:4]) == [None] * given_up + ENTRIES[given_up:4]
    assert log.num_given_up == given_up
    assert log.make_room() == (given_up < 3), "there is still room for votes and rosters"


def test_other_disk_errors_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(tmp_path, ENTRIES[:3])
    refuse_writes(monkeypatch, errno.EIO)
    with pytest.raises(StateError, match="Input/output error"):
        log.keep([ENTRIES[3]])
    with pytest.raises(StateError, match="Input/output error"):
        log.give_up(SPAN)
    assert log.num_given_up == 0


def test_a_failed_sync_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    log = log_in(tmp_path)
    log.keep([ENTRIES[0]])
    monkeypatch.setattr(entry_log, "sync_file", refuse)
    with pytest.raises(StateError, match="Input/output error"):
        log.sync()
    log.sync()


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match="check the disk"):
        log_in(tmp_path / "file")
