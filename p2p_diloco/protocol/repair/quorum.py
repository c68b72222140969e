"""The peers whose answers about the state count here, and how many of them must agree.

A peer takes a tip (the log position of a span) or the bytes of a span from others only if a majority named them. The
claim of one peer is a reason to ask, never enough. A peer's *witnesses* are the peers whose answers count:

- In one row: the other voters of the roster in force. If all of them report that they hold nothing: all other members.
- In a grid: the members of its row and column. A newcomer may be unable to reach the row that it would be assigned to.
  So once it has listened for a while, its witnesses are the voters if it reaches two of them, else all members.
- If a peer cannot be dialled, only members that it can dial count.

Three more rules cover special cases:

- Before roster 1, the founder is the only member, so its answer is enough. Later, it is enough only for the initial
  state: spans at height 0.
- A member that has lost its state does not wait for others that have none either: of those that it reaches,
  only holders count.
- A peer that is not on the roster in force must begin somewhere, and may be unable to reach most members. Once it has
  listened for a while, more than half of those that it reaches are enough. A member always needs more than half of all.

A ready member counts itself too: of two members, neither can replace the other's state; of four, no two can replace
that of the others. One without a vote does not count itself beside the electorate once it cannot join its log to the
others'.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.span_log import GENESIS_ROUND, SpanHead

ENOUGH_VOTERS = 2
"""Number of voters that must be reached for voters alone to count. One answer is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The peers whose answers count here, and how many of them must agree.

    Attributes:
        witnesses: all peers that count, linked or not.
        holders: witnesses that are linked and alive, and report that they hold the state.
        empty: witnesses that are linked and alive, and report that they hold nothing.
        needed: number of witnesses that must agree; may be more than there are.
        founder: the only member of roster 0. Its answer is enough for spans that have absorbed no entry.
        founder_holds: whether the founder is linked and alive, and reports that it holds the state; a witness or not.
        signed: witnesses that are not linked, and have signed that they hold the state.
        indirect: witnesses that are not linked; they are asked through other peers.
        relays: linked peers that may have links to `indirect`.
        half: half of the number of peers that count, including this one if it counts.
        is_strict: whether only more than half of the electorate is accepted.
        is_few: whether less is accepted, because most of the electorate cannot be asked or lacks the state itself.
    """

    witnesses: frozenset[PeerId] = frozenset()
    holders: frozenset[PeerId] = frozenset()
    empty: frozenset[PeerId] = frozenset()
    needed: int = 1
    founder: PeerId | None = None
    founder_holds: bool = False
    signed: frozenset[PeerId] = frozenset()
    indirect: frozenset[PeerId] = frozenset()
    relays: tuple[PeerId, ...] = ()
    half: float = math.inf
    is_strict: bool = False
    is_few: bool = False

    @property
    def askable(self) -> list[PeerId]:
        """Return the peers that can be asked directly what they hold."""
        return sorted(
            self.holders | {self.founder} if self.founder is not None and self.founder_holds else self.holders
        )

    @property
    def only(self) -> PeerId | None:
        """Return the only witness, if there is just one: then there is no majority."""
        return next(iter(self.witnesses)) if len(self.witnesses) == 1 else None

    def are_enough(self, peers: Collection[PeerId]) -> bool:
        """Return whether `peers` are a majority."""
        return len((self.holders | self.signed).intersection(peers)) >= self.needed

    def are_most(self, peers: Collection[PeerId]) -> bool:
        """Return whether `peers` are more than half of all, for a span of which this peer has no sound copy."""
        return 2 * len(self.witnesses.intersection(peers)) > len(self.witnesses)

    def may_name(self, head: SpanHead, peers: Collection[PeerId]) -> bool:
        """Return whether a span may be taken at `head`, where `peers` hold it."""
        return self.are_enough(peers) or (is_start(head) and self.founder in peers)

    def sentence(self) -> str:
        """Return a sentence that names the witnesses in contact, and how many are needed."""
        names = ", ".join(map(short_peer_id, sorted(self.holders | self.signed))) or "none"
        return (
            f"in contact with {names} of the {len(self.witnesses)} members whose answers count; {self.needed} must "
            "name the same state before it is accepted"
        )

    def sentence_of_few(self) -> str:
        """Return the warning that most voters could not be asked, with the peers whose answers count instead."""
        names = ", ".join(map(short_peer_id, sorted(self.holders | self.signed))) or "nobody"
        return (
            f"most voters could not be reached, or lack the state themselves; relying on {names} instead; "
            f"{self.needed} of them must agree. If you do not trust them, leave and join again with a newer invite"
        )


class Quorums:
    """Those that count for tips, and for the bytes of spans. They change with contacts and rosters."""

    def __init__(self) -> None:
        self.tips = Quorum()
        self.contents = Quorum()
        """Usually the electorate, linked or not."""

    def set(self, tips: Quorum, contents: Quorum | None = None) -> None:
        """Set both; without `contents`, they are the same."""
        self.tips, self.contents = tips, contents if contents is not None else tips


def is_start(head: SpanHead) -> bool:
    """Return whether a span has absorbed no entry."""
    return head.height == 0 and head.round == GENESIS_ROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Contacts:
    """The peers that could answer this one, as far as it knows.

    Attributes:
        can_be_dialled: whether members that cannot be dialled can reach this peer.
        is_ready: whether this peer already holds the agreed state.
        roster: the roster in force here.
        grid: the grid of `roster`.
        gone: members that have left.
        linked: members, and the founder, that are linked and alive.
        holders: peers that are linked, alive and on our chain of rosters, and report that they hold some state.
        ready: holders that report that it is the agreed state.
        empty: peers that are linked and alive, and report that they hold nothing.
    """

    me: PeerId
    can_be_dialled: bool
    is_ready: bool
    roster: Roster
    grid: Grid
    founder: PeerId
    gone: Collection[PeerId] = ()
    linked: Collection[PeerId] = ()
    holders: Collection[PeerId] = ()
    ready: Collection[PeerId] = ()
    empty: Collection[PeerId] = ()

    @property
    def is_member(self) -> bool:
        return self.roster.member(self.me) is not None


def tip_quorum(contacts: Contacts, *, has_listened: bool) -> Quorum:
    """Return the peers whose answers about tips count.

    Args:
        has_listened: whether all peers that can be reached have had time to send a heartbeat.
    """
    me, roster, is_member = contacts.me, contacts.roster, contacts.is_member
    others = frozenset(
        member.peer
        for member in roster.members
        if member.peer != me and member.peer not in contacts.gone and (contacts.can_be_dialled or member.reduces)
    )
    voters, holders, empty = others & roster.voters, contacts.holders, contacts.empty
    if len(contacts.grid.rows) == 1:
        witnesses = voters if voters.difference(empty) else others
    elif is_member or not has_listened:
        witnesses = others & contacts.grid.neighbours(me)
    else:  # it may be unable to reach the row that it would be assigned to
        witnesses = voters if len(voters.intersection(holders)) >= ENOUGH_VOTERS else others
    if not witnesses.difference(empty) and contacts.founder in holders:
        witnesses = frozenset((contacts.founder,))  # no member holds a state to fetch
    reached = witnesses.intersection(holders)
    num_counted = len(witnesses)
    if is_member and contacts.is_ready:
        num_counted += 1  # it counts itself: of four, two against two are no majority
    elif has_listened:
        num_counted = len(witnesses.difference(empty) if is_member else reached)
    return Quorum(
        witnesses=witnesses,
        holders=reached,
        empty=witnesses.intersection(empty),
        needed=num_counted // 2 + 1,
        founder=contacts.founder,
        founder_holds=contacts.founder in holders,
    )


def content_quorum(
    contacts: Contacts,
    tips: Quorum,
    *,
    has_waited: bool,
    is_parted: bool,
    signed: Collection[PeerId],
    signed_empty: Collection[PeerId],
) -> Quorum:
    """Return the peers whose answers count for the bytes of spans that are fetched: normally the electorate.

    A member of a grid uses the quorum for `tips`. So does a peer that is not ready, has waited as long as a stall takes
    and could not ask most of the electorate. A member counts voters as asked only if they are ready: if most came back
    with old disks, each would wait for the others for ever.

    Args:
        has_waited: whether the peer has waited so long.
        is_parted: whether a tip here cannot be joined to the others', and voters without a link can be asked.
        signed, signed_empty: peers that have recently signed that they hold some state, or nothing. They count if they
            are not linked.
    """
    me, roster, is_member, is_ready = contacts.me, contacts.roster, contacts.is_member, contacts.is_ready
    voters = roster.voters - {me} - frozenset(contacts.gone)
    indirect = voters.difference(contacts.linked)
    empty = voters.intersection(contacts.empty) | indirect.intersection(signed_empty)
    empty = empty.difference(contacts.holders)
    if voters == empty or (len(contacts.grid.rows) > 1 and is_member):
        return tips
    holders, has_signed = voters.intersection(contacts.holders), indirect.intersection(signed)
    relays = tuple(sorted(contacts.linked, key=lambda peer: (peer not in voters, peer)))
    half = (len(voters) + (me in roster.voters)) / 2
    found = replace(tips, signed=has_signed, indirect=indirect, relays=relays, half=half)
    counts_itself = me in roster.voters or not is_parted
    num_counted = len(voters) + counts_itself if is_ready and is_member else len(voters) - len(empty)
    needed = num_counted // 2 + 1
    able = holders.intersection(contacts.ready) if is_member and contacts.ready else holders
    if not has_waited or is_ready or len(able | has_signed) >= needed:
        return replace(found, witnesses=voters, holders=holders, empty=empty, needed=needed, is_strict=not is_member)
    if not is_member and len(holders | has_signed) >= ENOUGH_VOTERS:
        found = replace(found, witnesses=voters, holders=holders, needed=len(holders | has_signed) // 2 + 1)
    return replace(found, is_few=True)
