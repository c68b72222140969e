"""Keeps this peer announced in the directory, and linked to the peers of the run that it needs and can dial."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, format_peer_id, short_peer_id
from p2p_diloco.protocol.round.routes import FEW_LINKS
from p2p_diloco.protocol.wire.messages import MOST_RECORDS
from p2p_diloco.transport.directory import (
    MOST_AHEAD_SECONDS,
    RECORD_LIFETIME_SECONDS,
    Directory,
    PeerRecord,
    PeerRole,
    decode_record,
)
from p2p_diloco.transport.link import Transport
from p2p_diloco.transport.strangers import MOST_LINKS, DialBudget, surplus_links

ANNOUNCE_SECONDS = 120.0
DIAL_SECONDS = 10.0
LEAVE_TO_THEM_SECONDS = 20.0
"""Time that a reachable peer waits, after a failed dial, for an unreachable one to dial it: their dials would cross."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS, LAST_ALONE_RETRY_SECONDS = 60.0, 10.0
"""Longest pause between two dials of a member, and if this peer has no link at all: its line may be back."""
STRANGER_RETRY_SECONDS = 600.0
"""Pause before a stranger whose dial failed is dialled again; members are retried sooner, with growing pauses. Also the
time for which a surplus stranger is turned away."""
UNNEEDED_SECONDS = 30.0
"""Time after which a link that this peer dialled and no longer needs is closed: a new grid has other neighbours."""
KEPT_LINKS = 3
"""Unneeded links are closed only while there are more links than this. If the needed ones lead nowhere, two of three
peers are a majority, so one that fails or lies cannot prevent one."""
STEADY_SECONDS = 30.0
"""Time after which a link counts as good; if it is lost earlier, that counts as a failed dial."""
MOST_HELD_BACK = 64
"""Maximum number of records from the future that are kept in case it is this machine's clock that is wrong."""
MOST_KNOWN = 4096
"""Maximum number of peers whose addresses are kept: records cost their makers nothing."""
MOST_ISSUED = 256
"""Number of its latest records that a peer recognises as its own."""
MOST_BOOTSTRAPS_ON_TRUST = 2
"""Maximum number of bootstrap peers in an invite that this peer has not dialled: any peer may claim to be one."""
LOOK_SECONDS = 1.0
CALM_LOOK_SECONDS = 5.0
CALM_AFTER_LOOKS = 30
CONTENT_LOOK_SECONDS = 60.0
"""Longest pause between two looks. Among a thousand peers one reads about two megabytes, most of them already known."""


@dataclass(slots=True)
class _Attempt:
    """When a peer may be dialled again."""

    not_before: float = 0.0
    pause: float = FIRST_RETRY_SECONDS
    linked_at: float | None = None
    failed_at: float = float("-inf")


class LookPace:
    """Decides when the next look at the directory is due. Time is an argument, in seconds of any steady clock.

    The first looks are `LOOK_SECONDS` apart, which sets how fast a swarm forms. Then pauses grow from
    `CALM_LOOK_SECONDS` to `CONTENT_LOOK_SECONDS`, and start over after every `hurry`.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._looked_at = float("-inf")
        self._pause = CALM_LOOK_SECONDS

    def turn_seconds(self) -> float:
        """Return the seconds until the caller asks again; in each such turn it also dials and hangs up."""
        return LOOK_SECONDS if self._looks < CALM_AFTER_LOOKS else CALM_LOOK_SECONDS

    def is_due(self, now: float) -> bool:
        """Return whether to look now."""
        return self._looks < CALM_AFTER_LOOKS or now - self._looked_at >= self._pause

    def looked(self, now: float) -> None:
        """Record that a look begins now."""
        self._looks += 1
        self._looked_at = now
        if self._looks > CALM_AFTER_LOOKS:
            self._pause = min(2 * self._pause, CONTENT_LOOK_SECONDS)

    def hurry(self) -> None:
        """Shorten the pause to `CALM_LOOK_SECONDS` again, because something is missing."""
        self._pause = CALM_LOOK_SECONDS


class LinkKeeper:
    """Announces this peer, looks up others and dials them; retries with growing pauses.

    It remembers addresses, so that it does not depend on a bootstrap peer.

    Args:
        record: returns this peer's signed record, with its current addresses.
        known: addresses from the invite, the settings and earlier starts.
        report: called with `(topic, text)` when the directory or a dial fails, or another process has this identity.
        wanted: given the announced peers, returns those that this peer needs links to; None: all.
        is_stranger: returns whether a peer is not a member, was not one recently and is not the founder. Peers in
            `known` never count as strangers.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        directory: Directory,
        record: Callable[[], PeerRecord],
        known: dict[PeerId, tuple[str, ...]],
        unix_seconds: Callable[[], float],
        report: Callable[[str, str], None],
        wanted: Callable[[Collection[PeerId]], frozenset[PeerId] | None] = lambda announced: None,
        is_stranger: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self.known = dict(known)
        self._given = dict(known)
        self._is_unknown_to_run = is_stranger
        self._dials = DialBudget()
        self._arrivals: dict[PeerId, None] = {}  # linked peers, latest last
        self._turned_away: dict[PeerId, float] = {}
        transport.serve(is_welcome=self._is_welcome)
        self.failures: dict[PeerId, str] = {}
        """Why the last dial to each peer failed."""
        self._transport = transport
        self._directory = directory
        self._record = record
        self._unix_seconds = unix_seconds
        self._report = report
        self._wanted_of = wanted
        self._unneeded_since: dict[PeerId, float] = {}
        self._dialled: set[PeerId] = set()
        self._worked: dict[PeerId, None] = {}  # peers that answered a dial, latest last
        self._attempts: dict[PeerId, _Attempt] = {}
        self._records: dict[PeerId, PeerRecord] = {}
        self._learnt_at: dict[PeerId, float] = {}
        self._held_back: dict[PeerId, PeerRecord] = {}
        """Records of peers whose clocks are ahead of this machine's."""
        self._wake = asyncio.Event()
        self._announced_at = float("-inf")
        self._announced: tuple[str, ...] | None = None
        self._troubles: dict[str, str] = {}
        self._began = unix_seconds()
        self._own_addresses: set[str] = set()
        self._issued: deque[float] = deque(maxlen=MOST_ISSUED)
        """Issue times of this peer's records, including records that an earlier start dated in the future."""
        self._has_twin = False
        self._pace = LookPace()
        self._linked_before: frozenset[PeerId] = frozenset()

    async def run(self) -> None:
        """Run until cancelled."""
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
        """Return the peers to link to, given those announced recently. Our own clock counts: theirs may be wrong."""
        oldest = self._unix_seconds() - RECORD_LIFETIME_SECONDS
        return self._wanted_of([peer for peer, learnt_at in self._learnt_at.items() if learnt_at >= oldest])

    async def _pause(self, seconds: float) -> None:
        """Wait until the next turn, or until a new peer is introduced."""
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
        """Publish the record again soon, because it has changed."""
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
        """Return whether the directory may help: links are too few, one was just lost, or an unknown peer is wanted.

        A peer that wants links to all peers cannot name the missing ones. Newcomers look often and dial all peers, so
        it is enough that they can reach this one. A link that another peer dialled proves that they can. Without such
        a link, this peer must find newcomers itself.
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
            self._hold_back(record)  # it would count as the newest until then
            return
        if known is None and len(self._records) >= MOST_KNOWN and not self._forget_one():
            return
        self._records[record.peer] = record
        self._learnt_at[record.peer] = self._unix_seconds()
        if record.addresses:
            self.known[record.peer] = tuple(dict.fromkeys((*record.addresses, *self._given.get(record.peer, ()))))

    def _hold_back(self, record: PeerRecord) -> None:
        """Keep a record from the future; a stranger's makes room for one of a member."""
        if len(self._held_back) >= MOST_HELD_BACK and record.peer not in self._held_back:
            stranger = next(filter(self._is_stranger, self._held_back), None)
            if stranger is None or self._is_stranger(record.peer):
                return
            del self._held_back[stranger]
        self._held_back[record.peer] = record

    def clock_corrected(self) -> None:
        """Judge the times of records anew: this machine's clock was found to be wrong."""
        self._learnt_at = dict.fromkeys(self._learnt_at, self._unix_seconds())
        held_back, self._held_back = self._held_back, {}
        for record in held_back.values():
            self._learn(record)
        self.announce_again()

    def _look_for_twin(self, record: PeerRecord) -> None:
        """Report once that another process has this identity: it signs current records that this one has not issued.

        A twin that cannot be dialled names no address in its records. An earlier start whose clock was ahead may have
        issued records dated in the future, so such a date alone is not evidence.
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
            where = f"announces {foreign[0]!r}" if foreign else "announces no address of its own"
            self._report(
                "identity",
                f"another process has this peer's identity and {where}; both take part as one peer "
                "and disturb each other: stop one of them, and give it its own state directory instead of a copy",
            )

    def _own_record(self) -> PeerRecord:
        record = self._record()
        self._own_addresses.update(record.addresses)
        self._issued.append(record.issued_at)
        return record

    def _forget_one(self) -> bool:
        """Drop the oldest record of an unlinked stranger, or else of any unlinked peer; False if there is none."""
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
        """Return signed records for a new peer: our own, then those of members, of other linked peers, and of the rest.

        Within each group the newest come first. Made-up identities are not members.
        """
        linked = self._transport.linked_peers()

        def rank(record: PeerRecord) -> tuple[bool, bool, float]:
            return self._is_stranger(record.peer), record.peer not in linked, -record.issued_at

        others = sorted(self._records.values(), key=rank)[: MOST_RECORDS - 1]
        return tuple(record.encode() for record in (self._own_record(), *others))

    def introduced(self, records: tuple[bytes, ...]) -> None:
        """Take records from a peer; drop those that are not signed by the peer that they name."""
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
        """Return the addresses of each other peer that an invite may name, best first.

        These are the peers that this one has dialled and is linked to, if they claim that they can be dialled: their
        addresses work from here. Bootstrap peers come first, then those known longest; a few bootstrap peers that have
        dialled this peer come last.
        """
        linked = self._transport.linked_peers()
        here = {peer: record for peer, record in self._records.items() if peer in linked and record.can_be_dialled}
        dialled = [here[peer] for peer in self._worked if peer in here and peer in self._dialled]
        dialled.sort(key=lambda record: record.role is not PeerRole.BOOTSTRAP)
        others = [here[peer] for peer in here.keys() - self._dialled if here[peer].role is PeerRole.BOOTSTRAP]
        others.sort(key=lambda record: record.peer)
        chosen = (*dialled, *others[:MOST_BOOTSTRAPS_ON_TRUST])
        # A record may hold anything, such as the address of a third party.
        ends = (f"/p2p/{format_peer_id(record.peer)}" for record in chosen)
        return tuple(tuple(a for a in r.addresses if a.endswith(end)) for r, end in zip(chosen, ends, strict=True))

    def kept_addresses(self) -> dict[PeerId, tuple[str, ...]]:
        """Return all known addresses in the order in which the next start should try them.

        First come the peers that this one has dialled and is linked to, then those that it reached earlier, latest
        first. Strangers are left out, also those that it reached: at the next start they would count as known, and
        could name the address of a third party.
        """
        here = self._dialled & self._transport.linked_peers()
        worked = [*(peer for peer in self._worked if peer in here), *reversed(self._worked)]
        order = dict.fromkeys((*worked, *self.known))
        return {peer: self.known[peer] for peer in order if peer in self.known and not self._is_stranger(peer)}

    def _trouble(self, what: str, error: PeerError) -> None:
        """Report what the directory failed to do, once until it succeeds again."""
        text = f"could not {what}: {error}"
        if text != self._troubles.get(what):
            self._report("directory", text)
        self._troubles[what] = text

    def _hang_up_on_unneeded(self) -> None:
        """Close links that this peer dialled and has not needed for a while; the dialler decides."""
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
                del self._unneeded_since[peer]  # if it is linked again, its time starts anew

    async def _hang_up_on_strangers(self) -> None:
        """Close links of strangers while there are too many: each time the newest one of the busiest address."""
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
        """Return whether `peer` may be dialled; a stranger only after its retry pause and within the dial budget."""
        if not self._is_stranger(peer):
            return True
        is_over = now - attempt.failed_at >= STRANGER_RETRY_SECONDS
        return is_over and self._dials.admits(self.known[peer], now)

    def _may_leave_it_to(self, peer: PeerId) -> bool:
        """Return whether `peer` can dial this one but most likely cannot be dialled itself."""
        record = self._records.get(peer)
        return record is not None and not record.can_be_dialled and self._record().can_be_dialled

    async def _dial(self, peer: PeerId) -> None:
        loop = asyncio.get_running_loop()
        attempt, addresses = self._attempts.get(peer), self.known.get(peer)
        if attempt is None or addresses is None:
            return  # displaced by other peers since it was due
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
                self._report("link", str(error) if name in str(error) else f"could not reach {name}: {error}")
        is_theirs = attempt.linked_at is None and self._may_leave_it_to(peer)
        last = LAST_RETRY_SECONDS if self._transport.linked_peers() else LAST_ALONE_RETRY_SECONDS
        attempt.not_before = loop.time() + max(min(attempt.pause, last), LEAVE_TO_THEM_SECONDS if is_theirs else 0.0)
        attempt.pause = min(2 * attempt.pause, LAST_RETRY_SECONDS)
