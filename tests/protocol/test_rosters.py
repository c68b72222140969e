"""Which certified rosters a peer takes, and what it reports about them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from council import BOOT, NEW, NOW, ROSTER, SEEN, STALL, VOTING, A, B, C, member_of_three, seeing, topics, without
from fake_run import CYCLE_SECONDS, ROUND_SECONDS, ballot_number
from made import certify, child_of, declaration, founding, heartbeat, ids, member, membership_of, roster_1, roster_of

from p2p_diloco.ids import short_peer_id
from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.membership import rosters
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster


def test_an_invalid_roster_is_reported_once_and_ends_the_list() -> None:
    here = membership_of(A, founding(), roster_1(3))
    child = child_of(ROSTER, ROSTER.members)
    (report,) = here.rosters.take((certify(child, []), certify(child, [A, B])), 0.0)
    assert isinstance(report, Report)
    assert report.topic == "roster-refused"
    assert here.rosters.take((certify(child, []),), 0.0) == []
    assert here.book.in_force == ROSTER


@pytest.mark.parametrize("known", [(), (founding(),)], ids=["a joiner", "a member that was away"])
def test_a_roster_that_arrives_before_its_parent_is_left_out_and_its_sender_not_blamed(
    known: tuple[CertifiedRoster, ...],
) -> None:
    here = membership_of(A, *known)
    newest = certify(child_of(ROSTER, ROSTER.members), [A, B])
    assert here.rosters.take((newest,), 0.0) == []
    assert newest.roster.digest() not in here.book
    here.rosters.take((founding(), roster_1(3), newest), 0.0)
    assert here.book.in_force == newest.roster


def test_a_bounded_number_of_refused_rosters_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rosters, "MOST_REFUSED", 2)
    here = membership_of(A, founding(), roster_1(3))
    unsigned = [certify(child_of(ROSTER, ROSTER.members, height=n), []) for n in range(3)]
    for number in (0, 1, 2):
        assert here.rosters.take((unsigned[number],), 0.0)
    assert not here.rosters.take((unsigned[2],), 0.0)
    assert here.rosters.take((unsigned[0],), 0.0)


def test_a_better_branch_is_announced() -> None:
    alone = certify(child_of(ROSTER, ROSTER.members[:1], degraded=True, cycle=3), [A], ballot_number(6, 0))
    here = membership_of(A, founding(), roster_1(3), alone)
    branch = certify(child_of(ROSTER, ROSTER.members[1:], cycle=2, height=9), [B, C], ballot_number(5, 0))
    actions = here.rosters.take((branch,), 4 * CYCLE_SECONDS)
    assert topics(actions) == ["roster", "branch"]
    assert here.book.in_force == branch.roster
    is_better, unknown = here.rosters.history.is_better, certify(child_of(child_of(ROSTER, ()), ()), [A])
    assert is_better(alone, 4) is None, "it is known"
    assert is_better(unknown, 4) is None, "nobody knows from where"


def roster_sentences(here: Membership, *rosters: CertifiedRoster, now: float = 0.0) -> list[str]:
    return [
        action.text
        for certified in rosters
        for action in here.rosters.take((certified,), now)
        if isinstance(action, Report) and action.topic == "roster"
    ]


def test_a_roster_is_reported_with_joined_and_departed_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rosters, "MOST_NAMED", 2)
    members = roster_of(4).members
    here = membership_of(A, founding())
    said = roster_sentences(here, roster_1(4), certify(child_of(roster_of(4), members[1:]), ids(4)))
    one, two = map(short_peer_id, sorted(ids(4))[:2])
    dropped = "this peer" if members[0].peer == A else short_peer_id(members[0].peer)
    assert said == [
        f"roster 1: 4 members (new: {one}, {two}, 2 more; gone: {short_peer_id(BOOT)})",
        f"roster 2: 3 members (gone: {dropped})",
    ]


def test_who_was_too_late_waits_before_its_application_is_shown_and_the_event_says_why() -> None:
    here = seeing()
    here.presence.note_entry({C}, (), 0)
    here.liveness.take(heartbeat(C), NOW)
    said = roster_sentences(here, without(C), now=NOW)
    absent = VOTING * ROUND_SECONDS
    assert said == [f"roster 2: 2 members (gone: {short_peer_id(C)}, in no entry for {absent:.0f} s)"]
    parent = without(C).roster
    assert here.declarations.take(declaration(C, cycle=2), 2)
    assert here.presence.view(parent, NOW + 19.0).declarations == ()
    assert [word.peer for word in here.presence.view(parent, NOW + 20.0).declarations] == [C]


@pytest.mark.parametrize("reason", ["left", "its link closed"])
def test_who_left_or_was_killed_does_not_wait(reason: str) -> None:
    here = seeing()
    here.liveness.take(heartbeat(C), SEEN - CYCLE_SECONDS - 1.0)
    if reason == "left":
        here.declarations.take(declaration(C, cycle=2, leaving=True), 2)
    assert roster_sentences(here, without(C), now=SEEN) == [f"roster 2: 2 members (gone: {short_peer_id(C)}, {reason})"]
    assert here.declarations.returns.wait_seconds(C, 1, SEEN) == 0.0


def test_the_first_roster_that_a_peer_sees_names_its_members() -> None:
    here = membership_of(A)
    assert roster_sentences(here, founding()) == [f"roster 0: 1 member ({short_peer_id(BOOT)})"]


def test_a_roster_of_the_same_members_is_not_reported() -> None:
    here = membership_of(A, founding(), roster_1(3))
    same = child_of(ROSTER, [replace(member, incarnation=9) for member in ROSTER.members])
    assert roster_sentences(here, certify(same, ids(3))) == []
    assert here.book.in_force == same


def test_a_degraded_roster_is_named_as_such() -> None:
    here = member_of_three(A)
    here.stall.cycles_without_entries = 3
    child = certify(child_of(ROSTER, ROSTER.members[:1], degraded=True, cycle=3), [B], ballot_number(6, 0))
    (_, report) = here.rosters.take((child,), STALL)
    assert isinstance(report, Report)
    assert "degraded, certified by fewer than a majority" in report.text


def test_data_about_strangers_is_dropped_when_they_go() -> None:
    here = member_of_three(A)
    here.liveness.take(heartbeat(NEW), 0.0)
    here.declarations.take(declaration(NEW), 0)
    here.presence.note_entry({NEW, B}, {NEW, B}, 4)
    here.rosters.take((certify(child_of(ROSTER, ROSTER.members), ids(3)),), 1000.0)
    assert NEW not in here.liveness.views
    assert NEW not in here.declarations.newest
    assert [here.presence.last_round(peer) for peer in (B, NEW)] == [4, -1]


def test_a_joiner_takes_a_roster_of_a_run_whose_clock_is_far_ahead_of_its_own() -> None:
    far = certify(child_of(ROSTER, ROSTER.members), ids(3), ballot_number(10**6, 0))
    for peer, incarnation, is_taken in ((NEW, 1, True), (A, 2, True), (A, 1, False)):
        here = membership_of(peer, founding(), roster_1(3), incarnation=incarnation)
        here.rosters.take((far,), NOW)
        assert (here.book.in_force == far.roster) is is_taken


def test_a_peer_whose_later_start_is_listed_takes_the_next_number_once() -> None:
    """Its clock was ahead at that start, and its disk was lost or restored since. All that it sent was refused."""

    def listing(parent: Roster, incarnation: int) -> CertifiedRoster:
        return certify(child_of(parent, [member(A, incarnation=incarnation), member(B), member(C)]), [B, C])

    here = membership_of(A, founding(), roster_1(3), incarnation=3)
    first = listing(ROSTER, 3)
    assert "identity" not in [action.topic for action in here.rosters.take((first,), NOW) if isinstance(action, Report)]
    assert here.local.me.incarnation == 3
    second = listing(first.roster, 9)
    (report,) = [
        action.text
        for action in here.rosters.take((second,), NOW)
        if isinstance(action, Report) and action.topic == "identity"
    ]
    assert report == (
        "roster 3 lists start 9 of this peer, but this is start 3: either its clock was ahead then (nothing to do), or "
        "another process uses a copy of its state directory (stop one of them, and give it its own state directory)"
    )
    here.local.set_ready(True)
    word = here.declarations.own_news(NOW)
    assert word is not None
    assert word.incarnation == here.local.me.incarnation == 10
    here.rosters.take((listing(second.roster, 12),), NOW)
    assert here.local.me.incarnation == 10, "a copy of its disk would do the same, and neither would stop"
