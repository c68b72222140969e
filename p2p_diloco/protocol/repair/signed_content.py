"""Content digests that a voter signs for one requester, so that other peers can relay them.

A joiner may have links to a few members only, and takes only a state that more than half of the electorate named. So it
asks voters that it has no link to through the peers that it has links to. Those can withhold an answer, but not change
it. In a large grid no peer has links to all voters. A relay without a link to the voter passes the question to a member
that should have one; that member passes it to the voter or drops it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.repair.fetcher import CatchUpRules
from p2p_diloco.protocol.wire.messages import SignedContent, SignedContentRequest

FIRST_RELAYS = 2
"""Number of linked peers that relay a question at first. It doubles each time that no answer arrives, up to all."""
LATE_ANSWERS = 4.0
"""Time for which an answer is relayed, as a multiple of the time after which a question is repeated."""


@dataclass(slots=True)
class _Question:
    """A question to a voter.

    Attributes:
        first_at: when it was first sent with this number.
        again_at: when to send it again.
        times: how often it was sent.
        all_at: when it had been sent through all relays.
    """

    nonce: int
    first_at: float
    again_at: float
    times: int = 0
    all_at: float = math.inf

    def renumber(self, nonce: int, now: float) -> None:
        """Give it another number: a relay may have kept an old answer."""
        self.nonce, self.first_at = nonce, now

    def send(self, relays: Sequence[PeerId], now: float, again_at: float) -> list[PeerId]:
        """Return the relays to send it through now, and note that it is sent."""
        num, first = min(FIRST_RELAYS << min(self.times, 16), len(relays)), self.nonce % len(relays)
        self.times, self.again_at = self.times + 1, again_at
        if num == len(relays):
            self.all_at = min(self.all_at, now)
        return [*relays[first:], *relays[:first]][:num]


class IndirectVoters:
    """Asks voters without a link through other peers, and keeps their signed answers. A state machine without I/O.

    Args:
        draw_nonce: returns an unpredictable number, given the time.
    """

    def __init__(self, *, me: PeerId, draw_nonce: Callable[[float], int], rules: CatchUpRules) -> None:
        self._me = me
        self._draw_nonce = draw_nonce
        self._rules = rules
        self._questions: dict[tuple[int, PeerId], _Question] = {}
        self._rests_until: dict[tuple[int, PeerId], float] = {}
        self._signed: dict[PeerId, tuple[bool, float]] = {}
        self.rosters: dict[PeerId, tuple[Digest, float]] = {}
        """The roster that each voter has signed to be in force, and when that arrived."""

    def ask(
        self, fragments: Iterable[int], voters: Iterable[PeerId], relays: Sequence[PeerId], now: float
    ) -> list[tuple[PeerId, SignedContentRequest]]:
        """Return the questions to send now, each with its relay. A question keeps its number until it is answered."""
        sent: list[tuple[PeerId, SignedContentRequest]] = []
        for key in [(fragment, voter) for fragment in fragments for voter in voters]:
            question = self._questions.get(key)
            due_at = question.again_at if question is not None else self._rests_until.get(key, -math.inf)
            if not relays or now < due_at:
                continue
            if question is None:
                question = self._questions[key] = _Question(self._draw_nonce(now), now, now)
            elif now - question.first_at > LATE_ANSWERS * self._rules.answer_seconds * len(relays):
                question.renumber(self._draw_nonce(now), now)
            fragment, voter = key
            request = SignedContentRequest(fragment=fragment, voter=voter, requester=self._me, nonce=question.nonce)
            sent += [(relay, request) for relay in question.send(relays, now, now + self._rules.answer_seconds)]
        return sent

    def have_all_been_asked(self, voters: Iterable[PeerId], now: float) -> bool:
        """Return whether every question to these voters was answered, or has been sent through all relays."""
        done = {voter for voter, (_, at) in self._signed.items() if now - at <= self._rules.pause_seconds}
        sent = self._questions.items()
        done.update(voter for (_, voter), question in sent if now >= question.all_at + self._rules.answer_seconds)
        return done.issuperset(voters)

    def forget(self) -> None:
        """Forget all questions and answers: the clock was far ahead, so their times lie in the future."""
        for table in (self._questions, self._rests_until, self._signed, self.rosters):
            table.clear()

    def expects(self, answer: SignedContent) -> bool:
        """Return whether a relayed answer has the number of a pending question and the right length."""
        question = self._questions.get((answer.fragment, answer.voter))
        if question is None or question.nonce != answer.nonce:
            return False
        return len(answer.digests) in (0, self._rules.num_spans[answer.fragment])

    def take(self, answer: SignedContent, now: float) -> float:
        """Note an answer that is expected and correctly signed. Return when its question was first sent."""
        key = (answer.fragment, answer.voter)
        self._rests_until[key] = now + self._rules.pause_seconds
        self._signed[answer.voter] = (bool(answer.digests), now)
        self.note_roster(answer, now)
        return self._questions.pop(key).first_at

    def note_roster(self, answer: SignedContent, now: float) -> None:
        """Note the roster that a voter has signed to be in force, whether its digests count or not."""
        self.rosters[answer.voter] = (answer.roster, now)

    def signed(self, since: float, *, holds: bool) -> list[PeerId]:
        """Return voters that have signed, at `since` or later, that they hold the state, or that they do not."""
        return [voter for voter, (does, at) in self._signed.items() if does == holds and at >= since]


@dataclass(slots=True, kw_only=True)
class _Relayed:
    """A question that this peer has forwarded.

    Attributes:
        at: when it was last forwarded.
        times: how many earlier ones the same sender had forwarded.
        awaited: peers that have not answered it, and when it was sent to each.
    """

    nonce: int
    at: float
    times: int
    awaited: dict[PeerId, float]


class Relay:
    """Relays questions for others, one at a time per sender, requester, voter and fragment.

    A state machine without I/O.
    """

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._relayed: dict[tuple[PeerId, PeerId, int], dict[PeerId, _Relayed]] = {}
        self._most = 64

    def forward(
        self, sender: PeerId, question: SignedContentRequest, ways: Sequence[PeerId], now: float
    ) -> PeerId | None:
        """Return the peer to forward a question to, each time the next of `ways`; None if none, or asked too often."""
        key = (question.voter, question.requester, question.fragment)
        before = self._relayed.get(key, {}).get(sender)
        if not ways or (before is not None and now < before.at + self._seconds):
            return None
        self._forget_old(now)
        times = before.times + 1 if before is not None else 0
        to = ways[(question.nonce + times) % len(ways)]
        awaited = before.awaited if before is not None and before.nonce == question.nonce else {}
        relayed = _Relayed(nonce=question.nonce, at=now, times=times, awaited={**awaited, to: now})
        self._relayed.setdefault(key, {})[sender] = relayed
        return to

    def bring_back(self, sender: PeerId, answer: SignedContent, now: float) -> list[PeerId]:
        """Return the peers to forward an answer to: once from each peer that the question was sent to.

        If the question was repeated, the answer to the first one may still arrive. An answer may also be forged, which
        only the requester can detect.
        """
        waiting = []
        for peer, relayed in self._relayed.get((answer.voter, answer.requester, answer.fragment), {}).items():
            went_at = relayed.awaited.get(sender, -math.inf)
            if relayed.nonce == answer.nonce and now < went_at + LATE_ANSWERS * self._seconds:
                del relayed.awaited[sender]
                waiting.append(peer)
        return waiting

    def _forget_old(self, now: float) -> None:
        if len(self._relayed) < self._most:
            return
        late = now - LATE_ANSWERS * self._seconds
        for key, senders in list(self._relayed.items()):
            self._relayed[key] = {peer: relayed for peer, relayed in senders.items() if relayed.at > late}
            if not self._relayed[key]:
                del self._relayed[key]
        self._most = max(64, 2 * len(self._relayed))
