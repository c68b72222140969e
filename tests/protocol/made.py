"""Values for tests: rosters with their certificates, heads, entries and engines, signed with the cheap signature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fake_run import RUN, found_run, peer_id, run_rules, sign_as, verify

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.actions import Action
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.local import LocalPeer
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.results import EntryChecked
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS, Ballots
from p2p_diloco.protocol.wire.entry import Entry, pack_included
from p2p_diloco.protocol.wire.heartbeat import FragmentHead, Heartbeat
from p2p_diloco.protocol.wire.member import NO_PLACE, PLACE_BYTES, Declaration, Member, ReachProof
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, vote_statement
from p2p_diloco.span_log import SpanHead

NO_SIGNATURE = bytes(64)
SPAN = SpanId(0, 0)
NAMES = ("ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal")


def ids(num_peers: int) -> list[PeerId]:
    return [peer_id(name) for name in NAMES[:num_peers]]


def member(peer: PeerId, *, reduces: bool = True, incarnation: int = 1, **changes: object) -> Member:
    """A member that votes, unless the changes say otherwise; one that trains and reduces has a public place."""
    place = peer[:PLACE_BYTES] if reduces and changes.get("trains", True) else NO_PLACE
    made = Member(peer=peer, incarnation=incarnation, counts=True, reduces=reduces, place=place)
    return replace(made, **changes)  # type: ignore[arg-type]


def founding() -> CertifiedRoster:
    """The founding roster of a bootstrap."""
    return found_run(peer_id("boot"), 1, trains=False)


def child_of(parent: Roster, members: Iterable[Member], **changes: object) -> Roster:
    child = Roster(
        run=RUN,
        genesis=parent.genesis,
        parent=parent.digest(),
        k=parent.k + 1,
        cycle=parent.cycle,
        degraded=False,
        members=tuple(members),
        height=parent.height,
    )
    return replace(child, **changes)  # type: ignore[arg-type]


def certify(roster: Roster, voters: Iterable[PeerId], ballot: int = 0) -> CertifiedRoster:
    statement = vote_statement(roster.digest(), ballot)
    votes = tuple(sorted((peer, sign_as(peer, statement)) for peer in voters))
    return CertifiedRoster(roster=roster, ballot=ballot, votes=votes)


def roster_of(num_members: int, *, reduces: bool = True, **changes: object) -> Roster:
    """Roster 1 with that many members, all of whom vote, as if a run could begin with them."""
    return child_of(founding().roster, [member(peer, reduces=reduces) for peer in ids(num_members)], **changes)


def roster_1(num_members: int, *, reduces: bool = True, **changes: object) -> CertifiedRoster:
    return certify(roster_of(num_members, reduces=reduces, **changes), [peer_id("boot")])


def proof_of(
    peer: PeerId, prover: PeerId | None = None, *, cycle: int = 0, place: bytes = NO_PLACE, run: Digest = RUN
) -> ReachProof:
    """The proof by the bootstrap, or by another prover, that it has dialled `peer`."""
    prover = prover if prover is not None else peer_id("boot")
    proof = ReachProof(prover=prover, place=place, cycle=cycle, signature=NO_SIGNATURE)
    return replace(proof, signature=sign_as(prover, proof.statement(run, peer)))


def declaration(peer: PeerId, *, reachable: bool = True, **changes: object) -> Declaration:
    """A declaration of a peer; if reachable, with a proof by the bootstrap, unless the changes name others."""
    word = Declaration(
        run=RUN,
        peer=peer,
        incarnation=1,
        cycle=0,
        proofs=(),
        trains=True,
        share=8,
        leaving=False,
        signature=NO_SIGNATURE,
    )
    word = replace(word, **changes)  # type: ignore[arg-type]
    if reachable and not word.proofs:
        word = replace(word, proofs=(proof_of(peer, cycle=word.cycle, run=word.run),))
    return replace(word, signature=sign_as(peer, word.statement()))


def heartbeat(peer: PeerId, **changes: object) -> Heartbeat:
    beat = Heartbeat(
        run=RUN,
        peer=peer,
        incarnation=1,
        sequence=1,
        roster=Digest(bytes(32)),
        roster_k=0,
        heads=(),
        ready=True,
        takes_entries=bool(changes.get("ready", True)),
        can_be_dialled=True,
        share=8,
        trains=True,
        tokens=0,
        steps=0,
        tokens_per_second=0.0,
        loss=0.0,
        signature=NO_SIGNATURE,
    )
    beat = replace(beat, **changes)  # type: ignore[arg-type]
    return replace(beat, signature=sign_as(peer, beat.statement()))


def self_of(
    peer: PeerId, *, trains: bool = True, incarnation: int = 1, dialable: bool = True, archives: bool = False
) -> LocalPeer:
    return LocalPeer(
        peer=peer,
        incarnation=incarnation,
        can_be_dialled=dialable,
        trains=trains,
        sign=lambda statement: sign_as(peer, statement),
        archives=archives,
    )


def book_with(*rosters: CertifiedRoster, group_size: int = 16) -> RosterBook:
    book = RosterBook(rules=run_rules(group_size=group_size), verify=verify)
    for certified in rosters:
        book.add(certified)
    return book


def membership_of(
    peer: PeerId,
    *rosters: CertifiedRoster,
    ballots: Ballots = NO_BALLOTS,
    remembers: bool = True,
    incarnation: int = 1,
    trains: bool = True,
    archives: bool = False,
    group_size: int = 16,
    linked: Iterable[PeerId] = (),
    listed: frozenset[PeerId] | None = None,
) -> Membership:
    rules = run_rules(group_size=group_size)
    rules = rules if listed is None else replace(rules, listed=listed)
    membership = Membership(
        me=self_of(peer, incarnation=incarnation, trains=trains, archives=archives),
        rules=rules,
        book=book_with(*rosters, group_size=group_size),
        ballots=ballots,
        verify=verify,
        remembers=remembers,
        linked=frozenset(linked),
    )
    change(membership, proofs=(proof_of(peer),))
    return membership


def change(peer: Membership | PeerEngine, **changes: object) -> None:
    """Change some of a peer's conditions."""
    target = peer.local if isinstance(peer, Membership) else peer
    target.set_conditions(replace(target.conditions, **changes))  # type: ignore[arg-type]


def head_of(*, height: int = 0, digest: bytes = b"start", round_index: int = -1, radius: float = 1.0) -> SpanHead:
    return SpanHead(
        digest=sha256(digest),
        height=height,
        round=round_index,
        roster=founding().roster.digest(),
        radius=radius,
        median_weight=1000.0,
    )


def entry_on(
    head: SpanHead,
    roster: Roster,
    owner: PeerId,
    *,
    span: SpanId = SPAN,
    places: Sequence[int] | None = None,
    present: Sequence[int] | None = None,
    **changes: object,
) -> Entry:
    included = set(places) if places is not None else set(range(len(roster.members)))
    entry = Entry(
        run=RUN,
        round=head.round + 2 if head.round >= 0 else span.fragment,
        span=span,
        parent=head.digest,
        height=head.height + 1,
        roster=roster.digest(),
        present=pack_included(set(present) if present is not None else included, len(roster.members)),
        included=pack_included(included, len(roster.members)),
        weights=tuple(1.0 for _ in included),
        tokens=100,
        median_norm=1.0,
        median_weight=1000.0,
        payload=b"payload",
        signature=NO_SIGNATURE,
    )
    entry = replace(entry, **changes)  # type: ignore[arg-type]
    return replace(entry, signature=sign_as(owner, entry.statement()))


def fragment_head(round_index: int = 0, digest: bytes = b"\1" * 8) -> FragmentHead:
    return FragmentHead(round=round_index, digest=Digest(digest))


def take_entry(engine: PeerEngine, sender: PeerId, entry: Entry, now: float, *, norm: float = 1.0) -> list[Action]:
    """Let an engine take an entry that the codec has checked."""
    return engine.take_result(EntryChecked(sender=sender, entry=entry, payload_norm=norm), now)
