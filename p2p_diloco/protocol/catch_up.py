"""The one repair: compare at a closed boundary, fetch what is missing, replay in parent order, compare contents.

It serves the joiner, the straggler and the healed split alike. Requests are dealt over all donors, few at a time each;
one that is not answered in time goes to another donor.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanHead, SpanId
from p2p_diloco.protocol.actions import Action, CompareContent, ReplaceSpan, Send
from p2p_diloco.protocol.chain import ChainBook, Remedy, choose_remedy
from p2p_diloco.protocol.messages import (
    ContentReply,
    ContentRequest,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    SpanReply,
    SpanRequest,
)

Question = HeadsRequest | ContentRequest | EntryRequest | SpanRequest

MOST_ASKED_PER_DONOR = 8
WITNESSES = 2
MOST_LACKING = 2
"""Donors that lack the entry we need, after which the whole span is fetched."""


class Want(enum.Enum):
    """What is being fetched for a span."""

    ENTRY = "entry"
    SPAN = "span"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request under way."""

    donor: PeerId
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The pieces of a span that have come so far, all of one version."""

    head: SpanHead
    total_bytes: int
    pieces: tuple[bytes, ...]

    @property
    def received_bytes(self) -> int:
        """Bytes held so far, from the front without a gap."""
        return sum(len(piece) for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpRules:
    """What is fetched and how long an answer may take.

    Attributes:
        num_spans: spans of each fragment.
        span_bytes: bytes of anchor and momentum of each span.
    """

    num_spans: tuple[int, ...]
    span_bytes: dict[SpanId, int]
    answer_seconds: float


class CatchUp:
    """What one peer fetches, from whom, and what it has verified. A state machine without I/O."""

    def __init__(self, *, rules: CatchUpRules, chains: ChainBook) -> None:
        self._rules = rules
        self._chains = chains
        self._wanted: dict[SpanId, tuple[Want, PeerId | None]] = {}
        self._asked: dict[SpanId, Asked] = {}
        self._transfers: dict[SpanId, Transfer] = {}
        self._heads_asked: dict[int, Asked] = {}
        self._content_asked: dict[tuple[int, PeerId], float] = {}
        self._witnesses: dict[int, set[PeerId]] = {}
        self._accusers: dict[SpanId, set[PeerId]] = {}
        self._targets: dict[SpanId, tuple[int, PeerId]] = {}
        self._lacking: dict[SpanId, set[PeerId]] = {}
        self._unadopted: set[int] = set()
        self.is_adopting = False

    # -- what is known to be missing

    def want_everything(self) -> None:
        """Fetch every span that has no head here: a newcomer's first step."""
        for span in self._rules.span_bytes:
            if span not in self._chains.heads:
                self._wanted.setdefault(span, (Want.SPAN, None))

    def want_entry(self, span: SpanId, donor: PeerId | None) -> None:
        """Fetch the entry that follows this peer's head of `span`."""
        self._wanted.setdefault(span, (Want.ENTRY, donor))

    def adopt(self) -> None:
        """Give up our branch: what differs from a donor of the other one is fetched, even where our log is longer."""
        for dropped in (self._wanted, self._asked, self._transfers, self._targets, self._lacking, self._heads_asked):
            dropped.clear()
        self.check_again()
        self._unadopted = set(range(len(self._rules.num_spans)))
        self.is_adopting = True

    def adopted(self, fragment: int) -> None:
        """Hear that a fragment stands where a donor's of the new branch stands."""
        self._unadopted.discard(fragment)

    def check_again(self) -> None:
        """Trust nothing verified so far; contents are compared anew."""
        self._witnesses.clear()
        self._accusers.clear()

    def is_complete(self) -> bool:
        """Tell whether every span has a head here and none is being fetched."""
        missing = self._wanted or self._unadopted or len(self._chains.heads) < len(self._rules.span_bytes)
        self.is_adopting = self.is_adopting and bool(missing)
        return not missing

    def is_verified(self, donors: Collection[PeerId]) -> bool:
        """Tell whether as many of `donors` as can be asked, up to two, hold the same bytes of every fragment."""
        needed = min(WITNESSES, len(donors))
        return all(len(self._witnesses.get(f, ())) >= needed for f in range(len(self._rules.num_spans)))

    # -- asking

    def ask_heads(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer whose fragment differs from ours where its spans stand, one peer at a time."""
        asked = self._heads_asked.get(fragment)
        if asked is not None and asked.until > now:
            return []
        self._heads_asked[fragment] = Asked(donor=donor, until=now + self._rules.answer_seconds)
        return [self._send(donor, HeadsRequest(fragment=fragment), now)]

    def ask_content(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer that stands where we stand for the digests of its bytes, until enough agree."""
        seen = self._witnesses.get(fragment, set())
        if donor in seen or len(seen) >= WITNESSES or self._content_asked.get((fragment, donor), 0.0) > now:
            return []
        self._content_asked[fragment, donor] = now + self._rules.answer_seconds
        return [self._send(donor, ContentRequest(fragment=fragment), now)]

    def pump(self, donors: Sequence[PeerId], now: float) -> list[Action]:
        """Send what can be asked now: unanswered requests again, to another donor, and those that wait."""
        for span in [span for span, (_, ahead) in self._targets.items() if ahead not in donors]:
            del self._targets[span]  # who cannot be asked must not be waited for
        for span in [span for span, asked in self._asked.items() if asked.until <= now or asked.donor not in donors]:
            failed = self._asked.pop(span).donor
            want, preferred = self._wanted[span]
            self._wanted[span] = (want, None if preferred == failed else preferred)
        load = dict.fromkeys(donors, 0)
        for asked in self._asked.values():
            load[asked.donor] += 1
        actions: list[Action] = []
        for span, (want, preferred) in self._wanted.items():
            free = [donor for donor in donors if load[donor] < MOST_ASKED_PER_DONOR]
            if span in self._asked or not free:
                continue
            donor = preferred if preferred in free else min(free, key=lambda d: (load[d], hash_rank(span, d)))
            load[donor] += 1
            self._asked[span] = Asked(donor=donor, until=now + self._rules.answer_seconds)
            actions.append(self._request(span, want, donor, now))
        return actions

    def _request(self, span: SpanId, want: Want, donor: PeerId, now: float) -> Send:
        if want is Want.ENTRY:
            return self._send(donor, EntryRequest(span=span, parent=self._chains.heads[span].digest), now)
        transfer = self._transfers.get(span)
        version = transfer.head.digest if transfer is not None else ZERO_DIGEST
        offset = transfer.received_bytes if transfer is not None else 0
        return self._send(donor, SpanRequest(span=span, version=version, offset=offset), now)

    def _send(self, to: PeerId, message: Question, now: float) -> Send:
        return Send(to=to, message=message, deadline=now + self._rules.answer_seconds)

    # -- answers

    def take_heads(self, sender: PeerId, reply: HeadsReply) -> bool:
        """Tell whether a reply answers what was asked and fits the run."""
        asked = self._heads_asked.get(reply.fragment)
        if asked is None or asked.donor != sender or len(reply.heads) != self._rules.num_spans[reply.fragment]:
            return False
        del self._heads_asked[reply.fragment]
        return True

    def note_differences(self, sender: PeerId, reply: HeadsReply) -> None:
        """Note for each span of a fragment what the comparison asks for."""
        for index, theirs in enumerate(reply.heads):
            span = SpanId(reply.fragment, index)
            mine = self._chains.heads.get(span)
            remedy = choose_remedy(mine, theirs)
            if mine is not None and mine.digest == theirs.digest and mine != theirs:
                self._accuse(span, sender)
            elif remedy is Remedy.REPLAY:
                if theirs.height >= self._targets.get(span, (0, sender))[0]:
                    self._targets[span] = (theirs.height, sender)
                self._wanted.setdefault(span, (Want.ENTRY, sender))
            elif remedy is Remedy.TRANSFER:
                self._wanted[span] = (Want.SPAN, sender)
            elif reply.fragment in self._unadopted and mine is not None and mine.digest != theirs.digest:
                self._chains.drop_head(span)
                self.want_transfer(span, sender)
        self.adopted(reply.fragment)

    def entry_absorbed(self, span: SpanId) -> None:
        """Go on with the next entry of a replay, or end it."""
        self._lacking.pop(span, None)
        if self._wanted.get(span, (None, None))[0] is not Want.ENTRY:
            return
        donor = self._wanted[span][1]
        self._drop(span)
        if self._is_behind(span):
            self._wanted[span] = (Want.ENTRY, donor)

    def _is_behind(self, span: SpanId) -> bool:
        """Tell whether some peer is known to stand higher; forget it once we stand there."""
        head = self._chains.heads.get(span)
        if head is not None and span in self._targets and head.height >= self._targets[span][0]:
            del self._targets[span]
        return head is not None and span in self._targets

    def entry_absent(self, sender: PeerId, span: SpanId, parent: Digest) -> None:
        """Hear that a donor has no entry after our head; if it is ahead of us, our logs cannot be joined: transfer.

        The next comparison raises what another donor lacks again, but not for ever: after a restart of many nobody may
        have kept it, and among many donors the one that is known to be ahead is seldom the one that is asked.
        """
        asked = self._asked.get(span)
        head = self._chains.heads.get(span)
        if asked is None or asked.donor != sender or head is None or head.digest != parent:
            return
        self._drop(span)
        if not self._is_behind(span):
            return
        target = self._targets[span][1]
        lacking = self._lacking.setdefault(span, set())
        lacking.add(sender)
        if sender == target or len(lacking) >= MOST_LACKING:
            del self._targets[span]
            self.want_transfer(span, target)

    def want_transfer(self, span: SpanId, donor: PeerId) -> None:
        """Fetch a whole span: its log cannot be joined with the donor's."""
        self._lacking.pop(span, None)
        self._drop(span)
        self._wanted[span] = (Want.SPAN, donor)

    def take_span(self, sender: PeerId, reply: SpanReply, now: float) -> list[Action]:
        """Add a piece; ask for the next one, or hand the whole span over."""
        asked = self._asked.get(reply.span)
        if asked is None or asked.donor != sender or self._wanted[reply.span][0] is not Want.SPAN:
            return []
        transfer = self._transfers.get(reply.span)
        if transfer is None or transfer.head.digest != reply.head.digest:
            transfer = Transfer(head=reply.head, total_bytes=reply.total_bytes, pieces=())
        expected = self._rules.span_bytes[reply.span]
        mine = self._chains.heads.get(reply.span)
        if mine is not None and reply.head.height < mine.height:
            self._drop(reply.span)  # the log does not go back; the next comparison says what is needed
            return []
        fits = reply.total_bytes == expected and reply.offset == transfer.received_bytes
        if not fits or not reply.piece or transfer.received_bytes + len(reply.piece) > expected:
            self._transfers.pop(reply.span, None)  # another donor is asked when the time for this answer is over
            return []
        transfer = replace(transfer, pieces=(*transfer.pieces, reply.piece))
        if transfer.received_bytes < expected:
            self._transfers[reply.span] = transfer
            self._asked[reply.span] = replace(asked, until=now + self._rules.answer_seconds)
            return [self._request(reply.span, Want.SPAN, sender, now)]
        self._drop(reply.span)
        self._witnesses.pop(reply.span.fragment, None)
        self._chains.set_head(reply.span, transfer.head)
        return [ReplaceSpan(span=reply.span, head=transfer.head, state=b"".join(transfer.pieces))]

    def take_content(self, sender: PeerId, reply: ContentReply) -> list[Action]:
        """Have a peer's content digests compared with ours."""
        if self._content_asked.pop((reply.fragment, sender), None) is None:
            return []
        return [CompareContent(peer=sender, fragment=reply.fragment, digests=reply.digests)]

    def content_compared(
        self,
        peer: PeerId,
        fragment: int,
        num_equal: int,
        differing: Iterable[SpanId],
        num_accusers: int = WITNESSES,
    ) -> list[SpanId]:
        """Note a comparison at equal chain digests; return spans that enough peers say are wrong here: fetched again.

        Args:
            num_accusers: how many must say so.
        """
        differing = list(differing)
        if not differing and num_equal == self._rules.num_spans[fragment]:
            self._witnesses.setdefault(fragment, set()).add(peer)
        wrong = []
        for span in differing:
            if self._accuse(span, peer, num_accusers):
                wrong.append(span)
        return wrong

    def _accuse(self, span: SpanId, peer: PeerId, num_accusers: int = WITNESSES) -> bool:
        """Note that a peer holds something else at the same chain digest; enough of them have it fetched again."""
        accusers = self._accusers.setdefault(span, set())
        accusers.add(peer)
        if len(accusers) < num_accusers:
            return False
        del self._accusers[span]
        self.want_transfer(span, peer)
        return True

    def lose(self, donor: PeerId) -> None:
        """Forget what a donor was asked: its link is gone."""
        self._asked = {span: asked for span, asked in self._asked.items() if asked.donor != donor}

    def _drop(self, span: SpanId) -> None:
        self._wanted.pop(span, None)
        self._asked.pop(span, None)
        self._transfers.pop(span, None)


def hash_rank(span: SpanId, donor: PeerId) -> int:
    """Return a number that deals spans over equally loaded donors, the same on every machine."""
    return (donor[0] * 257 + donor[1] + span.index * 31 + span.fragment * 7) % 65521
