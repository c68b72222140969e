"""The certified list of members: what it says, what makes it valid, which of two is in force, who leads the next one.

A roster is one link of a chain. Its certificate is a set of votes of members of its *parent*; so a newcomer is never
the truth, and a lead that dies leaves the old roster in force.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, sha256, short_peer_id
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.member import MEMBER, Member
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire import (
    DIGEST,
    FLAG,
    MOST_COUNTED,
    PEER,
    SIGNATURE,
    U8,
    U32,
    U64,
    Layout,
    many,
    optional,
    pair,
    record,
)
from p2p_diloco.protocol.wire import to_bytes as fields_to_bytes

MOST_MEMBERS = 2048
"""A certified roster of so many must fit one control frame with the votes that it needs: 85 bytes a member."""
MOST_QUOTED = 256
"""Good-byes that a lead quotes; each saves half a vote and takes 181 bytes."""
MOST_LEVELS = 12

Verify = Callable[[PeerId, bytes, bytes], bool]
"""`(signer, statement, signature) -> bool`; handed in, so that a lab of thousands of peers may use a cheap one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """A member's signed word that this incarnation leaves and will not vote again, and what it was bound to.

    Leaving lowers the majority, so it must be as good as a promise: a lead may quote it only where the leaver cannot
    have helped to certify another child (`is_quotable`).

    Attributes:
        parent, k: the roster in force at the leaver, and its place in the chain; zeros when it knew none.
        promised: highest ballot that the leaver promised for the child of `parent`, the ordinary way.
        voted: whether it has voted for a child of `parent`, the ordinary way.
    """

    run: Digest
    peer: PeerId
    incarnation: int
    parent: Digest
    k: int
    promised: int
    voted: bool
    signature: bytes

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return b"good-bye" + fields_to_bytes(self, GOODBYE_LAYOUT[:-1])


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The members of a run from one certificate to the next.

    Attributes:
        run: digest of the manifest.
        genesis: digest over the content digests of all spans at founding; the same along a chain.
        parent: digest of the roster before; `ZERO_DIGEST` for the founding one.
        k: position in the chain, 0 for the founding one.
        epoch: how often the chain went on without a majority.
        level: 0 when a majority certified it; n when a share of 1 / 2^(n+1) did, after n waits (`degraded`).
        cycle: cycle in which it was proposed.
        regrid: counts re-drawings of the grid; fixes the order of members.
        members: in grid order.
        helper: a peer that leads, reduces with weight 0 and passes entries on while no member can be dialled; not
            counted. A run whose members are all at home behind NAT has no other place to meet.
        goodbyes: of members of the parent; they do not count when the majority is taken.
        included_total: contributions included in entries since founding, as the lead has seen them; never falls.
    """

    run: Digest
    genesis: Digest
    parent: Digest
    k: int
    epoch: int
    level: int
    cycle: int
    regrid: int
    members: tuple[Member, ...]
    helper: PeerId | None
    goodbyes: tuple[Goodbye, ...]
    included_total: int

    def digest(self) -> Digest:
        """Return the name under which entries and children refer to this roster."""
        return self._digest

    # No slots: digest and members are asked for with every message, and a roster never changes.
    @cached_property
    def _digest(self) -> Digest:
        return sha256(b"roster", fields_to_bytes(self, ROSTER_LAYOUT))

    @cached_property
    def _places(self) -> dict[PeerId, int]:
        return {member.peer: place for place, member in reversed(list(enumerate(self.members)))}

    def member(self, peer: PeerId) -> Member | None:
        """Return the membership of `peer`, or None."""
        place = self._places.get(peer)
        return self.members[place] if place is not None else None

    def position(self, peer: PeerId) -> int | None:
        """Return the place of `peer` in grid order, or None."""
        return self._places.get(peer)

    def peers(self) -> frozenset[PeerId]:
        """Return the peers of all members."""
        return self._peers

    @cached_property
    def _peers(self) -> frozenset[PeerId]:
        return frozenset(member.peer for member in self.members)

    def hub(self) -> PeerId | None:
        """Return the helper while no member can be dialled, else None."""
        return None if any(member.can_be_dialled for member in self.members) else self.helper

    def is_degraded(self) -> bool:
        """Tell whether less than a majority of the parent certified it."""
        return self.level > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedRoster:
    """A roster with the votes that make it valid, all for the same ballot."""

    roster: Roster
    ballot: int
    votes: tuple[tuple[PeerId, bytes], ...]

    def num_bytes(self) -> int:
        """Return how many bytes it takes in a message."""
        return len(fields_to_bytes(self, CERTIFIED_LAYOUT))


GOODBYE_LAYOUT: Layout = (
    ("run", DIGEST),
    ("peer", PEER),
    ("incarnation", U32),
    ("parent", DIGEST),
    ("k", U64),
    ("promised", U64),
    ("voted", FLAG),
    ("signature", SIGNATURE),
)
ROSTER_LAYOUT: Layout = (
    ("run", DIGEST),
    ("genesis", DIGEST),
    ("parent", DIGEST),
    ("k", U64),
    ("epoch", U32),
    ("level", U8),
    ("cycle", U64),
    ("regrid", U32),
    ("members", many(MEMBER, MOST_MEMBERS)),
    ("helper", optional(PEER)),
    ("goodbyes", many(record(Goodbye, GOODBYE_LAYOUT), MOST_MEMBERS)),
    ("included_total", U64),
)
CERTIFIED_LAYOUT: Layout = (
    ("roster", record(Roster, ROSTER_LAYOUT)),
    ("ballot", U64),
    ("votes", many(pair(PEER, SIGNATURE), MOST_MEMBERS)),
)


def vote_statement(roster_digest: Digest, ballot: int) -> bytes:
    """Return the bytes that a member signs when it votes."""
    return b"vote" + roster_digest + ballot.to_bytes(8, "little")


def founding_roster(run: Digest, genesis: Digest, founder: Member, cycle: int = 0) -> Roster:
    """Return roster 0: the founder alone, which helps until roster 1 is certified.

    Args:
        genesis: digest over the content digests of all spans at the start.
        cycle: cycle in which the run is founded; a run founded before its round 0 begins in cycle 0.
    """
    return Roster(
        run=run,
        genesis=genesis,
        parent=ZERO_DIGEST,
        k=0,
        epoch=0,
        level=0,
        cycle=max(cycle, 0),
        regrid=0,
        members=(founder,),
        helper=founder.peer,
        goodbyes=(),
        included_total=0,
    )


def founding_statement(roster_digest: Digest) -> bytes:
    """Return the bytes that the organiser signs to found a run."""
    return b"found" + roster_digest


def seniority(roster: Roster) -> tuple[int, int, int, bytes]:
    """Return the key by which one of any two rosters is in force: the greater.

    A child is always senior to its parent, because its sum never falls and its k grows. Of two branches the one whose
    entries included more contributions wins, then the longer, then the smaller digest. A total order over rosters
    alone needs no knowledge of the fork point, and two sides that meet cannot swap sides for ever: sums only grow.
    """
    complement = bytes(255 - byte for byte in roster.digest())
    return (roster.included_total, roster.k, roster.cycle, complement)


def counted_members(parent: Roster, goodbyes: Iterable[Goodbye], level: int) -> frozenset[PeerId]:
    """Return whose votes count for a child of `parent`.

    Good-byes are honoured in the ordinary way only: when everybody has said good-bye, the degraded way must still be
    open to those who come back.
    """
    if level:
        return parent.peers()
    gone = {(word.peer, word.incarnation) for word in goodbyes}
    return frozenset(m.peer for m in parent.members if (m.peer, m.incarnation) not in gone)


def is_quotable(word: Goodbye, parent: Roster, parent_digest: Digest, ballot: int) -> bool:
    """Tell whether a child of `parent` may quote a good-bye in `ballot`, and so do without the leaver's vote.

    It may when the leaver was gone before `parent` was in force there, or had not voted on its child nor promised a
    higher ballot. Without this two leavers could certify one child, go, and leave a minority that certifies another.
    """
    if word.k < parent.k:
        return True
    return word.parent == parent_digest and not word.voted and word.promised <= ballot


def votes_needed(num_counted: int, level: int) -> int:
    """Return how many votes certify: more than half, or from level 1 on a quarter, an eighth, …, at least one."""
    if level == 0:
        return num_counted // 2 + 1
    return max(1, -((-num_counted) >> (level + 1)))


def most_included(parent: Roster, cycle: int, rules: RunRules) -> int:
    """Return what a child of `parent` from `cycle` may count: each member once in each span and cycle since."""
    cycles = cycle - parent.cycle + 1  # the parent's own one, too, may have been counted by its child only
    return min(parent.included_total + len(parent.members) * sum(rules.num_spans) * cycles, MOST_COUNTED)


def check_certificate(child: CertifiedRoster, parent: Roster, verify: Verify, rules: RunRules | None = None) -> None:
    """Check that `child` follows `parent` and that enough members of `parent` have voted for it.

    Raises:
        PeerError: it does not; the text says why.
    """
    roster = child.roster
    check_child(roster, parent, child.ballot, verify, rules)
    counted = counted_members(parent, roster.goodbyes, roster.level)
    statement = vote_statement(roster.digest(), child.ballot)
    voters = {peer for peer, _ in child.votes}
    needed = votes_needed(len(counted), roster.level)
    if len(voters & counted) < needed:
        raise PeerError(
            f"roster {roster.k} has {len(voters & counted)} votes of the {len(counted)} that count; {needed} are needed"
        )
    for peer, signature in child.votes:
        if peer not in counted or not verify(peer, statement, signature):
            raise PeerError(f"roster {roster.k} holds a vote that {short_peer_id(peer)} could not give or did not sign")


def check_child(roster: Roster, parent: Roster, ballot: int, verify: Verify, rules: RunRules | None = None) -> None:
    """Check all of a proposed child but its votes; who votes checks this first, since a vote binds for good.

    Args:
        rules: of the run; by them a roster is from no later cycle than its ballot, and counts no more contributions
            than can have been made. Without them that is not asked.
    Raises:
        PeerError: it cannot follow `parent`; the text says why.
    """
    _check_succession(roster, parent)
    if rules is not None:
        _check_numbers(roster, parent, ballot, rules)
    digest = parent.digest()
    for word in roster.goodbyes:
        name = short_peer_id(word.peer)
        if word.run != roster.run or not verify(word.peer, word.statement(), word.signature):
            raise PeerError(f"roster {roster.k} quotes a good-bye that {name} did not sign")
        if not is_quotable(word, parent, digest, ballot):
            raise PeerError(f"roster {roster.k} quotes a good-bye of {name}, whose vote may have counted already")


def _check_succession(roster: Roster, parent: Roster) -> None:
    degraded = roster.level > 0
    problems = (
        (roster.parent != parent.digest(), "names another parent"),
        (roster.run != parent.run or roster.genesis != parent.genesis, "belongs to another run"),
        (roster.k != parent.k + 1, f"does not follow roster {parent.k}"),
        (roster.epoch != parent.epoch + degraded, f"does not follow epoch {parent.epoch}"),
        (roster.level > MOST_LEVELS, f"says level {roster.level}, more than {MOST_LEVELS}"),
        (roster.cycle < parent.cycle, f"is from cycle {roster.cycle}, before its parent's {parent.cycle}"),
        (roster.included_total < parent.included_total, "counts fewer contributions than its parent"),
        (not roster.members, "has no members"),
        (len(roster.peers()) != len(roster.members), "lists a peer twice"),
        (not _is_in_grid_order(roster), "lists members that cannot be dialled before some that can"),
    )
    for is_wrong, text in problems:
        if is_wrong:
            raise PeerError(f"roster {roster.k} {text}")


def _check_numbers(roster: Roster, parent: Roster, ballot: int, rules: RunRules) -> None:
    latest = max(parent.cycle, rules.clock.cycle((ballot - 1) // LEAD_TURNS))
    if roster.cycle > latest:
        raise PeerError(f"roster {roster.k} is from cycle {roster.cycle}, but its ballot from cycle {latest}")
    most = most_included(parent, roster.cycle, rules)
    if roster.included_total > most:
        raise PeerError(
            f"roster {roster.k} counts {roster.included_total} contributions; since roster {parent.k}, which counts "
            f"{parent.included_total}, at most {most - parent.included_total} can have come"
        )


def _is_in_grid_order(roster: Roster) -> bool:
    """Tell whether those that can be dialled come first: dealing by order must give each row its share of them."""
    dialable = [member.can_be_dialled for member in roster.members]
    return dialable == sorted(dialable, reverse=True)


def check_founding(
    founding: CertifiedRoster, run: Digest, organiser: PeerId, verify: Verify, founder: PeerId | None = None
) -> None:
    """Check a founding roster: one member, the `founder` if one is named, no parent, signed with the organiser's key.

    Raises:
        PeerError: it is none; the text says why.
    """
    roster = founding.roster
    if roster.run != run:
        raise PeerError("the founding roster belongs to another run")
    if roster.k or roster.epoch or roster.level or roster.parent != ZERO_DIGEST or len(roster.members) != 1:
        raise PeerError("the founding roster is not the first link of a chain with the founder as its only member")
    if founder is not None and roster.members[0].peer != founder:
        given = short_peer_id(roster.members[0].peer)
        raise PeerError(f"the founding roster is of {given}; only {short_peer_id(founder)} may found this run")
    statement = founding_statement(roster.digest())
    if not any(peer == organiser and verify(peer, statement, signature) for peer, signature in founding.votes):
        raise PeerError(f"the founding roster is not signed by the organiser {short_peer_id(organiser)}")


def reducers(roster: Roster) -> tuple[PeerId, ...]:
    """Return who can reduce, in grid order: members that can be dialled, else the helper; a lone member itself."""
    if len(roster.members) == 1:
        return (roster.members[0].peer,)
    hub = roster.hub()
    return _reachable(roster) if hub is None else (hub,)


def _reachable(roster: Roster) -> tuple[PeerId, ...]:
    return tuple(member.peer for member in roster.members if member.can_be_dialled)


def lead_order(roster: Roster, round_index: int, seers: frozenset[PeerId] = frozenset()) -> tuple[PeerId, ...]:
    """Return who proposes the child of `roster` in a voting round: one peer for each turn.

    Those who can be dialled lead, or the hub, since the others see only them. The draw depends on the round, so that
    dead leads do not stay first. The last turn but one is the helper's: when the last who could be dialled is gone,
    nobody else sees the others. The last turn belongs to any member, dialable or not: otherwise the survivor of a
    dialable partner could never go on alone.

    Args:
        seers: in a grid of several rows those who see all of it, its reducers: only they lead.
    """

    seed = roster.run + (roster.k + 1).to_bytes(8, "little") + round_index.to_bytes(8, "little")
    hub = roster.hub()
    first = _drawn(seed, seers or (frozenset((hub,)) if hub is not None else _reachable(roster) or roster.peers()))
    last = _drawn(seed, seers or roster.peers())[0]
    turns = [first[turn % len(first)] for turn in range(LEAD_TURNS - 1)]
    if roster.helper is not None:
        turns[-1] = roster.helper
    return (*turns, last)


@lru_cache(maxsize=16)  # asked for with every promise and proposal of a voting round
def _drawn(seed: bytes, peers: Collection[PeerId]) -> tuple[PeerId, ...]:
    return tuple(sorted(peers, key=lambda peer: sha256(seed, peer)))
