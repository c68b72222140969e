"""Which machines are proved reachable in a simulation: the shipped rules, with answers that come at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from p2p_diloco.ids import PeerId
from p2p_diloco.node.reach_keeper import company_of
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.reach import Answer, Reach
from p2p_diloco.protocol.membership.reach_proofs import is_recent, place_of, provers_for
from simulator.run import RUN, proof_of

if TYPE_CHECKING:
    from simulator.machine import Machine

LOOK_SECONDS = 1.0
PORT = 4001


class SimulatedReach:
    """Asks members whether they can dial one machine's peer; the network decides what they answer.

    Args:
        machine: the machine; if it is vouched for, all say yes.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._reach = Reach()
        self._proved_in: dict[PeerId, int] = {}
        self._looked_at = float("-inf")
        self._linked: frozenset[PeerId] = frozenset()

    def look(self, engine: PeerEngine, swarm_now: float) -> None:
        """Ask and judge, if a second has passed or links have changed; tell the engine what follows."""
        network, me = self._machine.around.network, engine.me.peer
        now, linked = network.true_time.time(), frozenset(engine.linked)
        roster, founder = engine.book.in_force, engine.book.founder if engine.book.in_force is not None else None
        if roster is None or founder is None or (linked == self._linked and now - self._looked_at < LOOK_SECONDS):
            return
        self._linked, self._looked_at = linked, now
        self._reach.see({peer: [network.host_seen(me, peer)] for peer in linked})
        provers = roster.peers().union((founder,)) - {me}
        clock = engine.rules.clock
        cycle = max(clock.cycle(clock.round_at(swarm_now)), 0)
        for prover, proved_in in list(self._proved_in.items()):
            if not is_recent(proved_in, cycle, engine.rules):
                del self._proved_in[prover]
                self._reach.renew(prover)
        preferred = provers_for(me, roster, founder)
        for prover in self._reach.due(provers & linked, now, preferred) if engine.me.can_be_dialled else ():
            can_dial = self._machine.is_vouched_for or network.can_dial(prover, me)
            reason = "" if can_dial else "timed out"
            self._reach.take(prover, Answer(host=network.host_seen(prover, me), port=PORT, reason=reason, at=now))
            if can_dial:
                self._proved_in[prover] = cycle
        standing = self._reach.standing(provers, company_of(engine, linked), now)
        proofs = standing.proofs
        yes = [prover for prover, answer in self._reach.recent(now) if answer in proofs and prover in self._proved_in]
        signed = tuple(
            proof_of(me, prover, self._proved_in[prover], place_of(RUN, network.host_seen(prover, me)))
            for prover in yes
        )
        can_be_dialled = standing.is_reachable and engine.me.can_be_dialled
        engine.set_conditions(replace(engine.conditions, can_be_dialled=can_be_dialled, proofs=signed))
