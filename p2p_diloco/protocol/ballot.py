"""How one child of a roster is agreed on: single-decree Paxos among the members of the parent.

The first draft let a member sign one proposal per k and never another. Two proposals that split the votes, each lost
on its way to the others, then blocked the run for ever. Here a member may vote again in a later ballot, but only for
what a majority's promises do not forbid; so at most one child of a roster gets a majority, and a split vote costs a
turn. See docs/decisions/0002-rosters-by-paxos.md.

What a member has promised and voted must be on disk before it is said aloud: a restarted peer must not vote twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.roster import (
    MOST_LEVELS,
    ROSTER_LAYOUT,
    CertifiedRoster,
    Roster,
    Verify,
    check_child,
    counted_members,
    vote_statement,
    votes_needed,
)
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire import DIGEST, SIGNATURE, U8, U64, Layout, many, optional, pair, record, to_bytes


def ballot_number(round_index: int, turn: int) -> int:
    """Return the number of a ballot; later rounds and turns are greater, and each has one lead."""
    return round_index * LEAD_TURNS + turn + 1


def ballot_turn(ballot: int) -> tuple[int, int]:
    """Return the round and the turn of a ballot."""
    return divmod(ballot - 1, LEAD_TURNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bond:
    """What one member has bound itself to in one decision: the child of one parent at one level.

    Attributes:
        promised: no vote is given in a ballot below this one.
        voted: the ballot and roster of the last vote, or None.
    """

    level: int
    promised: int
    voted: tuple[int, Roster] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballots:
    """All that one member is bound to about the children of one parent. Goes to disk as it is.

    Each level is a decision of its own, and none is forgotten while the parent is the same: a member that despaired
    (level 1) and then found the others again (level 0) must still know what it had voted before.
    """

    parent: Digest
    bonds: tuple[Bond, ...]

    def bond(self, parent: Digest, level: int) -> Bond:
        """Return what binds this member in a decision; an unbound one for another parent or a new level."""
        if parent == self.parent:
            for bond in self.bonds:
                if bond.level == level:
                    return bond
        return Bond(level=level, promised=0, voted=None)

    def with_bond(self, parent: Digest, bond: Bond) -> Ballots:
        """Return the ballots with one decision's bond replaced; a new parent drops those of the old one."""
        others = tuple(b for b in self.bonds if b.level != bond.level) if parent == self.parent else ()
        return Ballots(parent=parent, bonds=(*others, bond))


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A member's signed word to the lead of `ballot`: no vote in a lower one; and its last vote so far."""

    parent: Digest
    level: int
    ballot: int
    voted: tuple[int, Roster] | None
    signature: bytes

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return b"promise" + to_bytes(self, PROMISE_LAYOUT[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A lead's request to vote for `roster` in `ballot`; signed, since others pass it on, as a `ProposalDelta`."""

    ballot: int
    roster: Roster
    signature: bytes

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return b"proposal" + self.ballot.to_bytes(8, "little") + self.roster.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A member's signed vote, sent to the lead."""

    parent: Digest
    roster: Digest
    ballot: int
    signature: bytes


_VOTED = optional(pair(U64, record(Roster, ROSTER_LAYOUT)))
_BOND_LAYOUT: Layout = (("level", U8), ("promised", U64), ("voted", _VOTED))
BALLOTS_LAYOUT: Layout = (("parent", DIGEST), ("bonds", many(record(Bond, _BOND_LAYOUT), MOST_LEVELS + 1)))
PROMISE_LAYOUT: Layout = (
    ("parent", DIGEST),
    ("level", U8),
    ("ballot", U64),
    ("voted", _VOTED),
    ("signature", SIGNATURE),
)
VOTE_LAYOUT: Layout = (("parent", DIGEST), ("roster", DIGEST), ("ballot", U64), ("signature", SIGNATURE))

NO_BALLOTS = Ballots(parent=ZERO_DIGEST, bonds=())


def promise(ballots: Ballots, parent: Digest, level: int, ballot: int) -> Ballots | None:
    """Return what a member is bound to once it has promised `ballot`, or None when it is bound to a higher one."""
    bond = ballots.bond(parent, level)
    if ballot < bond.promised:
        return None
    return ballots.with_bond(parent, replace(bond, promised=ballot))


def vote(ballots: Ballots, proposal: Proposal) -> Ballots | None:
    """Return what a member is bound to once it has voted, or None when it must not vote.

    It must not when it has promised a higher ballot, or has voted for something else in this very ballot.
    """
    roster, ballot = proposal.roster, proposal.ballot
    bond = ballots.bond(roster.parent, roster.level)
    if ballot < bond.promised:
        return None
    if bond.voted is not None and bond.voted[0] == ballot and bond.voted[1] != roster:
        return None
    return ballots.with_bond(roster.parent, replace(bond, promised=ballot, voted=(ballot, roster)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidacy:
    """A lead's attempt in one ballot: promises first, then one proposal, then votes, then a certificate."""

    parent: Roster
    level: int
    ballot: int
    rules: RunRules | None = None
    promises: Mapping[PeerId, tuple[int, Roster] | None] = field(default_factory=dict)
    proposal: Proposal | None = None
    votes: Mapping[PeerId, bytes] = field(default_factory=dict)


def add_promise(candidacy: Candidacy, sender: PeerId, word: Promise, verify: Verify) -> Candidacy:
    """Return the candidacy with one more promise; anything that does not belong to it changes nothing."""
    if word.voted is not None and not _could_be_voted(word.voted, candidacy, verify):
        return candidacy
    belongs = (word.parent, word.level, word.ballot) == (
        candidacy.parent.digest(),
        candidacy.level,
        candidacy.ballot,
    )
    if not belongs or sender not in candidacy.parent.peers() or not verify(sender, word.statement(), word.signature):
        return candidacy
    return replace(candidacy, promises={**candidacy.promises, sender: word.voted})


def _could_be_voted(voted: tuple[int, Roster], candidacy: Candidacy, verify: Verify) -> bool:
    """Tell whether an honest member can have voted so: nobody else may have a lead propose nonsense again."""
    ballot, roster = voted
    if ballot > candidacy.ballot or roster.level != candidacy.level:
        return False
    try:
        check_child(roster, candidacy.parent, ballot, verify, candidacy.rules)
    except PeerError:
        return False
    return True


def propose(candidacy: Candidacy, wish: Roster | None, sign: Callable[[bytes], bytes]) -> Candidacy:
    """Return the candidacy with its signed proposal once enough members have promised, unchanged before.

    The proposal is `wish` unless a promise tells of an earlier vote: then the vote of the highest ballot is proposed
    again, because it may already have been certified somewhere. Enough is counted for what is proposed, since the
    good-byes that a roster quotes lower its majority.

    Args:
        wish: None where there is nothing to propose but what has been voted for.
    """
    earlier = [voted for voted in candidacy.promises.values() if voted is not None]
    roster = max(earlier, key=lambda voted: voted[0])[1] if earlier else wish
    if candidacy.proposal is not None or roster is None:
        return candidacy
    counted = counted_members(candidacy.parent, roster.goodbyes, candidacy.level)
    if len(counted & candidacy.promises.keys()) < votes_needed(len(counted), candidacy.level):
        return candidacy
    unsigned = Proposal(ballot=candidacy.ballot, roster=roster, signature=bytes(64))
    return replace(candidacy, proposal=replace(unsigned, signature=sign(unsigned.statement())))


def add_vote(candidacy: Candidacy, sender: PeerId, word: Vote, verify: Verify) -> Candidacy:
    """Return the candidacy with one more vote; anything that does not belong to it changes nothing."""
    proposal = candidacy.proposal
    if proposal is None or (word.roster, word.ballot) != (proposal.roster.digest(), candidacy.ballot):
        return candidacy
    counted = counted_members(candidacy.parent, proposal.roster.goodbyes, candidacy.level)
    if sender not in counted or not verify(sender, vote_statement(word.roster, word.ballot), word.signature):
        return candidacy
    return replace(candidacy, votes={**candidacy.votes, sender: word.signature})


def certificate(candidacy: Candidacy) -> CertifiedRoster | None:
    """Return the certified roster once enough members have voted, else None."""
    proposal = candidacy.proposal
    if proposal is None:
        return None
    counted = counted_members(candidacy.parent, proposal.roster.goodbyes, candidacy.level)
    if len(candidacy.votes) < votes_needed(len(counted), candidacy.level):
        return None
    votes = tuple(sorted(candidacy.votes.items()))
    return CertifiedRoster(roster=proposal.roster, ballot=candidacy.ballot, votes=votes)
