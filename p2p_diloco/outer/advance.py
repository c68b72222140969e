"""One island's span, from event to event: contribute, absorb an entry, be replaced.

The trainer calls one function per event and span and gets everything that changed. θ moves only together with φ and the
list in flight, so no contribution can be resolved twice or forgotten. What every function keeps, but where its text
says otherwise, is the residual φ − θ − Σ in-flight: what the island knows and nobody was told.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from p2p_diloco.errors import NonFiniteUpdate, RoundError, StateError
from p2p_diloco.log.head import AbsorbedEntry
from p2p_diloco.outer.in_flight import MAX_IN_FLIGHT, InFlight, Sent
from p2p_diloco.outer.merge import MergeRule, merge_local
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.pseudo_gradient import clip_to_norm, pseudo_gradient
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.outer.vector import Vector

RADIUS_FACTOR = 2.0
"""κ: a sender clips its contribution to this many times the last published radius."""


class SpanAdvance(NamedTuple):
    """A span after an event: what is agreed, what is in flight, and the θ to write back (fresh unless it says so)."""

    state: SpanState
    in_flight: InFlight
    local_N: Vector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedContribution:
    """A pseudo-gradient that is ready to be encoded.

    Attributes:
        round: the round that it is for.
        delta_N: Δ after clipping, float32, shape (N,).
        norm: Euclidean norm of Δ before clipping; travels with the contribution and makes the next radius.
        limit: largest norm that reducers take.
    """

    round: int
    delta_N: Vector
    norm: float
    limit: float


def prepare_contribution(
    state: SpanState, in_flight: InFlight, local_N: Vector, *, round_index: int, max_norm_ratio: float = RADIUS_FACTOR
) -> PreparedContribution:
    """Take the pseudo-gradient of a span for a round and clip it to κ × the last published radius.

    Changes nothing; once it is encoded, tell `record_contribution` what it decodes to.

    Args:
        state: the span as agreed.
        in_flight: what was sent and is unresolved.
        local_N: snapshot of θ, float32, shape (N,). Not changed.
        round_index: the round that has begun.
        max_norm_ratio: κ, from the manifest.
    Raises:
        RoundError: an entry of that round or a later one is held, or such a contribution is in flight: skip the round.
        NonFiniteUpdate: θ holds a NaN or an infinity (the island diverged).
    """
    newest = max((state.head.round, *in_flight.rounds))
    if round_index <= newest:
        raise RoundError(f"round {round_index} is settled: the span stands at round {newest}; wait for the next one")
    limit = norm_limit(state, max_norm_ratio)
    delta_N, norm = clip_to_norm(pseudo_gradient(state.anchor_N, local_N, in_flight.vectors), limit)
    if not math.isfinite(norm):
        raise NonFiniteUpdate(
            f"local parameters are not finite in a span of {state.elements} elements; nothing is contributed to round "
            f"{round_index}; a lower inner learning rate may help"
        )
    return PreparedContribution(round=round_index, delta_N=delta_N, norm=norm, limit=limit)


def norm_limit(state: SpanState, max_norm_ratio: float) -> float:
    """Return the largest norm that reducers take of a contribution."""
    return max_norm_ratio * state.head.radius


def shrink_contribution(prepared: PreparedContribution, encoded_norm: float) -> PreparedContribution:
    """Shrink a contribution whose *encoding* is longer than the limit; the same object when it is not.

    Rounding to a few bits lengthens a vector by a little, and reducers look at the encoded norm. Encode again until the
    same object comes back: once or twice.

    Args:
        prepared: what was encoded.
        encoded_norm: Euclidean norm of what it decodes to.
    """
    if encoded_norm <= prepared.limit:
        return prepared
    factor = np.float32(prepared.limit / encoded_norm * (1.0 - 2.0**-10))
    return replace(prepared, delta_N=np.multiply(prepared.delta_N, factor))


def record_contribution(
    state: SpanState,
    in_flight: InFlight,
    local_N: Vector,
    *,
    round_index: int,
    sent: Vector | Sent,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> SpanAdvance:
    """Remember what was sent; with more than `max_in_flight` under way the oldest count as if included.

    The residual falls by c, to what was not sent: the codec's error, what was clipped, steps since the snapshot.

    Args:
        state: the span as agreed; returned as it is.
        in_flight: what was sent before.
        local_N: θ now. Not changed.
        round_index: the contribution's round.
        sent: c, as it was sent or as everybody decodes it; handed over.
        max_in_flight: limit of the list, from the manifest.
    Returns:
        The span with c in flight; `local_N` is the very array given unless something overflowed.
    Raises:
        RoundError: that round or a later one is in flight already.
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
    own_included: bool,
    outer_rule: OuterRule,
    merge_rule: MergeRule,
) -> SpanAdvance:
    """Absorb a valid entry: outer step, resolve our contribution of its round, merge. Whole or not at all.

    With `keep` and `late = drop` the residual stays, but for contributions of skipped rounds: they are void, leave the
    list, stay in θ and so return to the residual. With `blend` the residual against φ_new is multiplied by alpha.

    Args:
        state: the entry's parent.
        in_flight: what was sent and is unresolved.
        local_N: θ now, float32, shape (N,). Not changed.
        entry: what the head takes from the entry.
        update_N: the decoded entry. Not changed.
        own_included: whether the entry counts this island in.
        outer_rule: from the manifest.
        merge_rule: from the manifest.
    Raises:
        StateError: the entry's round or length does not fit the span.
        NonFiniteUpdate: the update or the step along it is not finite; the span is void.
    """
    advanced = absorb(state, entry=entry, update_N=update_N, rule=outer_rule)
    return follow_entry(state, in_flight, local_N, advanced=advanced, own_included=own_included, merge_rule=merge_rule)


def follow_entry(
    state: SpanState,
    in_flight: InFlight,
    local_N: Vector,
    *,
    advanced: SpanState,
    own_included: bool,
    merge_rule: MergeRule,
) -> SpanAdvance:
    """Let θ and the list in flight follow an entry that is absorbed already: the second half of `advance_span`.

    For whoever shares the absorbed state between many islands, as the experiments of `research/` do.

    Args:
        state: the entry's parent.
        in_flight: what was sent and is unresolved.
        local_N: θ now, float32, shape (N,). Not changed.
        advanced: the span after the entry; its head tells the entry's round.
        own_included: whether the entry counts this island in.
        merge_rule: from the manifest.
    """
    remaining, resolved_N = in_flight.resolve(advanced.head.round)
    merged_N = merge_local(local_N, state.anchor_N, advanced.anchor_N, resolved_N, own_included, merge_rule)
    return SpanAdvance(advanced, _share_in_flight(remaining, merge_rule), merged_N)


def replace_span(
    state: SpanState, in_flight: InFlight, local_N: Vector, *, replacement: SpanState, merge_rule: MergeRule
) -> SpanAdvance:
    """Replace a span by a transfer or an adoption; all that is in flight counts as if included.

    Which of it the replacement really holds cannot be known. Taking all of it out of θ loses at most what was not
    included; leaving it there would count the rest twice. With `keep` θ moves by φ_new − φ_old + Σ c and the residual
    stays; with `blend` φ_new is taken to hold the contributions, and the list is just emptied.

    Args:
        state: the span as it was.
        in_flight: what was sent and is unresolved.
        local_N: θ now. Not changed.
        replacement: the span as others hold it, its digests checked.
        merge_rule: from the manifest.
    Raises:
        StateError: the replacement has another length.
    """
    if replacement.elements != state.elements:
        raise StateError(f"replacement of {replacement.elements} elements does not fit a span of {state.elements}")
    emptied, leaving = in_flight.cleared()
    merged_N = merge_local(local_N, state.anchor_N, replacement.anchor_N, _sum(leaving), True, merge_rule)
    return SpanAdvance(replacement, emptied, merged_N)


def _share_in_flight(in_flight: InFlight, rule: MergeRule) -> InFlight:
    return in_flight if rule.in_flight_share == 1.0 else in_flight.scaled(rule.in_flight_share)


def _sum(vectors: Sequence[Vector]) -> Vector | None:
    if not vectors:
        return None
    total_N = vectors[0].copy()
    for vector_N in vectors[1:]:
        np.add(total_N, vector_N, out=total_N)
    return total_N
