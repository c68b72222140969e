"""The peers that fetch from this one, and what waits for them."""

from __future__ import annotations

from fake_run import run_rules
from made import certify, child_of, founding, heartbeat, ids, member, membership_of, roster_1

from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.repair.serving import QUIET_SILENCES, TIMES_RETAINED, Followers

A, B, C = ids(3)
QUIET = QUIET_SILENCES * run_rules().silence_seconds


def followers(*, members: int = 1) -> tuple[Followers, Membership]:
    membership = membership_of(A, founding(), roster_1(members))
    return Followers(rules=run_rules(), membership=membership), membership


def hear(membership: Membership, now: float, *, ready: bool = False, trains: bool = True) -> None:
    sequence = 1 + int(10 * now)
    beat = heartbeat(B, roster=roster_1(1).roster.digest(), ready=ready, trains=trains, sequence=sequence)
    membership.liveness.take(beat, now)


def test_an_unready_peer_with_recent_requests_is_fetching() -> None:
    page, membership = followers()
    hear(membership, 0.0)
    assert not page.are_fetching(0.0)
    page.requested(B, 0.0)
    page.requested(C, 0.0)
    assert page.are_fetching(0.0), "B does; of C nothing is heard"
    hear(membership, QUIET)
    assert not page.are_fetching(QUIET)
    page.requested(B, QUIET)
    assert page.are_fetching(QUIET)
    hear(membership, QUIET + 1.0, ready=True)
    assert not page.are_fetching(QUIET + 1.0)


def test_a_peer_that_does_not_train_is_not_waited_for() -> None:
    page, membership = followers()
    hear(membership, 0.0, trains=False)
    page.requested(B, 0.0)
    assert not page.are_fetching(0.0)


def test_a_lone_member_makes_no_entries_while_others_fetch_and_reports_it_once() -> None:
    page, membership = followers()
    assert page.wait_for(0.0) == (False, [])
    hear(membership, 0.0)
    page.requested(B, 0.0)
    waits, (report,) = page.wait_for(0.0)
    assert waits
    assert "entries wait for them" in str(report)
    assert page.wait_for(1.0) == (True, [])
    hear(membership, 2.0, ready=True)
    assert page.wait_for(2.0) == (False, [])


def test_a_lone_member_does_not_wait_forever() -> None:
    page, membership = followers()
    rules = run_rules()
    most = TIMES_RETAINED * rules.retained_cycles * rules.clock.num_fragments
    hear(membership, 0.0)
    page.requested(B, 0.0)
    assert sum(page.wait_for(0.0)[0] for _ in range(2 * most)) == most


def test_only_a_lone_member_waits_for_followers() -> None:
    page, membership = followers()
    hear(membership, 0.0)
    page.requested(B, 0.0)
    while page.wait_for(0.0)[0]:
        pass
    two = certify(child_of(roster_1(1).roster, [member(A), member(B)]), [A])
    membership.book.add(two)
    assert page.wait_for(0.0) == (False, [])
    membership.book.add(certify(child_of(two.roster, [member(A)]), [A, B]))
    assert page.wait_for(0.0)[0]
