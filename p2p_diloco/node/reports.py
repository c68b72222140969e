"""Reports events to this peer's observer: each peer's up to its budget, and some only once per round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from p2p_diloco.errors import clean_text
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.node.budgets import Line, PeerBudgets
from p2p_diloco.node.ports import SwarmObserver
from p2p_diloco.protocol.actions import RoundClosed

CAUSED_BY_PEERS = frozenset(
    ("refused", "entry-refused", "roster-refused", "proposal-refused", "frame-refused", "content", "donor", "good-bye")
)
"""Topics of reports that a peer can cause at will with its messages; they name it and count against its budget."""
NOTED_PER_ROUND = frozenset({"skipped", "content-sound"})
"""Topics that occur for every span at once and are reported once per round."""
OWN_STATE = frozenset({"ready", "branch", "adoption"})
"""Topics about changes of this peer's state. No peer can cause many of them, and none may be left out."""


class Report(Protocol):
    """Reports an event; a peer that caused it is named, and has a budget of them."""

    def __call__(self, topic: str, text: str, peer: PeerId | None) -> None: ...


class Reports:
    """Decides what the observer is shown of events."""

    def __init__(self, observer: SwarmObserver, budgets: PeerBudgets, *, is_stranger: Callable[[PeerId], bool]) -> None:
        self.notes = RoundNotes()
        self._observer = observer
        self._budgets = budgets
        self._is_stranger = is_stranger
        self._loop = asyncio.get_running_loop()

    def report(self, topic: str, text: str, peer: PeerId | None) -> None:
        """Report a text. If `peer` caused it, the text names that peer and counts against its budget."""
        text = clean_text(text)
        if peer is None or topic in OWN_STATE:
            self._observer.report(topic, text)
            return
        name = short_peer_id(peer)
        line = Line(topic, text if name in text else f"{name}: {text}")
        is_member = not self._is_stranger(peer)
        for topic, text in self._budgets.take(peer, line, self._loop.time(), is_member=is_member):
            self._observer.report(topic, text)

    def report_of_engine(self, topic: str, text: str, caused_by: PeerId | None) -> None:
        """Report what the engine found in a message of `caused_by`, or by itself."""
        if topic in NOTED_PER_ROUND:
            self.notes.note(topic, text)
        else:
            self.report(topic, text, caused_by if topic in CAUSED_BY_PEERS else None)

    def close_round(self, closed: RoundClosed) -> None:
        """Report what was noted in the round, and its result."""
        for topic, text, about in self.notes.take():
            self.report(topic, text, about)
        for topic, text in self._budgets.flush(self._loop.time()):
            self._observer.report(topic, text)
        self._observer.round_closed(closed)


class RoundNotes:
    """Collects texts until the round is over: a round that skips every span makes one report, not many.

    For each subject it keeps the first text and counts all.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, PeerId | None], tuple[str, int]] = {}

    def note(self, topic: str, text: str, *, about: PeerId | None = None) -> None:
        """Add a text. `about` is the peer that it blames; each peer is a separate subject, so none hides another."""
        first, count = self._notes.get((topic, about), (text, 0))
        self._notes[topic, about] = (first, count + 1)

    def take(self) -> list[tuple[str, str, PeerId | None]]:
        """Return topic, text and peer of each subject, in order of their first texts, and start over."""
        notes, self._notes = self._notes, {}
        return [
            (topic, text if count == 1 else f"{text} (and {count - 1} more like it)", about)
            for (topic, about), (text, count) in notes.items()
        ]
