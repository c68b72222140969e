"""The cost of the rosters of a long run for a joiner: bytes on disk, and CPU time to check all of them.

Only membership is simulated, without a network. Members join and leave, and voters promise what they see. The proposal
that follows by rule is checked, voted for and certified as in a ballot, with real signatures. The storage of a peer
keeps the rosters. A joiner fetches them in control frames, then decodes and checks them as a peer does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.protocol.actions import KeepRoster
from p2p_diloco.protocol.engine import PeerEngine, SavedState
from p2p_diloco.protocol.membership.declarations import MOST_APPLICATIONS
from p2p_diloco.protocol.membership.local import LocalPeer
from p2p_diloco.protocol.membership.presence import COUNTS_AFTER_CYCLES
from p2p_diloco.protocol.membership.proposal import next_roster
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import (
    Candidacy,
    Promise,
    Promised,
    View,
    Vote,
    add_promise,
    add_vote,
    certificate,
    check_proposal,
    propose,
)
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE, pack_included
from p2p_diloco.protocol.wire.member import FULL_SHARE, Declaration
from p2p_diloco.protocol.wire.messages import RosterReply, decode_message, encode_message
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, founding_statement, is_majority, vote_statement
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.storage.run_folder import ROSTERS_FILE, RunFolder
from p2p_diloco.transport.link import TransportLimits
from simulator.run import ORGANISER, RUN, key_named, run_rules
from simulator.scale import FOUNDER, first_rosters


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterPlan:
    """Options of a measurement.

    Attributes:
        members: number of peers in the run; roster 1 lists all.
        every: each member leaves once in this many cycles, and applies again in the next one.
    """

    members: int = 200
    every: int = 30
    cycles: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterCost:
    """The cost of the chain of rosters.

    Attributes:
        fewest_members: size of the smallest roster; members are away for a cycle or more.
        joined, left: number of arrivals and departures, over all members.
        largest_frame_bytes: size of the largest control frame that brings a joiner the chain.
        join_cpu_seconds: CPU time that a joiner takes to decode and check all rosters.
        start_cpu_seconds: CPU time that a restarted peer takes to read and check those on its disk.
    """

    members: int
    cycles: int
    rosters: int
    fewest_members: int
    joined: int
    left: int
    bytes_on_disk: int
    frames: int
    largest_frame_bytes: int
    join_cpu_seconds: float
    start_cpu_seconds: float

    def is_within(self, most_bytes: float, most_seconds: float) -> bool:
        """Return whether the cost is within these limits and every frame fits the control lane."""
        is_short = self.largest_frame_bytes <= TransportLimits().control_frame_bytes
        return is_short and self.bytes_on_disk <= most_bytes and self.join_cpu_seconds <= most_seconds


def measure_rosters(plan: RosterPlan, state_directory: Path) -> RosterCost:
    """Simulate the membership of a long run and return the cost of its rosters.

    Args:
        state_directory: an empty folder for the rosters.
    """
    rules = run_rules()
    book = RosterBook(rules=rules, verify=_checked_once)
    folder = RunFolder(state_directory, RUN)
    for certified in _play(plan, rules, book):
        folder.keep_roster(certified)
    sizes = [len(certified.roster.members) for certified in book.chain()[1:]]
    flow = [
        len(after.roster.peers() - before.roster.peers())
        for before, after in zip(book.chain()[1:], book.chain()[2:], strict=False)
    ]
    frame_bytes, join_seconds = _join(rules, book)
    began = time.process_time()
    _engine(rules, SavedState(rosters=folder.recall_rosters()))
    return RosterCost(
        members=plan.members,
        cycles=plan.cycles,
        rosters=len(book.chain()),
        fewest_members=min(sizes),
        joined=sum(flow),
        left=sizes[0] + sum(flow) - sizes[-1],
        bytes_on_disk=(folder.path / ROSTERS_FILE).stat().st_size,
        frames=len(frame_bytes),
        largest_frame_bytes=max(frame_bytes),
        join_cpu_seconds=join_seconds,
        start_cpu_seconds=time.process_time() - began,
    )


@lru_cache(maxsize=1 << 12)
def _checked_once(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Check a signature once for all simulated members; the joiner checks each itself."""
    return is_signed_by(peer, statement, signature)


def _play(plan: RosterPlan, rules: RunRules, book: RosterBook) -> Iterator[CertifiedRoster]:
    """Add a roster to the book for each cycle in which a member joins or leaves, and yield it."""
    keys = {key.peer: key for key in (key_named(f"p{place}") for place in range(plan.members))}
    starts = dict.fromkeys(keys, 1)
    for certified in _first_rosters(rules, list(keys)):
        book.add(certified)
        yield certified
    away = deque[PeerId]()
    for cycle in range(1, plan.cycles + 1):
        parent = book.in_force
        assert parent is not None
        leaving = [peer for place, peer in enumerate(keys) if (place + cycle) % plan.every == 0 and peer not in away]
        coming = sorted(away, key=lambda peer: sha256(parent.digest(), peer))[:MOST_APPLICATIONS]
        words = [_declaration(keys[peer], starts[peer], cycle, leaving=peer in leaving) for peer in (*leaving, *coming)]
        child = _certified(parent, cycle, tuple(words), keys, rules, book)
        if child is not None:
            book.add(child)
            yield child
            for peer in child.roster.peers().intersection(away):
                away.remove(peer)
            gone = [peer for peer in leaving if peer not in child.roster.peers()]
            away.extend(gone)
            starts.update({peer: starts[peer] + 1 for peer in gone})


def _first_rosters(rules: RunRules, peers: list[PeerId]) -> tuple[CertifiedRoster, CertifiedRoster]:
    """Return the founding roster and roster 1, which lists all peers, with real signatures."""
    founding, first = first_rosters(rules, [(peer, True) for peer in peers])
    organised = key_named("organiser").sign(founding_statement(founding.roster.digest()))
    voted = key_named(FOUNDER).sign(vote_statement(first.roster.digest(), first.ballot))
    founder = key_named(FOUNDER).peer
    return replace(founding, votes=((ORGANISER, organised),)), replace(first, votes=((founder, voted),))


def _declaration(key: SigningKey, incarnation: int, cycle: int, *, leaving: bool) -> Declaration:
    unsigned = Declaration(
        run=RUN,
        peer=key.peer,
        incarnation=incarnation,
        cycle=cycle,
        proofs=(),  # it only dials out; a promise has room for fewer declarations with proofs
        trains=True,
        share=FULL_SHARE,
        leaving=leaving,
        signature=NO_SIGNATURE,
    )
    return replace(unsigned, signature=key.sign(unsigned.statement()))


def _certified(
    parent: Roster,
    cycle: int,
    words: tuple[Declaration, ...],
    keys: dict[PeerId, SigningKey],
    rules: RunRules,
    book: RosterBook,
) -> CertifiedRoster | None:
    """Return the child of `parent` that its electorate agrees on in a cycle; None if nothing changes."""
    clock = rules.clock
    ballot = clock.ballot_at(clock.begin((cycle + 1) * clock.num_fragments - 1))
    before = book.parent_of(parent)
    rule = partial(next_roster, parent, rules=rules, founder=book.founder, before=before, degraded=False)
    quorum = partial(is_majority, parent)
    view = _view(parent, cycle, words, rules)
    candidacy = Candidacy(parent=parent, degraded=False, ballot=ballot)
    for voter in sorted(parent.voters):
        promise = _promise(keys[voter], parent.digest(), ballot, view)
        word = Promised(promise=promise, voted=None)
        candidacy = propose(add_promise(candidacy, voter, word, rule, quorum, _checked_once), rule, quorum)
        if quorum(candidacy.promises.keys()):
            break
    if candidacy.proposal is None:
        return None
    check_proposal(candidacy.proposal, parent, rule, quorum, _checked_once)
    digest = candidacy.proposal.roster.digest()
    for voter in sorted(parent.voters):
        signature = keys[voter].sign(vote_statement(digest, ballot))
        vote = Vote(parent=parent.digest(), roster=digest, ballot=ballot, signature=signature)
        candidacy = add_vote(candidacy, voter, vote, _checked_once)
        certified = certificate(candidacy, quorum)
        if certified is not None:
            return certified
    raise AssertionError("all voters vote")


def _view(parent: Roster, cycle: int, words: tuple[Declaration, ...], rules: RunRules) -> View:
    """Return what every voter sees: all members are present, and were in all entries since they were listed."""
    places, number = range(len(parent.members)), len(parent.members)
    counting = {n for n, m in enumerate(parent.members) if not m.counts and cycle - m.since >= COUNTS_AFTER_CYCLES}
    nobody = pack_included(set(), number)
    return View(
        absent=nobody,
        heard=pack_included(set(places), number),
        counting=pack_included(counting, number),
        idle=nobody,
        height=cycle * rules.num_all_spans,
        declarations=words,
    )


def _promise(key: SigningKey, parent: Digest, ballot: int, view: View) -> Promise:
    unsigned = Promise(
        parent=parent, degraded=False, ballot=ballot, voted=None, view=view, voter=key.peer, signature=NO_SIGNATURE
    )
    return replace(unsigned, signature=key.sign(unsigned.statement()))


def _join(rules: RunRules, donor: RosterBook) -> tuple[list[int], float]:
    """Make a joiner fetch and check the whole chain; return the size of each frame, and CPU seconds."""
    engine, now = _engine(rules, SavedState()), rules.clock.begin((donor.chain()[-1].roster.cycle + 2) * 2)
    frame_bytes, seconds = list[int](), 0.0
    while engine.book.in_force_digest != donor.in_force_digest:
        frame = encode_message(RosterReply(rosters=donor.after(engine.book.landmarks())))
        frame_bytes.append(len(frame))
        began = time.process_time()
        actions = engine.receive(donor.founder, decode_message(frame), now)
        seconds += time.process_time() - began
        assert any(isinstance(action, KeepRoster) for action in actions), "every frame must bring the joiner a roster"
    return frame_bytes, seconds


def _engine(rules: RunRules, recalled: SavedState) -> PeerEngine:
    key = key_named("joiner")
    me = LocalPeer(peer=key.peer, incarnation=1, can_be_dialled=True, trains=True, sign=key.sign)
    return PeerEngine(me=me, rules=rules, verify=is_signed_by, recalled=recalled)
