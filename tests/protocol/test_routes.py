"""Whom a peer is linked with, and the ways of its words in a grid."""

from __future__ import annotations

from dataclasses import replace

from fake_run import RUN, peer_id, run_rules
from made import SPAN, certify, child_of, entry_on, founding, head_of, heartbeat, membership_of, roster_1, roster_of

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import KeepRoster, Report, Send
from p2p_diloco.protocol.ballot import Vote
from p2p_diloco.protocol.grid import REGRID_ROSTERS, fold_roster, grid_order
from p2p_diloco.protocol.messages import Ping, RosterReply, encode_message
from p2p_diloco.protocol.overlay import MOST_HOPS, Relay
from p2p_diloco.protocol.roster import CertifiedRoster
from p2p_diloco.protocol.roster_delta import certified_delta
from p2p_diloco.protocol.routes import Routes

CERTIFIED = certify(roster_of(8), [peer_id("boot")])
ROSTER = CERTIFIED.roster
GRID = fold_roster(ROSTER, 3)
FIRST, SECOND, THIRD = GRID.columns[0]
OTHER_1, OTHER_2, _ = GRID.columns[1]
TWO = (SECOND, OTHER_1)
VOTE = Vote(parent=RUN, roster=RUN, ballot=9, signature=bytes(64))


def routes_of(me: PeerId, *rosters: CertifiedRoster, linked: tuple[PeerId, ...] = ()) -> Routes:
    rules = replace(run_rules(), group_size=3)
    membership = membership_of(me, founding(), *(rosters or (CERTIFIED,)), group_size=3)
    membership.hear(heartbeat(peer_id("listener 1")), 0.0)
    membership.hear(heartbeat(peer_id("listener 2"), ready=False), 0.0)
    return Routes(rules=rules, membership=membership, linked=set(linked))


def test_in_a_run_of_one_row_everybody_is_wanted_and_nothing_is_relayed() -> None:
    routes = routes_of(FIRST, roster_1(3))
    assert routes.wanted_links(0) is None
    send = Send(to=SECOND, message=VOTE, deadline=1.0)
    assert routes.routed([send]) == [send]
    nobody = Routes(rules=run_rules(), membership=membership_of(FIRST), linked=set())
    assert nobody.wanted_links(None) is None
    assert nobody.pass_on(Relay(to=SECOND, source=FIRST, hops=1, frame=b""), 1.0) == []
    assert nobody.hand_on_rosters(None, SECOND, [], 0.0, 1.0) == []


def test_a_peer_wants_its_neighbours_and_before_a_new_grid_those_of_the_next() -> None:
    routes = routes_of(FIRST, linked=TWO)
    assert routes.wanted_links(None) == routes.wanted_links(5) == GRID.neighbours(FIRST)
    chain, parent = [CERTIFIED], ROSTER
    while parent.k < REGRID_ROSTERS - 2:
        parent = child_of(parent, parent.members)
        chain.append(certify(parent, [m.peer for m in parent.members]))
    drawn = replace(parent, members=grid_order(parent.members, RUN, 1))
    both = GRID.neighbours(FIRST) | fold_roster(drawn, 3).neighbours(FIRST)
    assert routes_of(FIRST, *chain, linked=TWO).wanted_links(None) == both


def test_who_is_cut_off_wants_a_link_to_anybody() -> None:
    assert routes_of(FIRST, linked=TWO[:1]).is_cut_off(), "one link may lead nowhere"
    membership = membership_of(FIRST, founding(), CERTIFIED, group_size=3)
    rules = replace(run_rules(), group_size=3, void_cycles=5)
    routes = Routes(rules=rules, membership=membership, linked=set(TWO))
    for void_cycles, is_cut_off in ((0, False), (2, False), (3, True), (9, True)):
        membership.void_cycles = void_cycles
        assert routes.is_cut_off() == is_cut_off
        assert (routes.wanted_links(None) is None) == is_cut_off


def test_each_row_meets_its_share_of_all_strangers() -> None:
    strangers = [peer_id(f"stranger {n}") for n in range(20)]
    met: list[PeerId] = []
    for row, members in enumerate(GRID.rows):
        share = {stranger for stranger in strangers if GRID.row_for(stranger) == row}
        assert share
        met += share
        for member in members:
            wanted = routes_of(member, linked=TWO).wanted_links(None, [*strangers, *ROSTER.peers()])
            assert wanted == GRID.neighbours(member) | share
    assert sorted(met) == sorted(strangers)


def test_who_is_no_member_leaves_strangers_to_those_who_are() -> None:
    listener = routes_of(peer_id("listener 1"), linked=TWO)
    strangers = [peer_id(f"stranger {n}") for n in range(20)]
    assert (
        listener.wanted_links(None, strangers) == listener.wanted_links(None) == GRID.neighbours(peer_id("listener 1"))
    )


def test_a_vote_for_a_lead_that_is_not_linked_goes_by_way_of_the_grid() -> None:
    routes = routes_of(FIRST, linked=(SECOND, OTHER_1))
    (direct, ping, relayed) = routes.routed(
        [
            Send(to=SECOND, message=VOTE, deadline=1.0),
            Send(to=OTHER_2, message=Ping(nonce=1), deadline=1.0),
            Send(to=OTHER_2, message=VOTE, deadline=1.0),
        ]
    )
    assert isinstance(direct, Send)
    assert direct.message == VOTE
    assert isinstance(ping, Send)
    assert ping.to == OTHER_2
    assert isinstance(relayed, Send)
    assert relayed.to == OTHER_1, "of the own row in the column of the lead"
    assert relayed.message == Relay(to=OTHER_2, source=FIRST, hops=1, frame=encode_message(VOTE))
    (lost,) = routes_of(FIRST).routed([Send(to=OTHER_2, message=VOTE, deadline=1.0)])
    assert isinstance(lost, Send)
    assert lost.to == OTHER_2, "nobody is linked: the transport drops it"


def test_relays_are_passed_on_a_few_times() -> None:
    relay = Relay(to=OTHER_2, source=FIRST, hops=1, frame=encode_message(VOTE))
    routes = routes_of(OTHER_1, linked=(OTHER_2,))
    assert routes.pass_on(relay, 1.0) == [Send(to=OTHER_2, message=replace(relay, hops=2), deadline=1.0)]
    assert routes.pass_on(replace(relay, hops=MOST_HOPS), 1.0) == []


def test_what_arrives_is_a_vote_or_a_promise_or_is_refused() -> None:
    routes = routes_of(SECOND)
    relay = Relay(to=SECOND, source=FIRST, hops=2, frame=encode_message(VOTE))
    assert routes.arrived(relay) == VOTE
    for frame in (b"nonsense", encode_message(Ping(nonce=1))):
        refused = routes.arrived(replace(relay, frame=frame))
        assert isinstance(refused, Report)
        assert refused.topic == "frame-refused"


def test_rosters_that_came_down_the_column_go_to_the_row_and_its_listeners() -> None:
    routes = routes_of(FIRST)
    learnt = KeepRoster(certified=CERTIFIED)
    sends = routes.hand_on_rosters(GRID, SECOND, [learnt], 0.0, 1.0)
    listeners = {peer_id("listener 1"), peer_id("listener 2")}
    assert {send.to for send in sends if isinstance(send, Send)} == {*GRID.rows[0], *listeners} - {FIRST}
    assert all(isinstance(s, Send) and s.message == RosterReply(rosters=(CERTIFIED,)) for s in sends)
    assert routes.hand_on_rosters(GRID, SECOND, [], 0.0, 1.0) == []
    assert routes.hand_on_rosters(GRID, OTHER_1, [learnt], 0.0, 1.0) == [], "from the own row: they have it"


def test_one_roster_is_handed_on_as_a_difference_and_several_whole() -> None:
    child = certify(child_of(ROSTER, ROSTER.members), ROSTER.peers())
    routes = routes_of(FIRST, CERTIFIED, child)
    sends = routes.hand_on_rosters(GRID, SECOND, [KeepRoster(certified=child)], 0.0, 1.0)
    words = {send.to: send.message for send in sends if isinstance(send, Send)}
    assert {to for to, word in words.items() if word == certified_delta(child, ROSTER)} == {*GRID.rows[0]} - {FIRST}
    assert {to for to, word in words.items() if word == RosterReply(rosters=(child,))} == words.keys() - ROSTER.peers()
    learnt = [KeepRoster(certified=CERTIFIED), KeepRoster(certified=child)]
    both = routes.hand_on_rosters(GRID, SECOND, learnt, 0.0, 1.0)
    assert all(isinstance(s, Send) and s.message == RosterReply(rosters=(CERTIFIED, child)) for s in both)
    assert len(both) == len(sends)


def receivers(me: PeerId) -> set[PeerId]:
    owner = GRID.owner(SPAN)
    assert owner is not None
    entry = entry_on(head_of(), ROSTER, owner)
    return {send.to for send in routes_of(me).hand_down(entry, 0.1) if isinstance(send, Send)}


def test_an_entry_goes_down_the_column_and_along_the_rows() -> None:
    owner = GRID.owner(SPAN)
    assert owner is not None
    heard: list[PeerId] = []
    for reducer in GRID.column(SPAN):
        row = set(GRID.rows[GRID.row_of[reducer]])
        column = set(GRID.column(SPAN)) if reducer == owner else set()
        waiting = {p for p in (peer_id("listener 1"),) if GRID.row_for(p) == GRID.row_of[reducer]}
        assert receivers(reducer) == (row | column | waiting) - {reducer}
        heard += sorted(receivers(reducer) - column)
    outside = next(peer for peer in GRID.row_of if peer not in GRID.column(SPAN))
    assert receivers(outside) == set(), "who reduces another span has nothing to hand down"
    late = entry_on(head_of(), ROSTER, owner)
    assert routes_of(owner).hand_down(late, 9.0) == [], "of a round that is over: who lacks it asks"
