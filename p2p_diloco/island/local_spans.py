"""Read and update the spans of an island's θ, on the host or on a GPU with as little transfer as possible.

On a GPU a span is encoded without copying θ to the host: φ is copied to the GPU, and codes and scales come back, an
eighth of the size of θ. To apply an entry to θ, the offset is copied to the GPU and added there.

Legend: N = elements of one span.
"""

from __future__ import annotations

import numpy as np
import torch

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.ids import SpanId
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.outer.state import InFlight, IslandSpan, SpanState
from p2p_diloco.span.device import contribute_from_device, encodes_alike
from p2p_diloco.span.fused import SentSpan, contribute_span


class LocalSpans:
    """Reads and updates spans of θ as vectors. For the training thread only."""

    def __init__(self, plan: RunPlan, parameters: LocalParameters) -> None:
        self.plan = plan
        self.parameters = parameters

    def contribute(
        self, span: SpanId, state: SpanState, in_flight: InFlight, round_index: int, *, pulls_back: bool = False
    ) -> SentSpan:
        """Encode a contribution of a span; see `contribute_span`."""
        place = self.plan.places[span]
        local_N = self.parameters.view(span.fragment, place.start, place.stop)
        sent = contribute_span(
            IslandSpan(state, in_flight, local_N),
            round_index=round_index,
            codec=self.plan.codecs.contribution,
            max_norm_ratio=self.plan.rules.contribution_limit,
            pulls_back=pulls_back,
        )
        if sent.advance.local_N is not local_N:
            self.write(span, sent.advance.local_N)
        return sent

    def write(self, span: SpanId, local_N: Vector) -> None:
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

    Some cases are encoded on the host: a contribution while another is in flight, or that may pull θ back, a span that
    ends within a block, and codecs other than int4.
    """

    def contribute(
        self, span: SpanId, state: SpanState, in_flight: InFlight, round_index: int, *, pulls_back: bool = False
    ) -> SentSpan:
        """Encode a contribution of a span, on the device if possible."""
        place = self.plan.places[span]
        local = self.parameters.on_device(span.fragment, place.start, place.stop)
        sent = None
        if local is not None and not pulls_back:
            sent = contribute_from_device(
                state,
                in_flight,
                local,
                round_index=round_index,
                codec=self.plan.codecs.contribution,
                max_norm_ratio=self.plan.rules.contribution_limit,
            )
        if sent is not None:
            return sent
        return super().contribute(span, state, in_flight, round_index, pulls_back=pulls_back)


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
