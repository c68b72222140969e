"""Claims about a span's agreed state and its digests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from blake3 import blake3

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.errors import NonFiniteUpdate, StateError
from p2p_diloco.ids import ZERO_DIGEST, Digest, sha256
from p2p_diloco.outer.outer_step import OuterRule, apply_outer_step
from p2p_diloco.outer.state import SpanState, absorb, content_digest, genesis_state, state_digest
from p2p_diloco.span_log import FOUNDING_WEIGHT, GENESIS_ROUND, AbsorbedEntry, founding_radius

ROSTER = sha256(b"roster 0")
RULE = OuterRule()


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def entry(round_index: int) -> AbsorbedEntry:
    return AbsorbedEntry(
        digest=sha256(b"entry", bytes([round_index])),
        round=round_index,
        roster=sha256(b"roster 1"),
        radius=2.5,
        median_weight=100.0,
    )


def test_a_founded_span_has_absorbed_nothing() -> None:
    state = genesis_state(vector(1.0, 2.0), ROSTER)
    assert state.anchor_N.tolist() == [1.0, 2.0]
    assert state.momentum_N.tolist() == [0.0, 0.0]
    assert state.elements == 2
    assert (state.head.height, state.head.round, state.head.roster) == (0, GENESIS_ROUND, ROSTER)
    assert (state.head.radius, state.head.median_weight) == (founding_radius(2), FOUNDING_WEIGHT)


def test_the_chain_of_a_founded_span_starts_with_the_content_digest_of_the_initial_values() -> None:
    state = genesis_state(vector(1.0, 2.0), ROSTER)
    assert state.head.digest == content_digest(vector(1.0, 2.0), vector(0.0, 0.0), ZERO_DIGEST)


def test_founding_copies_the_initial_values() -> None:
    start_N = vector(1.0, 2.0)
    state = genesis_state(start_N, ROSTER)
    start_N[0] = 7.0
    assert state.anchor_N.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_initial_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(StateError, match="1 of 2 initial values are not finite or beyond"):
        genesis_state(vector(1.0, value), ROSTER)


def test_a_states_vectors_are_read_only() -> None:
    state = absorb(genesis_state(vector(1.0), ROSTER), entry=entry(3), update_N=vector(1.0), rule=RULE)
    for vector_N in (state.anchor_N, state.momentum_N):
        with pytest.raises(ValueError, match="read-only"):
            vector_N[0] = 5.0


@pytest.mark.parametrize(
    ("anchor", "momentum"),
    [
        (np.zeros(2, dtype=np.float64), np.zeros(2, dtype=np.float32)),
        (np.zeros(2, dtype=np.float32), np.zeros((2, 1), dtype=np.float32)),
        (np.zeros(2, dtype=np.float32), np.zeros(3, dtype=np.float32)),
    ],
)
def test_vectors_that_do_not_match_are_refused(anchor: Vector, momentum: Vector) -> None:
    head = genesis_state(vector(1.0), ROSTER).head
    with pytest.raises(StateError, match=r"anchor is float.* and momentum float.*; expected float32 vectors"):
        SpanState(head=head, anchor_N=anchor, momentum_N=momentum)


def test_absorbing_applies_the_outer_step_and_the_entrys_published_values() -> None:
    state = genesis_state(vector(8.0, 4.0), ROSTER)
    update_N = vector(1.0, -2.0)
    absorbed = absorb(state, entry=entry(6), update_N=update_N, rule=RULE)
    anchor_N, momentum_N = apply_outer_step(state.anchor_N, state.momentum_N, update_N, RULE)
    assert absorbed.anchor_N.tobytes() == anchor_N.tobytes()
    assert absorbed.momentum_N.tobytes() == momentum_N.tobytes()
    assert absorbed.head.digest == sha256(state.head.digest, entry(6).digest)
    assert (absorbed.head.height, absorbed.head.round) == (1, 6)
    assert (absorbed.head.roster, absorbed.head.radius, absorbed.head.median_weight) == (entry(6).roster, 2.5, 100.0)


def test_the_outer_rate_follows_the_number_of_absorbed_entries() -> None:
    falling = OuterRule(learning_rate=1.0, momentum=0.0, final_share=0.5, planned_entries=2)
    state = genesis_state(vector(8.0), ROSTER)
    anchors = []
    for round_index in (3, 6, 9, 12):
        state = absorb(state, entry=entry(round_index), update_N=vector(1.0), rule=falling)
        anchors.append(float(state.anchor_N[0]))
    assert anchors == [7.0, 6.0, 5.5, 5.0]


def test_absorbing_does_not_change_the_parent() -> None:
    state = genesis_state(vector(8.0), ROSTER)
    before = state_digest([state])
    absorb(state, entry=entry(1), update_N=vector(1.0), rule=RULE)
    assert state_digest([state]) == before


@pytest.mark.parametrize("again", [5, 4])
def test_an_entry_that_is_not_newer_is_refused(again: int) -> None:
    state = absorb(genesis_state(vector(8.0), ROSTER), entry=entry(5), update_N=vector(1.0), rule=RULE)
    with pytest.raises(StateError, match=f"entry of round {again} cannot follow round 5, which is already absorbed"):
        absorb(state, entry=entry(again), update_N=vector(1.0), rule=RULE)


def test_an_update_of_another_length_is_refused() -> None:
    with pytest.raises(StateError, match="an update of 2 elements does not match a span of 1"):
        absorb(genesis_state(vector(8.0), ROSTER), entry=entry(5), update_N=vector(1.0, 2.0), rule=RULE)


def test_an_update_that_is_not_finite_is_not_absorbed() -> None:
    with pytest.raises(NonFiniteUpdate):
        absorb(genesis_state(vector(8.0), ROSTER), entry=entry(5), update_N=vector(math.nan), rule=RULE)


def test_peers_that_absorb_the_same_entries_hold_the_same_bytes() -> None:
    digests = set()
    for _ in range(2):
        state = genesis_state(np.linspace(-1.0, 1.0, 1000, dtype=np.float32), ROSTER)
        for round_index in range(10):
            update_N = np.cos(np.arange(1000) * (round_index + 1)).astype(np.float32)
            state = absorb(state, entry=entry(round_index), update_N=update_N, rule=RULE)
        digests.add(state_digest([state]))
    assert len(digests) == 1


def test_the_content_digest_uses_little_endian_bytes_on_every_machine() -> None:
    expected = blake3(b"p2p-diloco span content 2\n" + bytes.fromhex("0000803f" + "000000c0") + b"d" * 32).digest()
    assert content_digest(vector(1.0), vector(-2.0), Digest(b"d" * 32)) == expected


def test_the_content_digest_does_not_depend_on_memory_layout() -> None:
    wide_N = np.arange(10, dtype=np.float32)
    assert content_digest(wide_N[::2], wide_N[1::2], ZERO_DIGEST) == content_digest(
        wide_N[::2].copy(), wide_N[1::2].copy(), ZERO_DIGEST
    )


def test_every_bit_of_a_state_changes_its_digest() -> None:
    state = genesis_state(vector(1.0, 2.0), ROSTER)
    others = [
        SpanState(head=state.head, anchor_N=vector(1.0, np.nextafter(np.float32(2.0), 3)), momentum_N=vector(0.0, 0.0)),
        SpanState(head=state.head, anchor_N=vector(1.0, 2.0), momentum_N=vector(0.0, -0.0)),
        SpanState(head=replace(state.head, digest=ZERO_DIGEST), anchor_N=vector(1.0, 2.0), momentum_N=vector(0.0, 0.0)),
    ]
    assert len({state_digest([each]) for each in (state, *others)}) == 4


def test_the_order_of_spans_changes_the_digest() -> None:
    first, second = genesis_state(vector(1.0), ROSTER), genesis_state(vector(2.0), ROSTER)
    assert state_digest([first, second]) != state_digest([second, first])
