"""Keeps this peer on the noticeboard and linked with the peers of the run that it needs and can dial."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, format_peer_id, short_peer_id
from p2p_diloco.node.look_pace import LookPace
from p2p_diloco.protocol.round.routes import FEW_LINKS
from p2p_diloco.protocol.wire.messages import MOST_RECORDS
from p2p_diloco.transport.directory import MOST_AHEAD_SECONDS, Directory, PeerRecord, PeerRole, decode_record
from p2p_diloco.transport.link import Transport
from p2p_diloco.transport.strangers import MOST_LINKS, DialBudget, surplus_links

RECORD_LIFETIME_SECONDS = 600.0
ANNOUNCE_SECONDS = 120.0
DIAL_SECONDS = 10.0
LEAVE_TO_THEM_SECONDS = 20.0
"""After a dial that failed, a reachable peer waits so long for one that is not to dial it: their calls would cross."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
STRANGER_RETRY_SECONDS = 600.0
"""Before that a stranger that could not be dialled is not dialled again; members are, with growing pauses. So long one
of too many is turned away, too."""
UNNEEDED_SECONDS = 30.0
"""After this long a link that this peer dialled and needs no more is closed: a new grid has other neighbours."""
KEPT_LINKS = 3
"""Links that are not needed are closed down to so many: where the needed ones lead nowhere, two of three peers are a
majority, and one that fails or lies keeps nobody from it."""
STEADY_SECONDS = 30.0
"""A link that lasted so long was a good one; before, its loss counts like a dial that failed."""
MOST_KNOWN = 4096
"""Peers whose addresses are kept: records cost their makers nothing."""
MOST_ISSUED = 256
"""The number of its latest records that a peer recognises as its own."""
MOST_BOOTSTRAPS_ON_TRUST = 2
"""Bootstraps in an invite that this peer is linked to and has not dialled: anybody may call itself one."""


@dataclass(slots=True)
class _Attempt:
    """When a peer may be dialled again."""

    not_before: float = 0.0
    pause: float = FIRST_RETRY_SECONDS
    linked_at: float | None = None
    failed_at: float = float("-inf")


class LinkKeeper:
    """Announces, looks up, dials; retries with growing pauses; remembers addresses, so that it needs no bootstrap.

    Args:
        record: makes this peer's signed record, with the addresses of now.
        known: addresses from the invite, the settings and earlier starts.
        hear: who is told when the directory fails; `(topic, text)`.
        wanted: whom this peer needs links to, when these are announced; None: everybody.
        is_stranger: whether a peer is no member of the run, was none lately and is not its founder; those in `known`
            count as none.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        directory: Directory,
        record: Callable[[], PeerRecord],
        known: dict[PeerId, tuple[str, ...]],
        unix_seconds: Callable[[], float],
        hear: Callable[[str, str], None],
        wanted: Callable[[Collection[PeerId]], frozenset[PeerId] | None] = lambda announced: None,
        is_stranger: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self.known = dict(known)
        self._given = frozenset(known)
        self._is_unknown_to_run = is_stranger
        self._dials = DialBudget()
        self._arrivals: dict[PeerId, None] = {}  # of linked peers, the latest last
        self._turned_away: dict[PeerId, float] = {}
        transport.is_welcome = self._is_welcome
        self.failures: dict[PeerId, str] = {}
        """Why peers could not be dialled, the last time."""
        self._transport = transport
        self._directory = directory
        self._record = record
        self._unix_seconds = unix_seconds
        self._hear = hear
        self._wanted_of = wanted
        self._unneeded_since: dict[PeerId, float] = {}
        self._dialled: set[PeerId] = set()
        self._worked: dict[PeerId, None] = {}  # whoever answered a dial, the latest last
        self._attempts: dict[PeerId, _Attempt] = {}
        self._records: dict[PeerId, PeerRecord] = {}
        self._learnt_at: dict[PeerId, float] = {}
        self._wake = asyncio.Event()
        self._announced_at = float("-inf")
        self._announced: tuple[str, ...] | None = None
        self._troubles: dict[str, str] = {}
        self._began = unix_seconds()
        self._own_addresses: set[str] = set()
        self._issued: deque[float] = deque(maxlen=MOST_ISSUED)
        """When this peer issued its records; and the times of those that an earlier start issued in the future."""
        self._has_twin = False
        self._pace = LookPace()
        self._linked_before: frozenset[PeerId] = frozenset()

    async def run(self) -> None:
        """Go on until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._announce()
                await self._look_if_due()
                self._hang_up_on_unneeded()
                await self._hang_up_on_strangers()
                for peer in self._due():
                    tasks.create_task(self._dial(peer), name=f"dial {short_peer_id(peer)}")
                await self._pause(self._pace.turn_seconds())

    def _wanted(self) -> frozenset[PeerId] | None:
        """Ask whom this peer needs a link to, now that these are announced: by the clock here, theirs may err."""
        oldest = self._unix_seconds() - RECORD_LIFETIME_SECONDS
        return self._wanted_of([peer for peer, learnt_at in self._learnt_at.items() if learnt_at >= oldest])

    async def _pause(self, seconds: float) -> None:
        """Wait until the next turn, or until somebody was introduced."""
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _announce(self) -> None:
        now = self._unix_seconds()
        addresses = self._transport.listen_addresses()
        if now - self._announced_at < ANNOUNCE_SECONDS and addresses == self._announced:
            return
        try:
            await self._directory.announce(self._own_record(), now + RECORD_LIFETIME_SECONDS)
            self._announced_at, self._announced = now, addresses
            self._troubles.pop("announce this peer", None)
        except PeerError as error:
            self._trouble("announce this peer", error)

    def announce_again(self) -> None:
        """Publish the record soon: what it says of this peer has changed."""
        self._announced = None
        self._wake.set()

    async def _look_if_due(self) -> None:
        if self._is_somebody_lacking():
            self._pace.hurry()
        now = asyncio.get_running_loop().time()
        if self._pace.is_due(now):
            self._pace.looked(now)
            await self._look()

    def _is_somebody_lacking(self) -> bool:
        """Return whether the directory may help: too few links, one just lost, or an unknown peer is wanted.

        A peer that wants links to all cannot name the ones it lacks. Newcomers look often and dial all, so it is enough
        that they can reach this peer, and that somebody has is the proof of it. Whom nobody has dialled must find them
        itself.
        """
        linked, wanted = self._transport.linked_peers(), self._wanted()
        lost, self._linked_before = self._linked_before - linked, linked
        if len(linked) < FEW_LINKS or (lost if wanted is None else lost & wanted):
            return True
        if wanted is None:
            return linked <= self._dialled
        return bool(wanted - linked - self._records.keys() - self.known.keys() - {self._transport.peer})

    async def _look(self) -> None:
        try:
            records = await self._directory.peers()
        except PeerError as error:
            self._pace.hurry()
            self._trouble("look for peers", error)
            return
        self._troubles.pop("look for peers", None)
        for record in records:
            self._learn(record)

    def _learn(self, record: PeerRecord) -> None:
        known = self._records.get(record.peer)
        if record.run != self._transport.run:
            return
        if record.peer == self._transport.peer:
            self._look_for_twin(record)
            return
        if known is not None and record.issued_at <= known.issued_at:
            return
        if record.issued_at > self._unix_seconds() + MOST_AHEAD_SECONDS:
            return  # it would count as the youngest until then
        if known is None and len(self._records) >= MOST_KNOWN and not self._forget_one():
            return
        self._records[record.peer] = record
        self._learnt_at[record.peer] = self._unix_seconds()
        if record.addresses:
            self.known[record.peer] = record.addresses

    def _look_for_twin(self, record: PeerRecord) -> None:
        """Report once that another process has this identity: it signs records of now that this one has not issued.

        One at home names no address in them. An earlier start whose clock was ahead may have issued what is dated later
        than now, so that is not held against anybody.
        """
        self._own_record()
        foreign = [address for address in record.addresses if address not in self._own_addresses]
        since = self._issued[0] if len(self._issued) == MOST_ISSUED else self._began
        is_unknown = record.issued_at > since and record.issued_at not in self._issued
        if is_unknown and record.issued_at > self._unix_seconds():
            self._issued.append(record.issued_at)
            is_unknown = False
        if (is_unknown or (foreign and record.issued_at > self._began)) and not self._has_twin:
            self._has_twin = True
            where = f"announces {foreign[0]!r}" if foreign else "can be dialled nowhere"
            self._hear(
                "identity",
                f"another process has this peer's identity and {where}; both take part as one peer "
                "and spoil each other: stop one of them, and give it a state directory of its own instead of a copy",
            )

    def _own_record(self) -> PeerRecord:
        record = self._record()
        self._own_addresses.update(record.addresses)
        self._issued.append(record.issued_at)
        return record

    def _forget_one(self) -> bool:
        """Make room: the oldest record of a stranger without a link goes, or else of anybody without one."""
        unlinked = self._records.keys() - self._transport.linked_peers()
        strangers = set(filter(self._is_stranger, unlinked)) or unlinked
        if not strangers:
            return False
        oldest = min(strangers, key=lambda peer: (self._records[peer].issued_at, peer))
        del self._records[oldest], self._learnt_at[oldest]
        self.known.pop(oldest, None)
        self._attempts.pop(oldest, None)
        self._worked.pop(oldest, None)
        self.failures.pop(oldest, None)
        return True

    def introductions(self) -> tuple[bytes, ...]:
        """Return signed records to tell a new acquaintance: the own one, then members', others who are here, the rest.

        Of each of these the youngest first; identities that somebody made up are no members.
        """
        linked = self._transport.linked_peers()

        def rank(record: PeerRecord) -> tuple[bool, bool, float]:
            return self._is_stranger(record.peer), record.peer not in linked, -record.issued_at

        others = sorted(self._records.values(), key=rank)[: MOST_RECORDS - 1]
        return tuple(record.encode() for record in (self._own_record(), *others))

    def introduced(self, records: tuple[bytes, ...]) -> None:
        """Take records that a peer told; those that are not signed by whom they name are dropped."""
        for encoded in records:
            try:
                record = decode_record(encoded)
            except FrameError:
                continue
            is_new = record.peer not in self.known
            self._learn(record)
            if is_new and record.peer in self.known:
                self._wake.set()

    def invited(self) -> tuple[tuple[str, ...], ...]:
        """Return the addresses of each other peer that an invite may name, those that come first being the best.

        That is whom this peer itself has dialled and is linked to, if it says that it can be dialled: its address works
        from here. Bootstraps come first, then the longest known; last a few bootstraps that have dialled this peer.
        """
        linked = self._transport.linked_peers()
        here = {peer: record for peer, record in self._records.items() if peer in linked and record.can_be_dialled}
        dialled = [here[peer] for peer in self._worked if peer in here and peer in self._dialled]
        dialled.sort(key=lambda record: record.role is not PeerRole.BOOTSTRAP)
        others = [here[peer] for peer in here.keys() - self._dialled if here[peer].role is PeerRole.BOOTSTRAP]
        others.sort(key=lambda record: record.peer)
        chosen = (*dialled, *others[:MOST_BOOTSTRAPS_ON_TRUST])
        # A record may hold whatever its maker likes, such as a third party's address.
        ends = (f"/p2p/{format_peer_id(record.peer)}" for record in chosen)
        return tuple(tuple(a for a in r.addresses if a.endswith(end)) for r, end in zip(chosen, ends, strict=True))

    def kept_addresses(self) -> dict[PeerId, tuple[str, ...]]:
        """Return all known addresses in the order in which a next start should try them.

        First whom this peer has dialled and is linked to, then whom it had reached, the latest first. Strangers that it
        never reached are left out: at the next start they would count as known.
        """
        here = self._dialled & self._transport.linked_peers()
        worked = [*(peer for peer in self._worked if peer in here), *reversed(self._worked)]
        others = (peer for peer in self.known if not self._is_stranger(peer))
        return {peer: self.known[peer] for peer in dict.fromkeys((*worked, *others)) if peer in self.known}

    def _trouble(self, what: str, error: PeerError) -> None:
        """Report what the directory could not do, once until it can again."""
        text = f"could not {what}: {error}"
        if text != self._troubles.get(what):
            self._hear("directory", text)
        self._troubles[what] = text

    def _hang_up_on_unneeded(self) -> None:
        """Close links of our own making that have not been needed for a while; who dialled us decides for itself."""
        now = asyncio.get_running_loop().time()
        wanted, linked = self._wanted(), self._transport.linked_peers()
        self._dialled &= linked
        unneeded = self._dialled - wanted if wanted is not None else frozenset()
        self._unneeded_since = {peer: self._unneeded_since.get(peer, now) for peer in unneeded}
        spare = len(linked) - KEPT_LINKS
        for peer, since in sorted(self._unneeded_since.items()):
            if now - since >= UNNEEDED_SECONDS and spare > 0:
                spare -= 1
                self._transport.hang_up(peer)
                self._attempts.pop(peer, None)
                del self._unneeded_since[peer]  # should it be linked again, it is not unneeded since then

    async def _hang_up_on_strangers(self) -> None:
        """Close links of strangers where there are too many: each time the newest of the busiest address."""
        linked = self._transport.linked_peers()
        new = sorted(linked - self._arrivals.keys())
        self._arrivals = dict.fromkeys([*(peer for peer in self._arrivals if peer in linked), *new])
        strangers = [peer for peer in self._arrivals if self._is_stranger(peer)]
        if len(strangers) <= MOST_LINKS:
            return
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                hosts = await self._transport.remote_hosts()
        except (PeerError, TimeoutError):
            return
        now = asyncio.get_running_loop().time()
        self._turned_away = {peer: until for peer, until in self._turned_away.items() if now < until}
        for peer in surplus_links(strangers, hosts, MOST_LINKS):
            self._turned_away[peer] = now + STRANGER_RETRY_SECONDS
            self._transport.hang_up(peer)

    def _is_welcome(self, peer: PeerId) -> bool:
        until = self._turned_away.get(peer)
        return until is None or asyncio.get_running_loop().time() >= until or not self._is_stranger(peer)

    def _is_stranger(self, peer: PeerId) -> bool:
        return peer not in self._given and self._is_unknown_to_run(peer)

    def _due(self) -> Iterable[PeerId]:
        now = asyncio.get_running_loop().time()
        linked = self._transport.linked_peers()
        for peer in linked & self._attempts.keys():
            attempt = self._attempts[peer]
            if attempt.linked_at is not None and now - attempt.linked_at >= STEADY_SECONDS:
                del self._attempts[peer]
        wanted = self._wanted()
        candidates = self.known.keys() - linked - {self._transport.peer}
        if wanted is not None and len(linked) >= FEW_LINKS:
            candidates &= wanted
        for peer in sorted(candidates):
            attempt = self._attempts.setdefault(peer, _Attempt())
            if now >= attempt.not_before and self._may_dial(peer, attempt, now):
                attempt.not_before = now + DIAL_SECONDS + attempt.pause
                yield peer

    def _may_dial(self, peer: PeerId, attempt: _Attempt, now: float) -> bool:
        """Return whether strangers' dials are not too many, to this one and to the places that it names."""
        if not self._is_stranger(peer):
            return True
        is_over = now - attempt.failed_at >= STRANGER_RETRY_SECONDS
        return is_over and self._dials.admits(self.known[peer], now)

    def _may_leave_it_to(self, peer: PeerId) -> bool:
        """Return whether a peer can dial this one, and most likely not the other way round."""
        record = self._records.get(peer)
        return record is not None and not record.can_be_dialled and self._record().can_be_dialled

    async def _dial(self, peer: PeerId) -> None:
        loop = asyncio.get_running_loop()
        attempt, addresses = self._attempts.get(peer), self.known.get(peer)
        if attempt is None or addresses is None:
            return  # others have displaced it since it was due
        try:
            await self._transport.dial(peer, addresses, loop.time() + DIAL_SECONDS)
            attempt.linked_at = loop.time()
            self._dialled.add(peer)
            self._worked.pop(peer, None)
            self._worked[peer] = None
            self.failures.pop(peer, None)
        except PeerError as error:
            self.failures[peer] = str(error)
            attempt.linked_at, attempt.failed_at = None, loop.time()
            if attempt.pause == FIRST_RETRY_SECONDS and not self._is_stranger(peer):
                name = short_peer_id(peer)
                self._hear("link", str(error) if name in str(error) else f"could not reach {name}: {error}")
        is_theirs = attempt.linked_at is None and self._may_leave_it_to(peer)
        attempt.not_before = loop.time() + max(attempt.pause, LEAVE_TO_THEM_SECONDS if is_theirs else 0.0)
        attempt.pause = min(2 * attempt.pause, LAST_RETRY_SECONDS)
