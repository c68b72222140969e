"""Follow an entry with one span: decode it, step, and merge; in one compiled pass where possible.

`outer/` and `codec/` define the steps. With 4-bit codes, the merge `keep` and nothing to refuse, a compiled loop takes
all of them in one pass, with the same bits. All other cases take the steps one by one.

Legend: N = elements of one span.
"""

from __future__ import annotations

import numpy as np

from p2p_diloco.codec.codec import Codec, Encoded, Int4Codec
from p2p_diloco.codec.codes import Parts, follow4
from p2p_diloco.codec.vectors import Vector, read_only
from p2p_diloco.log import AbsorbedEntry
from p2p_diloco.memory.slabs import empty_vector
from p2p_diloco.outer.advance import SpanAdvance, advance_span
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import InFlight, PendingContribution, SpanState
from p2p_diloco.span.contribute import are_fused
from p2p_diloco.span.reduce import Codecs

_NOTHING: Parts = (read_only(np.empty(0, dtype=np.uint16)), read_only(np.empty(0, dtype=np.uint8)))


def follow_span(
    state: SpanState,
    in_flight: InFlight,
    local_N: Vector,
    *,
    entry: AbsorbedEntry,
    payload: Encoded,
    codecs: Codecs,
    outer_rule: OuterRule,
    merge_rule: MergeRule,
) -> SpanAdvance:
    """Decode an entry, step along it, resolve our contribution of its round, and merge.

    Args and errors: those of `advance_span`, and of `Codec.decode`.
    """
    leaving = _leaving(in_flight, entry, len(local_N), codecs.contribution)
    if leaving is not None and merge_rule.kind == "keep":
        advance = _follow_at_once(state, local_N, entry, payload, leaving, codecs.entry, outer_rule)
        if advance is not None:
            return SpanAdvance(advance[0], in_flight.after(entry.round), advance[1])
    return advance_span(
        state,
        in_flight,
        local_N,
        entry=entry,
        update_N=codecs.entry.decode(payload, state.elements),
        outer_rule=outer_rule,
        merge_rule=merge_rule,
    )


def _leaving(in_flight: InFlight, entry: AbsorbedEntry, elements: int, codec: Codec) -> Parts | None:
    """Return what the loop must remove from θ, empty if nothing; None if the loop cannot do it."""
    own = in_flight.of_round(entry.round)
    if own is None:
        return _NOTHING
    if not isinstance(codec, Int4Codec) or not isinstance(own.sent, PendingContribution):
        return None
    return codec.parts(own.sent.payload, elements)


def _follow_at_once(
    state: SpanState,
    local_N: Vector,
    entry: AbsorbedEntry,
    payload: Encoded,
    leaving: Parts,
    codec: Codec,
    rule: OuterRule,
) -> tuple[SpanState, Vector] | None:
    """Return the span after an entry, and θ, or None if the steps must be taken one by one."""
    if not are_fused(codec, state, local_N):
        return None
    now = (state.anchor_N, state.momentum_N, read_only(local_N))
    anchor_N, momentum_N, merged_N = [empty_vector(state.elements) for _ in now]
    sent, rates = codec.parts(payload, len(local_N)), rule.at(state.head.height).rates
    if not follow4(sent, leaving, now, rates, codec.loop_limits(), (anchor_N, momentum_N, merged_N)):
        return None
    return state.followed_by(entry, anchor_N, momentum_N), merged_N
