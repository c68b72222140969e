"""Faults with real processes over the real transport: nobody is delayed, and all end with the same bytes.

The rules themselves are tested in virtual time elsewhere. A short scene here, and a few long ones with `make faults`,
show that processes, signals, disks and sockets follow them; claims about the clock leave room for a busy machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import pytest

from p2p_diloco.ids import PeerId, format_peer_id
from p2p_diloco.protocol.membership.presence import LOST_CYCLES
from p2p_diloco.protocol.wire.roster import Roster, reducers
from tests.swarm.process_swarm import FRAGMENTS, LATE_SECONDS, ROUND_SECONDS, SPANS, ClosedRound, ProcessSwarm

CYCLE_SECONDS = FRAGMENTS * ROUND_SECONDS

pytestmark = [pytest.mark.wall_clock, pytest.mark.timeout(240)]

MOST_BUSY_SHARE = float(os.environ.get("P2P_DILOCO_MOST_BUSY_SHARE", "0.5"))
"""Share of the rounds of a fault that other programs on this machine may cost; `make faults` allows none."""


def check_nobody_was_held(swarm: ProcessSwarm, names: Iterable[str], begin: float, end: float) -> None:
    """Check that every peer closed all rounds between two moments, in order and on time."""
    for name in names:
        closed = list(swarm.rounds_between(name, begin, end))
        numbers = [each.round for each in closed]
        assert numbers, f"{name} closed no round\n{swarm.story()}"
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"{name} missed a round\n{swarm.story()}"
        late = [each for each in closed if each.time > swarm.begin(each.round + 1) + LATE_SECONDS]
        assert not late, f"{name} was held: {late}\n{swarm.story()}"


def check_only_own_spans_were_void(swarm: ProcessSwarm, name: str, begin: float, end: float, num_lost: int) -> None:
    """Check that at most `num_lost` spans per round were skipped, except for a share of rounds on a busy machine."""
    closed = list(swarm.rounds_between(name, begin, end))
    poor = [each for each in closed if each.num_entries < each.num_spans - num_lost]
    assert closed, f"no round is completely between\n{swarm.story()}"
    assert len(poor) <= MOST_BUSY_SHARE * len(closed), f"too many spans were skipped: {poor}\n{swarm.story()}"


def most_owned(num_members: int) -> int:
    """Return the largest number of spans of one fragment that a member owns."""
    return -(-SPANS // num_members)


def names_of(swarm: ProcessSwarm, peers: Iterable[PeerId]) -> set[str]:
    known = {peer.status.peer: name for name, peer in swarm.peers.items()}
    return {known.get(format_peer_id(peer), "unknown") for peer in peers}


def wait_until_any_may_be_lost(swarm: ProcessSwarm, names: Sequence[str], victim: str, *, averages: bool) -> int:
    """Wait until all of `names` vote and two average, including `victim` if it `averages`; return the roster's number.

    A peer that was away for two cycles averages for nobody for sixteen. Then nothing would be lost with it, and
    everything with another.
    """

    def is_so(roster: Roster) -> bool:
        averaging = names_of(swarm, reducers(roster))
        all_vote = names_of(swarm, roster.voters) == set(names)
        return all_vote and len(averaging) >= 2 and averages == (victim in averaging)

    def all_say_so() -> bool:
        newest = [roster for name in names for roster in swarm.rosters(name)[-1:]]
        return len(newest) == len(names) and len(set(newest)) == 1 and is_so(newest[0])

    swarm.wait(f"{names} to vote and two to average", all_say_so, patience_seconds=2 * LOST_CYCLES * CYCLE_SECONDS)
    return swarm.rosters(victim)[-1].k


def most_lost(swarm: ProcessSwarm, observer: str, victim: str, since: int) -> int:
    """Return the largest number of spans of a fragment that `victim` owned under the rosters since this number."""
    owned = (names_of(swarm, reducers(roster)) for roster in swarm.rosters(observer) if roster.k >= since)
    return max(most_owned(len(names)) if victim in names else 0 for names in owned)


def check_all_are_equal(swarm: ProcessSwarm, digests: dict[str, str], names: Sequence[str]) -> None:
    assert sorted(digests) == sorted(names), f"others ended: {digests}\n{swarm.story()}"
    assert "" not in digests.values(), f"somebody ended with nothing: {digests}\n{swarm.story()}"
    assert len(set(digests.values())) == 1, f"they differ: {digests}\n{swarm.story()}"


def end_together(swarm: ProcessSwarm, names: Sequence[str]) -> None:
    swarm.wait(f"{names} ready", lambda: all(swarm.peers[name].status.ready for name in names))
    check_all_are_equal(swarm, swarm.end_all_after(swarm.round_at(time.time()) + 2), names)


def last(rounds: list[ClosedRound]) -> ClosedRound:
    return rounds[-1]


def test_a_killed_member_returns_from_its_disk_while_nobody_waits() -> None:
    with ProcessSwarm() as swarm:
        for name in ("ada", "ben", "cleo"):
            swarm.start(name, founds=name == "ada")
        three = ["ada", "ben", "cleo"]
        swarm.wait_for_whole_round(three, 3, since=0.0)

        swarm.sleep_to(0.5)
        killed = swarm.kill("cleo")
        swarm.wait_for_whole_round(["ada", "ben"], 2, since=killed)
        swarm.start("cleo")
        swarm.wait_for_whole_round(three, 3, since=killed)
        check_nobody_was_held(swarm, ["ada", "ben"], killed - ROUND_SECONDS, time.time())
        assert swarm.peers["cleo"].status.incarnation > 1
        end_together(swarm, three)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_four_peers_lose_their_bootstrap_peer_freeze_die_leave_and_return() -> None:
    with ProcessSwarm() as swarm:
        swarm.start("bootstrap", founds=True, trains=False)
        for name in ("ada", "ben", "cleo"):
            swarm.start(name)
        swarm.start("dora", dial_out_only=True)
        four = ["ada", "ben", "cleo", "dora"]
        swarm.wait_for_whole_round(four, 4, since=0.0)

        # The bootstrap peer dies: nothing changes.
        swarm.sleep_rounds(12 * FRAGMENTS)  # until all four vote and average, and nobody needs the bootstrap peer
        killed = swarm.kill("bootstrap")
        swarm.sleep_rounds(4)
        check_nobody_was_held(swarm, four, killed, time.time())
        check_only_own_spans_were_void(swarm, "ada", killed, time.time(), 0)
        swarm.wait_for_whole_round(four, 4, since=killed)

        # A member freezes: first as with a closed lid at the start of a round, then as a hung process in the middle of
        # one.
        for share, with_daemon in ((0.05, True), (0.45, False)):
            others = ["ada", "cleo", "dora"]
            swarm.sleep_to(share)
            frozen = swarm.freeze("ben", with_daemon=with_daemon)
            swarm.sleep_rounds(3.5)
            woken = swarm.wake("ben")
            check_nobody_was_held(swarm, others, frozen - ROUND_SECONDS, woken)
            check_only_own_spans_were_void(swarm, "ada", frozen, woken, most_owned(3))
            swarm.wait_for_whole_round(four, 4, since=woken)

        # A late peer joins with the address of a volunteer: the invite's bootstrap peer is dead.
        swarm.start("emil", via=["ada"])
        five = [*four, "emil"]
        swarm.wait_for_whole_round(five, 5, since=woken)

        # One is killed once ben averages again, after sixteen cycles, and emil averages too, after eight.
        swarm.sleep_rounds(17 * FRAGMENTS)
        survivors = ["ada", "ben", "dora", "emil"]
        killed = swarm.kill("cleo")
        swarm.wait_for_whole_round(survivors, 4, since=killed)
        check_nobody_was_held(swarm, survivors, killed, time.time())
        check_only_own_spans_were_void(swarm, "ada", killed, time.time(), most_owned(4))

        # One leaves with Ctrl-C and returns from its checkpoint.
        before = swarm.peers["ben"].status
        told = time.time()
        swarm.leave("ben")
        left = time.time()
        swarm.wait_for_whole_round(["ada", "dora", "emil"], 3, since=left)
        swarm.start("ben")
        swarm.wait_for_whole_round(survivors, 4, since=left)
        check_nobody_was_held(swarm, ["ada", "dora", "emil"], told, time.time())
        after = swarm.peers["ben"].status
        assert after.peer == before.peer
        assert after.incarnation > before.incarnation
        assert after.bytes_received.transfer < 8 * after.parameters, "fetched it all instead of taking its checkpoint"

        # The peer that only dials out contributed to the entries, and received them all.
        dora = swarm.peers["dora"].status
        assert dora.addresses == ()
        assert dora.bytes_sent.vectors > 0
        assert last(swarm.peers["dora"].rounds()).num_entries > 0

        end_together(swarm, survivors)


@pytest.mark.long
def test_a_bootstrap_peer_replaces_the_last_reachable_peer_among_homes_behind_routers() -> None:
    with ProcessSwarm() as swarm:
        swarm.start("bootstrap", founds=True, trains=False)
        swarm.start("ada")
        at_home = ["ben", "cleo", "dora"]
        for name in at_home:
            swarm.start(name, dial_out_only=True)
        swarm.wait_for_whole_round(at_home, 4, since=0.0)
        killed = swarm.kill("ada")
        swarm.wait_for_whole_round(at_home, 3, since=killed)
        swarm.start("ada")
        swarm.wait_for_whole_round([*at_home, "ada"], 4, since=killed)
        end_together(swarm, [*at_home, "ada"])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_peers_become_two_and_one_and_two_again() -> None:
    with ProcessSwarm() as swarm:
        swarm.start("ada", founds=True)
        for name in ("ben", "cleo"):
            swarm.start(name)
        three = ["ada", "ben", "cleo"]
        swarm.wait_for_whole_round(three, 3, since=0.0)

        # One of three freezes: two are more than half, and continue.
        swarm.sleep_rounds(12 * FRAGMENTS)  # until all three vote and average
        swarm.sleep_to(0.2)
        frozen = swarm.freeze("cleo")
        swarm.sleep_rounds(3.5)
        woken = swarm.wake("cleo")
        check_nobody_was_held(swarm, ["ada", "ben"], frozen - ROUND_SECONDS, woken)
        check_only_own_spans_were_void(swarm, "ada", frozen, woken, most_owned(3))
        swarm.wait_for_whole_round(three, 3, since=woken, lasting=True)

        # The founder is killed once cleo averages again, after sixteen cycles: the other two continue, without any peer
        # of
        # the invite.
        swarm.sleep_rounds(17 * FRAGMENTS)
        killed = swarm.kill("ada")
        swarm.wait_for_whole_round(["ben", "cleo"], 2, since=killed)
        check_nobody_was_held(swarm, ["ben", "cleo"], killed, time.time())
        check_only_own_spans_were_void(swarm, "ben", killed, time.time(), most_owned(3))

        # One of two freezes for a moment: spans are skipped, on time, and nobody forks.
        frozen = swarm.freeze("cleo")
        swarm.sleep_rounds(2)
        woken = swarm.wake("cleo")
        check_nobody_was_held(swarm, ["ben"], frozen - ROUND_SECONDS, woken)
        assert swarm.peers["ben"].status.degraded_rosters == 0
        swarm.wait_for_whole_round(["ben", "cleo"], 2, since=woken, lasting=True)

        # One of two is killed: after the cycles set in the manifest the other continues, degraded.
        killed = swarm.kill("cleo")
        swarm.wait_for_whole_round(["ben"], 1, since=killed)
        check_nobody_was_held(swarm, ["ben"], killed, time.time())
        assert swarm.peers["ben"].status.degraded_rosters >= 1
        assert any("degraded" in event.text for event in swarm.peers["ben"].events("roster", since=killed))

        # It returns without a checkpoint, and a third peer joins.
        swarm.start("cleo")
        swarm.start("dora", via=["ben"])
        swarm.wait_for_whole_round(["ben", "cleo", "dora"], 3, since=killed)
        assert swarm.peers["cleo"].status.incarnation > 1
        end_together(swarm, ["ben", "cleo", "dora"])


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_peer_killed_or_frozen_at_any_moment_costs_only_its_own_spans() -> None:
    with ProcessSwarm() as swarm:
        swarm.start("ada", founds=True)
        for name in ("ben", "cleo"):
            swarm.start(name)
        swarm.start("dora", dial_out_only=True)
        four = ["ada", "ben", "cleo", "dora"]

        for share in (0.05, 0.3, 0.55, 0.8):
            for victim in four:
                others = [name for name in four if name != victim]
                roster = wait_until_any_may_be_lost(swarm, four, victim, averages=victim != "dora")
                swarm.sleep_to(share)
                frozen = swarm.freeze(victim, with_daemon=share < 0.5)
                swarm.sleep_rounds(3.5)
                woken = swarm.wake(victim)
                for other in others:
                    num_lost = most_lost(swarm, other, victim, since=roster)
                    check_only_own_spans_were_void(swarm, other, frozen - ROUND_SECONDS, woken, num_lost)
                check_nobody_was_held(swarm, others, frozen - ROUND_SECONDS, woken)
                swarm.wait_for_whole_round(four, 4, since=woken, lasting=True)

        for share, victim in zip((0.1, 0.4, 0.6, 0.9), four, strict=True):
            others = [name for name in four if name != victim]
            roster = wait_until_any_may_be_lost(swarm, four, victim, averages=victim != "dora")
            swarm.sleep_to(share)
            killed = swarm.kill(victim)
            swarm.wait_for_whole_round(others, 3, since=killed, lasting=True)
            for other in others:
                num_lost = most_lost(swarm, other, victim, since=roster)
                check_only_own_spans_were_void(swarm, other, killed - ROUND_SECONDS, time.time(), num_lost)
            check_nobody_was_held(swarm, others, killed - ROUND_SECONDS, time.time())
            swarm.start(victim, dial_out_only=victim == "dora", via=others)
            swarm.wait_for_whole_round(four, 4, since=killed, lasting=True)

        end_together(swarm, four)
