"""Read and update the spans of an island's θ, on the host or on a GPU with as little transfer as possible.

On a GPU a span is encoded without copying θ to the host: φ is copied to the GPU, and codes and scales come back, an
eighth of the size of θ. To apply an entry to θ, the offset is copied to the GPU and added there.

Legend: N = elements of one span.
"""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
import torch

from p2p_diloco.codec.blocks import Int4Codec, is_whole, parts_of
from p2p_diloco.codec.exact_norm import squared_norm_of_bfloat16
from p2p_diloco.ids import SpanId
from p2p_diloco.kernels import device
from p2p_diloco.kernels.operations import contribute4
from p2p_diloco.memory.slabs import passing_bytes
from p2p_diloco.outer.advance import record_contribution
from p2p_diloco.outer.in_flight import InFlight, PendingContribution
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.span.span_work import SentSpan, contribute_span
from p2p_diloco.span.vector_work import encode_within
from p2p_diloco.training.parameters import LocalParameters


class LocalSpans:
    """Reads and updates spans of θ as vectors. For the training thread only.

    Args:
        parameters: θ.
    """

    def __init__(self, plan: RunPlan, parameters: LocalParameters) -> None:
        self.plan = plan
        self.parameters = parameters

    def contribute(self, span: SpanId, state: SpanState, in_flight: InFlight, round_index: int) -> SentSpan:
        """Encode a contribution of a span; see `contribute_span`."""
        place = self.plan.places[span]
        local_N = self.parameters.view(span.fragment, place.start, place.stop)
        sent = contribute_span(
            state,
            in_flight,
            local_N,
            round_index=round_index,
            codec=self.plan.codecs.contribution,
            max_norm_ratio=self.plan.rules.contribution_limit,
        )
        if sent.advance.local_N is not local_N:
            self.write(span, sent.advance.local_N)
        return sent

    def write(self, span: SpanId, local_N: Vector) -> None:
        """Set a span of θ."""
        place = self.plan.places[span]
        self.parameters.write(span.fragment, place.start, place.stop, local_N)

    def move(self, span: SpanId, scale: float, offset_N: Vector) -> None:
        """Set a span of θ to scale · θ + offset; with scale 0, θ need not be finite."""
        place = self.plan.places[span]
        if scale == 0.0:
            self.write(span, offset_N)
            return
        if scale != 1.0:
            scaled_N = self.parameters.read(span.fragment, place.start, place.stop)
            np.multiply(scaled_N, np.float32(scale), out=scaled_N)
            self.write(span, scaled_N)
        self.parameters.add(span.fragment, place.start, place.stop, offset_N)


class DeviceSpans(LocalSpans):
    """Encodes contributions on the device that holds θ.

    Some cases are encoded on the host: a contribution while another is in flight, a span that ends within a block, and
    codecs other than int4.
    """

    def contribute(self, span: SpanId, state: SpanState, in_flight: InFlight, round_index: int) -> SentSpan:
        """Encode a contribution of a span, on the device if possible."""
        found = None
        if not len(in_flight) and round_index > state.head.round:
            found = self._encode(span, state)
        if found is None:
            return super().contribute(span, state, in_flight, round_index)
        sent = PendingContribution(found[1], partial(self.plan.codecs.contribution.decode, elements=state.elements))
        # Nothing else is in flight, so nothing can overflow and θ does not change; its vector is not needed.
        advance = record_contribution(state, in_flight, state.anchor_N, round_index=round_index, sent=sent)
        return SentSpan(*found, advance)

    def _encode(self, span: SpanId, state: SpanState) -> tuple[float, memoryview] | None:
        """Return the norm of the pseudo-gradient and its encoding, scaled down until reducers accept it.

        None if the device cannot encode it, or something is not finite.
        """
        place, codec = self.plan.places[span], self.plan.codecs.contribution
        local = self.parameters.on_device(span.fragment, place.start, place.stop)
        if local is None or not isinstance(codec, Int4Codec) or not is_whole(state.elements):
            return None
        room = passing_bytes(codec.encoded_bytes(state.elements))
        scale_bits_B, packed = parts_of(np.frombuffer(room, dtype=np.uint8), state.elements)
        squares_B = np.empty(len(scale_bits_B), dtype=np.int64)
        there = partial(device.contribute4, state.anchor_N, local, *codec.loop_limits(), scale_bits_B, packed)
        whole, scale = math.nan, 1.0

        def encode(factor: float) -> float:
            nonlocal whole, scale
            scale *= factor
            norm = math.sqrt(there(squares_B, factor=np.float32(scale)))
            whole = norm if factor == 1.0 else whole
            if not math.isfinite(norm):
                return norm
            return max(norm, math.sqrt(squared_norm_of_bfloat16(scale_bits_B, squares_B)))

        limit = state.head.norm_limit(self.plan.rules.contribution_limit)
        return (whole, room.toreadonly()) if encode_within(limit, encode) else None


def spans_for(plan: RunPlan, parameters: LocalParameters, where: torch.device) -> LocalSpans:
    """Return `DeviceSpans` if the device encodes exactly as the host does, otherwise `LocalSpans`."""
    is_suited = where.type != "cpu" and encodes_alike(where)
    return (DeviceSpans if is_suited else LocalSpans)(plan, parameters)


def describe_device(where: torch.device, local: LocalSpans) -> str:
    """Return a sentence for people: the training device, and where contributions are encoded."""
    if where.type == "cpu":
        threads = torch.get_num_threads()
        return f"trains on the processor, {threads} {'thread' if threads == 1 else 'threads'}"
    name = f" ({torch.cuda.get_device_name(where)})" if where.type == "cuda" else ""
    encodes = "there" if isinstance(local, DeviceSpans) else f"on the processor, since {where.type} rounds differently"
    return f"trains on {where}{name}; contributions are encoded {encodes}"


@cache
def encodes_alike(where: torch.device) -> bool:
    """Return whether a device encodes exactly as the host does; tested once."""
    return device.agrees(where, contribute4, Int4Codec().loop_limits())
