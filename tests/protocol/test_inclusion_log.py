"""A reducer averages less while its entries leave out several members that those of other owners include."""

from __future__ import annotations

import pytest
from fake_run import peer_id

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.membership.inclusion_log import (
    FIRST_REST_CYCLES,
    JUDGED_CYCLES,
    InclusionLog,
)
from p2p_diloco.protocol.wire.member import FULL_SHARE

ME, *OTHERS = MEMBERS = [peer_id(name) for name in ("me", "a", "b", "c")]
A, B, C = OTHERS


def play(
    log: InclusionLog, cycles: range, own: list[PeerId], others: list[PeerId], members: list[PeerId] = MEMBERS
) -> list[int]:
    """Let cycles pass with two entries of either side, which include these members; return the shares."""
    shares = []
    for cycle in cycles:
        log.cycle_over(cycle)
        for _ in range(2):
            log.entry_absorbed(is_own=True, included=own, listed=members)
            log.entry_absorbed(is_own=False, included=others, listed=members)
        shares.append(log.share)
    return shares


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (MEMBERS, MEMBERS),
        ([ME, A], [ME, A]),
        (MEMBERS, [ME, A]),
        ([], []),
        ([ME, A, B], MEMBERS),
        ([A, B], MEMBERS),
    ],
)
def test_a_share_stays_full_while_own_entries_leave_out_at_most_one(own: list[PeerId], others: list[PeerId]) -> None:
    """One member may keep its vectors from this reducer on purpose."""
    assert set(play(InclusionLog(ME), range(100), own, others)) == {FULL_SHARE}


def test_entries_that_leave_several_out_halve_the_share_again_and_again() -> None:
    shares = play(InclusionLog(ME), range(4 * JUDGED_CYCLES + 1), [ME, A], MEMBERS)
    assert shares[JUDGED_CYCLES - 1 :: JUDGED_CYCLES] == [8, 4, 2, 1]


@pytest.mark.parametrize(("num_left_out", "falls"), [(25, False), (26, True)])
def test_in_a_large_run_more_than_a_quarter_must_be_left_out(num_left_out: int, falls: bool) -> None:
    members = [ME, *(peer_id(str(number)) for number in range(100))]
    shares = play(InclusionLog(ME), range(JUDGED_CYCLES + 1), members[: 101 - num_left_out], members, members)
    assert (shares[-1] < FULL_SHARE) == falls


def test_a_reducer_whose_entries_are_alone_is_not_compared() -> None:
    log = InclusionLog(ME)
    for cycle in range(100):
        log.cycle_over(cycle)
        log.entry_absorbed(is_own=True, included=[ME], listed=MEMBERS)
    assert log.share == FULL_SHARE


def test_a_lowered_share_rises_after_a_rest_that_grows_with_each_fall() -> None:
    log, cycle = InclusionLog(ME), 0
    rests = []
    for _ in range(3):
        while log.share > 1:
            play(log, range(cycle, cycle + 1), [ME], MEMBERS)
            cycle += 1
        fell = cycle
        while log.share == 1:
            play(log, range(cycle, cycle + 1), MEMBERS, MEMBERS)
            cycle += 1
        rests.append(cycle - fell)
    assert rests[0] >= FIRST_REST_CYCLES - 1
    assert rests[2] > rests[1] > rests[0]


def test_a_share_that_suits_rises_to_the_full_one() -> None:
    log = InclusionLog(ME)
    play(log, range(4 * JUDGED_CYCLES), [ME, A], MEMBERS)
    assert log.share < FULL_SHARE
    assert play(log, range(8, 8 + 20 * FIRST_REST_CYCLES), MEMBERS, MEMBERS)[-1] == FULL_SHARE
