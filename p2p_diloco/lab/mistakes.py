"""Mistakes planted on purpose, to see that the invariants catch them: a lab that finds nothing proves nothing.

Each is one that an implementation could really make. `Mistakes` is asked at the places where the lab plays an action;
mistakes inside the rules themselves replace a function of `protocol/` while the lab runs.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.maths import OUTER, absorbed_entry
from p2p_diloco.outer.mean import weighted_mean
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol import ballot, membership, roster_book
from p2p_diloco.protocol.actions import ReduceSpan
from p2p_diloco.protocol.ballot import Ballots, Candidacy, Promise, Proposal, Vote
from p2p_diloco.protocol.entry import Entry, next_head
from p2p_diloco.protocol.membership import Membership
from p2p_diloco.protocol.roster import Roster, Verify
from p2p_diloco.swarm.vector_work import Codecs, Reduced


class Mistake(enum.Enum):
    """What can be planted; the value is the word on the command line."""

    DOUBLE_COUNT = "double-count"
    APPLY_TWICE = "apply-twice"
    OUT_OF_ORDER = "out-of-order"
    NEWCOMER_CERTIFIES = "newcomer-certifies"
    TWO_VOTES = "two-votes"
    UNDECODED_BYTES = "undecoded-bytes"
    IN_FLIGHT_LEFT_OUT = "in-flight-left-out"


class Mistakes:
    """The planted mistake, or none."""

    def __init__(self, codecs: Codecs, planted: Mistake | None = None) -> None:
        self.planted = planted
        self._codecs = codecs
        self._means: dict[tuple[Machine, Digest], Vector] = {}
        self._mean_of: dict[tuple[Machine, bytes], Vector] = {}

    @property
    def leaves_out_in_flight(self) -> bool:
        """Tell whether islands forget what they have sent."""
        return self.planted is Mistake.IN_FLIGHT_LEFT_OUT

    def reduced_parts(self, machine: Machine, order: ReduceSpan) -> ReduceSpan:
        """Return what a reducer averages: one that counts double takes its first contribution twice."""
        if self.planted is not Mistake.DOUBLE_COUNT:
            return order
        return replace(order, parts=(*order.parts, order.parts[0]))

    def note_mean(self, machine: Machine, order: ReduceSpan, reduced: Reduced) -> None:
        """Keep the mean as it was before it was encoded, for an owner that applies that."""
        if self.planted is Mistake.UNDECODED_BYTES:
            elements = int(self._codecs.contribution.decode(order.parts[0].payload, self._elements(order)).size)
            vectors = [self._codecs.contribution.decode(part.payload, elements) for part in order.parts]
            mean_N = weighted_mean(vectors, [part.weight for part in order.parts])
            self._mean_of[machine, reduced.payload] = mean_N

    def _elements(self, order: ReduceSpan) -> int:
        size = len(order.parts[0].payload)
        return next(n for n in range(1, 4096) if self._codecs.contribution.encoded_bytes(n) == size)

    def advance(self, machine: Machine, state: SpanState, entry: Entry) -> SpanState | None:
        """Return the state that a mistaken peer makes of an entry; None where it makes no mistake."""
        if self.planted is Mistake.UNDECODED_BYTES and (machine, entry.payload) in self._mean_of:
            mean_N = self._mean_of[machine, entry.payload]
            return absorb(state, entry=absorbed_entry(entry), update_N=mean_N, rule=OUTER)
        if self.planted is Mistake.APPLY_TWICE and state.head.round >= entry.round:
            update_N = self._codecs.entry.decode(entry.payload, state.elements)
            earlier = SpanState(
                head=replace(state.head, round=entry.round - 1), anchor_N=state.anchor_N, momentum_N=state.momentum_N
            )
            again = absorb(earlier, entry=absorbed_entry(entry), update_N=update_N, rule=OUTER)
            return SpanState(head=state.head, anchor_N=again.anchor_N, momentum_N=again.momentum_N)
        return None

    def times_applied(self, machine: Machine, entry: Entry) -> int:
        """Return how often an island is told of an entry: the one that repeats itself does so at a few spans."""
        twice = self.planted is Mistake.APPLY_TWICE and (machine.peer[0] + entry.round) % 8 == 0
        return 2 if twice else 1

    def apply_out_of_order(self, machine: Machine, entry: Entry) -> bool:
        """Tell whether a peer applies an entry whose parent it lacks, and let its log stand there."""
        if self.planted is not Mistake.OUT_OF_ORDER:
            return False
        heads = machine.running.chains.heads
        head = heads.get(entry.span)
        if head is None or entry.parent == head.digest or entry.height <= head.height:
            return False
        heads[entry.span] = next_head(head, entry)
        return True


@contextlib.contextmanager
def planted_in_rules(mistake: Mistake | None) -> Iterator[None]:
    """Replace functions of the rules for as long as the context lasts; for one process at a time."""
    with contextlib.ExitStack() as stack:

        def plant(place: object, name: str, wrong: object) -> None:
            stack.enter_context(mock.patch.object(place, name, wrong))

        if mistake is Mistake.NEWCOMER_CERTIFIES:
            plant(Membership, "_may_vote", lambda self, parent: self.ready or parent.member(self.me.peer) is not None)
            plant(ballot, "add_vote", _add_any_vote)
            plant(membership, "add_vote", _add_any_vote)
            plant(membership, "add_promise", _add_any_promise)
            plant(membership, "certificate", ballot.certificate)
            plant(membership, "propose", _propose_to_all)
            plant(roster_book, "check_certificate", lambda child, parent, verify: None)
        if mistake is Mistake.TWO_VOTES:
            plant(membership, "vote", _vote_again)
        yield


def _vote_again(ballots: Ballots, proposal: Proposal) -> Ballots:
    """Vote for anything at any time, bound by nothing and remembering nothing."""
    return ballots


def _add_any_promise(candidacy: Candidacy, sender: PeerId, word: Promise, verify: Verify) -> Candidacy:
    if (word.parent, word.level, word.ballot) != (candidacy.parent.digest(), candidacy.level, candidacy.ballot):
        return candidacy
    return replace(candidacy, promises={**candidacy.promises, sender: word.voted})


def _propose_to_all(candidacy: Candidacy, wish: Roster, sign: Callable[[bytes], bytes]) -> Candidacy:
    if candidacy.proposal is not None or not candidacy.promises:
        return candidacy
    unsigned = Proposal(ballot=candidacy.ballot, roster=wish, signature=bytes(64))
    return replace(candidacy, proposal=replace(unsigned, signature=sign(unsigned.statement())))


def _add_any_vote(candidacy: Candidacy, sender: PeerId, word: Vote, verify: Verify) -> Candidacy:
    proposal = candidacy.proposal
    if proposal is None or (word.roster, word.ballot) != (proposal.roster.digest(), candidacy.ballot):
        return candidacy
    return replace(candidacy, votes={**candidacy.votes, sender: word.signature})
