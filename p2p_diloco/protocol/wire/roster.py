"""The certified list of members: its contents, the voters for the next one, what makes it valid, and its leaders.

A roster is one link of a chain. Its certificate is a set of votes of its *parent's electorate*. So newcomers cannot
certify anything, and if a leader dies, the old roster stays in force.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, sha256, short_peer_id
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.frames import PEER, SIGNATURE, U64, layout_of, many, pair, record, to_bytes
from p2p_diloco.protocol.wire.member import Member

MOST_MEMBERS = 2048
"""Maximum number of members: a certified roster must fit one control frame, at 60 bytes per member."""
MOST_VOTERS = 32
MOST_LEADERS = 8
"""Maximum number of members that lead first. All voters keep a link to them."""
FEWEST_COUNTING = 3
"""Size up to which others fill the electorate while fewer members count."""

Verify = Callable[[PeerId, bytes, bytes], bool]
"""`(signer, statement, signature) -> bool`; an argument, so that a simulator may use a cheap one."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The members of a run from one certificate to the next; a new one is certified only when something changes.

    Attributes:
        run: digest of the manifest.
        genesis: digest over the content digests of all spans at founding; the same along a chain.
        parent: digest of the previous roster; `ZERO_DIGEST` for the founding one.
        k: position in the chain, 0 for the founding one.
        cycle: cycle in which it was proposed.
        degraded: whether less than a majority certified it, because the run was stalled.
        members: in grid order, reducers first.
        height: total number of entries that all spans had absorbed: the lower median of the numbers in the promises.
    """

    run: Digest
    genesis: Digest
    parent: Digest
    k: Annotated[int, U64]
    cycle: Annotated[int, U64]
    degraded: bool
    members: Annotated[tuple[Member, ...], many(record(Member), MOST_MEMBERS)]
    height: Annotated[int, U64]

    def digest(self) -> Digest:
        """Return the digest by which entries and children refer to this roster."""
        return self._digest_and_size[0]

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in a message, without its votes."""
        return self._digest_and_size[1]

    # No slots, to allow caching: every message needs digest and members, and a roster never changes.
    @cached_property
    def _digest_and_size(self) -> tuple[Digest, int]:
        encoded = to_bytes(self)
        return sha256(b"roster", encoded), len(encoded)

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

    @property
    def bootstrap(self) -> PeerId | None:
        """Return the member that does not train, if there is one."""
        return next((member.peer for member in self.members if not member.trains), None)

    @cached_property
    def voters(self) -> frozenset[PeerId]:
        """Return the electorate: the longest-listed of the members that count.

        While fewer than three count, it is filled up to three: with the bootstrap peer first, then with the
        longest-listed others, as long as the members that count and the bootstrap peer stay more than half. So a crowd
        of fresh identities has no vote, and a run of two volunteers and a bootstrap peer survives the loss of any one
        of the three.
        """
        order = by_seniority(self.members, self.run)
        chosen = [member.peer for member in order if member.counts][:MOST_VOTERS]
        if len(chosen) >= FEWEST_COUNTING:
            return frozenset(chosen)
        if self.bootstrap is not None and self.bootstrap not in chosen:
            chosen.append(self.bootstrap)
        trusted = len(chosen)
        others = [member.peer for member in order if member.peer not in chosen]
        while others and len(chosen) < FEWEST_COUNTING and (not trusted or 2 * trusted > len(chosen) + 1):
            chosen.append(others.pop(0))
        return frozenset(chosen)

    @cached_property
    def voter_places(self) -> frozenset[int]:
        """Return the places of the electorate in grid order."""
        return frozenset(self._places[peer] for peer in self.voters)

    @cached_property
    def leaders(self) -> frozenset[PeerId]:
        """Return the members that lead first: a few of the reducers, preferably voters."""
        able = frozenset(reducers(self))
        order = (*_drawn(self.run, able & self.voters), *_drawn(self.run, able - self.voters))
        return frozenset(order[:MOST_LEADERS])

    def num_voters(self, places: Iterable[int]) -> int:
        """Return the number of voters at these places."""
        return len(self.voter_places.intersection(places))

    def has_majority(self, places: Iterable[int]) -> bool:
        """Return whether more than half of the electorate is at these places."""
        return 2 * self.num_voters(places) > len(self.voter_places)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedRoster:
    """A roster with the votes that make it valid, all for the same ballot."""

    roster: Roster
    ballot: Annotated[int, U64]
    votes: Annotated[tuple[tuple[PeerId, bytes], ...], many(pair(PEER, SIGNATURE), MOST_MEMBERS)]

    def num_bytes(self) -> int:
        """Return the number of bytes that it takes in a message."""
        return self.roster.num_bytes() + len(to_bytes(self, layout_of(CertifiedRoster)[1:]))


def by_seniority(members: Collection[Member], run: Digest) -> list[Member]:
    """Return members, the longest-listed first; those of one cycle in an order that no peer can choose."""
    return sorted(members, key=lambda member: (member.since, sha256(b"seniority", run, member.peer)))


def vote_statement(roster_digest: Digest, ballot: int) -> bytes:
    """Return the bytes that a member signs when it votes."""
    return b"vote" + roster_digest + ballot.to_bytes(8, "little")


def founding_roster(run: Digest, genesis: Digest, founder: Member, cycle: int = 0) -> Roster:
    """Return roster 0: the founder alone, which certifies roster 1.

    Args:
        genesis: digest over the content digests of all spans at the start.
        founder: the founder. It counts from the founding if it trains, and it reduces, because joiners have no other.
        cycle: cycle in which the run is founded. A run that is founded before its round 0 begins in cycle 0.
    """
    cycle = max(cycle, 0)
    member = Member(
        peer=founder.peer,
        incarnation=founder.incarnation,
        since=cycle,
        counts=founder.trains,
        reduces=True,
        trains=founder.trains,
        share=founder.share,
    )
    return Roster(
        run=run,
        genesis=genesis,
        parent=ZERO_DIGEST,
        k=0,
        cycle=cycle,
        degraded=False,
        members=(member,),
        height=0,
    )


def founding_statement(roster_digest: Digest) -> bytes:
    """Return the bytes that the organiser signs to found a run."""
    return b"found" + roster_digest


def is_majority(parent: Roster, peers: Collection[PeerId]) -> bool:
    """Return whether `peers` include more than half of the electorate, and so can certify a child of `parent`."""
    return 2 * len(parent.voters.intersection(peers)) > len(parent.voters)


def is_quarter(parent: Roster, peers: Collection[PeerId]) -> bool:
    """Return whether `peers` can certify a degraded child of `parent` as soon as the run is stalled.

    That takes a quarter of the electorate or, if `peers` include none of it, a quarter of all members; at least one.
    """
    num = len(parent.voters.intersection(peers))
    if num:
        return 4 * num >= len(parent.voters)
    num = len(parent.peers().intersection(peers))
    return num > 0 and 4 * num >= len(parent.members)


def check_certificate(child: CertifiedRoster, parent: Roster, verify: Verify, rules: RunRules) -> None:
    """Check that `child` follows `parent` and that enough members of `parent` have voted for it.

    For a degraded one any vote is enough here: whether it suffices depends on how long a peer has had no entries.

    Raises:
        PeerError: a check failed; the text gives the reason.
    """
    roster = child.roster
    check_child(roster, parent, child.ballot, rules)
    statement = vote_statement(roster.digest(), child.ballot)
    voters = {peer for peer, _ in child.votes}
    if len(voters) != len(child.votes) or not voters or not (roster.degraded or is_majority(parent, voters)):
        num = len(voters & parent.voters)
        raise PeerError(
            f"roster {roster.k} has {num} votes of the {len(parent.voters)} that count; more than half are needed"
        )
    for peer, signature in child.votes:
        if peer not in parent.peers() or not verify(peer, statement, signature):
            raise PeerError(f"roster {roster.k} holds a vote that {short_peer_id(peer)} could not give or did not sign")


def check_child(roster: Roster, parent: Roster, ballot: int, rules: RunRules) -> None:
    """Check a child of `parent`, except for its votes and whether it follows from the promises.

    Raises:
        PeerError: it cannot follow `parent`; the text gives the reason.
    """
    peers, clock = roster.peers(), rules.clock
    latest = max(parent.cycle, clock.cycle(clock.ballot_round(ballot)))
    possible = parent.height + (roster.cycle - parent.cycle + 2) * rules.num_all_spans
    idle = [member for member in roster.members if not member.trains]
    before = {member.peer: member for member in parent.members}
    problems = (
        (roster.parent != parent.digest(), "names another parent"),
        (roster.run != parent.run or roster.genesis != parent.genesis, "belongs to another run"),
        (roster.k != parent.k + 1, f"does not follow roster {parent.k}"),
        (roster.cycle < parent.cycle, f"is from cycle {roster.cycle}, before its parent's {parent.cycle}"),
        (roster.cycle > latest, f"is from cycle {roster.cycle}, but its ballot is from cycle {latest}"),
        (roster.height < parent.height, "has absorbed fewer entries than its parent"),
        (roster.height > possible, f"claims {roster.height} entries, but at most {possible} are possible"),
        (not roster.members, "has no members"),
        (len(peers) != len(roster.members), "lists a peer twice"),
        (
            roster.degraded and roster.cycle < parent.cycle + rules.stalled_cycles,
            f"is degraded {roster.cycle - parent.cycle} cycles after its parent; a stall takes {rules.stalled_cycles}",
        ),
        (
            roster.degraded and any(m.peer not in before or m.counts > before[m.peer].counts for m in roster.members),
            "is degraded, but lists members that its parent does not list or does not count",
        ),
        (len(idle) > 1, "lists more than one member that does not train"),
        (
            any(rules.founder not in (None, m.peer) for m in idle),
            "lists a member that does not train and did not found the run",
        ),
        (not all(map(rules.may_be_member, peers - before.keys())), "names a peer that the manifest does not list"),
        (not _is_in_grid_order(roster), "lists members that do not reduce before some that do"),
        (
            any(m.since != (before[m.peer].since if m.peer in before else roster.cycle) for m in roster.members),
            "gives the wrong cycle for the listing of a member",
        ),
    )
    for is_wrong, text in problems:
        if is_wrong:
            raise PeerError(f"roster {roster.k} {text}")


def _is_in_grid_order(roster: Roster) -> bool:
    """Return whether reducers come first: dealing members in order must give each row its share of them."""
    reducing = [member.reduces for member in roster.members]
    return reducing == sorted(reducing, reverse=True)


def check_founding(
    founding: CertifiedRoster, run: Digest, organiser: PeerId, verify: Verify, founder: PeerId | None = None
) -> None:
    """Check a founding roster: one member, the `founder` if one is named, no parent, signed with the organiser's key.

    Raises:
        PeerError: it is not valid; the text gives the reason.
    """
    roster = founding.roster
    if roster.run != run:
        raise PeerError("the founding roster belongs to another run")
    if len(roster.members) != 1 or roster != founding_roster(run, roster.genesis, roster.members[0], roster.cycle):
        raise PeerError("the founding roster is not the first link of a chain with the founder as its only member")
    if founder is not None and roster.members[0].peer != founder:
        given = short_peer_id(roster.members[0].peer)
        raise PeerError(f"the founding roster lists {given}; only {short_peer_id(founder)} may found this run")
    statement = founding_statement(roster.digest())
    if not any(peer == organiser and verify(peer, statement, signature) for peer, signature in founding.votes):
        raise PeerError(f"the founding roster is not signed by the organiser {short_peer_id(organiser)}")


def reducers(roster: Roster) -> tuple[PeerId, ...]:
    """Return the reducers in grid order. There must be some: if no member can be reached, all members reduce."""
    return tuple(member.peer for member in roster.members if member.reduces) or tuple(m.peer for m in roster.members)


def lead_order(roster: Roster, draw: int, founder: PeerId, *, degraded: bool = False) -> tuple[PeerId, ...]:
    """Return the leaders that propose the child of `roster` in the `LEAD_TURNS` turns of a draw, one peer for each.

    Leaders need neither trust nor a vote. The first turns belong to a few reducers, because only reducers are sure to
    be reachable for all others. Each draw is another one, so that dead leaders do not stay first. If the founder
    is not a member, one turn belongs to it: it may be reachable even if no member is. The last turn belongs to any
    voter. In a stalled run all turns but the founder's belong to any member, because all reducers may be dead.
    """
    seed = roster.run + (roster.k + 1).to_bytes(8, "little") + draw.to_bytes(8, "little")
    pool = _drawn(seed, roster.peers() if degraded else roster.leaders)
    turns = [pool[turn % len(pool)] for turn in range(LEAD_TURNS - 1)]
    if roster.member(founder) is None:
        turns[-1] = founder
    return (*turns, pool[-1] if degraded else _drawn(seed, roster.voters)[0])


@lru_cache(maxsize=16)  # every promise and proposal of a voting round needs it
def _drawn(seed: bytes, peers: frozenset[PeerId]) -> tuple[PeerId, ...]:
    return tuple(sorted(peers, key=lambda peer: sha256(seed, peer)))


def grid_order(members: Collection[Member], run: Digest, drawing: int) -> tuple[Member, ...]:
    """Return members in the order of a newly drawn grid: reducers first, then the others, each part drawn by hash."""
    seed = run + drawing.to_bytes(8, "little")
    return tuple(sorted(members, key=lambda m: (not m.reduces, sha256(seed, m.peer))))


def keep_places(before: Sequence[Member], members: Collection[Member], run: Digest, drawing: int) -> tuple[Member, ...]:
    """Return members in the order of the previous grid; those that stay keep their places, so that few links change.

    There are two parts, reducers and others. Gaps are filled with newcomers, then with the last members of the part.
    Newcomers that are left over come at the end of it.
    """
    now = {member.peer: member for member in members}
    order: list[Member] = []
    for reduces in (True, False):
        places = [now.get(m.peer) for m in before if m.reduces == reduces]
        kept = [m if m is not None and m.reduces == reduces else None for m in places]
        stayed = {m.peer for m in kept if m is not None}
        here = [m for m in grid_order(members, run, drawing) if m.reduces == reduces]
        order += _fill_gaps(kept, [m for m in here if m.peer not in stayed])
    return tuple(order)


def _fill_gaps(kept: list[Member | None], fillers: list[Member]) -> list[Member]:
    """Fill gaps from the front: with newcomers, then with the last members."""
    whole, waiting = list(kept), list(reversed(fillers))
    for place, member in enumerate(whole):
        if member is None and waiting:
            whole[place] = waiting.pop()
    whole += reversed(waiting)
    place = 0
    while place < len(whole):
        if whole[place] is not None:
            place += 1
        elif (last := whole.pop()) is not None:
            whole[place] = last
    return [member for member in whole if member is not None]
