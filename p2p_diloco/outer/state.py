"""A span's state, agreed and in flight, and what changes it: contribute, absorb an entry, replace the span.

A chain digest identifies the absorbed entries, a content digest the bytes. Peers with equal chain digests must have
equal content digests; a difference means bad memory or a bug.

In flight are contributions that were sent, but not yet resolved by an entry. Each leaves the list exactly once: with
the entry of its round, skipped by a later entry, or counted as included (a transfer, an adoption, too many in flight).
Losing one is cheap; counting one twice is not.

One function per event changes none of its arguments and returns everything that is new. θ changes only together with φ
and the list in flight, so no contribution can be resolved twice or lost. Unless noted otherwise, every function
preserves the residual φ − θ − Σ in-flight: what the island has learnt but not sent.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2p_diloco.codec.vectors import LARGEST_ANCHOR, Vector, euclidean_norm, is_vector, is_within, read_only, zero_small
from p2p_diloco.errors import NonFiniteUpdate, RoundError, StateError
from p2p_diloco.ids import ZERO_DIGEST, Digest, blake3_of, sha256
from p2p_diloco.memory.slabs import copy_of, zero_vector
from p2p_diloco.outer.outer_step import MergeRule, OuterRule, apply_outer_step, merge_local
from p2p_diloco.span_log import (
    FOUNDING_WEIGHT,
    GENESIS_ROUND,
    MAX_NORM_RATIO,
    AbsorbedEntry,
    SpanHead,
    advance_head,
    founding_radius,
)

MAX_IN_FLIGHT = 8
MOST_LEFT = 4.0
"""Longest part of Δ that may stay in θ for good, in limits of a contribution: what as many full ones can send."""
PATIENT_FOR = 8
"""Contributions of a span in a row that leave more, before θ is pulled back; see `Unsent`."""
_LIMIT_RISES = 1.25

# Each kind of digest has its own prefix, so that one cannot be mistaken for another.
_CONTENT_LABEL = b"p2p-diloco span content 2\n"
_STATE_LABEL = b"p2p-diloco state 1\n"
# Scaling rounds every element by up to 2⁻²⁴ of itself, and the factor likewise: this margin keeps the clipped norm
# within the limit in spite of both.
_CLIP_MARGIN = 1.0 - 2.0**-22


# Not compared by value: `==` on arrays has no single truth value. Compare digests.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanState:
    """The agreed state of one span.

    The arrays are made read-only; their ownership is transferred.

    Attributes:
        head: the span's log position.
        anchor_N: φ, float32, shape (N,).
        momentum_N: m, same shape.
    """

    head: SpanHead
    anchor_N: Vector
    momentum_N: Vector

    def __post_init__(self) -> None:
        if not is_vector(self.anchor_N) or not is_vector(self.momentum_N) or len(self.anchor_N) != len(self.momentum_N):
            raise StateError(
                f"anchor is {self.anchor_N.dtype} {self.anchor_N.shape} and momentum {self.momentum_N.dtype} "
                f"{self.momentum_N.shape}; expected float32 vectors of one length"
            )
        for vector_N in (self.anchor_N, self.momentum_N):
            vector_N.setflags(write=False)

    @property
    def elements(self) -> int:
        """N."""
        return len(self.anchor_N)

    def followed_by(self, entry: AbsorbedEntry, anchor_N: Vector, momentum_N: Vector) -> SpanState:
        """Return the span after an entry whose outer step gave these vectors: d ← H(d, entry digest), height + 1.

        Raises:
            StateError: the entry's round is not after the span's.
        """
        if entry.round <= self.head.round:
            raise StateError(
                f"entry of round {entry.round} cannot follow round {self.head.round}, which is already absorbed"
            )
        return SpanState(head=advance_head(self.head, entry), anchor_N=anchor_N, momentum_N=momentum_N)


class PendingContribution(NamedTuple):
    """A contribution in its encoded form, which needs an eighth of the memory of the decoded one."""

    payload: bytes | memoryview
    decode: Callable[[bytes | memoryview], Vector]


class Contribution(NamedTuple):
    """A contribution of an island for one span in one round, encoded or decoded; read-only."""

    round: int
    sent: Vector | PendingContribution

    @property
    def decoded_N(self) -> Vector:
        """Return the decoded contribution, as every peer decodes it."""
        return self.sent.decode(self.sent.payload) if isinstance(self.sent, PendingContribution) else self.sent


# Not compared by value: `==` on arrays has no single truth value.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlight:
    """One span's unresolved contributions, oldest round first. Immutable: methods return a new list."""

    contributions: tuple[Contribution, ...] = ()

    def __len__(self) -> int:
        return len(self.contributions)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds of the contributions, in increasing order."""
        return tuple(contribution.round for contribution in self.contributions)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Decoded contributions in order of rounds, for `pseudo_gradient`."""
        return tuple(contribution.decoded_N for contribution in self.contributions)

    def with_contribution(self, round_index: int, sent: Vector | PendingContribution) -> InFlight:
        """Add a contribution; a vector must not be modified afterwards.

        Raises:
            RoundError: a contribution of that round or a later one is already in flight (the clock was set back).
        """
        if self.contributions and round_index <= self.contributions[-1].round:
            raise RoundError(
                f"round {round_index} cannot follow round {self.contributions[-1].round}, whose contribution is in "
                "flight; contribute again in a later round"
            )
        kept = sent if isinstance(sent, PendingContribution) else read_only(sent)
        return InFlight(contributions=(*self.contributions, Contribution(round_index, kept)))

    def of_round(self, entry_round: int) -> Contribution | None:
        return next((one for one in self.contributions if one.round == entry_round), None)

    def after(self, entry_round: int) -> InFlight:
        """Return what remains after the entry of a round, which resolves that round and all earlier ones."""
        return InFlight(contributions=tuple(one for one in self.contributions if one.round > entry_round))

    def resolve(self, entry_round: int) -> tuple[InFlight, Vector | None]:
        """Remove what the entry of a round settles; return the contribution of exactly that round, which leaves θ.

        Contributions of earlier rounds were skipped, since chains only move forward: they stay in θ, and so are part of
        the next Δ.
        """
        resolved = self.of_round(entry_round)
        return self.after(entry_round), resolved.decoded_N if resolved is not None else None

    def overflow(self, limit: int = MAX_IN_FLIGHT) -> tuple[InFlight, list[Vector]]:
        """Keep the newest `limit` contributions; return the older ones, to be removed from θ as if included."""
        surplus = max(0, len(self.contributions) - limit)
        if not surplus:
            return self, []
        return InFlight(contributions=self.contributions[surplus:]), list(self.vectors[:surplus])

    def cleared(self) -> tuple[InFlight, list[Vector]]:
        """Empty the list; return all contributions, to be removed from θ as if included."""
        return self.overflow(limit=0)

    def scaled(self, alpha: float) -> InFlight:
        """Multiply every contribution by `alpha`, as `blend` multiplies the part of θ that contains them."""
        scaled = (read_only(np.multiply(one.decoded_N, np.float32(alpha))) for one in self.contributions)
        return InFlight(contributions=tuple(map(Contribution, self.rounds, scaled)))


class Lengths(NamedTuple):
    """Norms of a contribution, or sums of them: newly learnt, sent, and given up.

    Sent is |Δ|, but at most the limit. Newly learnt is |Δ| minus what the contribution before left in θ. So the two are
    equal if nothing was clipped; otherwise learnt = sent + given up + growth of what is left. Only norms are compared:
    what is learnt at an angle to the rest counts less than its own norm, and what cancels the rest counts negative.
    """

    learnt: float = 0.0
    sent: float = 0.0
    given_up: float = 0.0

    def plus(self, other: Lengths) -> Lengths:
        return Lengths(self.learnt + other.learnt, self.sent + other.sent, self.given_up + other.given_up)


class Unsent(NamedTuple):
    """The part of Δ that the last contribution of a span left in θ because it was clipped.

    It is too much after `PATIENT_FOR` contributions in a row that left more than `MOST_LEFT` limits. Fewer may be
    ordinary: when an entry follows rounds without one, what was sent to them returns to Δ. While the limit rises, as in
    the first cycles of a run, none counts.

    Attributes:
        length: norm of what it left.
        limit: largest norm that it could have, or that another of those in a row could.
        num_excessive: contributions in a row that left too much.
    """

    length: float = 0.0
    limit: float = 0.0
    num_excessive: int = 0

    @property
    def is_too_much(self) -> bool:
        return self.num_excessive >= PATIENT_FOR

    def pulls_back(self, limit: float) -> bool:
        """Return whether a contribution with this limit pulls θ back if it leaves too much again."""
        return self.is_too_much and not self._rises_to(limit)

    def after(self, norm: float, limit: float) -> tuple[Unsent, Lengths]:
        """Return what is unsent after a contribution, and the lengths of that.

        Args:
            norm: |Δ| before clipping.
            limit: largest norm that reducers accept.
        """
        sent = min(norm, limit)
        left, most = norm - sent, MOST_LEFT * limit
        given_up = max(left - most, 0.0) if self.pulls_back(limit) else 0.0
        num_excessive = self.num_excessive + 1 if left > most and not self._rises_to(limit) else 0
        lengths = Lengths(learnt=norm - self.length, sent=sent, given_up=given_up)
        # Otherwise a limit that goes up and down would be one that rises, again and again.
        highest = max(limit, self.limit) if left > most else limit
        return Unsent(left - given_up, highest, num_excessive), lengths

    def _rises_to(self, limit: float) -> bool:
        return limit > _LIMIT_RISES * self.limit


class IslandSpan(NamedTuple):
    """A span on one island.

    Attributes:
        state: the agreed state.
        in_flight: contributions whose entries have not arrived.
        local_N: θ, float32, shape (N,).
    """

    state: SpanState
    in_flight: InFlight
    local_N: Vector


def genesis_state(anchor_N: Vector, founding_roster: Digest) -> SpanState:
    """Return the initial state of a span: zero momentum, no entries, d = the content digest, founding limits.

    Args:
        anchor_N: initial values; copied, with values too small for an agreed state set to zero.
        founding_roster: digest of roster 0.
    Raises:
        StateError: a value is not finite or too large.
    """
    wild = len(anchor_N) - int(np.count_nonzero(np.abs(anchor_N) <= LARGEST_ANCHOR))
    if wild:
        raise StateError(
            f"{wild} of {len(anchor_N)} initial values are not finite or beyond {LARGEST_ANCHOR:.3g}; "
            "found the run with another model or seed"
        )
    start_N, momentum_N = copy_of(anchor_N), zero_vector(len(anchor_N))
    zero_small(start_N)
    head = SpanHead(
        digest=content_digest(start_N, momentum_N, ZERO_DIGEST),
        height=0,
        round=GENESIS_ROUND,
        roster=founding_roster,
        radius=founding_radius(len(start_N)),
        median_weight=FOUNDING_WEIGHT,
    )
    return SpanState(head=head, anchor_N=start_N, momentum_N=momentum_N)


def absorb(state: SpanState, *, entry: AbsorbedEntry, update_N: Vector, rule: OuterRule) -> SpanState:
    """Apply one valid entry to a span atomically: outer step, d ← H(d, entry digest), height + 1.

    The caller has validated the entry: signature, parent, majority, radius.

    Args:
        state: the entry's parent.
        entry: the entry's values for the head.
        update_N: the decoded entry, shape (N,).
        rule: from the manifest.
    Raises:
        StateError: the entry's round is not after the span's, or its length differs.
        NonFiniteUpdate: the update or the step along it is not finite.
    """
    if len(update_N) != state.elements:
        raise StateError(f"an update of {len(update_N)} elements does not match a span of {state.elements}")
    anchor_N, momentum_N = apply_outer_step(state.anchor_N, state.momentum_N, update_N, rule.at(state.head.height))
    return state.followed_by(entry, anchor_N, momentum_N)


def is_sound(numbers_N: Vector, *, largest: float) -> bool:
    """Return whether all values are valid in φ (`largest` = `LARGEST_ANCHOR`) or m (`LARGEST_MOMENTUM`)."""
    return bool(is_within(numbers_N, np.float32(largest).view(np.uint32)))


def content_digest(anchor_N: Vector, momentum_N: Vector, chain_digest: Digest) -> Digest:
    """Return x = H(φ, m, d) over little-endian float32 bytes; d is `ZERO_DIGEST` at founding, where x becomes d."""
    return blake3_of(_CONTENT_LABEL, _little_endian(anchor_N), _little_endian(momentum_N), chain_digest)


def state_digest(states: Sequence[SpanState]) -> Digest:
    """Return one digest over the bytes of spans, in order of fragment and span: equal means equal φ, m and d."""
    contents = (content_digest(state.anchor_N, state.momentum_N, state.head.digest) for state in states)
    return sha256(_STATE_LABEL, *contents)


def _little_endian(vector_N: Vector) -> memoryview:
    return np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B")


def pseudo_gradient(anchor_N: Vector, local_N: Vector, in_flight: Sequence[Vector]) -> Vector:
    """Return Δ = φ − θ − Σ in-flight c; a descent direction, to be subtracted.

    Contributions in flight are still in θ but already sent. Sending them again would count them twice, and with an
    exchange longer than a cycle the residual would oscillate or grow.

    Args:
        anchor_N, local_N: φ and θ, float32, shape (N,).
        in_flight: unresolved decoded contributions, in order of rounds.
    Returns:
        Δ, freshly allocated. Not finite where θ is not.
    """
    delta_N = np.empty_like(anchor_N)
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(anchor_N, local_N, out=delta_N)
        for decoded_N in in_flight:
            np.subtract(delta_N, decoded_N, out=delta_N)
    return delta_N


def clip_to_norm(delta_N: Vector, limit: float) -> tuple[Vector, float]:
    """Scale Δ to a norm of at most `limit`, keeping its direction.

    The clipped part is not lost: it stays in θ and is part of the next Δ.

    Returns:
        The clipped Δ (the same array if it is within the limit, or not finite) and its norm before clipping.
    """
    norm = euclidean_norm(delta_N)
    if not limit < norm < float("inf"):
        return delta_N, norm
    return np.multiply(delta_N, np.float32(limit / norm * _CLIP_MARGIN)), norm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedContribution:
    """A pseudo-gradient ready for encoding.

    Attributes:
        delta_N: Δ after clipping, float32, shape (N,).
        norm: Euclidean norm of Δ before clipping; it is sent along and determines the next radius.
        limit: largest norm that reducers accept.
    """

    delta_N: Vector
    norm: float
    limit: float


def prepare_contribution(
    span: IslandSpan, *, round_index: int, max_norm_ratio: float = MAX_NORM_RATIO
) -> PreparedContribution:
    """Compute the pseudo-gradient of a span for a round and clip it to κ × the last published radius.

    Changes nothing; after encoding, pass the decoded values to `record_contribution`.

    Args:
        max_norm_ratio: κ.
    Raises:
        RoundError: the span has an entry or a contribution in flight of that round or a later one: skip the round.
        NonFiniteUpdate: θ holds a NaN or an infinity (the island diverged).
    """
    state = span.state
    newest = max((state.head.round, *span.in_flight.rounds))
    if round_index <= newest:
        raise RoundError(f"round {round_index} is over: the span is at round {newest}; wait for the next one")
    limit = state.head.norm_limit(max_norm_ratio)
    delta_N, norm = clip_to_norm(pseudo_gradient(state.anchor_N, span.local_N, span.in_flight.vectors), limit)
    if not math.isfinite(norm):
        raise NonFiniteUpdate(
            f"local parameters are not finite in a span of {state.elements} elements; skipping round {round_index}; "
            "a lower inner learning rate may help"
        )
    return PreparedContribution(delta_N=delta_N, norm=norm, limit=limit)


def pull_back(span: IslandSpan, prepared: PreparedContribution) -> IslandSpan:
    """Give up what is too long to be sent: move θ toward φ until Δ is at most 1 + `MOST_LEFT` limits long.

    θ ← θ + (1 − s) Δ, so that Δ, and with it the residual, becomes s Δ. The contribution is a shorter multiple of the
    same Δ, so after it was recorded `MOST_LEFT` limits are left, and what rounding to a few bits left of it. φ and what
    is in flight stay.

    Args:
        prepared: from `prepare_contribution` of this span, not yet shortened by an encoding.
    Returns:
        The same span if Δ is no longer than that.
    """
    excess = prepared.norm - (1.0 + MOST_LEFT) * prepared.limit
    if not excess > 0.0:
        return span
    given_up_N = np.multiply(prepared.delta_N, np.float32(excess / (prepared.limit * _CLIP_MARGIN)))
    return span._replace(local_N=np.add(span.local_N, given_up_N, out=given_up_N))


def record_contribution(
    span: IslandSpan, *, round_index: int, sent: Vector | PendingContribution, max_in_flight: int = MAX_IN_FLIGHT
) -> IslandSpan:
    """Add a sent contribution to the list in flight; beyond `max_in_flight`, the oldest count as included.

    The residual decreases by c, to what was not sent: codec error, clipped part, steps since the snapshot. θ is
    returned unchanged unless something overflowed.

    Args:
        sent: c, encoded or decoded; ownership is transferred.
    Raises:
        RoundError: a contribution of that round or a later one is already in flight.
    """
    local_N = span.local_N
    remaining, surplus = span.in_flight.with_contribution(round_index, sent).overflow(max_in_flight)
    for overflowed_N in surplus:
        local_N = np.add(local_N, overflowed_N)
    return IslandSpan(span.state, remaining, local_N)


def advance_span(
    span: IslandSpan, *, entry: AbsorbedEntry, update_N: Vector, outer_rule: OuterRule, merge_rule: MergeRule
) -> IslandSpan:
    """Absorb a valid entry atomically: outer step, resolve our contribution of its round, merge.

    Args and errors: those of `absorb` and `follow_entry`.
    """
    advanced = absorb(span.state, entry=entry, update_N=update_N, rule=outer_rule)
    return follow_entry(span, advanced=advanced, merge_rule=merge_rule)


def follow_entry(span: IslandSpan, *, advanced: SpanState, merge_rule: MergeRule) -> IslandSpan:
    """Apply an already absorbed entry to θ and the list in flight: the second half of `advance_span`.

    With `keep` the residual is preserved, whether or not the entry includes our contribution. Only contributions of
    skipped rounds leave the list but stay in θ, and so return to the residual. With `blend` the residual against φ_new
    is multiplied by alpha.

    Args:
        span: its state is the entry's parent.
        advanced: the span after the entry; many islands may share it.
    """
    remaining, resolved_N = span.in_flight.resolve(advanced.head.round)
    merged_N = merge_local(span.local_N, span.state.anchor_N, advanced.anchor_N, resolved_N, merge_rule)
    share = merge_rule.in_flight_share
    return IslandSpan(advanced, remaining if share == 1.0 else remaining.scaled(share), merged_N)


def replace_span(span: IslandSpan, *, replacement: SpanState, merge_rule: MergeRule) -> IslandSpan:
    """Replace a span by a transfer or an adoption; all contributions in flight count as included.

    It is unknown which of them the replacement includes. Removing all from θ loses at most those not included; keeping
    them would count the others twice. With `keep`, θ moves by φ_new − φ_old + Σ c and the residual is preserved; with
    `blend`, φ_new is assumed to include the contributions, and the list is emptied.

    Args:
        replacement: the span from other peers, with verified digests.
    Raises:
        StateError: the replacement has another length.
    """
    state = span.state
    if replacement.elements != state.elements:
        raise StateError(f"a replacement of {replacement.elements} elements does not match a span of {state.elements}")
    emptied, leaving = span.in_flight.cleared()
    merged_N = merge_local(span.local_N, state.anchor_N, replacement.anchor_N, _sum(leaving), merge_rule)
    return IslandSpan(replacement, emptied, merged_N)


def _sum(vectors: Sequence[Vector]) -> Vector | None:
    if not vectors:
        return None
    total_N = vectors[0].copy()
    for vector_N in vectors[1:]:
        np.add(total_N, vector_N, out=total_N)
    return total_N
