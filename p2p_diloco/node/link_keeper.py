"""Keeps this peer announced in the directory, and linked to the peers of the run that it needs and can dial."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, format_peer_id, short_peer_id
from p2p_diloco.node.peer_records import OwnRecord, PeerRecords
from p2p_diloco.node.reach_keeper import seen_hosts
from p2p_diloco.transport.directory import RECORD_LIFETIME_SECONDS, Directory, PeerRecord, PeerRole
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
MOST_BOOTSTRAPS_ON_TRUST = 2
"""Maximum number of bootstrap peers in an invite that this peer has not dialled: any peer may claim to be one."""
LOOK_SECONDS = 1.0
FEW_LINKS = 2
"""Number of links below which a peer is cut off: it then accepts a link to any peer."""
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

    def begin(self, now: float) -> None:
        """Record that a dial begins: it is not repeated while it may go on."""
        self.not_before = now + DIAL_SECONDS + self.pause

    def link(self, now: float) -> None:
        self.linked_at = now

    def fail(self, now: float) -> None:
        self.linked_at, self.failed_at = None, now

    def wait(self, now: float, *, most_seconds: float, least_seconds: float) -> None:
        """Dial again after the pause, within these bounds; the next pause is longer."""
        self.not_before = now + max(min(self.pause, most_seconds), least_seconds)
        self.pause = min(2 * self.pause, LAST_RETRY_SECONDS)


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
        return self._looks < CALM_AFTER_LOOKS or now - self._looked_at >= self._pause

    def looked(self, now: float) -> None:
        self._looks += 1
        self._looked_at = now
        if self._looks > CALM_AFTER_LOOKS:
            self._pause = min(2 * self._pause, CONTENT_LOOK_SECONDS)

    def hurry(self) -> None:
        """Shorten the pause to `CALM_LOOK_SECONDS` again, because something is missing."""
        self._pause = CALM_LOOK_SECONDS


class DirectoryWatch:
    """Announces this peer in the directory and reads it; reports each failure once until it succeeds again."""

    def __init__(
        self,
        directory: Directory,
        own: OwnRecord,
        *,
        unix_seconds: Callable[[], float],
        report: Callable[[str, str], None],
    ) -> None:
        self.pace = LookPace()
        self._directory = directory
        self._own = own
        self._unix_seconds = unix_seconds
        self._report = report
        self._announced_at = float("-inf")
        self._announced: tuple[str, ...] | None = None
        self._troubles: dict[str, str] = {}

    async def announce(self, addresses: tuple[str, ...]) -> None:
        """Publish this peer's record, if it is due or the addresses at which the transport listens have changed."""
        now = self._unix_seconds()
        if now - self._announced_at < ANNOUNCE_SECONDS and addresses == self._announced:
            return
        try:
            await self._directory.announce(self._own.issue(), now + RECORD_LIFETIME_SECONDS)
            self._announced_at, self._announced = now, addresses
            self._troubles.pop("announce this peer", None)
        except PeerError as error:
            self._trouble("announce this peer", error)

    def announce_again(self) -> None:
        """Publish the record at the next call, because it has changed."""
        self._announced = None

    async def look_if_due(self) -> tuple[PeerRecord, ...]:
        """Return the records in the directory, if a look is due."""
        now = asyncio.get_running_loop().time()
        if not self.pace.is_due(now):
            return ()
        self.pace.looked(now)
        try:
            records = await self._directory.peers()
        except PeerError as error:
            self.pace.hurry()
            self._trouble("look for peers", error)
            return ()
        self._troubles.pop("look for peers", None)
        return tuple(records)

    def _trouble(self, what: str, error: PeerError) -> None:
        text = f"could not {what}: {error}"
        if text != self._troubles.get(what):
            self._report("directory", text)
        self._troubles[what] = text


class StrangerLimit:
    """Closes links of strangers while there are too many: each time the newest one of the busiest address."""

    def __init__(self, transport: Transport, is_stranger: Callable[[PeerId], bool]) -> None:
        self._transport = transport
        self._is_stranger = is_stranger
        self._arrivals: dict[PeerId, None] = {}  # linked peers, latest last
        self._turned_away: dict[PeerId, float] = {}

    def is_welcome(self, peer: PeerId) -> bool:
        """Return whether a peer may link; a stranger whose link was closed may not, for some time."""
        until = self._turned_away.get(peer)
        return until is None or asyncio.get_running_loop().time() >= until or not self._is_stranger(peer)

    async def hang_up(self) -> None:
        linked = self._transport.linked_peers()
        new = sorted(linked - self._arrivals.keys())
        self._arrivals = dict.fromkeys([*(peer for peer in self._arrivals if peer in linked), *new])
        strangers = [peer for peer in self._arrivals if self._is_stranger(peer)]
        if len(strangers) <= MOST_LINKS:
            return
        hosts = await seen_hosts(self._transport, DIAL_SECONDS)
        if hosts is None:
            return
        now = asyncio.get_running_loop().time()
        self._turned_away = {peer: until for peer, until in self._turned_away.items() if now < until}
        for peer in surplus_links(strangers, hosts, MOST_LINKS):
            self._turned_away[peer] = now + STRANGER_RETRY_SECONDS
            self._transport.hang_up(peer)


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
        self.failures: dict[PeerId, str] = {}
        """Why the last dial to each peer failed."""
        self._transport = transport
        self._report = report
        self._wanted_of = wanted
        self._own = OwnRecord(record, unix_seconds=unix_seconds, report=report)
        self._records = PeerRecords(
            self._own,
            transport=transport,
            given=known,
            unix_seconds=unix_seconds,
            is_unknown_to_run=is_stranger,
            forgotten=self._forget,
        )
        self._is_stranger = self._records.is_stranger
        self._directory = DirectoryWatch(directory, self._own, unix_seconds=unix_seconds, report=report)
        self._strangers = StrangerLimit(transport, self._is_stranger)
        transport.serve(is_welcome=self._strangers.is_welcome)
        self._dials = DialBudget()
        self._unneeded_since: dict[PeerId, float] = {}
        self._dialled: set[PeerId] = set()
        self._worked: dict[PeerId, None] = {}  # peers that answered a dial, latest last
        self._attempts: dict[PeerId, _Attempt] = {}
        self._wake = asyncio.Event()
        self._linked_before: frozenset[PeerId] = frozenset()

    @property
    def known(self) -> dict[PeerId, tuple[str, ...]]:
        return self._records.known

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._directory.announce(self._transport.listen_addresses())
                if self._is_somebody_lacking():
                    self._directory.pace.hurry()
                for record in await self._directory.look_if_due():
                    self._records.learn(record)
                self._hang_up_on_unneeded()
                await self._strangers.hang_up()
                for peer in self._due():
                    tasks.create_task(self._dial(peer), name=f"dial {short_peer_id(peer)}")
                await self._pause(self._directory.pace.turn_seconds())

    def _wanted(self) -> frozenset[PeerId] | None:
        return self._wanted_of(self._records.current())

    async def _pause(self, seconds: float) -> None:
        """Wait until the next turn, or until a new peer is introduced."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def announce_again(self) -> None:
        """Publish the record again soon, because it has changed."""
        self._directory.announce_again()
        self._wake.set()

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
        return bool(wanted - linked - self._records.of(wanted).keys() - self.known.keys() - {self._transport.peer})

    def clock_corrected(self) -> None:
        """Judge the times of records anew: this machine's clock was found to be wrong."""
        self._records.clock_corrected()
        self.announce_again()

    def _forget(self, peer: PeerId) -> None:
        for remembered in (self._attempts, self._worked, self.failures):
            remembered.pop(peer, None)

    def introductions(self) -> tuple[bytes, ...]:
        return self._records.introductions()

    def introduced(self, records: tuple[bytes, ...]) -> None:
        """Take records from a peer, and dial new peers soon."""
        if self._records.introduced(records):
            self._wake.set()

    def invited(self) -> tuple[tuple[str, ...], ...]:
        """Return the addresses of each other peer that an invite may name, best first.

        These are the peers that this one has dialled and is linked to, if they claim that they can be dialled: their
        addresses work from here. Bootstrap peers come first, then those known longest; a few bootstrap peers that have
        dialled this peer come last.
        """
        linked = self._transport.linked_peers()
        here = {peer: record for peer, record in self._records.of(linked).items() if record.can_be_dialled}
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
                attempt.begin(now)
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
        return record is not None and not record.can_be_dialled and self._own.can_be_dialled

    async def _dial(self, peer: PeerId) -> None:
        loop = asyncio.get_running_loop()
        attempt, addresses = self._attempts.get(peer), self.known.get(peer)
        if attempt is None or addresses is None:
            return  # displaced by other peers since it was due
        try:
            await self._transport.dial(peer, addresses, loop.time() + DIAL_SECONDS)
            attempt.link(loop.time())
            self._dialled.add(peer)
            self._worked.pop(peer, None)
            self._worked[peer] = None
            self.failures.pop(peer, None)
        except PeerError as error:
            self.failures[peer] = str(error)
            attempt.fail(loop.time())
            if attempt.pause == FIRST_RETRY_SECONDS and not self._is_stranger(peer):
                name = short_peer_id(peer)
                self._report("link", str(error) if name in str(error) else f"could not reach {name}: {error}")
        is_theirs = attempt.linked_at is None and self._may_leave_it_to(peer)
        last = LAST_RETRY_SECONDS if self._transport.linked_peers() else LAST_ALONE_RETRY_SECONDS
        least = LEAVE_TO_THEM_SECONDS if is_theirs else 0.0
        attempt.wait(loop.time(), most_seconds=last, least_seconds=least)
