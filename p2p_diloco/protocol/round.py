"""One round at one peer: what it contributes, what it collects as a reducer, and when it stops waiting.

Each span is on its own. A reducer averages a span as soon as every member that can still come has come, or at the
deadline; whatever a set of peers does, the round is over when the next one begins.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2p_diloco.ids import Digest, PeerId, SpanHead, SpanId, sha256
from p2p_diloco.protocol.actions import Part, ReduceSpan
from p2p_diloco.protocol.entry import Entry, pack_included
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.messages import Opening, SpanOffer, SpanVector
from p2p_diloco.protocol.roster import Member, Roster
from p2p_diloco.protocol.wire import MOST_COUNTED

NO_SIGNATURE = bytes(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSpan:
    """One span of this peer's contribution, ready to go: the parent it builds on and its norm before clipping."""

    span: SpanId
    parent: Digest
    norm: float
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentContribution:
    """What the island contributes to a round; spans whose log is ahead of the round are left out."""

    round: int
    fragment: int
    tokens: int
    steps: int
    spans: tuple[EncodedSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRules:
    """What the manifest says about contributions."""

    weight_clip: float
    radius_limit: float


@dataclass(slots=True, kw_only=True)
class Collection:
    """What a reducer holds for one round. Roster and grid are those in force when the round began here."""

    round: int
    fragment: int
    roster: Roster
    grid: Grid
    owned: tuple[SpanId, ...]
    newcomers: frozenset[PeerId]
    openings: dict[PeerId, Opening] = field(default_factory=dict)
    payloads: dict[tuple[PeerId, SpanId], bytes] = field(default_factory=dict)
    settled: set[SpanId] = field(default_factory=set)
    refused: set[PeerId] = field(default_factory=set)


def split_by_owner(contribution: FragmentContribution, grid: Grid) -> dict[PeerId, list[EncodedSpan]]:
    """Deal the spans of a contribution to their owners; spans that nobody can reduce are left out."""
    shares: dict[PeerId, list[EncodedSpan]] = {}
    for encoded in contribution.spans:
        owner = grid.owner(encoded.span)
        if owner is not None:
            shares.setdefault(owner, []).append(encoded)
    return shares


def contribution_messages(
    contribution: FragmentContribution, spans: Sequence[EncodedSpan], roster: Digest, incarnation: int
) -> tuple[Opening, tuple[SpanVector, ...]]:
    """Return what goes to one reducer: the opening, then each span."""
    offers = tuple(SpanOffer(index=s.span.index, parent=s.parent, norm=as_float32(s.norm)) for s in spans)
    opening = Opening(
        round=contribution.round,
        roster=roster,
        incarnation=incarnation,
        tokens=contribution.tokens,
        steps=contribution.steps,
        commitment=sha256(*(s.payload for s in spans)),
        spans=offers,
    )
    vectors = tuple(SpanVector(round=contribution.round, span=s.span, payload=s.payload) for s in spans)
    return opening, vectors


def refuse_opening(opening: Opening, sender: PeerId, collection: Collection) -> str | None:
    """Return why an opening does not count, or None when it does."""
    member = collection.roster.member(sender)
    if opening.roster != collection.roster.digest():
        return f"names another roster than {collection.roster.k}, which is in force here"
    if member is None:
        return f"its sender is not on roster {collection.roster.k}"
    if member.incarnation != opening.incarnation:
        return f"is from incarnation {opening.incarnation}; the roster lists {member.incarnation}"
    if sender in collection.openings:
        return "is a second one for the round"
    owned = {span.index for span in collection.owned}
    offered = [offer.index for offer in opening.spans]
    if len(set(offered)) != len(offered) or not owned.issuperset(offered):
        return "offers spans that are not owned here, or one twice"
    if opening.steps <= 0 or opening.tokens <= 0:
        return f"says {opening.tokens} tokens in {opening.steps} steps"
    if any(offer.norm < 0 for offer in opening.spans):
        return "says a negative norm"
    return None


def still_expected(collection: Collection, span: SpanId, gone: frozenset[PeerId]) -> bool:
    """Tell whether some member's contribution to `span` may still come."""
    for member in collection.roster.members:
        peer = member.peer
        if peer in gone or peer in collection.refused or (peer, span) in collection.payloads:
            continue
        opening = collection.openings.get(peer)
        if opening is None or any(offer.index == span.index for offer in opening.spans):
            return True
    return False


def collect_parts(
    collection: Collection, span: SpanId, head: SpanHead | None, rules: ReductionRules
) -> tuple[Digest, ReduceSpan] | str:
    """Return the parent and the parts of the span's mean, or why the span is void this round.

    The parent is the one that more than half of the roster name. A reducer that follows the entries must stand there
    itself; a helper, which holds no state (`head` None), goes by the contributors.
    """
    offers: dict[PeerId, tuple[Opening, SpanOffer]] = {}
    for member in collection.roster.members:
        opening = collection.openings.get(member.peer)
        if opening is None or (member.peer, span) not in collection.payloads:
            continue
        offers[member.peer] = next((opening, offer) for offer in opening.spans if offer.index == span.index)
    num_members = len(collection.roster.members)
    parents = [offer.parent for _, offer in offers.values()]
    parent = max(parents, key=parents.count, default=None)
    if parent is None or 2 * parents.count(parent) <= num_members:
        return f"{len(offers)} of {num_members} members contributed, of which more than half must agree on a parent"
    if head is not None and head.digest != parent:
        return "the others build on another parent than this owner holds"
    agreeing = {peer: offer for peer, offer in offers.items() if offer[1].parent == parent}
    weights = _weights(agreeing, collection.newcomers, head, rules)
    parts = tuple(
        Part(peer=peer, payload=collection.payloads[peer, span], weight=weights[peer], norm=offer.norm)
        for peer, (_, offer) in agreeing.items()
    )
    limit = rules.radius_limit * head.radius if head is not None and head.radius > 0 else float("inf")
    seed = sha256(b"entry-rounding", collection.roster.run, struct.pack("<qHI", collection.round, *span))
    reduce = ReduceSpan(round=collection.round, span=span, parts=parts, norm_limit=limit, rounding_seed=seed)
    return parent, reduce


def _weights(
    offers: Mapping[PeerId, tuple[Opening, SpanOffer]],
    newcomers: frozenset[PeerId],
    head: SpanHead | None,
    rules: ReductionRules,
) -> dict[PeerId, float]:
    """Quantity times quality of this cycle, clipped; 0 for newcomers, unless there is nobody else."""
    all_new = newcomers.issuperset(offers)
    ceiling = rules.weight_clip * head.median_weight if head is not None and head.median_weight > 0 else float("inf")
    weights = {}
    for peer, (opening, _) in offers.items():
        weight = min(opening.tokens * opening.tokens / opening.steps, ceiling)
        weights[peer] = as_float32(weight) if all_new or peer not in newcomers else 0.0
    return weights


def build_entry(
    collection: Collection, parent: Digest, height: int, span: SpanId, parts: Sequence[Part], payload: bytes
) -> Entry | str:
    """Return the unsigned entry of a reduced span, or why the span is void this round.

    Args:
        parts: those that are in the mean, in roster order.
        payload: the encoded mean.
    """
    num_members = len(collection.roster.members)
    if 2 * len(parts) <= num_members:
        return f"{len(parts)} of {num_members} contributions were sound; more than half are needed"
    places = {place for place, m in enumerate(collection.roster.members) if any(p.peer == m.peer for p in parts)}
    positive = [part.weight for part in parts if part.weight > 0]
    if not positive:
        return "all contributions have weight 0"
    return Entry(
        run=collection.roster.run,
        round=collection.round,
        span=span,
        parent=parent,
        height=height,
        roster=collection.roster.digest(),
        included=pack_included(places, num_members),
        weights=tuple(part.weight for part in parts),
        tokens=min(sum(collection.openings[part.peer].tokens for part in parts), MOST_COUNTED),
        median_norm=as_float32(lower_median([part.norm for part in parts])),
        median_weight=as_float32(lower_median(positive)),
        payload=payload,
        signature=NO_SIGNATURE,
    )


def newcomers_of(roster: Roster, parent: Roster | None) -> frozenset[PeerId]:
    """Return the members whose (peer, incarnation) the parent's roster lacks."""
    before: Sequence[Member] = parent.members if parent is not None else ()
    known = {(member.peer, member.incarnation) for member in before}
    return frozenset(m.peer for m in roster.members if (m.peer, m.incarnation) not in known)


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median: always one of the values."""
    return sorted(values)[(len(values) - 1) // 2]


def as_float32(value: float) -> float:
    """Return the nearest float32, as the wire carries it: owner and readers must see the same number."""
    limit = 3.4028234663852886e38
    return float(struct.unpack("<f", struct.pack("<f", min(max(value, -limit), limit)))[0])
