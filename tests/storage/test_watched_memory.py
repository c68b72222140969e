"""A disk error is reported and raised, so that nothing unsaved is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.storage.run_folder import WatchedMemory


class FakeMemory:
    """A memory that keeps what it gets until its disk is full."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.is_full = False

    def keep(self, what: Any) -> None:
        if self.is_full:
            raise StateError("cannot write: No space left on device")
        self.kept.append(what)

    keep_ballots = keep_roster = keep_activity = keep


KEEP: dict[str, Callable[[WatchedMemory, Any], None]] = {
    "ballots": WatchedMemory.keep_ballots,
    "roster": WatchedMemory.keep_roster,
}


@pytest.mark.parametrize("what", KEEP)
def test_writes_are_passed_on(what: str) -> None:
    memory, deaths, writes = FakeMemory(), [], []
    KEEP[what](WatchedMemory(memory, deaths.append, soon=writes.append), what)
    assert (memory.kept, deaths, writes) == ([what], [], [])


def test_the_liveliness_record_is_written_by_the_writing_thread() -> None:
    memory, deaths, writes = FakeMemory(), [], []
    WatchedMemory(memory, deaths.append, soon=writes.append).keep_activity("record")
    assert not memory.kept
    for write in writes:
        write()
    assert memory.kept == ["record"]


@pytest.mark.parametrize("what", KEEP)
def test_a_failed_write_is_reported_and_raised(what: str) -> None:
    memory, deaths, writes = FakeMemory(), [], []
    memory.is_full = True
    with pytest.raises(StateError, match="No space left"):
        KEEP[what](WatchedMemory(memory, deaths.append, soon=writes.append), what)
    assert [str(error) for error in deaths] == ["cannot write: No space left on device"]
