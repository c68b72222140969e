"""Agreement on one child of a roster: single-decree Paxos among the electorate of the parent.

A promise carries what its voter has observed (`View`), and a proposal follows from the promises that it shows, by a
rule (`proposal.py`). So any peer can check a proposal at any time: a leader can delay, but not choose. A proposal that
was voted for in an earlier ballot is proposed again, with the promises from which it followed then.
See docs/decisions/agreement.md.

Promises and votes must be on disk before they are sent: a restarted peer must not vote twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, short_peer_id
from p2p_diloco.protocol.wire.frames import (
    DIGEST,
    SIGNATURE,
    U64,
    blob,
    many,
    optional,
    pair,
    record,
    signed_bytes,
)
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.roster import (
    MOST_MEMBERS,
    CertifiedRoster,
    Roster,
    Verify,
    vote_statement,
)

MOST_DECLARATIONS = 16
MOST_DECLARATION_BYTES = 2304
"""Maximum bytes of declarations in one promise: 15 without proofs, 8 with the founder's proof, or 6 with two proofs.

With 2,048 members a proposal that shows its origin then takes 246 KiB, and a promise that shows that proposal 250 KiB;
a frame holds 256 KiB.
"""
MOST_PROMISES = 20
"""Maximum number of promises in one proposal; more than half of an electorate is at most 17."""
_BITMAP = blob(MOST_MEMBERS // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The observations of one voter; bit i of a bitmap is for member i of the roster in force.

    Attributes:
        absent: members that it would drop.
        heard: members whose heartbeats it receives.
        counting: members whose contributions were in entries for long enough to count.
        idle: members that have lost *reduces*, because their spans got no entries.
        height: total number of entries that its spans have absorbed.
        declarations: the newest declaration of each peer, if it would change the roster.
    """

    absent: Annotated[bytes, _BITMAP]
    heard: Annotated[bytes, _BITMAP]
    counting: Annotated[bytes, _BITMAP]
    idle: Annotated[bytes, _BITMAP]
    height: Annotated[int, U64]
    declarations: Annotated[tuple[Declaration, ...], many(record(Declaration), MOST_DECLARATIONS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A voter's signed promise to the leader of `ballot` not to vote in a lower one, with its last vote and its view.

    Attributes:
        voted: ballot and roster digest of the last vote.
    """

    parent: Digest
    degraded: bool
    ballot: Annotated[int, U64]
    voted: Annotated[tuple[int, Digest] | None, optional(pair(U64, DIGEST))]
    view: View
    voter: PeerId
    signature: Annotated[bytes, SIGNATURE]

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return b"promise" + signed_bytes(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A leader's request to vote for `roster` in `ballot`, with the proof that it must be this roster.

    It needs no signature.

    Attributes:
        promises: the promises made to the leader of this ballot.
        origin: if one of these promises reports a vote, the promises of the ballot in which that roster was first
            proposed; empty if the roster follows from `promises`.
    """

    ballot: Annotated[int, U64]
    roster: Roster
    promises: Annotated[tuple[Promise, ...], many(record(Promise), MOST_PROMISES)]
    origin: Annotated[tuple[Promise, ...], many(record(Promise), MOST_PROMISES)]

    @property
    def reasons(self) -> tuple[Promise, ...]:
        """Return the promises from which the roster follows."""
        return self.origin or self.promises


@dataclass(frozen=True, slots=True, kw_only=True)
class Bond:
    """The commitment of one member in one decision: the child of one parent, or its degraded child.

    Attributes:
        promised: the member does not vote in a ballot below this one.
        voted: the proposal that it last voted for, or None.
    """

    degraded: bool
    promised: Annotated[int, U64]
    voted: Annotated[Proposal | None, optional(record(Proposal))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballots:
    """All commitments of one member about the children of one parent. Stored on disk in this form."""

    parent: Digest
    bonds: Annotated[tuple[Bond, ...], many(record(Bond), 2)]

    def bond(self, parent: Digest, *, degraded: bool) -> Bond:
        """Return this member's commitment in a decision; an empty one for another parent or a new decision."""
        if parent == self.parent:
            for bond in self.bonds:
                if bond.degraded == degraded:
                    return bond
        return Bond(degraded=degraded, promised=0, voted=None)

    def with_bond(self, parent: Digest, bond: Bond) -> Ballots:
        """Return the ballots with the bond of one decision replaced; a new parent drops the bonds of the old one."""
        others = tuple(b for b in self.bonds if b.degraded != bond.degraded) if parent == self.parent else ()
        return Ballots(parent=parent, bonds=(*others, bond))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """A leader's request for a promise at a time when no vote is due."""

    parent: Digest
    degraded: bool
    ballot: Annotated[int, U64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """A promise as sent to the leader, with the proposal that it names: the leader may have to show that again."""

    promise: Promise
    voted: Annotated[Proposal | None, optional(record(Proposal))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A member's signed vote, sent to the leader."""

    parent: Digest
    roster: Digest
    ballot: Annotated[int, U64]
    signature: Annotated[bytes, SIGNATURE]


NO_BALLOTS = Ballots(parent=ZERO_DIGEST, bonds=())

Rule = Callable[[tuple[Promise, ...]], "Roster | None"]
"""Function that derives the next roster from the promises for one ballot; None if nothing changes."""
Quorum = Callable[[Collection[PeerId]], bool]
"""Function that returns whether a set of members is enough to promise and to vote."""


def promise(ballots: Ballots, parent: Digest, ballot: int, *, degraded: bool) -> Ballots | None:
    """Return a member's commitments once it has promised `ballot`, or None if it has promised a higher one."""
    bond = ballots.bond(parent, degraded=degraded)
    return ballots.with_bond(parent, replace(bond, promised=ballot)) if ballot >= bond.promised else None


def vote(ballots: Ballots, proposal: Proposal) -> Ballots | None:
    """Return a member's commitments once it has voted, or None if it must not vote.

    It must not vote if it has promised a higher ballot, or has voted for another roster in this one.
    """
    roster, ballot = proposal.roster, proposal.ballot
    bond = ballots.bond(roster.parent, degraded=roster.degraded)
    if ballot < bond.promised:
        return None
    if bond.voted is not None and bond.voted.ballot == ballot and bond.voted.roster != roster:
        return None
    return ballots.with_bond(roster.parent, replace(bond, promised=ballot, voted=proposal))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidacy:
    """A leader's attempt in one ballot: promises first, then one proposal, then votes, then a certificate."""

    parent: Roster
    degraded: bool
    ballot: int
    promises: Mapping[PeerId, Promised] = field(default_factory=dict)
    proposal: Proposal | None = None
    votes: Mapping[PeerId, bytes] = field(default_factory=dict)


def add_promise(
    candidacy: Candidacy,
    sender: PeerId,
    promised: Promised,
    rule: Rule,
    quorum: Quorum,
    verify: Verify,
    checked: Collection[Proposal] = (),
) -> Candidacy:
    """Return the candidacy with one more promise.

    Args:
        checked: proposals that were checked before.
    Raises:
        PeerError: no honest voter would have made this promise.
    """
    promise, voted = promised.promise, promised.voted
    if promise.voter != sender:
        raise PeerError(f"{short_peer_id(sender)} handed in a promise of {short_peer_id(promise.voter)}")
    check_promises((promise,), candidacy.parent, candidacy.ballot, verify, degraded=candidacy.degraded)
    named = (voted.ballot, voted.roster.digest()) if voted is not None else None
    if named != promise.voted:
        raise PeerError(f"{short_peer_id(sender)} promised and did not show what it has voted for")
    if voted is not None:
        if voted.ballot > candidacy.ballot:
            raise PeerError(f"{short_peer_id(sender)} reports that it voted in a ballot that is still to come")
        if voted not in checked:
            check_proposal(voted, candidacy.parent, rule, quorum, verify)
    return replace(candidacy, promises={**candidacy.promises, sender: promised})


def declarations_bytes(declarations: Iterable[Declaration]) -> int:
    """Return the number of bytes that declarations take in a promise."""
    return sum(declaration.num_bytes() for declaration in declarations)


def check_promises(
    promises: tuple[Promise, ...], parent: Roster, ballot: int, verify: Verify, *, degraded: bool
) -> None:
    """Check that promises are for one ballot on a child of `parent`, and that what they contain is valid.

    Raises:
        PeerError: a promise fails a check.
    """
    digest, bitmap_bytes = parent.digest(), (len(parent.members) + 7) // 8
    able = parent.peers() if degraded else parent.voters
    checked: set[Declaration] = set()
    if len({each.voter for each in promises}) != len(promises):
        raise PeerError("one promise is shown twice")
    for each in promises:
        name = short_peer_id(each.voter)
        if (each.parent, each.degraded, each.ballot) != (digest, degraded, ballot) or each.voter not in able:
            raise PeerError(f"the promise of {name} is for another ballot than {ballot}, or {name} does not vote")
        view = each.view
        if any(len(bitmap) != bitmap_bytes for bitmap in (view.absent, view.heard, view.counting, view.idle)):
            raise PeerError(f"the promise of {name} has a bitmap that does not fit {len(parent.members)} members")
        if not verify(each.voter, each.statement(), each.signature):
            raise PeerError(f"the promise of {name} is not signed by it")
        if declarations_bytes(view.declarations) > MOST_DECLARATION_BYTES:
            raise PeerError(f"the promise of {name} shows more than {MOST_DECLARATION_BYTES} bytes of declarations")
        for one in {*view.declarations} - checked:
            if one.run != parent.run or not one.is_signed(verify):
                about = short_peer_id(one.peer)
                raise PeerError(f"the promise of {name} shows a declaration that {about} or a prover did not sign")
            checked.add(one)


def check_proposal(proposal: Proposal, parent: Roster, rule: Rule, quorum: Quorum, verify: Verify) -> None:
    """Check that a proposal is the one that its ballot allows, whichever peer made it.

    Raises:
        PeerError: it is not; the text gives the reason.
    """
    roster, degraded = proposal.roster, proposal.roster.degraded
    text = f"the proposal of roster {roster.k} in ballot {proposal.ballot}"
    check_promises(proposal.promises, parent, proposal.ballot, verify, degraded=degraded)
    if not quorum({each.voter for each in proposal.promises}):
        raise PeerError(f"{text} shows {len(proposal.promises)} promises, which are not enough")
    last = max((each.voted for each in proposal.promises if each.voted is not None), default=None)
    if (last is None) != (not proposal.origin) or (last is not None and last[1] != roster.digest()):
        raise PeerError(f"{text} is not the one that was voted for last, according to its promises")
    if proposal.origin:
        check_promises(proposal.origin, parent, proposal.origin[0].ballot, verify, degraded=degraded)
        voters = {each.voter for each in proposal.origin}
        if not quorum(voters) or any(each.voted for each in proposal.origin):
            raise PeerError(f"{text} does not show the promises from which it followed")
    if rule(proposal.reasons) != roster:
        raise PeerError(f"{text} does not follow from the promises that it shows")


def propose(candidacy: Candidacy, rule: Rule, quorum: Quorum) -> Candidacy:
    """Return the candidacy with its proposal once enough members have promised and something changes.

    If promises report earlier votes, the roster of the latest one is proposed again, because it may already have been
    certified somewhere.
    """
    received = [promised for _, promised in sorted(candidacy.promises.items())]
    if candidacy.proposal is not None or not quorum(candidacy.promises.keys()):
        return candidacy
    last = max((promised.voted for promised in received if promised.voted is not None), key=_vote_order, default=None)
    voters = candidacy.parent.voters

    def rank(promised: Promised) -> tuple[bool, bool]:
        return promised.voted is None or promised.voted != last, promised.promise.voter not in voters

    shown = sorted(received, key=rank)
    promises = tuple(promised.promise for promised in shown[:MOST_PROMISES])
    roster = last.roster if last is not None else rule(promises)
    if roster is None:
        return candidacy
    origin = last.reasons if last is not None else ()
    proposal = Proposal(ballot=candidacy.ballot, roster=roster, promises=promises, origin=origin)
    return replace(candidacy, proposal=proposal)


def _vote_order(voted: Proposal) -> tuple[int, Digest]:
    return voted.ballot, voted.roster.digest()


def add_vote(candidacy: Candidacy, sender: PeerId, vote: Vote, verify: Verify) -> Candidacy:
    """Return the candidacy with one more vote; a vote that is invalid or for another proposal changes nothing."""
    proposal = candidacy.proposal
    if proposal is None or (vote.roster, vote.ballot) != (proposal.roster.digest(), candidacy.ballot):
        return candidacy
    able = candidacy.parent.peers() if candidacy.degraded else candidacy.parent.voters
    if sender not in able or not verify(sender, vote_statement(vote.roster, vote.ballot), vote.signature):
        return candidacy
    return replace(candidacy, votes={**candidacy.votes, sender: vote.signature})


def certificate(candidacy: Candidacy, quorum: Quorum) -> CertifiedRoster | None:
    """Return the certified roster once enough members have voted, otherwise None."""
    proposal = candidacy.proposal
    if proposal is None or not quorum(candidacy.votes.keys()):
        return None
    votes = tuple(sorted(candidacy.votes.items()))
    return CertifiedRoster(roster=proposal.roster, ballot=candidacy.ballot, votes=votes)
