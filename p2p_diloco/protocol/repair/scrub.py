"""Checks that the bytes in memory are right, by comparing contents with other peers at equal chain digests.

Memory can fail. A peer that differs from another first computes from its own checkpoint and entries what its bytes
should be. That decides between two peers, and repairs the bytes without help from others. If the disk does not reach
that far, or confirms what is in memory (a bit may have flipped before the checkpoint), a majority that holds the same
other bytes overrules the peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.protocol.actions import CompareContent
from p2p_diloco.protocol.repair.fetcher import CatchUpRules
from p2p_diloco.protocol.repair.quorum import Quorum
from p2p_diloco.protocol.wire.messages import ContentReply, SignedContent

WITNESSES = 2

_Digests = tuple[Digest, Digest] | None
"""Chain and content digest of a span, as reported by a peer."""


class Scrub:
    """Compares the bytes that this peer and others hold. A state machine without I/O."""

    def __init__(self, *, rules: CatchUpRules, damaged: Mapping[SpanId, bool] | None = None) -> None:
        self._rules = rules
        self._asked_until: dict[tuple[int, PeerId], float] = {}
        self._paused: dict[tuple[int, PeerId], float] = {}
        self._reported: dict[tuple[int, PeerId], tuple[tuple[Digest, Digest], ...]] = {}
        self._kept: dict[tuple[int, PeerId], tuple[CompareContent, float]] = {}
        """The last answer of each peer whose tips were ahead of ours, and when it came."""
        self._witnesses: dict[int, set[PeerId]] = {}
        self._accusers: dict[SpanId, dict[PeerId, _Digests]] = {}
        self._has_disk_answered: dict[SpanId, bool] = {}
        """Spans that the disk was asked about since the scrub began."""
        self._unsettled: set[SpanId] = set()
        self.damaged = dict(damaged or {})
        """Spans that stay unchanged until they are replaced, and whether the disk is being asked about each."""

    def begin_again(self) -> None:
        """Begin a new scrub: discard results and compare contents again. Differences stay noted as unsettled."""
        self._unsettled = set(self._accusers)
        for forgotten in (self._witnesses, self._accusers, self._paused, self._has_disk_answered, self._kept):
            forgotten.clear()

    def moved(self, span: SpanId) -> None:
        """Discard earlier results about a span: its bytes are replaced."""
        self._witnesses.pop(span.fragment, None)
        self._accusers.pop(span, None)
        self._has_disk_answered.pop(span, None)

    def replaced(self, span: SpanId) -> None:
        """Note that the bytes of a span were replaced: it is not damaged any more."""
        self.moved(span)
        self.damaged.pop(span, None)

    def damage(self, span: SpanId, *, is_disk_asked: bool) -> None:
        """Note that a span is damaged, and whether the disk is being asked about it."""
        self.damaged[span] = is_disk_asked

    def limit_to(self, peers: Collection[PeerId]) -> None:
        """Discard the results of all other peers: they were asked when no better ones were known."""
        for seen in self._witnesses.values():
            seen.intersection_update(peers)

    def is_verified(self, donors: Collection[PeerId], quorum: Quorum | None = None) -> bool:
        """Return whether enough others hold the same bytes of every fragment.

        Enough are two of `donors` (or the only one), or more than half of the electorate, whatever two donors report.
        """
        needed = min(WITNESSES, len(donors))
        seen = [self._witnesses.get(fragment, set()) for fragment in range(len(self._rules.num_spans))]
        return all(
            len(peers.intersection(donors)) >= needed
            or (quorum is not None and not quorum.is_few and quorum.are_enough(peers))
            for peers in seen
        )

    def may_ask(self, fragment: int, donor: PeerId, now: float) -> bool:
        """Return whether to ask a peer at our tips for its digests. If so, count the question as sent."""
        seen, key = self._witnesses.get(fragment, ()), (fragment, donor)
        if donor in seen or len(seen) >= WITNESSES:
            return False
        if max(self._asked_until.get(key, 0.0), self._paused.get(key, 0.0)) > now:
            return False
        self._asked_until[key] = now + self._rules.answer_seconds
        return True

    def ask_again(self, fragment: int) -> None:
        """Allow peers that differed to be asked again at once."""
        self._paused = {key: until for key, until in self._paused.items() if key[0] != fragment}

    def is_contested(self, fragment: int) -> bool:
        return any(span.fragment == fragment for span in self._accusers)

    def take(self, sender: PeerId, reply: ContentReply) -> CompareContent | None:
        """Return the comparison of a peer's digests with ours; None if they were not requested."""
        key = (reply.fragment, sender)
        if self._asked_until.pop(key, None) is None:
            return None
        return self._compare(sender, sender, reply.fragment, reply.digests)

    def compare_signed(self, answer: SignedContent, relay: PeerId) -> CompareContent:
        """Return the comparison of digests that were signed by a peer without a link."""
        return self._compare(answer.voter, relay, answer.fragment, answer.digests)

    def keep(self, question: CompareContent, now: float) -> None:
        """Keep an answer about tips that this peer has not reached yet."""
        self._kept[question.fragment, question.peer] = (question, now)

    def is_ahead(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer's answer about tips ahead of ours came a short while ago: these will soon be ours.

        Each answer takes a peer the time to hash a fragment.
        """
        return any(key[1] == peer and abs(now - at) < self._rules.pause_seconds for key, (_, at) in self._kept.items())

    def due(self, fragment: int, tips: Sequence[Digest]) -> list[CompareContent]:
        """Return the comparisons with answers that were kept, now that this peer has reached their tips.

        An answer takes a while on a long line, and the entry that follows comes soon: the tips of a peer that catches
        up are hardly ever those that others hold when they answer.
        """
        reached = [
            (key, question)
            for key, (question, _) in self._kept.items()
            if key[0] == fragment and [chain for chain, _ in question.digests] == list(tips)
        ]
        for key, question in reached:
            del self._kept[key]
            self._reported[fragment, question.peer] = question.digests
        return [question for _, question in reached]

    def _compare(
        self, peer: PeerId, link: PeerId, fragment: int, digests: tuple[tuple[Digest, Digest], ...]
    ) -> CompareContent:
        self._reported[fragment, peer] = digests
        return CompareContent(peer=peer, link=link, fragment=fragment, digests=digests)

    def compared(
        self, peer: PeerId, fragment: int, num_equal: int, differing: Iterable[SpanId], now: float, quorum: Quorum
    ) -> tuple[list[SpanId], list[SpanId]]:
        """Note the result of a comparison at equal chain digests.

        Returns:
            The spans to rebuild from this peer's disk, and the rebuilt spans that a majority of `quorum` overrules.
        """
        differing = list(differing)
        digests = self._reported.pop((fragment, peer), ())
        if not differing and num_equal == self._rules.num_spans[fragment]:
            self._witnesses.setdefault(fragment, set()).add(peer)
        if differing:
            self._paused[fragment, peer] = now + self._rules.pause_seconds
        rebuild, overruled = [], []
        for span in differing:
            self.accuse(span, peer, digests[span.index] if span.index < len(digests) else None)
            if span not in self._has_disk_answered:
                self._has_disk_answered[span] = False
                rebuild.append(span)
            elif self._has_disk_answered[span] and self.overrulers(span, quorum):
                overruled.append(span)
        return rebuild, overruled

    def accuse(self, span: SpanId, peer: PeerId, digests: _Digests) -> None:
        """Note that a peer holds other bytes at the same chain digest."""
        self._accusers.setdefault(span, {})[peer] = digests

    def accusers(self, span: SpanId) -> list[PeerId]:
        return sorted(self._accusers.get(span, {}))

    def overrulers(self, span: SpanId, quorum: Quorum) -> list[PeerId]:
        """Return a majority that agrees on other bytes than ours; empty if there is none."""
        accusers = self._accusers.get(span, {})
        for what in accusers.values():
            agreeing = [peer for peer in sorted(accusers) if accusers[peer] == what]
            if what is not None and quorum.are_enough(agreeing):
                return agreeing
        return []

    def rebuilt(self, span: SpanId) -> bool:
        """Note that the disk has answered about a span. Return False if it was not asked since the scrub began."""
        if self._has_disk_answered.get(span) is not False:
            return False
        self._has_disk_answered[span] = True
        return True

    def forget_rebuild(self, span: SpanId) -> None:
        """Note that the span moved on while the disk was asked. If it differs again, the disk is asked again."""
        if self._has_disk_answered.get(span) is False:
            del self._has_disk_answered[span]

    def is_unsettled(self, span: SpanId) -> bool:
        return span in self._unsettled
