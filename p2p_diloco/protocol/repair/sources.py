"""The peers that this one may fetch from, and those whose answers count here."""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.clock import Stopwatch
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.quorum import Contacts, content_quorum, tip_quorum
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.member import FULL_SHARE


class Sources:
    """Chooses among the peers in contact. A state machine without I/O.

    Only members and the founder can serve state, and only if they follow the chain of rosters in force here: the state
    of others may have to be abandoned. Strangers are not trusted.
    """

    def __init__(self, *, rules: RunRules, membership: Membership, linked: set[PeerId]) -> None:
        self._rules = rules
        self._membership = membership
        self._linked = linked
        self._listening = Stopwatch()
        """For how long a peer that holds the state has been in contact."""
        self._waiting = Stopwatch()
        """For how long the name of a tip or of bytes has been missing."""

    def set_back(self) -> None:
        self._listening, self._waiting = Stopwatch(), Stopwatch()

    def may_serve(self, peer: PeerId) -> bool:
        """Return whether a peer may serve state: a member of the roster in force, or the founder."""
        roster = self._membership.book.in_force
        return roster is not None and (roster.member(peer) is not None or peer == self._membership.book.founder)

    def holders(self, now: float) -> dict[PeerId, Heartbeat]:
        """Return linked peers that may serve state, and report that they hold some, with their heartbeats."""
        return {peer: beat for peer, beat in self._on_our_chain(now).items() if self.may_serve(peer)}

    def _on_our_chain(self, now: float) -> dict[PeerId, Heartbeat]:
        alive, book = self._membership.liveness.alive(now), self._membership.book
        return {
            peer: beat
            for peer, beat in sorted(alive.items())
            if beat.heads and peer in self._linked and book.is_on_chain(beat.roster)
        }

    def donors(self, now: float) -> list[PeerId]:
        """Return linked peers to fetch from: those that are ready or, if there are none, all that hold the state."""
        roster = self._membership.book.in_force
        if roster is None:
            return []
        holders = self.holders(now)
        members = [peer for peer in holders if roster.member(peer) is not None]
        ready = [peer for peer in members if holders[peer].ready]
        # The state of a founder that is not a member is old, unless it follows the run.
        return (ready or members) + [peer for peer, beat in holders.items() if peer not in members and beat.ready]

    def for_spans(self, now: float) -> list[PeerId]:
        """Return linked peers to fetch whole spans from. Spans are large, so thin lines are avoided.

        These are donors with bandwidth to spare or, if there are none, a founder that still holds the initial state. A
        founder that trains and is not ready is not a donor. It is asked only if there is no other, because it may hold
        what all members have lost.
        """
        holders, donors = self.holders(now), self.donors(now)
        wide = [peer for peer in donors if holders[peer].share == FULL_SHARE]
        return wide or [peer for peer, beat in holders.items() if not beat.trains] or donors or list(holders)

    def strangers(self, now: float) -> list[PeerId]:
        """Return the strangers that a lone member asks for entries until it is ready: all that report that they are.

        It may have lost its state, or returned to an older one, while peers that are not members hold the entries that
        it made since. Strangers are asked only for entries, which prove themselves. A lie about their tips costs time,
        so they are asked no longer than a stall takes. A ready member asks no stranger, because it cannot contribute to
        a span while it fetches entries for it.
        """
        roster, patience = self._membership.book.in_force, self._rules.stalled_cycles * self._rules.cycle_seconds
        is_alone = roster is not None and roster.peers() == {self._membership.local.peer}
        if not is_alone or self._membership.local.ready or self._listening.seconds(now) >= patience:
            return []
        return [peer for peer, beat in self._on_our_chain(now).items() if beat.ready]

    def is_donor(self, sender: PeerId, beat: Heartbeat, now: float) -> bool:
        """Return whether a peer on our chain, which has just sent `beat`, is one of the donors."""
        if not self.may_serve(sender):
            return False
        if beat.ready and not self._membership.declarations.has_left(sender, beat.incarnation):
            return bool(beat.heads) and sender in self._linked
        return sender in self.donors(now)

    # -- whose answers count

    def look(self, catch_up: CatchUp, now: float) -> None:
        """Update the peers whose answers count."""
        contacts = self._contacts(now)
        if contacts is None:
            return
        self._waiting.note(catch_up.lacks_names, now)
        listened_seconds = self._listening.note(bool(contacts.holders), now)
        tips = tip_quorum(contacts, has_listened=listened_seconds >= self._rules.silence_seconds)
        since = now - catch_up.rules.patience_seconds
        contents = content_quorum(
            contacts,
            tips,
            has_waited=self.has_waited(catch_up, now),
            is_parted=catch_up.differences.is_parted,
            signed=catch_up.indirect.signed(since, holds=True),
            signed_empty=catch_up.indirect.signed(since, holds=False),
        )
        catch_up.quorums.set(contents if contents.is_strict else tips, contents)

    def _contacts(self, now: float) -> Contacts | None:
        membership, book = self._membership, self._membership.book
        roster, grid = book.in_force, book.grid()
        if roster is None or grid is None:
            return None
        holders = self.holders(now)
        linked = {peer: beat for peer, beat in membership.liveness.alive(now).items() if peer in self._linked}
        left = (m.peer for m in roster.members if membership.declarations.has_left(m.peer, m.incarnation))
        return Contacts(
            me=membership.local.peer,
            can_be_dialled=membership.local.conditions.can_be_dialled,
            is_ready=membership.local.ready,
            roster=roster,
            grid=grid,
            founder=book.founder,
            gone=frozenset(peer for peer in left if peer not in holders),
            linked=[peer for peer in linked if self.may_serve(peer)],
            holders=holders,
            ready=[peer for peer, beat in holders.items() if beat.ready],
            empty=[peer for peer, beat in linked.items() if not beat.heads],
        )

    def has_waited(self, catch_up: CatchUp, now: float) -> bool:
        """Return whether names have been missing for as long as a stall takes, and all unlinked voters were asked."""
        is_long = self._waiting.seconds(now) >= self._rules.stalled_cycles * self._rules.cycle_seconds
        return is_long and catch_up.indirect.have_all_been_asked(catch_up.quorums.contents.indirect, now)
