"""Golden trajectories: two islands in lock-step, computed step by step without the code under test.

Two islands hold one parameter each. Both start at the anchor, 16. An inner step halves the distance to the island's own
optimum, 0 for the first and 8 for the second: θ ← θ / 2 | θ ← (θ + 8) / 2. A round starts at every second inner step;
both contributions have the same weight and are sent without loss. The entry arrives `delay_steps` inner steps later: 0
at the same step boundary, 1 in the middle of the cycle, 3 after the next round has started. At a step boundary, entries
come first.

The comments are the whole calculation, so that it can be checked by hand. `first | second` island; rows are (φ, m,
first θ, second θ) after each entry. Every number is a short binary fraction, so float32 holds it exactly.

    Δ = φ − θ − in flight        g = (first Δ + second Δ) / 2        m ← μ m + g        φ ← φ − η (g + μ m)
    keep: θ ← θ + (φ_new − φ_old) + c         blend: θ ← alpha θ + (1 − alpha) φ_new, in flight ← alpha · in flight
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.ids import Digest, sha256
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import (
    InFlight,
    IslandSpan,
    SpanState,
    advance_span,
    genesis_state,
    prepare_contribution,
    record_contribution,
)
from p2p_diloco.span_log import AbsorbedEntry
from simulator.maths import weighted_mean

ROSTER = Digest(bytes(32))
START = 16.0
OPTIMA = (0.0, 8.0)
STEPS_PER_CYCLE = 2

SGD = OuterRule(learning_rate=0.5, momentum=0.0)
NESTEROV = OuterRule(learning_rate=1.0, momentum=0.5)
KEEP = MergeRule(kind="keep")
BLEND_0 = MergeRule(kind="blend", alpha=0.0)
BLEND_HALF = MergeRule(kind="blend", alpha=0.5)
BLEND_1 = MergeRule(kind="blend", alpha=1.0)

Row = tuple[float, float, float, float]
"""φ, m, the first island's θ, the second's θ."""


class Pending(NamedTuple):
    """An entry that has not arrived yet."""

    due_step: int
    round: int
    update_N: Vector


class Island:
    """One parameter, its optimum, and this island's view of the span."""

    def __init__(self, optimum: float) -> None:
        self.optimum = np.float32(optimum)
        self.state: SpanState = genesis_state(np.array([START], dtype=np.float32), ROSTER)
        self.in_flight = InFlight()
        self.local_N: Vector = np.array([START], dtype=np.float32)

    def inner_step(self) -> None:
        self.local_N = self.local_N + np.float32(0.5) * (self.optimum - self.local_N)

    def contribute(self, round_index: int, *, subtract_in_flight: bool) -> Vector:
        subtracted = self.in_flight if subtract_in_flight else InFlight()
        prepared = prepare_contribution(
            IslandSpan(self.state, subtracted, self.local_N), round_index=round_index, max_norm_ratio=float("inf")
        )
        self.state, self.in_flight, self.local_N = record_contribution(
            IslandSpan(self.state, self.in_flight, self.local_N), round_index=round_index, sent=prepared.delta_N
        )
        return prepared.delta_N

    def receive(self, entry: Pending, outer: OuterRule, merge: MergeRule) -> None:
        absorbed = AbsorbedEntry(
            digest=sha256(entry.round.to_bytes(4)), round=entry.round, roster=ROSTER, radius=1.0, median_weight=1.0
        )
        self.state, self.in_flight, self.local_N = advance_span(
            IslandSpan(self.state, self.in_flight, self.local_N),
            entry=absorbed,
            update_N=entry.update_N,
            outer_rule=outer,
            merge_rule=merge,
        )


def play(
    outer: OuterRule, merge: MergeRule, delay_steps: int, num_rows: int, *, subtract_in_flight: bool = True
) -> list[Row]:
    """Run two islands in lock-step until `num_rows` entries are applied."""
    islands = [Island(optimum) for optimum in OPTIMA]
    pending: list[Pending] = []
    rows: list[Row] = []

    def apply_due(step: int) -> None:
        while pending and pending[0].due_step <= step:
            entry = pending.pop(0)
            for island in islands:
                island.receive(entry, outer, merge)
            first, second = islands
            assert first.state.anchor_N.tobytes() == second.state.anchor_N.tobytes()
            assert first.state.head == second.state.head
            agreed = (float(first.state.anchor_N[0]), float(first.state.momentum_N[0]))
            rows.append((*agreed, float(first.local_N[0]), float(second.local_N[0])))

    step = 0
    while len(rows) < num_rows:
        step += 1
        for island in islands:
            island.inner_step()
        apply_due(step)
        if step % STEPS_PER_CYCLE == 0:
            round_index = step // STEPS_PER_CYCLE
            sent = [island.contribute(round_index, subtract_in_flight=subtract_in_flight) for island in islands]
            pending.append(Pending(step + delay_steps, round_index, weighted_mean(sent, [1.0, 1.0])))
            apply_due(step)
    return rows


TRAJECTORIES: dict[tuple[OuterRule, MergeRule, int], tuple[Row, ...]] = {
    (SGD, KEEP, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 4.5 = 11.5
        # θ 4 - 4.5 + 12 = 11.5 | 10 - 4.5 + 6 = 11.5
        (11.5, 9, 11.5, 11.5),
        # step 4: θ 2.875 | 8.875; Δ 11.5 - 2.875 = 8.625 | 11.5 - 8.875 = 2.625
        # r2: g 5.625; m 5.625; φ 11.5 - 2.8125 = 8.6875
        # θ 2.875 - 2.8125 + 8.625 = 8.6875 | 8.875 - 2.8125 + 2.625 = 8.6875
        (8.6875, 5.625, 8.6875, 8.6875),
    ),
    (SGD, BLEND_0, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 4.5 = 11.5; θ 11.5 | 11.5
        (11.5, 9, 11.5, 11.5),
        # step 4: θ 2.875 | 8.875; Δ 11.5 - 2.875 = 8.625 | 11.5 - 8.875 = 2.625
        # r2: g 5.625; m 5.625; φ 11.5 - 2.8125 = 8.6875; θ 8.6875 | 8.6875
        (8.6875, 5.625, 8.6875, 8.6875),
    ),
    (SGD, BLEND_HALF, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 4.5 = 11.5
        # θ 0.5·4 + 5.75 = 7.75 | 0.5·10 + 5.75 = 10.75
        (11.5, 9, 7.75, 10.75),
        # step 4: θ 1.9375 | 8.6875; Δ 11.5 - 1.9375 = 9.5625 | 11.5 - 8.6875 = 2.8125
        # r2: g 6.1875; m 6.1875; φ 11.5 - 3.09375 = 8.40625
        # θ 0.5·1.9375 + 4.203125 = 5.171875 | 0.5·8.6875 + 4.203125 = 8.546875
        (8.40625, 6.1875, 5.171875, 8.546875),
    ),
    (SGD, BLEND_1, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 4.5 = 11.5; θ 4 | 10
        (11.5, 9, 4, 10),
        # step 4: θ 1 | 8.5; Δ 11.5 - 1 = 10.5 | 11.5 - 8.5 = 3; r2: g 6.75; m 6.75; φ 11.5 - 3.375 = 8.125; θ 1 | 8.5
        (8.125, 6.75, 1, 8.5),
    ),
    (NESTEROV, KEEP, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 13.5 = 2.5
        # θ 4 - 13.5 + 12 = 2.5 | 10 - 13.5 + 6 = 2.5
        (2.5, 9, 2.5, 2.5),
        # step 4: θ 0.625 | 6.625; Δ 2.5 - 0.625 = 1.875 | 2.5 - 6.625 = -4.125
        # r2: g -1.125; m 3.375; φ 2.5 - 0.5625 = 1.9375
        # θ 0.625 - 0.5625 + 1.875 = 1.9375 | 6.625 - 0.5625 - 4.125 = 1.9375
        (1.9375, 3.375, 1.9375, 1.9375),
        # step 6: θ 0.484375 | 6.484375; Δ 1.9375 - 0.484375 = 1.453125 | 1.9375 - 6.484375 = -4.546875
        # r3: g -1.546875; m 0.140625; φ 1.9375 + 1.4765625 = 3.4140625
        # θ 0.484375 + 1.4765625 + 1.453125 = 3.4140625 | 6.484375 + 1.4765625 - 4.546875 = 3.4140625
        (3.4140625, 0.140625, 3.4140625, 3.4140625),
    ),
    (NESTEROV, BLEND_0, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 13.5 = 2.5; θ 2.5 | 2.5
        (2.5, 9, 2.5, 2.5),
        # step 4: θ 0.625 | 6.625; Δ 2.5 - 0.625 = 1.875 | 2.5 - 6.625 = -4.125
        # r2: g -1.125; m 3.375; φ 2.5 - 0.5625 = 1.9375; θ 1.9375 | 1.9375
        (1.9375, 3.375, 1.9375, 1.9375),
        # step 6: θ 0.484375 | 6.484375; Δ 1.9375 - 0.484375 = 1.453125 | 1.9375 - 6.484375 = -4.546875
        # r3: g -1.546875; m 0.140625; φ 1.9375 + 1.4765625 = 3.4140625; θ 3.4140625 | 3.4140625
        (3.4140625, 0.140625, 3.4140625, 3.4140625),
    ),
    (NESTEROV, BLEND_HALF, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 13.5 = 2.5
        # θ 0.5·4 + 1.25 = 3.25 | 0.5·10 + 1.25 = 6.25
        (2.5, 9, 3.25, 6.25),
        # step 4: θ 0.8125 | 7.5625; Δ 2.5 - 0.8125 = 1.6875 | 2.5 - 7.5625 = -5.0625
        # r2: g -1.6875; m 2.8125; φ 2.5 + 0.28125 = 2.78125
        # θ 0.5·0.8125 + 1.390625 = 1.796875 | 0.5·7.5625 + 1.390625 = 5.171875
        (2.78125, 2.8125, 1.796875, 5.171875),
        # step 6: θ 0.44921875 | 7.29296875; Δ 2.78125 - 0.44921875 = 2.33203125 | 2.78125 - 7.29296875 = -4.51171875
        # r3: g -1.08984375; m 0.31640625; φ 2.78125 + 0.931640625 = 3.712890625
        # θ 0.5·0.44921875 + 1.8564453125 = 2.0810546875 | 0.5·7.29296875 + 1.8564453125 = 5.5029296875
        (3.712890625, 0.31640625, 2.0810546875, 5.5029296875),
    ),
    (NESTEROV, BLEND_1, 0): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; r1: g 9; m 9; φ 16 - 13.5 = 2.5; θ 4 | 10
        (2.5, 9, 4, 10),
        # step 4: θ 1 | 8.5; Δ 2.5 - 1 = 1.5 | 2.5 - 8.5 = -6; r2: g -2.25; m 2.25; φ 2.5 + 1.125 = 3.625; θ 1 | 8.5
        (3.625, 2.25, 1, 8.5),
        # step 6: θ 0.25 | 8.125; Δ 3.625 - 0.25 = 3.375 | 3.625 - 8.125 = -4.5
        # r3: g -0.5625; m 0.5625; φ 3.625 + 0.28125 = 3.90625; θ 0.25 | 8.125
        (3.90625, 0.5625, 0.25, 8.125),
    ),
    (SGD, KEEP, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 4.5 = 11.5
        # θ 2 - 4.5 + 12 = 9.5 | 9 - 4.5 + 6 = 10.5
        (11.5, 9, 9.5, 10.5),
        # step 4: θ 4.75 | 9.25; Δ 11.5 - 4.75 = 6.75 | 11.5 - 9.25 = 2.25; step 5: θ 2.375 | 8.625
        # r2: g 4.5; m 4.5; φ 11.5 - 2.25 = 9.25; θ 2.375 - 2.25 + 6.75 = 6.875 | 8.625 - 2.25 + 2.25 = 8.625
        (9.25, 4.5, 6.875, 8.625),
    ),
    (SGD, BLEND_0, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 4.5 = 11.5; θ 11.5 | 11.5
        (11.5, 9, 11.5, 11.5),
        # step 4: θ 5.75 | 9.75; Δ 11.5 - 5.75 = 5.75 | 11.5 - 9.75 = 1.75; step 5: θ 2.875 | 8.875
        # r2: g 3.75; m 3.75; φ 11.5 - 1.875 = 9.625; θ 9.625 | 9.625
        (9.625, 3.75, 9.625, 9.625),
    ),
    (SGD, BLEND_HALF, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 4.5 = 11.5
        # θ 0.5·2 + 5.75 = 6.75 | 0.5·9 + 5.75 = 10.25
        (11.5, 9, 6.75, 10.25),
        # step 4: θ 3.375 | 9.125; Δ 11.5 - 3.375 = 8.125 | 11.5 - 9.125 = 2.375; step 5: θ 1.6875 | 8.5625
        # r2: g 5.25; m 5.25; φ 11.5 - 2.625 = 8.875; θ 0.5·1.6875 + 4.4375 = 5.28125 | 0.5·8.5625 + 4.4375 = 8.71875
        (8.875, 5.25, 5.28125, 8.71875),
    ),
    (SGD, BLEND_1, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 4.5 = 11.5; θ 2 | 9
        (11.5, 9, 2, 9),
        # step 4: θ 1 | 8.5; Δ 11.5 - 1 = 10.5 | 11.5 - 8.5 = 3; step 5: θ 0.5 | 8.25
        # r2: g 6.75; m 6.75; φ 11.5 - 3.375 = 8.125; θ 0.5 | 8.25
        (8.125, 6.75, 0.5, 8.25),
    ),
    (NESTEROV, KEEP, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 13.5 = 2.5
        # θ 2 - 13.5 + 12 = 0.5 | 9 - 13.5 + 6 = 1.5
        (2.5, 9, 0.5, 1.5),
        # step 4: θ 0.25 | 4.75; Δ 2.5 - 0.25 = 2.25 | 2.5 - 4.75 = -2.25; step 5: θ 0.125 | 6.375
        # r2: g 0; m 4.5; φ 2.5 - 2.25 = 0.25; θ 0.125 - 2.25 + 2.25 = 0.125 | 6.375 - 2.25 - 2.25 = 1.875
        (0.25, 4.5, 0.125, 1.875),
        # step 6: θ 0.0625 | 4.9375; Δ 0.25 - 0.0625 = 0.1875 | 0.25 - 4.9375 = -4.6875; step 7: θ 0.03125 | 6.46875
        # r3: g -2.25; m 0; φ 0.25 + 2.25 = 2.5; θ 0.03125 + 2.25 + 0.1875 = 2.46875 | 6.46875 + 2.25 - 4.6875 = 4.03125
        (2.5, 0, 2.46875, 4.03125),
    ),
    (NESTEROV, BLEND_0, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 13.5 = 2.5; θ 2.5 | 2.5
        (2.5, 9, 2.5, 2.5),
        # step 4: θ 1.25 | 5.25; Δ 2.5 - 1.25 = 1.25 | 2.5 - 5.25 = -2.75; step 5: θ 0.625 | 6.625
        # r2: g -0.75; m 3.75; φ 2.5 - 1.125 = 1.375; θ 1.375 | 1.375
        (1.375, 3.75, 1.375, 1.375),
        # step 6: θ 0.6875 | 4.6875; Δ 1.375 - 0.6875 = 0.6875 | 1.375 - 4.6875 = -3.3125; step 7: θ 0.34375 | 6.34375
        # r3: g -1.3125; m 0.5625; φ 1.375 + 1.03125 = 2.40625; θ 2.40625 | 2.40625
        (2.40625, 0.5625, 2.40625, 2.40625),
    ),
    (NESTEROV, BLEND_HALF, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 13.5 = 2.5
        # θ 0.5·2 + 1.25 = 2.25 | 0.5·9 + 1.25 = 5.75
        (2.5, 9, 2.25, 5.75),
        # step 4: θ 1.125 | 6.875; Δ 2.5 - 1.125 = 1.375 | 2.5 - 6.875 = -4.375; step 5: θ 0.5625 | 7.4375
        # r2: g -1.5; m 3; φ 2.5 + 0 = 2.5; θ 0.5·0.5625 + 1.25 = 1.53125 | 0.5·7.4375 + 1.25 = 4.96875
        (2.5, 3, 1.53125, 4.96875),
        # step 6: θ 0.765625 | 6.484375; Δ 2.5 - 0.765625 = 1.734375 | 2.5 - 6.484375 = -3.984375
        # step 7: θ 0.3828125 | 7.2421875; r3: g -1.125; m 0.375; φ 2.5 + 0.9375 = 3.4375
        # θ 0.5·0.3828125 + 1.71875 = 1.91015625 | 0.5·7.2421875 + 1.71875 = 5.33984375
        (3.4375, 0.375, 1.91015625, 5.33984375),
    ),
    (NESTEROV, BLEND_1, 1): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 3: θ 2 | 9; r1: g 9; m 9; φ 16 - 13.5 = 2.5; θ 2 | 9
        (2.5, 9, 2, 9),
        # step 4: θ 1 | 8.5; Δ 2.5 - 1 = 1.5 | 2.5 - 8.5 = -6; step 5: θ 0.5 | 8.25
        # r2: g -2.25; m 2.25; φ 2.5 + 1.125 = 3.625; θ 0.5 | 8.25
        (3.625, 2.25, 0.5, 8.25),
        # step 6: θ 0.25 | 8.125; Δ 3.625 - 0.25 = 3.375 | 3.625 - 8.125 = -4.5; step 7: θ 0.125 | 8.0625
        # r3: g -0.5625; m 0.5625; φ 3.625 + 0.28125 = 3.90625; θ 0.125 | 8.0625
        (3.90625, 0.5625, 0.125, 8.0625),
    ),
    (NESTEROV, KEEP, 3): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 4: θ 1 | 8.5; Δ 16 - 1 - 12 = 3 | 16 - 8.5 - 6 = 1.5
        # step 5: θ 0.5 | 8.25; r1: g 9; m 9; φ 16 - 13.5 = 2.5; θ 0.5 - 13.5 + 12 = -1 | 8.25 - 13.5 + 6 = 0.75
        (2.5, 9, -1, 0.75),
        # step 6: θ -0.5 | 4.375; Δ 2.5 + 0.5 - 3 = 0 | 2.5 - 4.375 - 1.5 = -3.375; step 7: θ -0.25 | 6.1875
        # r2: g 2.25; m 6.75; φ 2.5 - 5.625 = -3.125; θ -0.25 - 5.625 + 3 = -2.875 | 6.1875 - 5.625 + 1.5 = 2.0625
        (-3.125, 6.75, -2.875, 2.0625),
        # step 8: θ -1.4375 | 5.03125; Δ -3.125 + 1.4375 + 0 = -1.6875 | -3.125 - 5.03125 + 3.375 = -4.78125
        # step 9: θ -0.71875 | 6.515625; r3: g -1.6875; m 1.6875; φ -3.125 + 0.84375 = -2.28125
        # θ -0.71875 + 0.84375 + 0 = 0.125 | 6.515625 + 0.84375 - 3.375 = 3.984375
        (-2.28125, 1.6875, 0.125, 3.984375),
    ),
    (NESTEROV, BLEND_HALF, 3): (
        # step 2: θ 4 | 10; Δ 16 - 4 = 12 | 16 - 10 = 6; step 4: θ 1 | 8.5; Δ 16 - 1 - 12 = 3 | 16 - 8.5 - 6 = 1.5
        # step 5: θ 0.5 | 8.25; r1: g 9; m 9; φ 16 - 13.5 = 2.5; θ 0.5·0.5 + 1.25 = 1.5 | 0.5·8.25 + 1.25 = 5.375
        # in flight 1.5 | 0.75
        (2.5, 9, 1.5, 5.375),
        # step 6: θ 0.75 | 6.6875; Δ 2.5 - 0.75 - 1.5 = 0.25 | 2.5 - 6.6875 - 0.75 = -4.9375; step 7: θ 0.375 | 7.34375
        # r2: g 2.25; m 6.75; φ 2.5 - 5.625 = -3.125; θ 0.5·0.375 - 1.5625 = -1.375 | 0.5·7.34375 - 1.5625 = 2.109375
        # in flight 0.125 | -2.46875
        (-3.125, 6.75, -1.375, 2.109375),
        # step 8: θ -0.6875 | 5.0546875; Δ -3.125 + 0.6875 - 0.125 = -2.5625 | -3.125 - 5.0546875 + 2.46875 = -5.7109375
        # step 9: θ -0.34375 | 6.52734375; r3: g -2.34375; m 1.03125; φ -3.125 + 1.828125 = -1.296875
        # θ 0.5·-0.34375 - 0.6484375 = -0.8203125 | 0.5·6.52734375 - 0.6484375 = 2.615234375
        # in flight -1.28125 | -2.85546875
        (-1.296875, 1.03125, -0.8203125, 2.615234375),
    ),
}


def describe(argument: object) -> str | None:
    if isinstance(argument, OuterRule):
        return "sgd" if argument == SGD else "nesterov"
    if isinstance(argument, MergeRule):
        return "keep" if argument == KEEP else f"blend {argument.alpha}"
    return None


@pytest.mark.parametrize(("outer", "merge", "delay_steps"), TRAJECTORIES, ids=describe)
def test_lock_step_matches_the_trajectory_computed_by_hand(
    outer: OuterRule, merge: MergeRule, delay_steps: int
) -> None:
    expected_rows = TRAJECTORIES[outer, merge, delay_steps]
    for played, expected in zip(play(outer, merge, delay_steps, len(expected_rows)), expected_rows, strict=True):
        assert played == pytest.approx(expected, abs=1e-6)


def test_keep_and_overwrite_are_the_same_without_delay_and_loss() -> None:
    assert np.allclose(play(NESTEROV, KEEP, 0, 20), play(NESTEROV, BLEND_0, 0, 20), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("outer", [OuterRule(learning_rate=1.0, momentum=0.0), NESTEROV], ids=["sgd", "nesterov"])
@pytest.mark.parametrize(
    ("merge", "delay_steps"), [(KEEP, 3), (KEEP, 5), (BLEND_HALF, 3)], ids=["keep 3", "keep 5", "blend 3"]
)
def test_a_delay_longer_than_a_cycle_stays_bounded_and_settles_between_the_optima(
    outer: OuterRule, merge: MergeRule, delay_steps: int
) -> None:
    rows = play(outer, merge, delay_steps, 200)
    assert max(abs(value) for row in rows for value in row) <= 2 * START
    anchor, momentum, first, second = rows[-1]
    assert anchor == pytest.approx(4.0, abs=1e-3)
    assert momentum == pytest.approx(0.0, abs=1e-3)
    assert (first + second) / 2 == pytest.approx(4.0, abs=1e-3)


def test_without_the_in_flight_term_the_anchor_oscillates_forever() -> None:
    plain = OuterRule(learning_rate=1.0, momentum=0.0)
    anchors = [row[0] for row in play(plain, KEEP, 3, 200, subtract_in_flight=False)][-12:]
    assert max(anchors) - min(anchors) > START
    settled = [row[0] for row in play(plain, KEEP, 3, 200)][-12:]
    assert max(settled) - min(settled) < 1e-3


def test_without_the_in_flight_term_momentum_makes_the_anchor_grow_without_bound() -> None:
    anchors = [abs(row[0]) for row in play(NESTEROV, KEEP, 3, 60, subtract_in_flight=False)]
    assert max(anchors[-12:]) > 100_000.0


def test_blend_with_momentum_diverges_with_a_delay_of_two_and_a_half_cycles() -> None:
    # A known limit: choose keep, or blend without momentum, if exchanges take that long.
    assert max(abs(row[0]) for row in play(NESTEROV, BLEND_HALF, 5, 160)[-12:]) > 1_000.0
    plain = OuterRule(learning_rate=1.0, momentum=0.0)
    assert play(plain, BLEND_HALF, 5, 160)[-1][0] == pytest.approx(4.0, abs=1e-3)
