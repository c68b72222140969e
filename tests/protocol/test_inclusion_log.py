"""A reducer averages less while its entries include fewer members than those of other owners."""

from __future__ import annotations

import pytest

from p2p_diloco.protocol.membership.inclusion_log import (
    FIRST_REST_CYCLES,
    JUDGED_CYCLES,
    InclusionLog,
)
from p2p_diloco.protocol.wire.member import FULL_SHARE

LISTED = 4


def play(log: InclusionLog, cycles: range, own: int, others: int, spans: int = 2) -> list[int]:
    """Let cycles pass in which entries of this peer and of others include so many of four; return the shares."""
    shares = []
    for cycle in cycles:
        log.cycle_over(cycle)
        for _ in range(spans):
            log.entry_absorbed(is_own=True, included=own, listed=LISTED)
            log.entry_absorbed(is_own=False, included=others, listed=LISTED)
        shares.append(log.share)
    return shares


@pytest.mark.parametrize(("own", "others"), [(4, 4), (2, 2), (4, 1), (0, 0)])
def test_entries_that_include_as_many_as_others_keep_the_full_share(own: int, others: int) -> None:
    assert set(play(InclusionLog(), range(100), own, others)) == {FULL_SHARE}


def test_entries_that_leave_some_out_halve_the_share_again_and_again() -> None:
    shares = play(InclusionLog(), range(4 * JUDGED_CYCLES + 1), 3, 4)
    assert shares[JUDGED_CYCLES - 1 :: JUDGED_CYCLES] == [8, 4, 2, 1]


def test_entries_that_leave_most_out_leave_the_smallest_share_at_once() -> None:
    assert play(InclusionLog(), range(JUDGED_CYCLES + 1), 1, 4)[-1] == 1


def test_a_reducer_whose_entries_are_alone_is_not_compared() -> None:
    log = InclusionLog()
    for cycle in range(100):
        log.cycle_over(cycle)
        log.entry_absorbed(is_own=True, included=1, listed=LISTED)
    assert log.share == FULL_SHARE


def test_a_lowered_share_rises_after_a_rest_that_grows_with_each_fall() -> None:
    log, cycle = InclusionLog(), 0
    rests = []
    for _ in range(3):
        while log.share > 1:
            play(log, range(cycle, cycle + 1), 1, 4)
            cycle += 1
        fell = cycle
        while log.share == 1:
            play(log, range(cycle, cycle + 1), 4, 4)
            cycle += 1
        rests.append(cycle - fell)
    assert rests[0] >= FIRST_REST_CYCLES - 1
    assert rests[1] > 1.5 * rests[0]
    assert rests[2] > 1.5 * rests[1]


def test_a_share_that_suits_rises_to_the_full_one() -> None:
    log = InclusionLog()
    play(log, range(4), 1, 4)
    assert log.share == 1
    assert play(log, range(4, 4 + 5 * FIRST_REST_CYCLES), 4, 4)[-1] == FULL_SHARE
