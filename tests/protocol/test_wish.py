"""The roster that a lead would like next."""

from __future__ import annotations

from dataclasses import replace

from fake_run import RUN, peer_id, run_rules
from made import child_of, founding, goodbye, ids, member, roster_of

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.ballot import Candidacy
from p2p_diloco.protocol.grid import REGRID_ROSTERS, grid_order
from p2p_diloco.protocol.roster import Roster, most_included
from p2p_diloco.protocol.wish import View, wish_roster

PARENT = roster_of(3)
A, B, C, D, E = ids(5)


def view(*present: PeerId) -> View:
    return View(
        lead=A,
        present={peer: member(peer) for peer in present},
        took_part={},
        newcomers=(),
        goodbyes=(),
        clock=run_rules().clock,
        round=9,
        in_force_since=1,
        included_total=0,
        heard_since={},
        now=100.0,
    )


def wish(seen: View, level: int = 0) -> Roster:
    roster = wish_roster(Candidacy(parent=PARENT, level=level, ballot=40), seen)
    assert roster is not None
    return roster


def test_the_living_stay_and_ready_listeners_come() -> None:
    assert wish(view(A, B, D)).peers() == {A, B, D}


def test_members_are_listed_with_the_shares_that_they_say_now() -> None:
    seen = view(A, B, C)
    thinner = replace(seen, present={**seen.present, B: replace(member(B), share=3)})
    assert {m.peer: m.share for m in wish(thinner).members} == {A: 8, B: 3, C: 8}


def test_nobody_is_no_roster() -> None:
    assert wish_roster(Candidacy(parent=PARENT, level=0, ballot=40), view()) is None


def test_who_stays_keeps_its_place_until_the_grid_is_drawn_anew() -> None:
    order = [m.peer for m in PARENT.members]
    assert [m.peer for m in wish(view(A, B, C, D)).members][:3] == order
    gone = order[0]
    assert [m.peer for m in wish(view(D, *order[1:])).members] == [D, *order[1:]]
    last = replace(PARENT, k=REGRID_ROSTERS - 1)
    drawn = wish_roster(Candidacy(parent=last, level=0, ballot=40), view(A, B, C, D))
    assert drawn is not None
    assert drawn.regrid == 1
    assert [m.peer for m in drawn.members] == [m.peer for m in grid_order(drawn.members, RUN, 1)]
    assert gone in drawn.peers()


def test_who_was_in_no_entry_of_a_cycle_goes_but_never_the_lead() -> None:
    seen = replace(view(A, B, C), took_part={B: 9, C: 6})
    assert wish(seen).peers() == {A, B}
    assert wish(replace(seen, in_force_since=8)).peers() == {A, B, C}
    assert wish(replace(seen, took_part={C: 6})).peers() == {A, B, C}


def test_a_newcomer_stays_although_it_could_not_take_part_yet() -> None:
    seen = replace(view(A, B, C), took_part={B: 9}, newcomers={C})
    assert wish(seen).peers() == {A, B, C}


def test_good_byes_of_members_are_quoted_in_the_ordinary_way() -> None:
    words = (goodbye(C, parent=PARENT), goodbye(B, parent=PARENT, voted=True), goodbye(E), goodbye(A, incarnation=9))
    seen = replace(view(A), goodbyes=words)
    assert wish(seen).goodbyes == (words[0],)
    degraded = wish(seen, level=1)
    assert (degraded.goodbyes, degraded.level, degraded.epoch) == ((), 1, PARENT.epoch + 1)


def test_sums_and_cycles_never_fall() -> None:
    roster = wish(replace(view(A), included_total=7))
    assert (roster.included_total, roster.cycle, roster.k) == (7, 4, PARENT.k + 1)


def test_a_lead_that_has_seen_more_than_can_have_been_made_since_the_parent_says_what_can() -> None:
    candidacy = Candidacy(parent=PARENT, level=0, ballot=40, rules=run_rules())
    seen = replace(view(A, B, C), included_total=10**6)
    roster = wish_roster(candidacy, seen)
    assert roster is not None
    assert roster.included_total == most_included(PARENT, roster.cycle, run_rules()) < 10**6


def test_who_has_lost_reduces_is_listed_as_one_that_cannot_be_dialled() -> None:
    seen = replace(view(A, B, C), lost={(B, 1)})
    assert {m.peer: m.can_be_dialled for m in wish(seen).members} == {A: True, B: False, C: True}
    restarted = replace(seen, present={**seen.present, B: member(B, incarnation=2)})
    assert all(m.can_be_dialled for m in wish(restarted).members)


def test_when_all_have_lost_it_the_bootstrap_reduces_and_without_one_all_do_by_their_word() -> None:
    lost = {(peer, 1) for peer in (A, B, C)}
    seen = replace(view(A, B, C), lost=lost)
    assert wish(seen).hub() == PARENT.helper
    assert all(m.can_be_dialled for m in wish(replace(seen, is_helper_here=False)).members)


def test_while_nobody_has_a_proof_and_no_bootstrap_is_there_all_reduce() -> None:
    at_home = {peer: member(peer, dialable=False) for peer in (A, B)}
    seen = replace(view(A, B), present=at_home)
    assert not any(m.can_be_dialled for m in wish(seen).members)
    assert all(m.can_be_dialled for m in wish(replace(seen, is_helper_here=False)).members)
    alone = replace(seen, present={A: at_home[A]}, is_helper_here=False)
    assert not any(m.can_be_dialled for m in wish(alone).members), "who is alone reduces anyway"


def test_at_most_two_or_a_fifth_come_at_once_those_first_that_have_been_heard_longest() -> None:
    crowd = [PeerId(sha256(b"stranger %d" % number)) for number in range(20)]
    since = {crowd[7]: 1.0, crowd[3]: 2.0, **dict.fromkeys(crowd[10:], 3.0)}
    few = replace(view(A, B, C, *crowd), heard_since=since)
    assert wish(few).peers() == {A, B, C, crowd[7], crowd[3]}
    grown = child_of(PARENT, [member(peer) for peer in (*ids(3), *crowd)])
    more = [PeerId(sha256(b"another %d" % number)) for number in range(20)]
    roster = wish_roster(Candidacy(parent=grown, level=0, ballot=40), view(A, B, C, *crowd, *more))
    assert roster is not None
    assert len(roster.peers() - grown.peers()) == 4


def test_whoever_is_ready_when_the_run_begins_is_on_its_first_roster() -> None:
    crowd = [PeerId(sha256(b"early %d" % number)) for number in range(20)]
    begins = replace(view(*crowd), lead=peer_id("boot"))
    roster = wish_roster(Candidacy(parent=founding().roster, level=0, ballot=40), begins)
    assert roster is not None
    assert roster.peers() == set(crowd)
