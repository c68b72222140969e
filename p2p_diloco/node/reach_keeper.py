"""Has other peers prove that this one can be dialled, and dials others afresh when they request the same.

Only the requester's own host, as seen from here, is ever dialled, so that no peer can make us dial a third party.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from p2p_diloco.errors import PeerError, clean_text
from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.reach import Answer, Network, Reach, Standing, network_of
from p2p_diloco.protocol.membership.reach_proofs import is_recent, place_of, provers_for
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE
from p2p_diloco.protocol.wire.member import ReachProof
from p2p_diloco.protocol.wire.messages import (
    MOST_HOST_BYTES,
    MOST_PORTS,
    MOST_REASON_BYTES,
    ReachReply,
    ReachRequest,
    encode_message,
)
from p2p_diloco.protocol.wire.roster import Verify
from p2p_diloco.transport.addresses import tcp_address
from p2p_diloco.transport.link import Lane, Transport

TURN_SECONDS = 0.2
LOOK_SECONDS = 5.0
"""Interval for reading the hosts of linked peers while no link is added or lost."""
PROBE_SECONDS = 5.0
REPLY_SECONDS = 10.0
MOST_HOSTS = 2
MOST_PROBES_AT_ONCE = 2
MOST_WAITING = 64
PROBES_A_MINUTE = 60
PROBES_A_MINUTE_FOR_ONE = 4
THIS_MACHINE = "127.0.0.1"


class ReachKeeper:
    """The shell around `Reach`: sends requests, answers them, and passes the results to the protocol.

    Args:
        is_own_host: returns whether an IP address belongs to this machine.
        now: returns swarm seconds.
        verify: returns whether a peer has signed something.
        on_change: called with the new standing when the answers have changed it.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        engine: PeerEngine,
        is_own_host: Callable[[str], bool],
        now: Callable[[], float],
        verify: Verify,
        on_change: Callable[[Standing], None],
    ) -> None:
        self.standing = Standing(is_reachable=False)
        self._transport = transport
        self._engine = engine
        self._is_own_host = is_own_host
        self._now = now
        self._verify = verify
        self._on_change = on_change
        self._reach = Reach()
        self._nonces: dict[PeerId, int] = {}
        self._signed: dict[PeerId, tuple[Answer, ReachProof]] = {}
        self._linked: frozenset[PeerId] = frozenset()
        self._looked_at = float("-inf")
        self._listening: tuple[str, ...] = ()
        self._waiting: dict[PeerId, ReachRequest] = {}
        self._has_requests = asyncio.Event()
        self._probed_at: deque[tuple[float, PeerId]] = deque()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MOST_PROBES_AT_ONCE):
                tasks.create_task(self._answer_requests(), name="prove reachability")
            while True:
                await self._turn()
                await asyncio.sleep(TURN_SECONDS)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The multiaddrs at which this peer was reached, best first, without its id and without loopback addresses."""
        proofs = self.standing.proofs if self.standing.is_reachable else ()
        far = (proof for proof in proofs if network_of(proof.host) is not Network.MACHINE)
        return tuple(dict.fromkeys(tcp_address(proof.host, proof.port) for proof in far))

    @property
    def has_seen_outsiders(self) -> bool:
        """Whether a linked peer was ever seen from a public address."""
        return self._reach.has_seen_outsiders

    # -- asking

    async def _turn(self) -> None:
        now = asyncio.get_running_loop().time()
        listening = self._transport.listen_addresses()
        if listening != self._listening:
            self._listening = listening
            self._reach.forget()
            self._signed.clear()
        await self._look(now)
        self._renew_proofs()
        ports = self._transport.listen_ports()[:MOST_PORTS]
        if ports:
            linked = self._transport.linked_peers()
            for peer in self._reach.due(self._provers() & linked, now, preferred=self._trusted()):
                self._nonces[peer] = secrets.randbits(60)
                self._post(peer, ReachRequest(nonce=self._nonces[peer], ports=ports))
        self._judge(now)

    def _renew_proofs(self) -> None:
        """Have proofs signed again that name another time: swarm time was corrected, by more than they last."""
        if self._engine.conditions.is_time_uncertain:
            return
        for peer, (_, proof) in list(self._signed.items()):
            if not is_recent(proof.cycle, self._cycle(), self._engine.rules):
                del self._signed[peer]
                self._reach.renew(peer)

    def _cycle(self) -> int:
        clock = self._engine.rules.clock
        return max(clock.cycle(clock.round_at(self._now())), 0)

    async def _look(self, now: float) -> None:
        linked = self._transport.linked_peers()
        if linked == self._linked and now - self._looked_at < LOOK_SECONDS:
            return
        hosts = await seen_hosts(self._transport, LOOK_SECONDS)
        if hosts is None:
            return
        self._linked, self._looked_at = linked, now
        self._reach.see({peer: [self._as_seen(host) for host in hosts[peer]] for peer in hosts.keys() & linked})

    def _as_seen(self, host: str) -> str:
        return THIS_MACHINE if self._is_own_host(host) else host

    def _provers(self) -> frozenset[PeerId]:
        """Return the peers whose answers count: members and the founder; empty before there is a roster in force."""
        roster = self._engine.book.in_force
        if roster is None:
            return frozenset()
        return roster.peers().union((self._engine.book.founder,)) - {self._engine.me.peer}

    def _trusted(self) -> frozenset[PeerId]:
        """Return the peers whose proofs the roster rule counts; other proofs serve only this peer's own decisions."""
        book = self._engine.book
        return provers_for(self._engine.me.peer, book.in_force, book.founder) if book.in_force else frozenset()

    def _judge(self, now: float) -> None:
        standing = self._reach.standing(self._provers(), company_of(self._engine, self._transport.linked_peers()), now)
        # A reachable peer also shows what its own network proved: the provers whom the rule counts may all be there.
        self._signed = {peer: signed for peer, signed in self._signed.items() if signed[0] in standing.proofs}
        signed = sorted(self._signed.values(), key=lambda each: -each[0].at)
        proofs = tuple(proof for _, proof in signed)
        changed = replace(self._engine.conditions, can_be_dialled=standing.is_reachable, proofs=proofs)
        self._engine.set_conditions(changed)
        if standing != self.standing:
            self.standing = standing
            self._on_change(standing)

    # -- requests and replies

    def receive(self, peer: PeerId, message: ReachRequest | ReachReply) -> None:
        """Take a request to dial `peer` afresh, or its answer to our request."""
        if isinstance(message, ReachReply):
            self._take_reply(peer, message)
        elif self._engine.rules.may_be_member(peer) and len(self._waiting) < self._part_of(peer, MOST_WAITING):
            self._waiting[peer] = message
            self._has_requests.set()

    def _part_of(self, peer: PeerId, most: int) -> int:
        """Return how much of a budget a requester may use: strangers leave half of it to members."""
        return most if peer in self._provers() else most // 2

    def _take_reply(self, peer: PeerId, reply: ReachReply) -> None:
        if self._nonces.pop(peer, None) != reply.nonce:
            return
        try:
            # Drop the zone, which may hold anything and means nothing to other machines.
            host = str(ipaddress.ip_address(reply.host.decode("ascii", "replace").partition("%")[0]))
        except ValueError:
            return
        if reply.port not in self._transport.listen_ports():
            return
        reason = clean_text(reply.reason.decode("utf-8", "replace"))
        now = asyncio.get_running_loop().time()
        run, me = self._engine.rules.run, self._engine.me.peer
        proof = ReachProof(prover=peer, place=place_of(run, host), cycle=reply.cycle, signature=reply.signature)
        if not reason and not self._verify(peer, proof.statement(run, me), proof.signature):
            return
        answer = Answer(host=host, port=reply.port, reason=reason, at=now)
        self._reach.take(peer, answer)
        if not reason:
            self._signed[peer] = (answer, proof)
        self._judge(now)

    def _post(self, peer: PeerId, message: ReachRequest | ReachReply) -> None:
        deadline = asyncio.get_running_loop().time() + REPLY_SECONDS
        self._transport.post(peer, encode_message(message), lane=Lane.CONTROL, deadline=deadline)

    # -- answering

    async def _answer_requests(self) -> None:
        while True:
            while not self._waiting:
                self._has_requests.clear()
                await self._has_requests.wait()
            if self._engine.conditions.is_time_uncertain:  # a proof names the cycle, so the time must be known
                await asyncio.sleep(TURN_SECONDS)
                continue
            peer = next(iter(self._waiting))
            request = self._waiting.pop(peer)
            if self._may_probe(peer):
                reply = await self._dial(peer, request)
                if reply is not None:
                    self._post(peer, reply)

    def _may_probe(self, peer: PeerId) -> bool:
        """Return whether the budget allows one more probe; a peer over it gets no answer and asks again later."""
        now = asyncio.get_running_loop().time()
        while self._probed_at and now - self._probed_at[0][0] >= 60.0:
            self._probed_at.popleft()
        own = sum(requester == peer for _, requester in self._probed_at)
        if len(self._probed_at) >= self._part_of(peer, PROBES_A_MINUTE) or own >= PROBES_A_MINUTE_FOR_ONE:
            return False
        self._probed_at.append((now, peer))
        return True

    async def _dial(self, peer: PeerId, request: ReachRequest) -> ReachReply | None:
        """Dial a peer at every host from which it is seen; return None if there is none."""
        hosts = (await seen_hosts(self._transport, PROBE_SECONDS) or {}).get(peer, ())[:MOST_HOSTS]
        places = [(host, port) for host in sorted(hosts, key=network_of, reverse=True) for port in request.ports]
        if not places:
            return None
        until = asyncio.get_running_loop().time() + PROBE_SECONDS
        tried = await asyncio.gather(*(self._transport.why_unreachable(peer, *place, until) for place in places))
        reached = [place for place, failure in zip(places, tried, strict=True) if failure is None]
        host, port = reached[0] if reached else places[0]
        host = self._as_seen(host)
        proof = self._sign(peer, host) if reached else None
        reason = "" if reached else "; ".join(dict.fromkeys(str(failure) or "unknown" for failure in tried))
        return ReachReply(
            nonce=request.nonce,
            host=host.encode()[:MOST_HOST_BYTES],
            port=port,
            reason=reason.encode()[:MOST_REASON_BYTES],
            cycle=proof.cycle if proof is not None else 0,
            signature=proof.signature if proof is not None else NO_SIGNATURE,
        )

    def _sign(self, peer: PeerId, host: str) -> ReachProof:
        me, rules = self._engine.me, self._engine.rules
        place = place_of(rules.run, host)
        unsigned = ReachProof(prover=me.peer, place=place, cycle=self._cycle(), signature=NO_SIGNATURE)
        return replace(unsigned, signature=me.sign(unsigned.statement(rules.run, peer)))


async def seen_hosts(transport: Transport, timeout_seconds: float) -> dict[PeerId, tuple[str, ...]] | None:
    """Return the IP addresses of connected peers as seen here; None if they are not available in time."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await transport.remote_hosts()
    except (PeerError, TimeoutError):
        return None


def company_of(engine: PeerEngine, linked: frozenset[PeerId]) -> frozenset[PeerId]:
    """Return the peers that must be able to dial this one: members to link to, the founder, and likely members."""
    roster = engine.book.in_force
    if roster is None:
        return frozenset()
    wanted = engine.wanted_links()
    members = roster.peers() if wanted is None else roster.peers() & wanted
    founder = {engine.book.founder} & linked
    coming = {p for p, view in engine.membership.liveness.views.items() if view.heartbeat.trains and p in linked}
    return (members | founder | coming) - {engine.me.peer}


def announced(proved: Collection[str], listening: Collection[str], peer_suffix: str) -> tuple[str, ...]:
    """Return the addresses to announce: first those at which this peer was reached, then those at which it listens.

    Of the latter, the most widely reachable come first, because a record holds only a few.
    """
    farthest_first = sorted(listening, key=_reaches, reverse=True)
    return tuple(dict.fromkeys([*(address + peer_suffix for address in proved), *farthest_first]))


def _reaches(address: str) -> int:
    try:
        return network_of(address.split("/")[2])
    except (IndexError, ValueError):
        return Network.WORLD  # a host name that was configured
