"""Whose answers about the state count, and how many must agree, in runs of every size."""

from __future__ import annotations

import pytest
from fake_run import peer_id
from made import child_of, founding, head_of, member

from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.repair.quorum import Contacts, Quorum, tip_quorum
from p2p_diloco.protocol.repair.reports import ContentReports
from p2p_diloco.protocol.wire.messages import ContentReply
from p2p_diloco.protocol.wire.roster import Roster, grid_order

BOOT, JOINER = peer_id("boot"), peer_id("joiner")


def peers(num_peers: int) -> list[PeerId]:
    return [peer_id(f"p{place}") for place in range(num_peers)]


def roster(num_members: int, *, num_reducing: int | None = None, num_voters: int | None = None) -> Roster:
    reducing = num_members if num_reducing is None else num_reducing
    voters = num_members if num_voters is None else num_voters
    members = [
        member(peer, reduces=place < reducing, counts=place < voters) for place, peer in enumerate(peers(num_members))
    ]
    return child_of(founding().roster, members)


def quorum(
    roster: Roster,
    me: PeerId,
    *,
    holders: list[PeerId] | None = None,
    can_be_dialled: bool = True,
    is_ready: bool = False,
    has_listened: bool = True,
    gone: tuple[PeerId, ...] = (),
    empty: list[PeerId] | None = None,
    group_size: int = 16,
) -> Quorum:
    reached = holders if holders is not None else sorted(roster.peers() - {me})
    contacts = Contacts(
        me=me,
        can_be_dialled=can_be_dialled,
        is_ready=is_ready,
        roster=roster,
        grid=fold_roster(roster, group_size),
        founder=BOOT,
        gone=gone,
        holders=reached,
        empty=empty or (),
    )
    return tip_quorum(contacts, has_listened=has_listened)


@pytest.mark.parametrize(("num_members", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (16, 9)])
def test_a_joiner_needs_answers_of_more_than_half_of_the_members(num_members: int, needed: int) -> None:
    found = quorum(roster(num_members), JOINER)
    assert found.needed == needed
    assert not found.are_enough(peers(num_members)[: needed - 1])
    assert found.are_enough(peers(num_members)[:needed])
    assert not found.are_enough([peer_id(f"stranger {number}") for number in range(20)])


@pytest.mark.parametrize(("num_members", "needed"), [(2, 2), (3, 2), (4, 3), (5, 3), (6, 4), (16, 9)])
def test_a_ready_member_is_replaced_only_by_more_than_half_of_all_and_never_by_one(
    num_members: int, needed: int
) -> None:
    found = quorum(roster(num_members), peers(num_members)[0], is_ready=True)
    assert found.needed == needed
    assert found.witnesses == frozenset(peers(num_members)[1:])
    assert found.are_enough(peers(num_members)[1:]) == (num_members > 2)


def test_one_of_two_members_that_lost_its_state_believes_the_other() -> None:
    first, second = peers(2)
    assert quorum(roster(2), first).are_enough([second])


def test_before_roster_1_only_the_founder_counts() -> None:
    found = quorum(founding().roster, JOINER)
    assert found.are_enough([BOOT])
    assert not quorum(founding().roster, BOOT, is_ready=True).are_enough([JOINER])


def test_the_founder_is_believed_about_the_initial_state_only() -> None:
    found = quorum(roster(4), JOINER)
    assert found.may_name(head_of(), [BOOT])
    assert not found.may_name(head_of(height=1, round_index=0), [BOOT])
    assert not found.may_name(head_of(), [peers(4)[0]])
    assert BOOT not in found.askable
    assert BOOT in quorum(roster(4), JOINER, holders=[BOOT, peers(4)[0]]).askable


def test_only_the_founder_counts_if_no_reachable_member_holds_state() -> None:
    """All reachable members have gone or are empty; peers at home can fetch from no other."""
    at_home = roster(2, num_reducing=0)
    for me in (JOINER, peers(2)[0]):
        found = quorum(at_home, me, holders=[BOOT], can_be_dialled=False)
        assert found.witnesses == {BOOT}
        assert found.askable == [BOOT]
        assert found.may_name(head_of(height=1, round_index=0), [BOOT])
        assert not found.are_enough([]), "who can hear nobody takes nothing"
        assert not quorum(at_home, me, holders=[], can_be_dialled=False).witnesses
    ready = quorum(at_home, peers(2)[0], holders=[BOOT], can_be_dialled=False, is_ready=True)
    assert not ready.are_enough([BOOT]), "it has something to lose"
    wiped = quorum(roster(3), peers(3)[0], holders=[BOOT], empty=peers(3)[1:])
    assert wiped.are_enough([BOOT])
    silent = quorum(roster(3), peers(3)[0], holders=[BOOT], empty=peers(3)[1:2])
    assert not silent.are_enough([BOOT]), "a member that is not heard may hold it"


def test_a_bootstrap_that_is_a_member_counts_as_one_voter() -> None:
    boot, (first, second) = member(BOOT, trains=False, counts=False), peers(2)
    three = child_of(founding().roster, [boot, member(first), member(second)])
    assert three.voters == {BOOT, first, second}
    found = quorum(three, JOINER)
    assert (found.witnesses, found.needed) == (three.voters, 2)
    assert not found.are_enough([BOOT])
    assert found.are_enough([BOOT, first])


def test_in_one_row_only_voters_count() -> None:
    """A crowd of fresh identities cannot name a state."""
    whole = roster(12, num_voters=4)
    crowd = peers(12)[4:]
    for me in (JOINER, crowd[0]):
        found = quorum(whole, me)
        assert found.witnesses == set(peers(12)[:4])
        assert found.needed == 3
        assert not found.are_enough(crowd)
    ready = quorum(whole, peers(12)[0], is_ready=True)
    assert ready.witnesses == set(peers(12)[1:4])
    assert not ready.are_enough([*crowd, *peers(12)[1:3]])


def test_all_members_count_if_no_other_voter_holds_state() -> None:
    """Voters that have all lost the state would otherwise wait for each other forever."""
    whole = roster(8, num_voters=3)
    voters, others = peers(8)[:3], peers(8)[3:]
    found = quorum(whole, voters[0], holders=others, empty=voters[1:])
    assert found.witnesses == set(peers(8)[1:])
    assert found.are_enough(others[:3])
    assert not found.are_enough(others[:2])
    some = quorum(whole, voters[0], holders=[*others, voters[1]], empty=voters[2:3])
    assert some.witnesses == set(voters[1:]), "one of them may hold it"
    unheard = quorum(whole, voters[0], holders=others)
    assert not unheard.are_enough(others), "who is not heard may come back"


def test_in_a_grid_members_without_a_vote_count_too() -> None:
    """Rows are drawn, so no peer chooses which peers it can lie to."""
    whole = roster(40, num_voters=4)
    grid = fold_roster(whole, 4)
    me = peers(40)[9]
    assert quorum(whole, me, group_size=4).witnesses == grid.neighbours(me)


def test_a_peer_that_cannot_be_dialled_relies_on_those_it_can_dial() -> None:
    found = quorum(roster(4, num_reducing=1), peers(4)[3], can_be_dialled=False)
    assert found.witnesses == {peers(4)[0]}
    assert found.are_enough([peers(4)[0]])


def test_a_peer_that_declared_its_leaving_is_not_waited_for() -> None:
    first, second, third = peers(3)
    assert quorum(roster(3), JOINER, gone=(first, second)).are_enough([third])


def test_a_non_member_relies_on_the_peers_it_hears_once_it_has_listened() -> None:
    heard = peers(16)[:3]
    early = quorum(roster(16), JOINER, holders=heard, has_listened=False)
    assert not early.are_enough(heard)
    late = quorum(roster(16), JOINER, holders=heard)
    assert late.are_enough(heard[:2])
    assert not late.are_enough(heard[:1])
    assert not quorum(roster(16), JOINER, holders=[]).are_enough([])
    assert not quorum(roster(16), peers(16)[5], holders=heard).are_enough(heard), "a member needs more than half of all"


def test_a_member_that_has_lost_its_state_does_not_wait_for_others_that_have_lost_theirs() -> None:
    """Most members of a run were wiped: each waited for a majority that included the others that were wiped."""
    members = peers(6)
    waiting = quorum(roster(6), members[0], holders=members[4:], empty=members[1:4])
    assert waiting.are_enough(members[4:])
    assert not waiting.are_enough(members[5:])
    assert not quorum(roster(6), members[0], holders=members[4:], empty=members[1:4], has_listened=False).are_enough(
        members[4:]
    )
    ready = quorum(roster(6), members[0], holders=members[4:], empty=members[1:4], is_ready=True)
    assert not ready.are_enough(members[4:]), "it has something to lose"


def test_in_a_grid_of_two_hundred_a_peer_relies_on_its_row_and_column() -> None:
    whole = roster(200)
    drawn = child_of(founding().roster, grid_order(whole.members, whole.run, 0))
    grid = fold_roster(drawn, 16)
    for me in peers(200)[::40]:
        found = quorum(drawn, me)
        assert found.witnesses == grid.neighbours(me)
        assert len(found.witnesses) < 40
        assert len(found.witnesses) // 2 < found.needed <= len(found.witnesses)


def test_a_newcomer_to_a_grid_relies_on_members_of_any_row() -> None:
    """It has no place in the grid yet: the row that it will be assigned to may be out of its reach."""
    whole = roster(200, num_voters=20)
    row = fold_roster(whole, 16).neighbours(JOINER)
    voters = [peer for peer in peers(200)[:20] if peer not in row]
    others = [peer for peer in peers(200)[20:] if peer not in row]
    early = quorum(whole, JOINER, holders=others[:3], has_listened=False)
    assert early.witnesses == row, "who hears most of that row need not wait"
    assert not early.are_enough(others[:3])
    found = quorum(whole, JOINER, holders=others[:3])
    assert found.are_enough(others[1:3])
    assert not found.are_enough(others[:1]), "one word is not enough"
    one_votes = quorum(whole, JOINER, holders=[*voters[:1], *others[:2]])
    assert not one_votes.are_enough(voters[:1])
    assert one_votes.are_enough(others[:2])
    two_vote = quorum(whole, JOINER, holders=[*voters[:2], *others])
    assert two_vote.are_enough(voters[:2]), "a crowd of fresh identities names no state"
    assert not two_vote.are_enough(others)


def test_a_wait_is_reported_with_the_peers_heard_and_the_number_needed() -> None:
    text = quorum(roster(4), JOINER, holders=peers(4)[:1], has_listened=False).sentence()
    assert "of the 4 members whose answers count; 3 must name the same state" in text
    assert "in contact with 12D3.." in text
    assert "in contact with none of" in quorum(roster(4), JOINER, holders=[]).sentence()


def test_each_voice_is_asked_periodically_and_only_its_latest_answer_counts() -> None:
    page = ContentReports(answer_seconds=4.0, pause_seconds=2.0)
    first, second = peers(2)
    reply = ContentReply(fragment=0, digests=((sha256(b"chain"), sha256(b"content")),))
    assert not page.take(first, reply), "nobody asked"
    assert page.may_ask(0, first, 0.0)
    assert not page.may_ask(0, first, 3.0), "it may need time"
    assert page.may_ask(0, second, 3.0)
    assert page.take(first, reply)
    assert not page.take(first, reply)
    assert page.latest(SpanId(0, 0)) == {first: reply.digests[0]}
    assert page.latest(SpanId(0, 1)) == {}, "of a span that it did not mention"
    assert page.latest(SpanId(0, 0), since=1.0) == {}, "it was asked before"
    assert page.may_ask(0, first, 3.0)
    other = ContentReply(fragment=0, digests=((sha256(b"later"), sha256(b"content")),))
    assert page.take(first, other)
    assert page.latest(SpanId(0, 0), since=1.0) == {first: other.digests[0]}
    page.clear()
    assert page.latest(SpanId(0, 0)) == {}


def test_a_majority_of_the_other_members_decides_about_a_damaged_span() -> None:
    first, second = peers(2)
    of_two = quorum(roster(2), first, is_ready=True)
    assert of_two.are_most([second])
    assert not of_two.are_enough([second])
    of_four = quorum(roster(4), first, is_ready=True)
    assert not of_four.are_most(peers(4)[1:2])
    assert of_four.are_most(peers(4)[1:3])
