"""Entry logs that fit a small run: each span's entries, one per cycle, and the states that they lead to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from small_run import ROSTER

from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.span_log import SpanHead


def entry_after(plan: RunPlan, span: SpanId, head: SpanHead, *, seed: int = 0) -> Entry:
    """Return an unsigned entry for the next round of the span's fragment."""
    elements = plan.rules.span_elements[span]
    generator = np.random.Generator(np.random.Philox(key=[seed, head.height]))
    update_N = generator.standard_normal(elements, dtype=np.float32) * np.float32(0.01)
    num_fragments = plan.rules.clock.num_fragments
    return Entry(
        run=plan.rules.run,
        round=head.round + num_fragments if head.round >= 0 else span.fragment,
        span=span,
        parent=head.digest,
        height=head.height + 1,
        roster=ROSTER,
        present=b"\x03",
        included=b"\x03",
        weights=(1.0, 1.0),
        tokens=100,
        median_norm=0.5,
        median_weight=1.0,
        payload=plan.codecs.entry.encode(update_N),
        signature=bytes(64),
    )


def follow(plan: RunPlan, state: SpanState, entry: Entry) -> SpanState:
    update_N = plan.codecs.entry.decode(entry.payload, state.elements)
    return absorb(state, entry=entry.absorbed(), update_N=update_N, rule=plan.outer)


def log_of(
    plan: RunPlan, span: SpanId, state: SpanState, num_entries: int, *, seed: int = 0
) -> tuple[list[Entry], list[SpanState]]:
    """Return entries after a state, and the state after each."""
    entries, states = [], []
    for _ in range(num_entries):
        entry = entry_after(plan, span, state.head, seed=seed)
        state = follow(plan, state, entry)
        entries.append(entry)
        states.append(state)
    return entries, states


def damaged(state: SpanState) -> SpanState:
    """Return a state with one bit of its anchor flipped."""
    anchor_N = state.anchor_N.copy()
    anchor_N.view(np.uint32)[3] ^= 1 << 20
    return replace(state, anchor_N=anchor_N)
