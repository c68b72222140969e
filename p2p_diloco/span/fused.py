"""Contribute one span, or follow an entry with it; in one compiled pass where possible.

`outer/` and `codec/` define the steps: take the pseudo-gradient, clip, encode and record it; decode, step and merge.
With 4-bit codes and nothing to refuse, a compiled loop takes all of them in one pass, with the same bits: to contribute
while nothing is in flight or to clip, and to follow with the merge `keep`. All other cases take the steps one by one.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeGuard

import numpy as np

from p2p_diloco.codec.codec import Codec, Encoded, Int4Codec, is_whole
from p2p_diloco.codec.codes import Parts, contribute4, follow4
from p2p_diloco.codec.vectors import is_vector, read_only, squared_norm_of_bfloat16
from p2p_diloco.memory.slabs import empty_vector
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import (
    MAX_IN_FLIGHT,
    InFlight,
    IslandSpan,
    PendingContribution,
    PreparedContribution,
    SpanState,
    advance_span,
    prepare_contribution,
    pull_back,
    record_contribution,
)
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span_log import AbsorbedEntry

MOST_SHRINKS = 16
_NOTHING: Parts = (read_only(np.empty(0, dtype=np.uint16)), read_only(np.empty(0, dtype=np.uint8)))


class SentSpan(NamedTuple):
    """A contributed span: its norm before clipping, its encoding, and what the island holds now."""

    norm: float
    payload: bytes | memoryview
    advance: IslandSpan


def contribute_span(
    span: IslandSpan,
    *,
    round_index: int,
    codec: Codec,
    max_norm_ratio: float,
    max_in_flight: int = MAX_IN_FLIGHT,
    pulls_back: bool = False,
) -> SentSpan:
    """Compute the pseudo-gradient of a span, clip it, encode it, and record what was sent.

    Args and errors: those of `prepare_contribution` and `record_contribution`, and
        pulls_back: whether to give up what is too long to be sent; see `pull_back`. θ then changes.
    """
    found = _encode_at_once(span, round_index, codec, max_norm_ratio)
    payload: bytes | memoryview
    if found is not None:
        norm, payload = found
    else:
        prepared = prepare_contribution(span, round_index=round_index, max_norm_ratio=max_norm_ratio)
        span = pull_back(span, prepared) if pulls_back else span
        prepared, payload = encode_contribution(codec, prepared)
        norm = prepared.norm
    sent = PendingContribution(payload, partial(codec.decode, elements=span.state.elements))
    return SentSpan(
        norm, payload, record_contribution(span, round_index=round_index, sent=sent, max_in_flight=max_in_flight)
    )


def _encode_at_once(
    span: IslandSpan, round_index: int, codec: Codec, max_norm_ratio: float
) -> tuple[float, memoryview] | None:
    """Return norm and encoding, or None if the steps must be taken one by one."""
    state = span.state
    if not _are_fused(codec, span) or not is_plain(state, span.in_flight, round_index):
        return None
    room, scale_bits_B, packed = codec.empty_encoding(state.elements)
    squares_B = np.empty(len(scale_bits_B), dtype=np.int64)
    norm = math.sqrt(contribute4(state.anchor_N, span.local_N, codec.loop_limits(), scale_bits_B, packed, squares_B))
    limit = state.head.norm_limit(max_norm_ratio)
    if not norm <= limit or math.sqrt(squared_norm_of_bfloat16(scale_bits_B, squares_B)) > limit:
        return None
    return norm, room.toreadonly()


def _are_fused(codec: Codec, span: IslandSpan) -> TypeGuard[Int4Codec]:
    """Return whether loops may process such a span. They check nothing; the steps report unsuitable vectors."""
    local_N = span.local_N
    is_sound = span.state.elements == len(local_N) and is_vector(local_N) and local_N.flags.c_contiguous
    return isinstance(codec, Int4Codec) and is_sound and is_whole(len(local_N))


def is_plain(state: SpanState, in_flight: InFlight, round_index: int) -> bool:
    """Return whether the pseudo-gradient is φ − θ: nothing is in flight, and the round is not over."""
    return not len(in_flight) and round_index > state.head.round


def encode_contribution(
    codec: Codec, prepared: PreparedContribution, norm: Callable[[bytes], float] | None = None
) -> tuple[PreparedContribution, bytes]:
    """Encode a contribution so that its decoded norm is within its limit.

    Args:
        norm: returns the exact norm of an encoded vector, for callers that cache norms; computed unless given.
    Returns:
        The contribution as encoded, shrunk if rounding made it too long, and its encoding.
    """
    payload = b""
    norm = norm if norm is not None else lambda payload: codec.norm(payload, len(prepared.delta_N))

    def encode(factor: float) -> float:
        nonlocal prepared, payload
        if factor != 1.0:
            prepared = replace(prepared, delta_N=np.multiply(prepared.delta_N, np.float32(factor)))
        payload = codec.encode(prepared.delta_N)
        return norm(payload)

    encode_within(prepared.limit, encode)
    return prepared, payload


def encode_within(limit: float, encode: Callable[[float], float]) -> bool:
    """Encode a vector, shorter each time, until the norm of what was encoded is within the limit of reducers.

    Rounding to a few bits lengthens a vector slightly, so this takes one or two attempts, and one more for a vector
    that is too long itself.

    Args:
        encode: multiplies the vector by a factor, which is 1 at first, encodes it, and returns the norm.
    Returns:
        Whether it is within the limit; False after `MOST_SHRINKS` attempts, or if a norm is not finite.
    """
    factor = 1.0
    for _ in range(MOST_SHRINKS):
        norm = encode(factor)
        if norm <= limit:
            return True
        if not math.isfinite(norm):
            return False
        factor = limit / norm * (1.0 - 2.0**-10)
    return False


def follow_span(
    span: IslandSpan,
    *,
    entry: AbsorbedEntry,
    payload: Encoded,
    codecs: Codecs,
    outer_rule: OuterRule,
    merge_rule: MergeRule,
) -> IslandSpan:
    """Decode an entry, step along it, resolve our contribution of its round, and merge.

    Args and errors: those of `advance_span`, and of `Codec.decode`.
    """
    if merge_rule.kind == "keep":
        followed = _follow_at_once(span, entry, payload, codecs, outer_rule)
        if followed is not None:
            return followed
    update_N = codecs.entry.decode(payload, span.state.elements)
    return advance_span(span, entry=entry, update_N=update_N, outer_rule=outer_rule, merge_rule=merge_rule)


def _follow_at_once(
    span: IslandSpan, entry: AbsorbedEntry, payload: Encoded, codecs: Codecs, rule: OuterRule
) -> IslandSpan | None:
    """Return the span after an entry, or None if the steps must be taken one by one."""
    leaving = _leaving(span, entry.round, codecs.contribution)
    state, codec = span.state, codecs.entry
    if leaving is None or not _are_fused(codec, span):
        return None
    now = (state.anchor_N, state.momentum_N, read_only(span.local_N))
    anchor_N, momentum_N, merged_N = [empty_vector(state.elements) for _ in now]
    sent, rates = codec.parts(payload, state.elements), rule.at(state.head.height).rates
    if not follow4(sent, leaving, now, rates, codec.loop_limits(), (anchor_N, momentum_N, merged_N)):
        return None
    return IslandSpan(state.followed_by(entry, anchor_N, momentum_N), span.in_flight.after(entry.round), merged_N)


def _leaving(span: IslandSpan, entry_round: int, codec: Codec) -> Parts | None:
    """Return what the loop must remove from θ, empty if nothing; None if the loop cannot do it."""
    own = span.in_flight.of_round(entry_round)
    if own is None:
        return _NOTHING
    if not isinstance(codec, Int4Codec) or not isinstance(own.sent, PendingContribution):
        return None
    return codec.parts(own.sent.payload, len(span.local_N))
