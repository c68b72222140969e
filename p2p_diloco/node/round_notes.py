"""Reports that are made once per round: a round may be skipped for every span, and that is one report, not many."""

from __future__ import annotations

from p2p_diloco.ids import PeerId

_Subject = tuple[str, PeerId | None]


class RoundNotes:
    """Collects sentences until the round is over; of those on one subject the first is kept and the others counted."""

    def __init__(self) -> None:
        self._first: dict[_Subject, str] = {}
        self._more: dict[_Subject, int] = {}

    def note(self, topic: str, text: str, *, about: PeerId | None = None) -> None:
        """Keep a sentence; `about` is the peer that it blames, which must not hide behind another one."""
        subject = (topic, about)
        if subject in self._first:
            self._more[subject] = self._more.get(subject, 0) + 1
        else:
            self._first[subject] = text

    def take(self) -> list[tuple[str, str, PeerId | None]]:
        """Return topic, sentence and peer of each subject, in the order in which they came up, and begin anew."""
        first, more = self._first, self._more
        self._first, self._more = {}, {}
        return [
            (topic, _with_count(text, more.get((topic, about), 0)), about) for (topic, about), text in first.items()
        ]


def _with_count(text: str, more: int) -> str:
    if not more:
        return text
    return f"{text} (and {more} more like it)"
