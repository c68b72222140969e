"""When a peer continues without a majority."""

from __future__ import annotations

import pytest
from council import BOOT, NEW, STALL, TURN_SECONDS, A, B, C, Council, D, E, member_of_three
from made import certify, child_of, declaration, founding, member, membership_of, roster_1, roster_of

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.wire.ballot import Vote


@pytest.mark.parametrize(("cycles_without_entries", "expected"), [(0, False), (2, False), (3, True), (10**9, True)])
def test_a_member_is_stalled_after_three_cycles_without_entries(cycles_without_entries: int, expected: bool) -> None:
    here = member_of_three()
    here.stall.cycles_without_entries = cycles_without_entries
    assert here.stall.continues() is expected
    stranger = membership_of(NEW, founding(), roster_1(3))
    stranger.stall.cycles_without_entries = cycles_without_entries
    assert not stranger.stall.continues()
    assert not membership_of(A).stall.continues()


def test_a_lone_member_is_a_majority_however_long_it_has_waited_for_others() -> None:
    here = membership_of(BOOT, founding())
    here.stall.cycles_without_entries = 10**9
    assert not here.stall.continues()


def test_a_bootstrap_is_stalled_only_if_a_trainer_applies() -> None:
    roster = certify(child_of(founding().roster, [member(BOOT, counts=False, trains=False), member(A)]), [BOOT])
    here = membership_of(BOOT, founding(), roster, trains=False)
    here.stall.cycles_without_entries = 3
    for word, is_stalled in (
        (None, False),
        (declaration(A), False),
        (declaration(NEW, trains=False), False),
        (declaration(NEW, leaving=True, incarnation=2), False),
        (declaration(A, incarnation=2), True),
        (declaration(NEW, incarnation=3), True),
    ):
        here.declarations.newest = {word.peer: word} if word is not None else {}
        assert here.stall.continues() is is_stalled


def stalled(council: Council, *gone: PeerId) -> None:
    for peer in gone:
        del council.here[peer]
    for one in council.here.values():
        one.stall.cycles_without_entries = 3


def test_a_quarter_of_a_stalled_run_continues_with_exactly_the_peers_present() -> None:
    council = Council(roster_1(5))
    stalled(council, C, D, E)
    for turn in range(6 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    roster = council.in_force()
    assert roster.peers() == {A, B}
    assert roster.degraded
    assert all(one.stall.cycles_without_entries == 0 for one in council.here.values())


def test_members_that_reach_only_a_founder_outside_the_roster_continue_together() -> None:
    council = Council(roster_1(5), BOOT)
    council.is_lost = lambda sender, to, message: BOOT not in (sender, to)
    stalled(council, C, D, E)
    council.here[BOOT].stall.cycles_without_entries = 0
    for turn in range(6 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.here[A].book.in_force == council.here[B].book.in_force
    assert {member.peer for member in council.here[A].book.in_force.members if member.trains} == {A, B}


def test_less_than_a_quarter_waits_until_it_has_been_stalled_for_four_times_as_long() -> None:
    council = Council(roster_1(5))
    stalled(council, B, C, D, E)
    for turn in range(2 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.in_force() == roster_of(5)
    council.here[A].stall.cycles_without_entries = 12
    for turn in range(2 * LEAD_TURNS, 8 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.in_force().peers() == {A}


def test_only_stalled_peers_vote_for_a_degraded_child() -> None:
    council = Council(roster_1(5))
    stalled(council, C, D, E)
    council.here[B].stall.cycles_without_entries = 0
    for turn in range(4 * LEAD_TURNS):
        council.tick(STALL + turn * TURN_SECONDS + 0.1)
    assert council.in_force() == roster_of(5)
    assert not any(isinstance(action, Send) and isinstance(action.message, Vote) for _, action in council.actions)
