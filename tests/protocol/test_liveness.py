"""The peers that are alive, by their heartbeats."""

from __future__ import annotations

from dataclasses import replace

import pytest
from council import A, B, C, member_of_three
from fake_run import peer_id
from made import NO_SIGNATURE, certify, child_of, founding, heartbeat, member, membership_of

from p2p_diloco.ids import sha256
from p2p_diloco.protocol.membership import liveness as liveness_module


def test_no_peer_is_heard_in_the_future_after_a_clock_was_far_ahead() -> None:
    here = member_of_three(A)
    here.liveness.take(heartbeat(B), 500.0)
    here.set_back(20.0)
    assert (here.liveness.views[B].at, here.liveness.views[B].since) == (20.0, 20.0)
    assert here.liveness.alive(20.0 + 9.0) == {}
    here.liveness.take(heartbeat(C), 10.0)
    here.set_back(20.0)
    assert here.liveness.views[C].at == 10.0


def test_a_heartbeat_counts_if_it_is_new_signed_and_of_this_run() -> None:
    here = member_of_three(A)
    assert here.liveness.take(heartbeat(B), 0.0)
    assert not here.liveness.take(heartbeat(B), 0.0)
    assert here.liveness.take(heartbeat(B, incarnation=2), 0.0)
    assert not here.liveness.take(heartbeat(B, sequence=9), 0.0)
    assert not here.liveness.take(heartbeat(C, run=sha256(b"other")), 0.0)
    assert not here.liveness.take(replace(heartbeat(C), signature=NO_SIGNATURE), 0.0)
    assert set(here.liveness.alive(1.0)) == {B}
    assert here.liveness.alive(100.0) == {}


def test_a_smaller_incarnation_is_accepted_after_a_silence_unless_another_is_listed() -> None:
    wiped = heartbeat(B, incarnation=2)
    for listed, is_heard in ((None, True), (1, False), (2, True), (3, False)):
        others = () if listed is None else (member(B, incarnation=listed),)
        roster = child_of(founding().roster, (member(A), *others))
        here = membership_of(A, founding(), certify(roster, (peer_id("boot"),)))
        assert here.liveness.take(heartbeat(B, incarnation=3, sequence=9), 0.0)
        assert not here.liveness.take(wiped, 8.0), "the other start is not silent yet"
        assert here.liveness.take(wiped, 9.0) is is_heard
        assert (B in here.liveness.alive(9.0)) is is_heard
        assert not here.liveness.take(wiped, 18.0), "the same heartbeat is no news after a silence"


def test_a_smaller_incarnation_is_accepted_after_a_silence_if_no_roster_is_known() -> None:
    here = membership_of(A)
    assert [here.liveness.take(heartbeat(B, incarnation=number), now) for number, now in ((3, 0.0), (2, 9.0))] == [
        True,
        True,
    ]


def test_the_time_since_which_a_peer_is_heard_restarts_after_a_silence() -> None:
    here = member_of_three(A)
    for sequence, now, since in ((1, 0.0, 0.0), (2, 8.0, 0.0), (3, 16.0, 0.0), (4, 25.0, 25.0)):
        here.liveness.take(heartbeat(B, sequence=sequence), now)
        assert here.liveness.views[B].since == since


def test_heartbeats_use_bounded_memory_and_strangers_displace_no_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness_module, "MOST_KEPT", 2)
    here = member_of_three(A)
    assert [here.liveness.take(heartbeat(peer_id(str(n))), 0.0) for n in range(4)] == [True, True, False, False]
    assert here.liveness.take(heartbeat(B), 0.0)
    assert here.liveness.take(heartbeat(peer_id("0"), sequence=2), 0.0), "one that is known is heard on"


def test_a_peer_without_a_roster_treats_all_peers_as_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "MOST_KEPT", 1)
    here = membership_of(A)
    assert [here.liveness.take(heartbeat(peer), 0.0) for peer in (B, C)] == [True, False]
    assert here.presence.num_ready(0.0) == 1
