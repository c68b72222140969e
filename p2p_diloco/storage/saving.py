"""Write checkpoints: soon after the peer is ready, then often enough that the stored entries continue from them.

A peer that cannot save its ballots or rosters ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId
from p2p_diloco.node.surroundings import PeerMemory
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.membership.histories import Liveliness
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.disk_rule import Saving

LONGEST_PAUSE_SECONDS = 300.0
SHORTEST_PAUSE_SECONDS = 10.0
LOOK_SECONDS = 1.0


def pause_between_checkpoints(rules: RunRules, keep: int, *, archives: bool = False) -> float:
    """Return the seconds between checkpoints, such that even the oldest of `keep` is newer than the oldest entry.

    Args:
        archives: whether the oldest must also be older than the last whole cycle, from which an archivist exports.
    """
    retained_seconds = rules.retained_cycles * rules.clock.num_fragments * rules.clock.round_seconds
    pause_seconds = min(max(retained_seconds / (keep + 1), SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
    return max(pause_seconds, rules.cycle_seconds) if archives else pause_seconds


class Saver:
    """Writes checkpoints; a failed write is reported and retried.

    Args:
        states: returns a live view of all spans, or None while one is missing.
        is_ready: returns whether this peer holds the agreed state.
        saved: called after each checkpoint.
        report: called with `(topic, text)` if a write fails.
    """

    def __init__(
        self,
        archive: Archive,
        *,
        states: Callable[[], Mapping[SpanId, SpanState] | None],
        is_ready: Callable[[], bool],
        pause_seconds: float,
        saved: Callable[[], None] = lambda: None,
        report: Callable[[str, str], None],
    ) -> None:
        self._archive = archive
        self._states = states
        self._is_ready = is_ready
        self._pause_seconds = pause_seconds
        self._saved = saved
        self._report = report
        self._writing = threading.Lock()

    async def run(self) -> None:
        """Save periodically until cancelled: soon after the start, and after a span was replaced."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._is_ready() and (loop.time() >= due or self._archive.wants_checkpoint):
                await self.save()
                due = loop.time() + self._pause_seconds

    async def save(self) -> None:
        """Save now if all spans are present, and the limits of the machine's owner allow it."""
        states = self._states()
        if states is None or self._archive.saving is Saving.NOTHING:
            return
        try:
            await asyncio.to_thread(self._write, states)
        except StateError as error:
            self._report("checkpoint", str(error))
        else:
            self._saved()

    def _write(self, states: Mapping[SpanId, SpanState]) -> None:
        with self._writing:  # a thread goes on writing although the task that waits for it is cancelled
            self._archive.save(states)


class WatchedMemory:
    """A `PeerMemory` that reports failed writes, besides raising.

    The transport swallows exceptions of its listener, because one peer's message must not stop everything. Without the
    report, the peer would continue without being able to vote, for no visible reason.

    Args:
        memory: the memory to write to.
        died: called once for each failed write.
        soon: runs functions on the writer thread, one at a time.
    """

    def __init__(
        self, memory: PeerMemory, died: Callable[[StateError], None], *, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._memory = memory
        self._died = died
        self._soon = soon

    def keep_ballots(self, ballots: Ballots) -> None:
        """Save this peer's ballots."""
        self._watch(lambda: self._memory.keep_ballots(ballots))

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Save a certified roster."""
        self._watch(lambda: self._memory.keep_roster(certified))

    def keep_liveliness(self, liveliness: Liveliness) -> None:
        """Schedule saving the liveliness record: it changes every round, and correctness does not depend on it."""
        self._soon(lambda: self._memory.keep_liveliness(liveliness))

    def _watch(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except StateError as error:
            self._died(error)
            raise
