"""Contribute one span, and follow an entry; in one compiled pass where possible.

`outer/` and `codec/` define the steps. With 4-bit codecs, the merge `keep`, and nothing to clip, skip or refuse,
compiled loops do all steps in one pass, with the same bits. All other cases take the steps one by one.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, TypeGuard

import numpy as np

from p2p_diloco.codec.blocks import BlockParts, Int4Codec, is_whole, parts_of
from p2p_diloco.codec.codec import Codec
from p2p_diloco.codec.exact_norm import squared_norm_of_bfloat16
from p2p_diloco.codec.interface import Encoded
from p2p_diloco.kernels.choice import frozen, is_vector
from p2p_diloco.kernels.operations import contribute4, follow4
from p2p_diloco.log.head import AbsorbedEntry
from p2p_diloco.memory.slabs import empty_vector, passing_bytes
from p2p_diloco.outer.advance import SpanAdvance, advance_span, prepare_contribution, record_contribution
from p2p_diloco.outer.in_flight import MAX_IN_FLIGHT, InFlight, PendingContribution
from p2p_diloco.outer.merge import MergeRule
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.span.vector_work import Codecs, encode_contribution

_NOTHING = BlockParts(frozen(np.empty(0, dtype=np.uint16)), frozen(np.empty(0, dtype=np.uint8)))


class SentSpan(NamedTuple):
    """A contributed span: its norm before clipping, its encoding, and what the island holds now."""

    norm: float
    payload: bytes | memoryview
    advance: SpanAdvance


def contribute_span(
    state: SpanState,
    in_flight: InFlight,
    local_N: Vector,
    *,
    round_index: int,
    codec: Codec,
    max_norm_ratio: float,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> SentSpan:
    """Compute the pseudo-gradient of a span, clip it, encode it, and record what was sent.

    Args and errors: those of `prepare_contribution` and `record_contribution`.
    """
    found = _contribute_at_once(state, in_flight, local_N, round_index, codec, max_norm_ratio)
    payload: bytes | memoryview
    if found is None:
        prepared = prepare_contribution(
            state, in_flight, local_N, round_index=round_index, max_norm_ratio=max_norm_ratio
        )
        prepared, payload = encode_contribution(codec, prepared)
        norm = prepared.norm
    else:
        norm, payload = found
    sent = PendingContribution(payload, partial(codec.decode, elements=len(local_N)))
    advance = record_contribution(
        state, in_flight, local_N, round_index=round_index, sent=sent, max_in_flight=max_in_flight
    )
    return SentSpan(norm, payload, advance)


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


def _contribute_at_once(
    state: SpanState, in_flight: InFlight, local_N: Vector, round_index: int, codec: Codec, max_norm_ratio: float
) -> tuple[float, bytes | memoryview] | None:
    """Return norm and encoding, or None if the steps must be taken one by one."""
    if not _fits(codec, state.anchor_N, local_N) or len(in_flight) or round_index <= state.head.round:
        return None
    elements = len(local_N)
    room = passing_bytes(codec.encoded_bytes(elements))
    encoded = np.frombuffer(room, dtype=np.uint8)
    scale_bits_B, packed = parts_of(encoded, elements)
    squares_B = np.empty(len(scale_bits_B), dtype=np.int64)
    squared = contribute4(state.anchor_N, local_N, *codec.loop_limits(), scale_bits_B, packed, squares_B)
    norm, limit = math.sqrt(squared), state.head.norm_limit(max_norm_ratio)
    if not norm <= limit or math.sqrt(squared_norm_of_bfloat16(scale_bits_B, squares_B)) > limit:
        return None
    return norm, room.toreadonly()


def _follow_at_once(
    state: SpanState,
    local_N: Vector,
    entry: AbsorbedEntry,
    payload: Encoded,
    leaving: BlockParts,
    codec: Codec,
    rule: OuterRule,
) -> tuple[SpanState, Vector] | None:
    """Return the span after an entry, and θ, or None if the steps must be taken one by one."""
    if not _fits(codec, state.anchor_N, local_N):
        return None
    now = (state.anchor_N, state.momentum_N, local_N)
    rule = rule.at(state.head.height)
    rates = (np.float32(rule.learning_rate), np.float32(rule.momentum))
    anchor_N, momentum_N, merged_N = (empty_vector(len(local_N)) for _ in now)
    sent = codec.parts(payload, len(local_N))
    if not follow4(sent, leaving, now, rates, codec.loop_limits(), (anchor_N, momentum_N, merged_N)):
        return None
    return state.followed_by(entry, anchor_N, momentum_N), merged_N


def _leaving(in_flight: InFlight, entry: AbsorbedEntry, elements: int, codec: Codec) -> BlockParts | None:
    """Return what the loop must remove from θ, empty if nothing; None if the loop cannot do it."""
    own = in_flight.of_round(entry.round)
    if own is None:
        return _NOTHING
    if not isinstance(codec, Int4Codec) or not isinstance(own.sent, PendingContribution):
        return None
    return codec.parts(own.sent.payload, elements)


def _fits(codec: Codec, anchor_N: Vector, local_N: Vector) -> TypeGuard[Int4Codec]:
    """Return whether loops may process such a span. They check nothing; the steps report unsuitable vectors."""
    is_sound = len(anchor_N) == len(local_N) and is_vector(local_N) and local_N.flags.c_contiguous
    return isinstance(codec, Int4Codec) and is_sound and is_whole(len(local_N))
