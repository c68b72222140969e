"""Checkpoints and entries restore the current bytes; a failing or full disk is reported and loses nothing agreed."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import pytest
from kept_entries import damaged, log_of
from small_run import small_plan, start_states

from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, SpanId, sha256
from p2p_diloco.outer.state import SpanState, state_digest
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.storage import archive, entry_log
from p2p_diloco.storage.archive import Archive, Saving
from p2p_diloco.storage.entry_log import EntryLog

PLAN = small_plan()
SPAN = SpanId(0, 0)


@dataclass
class Kept:
    """An archive whose thread is the test itself, and its reports."""

    folder: Path
    keep: int = 3
    heard: list[tuple[str, str]] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.archive = Archive(
            self.folder,
            plan=PLAN,
            keep=self.keep,
            soon=self.waiting.append,
            report=lambda topic, text: self.heard.append((topic, text)),
        )

    def settle(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def texts(self, topic: str) -> list[str]:
        return [text for its_topic, text in self.heard if its_topic == topic]


def digest(states: dict[SpanId, SpanState]) -> bytes:
    return state_digest([states[span] for span in sorted(states)])


def trained(num_entries: int) -> tuple[dict[SpanId, list[Entry]], list[dict[SpanId, SpanState]]]:
    """Return entries by span, and the states after each number of entries."""
    start = start_states(PLAN)
    logs = {span: log_of(PLAN, span, state, num_entries) for span, state in start.items()}
    steps = [start] + [{span: states[at] for span, (_, states) in logs.items()} for at in range(num_entries)]
    return {span: entries for span, (entries, _) in logs.items()}, steps


def test_a_checkpoint_and_later_entries_restore_the_current_bytes(tmp_path: Path) -> None:
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    assert kept.archive.recall() is None
    kept.archive.save(steps[2])
    for span_entries in entries.values():
        for entry in span_entries:
            kept.archive.keep_entry(entry)
    kept.settle()
    assert kept.archive.entry_after(SPAN, entries[SPAN][4].parent) == entries[SPAN][4]
    again = Kept(tmp_path)
    recalled = again.archive.recall()
    assert recalled is not None
    assert digest(recalled) == digest(steps[5])
    assert again.texts("replay") == [f"replayed {3 * len(entries)} entries from disk on top of the checkpoint"]


def test_waiting_entries_are_written_in_batches_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, _ = trained(5)
    kept, batches = Kept(tmp_path), []
    monkeypatch.setattr(archive, "TOGETHER_BYTES", 2 * len(entries[SPAN][0].payload))
    monkeypatch.setattr(EntryLog, "keep", lambda _, batch: batches.append(batch))
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.settle()
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [entry for batch in batches for entry in batch] == entries[SPAN]


def test_a_missing_entry_ends_the_replay(tmp_path: Path) -> None:
    entries, steps = trained(4)
    kept = Kept(tmp_path)
    kept.archive.save(steps[0])
    for place, entry in enumerate(entries[SPAN]):
        if place != 2:
            kept.archive.keep_entry(entry)
    kept.settle()
    recalled = kept.archive.recall()
    assert recalled is not None
    assert recalled[SPAN].head == steps[2][SPAN].head


def test_an_entry_that_cannot_be_replayed_is_reported(tmp_path: Path) -> None:
    _, steps = trained(1)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1])
    (wrong,), _ = log_of(PLAN, SPAN, steps[1][SPAN], 1)
    kept.archive.keep_entry(replace(wrong, payload=b"short"))
    kept.settle()
    recalled = kept.archive.recall()
    assert recalled is not None
    assert digest(recalled) == digest(steps[1])
    assert "cannot be replayed" in kept.texts("entries")[0]


def test_a_broken_checkpoint_is_reported_and_the_previous_one_restores_the_same_bytes(tmp_path: Path) -> None:
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1])
    kept.archive.save(steps[3])
    for span_entries in entries.values():
        for entry in span_entries:
            kept.archive.keep_entry(entry)
    kept.settle()
    newest = kept.archive.checkpoints.paths()[-1]
    raw = bytearray(newest.read_bytes())
    raw[-5] ^= 1
    newest.write_bytes(raw)
    recalled = kept.archive.recall()
    assert recalled is not None
    assert digest(recalled) == digest(steps[5])
    assert "is not used" in kept.texts("checkpoint")[0]


def test_a_span_is_rebuilt_from_the_oldest_checkpoint(tmp_path: Path) -> None:
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1])
    kept.archive.save(steps[3] | {SPAN: damaged(steps[3][SPAN])})
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.settle()
    rebuilt = kept.archive.rebuild(SPAN, steps[4][SPAN].head.digest)
    assert rebuilt is not None
    assert digest({SPAN: rebuilt}) == digest({SPAN: steps[4][SPAN]})
    assert kept.archive.rebuild(SPAN, sha256(b"another branch")) is None


def test_a_span_is_rebuilt_as_it_was_before_a_round(tmp_path: Path) -> None:
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1])
    kept.archive.save(steps[4])
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.settle()
    tip = steps[5][SPAN].head.digest

    def before(round_index: int, tip: Digest = tip) -> bytes | None:
        rebuilt = kept.archive.rebuild_before(SPAN, round_index, tip)
        return digest({SPAN: rebuilt}) if rebuilt is not None else None

    # Entry n of this span is of round 2n; both checkpoints hold later entries than round 0 needs.
    assert before(0) is None
    for step in (1, 2, 3, 4, 5):
        assert before(2 * step - 1) == digest({SPAN: steps[step][SPAN]})
        assert before(2 * step) == digest({SPAN: steps[step][SPAN]}), "its own entry is not part of it"
    assert before(100) == digest({SPAN: steps[5][SPAN]}), "the tip had no later entry"
    assert before(100, sha256(b"later")) is None, "an entry is missing on this disk"


def test_a_gap_in_the_entries_is_not_taken_for_a_quiet_time(tmp_path: Path) -> None:
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    kept.archive.save(steps[0])
    for place, entry in enumerate(entries[SPAN]):
        if place != 2:
            kept.archive.keep_entry(entry)
    kept.settle()
    tip = steps[5][SPAN].head.digest
    assert kept.archive.rebuild_before(SPAN, 2, tip) is not None
    assert kept.archive.rebuild_before(SPAN, 6, tip) is None
    kept.archive.save(steps[3])
    rebuilt = kept.archive.rebuild_before(SPAN, 6, tip)
    assert rebuilt is not None, "a later checkpoint is past the gap"
    assert digest({SPAN: rebuilt}) == digest({SPAN: steps[3][SPAN]})


def test_an_entry_that_cannot_be_replayed_is_not_taken_for_a_later_one(tmp_path: Path) -> None:
    _, steps = trained(1)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1])
    (wrong,), _ = log_of(PLAN, SPAN, steps[1][SPAN], 1)
    kept.archive.keep_entry(replace(wrong, payload=b"short"))
    kept.settle()
    assert kept.archive.rebuild_before(SPAN, wrong.round, sha256(b"later")) is not None
    assert kept.archive.rebuild_before(SPAN, wrong.round + 1, sha256(b"later")) is None


def test_no_checkpoint_from_before_a_correction_by_others_is_used_again(tmp_path: Path) -> None:
    """The wrong bytes of the checkpoint replaced the right ones as soon as any peer differed."""
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1] | {SPAN: damaged(steps[1][SPAN])})
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.settle()
    head = steps[4][SPAN].head
    assert kept.archive.rebuild(SPAN, head.digest) is not None
    kept.archive.distrust(SPAN, height=4, is_mended=False)
    assert kept.archive.rebuild(SPAN, head.digest) is None
    assert kept.archive.rebuild_parent(SPAN, head.digest) is None
    assert kept.archive.wants_checkpoint
    kept.archive.save(steps[5])
    rebuilt = kept.archive.rebuild(SPAN, steps[5][SPAN].head.digest)
    assert rebuilt is not None
    assert digest({SPAN: rebuilt}) == digest({SPAN: steps[5][SPAN]})
    other = SpanId(1, 0)
    assert kept.archive.rebuild(other, steps[1][other].head.digest) is not None


@pytest.mark.parametrize("is_parent", [False, True])
def test_the_checkpoint_that_a_span_was_mended_from_stays_trusted_and_later_ones_do_not(
    tmp_path: Path, is_parent: bool
) -> None:
    """When the oldest checkpoint was removed, the next one gave back the flipped bit."""
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1])
    kept.archive.save(steps[3] | {SPAN: damaged(steps[3][SPAN])})
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.settle()
    rebuild = kept.archive.rebuild_parent if is_parent else kept.archive.rebuild
    before = rebuild(SPAN, steps[5][SPAN].head.digest)
    assert before is not None
    kept.archive.distrust(SPAN, height=before.head.height, is_mended=True)
    again = rebuild(SPAN, steps[5][SPAN].head.digest)
    assert again is not None
    assert digest({SPAN: again}) == digest({SPAN: before})
    kept.archive.checkpoints.paths()[0].unlink()
    assert rebuild(SPAN, steps[5][SPAN].head.digest) is None


def test_the_parent_of_a_span_is_rebuilt_from_disk(tmp_path: Path) -> None:
    entries, steps = trained(5)
    kept = Kept(tmp_path)
    kept.archive.save(steps[1])
    kept.archive.save(steps[4])
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.settle()
    before = kept.archive.rebuild_parent(SPAN, steps[4][SPAN].head.digest)
    assert before is not None
    assert digest({SPAN: before}) == digest({SPAN: steps[3][SPAN]})
    assert kept.archive.rebuild_parent(SPAN, steps[1][SPAN].head.digest) is None, "no checkpoint is that old"
    assert kept.archive.rebuild_parent(SPAN, sha256(b"another branch")) is None


def test_a_checkpoint_is_wanted_after_a_span_was_replaced(tmp_path: Path) -> None:
    entries, steps = trained(2)
    kept = Kept(tmp_path)
    kept.archive.keep_entry(entries[SPAN][0])
    kept.archive.give_up(SPAN)
    kept.settle()
    assert kept.archive.entry_after(SPAN, entries[SPAN][0].parent) is None
    assert kept.archive.wants_checkpoint
    kept.archive.save(steps[2])
    assert not kept.archive.wants_checkpoint


def test_a_failing_disk_is_reported_once_and_again_when_it_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, _ = trained(4)
    kept = Kept(tmp_path)

    def refuse(log: EntryLog, entries: Sequence[Entry]) -> None:
        raise StateError("cannot write: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(EntryLog, "keep", refuse)
        for entry in entries[SPAN][:2]:
            kept.archive.keep_entry(entry)
            kept.settle()
    for entry in entries[SPAN][2:]:
        kept.archive.keep_entry(entry)
        kept.settle()
    assert kept.texts("entries") == ["cannot write: No space left on device", "writing entries to disk again"]
    assert kept.archive.entry_after(SPAN, entries[SPAN][3].parent) == entries[SPAN][3]


def test_entries_deleted_to_make_room_are_reported(tmp_path: Path) -> None:
    entries, _ = trained(3)
    kept = Kept(tmp_path)
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.settle()
    assert kept.archive.make_room()
    kept.archive.keep_entry(entries[SPAN][2])
    kept.settle()
    assert kept.texts("entries") == ["the disk is full; deleted the entries of the oldest cycles to make room"]
    assert kept.archive.make_room()
    assert not kept.archive.make_room(), "the newest cycle is kept"


def test_on_a_full_disk_the_newest_checkpoint_and_later_entries_restore_the_last_stored_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, steps = trained(5)
    Kept(tmp_path).archive.save(steps[1])
    kept = Kept(tmp_path)
    assert kept.archive.recall() is not None
    for at in range(4):
        for log in entries.values():
            kept.archive.keep_entry(log[at])
    kept.settle()

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(entry_log.os, "pwritev", refuse)  # type: ignore[attr-defined]
        for log in entries.values():
            kept.archive.keep_entry(log[4])
        kept.settle()
    recalled = Kept(tmp_path).archive.recall()
    assert recalled is not None
    assert digest(recalled) == digest(steps[4])


def test_at_a_limit_of_the_disk_less_is_written_and_the_newest_bytes_remain(tmp_path: Path) -> None:
    entries, steps = trained(6)
    kept = Kept(tmp_path)

    def keep(numbers: range) -> None:
        for span_entries in entries.values():
            for number in numbers:
                kept.archive.keep_entry(span_entries[number])
        kept.settle()

    kept.archive.save(steps[0])
    keep(range(3))
    kept.archive.save(steps[2])
    kept.archive.limit_saving(Saving.NEWEST)
    kept.settle()
    assert len(kept.archive.checkpoints.paths()) == 1
    assert kept.archive.entry_after(SPAN, entries[SPAN][0].parent) is None, "the checkpoint holds it"
    keep(range(3, 4))
    recalled = Kept(tmp_path).archive.recall()
    assert recalled is not None
    assert digest(recalled) == digest(steps[4])
    kept.archive.limit_saving(Saving.NOTHING)
    kept.settle()
    files = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*"))
    keep(range(4, 5))
    assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*")) == files
    recalled = Kept(tmp_path).archive.recall()
    assert recalled is not None
    assert digest(recalled) == digest(steps[4])
    kept.archive.limit_saving(Saving.ALL)
    assert kept.archive.wants_checkpoint, "the entries on disk no longer lead to the present"
    kept.archive.save(steps[5])
    keep(range(5, 6))
    recalled = Kept(tmp_path).archive.recall()
    assert recalled is not None
    assert digest(recalled) == digest(steps[6])


def test_without_a_checkpoint_no_entry_is_removed_at_a_limit_of_the_disk(tmp_path: Path) -> None:
    entries, _ = trained(3)
    kept = Kept(tmp_path)
    for entry in entries[SPAN]:
        kept.archive.keep_entry(entry)
    kept.archive.limit_saving(Saving.NEWEST)
    kept.settle()
    assert [kept.archive.entry_after(SPAN, entry.parent) for entry in entries[SPAN]] == entries[SPAN]
