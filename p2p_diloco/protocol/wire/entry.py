"""The entry: an owner's signed update of one span, the members in its mean, and whether it may be applied."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, SpanId, blake3_of, sha256, short_peer_id
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.frames import (
    DIGEST,
    F32,
    I64,
    MOST_COUNTED,
    SIGNATURE,
    U64,
    Layout,
    blob,
    blob_view,
    layout_of,
    many,
    to_bytes,
)
from p2p_diloco.protocol.wire.roster import MOST_MEMBERS, Roster, Verify
from p2p_diloco.span_log import (
    RADIUS_BOUNDS,
    RADIUS_MOVED,
    WEIGHT_BOUNDS,
    WEIGHT_MOVED,
    AbsorbedEntry,
    SpanHead,
    advance_head,
    as_float32,
    lower_median,
    median_around,
    most_among_strangers,
    weight_limit,
    within_reach,
)

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


MOST_PAYLOAD_BYTES = 1 << 28
VECTOR = blob_view(MOST_PAYLOAD_BYTES)
"""The vector of a message, always its last field: encoding and decoding a frame make no copy of it."""

_ROUNDING = 1.0 + 2.0**-20

HEAD_LAYOUT: Layout = (
    ("digest", DIGEST),
    ("height", U64),
    ("round", I64),
    ("roster", DIGEST),
    ("radius", F32),
    ("median_weight", F32),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One link of a span's log.

    Attributes:
        parent: chain digest of the span before this entry.
        height: parent's height + 1; shows two peers which is ahead, without the entries between them.
        present: bit i (little-endian bytes) is set if member i of the roster was present: it named `parent` for this
            span in this round, whether or not its contribution arrived. More than half of the electorate must be
            present, so that no parent gets two children in one round.
        included: likewise for the present members whose contributions are in the mean.
        weights: weights of the included members in grid order, as used in the mean.
        tokens: sum of the included members' tokens of this cycle.
        median_norm: the span's next radius: the last one, moved towards the median norm of the included contributions,
            before clipping, as far as `within_reach` allows. Norms of 0 do not count.
        median_weight: likewise for the included members' weights that are not 0.
        signature: the owner's, over all other fields (the payload as its hash).
        payload: the encoded mean; its size follows from the manifest. In a received entry, a view of its frame.
    """

    run: Digest
    round: Annotated[int, I64]
    span: SpanId
    parent: Digest
    height: Annotated[int, U64]
    roster: Digest
    present: Annotated[bytes, blob(MOST_MEMBERS // 8)]
    included: Annotated[bytes, blob(MOST_MEMBERS // 8)]
    weights: Annotated[tuple[float, ...], many(F32, MOST_MEMBERS)]
    tokens: Annotated[int, U64]
    median_norm: Annotated[float, F32]
    median_weight: Annotated[float, F32]
    signature: Annotated[bytes, SIGNATURE]
    payload: Annotated[bytes | memoryview, VECTOR]

    def statement(self) -> bytes:
        """Return the bytes that the owner signs: all fields but the signature, with the payload as its hash."""
        return self._statement

    # No slots, so that statement and digest can be cached: both are used repeatedly, and the payload to hash is long.
    @cached_property
    def _statement(self) -> bytes:
        return b"entry" + to_bytes(self, layout_of(Entry)[:-2]) + blake3_of(self.payload)

    def digest(self) -> Digest:
        """Return the digest that chain digests absorb. The signature is not part of it."""
        return self._digest

    @cached_property
    def _digest(self) -> Digest:
        return sha256(self._statement)

    def absorbed(self) -> AbsorbedEntry:
        """Return the part of this entry that determines the tip of the log after it."""
        return AbsorbedEntry(
            digest=self._digest,
            round=self.round,
            roster=self.roster,
            radius=self.median_norm,
            median_weight=self.median_weight,
        )


def pack_included(places: set[int], num_members: int) -> bytes:
    """Return the bitmap of `places` over `num_members` members."""
    bits = bytearray((num_members + 7) // 8)
    for place in places:
        bits[place // 8] |= 1 << (place % 8)
    return bytes(bits)


@functools.lru_cache(maxsize=256)  # more than a round has; 40 MB if all are the longest that strangers can send
def places_in(included: bytes) -> tuple[int, ...]:
    """Return the places that are set in a bitmap, in order."""
    number = int.from_bytes(included, "little")
    return tuple(place for place in range(number.bit_length()) if number >> place & 1)


def included_places(entry: Entry) -> tuple[int, ...]:
    """Return the places on the roster of the members in the mean, in order."""
    return places_in(entry.included)


def lies_within(part: bytes, whole: bytes) -> bool:
    """Return whether every place that is set in `part` is set in `whole` too."""
    return not int.from_bytes(part, "little") & ~int.from_bytes(whole, "little")


def next_head(head: SpanHead, entry: Entry) -> SpanHead:
    """Return the tip of the span's log after `entry`."""
    return advance_head(head, entry.absorbed())


def is_signed_by_owner(entry: Entry, grid: Grid, verify: Verify) -> bool:
    """Return whether the entry is signed by the owner of its span, in the grid of the roster that it names."""
    return verify(grid.owner(entry.span), entry.statement(), entry.signature)


def check_entry(
    entry: Entry, head: SpanHead, roster: Roster, grid: Grid, rules: RunRules, payload_norm: float, verify: Verify
) -> None:
    """Check that `entry` may be applied to a span whose tip is `head`. Uses nothing else, so all peers agree.

    Args:
        entry: the candidate; its parent must be the digest of `head`.
        head: the tip of the span.
        roster, grid: the certified roster that the entry names, and its grid.
        payload_norm: exact norm of the decoded payload, which the codec found finite and of the right size.

    Raises:
        PeerError: it may not be applied; the text gives the reason.
    """
    present, places = places_in(entry.present), included_places(entry)
    num_members, num_voters = len(roster.members), len(roster.voters)
    bitmap_bytes = (num_members + 7) // 8
    limit = head.norm_limit(rules.entry_limit)
    problems = (
        (entry.run != rules.run, "belongs to another run"),
        (entry.roster != roster.digest(), "names another roster"),
        (entry.parent != head.digest, "has another parent than the span's head"),
        (entry.height != head.height + 1, f"has height {entry.height} on top of {head.height}"),
        (entry.round <= head.round, f"is from round {entry.round}, not after round {head.round}"),
        (rules.clock.fragment(entry.round) != entry.span.fragment, f"is for a fragment not of round {entry.round}"),
        (len(entry.present) != bitmap_bytes, f"has a bitmap that does not fit {num_members} members"),
        (len(entry.included) != bitmap_bytes, f"has a bitmap that does not fit {num_members} members"),
        (bool(present) and present[-1] >= num_members, "names members that the roster lacks"),
        (not lies_within(entry.included, entry.present), "includes members that were not there"),
        (
            not roster.has_majority(present),
            f"says that {roster.num_voters(present)} of {num_voters} voters were there; more than half are needed",
        ),
        (len(entry.weights) != len(places), f"has {len(entry.weights)} weights for {len(places)} members"),
        (min(entry.weights, default=0.0) < 0 or sum(entry.weights) <= 0, "has weights that do not sum to more than 0"),
        (payload_norm > limit, f"has norm {payload_norm:.4g}, beyond the limit {limit:.4g}"),
    )
    text = next((text for is_wrong, text in problems if is_wrong), None)
    text = text or _refuse_medians(entry, head) or _refuse_weights(entry, head, roster, grid, rules)
    if text is not None:
        raise PeerError(f"the entry for {entry.span} in round {entry.round} {text}")
    if not is_signed_by_owner(entry, grid, verify):
        name = short_peer_id(grid.owner(entry.span))
        raise PeerError(f"the entry for {entry.span} in round {entry.round} is not signed by its owner {name}")


def _refuse_medians(entry: Entry, head: SpanHead) -> str | None:
    """Return why the medians that an entry publishes cannot follow those of the entry before it, or None."""
    for name, median, last, bounds, most_moved in (
        ("norm", entry.median_norm, head.radius, RADIUS_BOUNDS, RADIUS_MOVED),
        ("weight", entry.median_weight, head.median_weight, WEIGHT_BOUNDS, WEIGHT_MOVED),
    ):
        if median != within_reach(median, last, bounds, most_moved):
            least, most = (within_reach(extreme, last, bounds, most_moved) for extreme in (0.0, float("inf")))
            return f"publishes a median {name} of {median:.4g}, which is not between {least:.4g} and {most:.4g}"
    return None


def _refuse_weights(entry: Entry, head: SpanHead, roster: Roster, grid: Grid, rules: RunRules) -> str | None:
    """Return why an entry's weights are not those that its owner must use, or None.

    An entry does not show whether its payload is the mean with these weights, nor whether they follow from the tokens
    that the contributors trained on.
    """
    limit = weight_limit(head.median_weight, rules.weight_clip)
    largest = max(entry.weights)
    if largest > limit * _ROUNDING:
        return f"has a weight of {largest:.4g}, beyond the limit {limit:.4g}"
    if not rules.has_strangers:
        return None
    rows: dict[int, list[float]] = {}
    for place, weight in zip(included_places(entry), entry.weights, strict=True):
        rows.setdefault(grid.row_of[roster.members[place].peer], []).append(weight)
    for weights in rows.values():
        most = most_among_strangers(weights)
        if max(weights) > most:
            return f"has a weight of {max(weights):.4g}, more than the median of its row, which is {most:.4g}"
    return None
