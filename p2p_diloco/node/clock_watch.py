"""Wall clocks that are far from those of others, by what each peer tells about its own. A state machine without I/O.

A run keeps a time of its own, so a wrong wall clock costs nothing there. But records of addresses carry wall times, and
the owner of the machine should know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.rate import counted
from p2p_diloco.wording import format_seconds

MISSET_SECONDS = 60.0
MOST_SHOWN = 3


class ClockWatch:
    """Names the clocks that differ from those of more than half of the others, with the amount.

    Of two clocks nobody can tell which is right.

    Args:
        me: this peer.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._told: dict[PeerId, float] = {}
        self.sentence = ""
        """The clocks that are wrong at present; empty if none is."""
        self.correction_seconds = 0.0
        """Seconds to add to this machine's clock before a comparison with times of others; 0 if it is right."""

    def look(
        self, behind_seconds: Mapping[PeerId, float], members: Collection[PeerId], *, yields: bool = True
    ) -> list[tuple[PeerId, str]]:
        """Return sentences about clocks that were not known to be this far off, each with its peer.

        Args:
            behind_seconds: by how much each peer's clock is behind the run's time; negative: ahead.
            members: the peers to compare with. Others may be named, but any number of strangers proves nothing.
            yields: whether this peer takes the other's clock for right if there is only one to compare with.
        """
        behind = {peer: seconds for peer, seconds in behind_seconds.items() if peer in members or peer == self._me}
        off = {peer: self._off_by(peer, seconds, behind) for peer, seconds in behind_seconds.items()}
        misset = {peer: seconds for peer, seconds in off.items() if abs(seconds) > MISSET_SECONDS}
        sentences = {peer: self._sentence(peer, seconds, behind) for peer, seconds in sorted(misset.items())}
        shown = sorted(sentences, key=lambda peer: (peer != self._me, peer not in behind, peer))[:MOST_SHOWN]
        self.sentence = "; ".join(dict.fromkeys(sentences[peer] for peer in shown))
        news = [peer for peer in misset if abs(misset[peer] - self._told.get(peer, 0.0)) > MISSET_SECONDS]
        self._told = misset
        correction = misset.get(self._me, 0.0) if yields or len(behind) > 2 else 0.0
        if abs(correction - self.correction_seconds) > MISSET_SECONDS / 2:
            self.correction_seconds = correction
        return list({sentences[peer]: (peer, sentences[peer]) for peer in news}.values())

    @staticmethod
    def _off_by(peer: PeerId, seconds: float, behind: Mapping[PeerId, float]) -> float:
        """Return the difference from the nearest clock, if the clock differs from most others, and 0 otherwise."""
        differences = [seconds - others for other, others in behind.items() if other != peer]
        num_far = sum(abs(difference) > MISSET_SECONDS for difference in differences)
        return min(differences, key=abs) if 2 * num_far > len(differences) else 0.0

    def _sentence(self, peer: PeerId, off_seconds: float, behind: Mapping[PeerId, float]) -> str:
        span = format_seconds(round(abs(off_seconds), -1))
        others = [other for other in behind if other != peer]
        if len(others) == 1:
            names = " and ".join(map(self._name, sorted((peer, *others), key=lambda one: (one != self._me, one))))
            return f"the clocks of {names} are {span} apart; one of them is wrong"
        how = "behind" if off_seconds > 0 else "ahead of"
        advice = "; set it right" if peer == self._me else ""
        return f"the clock of {self._name(peer)} is {span} {how} those of {counted(len(others), 'other')}{advice}"

    def _name(self, peer: PeerId) -> str:
        return "this machine" if peer == self._me else short_peer_id(peer)
