"""The clocks that count here; a split is reported once by each side, and once when it has healed."""

from __future__ import annotations

import pytest
from council import BOOT, NEW, A, B, C, D, E
from fake_run import CYCLE_SECONDS, MINUTE, peer_id, run_rules, verify
from founded_swarms import founded, recovers
from made import (
    book_with,
    certify,
    change,
    child_of,
    founding,
    heartbeat,
    ids,
    member,
    membership_of,
    roster_1,
    self_of,
)

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import CertifiedRoster


def test_clocks_of_members_that_this_peer_can_have_a_link_to_count() -> None:
    roster = certify(
        child_of(founding().roster, [member(A), member(B), member(D, counts=False), member(C, reduces=False)]), [BOOT]
    )
    assert roster.roster.voters == {A, B, C}
    here = membership_of(A, founding(), roster)
    assert here.liveness.clocks(0.0) == {B, C, D}
    change(here, can_be_dialled=False)
    assert here.liveness.clocks(0.0) == {B, D}, "two that only dial out have no link"
    hidden = certify(child_of(founding().roster, [member(peer, reduces=False) for peer in (A, B)]), [BOOT])
    alone = membership_of(A, founding(), hidden)
    change(alone, can_be_dialled=False)
    assert alone.liveness.clocks(0.0) == {BOOT}, "who hears no member agrees with them by the founder"
    assert membership_of(A).liveness.clocks(0.0) == frozenset()


def hidden_member(peer: PeerId, *members: PeerId) -> Membership:
    """Return a peer that cannot be dialled, under a roster without reducers."""
    roster = certify(child_of(founding().roster, [member(one, reduces=False) for one in members]), [BOOT])
    here = membership_of(peer, founding(), roster)
    change(here, can_be_dialled=False)
    return here


@pytest.mark.parametrize(
    ("here", "nobody"),
    [(hidden_member(A, A, B), {BOOT}), (hidden_member(BOOT, BOOT, B), set()), (hidden_member(NEW, B), {BOOT})],
    ids=["a member", "the founder", "a joiner"],
)
def test_clocks_of_heard_members_count_if_none_can_be_dialled(here: Membership, nobody: set[PeerId]) -> None:
    assert here.liveness.clocks(0.0) == nobody
    here.liveness.take(heartbeat(E), 0.0)
    assert here.liveness.clocks(0.0) == nobody, "a stranger has no say"
    here.liveness.take(heartbeat(B), 0.0)
    assert here.liveness.clocks(0.0) == {B}, "the founder may be gone"
    assert here.liveness.clocks(here.rules.silence_seconds + 0.1) == nobody


def test_the_founders_clock_counts_until_over_half_of_such_members_are_heard() -> None:
    here, joiner = hidden_member(A, A, B, C, D), hidden_member(NEW, A, B, C, D)
    expected = [
        (B, {BOOT}, {BOOT}),  # one of four may lie, and be the only one heard
        (C, {B, C}, {BOOT}),
        (D, {B, C, D}, {B, C, D}),
    ]
    for heard, of_the_member, of_the_joiner in expected:
        here.liveness.take(heartbeat(heard), 0.0)
        joiner.liveness.take(heartbeat(heard), 0.0)
        assert here.liveness.clocks(0.0) == of_the_member
        assert joiner.liveness.clocks(0.0) == of_the_joiner


def test_a_hub_is_the_only_peer_heard_and_can_hear_others() -> None:
    members = [member(A), *(member(peer, reduces=False) for peer in (B, C))]
    roster = certify(child_of(founding().roster, members), [BOOT])
    here = membership_of(B, founding(), roster)
    assert here.liveness.depends_on_hub(frozenset((A,)))
    assert here.liveness.depends_on_hub(frozenset((BOOT,))), "the founder"
    assert not here.liveness.depends_on_hub(frozenset((C,))), "it may hear this peer alone"
    assert not here.liveness.depends_on_hub(frozenset((A, C)))
    assert not membership_of(A, founding(), roster).liveness.depends_on_hub(frozenset((BOOT,))), "it is one itself"
    two = certify(child_of(founding().roster, members[:2]), [BOOT])
    assert not membership_of(B, founding(), two).liveness.depends_on_hub(frozenset((A,))), "nobody else is there"
    assert membership_of(B, founding(), two).liveness.depends_on_hub(frozenset((BOOT,))), "it hears the other one"
    assert not membership_of(B).liveness.depends_on_hub(frozenset((A,)))


def test_a_joiner_uses_the_clocks_of_members_that_it_hears() -> None:
    roster = certify(child_of(founding().roster, [*map(member, (A, B, C)), member(D, counts=False)]), [BOOT])
    here = membership_of(NEW, founding(), roster)
    assert here.liveness.clocks(0.0) == {A, B, C, D}
    here.liveness.take(heartbeat(D), 0.0)
    assert here.liveness.clocks(0.0) == {D}
    here.liveness.take(heartbeat(B), 0.0)
    assert here.liveness.clocks(0.0) == {B, D}


SILENCE = run_rules().silence_seconds


def reported(membership: Membership, now: float) -> list[str]:
    actions = membership.liveness.report_split(now)
    assert all(isinstance(action, Report) and action.topic == "split" for action in actions)
    return [action.text for action in actions if isinstance(action, Report)]


def test_losing_and_regaining_a_majority_is_reported_once_each() -> None:
    membership = membership_of(A, founding(), roster_1(3))
    assert reported(membership, 0.0) == [], "nobody has been heard yet: it has just started"
    membership.liveness.take(heartbeat(B), 1.0)
    assert reported(membership, 1.0) == []
    assert reported(membership, 2.0 + SILENCE) == []
    (text,) = reported(membership, 2.0 + 2 * SILENCE)
    assert text.startswith("in contact with 1 of 3 voters; entries need more")
    assert reported(membership, 3.0 + 2 * SILENCE) == []
    membership.liveness.take(heartbeat(B, sequence=2), 90.0)
    assert reported(membership, 90.0) == ["in contact with 2 of 3 voters again"]
    assert reported(membership, 91.0) == []


def test_a_non_member_misses_no_peer() -> None:
    stranger = membership_of(peer_id("stranger"), founding(), roster_1(3))
    newcomer = membership_of(A)
    for now in (0.0, MINUTE, 2 * MINUTE):
        assert reported(stranger, now) == reported(newcomer, now) == []


def reports_of(membership: Membership) -> list[str]:
    """Return what is reported in a while without any further messages."""
    return [text for step in range(6) for text in reported(membership, 0.5 * SILENCE * step)]


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
            here.liveness.take(heartbeat(B, sequence=now + 1), float(now))
        one_of_the_crowd.liveness.take(heartbeat(C, sequence=now + 1), float(now))
        for each in crowd:
            alone.liveness.take(heartbeat(each.peer, sequence=now + 1), float(now))
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
        membership.liveness.take(heartbeat(A, sequence=now + 1), float(now))
    assert reports_of(membership) == []


def test_in_a_grid_a_peer_needs_a_majority_of_its_row_and_column() -> None:
    peers = [peer_id(f"peer {number}") for number in range(16)]
    roster = of_members(*(member(peer) for peer in peers))
    me = peers[0]
    lonely = membership_of(me, founding(), roster, group_size=4)
    (text,) = reports_of(lonely)
    assert text.startswith("in contact with 1 of 7 voters")
    near = membership_of(me, founding(), roster, group_size=4)
    grid = near.book.grid()
    assert grid is not None
    for now in range(40):
        for peer in sorted(grid.neighbours(me))[:3]:
            near.liveness.take(heartbeat(peer, sequence=now + 1), float(now))
    assert reports_of(near) == []


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
