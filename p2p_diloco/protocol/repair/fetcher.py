"""Fetches entries and spans: which donor is asked for what, and the pieces that arrive.

Requests are spread over all donors, a few at a time to each. Entries come before spans: on a thin link, a joiner must
first keep up with the spans that it holds. A donor that answers some requests may take longer with the others. One that
answers none is replaced by another. What has arrived is judged elsewhere (`chain.py`, `verifier.py`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId
from p2p_diloco.memory.slabs import awaited_vector
from p2p_diloco.protocol.actions import Action, HashSpan, Send
from p2p_diloco.protocol.repair.donors import Donors, Window, least_loaded
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import (
    ContentRequest,
    EntryRequest,
    HeadsRequest,
    SignedContentRequest,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.span_log import SpanHead

Question = HeadsRequest | ContentRequest | SignedContentRequest | EntryRequest | SpanRequest


class Want(enum.Enum):
    """The kind of thing that is fetched for a span."""

    ENTRY = "entry"
    SPAN = "span"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is computed in Python


MOST_REQUESTS_PER_DONOR = {Want.ENTRY: 16, Want.SPAN: 8}
"""Maximum number of requests under way at one donor: enough to keep it busy even if some requests are lost."""
MOST_REQUESTS_OF_NEW = 2
QUIET_SHARE = 0.125
"""Share of `piece_seconds` for which a donor that used to answer may be silent while others answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpRules:
    """The sizes of what is fetched, and how long an answer may take.

    Attributes:
        num_spans: number of spans of each fragment.
        span_bytes: bytes of anchor and momentum of each span.
        answer_seconds: time limit for digests, which must be computed first; then more relays are asked for them.
        entry_seconds: time limit for entries and tips.
        piece_seconds: time limit for a piece of a span.
        piece_target_seconds: time that a piece should take, so that entries do not wait long for pieces.
        pause_seconds: time after a comparison that differed, or a signed answer, before the same peer is asked again.
        patience_seconds: time for a majority at a lower tip to follow entries that only this peer holds.
    """

    num_spans: tuple[int, ...]
    span_bytes: dict[SpanId, int]
    answer_seconds: float
    entry_seconds: float
    piece_seconds: float
    piece_target_seconds: float
    pause_seconds: float
    patience_seconds: float

    def send(self, to: PeerId, question: Question, now: float) -> Send:
        return Send(to=to, message=question, deadline=now + self.answer_seconds)


class Transfer:
    """A span that is being fetched: one version, in one block of memory, filled from the front without gaps.

    Attributes:
        began: when its first piece arrived.
        donors: peers that sent its pieces.
        content: content digest of the whole span; None until all pieces have arrived and were hashed.
        named: content digest that a majority named for this head; None until then.
        is_sure: whether that was a majority of the electorate.
    """

    __slots__ = ("began", "content", "donors", "head", "is_sure", "named", "received_bytes", "state", "total_bytes")

    def __init__(self, head: SpanHead, total_bytes: int, began: float) -> None:
        self.head = head
        self.total_bytes = total_bytes
        self.began = began
        self.received_bytes = 0
        self.donors: set[PeerId] = set()
        self.content: Digest | None = None
        self.named: Digest | None = None
        self.is_sure = False
        self.state = awaited_vector(total_bytes // 4).data.cast("B")
        """The bytes of the span. Its length is that of the agreed span, whatever a donor claims. The receiver owns it.

        φ and m stay in it until their first entry. It is not on the heap: a newcomer's spans are freed one by one, and
        would leave holes there as large as all of them.
        """

    @property
    def is_whole(self) -> bool:
        return self.received_bytes == self.total_bytes

    def add(self, piece: bytes | memoryview, donor: PeerId) -> None:
        self.donors.add(donor)
        end = self.received_bytes + len(piece)
        self.state[self.received_bytes : end] = piece
        self.received_bytes = end

    def hashed(self, content: Digest) -> None:
        self.content = content

    def name(self, content: Digest | None, *, is_sure: bool) -> None:
        """Note the content digest that others named; None: too few agree."""
        self.named, self.is_sure = content, is_sure


@dataclass(slots=True, kw_only=True)
class Request:
    """A request under way since `at`. Its time limit `until` may be extended up to `last`.

    Attributes:
        piece_bytes: the size requested.
    """

    donor: PeerId
    at: float
    until: float
    last: float
    piece_bytes: int

    def extend(self, until: float) -> None:
        """Extend the time limit, because its donor answers other requests."""
        self.until = max(min(until, self.last), self.until)


@dataclass(slots=True, kw_only=True)
class SpanFetch:
    """A span, or the entry after its tip, that is being fetched.

    Attributes:
        donor: the donor to ask first; None: any.
        may_go_back: whether a transfer may undo entries, because those that were followed have a lower tip.
        is_overruled: whether a majority holds other bytes than this peer. An older version is accepted then.
        trusted: a peer whose answer about the bytes is enough.
        request: the request under way.
        first_at: when an unanswered request was first sent.
        transfer: the pieces of a whole span that have arrived.
        servers: donors that were asked for a whole span; pieces are accepted from them.
        late: the donor that answered too late, or not at all.
    """

    want: Want
    donor: PeerId | None
    may_go_back: bool = False
    is_overruled: bool = False
    trusted: PeerId | None = None
    request: Request | None = None
    first_at: float | None = None
    transfer: Transfer | None = None
    servers: set[PeerId] = field(default_factory=set)
    late: PeerId | None = None

    def is_asked_of(self, donor: PeerId) -> bool:
        return self.request is not None and self.request.donor == donor

    def ask(self, request: Request) -> None:
        self.request = request
        self.first_at = self.first_at if self.first_at is not None else request.at
        if self.want is Want.SPAN:
            self.servers.add(request.donor)

    def cancel(self) -> None:
        self.request = None

    def time_out(self) -> None:
        assert self.request is not None, "only a request under way times out"
        self.late = self.request.donor
        self.donor = None if self.donor == self.late else self.donor
        self.request = None

    def lose(self, donor: PeerId) -> None:
        if self.is_asked_of(donor):
            self.request = self.first_at = None

    def answered(self, now: float) -> float | None:
        """Return how long an answer took since it was first requested; None if that is known already."""
        took_seconds = now - self.first_at if self.first_at is not None else None
        self.first_at = None
        return took_seconds

    def begin(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def refuse(self, donor: PeerId) -> None:
        """Take no more pieces from a donor. A transfer that it has no part in stays: it may send anything."""
        self.servers.discard(donor)
        if self.is_asked_of(donor) or (self.transfer is not None and donor in self.transfer.donors):
            self.transfer = self.request = self.donor = None

    def stay_ahead(self) -> None:
        """Undo no entries any more: the tip has moved since."""
        self.may_go_back = False


class Fetcher:
    """Fetches what is wanted. A state machine without I/O: call `time_out`, then `send_requests`, at every change."""

    def __init__(self, *, rules: CatchUpRules, chains: ChainBook) -> None:
        self._rules = rules
        self._chains = chains
        self._fetches: dict[SpanId, SpanFetch] = {}  # in the order in which they are requested
        self._donors = Donors(quiet_seconds=QUIET_SHARE * rules.piece_seconds)
        self._windows = {
            Want.ENTRY: Window(seconds=rules.entry_seconds, target_seconds=rules.entry_seconds, leaves_out_way=True),
            Want.SPAN: Window(seconds=rules.piece_seconds, target_seconds=rules.piece_target_seconds),
        }

    # -- what is wanted

    def want_everything(self) -> None:
        """Fetch every span that has no head here: a newcomer's first step."""
        for span in sorted(self._rules.span_bytes.keys() - self._chains.heads.keys() - self._fetches.keys()):
            self._fetches[span] = SpanFetch(want=Want.SPAN, donor=None)

    def want_entry(self, span: SpanId, donor: PeerId | None) -> None:
        """Fetch the entry that follows this peer's tip of `span`."""
        self._fetches.setdefault(span, SpanFetch(want=Want.ENTRY, donor=donor))

    def want_span(
        self,
        span: SpanId,
        donor: PeerId | None,
        *,
        may_go_back: bool = False,
        is_overruled: bool = False,
        trusted: PeerId | None = None,
    ) -> None:
        """Fetch a whole span from the beginning. What was allowed about it before stays allowed."""
        before = self._fetches.pop(span, None)  # so that it waits at the end
        self._fetches[span] = SpanFetch(
            want=Want.SPAN,
            donor=donor,
            may_go_back=may_go_back or (before is not None and before.may_go_back),
            is_overruled=is_overruled or (before is not None and before.is_overruled),
            trusted=trusted,
        )

    def get(self, span: SpanId) -> SpanFetch | None:
        return self._fetches.get(span)

    @property
    def wanted(self) -> dict[SpanId, SpanFetch]:
        """All that is being fetched, by span."""
        return self._fetches

    def is_transferred(self, span: SpanId) -> bool:
        fetch = self._fetches.get(span)
        return fetch is not None and fetch.want is Want.SPAN

    @property
    def transfers(self) -> dict[SpanId, Transfer]:
        """The transfers of whole spans that have begun to arrive."""
        return {span: fetch.transfer for span, fetch in self._fetches.items() if fetch.transfer is not None}

    def is_asked_of(self, span: SpanId, donor: PeerId) -> bool:
        fetch = self._fetches.get(span)
        return fetch is not None and fetch.is_asked_of(donor)

    def drop(self, span: SpanId) -> None:
        self._fetches.pop(span, None)

    def drop_held(self) -> None:
        """Stop fetching anything beyond the tips held here."""
        self._fetches = {span: fetch for span, fetch in self._fetches.items() if span not in self._chains.heads}

    def clear(self) -> None:
        self._fetches.clear()

    def drop_older(self, span: SpanId, head: SpanHead, *, is_sure: bool = True) -> bool:
        """Return whether a transfer would undo entries. If so, drop it; the next comparison shows what is needed.

        An overruled span may go back, because its bytes are wrong here, and a slow transfer is older than the entries
        that arrive meanwhile. They follow again.

        Args:
            is_sure: whether more than half of the electorate named the bytes, or may still do so.
        """
        mine, fetch = self._chains.heads.get(span), self._fetches[span]
        may_go_back = fetch.may_go_back or (fetch.is_overruled and is_sure)
        if mine is None or head.height >= mine.height or may_go_back:
            return False
        self.drop(span)
        return True

    # -- requests

    def time_out(self, donors: Sequence[PeerId], now: float) -> tuple[list[Action], list[tuple[SpanId, PeerId]]]:
        """Cancel requests to donors that are too slow or have stopped; report donors that stopped serving spans.

        A donor without recent heartbeats is kept: on a thin line they wait for its own pieces. Requests to a donor
        whose link is lost are cancelled in `lose`.

        Args:
            donors: all peers that can be asked.

        Returns:
            Reports, and the entries that were not served, with the donors.
        """
        self._donors.look(now)
        actions: list[Action] = []
        unanswered: list[tuple[SpanId, PeerId]] = []
        for span, fetch in self._fetches.items():
            want, request = fetch.want, fetch.request
            if request is None:
                continue
            donor, is_late = request.donor, request.until <= now
            if not is_late and not (want is Want.SPAN and self._donors.is_quiet(donor, request.at, donors, now)):
                continue
            fetch.time_out()
            if want is Want.ENTRY:
                self._donors.missed(donor, now)
                unanswered.append((span, donor))
            if donor in donors and want is Want.SPAN:
                actions += self._donors.shun(donor, f"served nothing of {span} for {now - request.at:.0f} s", now)
            if donor in donors and is_late:  # a donor that stopped shows nothing about the line
                self._windows[want].unanswered()
        return actions, unanswered

    def send_requests(
        self, donors: Sequence[PeerId], sources: Sequence[PeerId], holders: Sequence[PeerId], now: float
    ) -> list[Action]:
        """Send all requests that can be sent now: waiting ones, and unanswered ones again, to another donor.

        Entries are requested from any donor: an avoided one may be the only one ahead.

        Args:
            donors: peers to ask for entries, and for spans if one of them is the preferred donor.
            sources: peers to ask for other spans.
            holders: peers that hold a state, ready or not. The next entry, or the majority's span, may be theirs alone.
        """
        wide = self._donors.quick(self._donors.sound(sources, now))
        self._take_back_for(wide)
        prompt = self._donors.prompt(donors, now)
        any_prompt = self._donors.prompt(list(dict.fromkeys([*donors, *sources, *holders])), now)
        are_some_known = any(map(self._donors.is_known, wide))
        new = {donor for donor in (*wide, *donors, *holders) if are_some_known and not self._donors.is_known(donor)}
        return [
            *self._send_waiting(Want.ENTRY, prompt, any_prompt, frozenset(), now),
            *self._send_waiting(Want.SPAN, wide, self._donors.sound([*donors, *holders], now), new, now),
        ]

    def _send_waiting(
        self, want: Want, able: Sequence[PeerId], preferable: Sequence[PeerId], new: Set[PeerId], now: float
    ) -> list[Action]:
        """Send the requests that wait, to the preferred donor or else to the least loaded of `able`.

        Args:
            new: donors that have not shown yet how quick they are, while others have; they get few requests.
        """
        asked = [f.request.donor for f in self._fetches.values() if f.want is want and f.request is not None]
        load, left = Counter(asked), self._windows[want].size - len(asked)

        def is_free(donor: PeerId) -> bool:
            return load[donor] < (MOST_REQUESTS_OF_NEW if donor in new else MOST_REQUESTS_PER_DONOR[want])

        actions: list[Action] = []
        if not any(map(is_free, able)):
            return actions  # the usual case during a transfer
        for span, fetch in self._waiting(want):
            free = [donor for donor in able if is_free(donor)]
            if not free or left <= 0:
                break
            donor = fetch.donor
            if donor is None or donor not in preferable or not is_free(donor):
                others = [donor for donor in free if donor != fetch.late]
                donor = least_loaded(span, others or free, load)
            load[donor] += 1
            left -= 1
            actions.append(self._request(span, fetch, donor, now))
        return actions

    def _take_back_for(self, sources: Sequence[PeerId]) -> None:
        """Cancel span requests to donors other than `sources`, as many as the sources can serve in their place."""
        under_way = [(fetch, fetch.request.donor) for fetch in self._fetches.values() if fetch.request is not None]
        spare = MOST_REQUESTS_PER_DONOR[Want.SPAN] * len(sources) - sum(donor in sources for _, donor in under_way)
        for fetch, donor in under_way:
            if spare > 0 and fetch.want is Want.SPAN and fetch.donor != donor and donor not in sources:
                fetch.cancel()
                spare -= 1

    def _waiting(self, want: Want) -> list[tuple[SpanId, SpanFetch]]:
        """Return the fetches without a request under way. Spans with pieces come first."""
        waiting = [
            (span, fetch)
            for span, fetch in self._fetches.items()
            if fetch.want is want and fetch.request is None and (fetch.transfer is None or not fetch.transfer.is_whole)
        ]
        return sorted(waiting, key=lambda one: one[1].transfer is None)

    def _request(self, span: SpanId, fetch: SpanFetch, donor: PeerId, now: float) -> Send:
        window, piece_bytes = self._windows[fetch.want], self._donors.piece_bytes(donor)
        last = now + window.longest_seconds
        fetch.ask(Request(donor=donor, at=now, until=now + window.seconds, last=last, piece_bytes=piece_bytes))
        if fetch.want is Want.ENTRY:
            return self._rules.send(donor, EntryRequest(span=span, parent=self._chains.heads[span].digest), now)
        version, offset = ZERO_DIGEST, 0
        if fetch.transfer is not None:
            version, offset = fetch.transfer.head.digest, fetch.transfer.received_bytes
        request = SpanRequest(span=span, version=version, offset=offset, most_bytes=piece_bytes)
        return self._rules.send(donor, request, now)

    # -- what arrives

    def received(self, donor: PeerId, now: float) -> None:
        """Note that a donor has sent an answer, and extend the time limits of its other requests."""
        self._donors.received(donor, now)
        for fetch in self._fetches.values():
            if fetch.request is not None and fetch.request.donor == donor:
                fetch.request.extend(now + self._windows[fetch.want].seconds)

    def lose(self, donor: PeerId) -> None:
        """Cancel requests to a donor whose link is lost."""
        self._donors.lose(donor)
        for fetch in self._fetches.values():
            fetch.lose(donor)

    def entry_absorbed(self, span: SpanId, now: float) -> SpanFetch | None:
        """Note that the tip of a span has moved. Return the fetch of an entry that this ends."""
        fetch = self._fetches.get(span)
        if fetch is None:
            return None
        if fetch.want is Want.SPAN:
            fetch.stay_ahead()
            return None
        self._answered(fetch, now)
        self.drop(span)
        return fetch

    def entry_absent(self, donor: PeerId, span: SpanId, parent: Digest) -> bool:
        """Return whether a donor was asked for the entry after our tip and lacks it; if so, ask no other one.

        A donor of a whole span that answers so is shunned once it is late.
        """
        fetch, head = self._fetches.get(span), self._chains.heads.get(span)
        is_asked = fetch is not None and fetch.want is Want.ENTRY and fetch.is_asked_of(donor)
        if not is_asked or head is None or head.digest != parent:
            return False
        self.drop(span)
        return True

    def take_piece(self, sender: PeerId, reply: SpanReply, now: float) -> list[Action]:
        """Add a piece. Then request the next one or, if the span is whole, have it hashed.

        A late piece is accepted if it fits, even if another donor has been asked meanwhile.
        """
        span, fetch = reply.span, self._fetches.get(reply.span)
        if fetch is None or fetch.want is not Want.SPAN or sender not in fetch.servers:
            return []
        request = fetch.request if fetch.is_asked_of(sender) else None
        transfer = fetch.transfer if fetch.transfer is not None and fetch.transfer.head == reply.head else None
        if transfer is None and (reply.offset or request is None):
            return []  # it belongs to an abandoned version
        if self.drop_older(span, reply.head):
            return []
        expected, received = self._rules.span_bytes[span], transfer.received_bytes if transfer is not None else 0
        end = reply.offset + len(reply.piece)
        if reply.total_bytes != expected or not reply.piece or reply.offset > received or end > expected:
            fetch.refuse(sender)
            return self._donors.shun(sender, f"served a piece that does not fit {span}", now)
        if transfer is None:
            transfer = Transfer(reply.head, expected, now)
            fetch.begin(transfer)
        if request is not None:
            fetch.cancel()
            self._donors.answered(sender, request.piece_bytes, len(reply.piece), now - request.at)
        if reply.offset == received:
            self._answered(fetch, now)
            transfer.add(reply.piece, sender)
            if transfer.is_whole:
                fetch.cancel()
                return [HashSpan(span=span, head=transfer.head, state=transfer.state)]
        return [self._request(span, fetch, sender, now)] if request is not None and not transfer.is_whole else []

    def _answered(self, fetch: SpanFetch, now: float) -> None:
        took_seconds = fetch.answered(now)
        if took_seconds is not None:
            self._windows[fetch.want].answered(took_seconds)

    def refuse_transfer(self, span: SpanId, now: float) -> list[Action]:
        """Report donors that served other bytes than a majority holds, and ask others."""
        fetch = self._fetches[span]
        donors = sorted(fetch.transfer.donors) if fetch.transfer is not None else []
        self.want_span(span, None if fetch.donor in donors else fetch.donor)
        what = f"served {span} with other bytes than a majority holds"
        return [action for donor in donors for action in self._donors.shun(donor, what, now)]
