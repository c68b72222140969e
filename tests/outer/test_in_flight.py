"""Claims about contributions in flight: each is resolved exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.errors import RoundError
from p2p_diloco.outer.state import MAX_IN_FLIGHT, InFlight, PendingContribution


def decoded(value: float) -> Vector:
    return np.full(2, value, dtype=np.float32)


def flying(*rounds: int) -> InFlight:
    in_flight = InFlight()
    for own_round in rounds:
        in_flight = in_flight.with_contribution(own_round, decoded(own_round))
    return in_flight


def firsts(vectors: list[Vector] | tuple[Vector, ...]) -> list[float]:
    return [float(vector[0]) for vector in vectors]


def test_an_empty_list_resolves_nothing() -> None:
    remaining, resolved_N = InFlight().resolve(3)
    assert len(remaining) == 0
    assert resolved_N is None


def test_the_contribution_of_the_entrys_round_is_removed_and_returned() -> None:
    remaining, resolved_N = flying(4, 8, 12).resolve(4)
    assert resolved_N is not None
    assert resolved_N.tolist() == [4.0, 4.0]
    assert remaining.rounds == (8, 12)


def test_contributions_of_skipped_rounds_are_removed_and_not_returned() -> None:
    remaining, resolved_N = flying(4, 8, 12).resolve(8)
    assert resolved_N is not None
    assert resolved_N[0] == 8.0
    assert remaining.rounds == (12,)


def test_an_entry_of_a_round_without_own_contribution_removes_only_older_ones() -> None:
    remaining, resolved_N = flying(4, 12).resolve(8)
    assert resolved_N is None
    assert remaining.rounds == (12,)


def test_the_oldest_beyond_the_limit_overflow() -> None:
    remaining, surplus = flying(*range(MAX_IN_FLIGHT + 2)).overflow()
    assert firsts(surplus) == [0.0, 1.0]
    assert remaining.rounds == tuple(range(2, MAX_IN_FLIGHT + 2))


def test_nothing_overflows_at_the_limit() -> None:
    in_flight = flying(*range(MAX_IN_FLIGHT))
    assert in_flight.overflow() == (in_flight, [])


def test_clearing_returns_everything_in_order_of_rounds() -> None:
    emptied, leaving = flying(1, 5, 9).cleared()
    assert len(emptied) == 0
    assert firsts(leaving) == [1.0, 5.0, 9.0]


def test_scaling_keeps_rounds_and_does_not_change_the_old_list() -> None:
    in_flight = flying(2, 6)
    scaled = in_flight.scaled(0.5)
    assert scaled.rounds == (2, 6)
    assert firsts(scaled.vectors) == [1.0, 3.0]
    assert firsts(in_flight.vectors) == [2.0, 6.0]


@pytest.mark.parametrize("own_round", [3, 7])
def test_a_round_that_is_in_flight_or_before_it_is_refused(own_round: int) -> None:
    with pytest.raises(RoundError, match=f"round {own_round} cannot follow round 7, whose contribution is in flight"):
        flying(7).with_contribution(own_round, decoded(1.0))


def test_contributions_in_flight_are_read_only() -> None:
    for in_flight in (flying(1), flying(1).scaled(0.5)):
        with pytest.raises(ValueError, match="read-only"):
            in_flight.vectors[0][0] = 5.0


@settings(deadline=None)
@given(
    events=st.lists(
        st.sampled_from(["contribute", "entry of the oldest", "entry of the newest", "overflow", "clear", "scale"]),
        max_size=60,
    )
)
def test_each_contribution_is_resolved_exactly_once(events: list[str]) -> None:
    in_flight, sent, returned, void = InFlight(), [], [], []
    for clock, event in enumerate(events, start=1):
        before = set(in_flight.rounds)
        leaving: list[float] = []
        if event == "contribute":
            in_flight = in_flight.with_contribution(clock, decoded(clock))
            sent.append(clock)
            before.add(clock)
        elif event.startswith("entry") and len(in_flight):
            entry_round = in_flight.rounds[0 if event == "entry of the oldest" else -1]
            in_flight, resolved_N = in_flight.resolve(entry_round)
            assert resolved_N is not None
            leaving = firsts([resolved_N])
        elif event == "overflow":
            in_flight, surplus = in_flight.overflow(2)
            leaving = firsts(surplus)
        elif event == "clear":
            in_flight, surplus = in_flight.cleared()
            leaving = firsts(surplus)
        elif event == "scale":
            in_flight = in_flight.scaled(1.0)
        gone = before - set(in_flight.rounds)
        assert set(leaving) <= gone
        returned += leaving
        void += sorted(gone - set(leaving))
    assert sorted([*returned, *void, *in_flight.rounds]) == sent


def test_an_encoded_contribution_is_decoded_only_on_demand() -> None:
    asked: list[bytes] = []

    def decode(payload: bytes) -> Vector:
        asked.append(payload)
        return decoded(payload[0])

    in_flight = InFlight().with_contribution(4, PendingContribution(b"\x07", decode)).with_contribution(8, decoded(8.0))
    assert in_flight.rounds == (4, 8)
    assert asked == []
    assert firsts(in_flight.vectors) == [7.0, 8.0]
    own = in_flight.of_round(4)
    assert own is not None
    assert own.decoded_N[0] == 7.0
    assert in_flight.of_round(5) is None
    assert firsts(in_flight.scaled(0.5).vectors) == [3.5, 4.0]
    assert in_flight.after(4).rounds == (8,)
    remaining, resolved_N = in_flight.resolve(4)
    assert remaining.rounds == (8,)
    assert resolved_N is not None
    assert resolved_N[0] == 7.0
