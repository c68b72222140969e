"""Identities that only send heartbeats: they are voted in a few at a time, and out again before they void a round."""

from __future__ import annotations

from fake_run import MINUTE, peer_id
from founded_swarms import founded, goes_on
from made import heartbeat

GHOSTS = [peer_id(f"ghost {number}") for number in range(8)]


def test_eight_identities_that_only_send_heartbeats_do_not_void_the_rounds_of_six() -> None:
    swarm = founded(6)
    most = 0
    begin, height = swarm.now, swarm.height("p0")
    for second in range(180):
        for machine in swarm.running():
            for ghost in GHOSTS:
                beat = heartbeat(ghost, sequence=second + 1, can_be_dialled=False)
                swarm.perform(machine, machine.rules_engine.receive(ghost, beat, swarm.now))
        swarm.run(1.0)
        most = max(most, sum(ghost in swarm.machines["p0"].roster.peers() for ghost in GHOSTS))
    assert 0 < most <= 5, "more would leave the six without a majority"
    assert swarm.machines["p0"].roster.epoch == 0
    spans_in_all = 2.5 * (swarm.now - begin) / 8.0
    assert swarm.height("p0") - height > 0.9 * spans_in_all
    swarm.run(MINUTE)
    assert not any(ghost in swarm.machines["p0"].roster.peers() for ghost in GHOSTS), "who is silent goes"
    goes_on(swarm)
