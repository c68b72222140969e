"""One round at one peer: what it contributes, what it collects as a reducer and as an owner, and when it stops waiting.

Each span is handled on its own. A reducer averages a span as soon as all contributions that can still arrive have
arrived, or at the deadline. In a grid of several rows, the owner of a span waits likewise for the means of the rows,
averages them and signs the entry. Whatever other peers do, a round is over when the next one begins.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Inclusion, join_inclusions, lies_within, only_present, places_in, too_few
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.messages import Opening, RowMean, SpanOffer, SpanVector
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.span_log import (
    WEIGHT_BOUNDS,
    SpanHead,
    as_float32,
    contribution_weight,
    counted_norm,
    levelled,
    lower_median,
    weight_limit,
)

NOTHING_MEASURED: Mapping[PeerId, float] = MappingProxyType({})
UNKNOWN_NORM_RATIO = 16.0
"""Largest norm of a contribution, as a multiple of the median norm, where the reducer does not know the radius. Honest
contributions differ less."""
NOTHING_HELD_BACK: Mapping[SpanId, Digest] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSpan:
    """One encoded span of this peer's contribution: the parent that it builds on, and its norm before clipping."""

    span: SpanId
    parent: Digest
    norm: float
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentContribution:
    """An island's contribution to a round. Spans whose log is ahead of the round are left out."""

    round: int
    fragment: int
    tokens: int
    steps: int
    spans: tuple[EncodedSpan, ...]


@dataclass(slots=True, kw_only=True)
class ReducerRound:
    """The contributions that a reducer collects for one round, with roster and grid as they were when it began here.

    Attributes:
        row: the row of this peer.
        members: members of that row, by their place on the roster.
        reduced: spans that this peer averages for its row.
        newcomers: members in their first cycle, whose weights are at most the published median.
        overdue: number of spans, by member, that were settled without the vector that the member had announced.
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
        """Return whether the grid has one row, so that reducers finish what they reduce."""
        return len(self.grid.rows) == 1


def row_members(roster: Roster, grid: Grid, row: int) -> dict[int, Member]:
    """Return the members of a row by their place on the roster."""
    return {place: m for place, m in enumerate(roster.members) if grid.row_of[m.peer] == row}


def split_by_reducer(contribution: FragmentContribution, grid: Grid, row: int) -> dict[PeerId, list[EncodedSpan]]:
    """Return the spans of a contribution by the reducer of its row that averages them."""
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
    """Return the messages to one reducer: the opening, and a vector for each span.

    Args:
        held_back: parents of the reducer's other spans, for which no vector is sent.
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
        spans=offers,
    )
    vectors = tuple(SpanVector(round=contribution.round, span=s.span, payload=s.payload) for s in spans)
    return opening, vectors


def refuse_opening(opening: Opening, sender: PeerId, collection: ReducerRound) -> str | None:
    """Return why an opening does not count; None if it does."""
    member = collection.roster.member(sender)
    if opening.roster != collection.roster_digest:
        return f"names a different roster; roster {collection.roster.k} is in force here"
    if member is None:
        return f"its sender is not on roster {collection.roster.k}"
    if collection.grid.row_of[sender] != collection.row:
        return f"its sender is in row {collection.grid.row_of[sender]}, not in row {collection.row}"
    if member.incarnation != opening.incarnation:
        return f"is from incarnation {opening.incarnation}; the roster lists {member.incarnation}"
    if sender in collection.openings:
        return "is the second one for this round"
    reduced = {span.index for span in collection.reduced}
    offered = [offer.index for offer in opening.spans]
    if len(set(offered)) != len(offered) or not reduced.issuperset(offered):
        return "offers spans that are not reduced here, or one span twice"
    if any(offer.sends for offer in opening.spans) and not (opening.steps > 0 and opening.tokens > 0):
        return f"claims {opening.tokens} tokens in {opening.steps} steps"
    if any(offer.norm < 0 for offer in opening.spans):
        return "claims a negative norm"
    return None


def has_trained(opening: Opening | None) -> bool:
    """Return whether a member has sent an opening and its island has made steps."""
    return opening is not None and opening.steps > 0


def still_expected(collection: ReducerRound, span: SpanId, gone: frozenset[PeerId]) -> bool:
    """Return whether a contribution to `span` from a member of the row may still arrive."""
    for member in collection.members.values():
        peer = member.peer
        if peer in gone or peer in collection.refused or (peer, span) in collection.payloads:
            continue
        opening = collection.openings.get(peer)
        if opening is None or is_sending(opening, span):
            return True
    return False


def is_sending(opening: Opening, span: SpanId) -> bool:
    """Return whether an opening announces a vector of `span`."""
    return any(offer.index == span.index and offer.sends for offer in opening.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInputs:
    """The parts to average, the parent that they build on, and the members in each part, by its sender.

    `inclusions` also holds members that named the parent but sent no part.
    """

    parent: Digest
    reduce: ReduceSpan
    inclusions: dict[PeerId, Inclusion]

    def inclusion_of(self, sound: frozenset[PeerId], measured: Mapping[PeerId, float] = NOTHING_MEASURED) -> Inclusion:
        """Return the members in the mean of the sound parts. All that named the parent count as present.

        Among strangers the weights are levelled within a row, as for the mean itself. The owner's rows are so already.

        Args:
            sound: senders whose parts the codec found sound.
            measured: norms of their parts, of contributors; the owner's rows have measured those of theirs.
        """
        joined = join_inclusions(
            self._believed(inclusion, measured.get(peer)) if peer in sound else inclusion.left_out()
            for peer, inclusion in self.inclusions.items()
        )
        if self.reduce.stage is Stage.FINISH or not self.reduce.levels:
            return joined
        return replace(joined, weights=levelled(joined.weights))

    def _believed(self, inclusion: Inclusion, measured: float | None) -> Inclusion:
        if measured is None or self.reduce.stage is Stage.FINISH:
            return inclusion
        return replace(inclusion, norms=tuple(counted_norm(claimed, measured) for claimed in inclusion.norms))


def gather_contributions(
    collection: ReducerRound, span: SpanId, head: SpanHead | None, rules: RunRules
) -> MeanInputs | str:
    """Return the parts of this row's mean, or why there is none this round.

    All members that named a parent count in its choice, whether their contributions arrived or not. The mean is of the
    contributions that arrived.

    In a run of one row, more than half of the electorate must name the parent, and it must be the reducer's own tip. In
    a grid, the owner checks the majority. A row uses the parent that most of its voters name, so that no other member
    can make it skip the span. A row without contributions has a mean without parts that names who was present, because
    a silent row must not keep the others from a majority.
    """
    offers = _offers(collection, span)
    parent = _named_parent([(place, offer.parent) for place, _, offer in offers.values()], collection, head)
    if isinstance(parent, str):
        return parent
    agreeing = {peer: offer for peer, offer in offers.items() if offer[2].parent == parent}
    came = {peer: offer for peer, offer in agreeing.items() if (peer, span) in collection.payloads}
    if not came and collection.is_one_row:
        there = too_few(collection.roster, (place for place, _, _ in agreeing.values()))
        return f"no contribution arrived; {there}"
    weights = _weights(came, collection.newcomers, head if head is not None and head.digest == parent else None, rules)
    return MeanInputs(
        parent=parent,
        reduce=ReduceSpan(
            round=collection.round,
            span=span,
            stage=Stage.WHOLE if collection.is_one_row else Stage.ROW,
            parts=tuple(
                Part(peer=peer, payload=collection.payloads[peer, span], weight=weights[peer], norm=offer.norm)
                for peer, (_, _, offer) in came.items()
            ),
            norm_limit=_norm_limit(head, parent, rules, [offer.norm for _, _, offer in came.values()]),
            rounding_seed=rounding_seed(collection.roster.run, collection.round, span),
            levels=rules.has_strangers,
        ),
        inclusions={
            peer: _inclusion(place, opening, offer, weights[peer]) if peer in came else only_present((place,))
            for peer, (place, opening, offer) in agreeing.items()
        },
    )


def _named_parent(named: Sequence[tuple[int, Digest]], collection: ReducerRound, head: SpanHead | None) -> Digest | str:
    """Return the parent that most voters, then most members, named; or why it cannot get a child from this reducer."""
    roster, places = collection.roster, dict[Digest, list[int]]()
    for place, parent in named:
        places.setdefault(parent, []).append(place)

    def support(parent: Digest) -> tuple[int, int, bool]:
        here = places[parent]
        return roster.num_voters(here), len(here), head is not None and parent == head.digest

    if not places:
        return "no members were present"
    parent = max(places, key=support)
    if collection.is_one_row and not roster.has_majority(places[parent]):
        return f"{too_few(roster, places[parent])} on one parent; more than half are needed"
    if collection.is_one_row and (head is None or head.digest != parent):
        return "the others follow a different parent than this owner"
    return parent


def _inclusion(place: int, opening: Opening, offer: SpanOffer, weight: float) -> Inclusion:
    """Return how an entry describes one contribution."""
    return Inclusion(present=(place,), places=(place,), weights=(weight,), norms=(offer.norm,), tokens=opening.tokens)


def _norm_limit(head: SpanHead | None, parent: Digest, rules: RunRules, norms: Sequence[float]) -> float:
    """Return the largest norm of a contribution that is accepted: a multiple of the parent's radius, if it is known.

    A reducer of a row may not hold the parent. It then uses a multiple of the median of the claimed norms, if there are
    three or more: one liar among them can neither drown the others with a long vector nor keep them out. The owner
    knows the radius and refuses means of rows that are too long.
    """
    if head is not None and head.digest == parent:
        return head.norm_limit(rules.contribution_limit)
    median = lower_median(norms) if len(norms) >= 3 else 0.0
    return UNKNOWN_NORM_RATIO * median if median > 0 else float("inf")


def rounding_seed(run: Digest, round_index: int, span: SpanId) -> bytes:
    """Return the seed of an entry's stochastic rounding, so that anyone can reproduce it."""
    return sha256(b"entry-rounding", run, struct.pack("<qHI", round_index, *span))


def _offers(collection: ReducerRound, span: SpanId) -> dict[PeerId, tuple[int, Opening, SpanOffer]]:
    """Return place, opening and offer of each member that named a parent of `span`, in roster order."""
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
    rules: RunRules,
) -> dict[PeerId, float]:
    """Return weights: the tokens of this cycle, clipped.

    Newcomers get at most the published median: one that comes back after a while may have trained for long without the
    others. If this peer lacks the parent (`head` is None), all weights are equal: it knows no median that would limit
    how many tokens one of them can claim.
    """
    most = WEIGHT_BOUNDS[1] if head is None else weight_limit(head.median_weight, rules.weight_clip)
    most_of_new = most if head is None else weight_limit(head.median_weight, 1.0)
    weights = {
        peer: contribution_weight(opening.tokens, most_of_new if peer in newcomers else most)
        for peer, (_, opening, _) in offers.items()
    }
    if weights and head is None:
        weights = dict.fromkeys(weights, lower_median(tuple(weights.values())))
    return weights


def newcomers_of(roster: Roster, parent: Roster | None, cycle: int, first_cycle: int) -> frozenset[PeerId]:
    """Return the members whose (peer, incarnation) is not on the parent roster; none after a roster's first cycle.

    Args:
        first_cycle: the cycle of the first round that the roster governs.
    """
    if cycle > max(roster.cycle + 1, first_cycle):
        return frozenset()
    before: Sequence[Member] = parent.members if parent is not None else ()
    known = {(member.peer, member.incarnation) for member in before}
    return frozenset(m.peer for m in roster.members if (m.peer, m.incarnation) not in known)


ROW_MEAN_SLACK = 1.05
"""Factor by which a row's mean may exceed the norm limit. A mean is no longer than its longest part, but rounding it to
8 bits may lengthen it slightly."""


@dataclass(slots=True, kw_only=True)
class OwnerRound:
    """The row means that an owner holds for one round.

    Attributes:
        owned: spans that this peer finishes. Empty in a run of one row, where reducers finish what they reduce.
        means: row means by span and row.
    """

    collection: ReducerRound
    owned: tuple[SpanId, ...]
    means: dict[tuple[SpanId, int], tuple[RowMean, Inclusion]] = field(default_factory=dict)
    settled: set[SpanId] = field(default_factory=set)

    def add(self, mean: RowMean) -> None:
        """Keep the first mean of a row. Call `refuse_row_mean` before."""
        inclusion = Inclusion(
            present=places_in(mean.present),
            places=places_in(mean.included),
            weights=mean.weights,
            norms=mean.norms,
            tokens=mean.tokens,
        )
        if mean.span not in self.settled:
            self.means.setdefault((mean.span, mean.row), (mean, inclusion))

    def is_complete(self, span: SpanId) -> bool:
        """Return whether the means of all rows have arrived."""
        return all((span, row) in self.means for row in range(len(self.collection.grid.rows)))

    def gather(self, span: SpanId, head: SpanHead | None, rules: RunRules) -> MeanInputs | str:
        """Return the parts of the span's entry, or why the span is skipped this round.

        The parent is the one that more than half of the electorate named, over all rows; it must be the owner's own
        tip. A row without contributions only names who was present, and is not part of the mean.
        """
        collection = self.collection
        rows = [self.means[span, row] for row in range(len(collection.grid.rows)) if (span, row) in self.means]
        named: dict[Digest, list[int]] = {}
        for mean, inclusion in rows:
            named.setdefault(mean.parent, []).extend(inclusion.present)
        roster = collection.roster
        parent = max(named, key=lambda p: (roster.num_voters(named[p]), len(named[p])), default=None)
        if parent is None or not roster.has_majority(named[parent]):
            there = named[parent] if parent is not None else []
            return f"{too_few(roster, there)} on one parent, in {len(rows)} rows; more than half are needed"
        if head is None or head.digest != parent:
            return "the others follow a different parent than this owner"
        agreeing = {row[0].row: row for row in rows if row[0].parent == parent}
        inclusions = _bound_weights({row: inclusion for row, (_, inclusion) in agreeing.items()}, head, rules)
        parts = tuple(
            Part(
                peer=collection.grid.reducer(span, row),
                payload=mean.payload,
                weight=sum(inclusions[row].weights),
                norm=0.0,
            )
            for row, (mean, inclusion) in agreeing.items()
            if inclusion.places
        )
        if not parts:
            return f"no contribution arrived; {too_few(roster, named[parent])}"
        return MeanInputs(
            parent=parent,
            reduce=ReduceSpan(
                round=collection.round,
                span=span,
                stage=Stage.FINISH,
                parts=parts,
                norm_limit=head.norm_limit(ROW_MEAN_SLACK * rules.contribution_limit),
                rounding_seed=rounding_seed(collection.roster.run, collection.round, span),
                levels=rules.has_strangers,
            ),
            inclusions={collection.grid.reducer(span, row): inclusions[row] for row in agreeing},
        )


def _bound_weights(inclusions: Mapping[int, Inclusion], head: SpanHead, rules: RunRules) -> dict[int, Inclusion]:
    """Limit the weights of rows to what an entry may have. Honest reducers that are up to date already keep to that."""
    limit = as_float32(weight_limit(head.median_weight, rules.weight_clip))
    bounded = {row: [min(weight, limit) for weight in each.weights] for row, each in inclusions.items()}
    return {
        row: replace(each, weights=levelled(bounded[row]) if rules.has_strangers else tuple(bounded[row]))
        for row, each in inclusions.items()
    }


def refuse_row_mean(mean: RowMean, sender: PeerId, finish: OwnerRound, expected_bytes: int | None) -> str | None:
    """Return why a row's mean does not count; None if it does."""
    collection = finish.collection
    grid = collection.grid
    if mean.roster != collection.roster_digest:
        return f"names a different roster; roster {collection.roster.k} is in force here"
    if mean.span not in finish.owned or mean.row >= len(grid.rows) or grid.reducer(mean.span, mean.row) != sender:
        return f"its sender does not reduce {mean.span} of row {mean.row} for this owner"
    places = places_in(mean.included)
    members = collection.roster.members
    present = places_in(mean.present)
    if not present or not lies_within(mean.included, mean.present):
        return "names no members as present, or includes members that were not there"
    if present[-1] >= len(members) or any(grid.row_of[members[p].peer] != mean.row for p in present):
        return f"names members that are not in row {mean.row}"
    if not len(places) == len(mean.weights) == len(mean.norms):
        return f"has {len(mean.weights)} weights and {len(mean.norms)} norms for {len(places)} members"
    if places and (min(mean.weights) < 0 or sum(mean.weights) <= 0 or min(mean.norms) < 0):
        return "has a negative norm, or weights that do not sum to more than 0"
    expected = expected_bytes if places else 0
    if len(mean.payload) != expected:
        return f"{mean.span} came with {len(mean.payload)} bytes, {expected} expected"
    return None
