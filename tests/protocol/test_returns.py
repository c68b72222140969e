"""The wait of a member that was dropped because it was too late."""

from __future__ import annotations

from fake_run import peer_id
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.protocol.membership.returns import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, Returns

ANN, BOB = peer_id("ann"), peer_id("bob")


def test_each_wait_is_twice_as_long_as_the_last_and_at_most_ten_minutes() -> None:
    returns, now, waits = Returns(), 100.0, []
    for _ in range(8):
        returns.dropped(ANN, 1, 25.0, now)
        waits.append(returns.wait_seconds(ANN, 1, now))
        now += waits[-1] + 25.0
    assert waits == [20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]


def test_others_and_restarted_peers_do_not_wait() -> None:
    returns = Returns()
    returns.dropped(ANN, 1, 25.0, 100.0)
    assert returns.wait_seconds(BOB, 1, 100.0) == 0.0
    assert returns.wait_seconds(ANN, 2, 100.0) == 0.0
    assert returns.wait_seconds(ANN, 1, 100.0 + FIRST_WAIT_SECONDS) == 0.0
    returns.dropped(ANN, 2, 25.0, 130.0)
    assert returns.wait_seconds(ANN, 2, 130.0) == FIRST_WAIT_SECONDS


def test_a_member_that_was_listed_for_long_waits_as_short_as_at_first() -> None:
    returns = Returns()
    for now in (0.0, 50.0, 130.0):
        returns.dropped(ANN, 1, 25.0, now)
    returns.dropped(ANN, 1, LONGEST_WAIT_SECONDS, 900.0)
    assert returns.wait_seconds(ANN, 1, 900.0) == FIRST_WAIT_SECONDS


@given(
    st.lists(st.tuples(st.integers(1, 3), st.floats(0.0, 2000.0), st.floats(0.0, 1e5)), max_size=30), st.floats(0, 1e5)
)
def test_no_wait_is_longer_than_the_longest_whatever_the_clock_does(
    drops: list[tuple[int, float, float]], now: float
) -> None:
    returns = Returns()
    for incarnation, listed_seconds, at in drops:
        returns.dropped(ANN, incarnation, listed_seconds, at)
    assert all(0.0 <= returns.wait_seconds(ANN, number, now) <= LONGEST_WAIT_SECONDS for number in (1, 2, 3))
