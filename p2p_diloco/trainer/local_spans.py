"""How an island reaches the spans of its θ: where they lie on the host, or on a GPU with as little said as can be.

An island on a GPU contributes without its θ coming down: φ goes up, codes and scales come back, an eighth of what θ
takes. To follow an entry, what θ moves by goes up and is added there.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch

from p2p_diloco.codec.int4 import Int4Codec
from p2p_diloco.ids import SpanId
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.kernels import device
from p2p_diloco.kernels.choice import frozen
from p2p_diloco.outer.advance import SpanAdvance, record_contribution, replace_span
from p2p_diloco.outer.in_flight import InFlight, Sent
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.swarm.span_work import SentSpan, SpanEncoder, contribute_span, encode_at_once, follow_span
from p2p_diloco.trainer.run_plan import RunPlan


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

    def follow(self, state: SpanState, in_flight: InFlight, update: SpanUpdate) -> SpanAdvance:
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
        return advance

    def replace(self, span: SpanId, state: SpanState, in_flight: InFlight, replacement: SpanState) -> SpanAdvance:
        """Replace a span, and let θ follow; see `replace_span`."""
        rule = self.plan.merge
        advance = replace_span(state, in_flight, self.before(span), replacement=replacement, merge_rule=rule)
        self.after(span, advance.local_N)
        return advance

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

    What cannot be done there is done on the host: a contribution that is to be clipped, one after another that is in
    flight still, codecs of other than four bits.
    """

    def contribute(self, span: SpanId, state: SpanState, in_flight: InFlight, round_index: int) -> SentSpan:
        """Contribute a span, encoded where θ is."""
        codec, kappa = self.plan.codecs.contribution, self.plan.manifest.limits.kappa
        encode = self._encoder(span, state)
        found = encode_at_once(state, in_flight, encode, round_index=round_index, codec=codec, kappa=kappa)
        if found is None:
            return super().contribute(span, state, in_flight, round_index)
        sent = Sent(found[1], partial(codec.decode, elements=state.elements))
        unmoved_N = _nothing(state.elements)
        return SentSpan(*found, record_contribution(state, in_flight, unmoved_N, round_index=round_index, sent=sent))

    def before(self, span: SpanId) -> Vector:
        """Return zeros, so that the merge ends with what is to be added to θ."""
        place = self.plan.places[span]
        return _nothing(place.stop - place.start)

    def after(self, span: SpanId, merged_N: Vector) -> None:
        """Add it to θ, where that is."""
        place = self.plan.places[span]
        self.parameters.add(span.fragment, place.start, place.stop, merged_N)

    def _encoder(self, span: SpanId, state: SpanState) -> SpanEncoder | None:
        place, codec = self.plan.places[span], self.plan.codecs.contribution
        local = self.parameters.on_device(span.fragment, place.start, place.stop)
        if local is None or not isinstance(codec, Int4Codec) or state.elements % device.BLOCK:
            return None
        return partial(device.contribute4, state.anchor_N, local, *codec.loop_limits())


SpansOf = Callable[[RunPlan, LocalParameters], HostSpans]


def spans_for(plan: RunPlan, where: torch.device) -> SpansOf:
    """Return how spans of θ are reached on a device."""
    return HostSpans if where.type == "cpu" or plan.merge.kind != "keep" else DeviceSpans


@cache
def _nothing(elements: int) -> Vector:
    """Return zeros below zero: whatever is added to one is what comes of it, to the bit."""
    return frozen(np.full(elements, -0.0, np.float32))
