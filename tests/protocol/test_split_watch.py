"""A split is reported once by each side, and once when it has healed."""

from __future__ import annotations

from fake_run import CYCLE_SECONDS, MINUTE, peer_id, run_rules, verify
from founded_swarms import founded, recovers
from made import book_with, certify, child_of, founding, heartbeat, ids, member, membership_of, roster_1, self_of

from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.split_watch import SplitWatch
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import CertifiedRoster

A, B, C = ids(3)
SILENCE = run_rules().silence_seconds


def watch_of(membership: Membership) -> SplitWatch:
    return SplitWatch(rules=run_rules(), membership=membership)


def said(watch: SplitWatch, now: float) -> list[str]:
    actions = watch.tick(now)
    assert all(isinstance(action, Report) and action.topic == "split" for action in actions)
    return [action.text for action in actions if isinstance(action, Report)]


def test_losing_and_regaining_a_majority_is_reported_once_each() -> None:
    membership = membership_of(A, founding(), roster_1(3))
    watch = watch_of(membership)
    assert said(watch, 0.0) == [], "nobody has been heard yet: it has just started"
    membership.take_heartbeat(heartbeat(B), 1.0)
    assert said(watch, 1.0) == []
    assert said(watch, 2.0 + SILENCE) == []
    (text,) = said(watch, 2.0 + 2 * SILENCE)
    assert text.startswith("in contact with 1 of 3 voters; entries need more")
    assert said(watch, 3.0 + 2 * SILENCE) == []
    membership.take_heartbeat(heartbeat(B, sequence=2), 90.0)
    assert said(watch, 90.0) == ["in contact with 2 of 3 voters again"]
    assert said(watch, 91.0) == []


def test_a_non_member_misses_no_peer() -> None:
    stranger = watch_of(membership_of(peer_id("stranger"), founding(), roster_1(3)))
    newcomer = watch_of(membership_of(A))
    for now in (0.0, MINUTE, 2 * MINUTE):
        assert said(stranger, now) == said(newcomer, now) == []


def reports_of(membership: Membership) -> list[str]:
    """Return what is reported in a while without any further messages."""
    watch = watch_of(membership)
    return [text for step in range(6) for text in said(watch, 0.5 * SILENCE * step)]


def of_members(*members: Member) -> CertifiedRoster:
    return certify(child_of(founding().roster, members), [peer_id("boot")])


def test_members_without_a_vote_are_not_missed_and_replace_no_voter() -> None:
    crowd = [member(peer, counts=False) for peer in ids(8)[3:]]
    roster = of_members(*(member(peer) for peer in (A, B, C)), *crowd)
    one_voter = membership_of(A, founding(), roster)
    alone = membership_of(A, founding(), roster)
    one_of_the_crowd = membership_of(crowd[0].peer, founding(), roster)
    for now in range(40):
        for here in (one_voter, one_of_the_crowd):
            here.take_heartbeat(heartbeat(B, sequence=now + 1), float(now))
        one_of_the_crowd.take_heartbeat(heartbeat(C, sequence=now + 1), float(now))
        for each in crowd:
            alone.take_heartbeat(heartbeat(each.peer, sequence=now + 1), float(now))
    assert reports_of(one_voter) == []
    assert reports_of(one_of_the_crowd) == [], "it has no vote itself"
    (text,) = reports_of(alone)
    assert text.startswith("in contact with 1 of 3 voters")


def test_a_peer_that_only_dials_out_misses_no_peer_that_it_cannot_hear() -> None:
    roster = of_members(member(A), member(B, reduces=False), member(C, reduces=False))
    me = self_of(B, dialable=False)
    membership = Membership(
        me=me, rules=run_rules(), book=book_with(founding(), roster), ballots=NO_BALLOTS, verify=verify, remembers=True
    )
    for now in range(40):
        membership.take_heartbeat(heartbeat(A, sequence=now + 1), float(now))
    assert reports_of(membership) == []


def test_in_a_grid_a_peer_needs_a_majority_of_its_row_and_column() -> None:
    peers = [peer_id(f"peer {number}") for number in range(16)]
    roster = of_members(*(member(peer) for peer in peers))
    me = peers[0]
    lonely = membership_of(me, founding(), roster, group_size=4)
    (text,) = reports_of(lonely)
    assert text.startswith("in contact with 1 of 7 voters")
    grid = lonely.book.grid()
    assert grid is not None
    for now in range(40):
        for peer in sorted(grid.neighbours(me))[:3]:
            lonely.take_heartbeat(heartbeat(peer, sequence=now + 1), float(now))
    assert reports_of(lonely) == []


def test_both_sides_of_a_long_split_report_it_and_the_winning_side() -> None:
    swarm = founded(4)
    swarm.run_until(lambda: len(swarm.machines["p0"].roster.voters) == 4, 10 * MINUTE)
    swarm.partition(["boot", "p0", "p1", "p2"], ["p3"])
    swarm.run(12 * CYCLE_SECONDS)
    assert swarm.machines["p3"].roster.degraded
    assert not swarm.machines["p0"].roster.degraded
    swarm.heal()
    recovers(swarm, 5 * MINUTE)
    texts = {
        name: [report.text for _, report in machine.reports if report.topic in ("split", "branch")]
        for name, machine in swarm.machines.items()
    }
    assert any("in contact with 1 of 4 voters; entries need" in text for text in texts["p3"])
    assert any("of another branch wins over roster" in text for text in texts["p3"])
    assert texts["p0"] == [], "it has always heard three of four"
