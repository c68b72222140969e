"""A disk that refuses is told, and nothing is said that was not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.storage.watched_memory import WatchedMemory


class FakeMemory:
    """Keeps what it is given, until its disk is full."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.is_full = False

    def keep(self, what: Any) -> None:
        if self.is_full:
            raise StateError("cannot write: No space left on device")
        self.kept.append(what)

    keep_ballots = keep_roster = keep_liveliness = keep


KEEP: dict[str, Callable[[WatchedMemory, Any], None]] = {
    "ballots": WatchedMemory.keep_ballots,
    "roster": WatchedMemory.keep_roster,
}


@pytest.mark.parametrize("what", KEEP)
def test_what_is_kept_is_kept(what: str) -> None:
    memory, deaths, writes = FakeMemory(), [], []
    KEEP[what](WatchedMemory(memory, deaths.append, soon=writes.append), what)
    assert (memory.kept, deaths, writes) == ([what], [], [])


def test_the_record_of_a_line_is_written_by_the_thread_that_writes() -> None:
    memory, deaths, writes = FakeMemory(), [], []
    WatchedMemory(memory, deaths.append, soon=writes.append).keep_liveliness("record")
    assert not memory.kept
    for write in writes:
        write()
    assert memory.kept == ["record"]


@pytest.mark.parametrize("what", KEEP)
def test_a_refusal_is_told_and_raised(what: str) -> None:
    memory, deaths, writes = FakeMemory(), [], []
    memory.is_full = True
    with pytest.raises(StateError, match="No space left"):
        KEEP[what](WatchedMemory(memory, deaths.append, soon=writes.append), what)
    assert [str(error) for error in deaths] == ["cannot write: No space left on device"]
