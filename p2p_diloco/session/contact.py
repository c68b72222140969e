"""Contact with other peers: where this one can be reached, links, the printed invite, and whether anybody answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from p2p_diloco.config.invite import format_invite, fresh_invite, parse_peer_address
from p2p_diloco.errors import StateError
from p2p_diloco.ids import PeerId, format_peer_id, short_peer_id
from p2p_diloco.node.clock_keeper import ClockWatch
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.link_keeper import LinkKeeper
from p2p_diloco.node.manifest_fetch import format_troubles
from p2p_diloco.node.reach_keeper import ReachKeeper, announced
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.reach import Standing
from p2p_diloco.rate import counted
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.storage.run_folder import RunFolder
from p2p_diloco.transport.addresses import without_loopback
from p2p_diloco.transport.directory import Directory, PeerRecord, PeerRole, sign_record
from p2p_diloco.transport.link import Transport
from p2p_diloco.transport.reach_probe import is_own_host
from p2p_diloco.wording import join_line

LONELY_SECONDS = 60.0
"""A peer without any link for this long reports what happened at each known address."""
INVITE_SECONDS = 600.0
"""Minimum time between two printed invites."""
KEPT_OFFSET_SECONDS, KEEP_CLOCK_SECONDS = 0.05, 10.0
"""Write the offset between swarm time and wall clock after a change of this much, and at most this often."""


class Contact:
    """Keeps links and announces this peer. Run `keeper` and `reach`, and call `watch` about once a second.

    Args:
        wall: this machine's wall clock.
        known: peers that this one can ask, with their addresses.
        records: signed records of peers to dial.
        has_met_somebody: whether a known peer has answered.
        own_model: whether others join from their own training loop.

    Attributes:
        clocks: compares this machine's wall clock with those of others.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        engine: PeerEngine,
        reporter: StatusReporter,
        *,
        key: SigningKey,
        now: Callable[[], float],
        wall: Callable[[], float],
        known: dict[PeerId, tuple[str, ...]],
        records: tuple[bytes, ...],
        has_met_somebody: bool,
        own_model: bool,
    ) -> None:
        self._transport = transport
        self._engine = engine
        self._reporter = reporter
        self._key = key
        self._wall = wall
        self._known = known
        self._own_model = own_model
        self.clocks = ClockWatch(key.peer)
        self.keeper = LinkKeeper(
            transport=transport,
            directory=directory,
            record=self._record,
            known=known,
            unix_seconds=self._unix_seconds,
            report=reporter.report,
            wanted=engine.wanted_links,
            is_stranger=engine.is_unknown,
        )
        self.reach = ReachKeeper(
            transport=transport,
            engine=engine,
            is_own_host=is_own_host,
            now=now,
            verify=is_signed_by,
            on_change=self._on_reach_changed,
        )
        self.keeper.introduced(records)
        self._began = asyncio.get_running_loop().time()
        self._is_settled = has_met_somebody or not known
        self._is_lonely = False
        self._reports_outside = engine.me.trains or not transport.listen_ports()
        self._printed: frozenset[PeerId] = frozenset()
        self._printed_at = float("-inf")

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses to announce: proved ones first, loopback only if there is nothing else."""
        listening = without_loopback(self._transport.listen_addresses())
        return announced(self.reach.addresses, listening, f"/p2p/{format_peer_id(self._key.peer)}")

    def _on_reach_changed(self, standing: Standing) -> None:
        self._reporter.report_reach(standing, self._transport.listen_ports(), trains=self._engine.me.trains)
        self.keeper.announce_again()

    def _record(self) -> PeerRecord:
        return sign_record(
            self._key,
            run=self._engine.rules.run,
            addresses=self.addresses(),
            can_be_dialled=self.reach.standing.is_reachable,
            role=PeerRole.TRAINER if self._engine.me.trains else PeerRole.BOOTSTRAP,
            issued_at=self._unix_seconds(),
        )

    def _unix_seconds(self) -> float:
        """Return the time to compare with others' records: this machine's, corrected if most others' differs."""
        return self._wall() + self.clocks.correction_seconds

    def watch(self) -> None:
        """Update the invite in the status, report it if it names new peers, and report the first answer, or none."""
        now = asyncio.get_running_loop().time()
        self._renew_invite(now)
        if not self._is_settled:
            self._watch_for_answer(now)
        if not self._reports_outside and now - self._began >= LONELY_SECONDS:
            self._reports_outside = True
            if not self.reach.has_seen_outsiders:
                self._report_no_outsider()

    def _renew_invite(self, now: float) -> None:
        peers = (self._reporter.latest.addresses, *self.keeper.invited())
        invite = fresh_invite(self._engine.rules.run, peers, self._engine.book.in_force_digest)
        text = format_invite(invite) if invite.bootstraps else ""
        self._reporter.note(invite=text)
        named = frozenset(parse_peer_address(address)[1] for address in invite.bootstraps)
        is_news = bool(named - self._printed - {self._transport.peer})
        if is_news and (self._engine.ready or not self._engine.me.trains) and now - self._printed_at >= INVITE_SECONDS:
            self._printed, self._printed_at = named, now
            line = join_line(text, own_model=self._own_model)
            self._reporter.report("invite", f"others join with: {line}")

    def _report_no_outsider(self) -> None:
        """Report that others may be unable to join; nothing is wrong if all machines are on this network."""
        self._reporter.report(
            "reach",
            f"nobody outside this network has reached this bootstrap peer within {LONELY_SECONDS:.0f} s; if others "
            f"cannot join, forward TCP port {self._transport.listen_ports()[0]} on the router to this machine and give "
            "its public address with --public-name",
        )

    def _watch_for_answer(self, now: float) -> None:
        linked = self._transport.linked_peers()
        known = self._known
        if linked:
            names = ", ".join(map(short_peer_id, sorted(linked & known.keys()) or sorted(linked)))
            self._reporter.report(
                "link", f"{names} answered, of {counted(len(known), 'peer')} whose addresses were known"
            )
            self._is_settled = True
        elif now - self._began >= LONELY_SECONDS and not self._is_lonely:
            self._is_lonely = True
            failures = {peer: text for peer, text in self.keeper.failures.items() if peer in known}
            self._reporter.report(
                "link",
                f"no answer within {LONELY_SECONDS:.0f} s from {counted(len(known), 'known peer')} "
                f"({format_troubles(failures)}); still trying; if they are gone for good, restart with an invite "
                "printed by `p2p-diloco status` on a member",
            )


class NextStart:
    """Saves what the next start of a peer needs: the clock offset, and the addresses at which other peers were reached.

    It writes changed values in a separate thread.

    Args:
        soon: runs a call in that thread.
        refused: called there with a sentence if the addresses cannot be written; the peer continues.
    """

    def __init__(
        self, folder: RunFolder, *, soon: Callable[[Callable[[], None]], object], refused: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._soon = soon
        self._refused = refused
        self._offset, self._offset_at = folder.recall_clock_offset(), float("-inf")
        self._addresses: dict[PeerId, tuple[str, ...]] = {}

    def keep(self, clock: SwarmClock, addresses: dict[PeerId, tuple[str, ...]], moment: float) -> None:
        """Save both if they have changed; call this about once a second.

        Args:
            addresses: addresses by peer, the best first.
            moment: seconds of any monotonic clock.
        """
        offset = clock.wall_offset_seconds
        has_moved = abs(offset - self._offset) > KEPT_OFFSET_SECONDS
        if clock.is_settled and has_moved and moment - self._offset_at >= KEEP_CLOCK_SECONDS:
            self._offset, self._offset_at = offset, moment
            self._soon(partial(self._folder.keep_clock_offset, offset))
        if list(addresses.items()) != list(self._addresses.items()):
            self._addresses = addresses
            self._soon(partial(self._keep_addresses, addresses))

    def _keep_addresses(self, known: dict[PeerId, tuple[str, ...]]) -> None:
        try:
            self._folder.keep_addresses(known)
        except StateError as error:
            self._refused(str(error))
