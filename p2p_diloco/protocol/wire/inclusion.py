"""The members in a mean, with weights and norms: the part of an entry that describes its vector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.log import (
    RADIUS_BOUNDS,
    RADIUS_MOVED,
    WEIGHT_BOUNDS,
    WEIGHT_MOVED,
    SpanHead,
    as_float32,
    lower_median,
    median_around,
    within_reach,
)
from p2p_diloco.protocol.wire.entry import Entry, pack_included
from p2p_diloco.protocol.wire.frames import MOST_COUNTED
from p2p_diloco.protocol.wire.roster import Roster

NO_SIGNATURE = bytes(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inclusion:
    """The contributions in a mean, and the members that were present for it.

    Attributes:
        present: roster places of the members that named the mean's parent, ascending; includes `places`.
        places: roster places of the members in the mean, ascending.
        weights, norms: one per place in the mean; norms before clipping, as far as `counted_norm` believes them.
        tokens: tokens of this cycle, summed over the places in the mean.
    """

    present: tuple[int, ...]
    places: tuple[int, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    tokens: int

    def left_out(self) -> Inclusion:
        """Return the inclusion of a part that is left out of the mean: its members were present nevertheless."""
        return only_present(self.present)


def only_present(places: tuple[int, ...]) -> Inclusion:
    """Return the inclusion of members that were present and have no contribution in the mean."""
    return Inclusion(present=places, places=(), weights=(), norms=(), tokens=0)


def join_inclusions(parts: Iterable[Inclusion]) -> Inclusion:
    """Return the inclusion of the mean of several means that share no members, in roster order again."""
    parts = tuple(parts)
    together = sorted(
        one for part in parts for one in zip(part.places, part.weights, part.norms, strict=True)
    )  # places differ, so nothing else decides
    return Inclusion(
        present=tuple(sorted(place for part in parts for place in part.present)),
        places=tuple(place for place, _, _ in together),
        weights=tuple(weight for _, weight, _ in together),
        norms=tuple(norm for _, _, norm in together),
        tokens=min(sum(part.tokens for part in parts), MOST_COUNTED),
    )


def build_entry(
    roster: Roster,
    roster_digest: Digest,
    round_index: int,
    span: SpanId,
    head: SpanHead,
    inclusion: Inclusion,
    payload: bytes | memoryview,
    *,
    owner: int | None = None,
) -> Entry | str:
    """Return the unsigned entry of a span, or why the span is skipped this round.

    Args:
        head: the tip of the span, which the entry follows.
        payload: the encoded mean.
        owner: roster place of the span's owner, who builds the entry. Of two contributors it believes its own norm.
    """
    num_members = len(roster.members)
    if not roster.has_majority(inclusion.present):
        return f"{too_few(roster, inclusion.present)}; more than half are needed"
    positive = [weight for weight in inclusion.weights if weight > 0]
    if not positive:
        return "all contributions have weight 0" if inclusion.places else "no contribution was sound"
    # A contribution may claim a norm of 0, which is no evidence of the other norms.
    norms = {place: norm for place, norm in zip(inclusion.places, inclusion.norms, strict=True) if norm > 0}
    median_norm = as_float32(median_around(tuple(norms.values()), head.radius)) if norms else head.radius
    if len(norms) == 2 and owner in norms:
        median_norm = as_float32(norms[owner])
    return Entry(
        run=roster.run,
        round=round_index,
        span=span,
        parent=head.digest,
        height=head.height + 1,
        roster=roster_digest,
        present=pack_included(set(inclusion.present), num_members),
        included=pack_included(set(inclusion.places), num_members),
        weights=inclusion.weights,
        tokens=inclusion.tokens,
        median_norm=within_reach(median_norm, head.radius, RADIUS_BOUNDS, RADIUS_MOVED),
        median_weight=within_reach(as_float32(lower_median(positive)), head.median_weight, WEIGHT_BOUNDS, WEIGHT_MOVED),
        payload=payload,
        signature=NO_SIGNATURE,
    )


def too_few(roster: Roster, places: Iterable[int]) -> str:
    """Return a phrase with the number of voters that were present."""
    return f"{roster.num_voters(places)} of {len(roster.voters)} voters were there"
