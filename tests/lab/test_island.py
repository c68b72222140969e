"""The tiny island: its books agree with what the real code does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from lab_swarms import ELEMENTS, founded, maths

from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.lab.island import Complaint, Island, Replacement
from p2p_diloco.outer.advance import PreparedContribution, prepare_contribution
from p2p_diloco.outer.in_flight import InFlight
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.actions import TakeSnapshot

SPANS = (SpanId(0, 0), SpanId(0, 1))


def island(complaints: list[Complaint], *, trains: bool = True) -> Island:
    start_N = np.zeros(ELEMENTS, dtype=np.float32)
    made = Island(maths=maths(), spans=SPANS, noise=random.Random(1), trains=trains, complain=complaints.append)
    made.states = {span: genesis_state(start_N, sha256(b"roster")) for span in SPANS}
    made.load()
    return made


def snapshot(round_index: int) -> TakeSnapshot:
    return TakeSnapshot(round=round_index, fragment=0, deadline=1e9)


def test_it_contributes_what_it_has_made_and_nothing_twice() -> None:
    complaints: list[Complaint] = []
    made = island(complaints)
    contribution = made.contribute(snapshot(0), 10)
    assert contribution is not None
    assert [encoded.span for encoded in contribution.spans] == list(SPANS)
    assert (contribution.tokens, contribution.steps) == (1000, 10)
    assert made.contribute(snapshot(1), 10) is None
    again = made.contribute(snapshot(0), 20)
    assert again is not None
    assert again.spans == ()
    assert made.contribute(snapshot(2), 30) is not None
    assert made.in_flight[SPANS[0]].rounds == (0, 2)
    assert complaints == []


def test_one_that_leaves_out_what_is_in_flight_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[Complaint] = []
    made = island(complaints)

    def forget(state: SpanState, in_flight: InFlight, local_N: Vector, *, round_index: int) -> PreparedContribution:
        return prepare_contribution(state, InFlight(), local_N, round_index=round_index)

    monkeypatch.setattr("p2p_diloco.lab.island.prepare_contribution", forget)
    made.contribute(snapshot(0), 10)
    assert complaints == []
    made.contribute(snapshot(1), 20)
    assert complaints[0].invariant == "I2"
    assert "is not sent" in complaints[0].text


def test_a_transfer_settles_all_that_is_in_flight() -> None:
    complaints: list[Complaint] = []
    made = island(complaints)
    made.contribute(snapshot(0), 10)
    other = genesis_state(np.ones(ELEMENTS, dtype=np.float32), sha256(b"roster"))
    made.replace(Replacement(SPANS[0], other))
    assert made.states[SPANS[0]] is other
    assert made.in_flight[SPANS[0]].rounds == ()
    assert complaints == []


def test_a_bit_flips_only_where_the_number_stays_within_measure() -> None:
    made = island([])
    assert made.flip_bit(SPANS[0], 0, 30)  # 0 becomes 2
    assert not made.flip_bit(SPANS[0], 0, 29)  # 2 would become 4e19
    assert made.states[SPANS[0]].anchor_N[0] != 0.0


def test_who_does_not_train_has_no_parameters() -> None:
    made = island([], trains=False)
    assert made.contribute(snapshot(0), 10) is None
    assert made.local == {}
    made.drop()
    assert made.states == {}


def test_islands_of_a_swarm_come_closer_to_nothing_by_themselves() -> None:
    swarm = founded(3)
    swarm.run(120.0)
    heights = {machine.height() for machine in swarm.running()}
    assert min(heights) > 20
