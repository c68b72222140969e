"""The ledger of one span at one island."""

from __future__ import annotations

import numpy as np

from p2p_diloco.outer.state import InFlight
from simulator.ledger import Ledger, total

N = 4
ONE_N = np.ones(N, dtype=np.float32)


def in_flight(*rounds: int) -> InFlight:
    listed = InFlight()
    for round_index in rounds:
        listed = listed.with_contribution(round_index, ONE_N)
    return listed


def test_everything_made_is_sent() -> None:
    ledger = Ledger(N)
    ledger.make(-np.ones(N))
    assert ledger.unsent() == 2.0
    assert ledger.send(3, ONE_N) is None
    assert ledger.unsent() == 0.0
    # φ = 0, θ = -1, c = 1 in flight: the residual is 0.
    assert ledger.imbalance(ONE_N * 0, -ONE_N, in_flight(3)) < 1.0
    assert ledger.imbalance(ONE_N * 0, -ONE_N, in_flight()) > 1.0


def test_a_contribution_is_resolved_once() -> None:
    ledger = Ledger(N)
    assert ledger.send(3, ONE_N) is None
    assert ledger.send(3, ONE_N) == "a second contribution to round 3"
    assert ledger.resolve(in_flight(), 3) is None
    assert ledger.resolve(in_flight(3), None) == "rounds [3] are in flight again, resolved before"


def test_a_skipped_contribution_comes_back_and_others_do_not() -> None:
    for entry_round, unsent in ((5, 2.0), (3, 0.0), (None, 0.0)):
        ledger = Ledger(N)
        ledger.make(-np.ones(N))
        ledger.send(3, ONE_N)
        assert ledger.resolve(in_flight(), entry_round) is None
        assert ledger.unsent() == unsent


def test_a_contribution_settled_by_an_entry_must_leave_the_list() -> None:
    ledger = Ledger(N)
    ledger.send(3, ONE_N)
    wrong = ledger.resolve(in_flight(3), 5)
    assert wrong == "a contribution is in flight still, although an entry of round 5 was absorbed"


def test_a_flipped_bit_counts_as_own_work() -> None:
    ledger = Ledger(N)
    ledger.flip(np.ones(N))
    ledger.follow(ONE_N * 3)
    assert ledger.imbalance(ONE_N, ONE_N * 0, InFlight()) < 1.0
    assert ledger.slack > 0.0
    assert total((), N).tolist() == [0.0] * N
