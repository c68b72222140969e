"""A split is said once by each side, and once when it is healed; who meets another branch says which wins."""

from __future__ import annotations

import pytest
from fake_run import CYCLE_SECONDS, MINUTE, peer_id, run_rules
from founded_swarms import founded, recovers
from made import founding, heartbeat, ids, membership_of, roster_1

from p2p_diloco.ids import sha256
from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.split_watch import SplitWatch

A, B, C = ids(3)
ROSTER = roster_1(3).roster
SILENCE = run_rules().silence_seconds


def watch_of(membership: Membership) -> SplitWatch:
    return SplitWatch(rules=run_rules(), membership=membership)


def said(watch: SplitWatch, now: float) -> list[str]:
    actions = watch.tick(now)
    assert all(isinstance(action, Report) and action.topic == "split" for action in actions)
    return [action.text for action in actions if isinstance(action, Report)]


def test_who_hears_no_majority_says_so_once_and_once_when_it_does_again() -> None:
    membership = membership_of(A, founding(), roster_1(3))
    watch = watch_of(membership)
    assert said(watch, 0.0) == [], "nobody has been heard yet: it has just started"
    membership.hear(heartbeat(B), 1.0)
    assert said(watch, 1.0) == []
    assert said(watch, 2.0 + SILENCE) == []
    (text,) = said(watch, 2.0 + 2 * SILENCE)
    assert text.startswith("hears 1 of 3 members; no entry comes about")
    assert said(watch, 3.0 + 2 * SILENCE) == []
    membership.hear(heartbeat(B, sequence=2), 90.0)
    assert said(watch, 90.0) == ["hears 2 of 3 members again"]
    assert said(watch, 91.0) == []


def test_who_is_no_member_misses_nobody() -> None:
    stranger = watch_of(membership_of(peer_id("stranger"), founding(), roster_1(3)))
    newcomer = watch_of(membership_of(A))
    for now in (0.0, MINUTE, 2 * MINUTE):
        assert said(stranger, now) == said(newcomer, now) == []


def test_who_meets_a_junior_branch_says_that_ours_wins_once_until_it_is_gone() -> None:
    membership = membership_of(A, founding(), roster_1(3, included_total=9))
    watch = watch_of(membership)
    membership.hear(heartbeat(C, roster=ROSTER.digest()), 0.0)
    membership.hear(heartbeat(B, roster=membership.book.in_force_digest), 0.0)
    (text,) = said(watch, 0.0)
    assert "on another branch of rosters; ours, of epoch 0, wins" in text
    assert said(watch, 1.0) == []
    membership.hear(heartbeat(C, roster=membership.book.in_force_digest, sequence=2), 2.0)
    assert said(watch, 2.0) == []
    membership.hear(heartbeat(C, roster=sha256(b"newer"), roster_k=9, included_total=99, sequence=3), 3.0)
    assert said(watch, 3.0) == [], "that one may be ahead of us"


@pytest.mark.no_cover
def test_both_sides_of_a_long_split_say_what_they_noticed_and_which_side_wins() -> None:
    swarm = founded(4)
    swarm.partition(["boot", "p0", "p1", "p2"], ["p3"])
    swarm.run(10 * 8 * CYCLE_SECONDS)
    assert swarm.machines["p3"].roster.epoch > 0
    swarm.heal()
    recovers(swarm, 5 * MINUTE)
    texts = {
        name: [report.text for _, report in machine.reports if report.topic in ("split", "branch")]
        for name, machine in swarm.machines.items()
    }
    assert any("hears 1 of 4 members; no entry" in text for text in texts["p3"])
    assert any("of another branch, epoch 0, wins over epoch" in text for text in texts["p3"])
    assert any("ours, of epoch 0, wins" in text for text in texts["p0"]), texts
    assert not any("members; no entry" in text for text in texts["p0"])
