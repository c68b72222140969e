"""Identities that only send heartbeats, or apply but do no work: they never vote, and cause no skipped round."""

from __future__ import annotations

import pytest
from fake_run import MINUTE, peer_id
from founded_swarms import founded, goes_on
from made import declaration, heartbeat
from swarm_driver import Swarm

from p2p_diloco.ids import PeerId

pytestmark = pytest.mark.story

# Counting lines makes a swarm three times as slow, and these tests cover no further lines.
GHOSTS = [peer_id(f"ghost {number}") for number in range(8)]


def haunt(swarm: Swarm, seconds: int, *, apply: bool) -> set[PeerId]:
    """Let ghosts send heartbeats to all peers, and applications if they apply; return those that were ever listed."""
    listed: set[PeerId] = set()
    clock = swarm.rules.clock
    for second in range(seconds):
        for machine in swarm.running():
            cycle = clock.cycle(clock.round_at(swarm.now))
            for ghost in GHOSTS:
                engine, beat = machine.rules_engine, heartbeat(ghost, sequence=second + 1, can_be_dialled=False)
                swarm.perform(machine, engine.receive(ghost, beat, swarm.now))
                if apply:
                    word = declaration(ghost, cycle=cycle, reachable=False)
                    swarm.perform(machine, engine.receive(ghost, word, swarm.now))
        swarm.run(1.0)
        for machine in swarm.running():
            roster = machine.roster
            listed |= roster.peers() & set(GHOSTS)
            assert roster.voters.isdisjoint(GHOSTS), "nobody votes whose contributions were never in an entry"
            assert not roster.degraded
    return listed


def test_identities_that_only_send_heartbeats_are_never_listed() -> None:
    swarm = founded(6)
    assert haunt(swarm, 90, apply=False) == set()
    goes_on(swarm)


def test_eight_identities_that_apply_but_do_no_work_skip_no_round_of_six_members() -> None:
    swarm = founded(6)
    begin, height = swarm.now, swarm.height("p0")
    assert haunt(swarm, 180, apply=True), "whoever applies is listed"
    spans_in_all = 2.5 * (swarm.now - begin) / 8.0
    assert swarm.height("p0") - height > 0.9 * spans_in_all
    swarm.run(2 * MINUTE)
    assert not any(ghost in swarm.machines["p0"].roster.peers() for ghost in GHOSTS), "who is never there goes"
    goes_on(swarm)
