"""Contact with other peers: keep the printed invite current, and report whether any known peer answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from p2p_diloco.config.invite import format_invite, fresh_invite, parse_peer_address
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.node.link_keeper import LinkKeeper
from p2p_diloco.node.manifest_fetch import format_troubles
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.rate import counted
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.transport.link import Transport
from p2p_diloco.wording import join_line

LONELY_SECONDS = 60.0
"""A peer without any link for this long reports what happened at each known address."""
INVITE_SECONDS = 600.0
"""Minimum time between two printed invites."""


class Contact:
    """Watches the invite and the first contact. Call `watch` about once a second, after updating the addresses.

    Args:
        known: peers that this one can ask, with their addresses.
        has_met_somebody: whether one of them has answered.
        own_model: whether others join from their own training loop.
        has_seen_outsiders: returns whether a peer outside this network was ever linked.
    """

    def __init__(
        self,
        transport: Transport,
        keeper: LinkKeeper,
        engine: PeerEngine,
        reporter: StatusReporter,
        *,
        known: Mapping[PeerId, tuple[str, ...]],
        has_met_somebody: bool,
        own_model: bool,
        has_seen_outsiders: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._keeper = keeper
        self._engine = engine
        self._reporter = reporter
        self._known = known
        self._own_model = own_model
        self._began = asyncio.get_running_loop().time()
        self._is_settled = has_met_somebody or not known
        self._is_lonely = False
        self._has_seen_outsiders = has_seen_outsiders
        self._is_told_of_outside = engine.me.trains or not transport.listen_ports()
        self._printed: frozenset[PeerId] = frozenset()
        self._printed_at = float("-inf")

    def watch(self) -> None:
        """Update the invite in the status, report it if it names new peers, and report the first answer, or none."""
        now = asyncio.get_running_loop().time()
        self._renew_invite(now)
        if not self._is_settled:
            self._watch_for_answer(now)
        if not self._is_told_of_outside and now - self._began >= LONELY_SECONDS:
            self._is_told_of_outside = True
            if not self._has_seen_outsiders():
                self._report_no_outsider()

    def _renew_invite(self, now: float) -> None:
        peers = (self._reporter.facts.addresses, *self._keeper.invited())
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
            failures = {peer: text for peer, text in self._keeper.failures.items() if peer in known}
            self._reporter.report(
                "link",
                f"no answer within {LONELY_SECONDS:.0f} s from {counted(len(known), 'known peer')} "
                f"({format_troubles(failures)}); still trying; if they are gone for good, restart with an invite "
                "printed by `p2p-diloco status` on a member",
            )
