"""Sentences for people: whether a peer can be dialled, and why its contributions are in no entry."""

from __future__ import annotations

from collections.abc import Mapping

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.reach import Network, Standing, network_of
from p2p_diloco.rate import counted, format_part

IDLE_CYCLES = 3
"""A ready peer reports a reason once it has been in no entry for this many cycles."""
MOST_FAILURES = 3
_WITHIN = {Network.MACHINE: ", within this machine", Network.SITE: ", within its own network", Network.WORLD: ""}


def reach_sentence(standing: Standing, ports: tuple[int, ...], *, trains: bool) -> str:
    """Return a sentence: whether others can dial this peer, and what its owner can do about it.

    Args:
        standing: the reachability that the proofs show.
        ports: ports on which the peer listens; none with --dial-out-only.
        trains: False for a bootstrap peer, which others must be able to reach.
    """
    if not ports:
        return "outbound only, as configured; training works through other peers"
    if standing.is_reachable:
        proof, peers = standing.proofs[0], counted(standing.num_proved, "peer")
        return f"reachable at {proof.place}{_WITHIN[network_of(proof.host)]} (proved by {peers})"
    if not standing.proofs and not standing.failures:
        return "outbound only until another member has dialled this peer"
    if standing.proofs:
        near = standing.proofs[0]
        why = f"reached only at {near.place}{_WITHIN[network_of(near.host)]}, but some members are on other networks"
        if standing.failures:
            why = f"{why} ({standing.failures[0].reason})"
    else:
        why = f"no member could dial it ({standing.failures[0].reason})"
    otherwise = (
        "do nothing: training works through other peers"
        if trains
        else "other peers can join through it only from there"
    )
    return f"outbound only: {why}; forward TCP port {ports[0]} on the router to this machine, or {otherwise}"


def idle_cycles(engine: PeerEngine, ready_since: int | None, now: float) -> int:
    """Return for how many whole cycles a ready trainer has been in no entry; 0 for any other peer."""
    if ready_since is None or not engine.ready or not engine.me.trains:
        return 0
    clock = engine.rules.clock
    since = max(ready_since, engine.last_included if engine.last_included is not None else ready_since)
    return max(clock.round_at(now) - since - 1, 0) // clock.num_fragments


def explain_idleness(engine: PeerEngine, cycles: int, failures: Mapping[PeerId, str], *, others_learn: bool) -> str:
    """Explain why a peer is in no entry, with the dials that failed.

    Args:
        cycles: for how many cycles.
        failures: reason for each failed dial, by peer.
        others_learn: whether entries with other peers' contributions arrived meanwhile.
    """
    return f"in no entry for {counted(cycles, 'cycle')}: {_reason(engine, failures, others_learn)}"


def _reason(engine: PeerEngine, failures: Mapping[PeerId, str], others_learn: bool) -> str:
    roster, grid, me = engine.book.in_force, engine.book.grid(), engine.me.peer
    if roster is None or grid is None:
        return "no roster received; is any member reachable?"
    if roster.member(me) is None:
        return f"this peer is not on roster {roster.k} of {counted(len(roster.members), 'member')}"
    averaging = grid.reducers() - {me}
    unlinked = sorted(averaging - engine.linked)
    if unlinked:
        told = [f"{short_peer_id(peer)}: {failures.get(peer, 'not dialled yet')}" for peer in unlinked[:MOST_FAILURES]]
        more = f" and {len(unlinked) - MOST_FAILURES} more" if len(unlinked) > MOST_FAILURES else ""
        return (
            f"no link to {format_part(len(unlinked), len(averaging), 'member')} that average ({'; '.join(told)}{more})"
        )
    if others_learn:
        return "entries arrive without its contributions; is its upload too slow, or its clock wrong?"
    others = roster.peers() - {me}
    if not others:
        return "no span gets an entry, and this peer is alone on the roster; is training too slow for a round?"
    away = sorted(others - engine.linked)
    told = [failures[peer] for peer in away if peer in failures][:MOST_FAILURES]
    dials = f" ({'; '.join(told)})" if told else ""
    linked = format_part(len(others) - len(away), len(others), "other member")
    return f"no span gets an entry; linked with {linked}{dials}"
