"""The owner's part of a round in a grid: collect the means of all rows, average them, and sign the entry.

Each span is handled on its own. An owner waits for rows as a reducer waits for members: until all that can still arrive
have arrived, or until the deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.log import SpanHead, as_float32, balanced, weight_limit
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.round.round import Collection, MeanInputs, ReductionRules, rounding_seed
from p2p_diloco.protocol.wire.entry import Inclusion, lies_within, places_in, too_few
from p2p_diloco.protocol.wire.messages import RowMean

ROW_MEAN_SLACK = 1.05
"""Factor by which a row's mean may exceed the norm limit. A mean is no longer than its longest part, but rounding it to
8 bits may lengthen it slightly."""


@dataclass(slots=True, kw_only=True)
class Finish:
    """The row means that an owner holds for one round.

    Attributes:
        owned: spans that this peer finishes. Empty in a run of one row, where reducers finish what they reduce.
        means: row means by span and row.
    """

    collection: Collection
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

    def gather(self, span: SpanId, head: SpanHead | None, rules: ReductionRules) -> MeanInputs | str:
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
        inclusions = _bound_weights(
            {row: inclusion for row, (_, inclusion) in agreeing.items()}, head, rules.weight_clip
        )
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
                norm_limit=head.norm_limit(ROW_MEAN_SLACK * rules.radius_limit),
                rounding_seed=rounding_seed(collection.roster.run, collection.round, span),
            ),
            inclusions={collection.grid.reducer(span, row): inclusions[row] for row in agreeing},
        )


def _bound_weights(inclusions: Mapping[int, Inclusion], head: SpanHead, weight_clip: float) -> dict[int, Inclusion]:
    """Limit the weights of rows to what an entry may have. Honest reducers that are up to date already keep to that."""
    limit = as_float32(weight_limit(head.median_weight, weight_clip))
    return {
        row: replace(each, weights=balanced([min(weight, limit) for weight in each.weights]))
        for row, each in inclusions.items()
    }


def refuse_row_mean(mean: RowMean, sender: PeerId, finish: Finish, expected_bytes: int | None) -> str | None:
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
