"""Reports that are made once per round: a round that skips every span makes one report, not many."""

from __future__ import annotations

from p2p_diloco.ids import PeerId

_Subject = tuple[str, PeerId | None]


class RoundNotes:
    """Collects texts until the round is over. For each subject it keeps the first and counts the others."""

    def __init__(self) -> None:
        self._first: dict[_Subject, str] = {}
        self._more: dict[_Subject, int] = {}

    def note(self, topic: str, text: str, *, about: PeerId | None = None) -> None:
        """Add a text. `about` is the peer that it blames; each peer is a separate subject, so none hides another."""
        subject = (topic, about)
        if subject in self._first:
            self._more[subject] = self._more.get(subject, 0) + 1
        else:
            self._first[subject] = text

    def take(self) -> list[tuple[str, str, PeerId | None]]:
        """Return topic, text and peer of each subject, in order of their first texts, and start over."""
        first, more = self._first, self._more
        self._first, self._more = {}, {}
        return [
            (topic, _with_count(text, more.get((topic, about), 0)), about) for (topic, about), text in first.items()
        ]


def _with_count(text: str, more: int) -> str:
    if not more:
        return text
    return f"{text} (and {more} more like it)"
