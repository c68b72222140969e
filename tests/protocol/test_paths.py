"""The links that a peer wants, and the paths of rosters and entries in a grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import RUN, peer_id, run_rules
from made import SPAN, certify, child_of, entry_on, founding, head_of, heartbeat, member, membership_of, roster_1

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import KeepRoster, Send
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.membership.proposal import REFRESH_CYCLES
from p2p_diloco.protocol.paths import Paths
from p2p_diloco.protocol.wire.messages import RosterReply, decode_message, encode_message
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, grid_order

BOOT = peer_id("boot")
NUM_MEMBERS = 24
MEMBERS = [member(peer_id(f"m{n}"), counts=n < 3, reduces=n < 16) for n in range(NUM_MEMBERS)]
"""Three of them vote; eight of the reducers lead."""
CERTIFIED = certify(child_of(founding().roster, MEMBERS), [BOOT])
ROSTER = CERTIFIED.roster
GRID = fold_roster(ROSTER, 3)
FIRST, SECOND, THIRD, *_ = GRID.columns[0]
OTHER_1, OTHER_2, *_ = GRID.columns[1]
STRANGERS = [peer_id(f"stranger {n}") for n in range(30)]
LISTENERS = tuple(peer_id(f"listener {n}") for n in range(10))


def paths_of(me: PeerId, *rosters: CertifiedRoster, cycles_without_entries: int = 0) -> Paths:
    rules = replace(run_rules(), group_size=3)
    membership = membership_of(me, founding(), *(rosters or (CERTIFIED,)), group_size=3)
    membership.stall.cycles_without_entries = cycles_without_entries
    for place, listener in enumerate(LISTENERS):
        membership.liveness.take(heartbeat(listener, ready=False, takes_entries=place % 2 == 0), 0.0)
    return Paths(rules=rules, membership=membership)


def to_vote_with(me: PeerId, roster: Roster = ROSTER) -> frozenset[PeerId]:
    """The peers that a peer needs links to for ballots."""
    may_lead = roster.leaders | {BOOT}
    wanted = frozenset[PeerId]()
    if me in roster.voters:
        wanted |= may_lead
    if me in may_lead:
        wanted |= roster.voters
    return wanted - {me}


def test_in_a_run_of_one_row_all_peers_are_wanted() -> None:
    assert paths_of(FIRST, roster_1(3)).wanted_links(0) is None
    nobody = Paths(rules=run_rules(), membership=membership_of(FIRST))
    assert nobody.wanted_links(None) is None
    assert nobody.hand_on_rosters(None, SECOND, [], 0.0, 1.0) == []


def test_a_peer_wants_its_neighbours_and_voters_and_leaders_want_each_other() -> None:
    assert len(GRID.rows) > 2
    kinds = set()
    for one in MEMBERS:
        me = one.peer
        paths = paths_of(me)
        assert paths.wanted_links(None) == paths.wanted_links(5) == GRID.neighbours(me) | to_vote_with(me)
        kinds.add((me in ROSTER.voters, me in ROSTER.leaders))
    assert kinds >= {(True, True), (False, True), (False, False)}
    for voter in ROSTER.voters:
        wanted = paths_of(voter).wanted_links(None)
        assert wanted is not None
        assert wanted >= (ROSTER.leaders | {BOOT}) - {voter}, "a founder that is no member may lead, too"
    plain = next(m.peer for m in MEMBERS if m.peer not in ROSTER.voters | ROSTER.leaders)
    assert paths_of(plain).wanted_links(None) == GRID.neighbours(plain)


def test_a_voter_that_does_not_reduce_needs_only_the_leaders() -> None:
    members = [replace(m, reduces=place not in (0, 1), counts=place < 4) for place, m in enumerate(MEMBERS[:16])]
    roster = child_of(founding().roster, sorted(members, key=lambda m: not m.reduces))
    me = MEMBERS[0].peer
    assert me in roster.voters - roster.leaders
    paths = paths_of(me, certify(roster, [BOOT]))
    assert paths.wanted_links(None) == fold_roster(roster, 3).neighbours(me) | roster.leaders | {BOOT}


def test_a_peer_wants_the_neighbours_of_a_grid_while_it_governs() -> None:
    fewer = certify(child_of(ROSTER, MEMBERS[8:]), ROSTER.voters, ballot=4 * 5 + 1)
    me = MEMBERS[12].peer
    paths = paths_of(me, CERTIFIED, fewer)
    now = fold_roster(fewer.roster, 3)
    voting = to_vote_with(me, fewer.roster)
    assert paths.wanted_links(6) == (now.neighbours(me) | voting) - {me}
    assert paths.wanted_links(5) == (now.neighbours(me) | GRID.neighbours(me) | voting) - {me}
    assert GRID.neighbours(me) - now.neighbours(me)


@pytest.mark.parametrize(("cycle", "is_ahead"), [(REFRESH_CYCLES - 3, False), (REFRESH_CYCLES - 2, True), (64, True)])
def test_before_a_new_grid_a_peer_wants_its_new_neighbours(cycle: int, is_ahead: bool) -> None:
    drawn = replace(ROSTER, members=grid_order(ROSTER.members, RUN, 1))
    after = fold_roster(drawn, 3).neighbours(FIRST) if is_ahead else frozenset()
    wanted = paths_of(FIRST).wanted_links(2 * cycle)
    assert wanted == (GRID.neighbours(FIRST) | after | to_vote_with(FIRST)) - {FIRST}


def test_without_a_clock_the_next_grid_follows_from_the_rosters_cycle() -> None:
    late = certify(child_of(ROSTER, MEMBERS, cycle=REFRESH_CYCLES - 1), ROSTER.voters, ballot=4 * 127 + 1)
    drawn = replace(ROSTER, members=grid_order(ROSTER.members, RUN, 1))
    both = GRID.neighbours(FIRST) | fold_roster(drawn, 3).neighbours(FIRST)
    paths = paths_of(FIRST, CERTIFIED, late)
    assert paths.wanted_links(None) == (both | to_vote_with(FIRST, late.roster)) - {FIRST}


def test_a_stuck_peer_wants_a_link_to_any_peer() -> None:
    for cycles_without_entries, is_stuck in ((0, False), (1, False), (2, True), (9, True)):
        paths = paths_of(FIRST, cycles_without_entries=cycles_without_entries)
        assert (paths.wanted_links(None) is None) == is_stuck, "half of the three cycles of a stall"


def test_each_row_meets_its_share_of_all_strangers() -> None:
    met: list[PeerId] = []
    for row, members in enumerate(GRID.rows):
        share = {stranger for stranger in STRANGERS if GRID.row_for(stranger) == row}
        assert share
        met += share
        for each in members:
            wanted = paths_of(each).wanted_links(None, [*STRANGERS, *ROSTER.peers()])
            assert wanted == GRID.neighbours(each) | share | to_vote_with(each)
    assert sorted(met) == sorted(STRANGERS)


def test_a_non_member_leaves_strangers_to_members() -> None:
    listener = paths_of(LISTENERS[0])
    assert listener.wanted_links(None, STRANGERS) == listener.wanted_links(None) == GRID.neighbours(LISTENERS[0])


def test_a_founder_that_is_not_a_member_needs_links_to_all_voters() -> None:
    assert paths_of(BOOT).wanted_links(None) == GRID.neighbours(BOOT) | ROSTER.voters


def test_rosters_from_the_column_go_to_the_row_and_its_observers() -> None:
    paths = paths_of(FIRST)
    learnt = KeepRoster(certified=CERTIFIED)
    sends = paths.hand_on_rosters(GRID, SECOND, [learnt], 0.0, 1.0)
    assert {send.to for send in sends if isinstance(send, Send)} == {*GRID.rows[0], *LISTENERS} - {FIRST}
    assert all(isinstance(s, Send) and s.message == RosterReply(rosters=(CERTIFIED,)) for s in sends)
    assert paths.hand_on_rosters(GRID, SECOND, [], 0.0, 1.0) == []
    assert paths.hand_on_rosters(GRID, OTHER_1, [learnt], 0.0, 1.0) == [], "from the own row: they have it"


def test_several_rosters_are_forwarded_together() -> None:
    child = certify(child_of(ROSTER, ROSTER.members), ROSTER.voters)
    learnt = [KeepRoster(certified=CERTIFIED), KeepRoster(certified=child)]
    both = paths_of(FIRST, CERTIFIED, child).hand_on_rosters(GRID, SECOND, learnt, 0.0, 1.0)
    assert both
    assert all(isinstance(s, Send) and s.message == RosterReply(rosters=(CERTIFIED, child)) for s in both)


def test_of_a_long_line_as_many_rosters_are_forwarded_as_one_message_holds() -> None:
    line = [CERTIFIED]
    for _ in range(80):
        line.append(certify(child_of(line[-1].roster, ROSTER.members), ROSTER.voters))
    learnt = [KeepRoster(certified=certified) for certified in line]
    (send, *_) = paths_of(FIRST, *line).hand_on_rosters(GRID, SECOND, learnt, 0.0, 1.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, RosterReply)
    assert send.message.rosters == tuple(line[: len(send.message.rosters)])
    assert len(send.message.rosters) > 10
    assert decode_message(encode_message(send.message)) == send.message


def test_in_one_row_rosters_are_not_forwarded() -> None:
    paths = paths_of(roster_1(3).roster.members[0].peer, roster_1(3))
    grid = fold_roster(roster_1(3).roster, 16)
    assert paths.hand_on_rosters(grid, grid.rows[0][1], [KeepRoster(certified=roster_1(3))], 0.0, 1.0) == []


def receivers(me: PeerId) -> set[PeerId]:
    owner = GRID.owner(SPAN)
    assert owner is not None
    entry = entry_on(head_of(), ROSTER, owner)
    return {send.to for send in paths_of(me).hand_down(entry, 0.1) if isinstance(send, Send)}


def test_an_entry_goes_down_the_column_and_along_the_rows() -> None:
    owner = GRID.owner(SPAN)
    assert owner is not None
    heard: list[PeerId] = []
    for reducer in GRID.column(SPAN):
        row = set(GRID.rows[GRID.row_of[reducer]])
        column = set(GRID.column(SPAN)) if reducer == owner else set()
        waiting = {listener for listener in LISTENERS[::2] if GRID.row_for(listener) == GRID.row_of[reducer]}
        assert receivers(reducer) == (row | column | waiting) - {reducer}, "of the listeners those that ask for them"
        heard += sorted(receivers(reducer) - column)
    assert set(heard) | {owner} >= ROSTER.peers() - set(GRID.column(SPAN))
    outside = next(peer for peer in GRID.row_of if peer not in GRID.column(SPAN))
    assert receivers(outside) == set(), "who reduces another span has nothing to hand down"
    late = entry_on(head_of(), ROSTER, owner)
    assert paths_of(owner).hand_down(late, 9.0) == [], "of a round that is over: who lacks it asks"
