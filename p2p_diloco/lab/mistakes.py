"""Mistakes planted on purpose, to see that the invariants catch them: a lab that finds nothing proves nothing.

Each is one that an implementation could really make. `Mistakes` is asked at the places where the lab plays an action;
mistakes inside the rules replace a function of `protocol/` for as long as a seed is played.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from p2p_diloco.ids import Digest
from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.maths import OUTER, absorbed_entry, mean_of_span
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol import entry as entry_rules
from p2p_diloco.protocol import exchange, finish, inclusion, membership, roster_book
from p2p_diloco.protocol import round as round_rules
from p2p_diloco.protocol.actions import Action, ReduceSpan, Send, Stage
from p2p_diloco.protocol.ballot import Ballots, Proposal, ballot_number
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.entry import Entry, next_head
from p2p_diloco.protocol.messages import RosterReply
from p2p_diloco.protocol.roster import CertifiedRoster, Roster, vote_statement
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
    NO_MAJORITY = "no-majority"
    COUNTS_THE_ABSENT = "counts-the-absent"


class Mistakes:
    """The planted mistake, or none."""

    def __init__(self, codecs: Codecs, span_elements: int, planted: Mistake | None = None) -> None:
        self.planted = planted
        self._codecs = codecs
        self._span_elements = span_elements
        self._undecoded: dict[tuple[str, bytes], Vector] = {}
        self._certified: set[tuple[str, Digest]] = set()

    @property
    def leaves_out_in_flight(self) -> bool:
        """Tell whether islands forget what they have sent."""
        return self.planted is Mistake.IN_FLIGHT_LEFT_OUT

    def reduced_parts(self, order: ReduceSpan) -> ReduceSpan:
        """Return what a reducer averages: one that counts double takes its first contribution twice."""
        if self.planted is not Mistake.DOUBLE_COUNT:
            return order
        return replace(order, parts=(*order.parts, order.parts[0]))

    def note_mean(self, machine: Machine, order: ReduceSpan, reduced: Reduced) -> None:
        """Keep the mean as it was before it was encoded, for an owner that applies that."""
        if self.planted is Mistake.UNDECODED_BYTES and order.stage is not Stage.ROW:
            source, _ = self._codecs.of(order.stage)
            parts = [part for part in order.parts if part.peer in reduced.sound]
            vectors = [source.decode(part.payload, self._span_elements) for part in parts]
            mean_N = mean_of_span(self._codecs, order.span, vectors, [part.weight for part in parts])
            self._undecoded[machine.name, bytes(reduced.payload)] = mean_N

    def times_applied(self, machine: Machine, entry: Entry) -> int:
        """Return how often an island is told of an entry: one that repeats itself does so now and then."""
        twice = self.planted is Mistake.APPLY_TWICE and (machine.peer[0] + entry.round) % 8 == 0
        return 2 if twice else 1

    def advance(self, machine: Machine, state: SpanState, entry: Entry) -> SpanState | None:
        """Return the state that a mistaken peer makes of an entry; None where it makes no mistake."""
        mean_N = self._undecoded.get((machine.name, bytes(entry.payload)))
        if mean_N is None:
            return None
        return absorb(state, entry=absorbed_entry(entry), update_N=mean_N, rule=OUTER)

    def takes_out_of_order(self, machine: Machine, entry: Entry) -> bool:
        """Tell whether a peer absorbs an entry whose parent it lacks; its log then stands there."""
        heads = machine.running.chains.heads
        head = heads.get(entry.span)
        if self.planted is not Mistake.OUT_OF_ORDER or head is None:
            return False
        if entry.parent == head.digest or entry.height <= head.height:
            return False
        heads[entry.span] = next_head(head, entry)
        return True

    def certify_alone(self, machine: Machine, now: float) -> list[Action]:
        """Return what a ready newcomer does that puts itself on the roster with its own vote, once for each parent."""
        engine = machine.running
        parent = engine.book.in_force
        if self.planted is not Mistake.NEWCOMER_CERTIFIES or parent is None or parent.k == 0 or not engine.ready:
            return []
        key = (machine.name, parent.digest())
        if parent.member(machine.peer) is not None or key in self._certified:
            return []
        self._certified.add(key)
        members = (*parent.members, engine.me.member())
        child = replace(parent, parent=parent.digest(), k=parent.k + 1, level=0, members=members, goodbyes=())
        ballot = ballot_number(engine.rules.clock.round_at(now), LEAD_TURNS - 1)
        signature = engine.me.sign(vote_statement(child.digest(), ballot))
        certified = CertifiedRoster(roster=child, ballot=ballot, votes=((machine.peer, signature),))
        reply = RosterReply(rosters=(certified,))
        soon = now + engine.rules.clock.round_seconds
        sends = [Send(to=peer, message=reply, deadline=soon) for peer in sorted(engine.linked)]
        return [*engine.membership.take_rosters((certified,), now), *sends]


@contextlib.contextmanager
def planted_in_rules(mistake: Mistake | None) -> Iterator[None]:
    """Replace functions of the rules for as long as the context lasts; it plants in this process, for all swarms."""
    if mistake is Mistake.NEWCOMER_CERTIFIES:
        with _replaced(roster_book, "check_certificate", _take_any_certificate):
            yield
    elif mistake is Mistake.TWO_VOTES:
        with _replaced(membership, "vote", _vote_again):
            yield
    elif mistake is Mistake.NO_MAJORITY:
        with contextlib.ExitStack() as planted:
            for module in (entry_rules, inclusion, round_rules, finish):
                planted.enter_context(_replaced(module, "are_enough", _any_are_enough))
            yield
    elif mistake is Mistake.COUNTS_THE_ABSENT:
        with _replaced(exchange, "build_entry", _count_the_absent):
            yield
    else:
        yield


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, wrong: object) -> Iterator[None]:
    right = getattr(module, name)
    setattr(module, name, wrong)
    try:
        yield
    finally:
        setattr(module, name, right)


def _take_any_certificate(child: CertifiedRoster, *more: object) -> None:
    """Take whatever somebody has signed, member of the parent or not."""


def _any_are_enough(num_present: int, num_members: int) -> bool:
    """Give a parent a child whoever was there, and take such a child."""
    return num_present > 0


def _count_the_absent(roster: Roster, *more: Any) -> Entry | str:
    """Sign that everybody on the roster was there."""
    everybody = tuple(range(len(roster.members)))
    told: list[Any] = [replace(one, present=everybody) if isinstance(one, inclusion.Inclusion) else one for one in more]
    return inclusion.build_entry(roster, *told)


def _vote_again(ballots: Ballots, proposal: Proposal) -> Ballots:
    """Vote for anything at any time, bound by nothing and remembering nothing."""
    return ballots
