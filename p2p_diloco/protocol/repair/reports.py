"""Reports of others about spans: their tips, and the digests of their bytes; and whether a majority agrees."""

from __future__ import annotations

import math
from collections.abc import Collection

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.protocol.repair.fetcher import CatchUpRules
from p2p_diloco.protocol.repair.quorum import Quorums
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import ContentReply, HeadsReply
from p2p_diloco.span_log import SpanHead

MOST_FORMER = 16
"""Maximum number of peers that are no witnesses any more and whose tips are kept, beside one for each witness."""
ANSWERS_KEPT = 3
"""Number of each peer's last digests that are kept: peers answer at different times, and tips move meanwhile."""

_Answer = tuple[tuple[tuple[Digest, Digest], ...], float]
"""The digests of a fragment's spans, and when they were asked for."""


class TipReports:
    """Others' tips, and the requests for them: to one peer at a time, and to each only once during a replay. No I/O.

    While a fragment is replayed, it differs from its donors, and each of their heartbeats shows that. If each heartbeat
    led to a request, a donor with a thin line would send tips again and again instead of entries.
    """

    def __init__(self) -> None:
        self._requests: dict[int, tuple[PeerId, float]] = {}
        self._answered: dict[int, set[PeerId]] = {}
        self._tips: dict[int, dict[PeerId, tuple[SpanHead, ...]]] = {}
        self._level: dict[int, set[PeerId]] = {}

    def may_ask(self, fragment: int, peer: PeerId, now: float, until: float, *, is_replayed: bool) -> bool:
        """Return whether to ask a peer for its tips. If so, count the request as sent, and wait for it `until` then.

        No other peer is being asked and, during a replay, this one has not answered yet.
        """
        if not is_replayed:
            self._answered.pop(fragment, None)
        if peer in self._answered.get(fragment, ()) or self._requests.get(fragment, (peer, -math.inf))[1] > now:
            return False
        self._requests[fragment] = (peer, until)
        return True

    def take(self, fragment: int, sender: PeerId) -> bool:
        """Return whether a reply was requested."""
        if self._requests.get(fragment, (None, 0.0))[0] != sender:
            return False
        del self._requests[fragment]
        self._answered.setdefault(fragment, set()).add(sender)
        return True

    def ask_again(self, fragment: int) -> None:
        """Allow all peers to be asked again: the fragment here has changed since they answered."""
        self._answered.pop(fragment, None)

    def note(self, sender: PeerId, reply: HeadsReply, witnesses: Collection[PeerId]) -> None:
        """Note the tips of a peer. If many are kept, forget those of peers that are no witnesses."""
        tips = self._tips.setdefault(reply.fragment, {})
        tips[sender] = reply.heads
        if len(tips) > 2 * len(witnesses) + MOST_FORMER:
            self._tips[reply.fragment] = {p: heads for p, heads in tips.items() if p in witnesses or p == sender}
        self._level.get(reply.fragment, set()).discard(sender)

    def note_equal(self, fragment: int, peer: PeerId) -> None:
        """Note that a peer has our tips in all spans of a fragment."""
        self._tips.get(fragment, {}).pop(peer, None)
        self._level.setdefault(fragment, set()).add(peer)

    def of(self, span: SpanId) -> dict[PeerId, SpanHead]:
        """Return the tips of others, without peers that have our tips in the whole fragment."""
        return {peer: heads[span.index] for peer, heads in self._tips.get(span.fragment, {}).items()}

    def groups(self, span: SpanId) -> dict[SpanHead, set[PeerId]]:
        """Return the peers by tip, without those that have our tips in the whole fragment."""
        groups: dict[SpanHead, set[PeerId]] = {}
        for peer, tip in self.of(span).items():
            groups.setdefault(tip, set()).add(peer)
        return groups

    def at(self, span: SpanId, mine: SpanHead) -> set[PeerId]:
        """Return the peers that have our tip."""
        return self.groups(span).get(mine, set()) | self._level.get(span.fragment, set())

    def clear(self) -> None:
        for forgotten in (self._requests, self._answered, self._tips, self._level):
            forgotten.clear()


class ContentReports:
    """Chain and content digests of spans, as lately reported by each peer. No I/O.

    Args:
        answer_seconds: time that an answer may take.
        pause_seconds: time between two questions to the same peer about the same fragment.
    """

    def __init__(self, *, answer_seconds: float, pause_seconds: float) -> None:
        self._answer_seconds = answer_seconds
        self._pause_seconds = pause_seconds
        self._asked_at: dict[tuple[int, PeerId], float] = {}
        self._under_way: dict[tuple[int, PeerId], float] = {}
        self._answers: dict[int, dict[PeerId, tuple[_Answer, ...]]] = {}

    def may_ask(self, fragment: int, peer: PeerId, now: float) -> bool:
        """Return whether to ask a peer for its digests of a fragment. If so, count the question as sent."""
        key = (fragment, peer)
        asked_at, until = self._asked_at.get(key, -math.inf), self._under_way.get(key, -math.inf)
        if now < max(asked_at + self._pause_seconds, until):
            return False
        self._asked_at[key], self._under_way[key] = now, now + self._answer_seconds
        return True

    def take(self, sender: PeerId, reply: ContentReply) -> bool:
        """Note an answer. Return False if it was not requested."""
        key = (reply.fragment, sender)
        if self._under_way.pop(key, None) is None:
            return False
        self._add(reply.fragment, sender, (reply.digests, self._asked_at[key]))
        return True

    def _add(self, fragment: int, peer: PeerId, answer: _Answer) -> None:
        answers = self._answers.setdefault(fragment, {})
        answers[peer] = (*answers.get(peer, ()), answer)[-ANSWERS_KEPT:]

    def note(self, voter: PeerId, fragment: int, digests: tuple[tuple[Digest, Digest], ...], asked_at: float) -> None:
        """Note the digests that a voter has signed, unless it has sent newer ones."""
        before = self._answers.get(fragment, {}).get(voter)
        if before is None or before[-1][1] <= asked_at:
            self._add(fragment, voter, (digests, asked_at))

    def latest(self, span: SpanId, since: float = -math.inf) -> dict[PeerId, tuple[Digest, Digest]]:
        """Return the latest digests of a span by peer, from peers that were asked no earlier than `since`."""
        answers = ((peer, answers[-1]) for peer, answers in self._answers.get(span.fragment, {}).items())
        return {peer: pairs[span.index] for peer, (pairs, at) in answers if at >= since and span.index < len(pairs)}

    def groups(self, span: SpanId, since: float = -math.inf) -> dict[tuple[Digest, Digest], set[PeerId]]:
        """Return the peers by chain and content digest of a span. For each chain, a peer's last answer counts.

        What a peer reported about a tip stays true when it has moved on, unless it has reported something else since.
        """
        groups: dict[tuple[Digest, Digest], set[PeerId]] = {}
        for peer, answers in self._answers.get(span.fragment, {}).items():
            pairs = dict(pairs[span.index] for pairs, at in answers if at >= since and span.index < len(pairs))
            for pair in pairs.items():
                groups.setdefault(pair, set()).add(peer)
        return groups

    def forget(self, fragment: int) -> None:
        """Forget the answers about a fragment, so that all peers are asked again."""
        self._answers.pop(fragment, None)

    def clear(self) -> None:
        self._answers.clear()


class Reports:
    """All that others report, whose reports count, and which tip a majority has by them. No I/O."""

    def __init__(self, *, rules: CatchUpRules, chains: ChainBook) -> None:
        self.rules = rules
        self.chains = chains
        self.quorums = Quorums()
        self.tips = TipReports()
        self.contents = ContentReports(answer_seconds=rules.answer_seconds, pause_seconds=rules.entry_seconds)

    def clear(self) -> None:
        self.tips.clear()
        self.contents.clear()

    def majority_tip(self, span: SpanId) -> SpanHead | None:
        """Return the tip that a majority has, if others are at it."""
        return next((head for head, group in self.tips.groups(span).items() if self._names(span, head, group)), None)

    def is_decided(self, span: SpanId) -> bool:
        """Return whether a majority has one tip, ours included."""
        mine = self.chains.heads.get(span)
        is_ours = mine is not None and self._names(span, mine, self.tips.at(span, mine))
        return is_ours or self.majority_tip(span) is not None

    def _names(self, span: SpanId, head: SpanHead, group: set[PeerId]) -> bool:
        """Return whether the peers at a tip are a majority, including unlinked voters that have signed it."""
        quorums = self.quorums
        indirect = {voter for voter, chain in self._signed(span).items() if chain == head.digest}
        is_by_voters = not quorums.contents.is_few and quorums.contents.are_enough(group | indirect)
        return quorums.tips.are_enough(group) or is_by_voters

    def _signed(self, span: SpanId) -> dict[PeerId, Digest]:
        """Return the tips that unlinked voters have signed."""
        signed = self.quorums.contents.signed
        return {voter: chain for voter, (chain, _) in self.contents.latest(span).items() if voter in signed}

    def is_with_most(self, span: SpanId, mine: SpanHead) -> bool:
        """Return whether more than half of the witnesses, with this peer, have its tip.

        Return False if half of the electorate is known to be on another line: the peers in contact may be only the few
        that can be dialled, and the bootstrap peer does not vote.
        """
        quorum = self.quorums.tips
        num_with_us = len(quorum.holders & self.tips.at(span, mine))
        has_most = 2 * (num_with_us + 1) > len(quorum.witnesses) + 1
        return has_most and self._num_voters_apart(span, mine) < self.quorums.contents.half

    def _num_voters_apart(self, span: SpanId, mine: SpanHead) -> int:
        """Return how many voters have reported, or signed, a tip that did not lead to ours."""
        voters = self.quorums.contents.holders
        tips = {peer: tip.digest for peer, tip in self.tips.of(span).items() if peer in voters} | self._signed(span)
        after = self.chains.entry_after
        return sum(tip != mine.digest and after(span, tip) is None for tip in tips.values())

    def num_above(self, span: SpanId, mine: SpanHead) -> int:
        """Return how many witnesses have reported a higher tip."""
        witnesses = self.quorums.tips.witnesses
        return sum(peer in witnesses and tip.height > mine.height for peer, tip in self.tips.of(span).items())
