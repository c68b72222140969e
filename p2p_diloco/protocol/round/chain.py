"""The logs of all spans, without their vectors: absorbed entries, waiting entries, and entries kept for other peers.

Entries are absorbed strictly in parent order. An entry whose parent is missing waits while the parent is fetched; it is
never applied without it. An entry of a future round waits too: no entry is refused because of a clock. One waiting
entry per span is kept here, signed by its owner under a roster that governs its round. For the others, the engine notes
which peer has them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.protocol.membership.roster_book import Governance, RosterBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import HEAD_LAYOUT, Entry, check_entry, is_signed_by_owner, next_head
from p2p_diloco.protocol.wire.frames import to_bytes
from p2p_diloco.protocol.wire.roster import Verify
from p2p_diloco.span_log import SpanHead

MOST_WAITING_BYTES = 64 << 20
"""Maximum bytes of the payloads of all waiting entries."""
MOST_EVIDENCE = 4


class EntryFate(enum.Enum):
    """The fate of an entry."""

    ABSORBED = "absorbed"
    KNOWN = "known"
    WAITS = "waits for its parent"
    EARLY = "waits for its round, or for the end of this one"
    LACKS_ROSTER = "names a roster that this peer does not know"
    LACKS_CERTIFICATE = "is valid only if its roster was certified earlier than this peer knows"
    OTHER_CHILD = "follows our tip's parent, and wins over the entry that led to our tip"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivocation:
    """Two different entries that an owner signed for one span and round, as statements with their signatures."""

    owner: PeerId
    span: SpanId
    round: int
    signed: tuple[tuple[bytes, bytes], tuple[bytes, bytes]]

    def sentence(self) -> str:
        """Return the text of the report about the owner."""
        return (
            f"{short_peer_id(self.owner)} signed two different entries for {self.span} in round {self.round}; peers "
            "may differ on that span until it is repaired; both are kept as evidence; keep this peer off your list"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryVerdict:
    """The verdict on an entry.

    Attributes:
        absorbed: all entries absorbed because of it, in order.
        reason: why the entry was refused; empty if it was not.
        is_kept: whether it waits here with its payload.
        evidence: proof that its owner signed two entries; set only the first time that this is found for the owner.
    """

    fate: EntryFate
    absorbed: tuple[Entry, ...] = ()
    reason: str = ""
    is_kept: bool = False
    evidence: Equivocation | None = None


class ChainBook:
    """Holds the heads of all spans, and recent entries for peers that missed them. A state machine without I/O.

    Args:
        retained_cycles: number of cycles whose entries are kept here for others; the shell keeps older ones on disk.
    """

    def __init__(self, *, rules: RunRules, retained_cycles: int, verify: Verify) -> None:
        self.heads: dict[SpanId, SpanHead] = {}
        self._rules = rules
        self._verify = verify
        self.evidence: dict[PeerId, Equivocation] = {}
        self._retained = retained_cycles
        self._kept: dict[SpanId, dict[Digest, Entry]] = {}
        self._waiting: dict[SpanId, tuple[Entry, float]] = {}
        self._digests: dict[int, Digest] = {}
        self._forks: dict[SpanId, tuple[SpanHead, bool]] = {}

    def set_head(self, span: SpanId, head: SpanHead) -> None:
        """Set the head of a span after a transfer, from a checkpoint or at the founding.

        Entries kept for others are dropped: they may belong to an abandoned branch.
        """
        self.heads[span] = head
        self._digests.pop(span.fragment, None)
        self._kept.pop(span, None)
        self._forks.pop(span, None)

    def drop_head(self, span: SpanId) -> None:
        """Drop a span whose log belongs to an abandoned branch."""
        self.heads.pop(span, None)
        self._digests.pop(span.fragment, None)
        self._kept.pop(span, None)
        self._waiting.pop(span, None)
        self._forks.pop(span, None)

    def fork_at(self, span: SpanId, parent: SpanHead, *, is_left: bool = False) -> None:
        """Recognise other children of our tip's parent until the tip moves, instead of treating them as old entries.

        Args:
            is_left: whether other peers have continued from another child; then any other child wins over our tip.
        """
        self._forks[span] = parent, is_left

    def forget_forks(self) -> None:
        """Stop recognising other children of a tip's parent; none are requested any more."""
        self._forks.clear()

    def is_known(self, entry: Entry) -> bool:
        """Return whether an entry is known, before any work is spent on its payload."""
        head = self.heads.get(entry.span)
        if head is None or entry.height <= head.height:
            return head is None or (self._twin_of(entry) is None and not self._is_other_child(entry))
        held = self._waiting.get(entry.span)
        return held is not None and held[0].signature == entry.signature and entry.parent != head.digest

    def offer(
        self, entry: Entry, payload_norm: float, rosters: RosterBook, latest_round: int, *, is_late: bool = False
    ) -> EntryVerdict:
        """Judge an entry. If it is valid, absorb it and the entries that waited for it.

        Args:
            latest_round: the latest round whose entries may be absorbed now.
            is_late: whether the entry is late, and follows a parent that this peer named in the round in progress. It
                then waits until that round is over, because a majority may still give the parent another child.
        """
        if self.is_known(entry):
            return EntryVerdict(fate=EntryFate.KNOWN)
        evidence = self._find_evidence(entry, rosters)
        verdict = self._judge(entry, payload_norm, rosters, latest_round, is_late)
        return verdict if evidence is None else replace(verdict, evidence=evidence)

    def absorb_due(self, rosters: RosterBook, latest_round: int) -> tuple[Entry, ...]:
        """Absorb waiting entries that are valid now, because their round has come or their parent was transferred."""
        return tuple(e for span in list(self._waiting) for e in self._absorb_waiting(span, rosters, latest_round))

    def _judge(
        self, entry: Entry, payload_norm: float, rosters: RosterBook, latest_round: int, is_late: bool
    ) -> EntryVerdict:
        head = self.heads[entry.span]
        is_other_child = self._is_other_child(entry)
        if entry.height <= head.height and not is_other_child:
            return EntryVerdict(fate=EntryFate.KNOWN)
        governance = rosters.governance(entry.roster, entry.round)
        if governance is Governance.UNKNOWN:
            return EntryVerdict(fate=EntryFate.LACKS_ROSTER)
        if governance is Governance.TOO_LATE_HERE:
            return EntryVerdict(fate=EntryFate.LACKS_CERTIFICATE)
        if governance is Governance.OTHER:
            return EntryVerdict(fate=EntryFate.REFUSED, reason=_not_governing(entry, rosters))
        if is_other_child:
            return self._judge_other_child(entry, payload_norm, rosters, latest_round)
        if entry.round > latest_round or (is_late and entry.parent == head.digest):
            return self._wait(entry, payload_norm, rosters, latest_round, EntryFate.EARLY)
        if entry.parent != head.digest:
            return self._wait(entry, payload_norm, rosters, latest_round, EntryFate.WAITS)
        try:
            self._absorb(entry, payload_norm, rosters)
        except PeerError as error:
            return EntryVerdict(fate=EntryFate.REFUSED, reason=str(error))
        waited = self._absorb_waiting(entry.span, rosters, latest_round)
        return EntryVerdict(fate=EntryFate.ABSORBED, absorbed=(entry, *waited))

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        """Return the kept entry of `span` that follows `parent`, for a peer that missed it."""
        return self._kept.get(span, {}).get(parent)

    def fragment_heads(self, fragment: int, num_spans: int) -> tuple[SpanHead, ...] | None:
        """Return the heads of a fragment in span order; None if one is missing."""
        heads = [self.heads.get(SpanId(fragment, index)) for index in range(num_spans)]
        found = tuple(head for head in heads if head is not None)
        return found if len(found) == num_spans else None

    def fragment_digest(self, fragment: int, num_spans: int) -> Digest | None:
        """Return a digest over a fragment's heads, computed once after each change; None if a head is missing."""
        digest = self._digests.get(fragment)
        if digest is None:
            heads = self.fragment_heads(fragment, num_spans)
            if heads is not None:
                digest = self._digests[fragment] = heads_digest(heads)
        return digest

    def _is_other_child(self, entry: Entry) -> bool:
        head, fork = self.heads.get(entry.span), self._forks.get(entry.span)
        if head is None or fork is None or entry.parent != fork[0].digest:
            return False
        other = next_head(fork[0], entry)
        return wins_tie(other, head) or (fork[1] and other.digest != head.digest)

    def _judge_other_child(
        self, entry: Entry, payload_norm: float, rosters: RosterBook, latest_round: int
    ) -> EntryVerdict:
        if entry.round > latest_round:
            return EntryVerdict(fate=EntryFate.EARLY)
        try:
            roster, grid = rosters.folded(entry.roster, entry.round)
            check_entry(entry, self._forks[entry.span][0], roster, grid, self._rules, payload_norm, self._verify)
        except PeerError as error:
            return EntryVerdict(fate=EntryFate.REFUSED, reason=str(error))
        return EntryVerdict(fate=EntryFate.OTHER_CHILD)

    def _wait(
        self, entry: Entry, payload_norm: float, rosters: RosterBook, latest_round: int, fate: EntryFate
    ) -> EntryVerdict:
        if not is_signed_by_owner(entry, rosters.folded(entry.roster, entry.round)[1], self._verify):
            reason = f"the entry for {entry.span} in round {entry.round} is not signed by its owner"
            return EntryVerdict(fate=EntryFate.REFUSED, reason=reason)
        is_kept = self._finds_room(entry, rosters, latest_round)
        if is_kept:
            self._waiting[entry.span] = (entry, payload_norm)
        return EntryVerdict(fate=fate, is_kept=is_kept)

    def _finds_room(self, entry: Entry, rosters: RosterBook, latest_round: int) -> bool:
        """Make room for an entry that has to wait. Return whether there is room.

        Each span keeps the entry that can be absorbed sooner: one of a near round before one of a distant round,
        then the lower height. So an entry of a distant round, which may never become valid, does not keep out one that
        can become valid before it.
        """

        def patience(waiting: Entry) -> tuple[bool, int]:
            return waiting.round > latest_round, waiting.height

        held = self._waiting.get(entry.span)
        if held is not None:
            is_sound = rosters.governance(held[0].roster, held[0].round) is Governance.GOVERNS
            if is_sound and held[0].signature != entry.signature and patience(held[0]) <= patience(entry):
                return False
        others = {span: len(e.payload) for span, (e, _) in self._waiting.items() if span != entry.span}
        room = MOST_WAITING_BYTES - len(entry.payload) - sum(others.values())
        for span in [span for span in others if self._waiting[span][0].round > latest_round >= entry.round]:
            if room < 0:
                del self._waiting[span]
                room += others[span]
        return room >= 0

    def _absorb(self, entry: Entry, payload_norm: float, rosters: RosterBook) -> None:
        head = self.heads[entry.span]
        roster, grid = rosters.folded(entry.roster, entry.round)
        check_entry(entry, head, roster, grid, self._rules, payload_norm, self._verify)
        self.heads[entry.span] = next_head(head, entry)
        self._digests.pop(entry.span.fragment, None)
        self._forks.pop(entry.span, None)
        kept = self._kept.setdefault(entry.span, {})
        kept[entry.parent] = entry
        for parent in [p for p, old in kept.items() if old.height <= entry.height - self._retained]:
            del kept[parent]

    def _absorb_waiting(self, span: SpanId, rosters: RosterBook, latest_round: int) -> list[Entry]:
        """Absorb a span's waiting entry if it is its turn. Drop it if its turn can never come."""
        head, held = self.heads.get(span), self._waiting.get(span)
        if held is None or head is None:
            return []
        entry, payload_norm = held
        is_over = entry.height <= head.height
        if is_over or rosters.governance(entry.roster, entry.round) is not Governance.GOVERNS:
            del self._waiting[span]
            return []
        if entry.parent != head.digest or entry.round > latest_round:
            return []
        del self._waiting[span]
        try:
            self._absorb(entry, payload_norm, rosters)
        except PeerError:
            return []
        return [entry]

    def _twin_of(self, entry: Entry) -> Entry | None:
        """Return a different entry of the same span, round and roster, absorbed or waiting here."""
        held = self._waiting.get(entry.span)
        here = [*self._kept.get(entry.span, {}).values(), *((held[0],) if held is not None else ())]
        same = (e for e in here if e.round == entry.round and e.roster == entry.roster)
        return next((e for e in same if e.signature != entry.signature), None)

    def _find_evidence(self, entry: Entry, rosters: RosterBook) -> Equivocation | None:
        """Return evidence that the owner of an entry also signed a different one held here; None if already kept."""
        twin = self._twin_of(entry)
        if twin is None or entry.roster not in rosters or len(self.evidence) >= MOST_EVIDENCE:
            return None
        grid = rosters.folded(entry.roster, entry.round)[1]
        owner = grid.owner(entry.span)
        if owner in self.evidence or not is_signed_by_owner(entry, grid, self._verify):
            return None
        signed = ((twin.statement(), twin.signature), (entry.statement(), entry.signature))
        found = Equivocation(owner=owner, span=entry.span, round=entry.round, signed=signed)
        self.evidence[owner] = found
        return found


def _not_governing(entry: Entry, rosters: RosterBook) -> str:
    governing = rosters.governing(entry.round)
    instead = f"roster {governing[0].k} governs that round" if governing is not None else "no roster governs that round"
    named = rosters.roster(entry.roster).k
    return f"the entry for {entry.span} in round {entry.round} names roster {named}, but {instead}"


def wins_tie(one: SpanHead, other: SpanHead) -> bool:
    """Return whether `one` wins over `other`, where both are children of one tip.

    The later round wins, then the smaller digest. Any order works if it is the same on all peers; the later round is
    preferred because its owner decided last.
    """
    return (-one.round, one.digest) < (-other.round, other.digest)


def heads_digest(heads: Sequence[SpanHead]) -> Digest:
    """Return a digest over all fields of a fragment's heads: a donor may have lied about a height or a radius."""
    return sha256(*(to_bytes(head, HEAD_LAYOUT) for head in heads))
