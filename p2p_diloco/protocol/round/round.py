"""One round at one peer: what it contributes, what it collects as a reducer, and when it stops waiting.

Each span is on its own. A reducer averages a span as soon as every member that can still come has come, or at the
deadline; whatever a set of peers does, the round is over when the next one begins.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256
from p2p_diloco.log.head import SpanHead
from p2p_diloco.log.limits import (
    WEIGHT_BOUNDS,
    as_float32,
    balanced,
    contribution_weight,
    lower_median,
    weight_limit,
)
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.wire.grid import Grid
from p2p_diloco.protocol.wire.inclusion import Inclusion, join_inclusions, only_present, too_few
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.messages import Opening, SpanOffer, SpanVector
from p2p_diloco.protocol.wire.roster import Roster

UNKNOWN_NORM_RATIO = 16.0
"""Norm of a contribution, in medians of those that came, where the reducer knows no radius: honest ones differ less."""
NOTHING_HELD_BACK: Mapping[SpanId, Digest] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSpan:
    """One span of this peer's contribution, ready to go: the parent it builds on and its norm before clipping."""

    span: SpanId
    parent: Digest
    norm: float
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentContribution:
    """An island's contribution to a round; spans whose log is ahead of the round are left out."""

    round: int
    fragment: int
    tokens: int
    steps: int
    spans: tuple[EncodedSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRules:
    """Limits on contributions, from the manifest."""

    weight_clip: float
    radius_limit: float


@dataclass(slots=True, kw_only=True)
class Collection:
    """A reducer's collection for one round. Roster and grid are those in force when the round began here.

    Attributes:
        row: the row of this peer, and `members` those in it, by their place on the roster.
        reduced: spans that this peer averages for its row.
        newcomers: members whose contributions weigh nothing yet.
        overdue: by member, how many spans were settled without the vector that it had announced.
    """

    round: int
    fragment: int
    roster: Roster
    roster_digest: Digest
    grid: Grid
    row: int
    members: dict[int, Member]
    reduced: tuple[SpanId, ...]
    newcomers: frozenset[PeerId]
    openings: dict[PeerId, Opening] = field(default_factory=dict)
    payloads: dict[tuple[PeerId, SpanId], bytes | memoryview] = field(default_factory=dict)
    settled: set[SpanId] = field(default_factory=set)
    refused: set[PeerId] = field(default_factory=set)
    overdue: Counter[PeerId] = field(default_factory=Counter)

    @property
    def is_one_row(self) -> bool:
        """Return whether reducers finish what they reduce."""
        return len(self.grid.rows) == 1


def row_members(roster: Roster, grid: Grid, row: int) -> dict[int, Member]:
    """Return the members of a row by their place on the roster."""
    return {place: m for place, m in enumerate(roster.members) if grid.row_of[m.peer] == row}


def split_by_reducer(contribution: FragmentContribution, grid: Grid, row: int) -> dict[PeerId, list[EncodedSpan]]:
    """Deal the spans of a contribution to the reducers of its row."""
    shares: dict[PeerId, list[EncodedSpan]] = {}
    for encoded in contribution.spans:
        shares.setdefault(grid.reducer(encoded.span, row), []).append(encoded)
    return shares


def contribution_messages(
    contribution: FragmentContribution,
    spans: Sequence[EncodedSpan],
    roster: Digest,
    incarnation: int,
    held_back: Mapping[SpanId, Digest] = NOTHING_HELD_BACK,
) -> tuple[Opening, tuple[SpanVector, ...]]:
    """Return what goes to one reducer: the opening, then each span.

    Args:
        held_back: the parents of its other spans, of which nothing is sent.
    """
    offers = (
        *(SpanOffer(index=s.span.index, parent=s.parent, sends=True, norm=as_float32(s.norm)) for s in spans),
        *(SpanOffer(index=span.index, parent=parent, sends=False, norm=0.0) for span, parent in held_back.items()),
    )
    opening = Opening(
        round=contribution.round,
        roster=roster,
        incarnation=incarnation,
        tokens=contribution.tokens,
        steps=contribution.steps,
        commitment=ZERO_DIGEST,
        spans=offers,
    )
    vectors = tuple(SpanVector(round=contribution.round, span=s.span, payload=s.payload) for s in spans)
    return opening, vectors


def refuse_opening(opening: Opening, sender: PeerId, collection: Collection) -> str | None:
    """Return why an opening does not count, or None when it does."""
    member = collection.roster.member(sender)
    if opening.roster != collection.roster_digest:
        return f"names another roster than {collection.roster.k}, which is in force here"
    if member is None:
        return f"its sender is not on roster {collection.roster.k}"
    if collection.grid.row_of[sender] != collection.row:
        return f"its sender is in row {collection.grid.row_of[sender]}, not in row {collection.row}"
    if member.incarnation != opening.incarnation:
        return f"is from incarnation {opening.incarnation}; the roster lists {member.incarnation}"
    if sender in collection.openings:
        return "is a second one for the round"
    reduced = {span.index for span in collection.reduced}
    offered = [offer.index for offer in opening.spans]
    if len(set(offered)) != len(offered) or not reduced.issuperset(offered):
        return "offers spans that are not reduced here, or one twice"
    if any(offer.sends for offer in opening.spans) and not (opening.steps > 0 and opening.tokens > 0):
        return f"says {opening.tokens} tokens in {opening.steps} steps"
    if any(offer.norm < 0 for offer in opening.spans):
        return "says a negative norm"
    return None


def has_trained(opening: Opening | None) -> bool:
    """Return whether a member has come, and not empty-handed because its island reached no step border."""
    return opening is not None and opening.steps > 0


def still_expected(collection: Collection, span: SpanId, gone: frozenset[PeerId]) -> bool:
    """Return whether the contribution of some member of the row to `span` may still come."""
    for member in collection.members.values():
        peer = member.peer
        if peer in gone or peer in collection.refused or (peer, span) in collection.payloads:
            continue
        opening = collection.openings.get(peer)
        if opening is None or is_sending(opening, span):
            return True
    return False


def is_sending(opening: Opening, span: SpanId) -> bool:
    """Return whether an opening says that a vector of `span` follows."""
    return any(offer.index == span.index and offer.sends for offer in opening.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The parts to average, the parent that they build on, and who is in each part, by its sender.

    `inclusions` also holds who named the parent without a part.
    """

    parent: Digest
    reduce: ReduceSpan
    inclusions: dict[PeerId, Inclusion]

    def inclusion_of(self, sound: frozenset[PeerId]) -> Inclusion:
        """Return who is in the mean of the parts that the codec found sound; all who named the parent were there.

        The weights of a row are balanced among those in it, as whoever takes the mean does; an owner has balanced rows.
        """
        joined = join_inclusions(
            inclusion if peer in sound else inclusion.left_out() for peer, inclusion in self.inclusions.items()
        )
        return joined if self.reduce.stage is Stage.FINISH else replace(joined, weights=balanced(joined.weights))


def gather_contributions(
    collection: Collection, span: SpanId, head: SpanHead | None, rules: ReductionRules
) -> Gathered | str:
    """Return what makes the mean of this row, or why there is none this round.

    The parent is chosen by who named it, whether their contributions came or not; the mean is of those that came. In a
    run of one row more than half of the electorate must name it, and the reducer must stand there itself. In a grid the
    owner asks for the majority: a row goes by the parent that most of its voters name, so that nobody else can void it,
    and one from which no contribution came has a mean without parts, which says who was there: a silent row must not
    keep the others from a majority.
    """
    offers = _offers(collection, span)
    parent = _named_parent([(place, offer.parent) for place, _, offer in offers.values()], collection, head)
    if isinstance(parent, str):
        return parent
    agreeing = {peer: offer for peer, offer in offers.items() if offer[2].parent == parent}
    came = {peer: offer for peer, offer in agreeing.items() if (peer, span) in collection.payloads}
    if not came and collection.is_one_row:
        there = too_few(collection.roster, (place for place, _, _ in agreeing.values()))
        return f"nobody's contribution came; {there}"
    weights = _weights(came, collection.newcomers, head if head is not None and head.digest == parent else None, rules)
    return Gathered(
        parent=parent,
        reduce=ReduceSpan(
            round=collection.round,
            span=span,
            stage=Stage.WHOLE if collection.is_one_row else Stage.ROW,
            parts=tuple(
                Part(peer=peer, payload=collection.payloads[peer, span], weight=weights[peer], norm=offer.norm)
                for peer, (_, _, offer) in came.items()
            ),
            norm_limit=norm_limit(head, parent, rules.radius_limit, [offer.norm for _, _, offer in came.values()]),
            rounding_seed=rounding_seed(collection.roster.run, collection.round, span),
        ),
        inclusions={
            peer: _inclusion(place, opening, offer, weights[peer]) if peer in came else only_present((place,))
            for peer, (place, opening, offer) in agreeing.items()
        },
    )


def _named_parent(named: Sequence[tuple[int, Digest]], collection: Collection, head: SpanHead | None) -> Digest | str:
    """Return the parent that most voters name, then most members, or why none of them can get a child from here."""
    roster, places = collection.roster, dict[Digest, list[int]]()
    for place, parent in named:
        places.setdefault(parent, []).append(place)

    def support(parent: Digest) -> tuple[int, int, bool]:
        here = places[parent]
        return roster.num_voters(here), len(here), head is not None and parent == head.digest

    if not places:
        return "nobody was there"
    parent = max(places, key=support)
    if collection.is_one_row and not roster.has_majority(places[parent]):
        return f"{too_few(roster, places[parent])} on one parent; more than half are needed"
    if collection.is_one_row and (head is None or head.digest != parent):
        return "the others build on another parent than this owner holds"
    return parent


def _inclusion(place: int, opening: Opening, offer: SpanOffer, weight: float) -> Inclusion:
    """Return what an entry says of one contribution."""
    return Inclusion(present=(place,), places=(place,), weights=(weight,), norms=(offer.norm,), tokens=opening.tokens)


def norm_limit(head: SpanHead | None, parent: Digest, radius_limit: float, norms: Sequence[float]) -> float:
    """Return the longest contribution that is taken: a multiple of the parent's radius, where the parent is held.

    A reducer of a row may not. It takes a multiple of the median of what three or more contributions say of themselves:
    one liar among them can neither take part with a vector that drowns theirs, nor keep them out. The owner knows the
    radius, and refuses the means of rows that are too long.
    """
    if head is not None and head.digest == parent:
        return radius_limit * head.radius
    median = lower_median(norms) if len(norms) >= 3 else 0.0
    return UNKNOWN_NORM_RATIO * median if median > 0 else float("inf")


def rounding_seed(run: Digest, round_index: int, span: SpanId) -> bytes:
    """Return the seed of an entry's stochastic rounding, so that anyone can redo it."""
    return sha256(b"entry-rounding", run, struct.pack("<qHI", round_index, *span))


def _offers(collection: Collection, span: SpanId) -> dict[PeerId, tuple[int, Opening, SpanOffer]]:
    """Return place, opening and offer of all who named a parent of `span`, in roster order."""
    offers = {}
    for place, member in collection.members.items():
        opening = collection.openings.get(member.peer)
        offer = next((offer for offer in opening.spans if offer.index == span.index), None) if opening else None
        if opening is not None and offer is not None:
            offers[member.peer] = (place, opening, offer)
    return offers


def _weights(
    offers: Mapping[PeerId, tuple[int, Opening, SpanOffer]],
    newcomers: frozenset[PeerId],
    head: SpanHead | None,
    rules: ReductionRules,
) -> dict[PeerId, float]:
    """Quantity times quality of this cycle, clipped; 0 for newcomers, unless nobody else's contribution came.

    Where this peer lacks the parent (`head` is None) all weigh the same: it knows no median that would keep one of them
    from claiming any number of tokens.
    """
    all_new = newcomers.issuperset(offers)
    most = WEIGHT_BOUNDS[1] if head is None else weight_limit(head.median_weight, rules.weight_clip)
    weights = {
        peer: contribution_weight(opening.tokens, opening.steps, most)
        for peer, (_, opening, _) in offers.items()
        if all_new or peer not in newcomers
    }
    if weights and head is None:
        weights = dict.fromkeys(weights, lower_median(tuple(weights.values())))
    return {peer: weights.get(peer, 0.0) for peer in offers}


def newcomers_of(roster: Roster, parent: Roster | None, cycle: int) -> frozenset[PeerId]:
    """Return the members whose (peer, incarnation) the parent's roster lacks, in the first cycle of a roster."""
    if cycle > roster.cycle + 1:
        return frozenset()
    before: Sequence[Member] = parent.members if parent is not None else ()
    known = {(member.peer, member.incarnation) for member in before}
    return frozenset(m.peer for m in roster.members if (m.peer, m.incarnation) not in known)
