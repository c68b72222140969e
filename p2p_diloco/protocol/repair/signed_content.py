"""Content digests that a voter signs for one asker, so that peers that are linked with both can carry them.

Who joins may be linked with a few members only. It takes a state that more than half of the electorate named, so it
asks voters that it has no link to through the peers that it has links to. Those can withhold an answer, not change it.
Nobody is linked with all voters of a large grid, so who carries a question and has no link to its voter passes it to a
member that should have one; from there it goes to the voter or nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.wire.messages import SignedContent, SignedContentRequest

FIRST_CARRIERS = 2
"""Linked peers that carry a question at first; twice as many each time that nobody answers, until all do."""
LATE_ANSWERS = 4.0
"""An answer is worth carrying for so many times as long as a question waits before it is asked again."""


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A question to a voter: its number, when it was first asked, how often, and when it is to be asked again.

    `all_at` is when it had been sent through all carriers.
    """

    nonce: int
    first_at: float
    times: int
    again_at: float
    all_at: float = math.inf


class FarVoters:
    """Asks voters that are not linked, through others, and keeps their signed answers. A state machine without I/O.

    Args:
        draw_nonce: returns a number that nobody knows before; given the time.
        num_spans: spans of each fragment.
        answer_seconds: after this long without an answer a question goes through more peers.
        pause_seconds: from one answer to the next question of the same voter about the same fragment.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        draw_nonce: Callable[[float], int],
        num_spans: Sequence[int],
        answer_seconds: float,
        pause_seconds: float,
    ) -> None:
        self._me = me
        self._draw_nonce = draw_nonce
        self._num_spans = tuple(num_spans)
        self._answer_seconds = answer_seconds
        self._pause_seconds = pause_seconds
        self._asked: dict[tuple[int, PeerId], _Asked] = {}
        self._rests_until: dict[tuple[int, PeerId], float] = {}
        self._signed: dict[PeerId, tuple[bool, float]] = {}
        self.rosters: dict[PeerId, tuple[Digest, float]] = {}
        """Which roster each has signed that it goes by, and when that came."""

    def ask(
        self, fragments: Iterable[int], voters: Iterable[PeerId], carriers: Sequence[PeerId], now: float
    ) -> list[tuple[PeerId, SignedContentRequest]]:
        """Return what to ask now, and through whom. A question keeps its number until it is answered."""
        questions: list[tuple[PeerId, SignedContentRequest]] = []
        for fragment, voter in [(fragment, voter) for fragment in fragments for voter in voters]:
            key = (fragment, voter)
            asked = self._asked.get(key)
            if not carriers or now < (asked.again_at if asked is not None else self._rests_until.get(key, -math.inf)):
                continue
            if asked is not None and now - asked.first_at > LATE_ANSWERS * self._answer_seconds * len(carriers):
                asked.nonce, asked.first_at = self._draw_nonce(now), now  # somebody may have kept an old answer
            if asked is None:
                asked = self._asked[key] = _Asked(nonce=self._draw_nonce(now), first_at=now, times=0, again_at=now)
            request = SignedContentRequest(fragment=fragment, voter=voter, asker=self._me, nonce=asked.nonce)
            num, first = min(FIRST_CARRIERS << min(asked.times, 16), len(carriers)), asked.nonce % len(carriers)
            questions += [(carrier, request) for carrier in (*carriers[first:], *carriers[:first])[:num]]
            asked.times, asked.again_at = asked.times + 1, now + self._answer_seconds
            if num == len(carriers):
                asked.all_at = min(asked.all_at, now)
        return questions

    def have_all_been_asked(self, voters: Iterable[PeerId], now: float) -> bool:
        """Return whether every question to these voters was answered, or has been sent through all carriers."""
        done = {voter for voter, (_, at) in self._signed.items() if now - at <= self._pause_seconds}
        done.update(voter for (_, voter), asked in self._asked.items() if now >= asked.all_at + self._answer_seconds)
        return done.issuperset(voters)

    def forget(self) -> None:
        """Forget what was asked and answered: the clock was far ahead, and all of it is of a time to come."""
        for table in (self._asked, self._rests_until, self._signed, self.rosters):
            table.clear()

    def expects(self, answer: SignedContent) -> bool:
        """Return whether an answer that was carried here has the number of a question, and a fitting length."""
        asked = self._asked.get((answer.fragment, answer.voter))
        fits = asked is not None and len(answer.digests) in (0, self._num_spans[answer.fragment])
        return fits and asked is not None and asked.nonce == answer.nonce

    def take(self, answer: SignedContent, now: float) -> float:
        """Note an answer that is expected and signed; return when it was asked for."""
        key = (answer.fragment, answer.voter)
        self._rests_until[key] = now + self._pause_seconds
        self._signed[answer.voter] = (bool(answer.digests), now)
        self.rosters[answer.voter] = (answer.roster, now)
        return self._asked.pop(key).first_at

    def signed(self, since: float, *, holds: bool) -> list[PeerId]:
        """Return voters that have signed since then that they hold the state, or that they do not."""
        return [voter for voter, (does, at) in self._signed.items() if does == holds and at >= since]


@dataclass(slots=True, kw_only=True)
class _Carried:
    """A question under way: its number, when it was passed on last, and how many were before it.

    `awaited` names whom it went to and has not answered, and when it went there.
    """

    nonce: int
    at: float
    times: int
    awaited: dict[PeerId, float]


class Carrier:
    """Questions that this peer carries for others, one at a time for each sender, asker, voter and fragment. No I/O."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._carried: dict[tuple[PeerId, PeerId, int], dict[PeerId, _Carried]] = {}
        self._most = 64

    def carry(
        self, sender: PeerId, question: SignedContentRequest, ways: Sequence[PeerId], now: float
    ) -> PeerId | None:
        """Return whom to pass a question on to, each time the next of `ways`; None: nobody, or it comes too often."""
        key = (question.voter, question.asker, question.fragment)
        before = self._carried.get(key, {}).get(sender)
        if not ways or (before is not None and now < before.at + self._seconds):
            return None
        self._forget_old(now)
        times = before.times + 1 if before is not None else 0
        to = ways[(question.nonce + times) % len(ways)]
        awaited = before.awaited if before is not None and before.nonce == question.nonce else {}
        carried = _Carried(nonce=question.nonce, at=now, times=times, awaited={**awaited, to: now})
        self._carried.setdefault(key, {})[sender] = carried
        return to

    def bring(self, sender: PeerId, answer: SignedContent, now: float) -> list[PeerId]:
        """Return whom to pass an answer on to: once from each to whom the question went.

        Where it was asked again since, the first answer may come yet; and one may be forged, which only the asker sees.
        """
        waiting = []
        for peer, carried in self._carried.get((answer.voter, answer.asker, answer.fragment), {}).items():
            went_at = carried.awaited.get(sender, -math.inf)
            if carried.nonce == answer.nonce and now < went_at + LATE_ANSWERS * self._seconds:
                del carried.awaited[sender]
                waiting.append(peer)
        return waiting

    def _forget_old(self, now: float) -> None:
        if len(self._carried) < self._most:
            return
        late = now - LATE_ANSWERS * self._seconds
        for key, senders in list(self._carried.items()):
            self._carried[key] = {peer: carried for peer, carried in senders.items() if carried.at > late}
            if not self._carried[key]:
                del self._carried[key]
        self._most = max(64, 2 * len(self._carried))
