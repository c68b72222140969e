"""A roster as what differs from its parent: how proposals and new certificates travel among members.

Members keep their places from roster to roster, so a child is its parent's list in a few runs with newcomers between
them. A run is `(first, count)` over one row of members: those of the parent, then those that it lacks. Any list in any
order can be written so; the fewer changes, the shorter. A newly drawn grid changes every place, by a rule that both
ends know: then only who is on the list is told, and the rule puts it in order. What comes out must have the digest
that the difference names, so a wrong one is never mistaken for a roster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest
from p2p_diloco.protocol.ballot import Proposal
from p2p_diloco.protocol.grid import grid_order
from p2p_diloco.protocol.member import MEMBER, Member
from p2p_diloco.protocol.roster import MOST_MEMBERS, ROSTER_LAYOUT, CertifiedRoster, Roster
from p2p_diloco.protocol.wire import (
    DIGEST,
    FLAG,
    SIGNATURE,
    U16,
    U64,
    Field,
    Layout,
    many,
    pair,
    put_fields,
    record,
    take_fields,
)

Run = tuple[int, int]
"""First place and count, over the parent's members and then the newcomers."""


@dataclass(frozen=True, kw_only=True)
class RosterDelta:
    """A roster for those who know its parent.

    Attributes:
        digest: of the roster that is meant.
        rest: that roster without its members.
        newcomers: members that the parent does not list just so: who is new, came again, or can be dialled since.
        runs: the members, in order.
        is_redrawn: the order is not that of the runs but `grid_order`'s.
    """

    digest: Digest
    rest: Roster
    newcomers: tuple[Member, ...]
    runs: tuple[Run, ...]
    is_redrawn: bool

    # No slots: an object that passes through many hands in one process is rebuilt once.
    @cached_property
    def _rebuilt(self) -> list[Roster]:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalDelta:
    """A `Proposal` on its way to members of the parent of its roster; the signature is the proposal's."""

    ballot: int
    delta: RosterDelta
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedDelta:
    """A `CertifiedRoster` on its way to members of its parent; voters go by their places there."""

    delta: RosterDelta
    ballot: int
    votes: tuple[tuple[int, bytes], ...]


_REST_LAYOUT: Layout = tuple((name, field) for name, field in ROSTER_LAYOUT if name != "members")
_REST = Field(
    put=lambda out, rest: put_fields(out, rest, _REST_LAYOUT),
    take=lambda reader: Roster(members=(), **take_fields(reader, _REST_LAYOUT)),
    smallest=sum(field.smallest for _, field in _REST_LAYOUT),
)
_DELTA_LAYOUT: Layout = (
    ("digest", DIGEST),
    ("rest", _REST),
    ("newcomers", many(MEMBER, MOST_MEMBERS)),
    ("runs", many(pair(U16, U16), MOST_MEMBERS)),
    ("is_redrawn", FLAG),
)
_DELTA = record(RosterDelta, _DELTA_LAYOUT)
PROPOSAL_DELTA_LAYOUT: Layout = (("ballot", U64), ("delta", _DELTA), ("signature", SIGNATURE))
CERTIFIED_DELTA_LAYOUT: Layout = (
    ("delta", _DELTA),
    ("ballot", U64),
    ("votes", many(pair(U16, SIGNATURE), MOST_MEMBERS)),
)


def difference(roster: Roster, parent: Roster) -> RosterDelta:
    """Return `roster` as what differs from `parent`, which it names; `rebuild` undoes it exactly."""
    assert roster.parent == parent.digest(), "a roster differs from its own parent"
    known = {member: place for place, member in enumerate(parent.members)}
    newcomers = tuple(dict.fromkeys(member for member in roster.members if member not in known))
    known.update((member, place) for place, member in enumerate(newcomers, len(parent.members)))
    places = [known[member] for member in roster.members]
    # Only a new grid is worth the hashes; any other order is told as it is.
    is_redrawn = roster.regrid != parent.regrid and roster.members == _drawn(roster, roster.members)
    return RosterDelta(
        digest=roster.digest(),
        rest=replace(roster, members=()),
        newcomers=newcomers,
        runs=_runs(sorted(places) if is_redrawn else places),
        is_redrawn=is_redrawn,
    )


def rebuild(delta: RosterDelta, parent: Roster) -> Roster:
    """Return the roster that a difference stands for.

    Raises:
        PeerError: it differs from another roster than `parent`, names places that are not there or more members than
            a roster may have, or what comes out is not what it names.
    """
    if delta.rest.parent != parent.digest():
        raise PeerError(f"roster {delta.rest.k} comes as a difference to another roster than roster {parent.k}")
    kept = delta._rebuilt
    if not kept:
        kept.append(_rebuild(delta, parent))
    return kept[0]


def _rebuild(delta: RosterDelta, parent: Roster) -> Roster:
    row = (*parent.members, *delta.newcomers)
    name = f"roster {delta.rest.k}"
    total = sum(count for _, count in delta.runs)  # looked at before anything so long is made
    if total > MOST_MEMBERS:
        raise PeerError(f"{name} comes as a difference with {total} members; at most {MOST_MEMBERS} fit")
    end = max((first + count for first, count in delta.runs), default=0)
    if end > len(row):
        raise PeerError(f"{name} comes as a difference that takes place {end} of {len(row)}")
    members = tuple(chain.from_iterable(row[first : first + count] for first, count in delta.runs))
    roster = replace(delta.rest, members=_drawn(delta.rest, members) if delta.is_redrawn else members)
    if len(roster.peers()) != len(members):
        raise PeerError(f"{name} comes as a difference that lists a peer twice")
    if roster.digest() != delta.digest:
        raise PeerError(f"{name} is another one than its difference to roster {parent.k} names")
    return roster


def _drawn(roster: Roster, members: Sequence[Member]) -> tuple[Member, ...]:
    return grid_order(members, roster.run, roster.regrid)


def _runs(places: Sequence[int]) -> tuple[Run, ...]:
    """Return places as runs of consecutive ones."""
    runs: list[Run] = []
    for place in places:
        first, count = runs[-1] if runs else (place, 0)
        if place == first + count:
            runs[-1:] = [(first, count + 1)]
        else:
            runs.append((place, 1))
    return tuple(runs)


def proposal_delta(proposal: Proposal, parent: Roster) -> ProposalDelta:
    """Return a proposal as it travels to members of `parent`, the roster in force."""
    delta = difference(proposal.roster, parent)
    return ProposalDelta(ballot=proposal.ballot, delta=delta, signature=proposal.signature)


def rebuild_proposal(word: ProposalDelta, parent: Roster) -> Proposal:
    """Return the proposal that came as a difference to `parent`; raises PeerError as `rebuild` does."""
    return Proposal(ballot=word.ballot, roster=rebuild(word.delta, parent), signature=word.signature)


def certified_delta(certified: CertifiedRoster, parent: Roster) -> CertifiedDelta | None:
    """Return a certified roster as it travels to members of `parent`; None when somebody else has voted."""
    places = [(parent.position(peer), signature) for peer, signature in certified.votes]
    votes = tuple((place, signature) for place, signature in places if place is not None)
    if len(votes) < len(places):
        return None
    return CertifiedDelta(delta=difference(certified.roster, parent), ballot=certified.ballot, votes=votes)


def rebuild_certified(word: CertifiedDelta, parent: Roster) -> CertifiedRoster:
    """Return the certified roster that came as a difference to `parent`.

    Raises:
        PeerError: as `rebuild`, or a vote is from a place that the parent does not have.
    """
    roster = rebuild(word.delta, parent)
    last, num_members = max((place for place, _ in word.votes), default=-1), len(parent.members)
    if last >= num_members:
        raise PeerError(f"roster {roster.k} holds a vote of member {last} of a parent with {num_members} members")
    votes = tuple((parent.members[place].peer, signature) for place, signature in word.votes)
    return CertifiedRoster(roster=roster, ballot=word.ballot, votes=votes)
