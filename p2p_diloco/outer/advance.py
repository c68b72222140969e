"""The events of one island's span: contribute, absorb an entry, replace the span.

The trainer calls one function per event and span, which changes none of its arguments and returns everything that is
new. θ changes only together with φ and the list in flight, so no contribution can be resolved twice or lost. Unless
noted otherwise, every function preserves the residual φ − θ − Σ in-flight: what the island has learnt but not sent.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2p_diloco.codec.vectors import Vector, euclidean_norm
from p2p_diloco.errors import NonFiniteUpdate, RoundError, StateError
from p2p_diloco.log import MAX_NORM_RATIO, AbsorbedEntry
from p2p_diloco.outer.outer_step import MergeRule, OuterRule, merge_local
from p2p_diloco.outer.state import MAX_IN_FLIGHT, InFlight, PendingContribution, SpanState, absorb

# Scaling rounds every element by up to 2⁻²⁴ of itself, and the factor likewise: this margin keeps the clipped norm
# within the limit in spite of both.
_CLIP_MARGIN = 1.0 - 2.0**-22


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


class SpanAdvance(NamedTuple):
    """A span after an event: agreed state, contributions in flight, and the θ to write back (new unless noted)."""

    state: SpanState
    in_flight: InFlight
    local_N: Vector


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
    state: SpanState, in_flight: InFlight, local_N: Vector, *, round_index: int, max_norm_ratio: float = MAX_NORM_RATIO
) -> PreparedContribution:
    """Compute the pseudo-gradient of a span for a round and clip it to κ × the last published radius.

    Changes nothing; after encoding, pass the decoded values to `record_contribution`.

    Args:
        state: the agreed state of the span.
        in_flight: unresolved contributions.
        local_N: snapshot of θ, float32, shape (N,).
        round_index: the current round.
        max_norm_ratio: κ.
    Raises:
        RoundError: the span has an entry or a contribution in flight of that round or a later one: skip the round.
        NonFiniteUpdate: θ holds a NaN or an infinity (the island diverged).
    """
    newest = max((state.head.round, *in_flight.rounds))
    if round_index <= newest:
        raise RoundError(f"round {round_index} is over: the span is at round {newest}; wait for the next one")
    limit = state.head.norm_limit(max_norm_ratio)
    delta_N, norm = clip_to_norm(pseudo_gradient(state.anchor_N, local_N, in_flight.vectors), limit)
    if not math.isfinite(norm):
        raise NonFiniteUpdate(
            f"local parameters are not finite in a span of {state.elements} elements; skipping round {round_index}; "
            "a lower inner learning rate may help"
        )
    return PreparedContribution(delta_N=delta_N, norm=norm, limit=limit)


def record_contribution(
    state: SpanState,
    in_flight: InFlight,
    local_N: Vector,
    *,
    round_index: int,
    sent: Vector | PendingContribution,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> SpanAdvance:
    """Add a sent contribution to the list in flight; beyond `max_in_flight`, the oldest count as included.

    The residual decreases by c, to what was not sent: codec error, clipped part, steps since the snapshot.

    Args:
        state: the agreed state of the span; returned unchanged.
        in_flight: earlier contributions.
        local_N: current θ; returned unchanged unless something overflowed.
        round_index: round of the contribution.
        sent: c, encoded or decoded; ownership is transferred.
        max_in_flight: limit of the list.
    Raises:
        RoundError: a contribution of that round or a later one is already in flight.
    """
    remaining, surplus = in_flight.with_contribution(round_index, sent).overflow(max_in_flight)
    for overflowed_N in surplus:
        local_N = np.add(local_N, overflowed_N)
    return SpanAdvance(state, remaining, local_N)


def advance_span(
    state: SpanState,
    in_flight: InFlight,
    local_N: Vector,
    *,
    entry: AbsorbedEntry,
    update_N: Vector,
    outer_rule: OuterRule,
    merge_rule: MergeRule,
) -> SpanAdvance:
    """Absorb a valid entry atomically: outer step, resolve our contribution of its round, merge.

    Args: those of `absorb` and `follow_entry`; errors are those of `absorb`.
    """
    advanced = absorb(state, entry=entry, update_N=update_N, rule=outer_rule)
    return follow_entry(state, in_flight, local_N, advanced=advanced, merge_rule=merge_rule)


def follow_entry(
    state: SpanState, in_flight: InFlight, local_N: Vector, *, advanced: SpanState, merge_rule: MergeRule
) -> SpanAdvance:
    """Apply an already absorbed entry to θ and the list in flight: the second half of `advance_span`.

    With `keep` the residual is preserved, whether or not the entry includes our contribution. Only contributions of
    skipped rounds leave the list but stay in θ, and so return to the residual. With `blend` the residual against φ_new
    is multiplied by alpha.

    Args:
        state: the entry's parent.
        in_flight: unresolved contributions.
        local_N: current θ.
        advanced: the span after the entry; many islands may share it.
        merge_rule: from the manifest.
    """
    remaining, resolved_N = in_flight.resolve(advanced.head.round)
    merged_N = merge_local(local_N, state.anchor_N, advanced.anchor_N, resolved_N, merge_rule)
    share = merge_rule.in_flight_share
    return SpanAdvance(advanced, remaining if share == 1.0 else remaining.scaled(share), merged_N)


def replace_span(
    state: SpanState, in_flight: InFlight, local_N: Vector, *, replacement: SpanState, merge_rule: MergeRule
) -> SpanAdvance:
    """Replace a span by a transfer or an adoption; all contributions in flight count as included.

    It is unknown which of them the replacement includes. Removing all from θ loses at most those not included; keeping
    them would count the others twice. With `keep`, θ moves by φ_new − φ_old + Σ c and the residual is preserved; with
    `blend`, φ_new is assumed to include the contributions, and the list is emptied.

    Args:
        state: the old span.
        in_flight: unresolved contributions.
        local_N: current θ.
        replacement: the span from other peers, with verified digests.
        merge_rule: from the manifest.
    Raises:
        StateError: the replacement has another length.
    """
    if replacement.elements != state.elements:
        raise StateError(f"a replacement of {replacement.elements} elements does not match a span of {state.elements}")
    emptied, leaving = in_flight.cleared()
    merged_N = merge_local(local_N, state.anchor_N, replacement.anchor_N, _sum(leaving), merge_rule)
    return SpanAdvance(replacement, emptied, merged_N)


def _sum(vectors: Sequence[Vector]) -> Vector | None:
    if not vectors:
        return None
    total_N = vectors[0].copy()
    for vector_N in vectors[1:]:
        np.add(total_N, vector_N, out=total_N)
    return total_N
