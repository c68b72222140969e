"""How an island reaches the spans of its θ: where they lie on the host, or on a GPU with as little said as can be.

An island on a GPU contributes without its θ coming down: φ goes up, codes and scales come back, an eighth of what θ
takes. To follow an entry, what θ moves by goes up and is added there.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch

from p2p_diloco.codec.blocks import parts_of
from p2p_diloco.codec.codec import codec_named
from p2p_diloco.codec.exact_norm import squared_norm_of_bfloat16
from p2p_diloco.codec.int4 import Int4Codec
from p2p_diloco.ids import SpanId
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.kernels import device
from p2p_diloco.kernels.choice import frozen, span_kernels
from p2p_diloco.kernels.slabs import passing_bytes
from p2p_diloco.outer.advance import norm_limit, record_contribution, replace_span
from p2p_diloco.outer.in_flight import InFlight, Sent
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.swarm.span_work import SentSpan, contribute_span, follow_span
from p2p_diloco.swarm.vector_work import MOST_SHRINKS
from p2p_diloco.trainer.run_plan import RunPlan

Held = tuple[SpanState, InFlight]
"""What an island holds of a span, beside θ."""


class HostSpans:
    """Reads spans of θ as vectors, and writes them back.

    Args:
        parameters: θ.
    """

    def __init__(self, plan: RunPlan, parameters: LocalParameters) -> None:
        self.plan = plan
        self.parameters = parameters

    def contribute(self, span: SpanId, state: SpanState, in_flight: InFlight, round_index: int) -> SentSpan:
        """Contribute a span; see `contribute_span`."""
        local_N, limits = self._view(span), self.plan.manifest.limits
        sent = contribute_span(
            state,
            in_flight,
            local_N,
            round_index=round_index,
            codec=self.plan.codecs.contribution,
            kappa=limits.kappa,
            max_in_flight=limits.in_flight,
        )
        if sent.advance.local_N is not local_N:
            self._write(span, sent.advance.local_N)
        return sent

    def follow(self, state: SpanState, in_flight: InFlight, update: SpanUpdate) -> Held:
        """Follow an entry, and let θ follow; see `follow_span`."""
        advance = follow_span(
            state,
            in_flight,
            self.before(update.span),
            entry=update.absorbed,
            payload=update.payload,
            own_included=update.own_included,
            codecs=self.plan.codecs,
            outer_rule=self.plan.outer,
            merge_rule=self.plan.merge,
        )
        self.after(update.span, advance.local_N)
        return advance.state, advance.in_flight

    def replace(self, span: SpanId, state: SpanState, in_flight: InFlight, replacement: SpanState) -> Held:
        """Replace a span, and let θ follow; see `replace_span`."""
        rule = self.plan.merge
        advance = replace_span(state, in_flight, self.before(span), replacement=replacement, merge_rule=rule)
        self.after(span, advance.local_N)
        return advance.state, advance.in_flight

    def before(self, span: SpanId) -> Vector:
        """Return what a merge begins with: θ."""
        return self._view(span)

    def after(self, span: SpanId, merged_N: Vector) -> None:
        """Set θ to what a merge ended with."""
        self._write(span, merged_N)

    def _view(self, span: SpanId) -> Vector:
        place = self.plan.places[span]
        return self.parameters.view(span.fragment, place.start, place.stop)

    def _write(self, span: SpanId, local_N: Vector) -> None:
        place = self.plan.places[span]
        self.parameters.write(span.fragment, place.start, place.stop, local_N)


class DeviceSpans(HostSpans):
    """Leaves θ where it is. For runs whose merge is `keep`, which only ever adds to θ.

    What cannot be encoded there is encoded on the host: a contribution while another is in flight, a span that ends
    within a block, codecs of other than four bits.
    """

    def __init__(self, plan: RunPlan, parameters: LocalParameters) -> None:
        super().__init__(plan, parameters)
        longest = max(place.stop - place.start for place in plan.places.values())
        # Zeros below zero: whatever is added to one is what comes of it, to the bit.
        self._nothing = frozen(np.full(longest, -0.0, np.float32))

    def contribute(self, span: SpanId, state: SpanState, in_flight: InFlight, round_index: int) -> SentSpan:
        """Contribute a span, encoded where θ is."""
        found = None
        if not len(in_flight) and round_index > state.head.round:
            found = self._encode(span, state)
        if found is None:
            return super().contribute(span, state, in_flight, round_index)
        sent = Sent(found[1], partial(self.plan.codecs.contribution.decode, elements=state.elements))
        unmoved_N = self._nothing[: state.elements]
        return SentSpan(*found, record_contribution(state, in_flight, unmoved_N, round_index=round_index, sent=sent))

    def before(self, span: SpanId) -> Vector:
        """Return zeros, so that the merge ends with what is to be added to θ."""
        place = self.plan.places[span]
        return self._nothing[: place.stop - place.start]

    def after(self, span: SpanId, merged_N: Vector) -> None:
        """Add it to θ, where that is."""
        place = self.plan.places[span]
        self.parameters.add(span.fragment, place.start, place.stop, merged_N)

    def _encode(self, span: SpanId, state: SpanState) -> tuple[float, memoryview] | None:
        """Return the norm of the pseudo-gradient and its encoding, shortened until reducers take it.

        None where the device cannot do it, or something is not finite.
        """
        place, codec = self.plan.places[span], self.plan.codecs.contribution
        local = self.parameters.on_device(span.fragment, place.start, place.stop)
        if local is None or not isinstance(codec, Int4Codec) or state.elements % device.BLOCK:
            return None
        room = passing_bytes(codec.encoded_bytes(state.elements))
        scale_bits_B, packed = parts_of(np.frombuffer(room, dtype=np.uint8), state.elements)
        squares_B = np.empty(len(scale_bits_B), dtype=np.int64)
        encode = partial(device.contribute4, state.anchor_N, local, *codec.loop_limits(), scale_bits_B, packed)
        limit, factor, whole = norm_limit(state, self.plan.manifest.limits.kappa), 1.0, None
        for _ in range(MOST_SHRINKS):
            norm = math.sqrt(encode(squares_B, factor=np.float32(factor)))
            if not math.isfinite(norm):
                return None
            whole = norm if whole is None else whole
            longest = max(norm, math.sqrt(squared_norm_of_bfloat16(scale_bits_B, squares_B)))
            if longest <= limit:
                return whole, room.toreadonly()
            factor *= limit / longest * (1.0 - 2.0**-10)
        return None


SpansOf = Callable[[RunPlan, LocalParameters], HostSpans]


def spans_for(plan: RunPlan, where: torch.device) -> SpansOf:
    """Return how spans of θ are reached on a device: left there only where it encodes as the host does."""
    is_suited = where.type != "cpu" and plan.merge.kind == "keep"
    return DeviceSpans if is_suited and encodes_alike(where) else HostSpans


@cache
def encodes_alike(where: torch.device) -> bool:
    """Tell whether a device encodes as the host does; tried out once."""
    loops, codec = span_kernels(), codec_named("int4")
    assert isinstance(codec, Int4Codec)
    return loops is not None and device.agrees(where, loops.contribute4, codec.loop_limits())
