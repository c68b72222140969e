"""Answers others: tips, entries, spans and content digests, and questions that this peer relays to voters."""

from __future__ import annotations

from dataclasses import replace

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId
from p2p_diloco.protocol.actions import Action, Report, Send, ServeContent, ServeEntry, ServeSpan
from p2p_diloco.protocol.clock import Stopwatch
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.repair.signed_content import Relay
from p2p_diloco.protocol.repair.sources import Sources
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE
from p2p_diloco.protocol.wire.member import FULL_SHARE
from p2p_diloco.protocol.wire.messages import (
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Message,
    SignedContent,
    SignedContentRequest,
    SpanRequest,
)

ENOUGH_READY = 3
"""Number of ready peers with thin lines that together replace a founder in serving newcomers."""
QUIET_SILENCES = 2.0
"""Multiple of `silence_seconds` after which a peer that has requested nothing is no longer fetching."""
TIMES_RETAINED = 4
"""Longest total time that a lone member waits for peers that fetch from it, as a multiple of `retained_cycles`."""


class Followers:
    """Tracks the peers that fetch the state here. A state machine without I/O.

    A founder keeps the state for them, and a lone member waits for them. A thin line cannot send both a state and the
    entries of every round after it. If a lone member continued to make entries, no peer could ever catch up with it.
    Only entries wait; its island continues to train.
    """

    def __init__(self, *, rules: RunRules, membership: Membership) -> None:
        self._rules = rules
        self._membership = membership
        self._requested_at: dict[PeerId, float] = {}
        self._rounds_left = self._most_rounds

    @property
    def _most_rounds(self) -> int:
        return TIMES_RETAINED * self._rules.retained_cycles * self._rules.clock.num_fragments

    def requested(self, peer: PeerId, now: float) -> None:
        """Note that a peer has requested a span or an entry."""
        self._requested_at[peer] = now

    def are_fetching(self, now: float) -> bool:
        """Return whether a peer that trains and is not ready yet has recently requested something."""
        since = now - QUIET_SILENCES * self._rules.silence_seconds
        self._requested_at = {peer: at for peer, at in self._requested_at.items() if at > since}
        alive = self._membership.liveness.alive(now)
        return any(peer in alive and alive[peer].trains and not alive[peer].ready for peer in self._requested_at)

    def wait_for(self, now: float) -> tuple[bool, list[Action]]:
        """Return whether this peer makes no entries in the round that begins. The first such round is reported.

        It waits only if it is the only member, so that no other member waits for an entry. The time is limited, because
        some strangers may never stop fetching.
        """
        fetching = self.are_fetching(now)
        roster, me = self._membership.book.in_force, self._membership.local.me
        if roster is None or roster.peers() != {me.peer} or not me.trains:
            self._rounds_left = self._most_rounds
            return False, []
        if self._rounds_left <= 0 or not fetching:
            return False, []
        is_first = self._rounds_left == self._most_rounds
        self._rounds_left -= 1
        text = "alone, with others catching up: training continues, entries wait for them"
        return True, [Report(topic="waiting", text=text)] if is_first else []


class Serving:
    """Answers requests. A state machine without I/O."""

    def __init__(
        self, *, rules: RunRules, membership: Membership, chains: ChainBook, sources: Sources, linked: set[PeerId]
    ) -> None:
        self._rules = rules
        self._membership = membership
        self._chains = chains
        self._sources = sources
        self._linked = linked
        self._relay = Relay(seconds=rules.silence_seconds)
        self._replaceable = Stopwatch()
        self.followers = Followers(rules=rules, membership=membership)
        self.has_state = False
        """Whether this peer holds vectors that others may fetch."""

    def set_back(self) -> None:
        self._relay, self._replaceable = Relay(seconds=self._rules.silence_seconds), Stopwatch()

    def hold_state(self) -> None:
        self.has_state = True

    def drop_state(self) -> None:
        self.has_state = False

    def is_needless(self, now: float, *, follows: bool) -> bool:
        """Return whether others can serve the state that this peer holds without training. Call about once a second.

        They must have been able to for a while: a peer that has just become ready has not published its line's share.
        """
        return self._replaceable.note(self._may_drop(now, follows), now) >= self._rules.silence_seconds

    def _may_drop(self, now: float, follows: bool) -> bool:
        """Return whether a ready reducer has bandwidth to spare, or several members are ready and none fetches here."""
        roster, alive = self._membership.book.in_force, self._membership.liveness.alive(now)
        if not self.has_state or roster is None or roster.k == 0 or follows:
            return False
        beats = [(member, alive[member.peer]) for member in roster.members if member.peer in alive]
        ready = [(member, beat) for member, beat in beats if beat.ready and member.trains]
        if any(member.reduces and beat.can_be_dialled and beat.share == FULL_SHARE for member, beat in ready):
            return True
        return len(ready) >= ENOUGH_READY and not self.followers.are_fetching(now)

    def holds(self, fragment: int) -> bool:
        """Return whether every span of a fragment has a head here."""
        num_spans = self._rules.num_spans
        return fragment < len(num_spans) and self._chains.fragment_heads(fragment, num_spans[fragment]) is not None

    def answer(self, sender: PeerId, message: Message, now: float, *, is_adopting: bool) -> list[Action]:
        """Answer a question. Any other message is dropped.

        Args:
            is_adopting: whether this peer will soon hold the state of another branch.
        """
        match message:
            case HeadsRequest() if not is_adopting and self.holds(message.fragment):
                heads = self._chains.fragment_heads(message.fragment, self._rules.num_spans[message.fragment])
                assert heads is not None
                return [self._send_late(sender, HeadsReply(fragment=message.fragment, heads=heads), now)]
            case EntryRequest():
                self.followers.requested(sender, now)
                return [self._answer_entry(sender, message, now)]
            case SpanRequest() if self.has_state and message.span in self._chains.heads:
                self.followers.requested(sender, now)
                return [_serve_span(sender, message)]
            case ContentRequest() if self.has_state and self.holds(message.fragment):
                return [ServeContent(to=sender, fragment=message.fragment)]
            case SignedContentRequest() if message.fragment < len(self._rules.num_spans):
                if message.voter != self._membership.local.peer:
                    to = self._relay.forward(sender, message, self._ways(sender, message), now)
                    return [self._send(to, message, now)] if to is not None else []
                return self._answer_signed(sender, message, now) if not is_adopting else []
            case _:
                return []

    def _answer_entry(self, sender: PeerId, request: EntryRequest, now: float) -> Action:
        entry = self._chains.entry_after(request.span, request.parent)
        head = self._chains.heads.get(request.span)
        if entry is None and head is not None and head.digest != request.parent:
            return ServeEntry(to=sender, span=request.span, parent=request.parent)
        return self._send_late(sender, entry or EntryAbsent(span=request.span, parent=request.parent), now)

    def _answer_signed(self, sender: PeerId, question: SignedContentRequest, now: float) -> list[Action]:
        if self.has_state and self.holds(question.fragment):
            return [ServeContent(to=sender, fragment=question.fragment, question=question)]
        return [self._send(sender, self.sign_content(question, ()), now)]

    def sign_content(self, question: SignedContentRequest, digests: tuple[tuple[Digest, Digest], ...]) -> SignedContent:
        """Return the signed answer to a relayed question; without digests if this peer holds nothing."""
        unsigned = SignedContent(
            fragment=question.fragment,
            voter=self._membership.local.peer,
            requester=question.requester,
            nonce=question.nonce,
            roster=self._membership.book.in_force_digest or ZERO_DIGEST,
            digests=digests,
            signature=NO_SIGNATURE,
        )
        return replace(unsigned, signature=self._membership.local.me.sign(unsigned.statement(self._rules.run)))

    def _ways(self, sender: PeerId, question: SignedContentRequest) -> list[PeerId]:
        """Return the peers that a question can be forwarded to: its voter, or neighbours of the voter.

        Neighbours are used only if the sender is the requester itself.
        """
        if sender != question.requester and not self._sources.may_serve(sender):
            return []
        if question.voter in self._linked:
            return [question.voter]
        book = self._membership.book
        roster, grid = book.in_force, book.grid()
        if sender != question.requester or roster is None or grid is None:
            return []
        parent = book.parent_of(roster)  # the requester may still follow that one
        if question.voter not in roster.voters.union(parent.voters if parent is not None else ()):
            return []
        return sorted(self._linked & grid.neighbours(question.voter) - {sender})

    def bring_back(self, sender: PeerId, answer: SignedContent, now: float) -> list[Action]:
        """Forward the answer to a relayed question."""
        peers = self._relay.bring_back(sender, answer, now)
        return [self._send(to, answer, now) for to in peers if to in self._linked]

    def _send(self, to: PeerId, message: Message, now: float) -> Send:
        return Send(to=to, message=message, deadline=now + self._rules.silence_seconds)

    def _send_late(self, to: PeerId, message: Message, now: float) -> Send:
        return Send(to=to, message=message, deadline=now + self._rules.clock.round_seconds)


def _serve_span(to: PeerId, request: SpanRequest) -> ServeSpan:
    return ServeSpan(
        to=to, span=request.span, version=request.version, offset=request.offset, most_bytes=request.most_bytes
    )
