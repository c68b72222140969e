"""Mistakes planted on purpose, to test that the invariants catch them.

Each is a mistake that an implementation could really make. The shipped code does not know of them: a planted mistake
replaces one of its functions or methods while a seed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.node import vector_actions
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.link_keeper import LinkKeeper
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.node.vector_actions import Serving, VectorActions
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.state import InFlight, IslandSpan, SpanState, absorb, prepare_contribution, replace_span
from p2p_diloco.protocol.actions import Action, ApplyEntry, ReduceSpan, Send
from p2p_diloco.protocol.actions import Stage as ReduceStage
from p2p_diloco.protocol.clock import SHORTEST_TURN_SECONDS, TURN_SHARE, RoundClock
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership import roster_book, rosters, stall
from p2p_diloco.protocol.membership.local import LocalPeer
from p2p_diloco.protocol.membership.presence import Presence
from p2p_diloco.protocol.membership.reach import Network, Reach
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.differences import Differences
from p2p_diloco.protocol.repair.repair import Repair
from p2p_diloco.protocol.round import exchange
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire import entry as entry_module
from p2p_diloco.protocol.wire import roster
from p2p_diloco.protocol.wire.entry import Entry, next_head
from p2p_diloco.protocol.wire.messages import RosterReply
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, Verify, vote_statement
from p2p_diloco.span import serve
from p2p_diloco.span.reduce import Codecs, EncodedMean, reduce_parts
from p2p_diloco.storage import archive as archive_module
from p2p_diloco.storage import whole_file
from p2p_diloco.storage.checkpoint import CheckpointFolder
from p2p_diloco.storage.entry_log import EntryLog
from p2p_diloco.storage.run_folder import RunFolder
from simulator import island as island_module
from simulator.island import SimulatedIsland
from simulator.maths import OUTER, mean_of_span

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake.

    Attributes:
        name: its name on the command line.
        text: what is done wrong.
        caught_by: the invariants that may be the first to break.
        patches: returns the replacements as (owner, name, replacement). It is called for each seed, so they may keep
            state.
        kinds: kinds of trouble that bring it out; fewer than all if it rarely shows otherwise.
    """

    name: str
    text: str
    caught_by: frozenset[str]
    patches: Callable[[], list[Patch]]
    kinds: str = "all"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the mistake in this process inside the block."""
        with ExitStack() as planted:
            for owner, name, wrong in self.patches():
                planted.enter_context(replaced(owner, name, wrong))
            yield


@contextmanager
def replaced(owner: Any, name: str, wrong: object) -> Iterator[None]:
    """Replace a function or method of the shipped code inside the block."""
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, right)


MISTAKES: dict[str, Mistake] = {}


def _mistake(
    name: str, caught_by: str, kinds: str = "all"
) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def keep(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        text = (patches.__doc__ or "").strip()
        MISTAKES[name] = Mistake(
            name=name, text=text, caught_by=frozenset(caught_by.split()), patches=patches, kinds=kinds
        )
        return patches

    return keep


# -- averaging


@_mistake("double-count", "I2")
def _double_count() -> list[Patch]:
    """A reducer counts its first contribution twice."""
    right = reduce_parts

    def wrong(order: ReduceSpan, codecs: Codecs, elements: int, secret: bytes = b"") -> EncodedMean | str:
        return right(replace(order, parts=(*order.parts, order.parts[0])), codecs, elements, secret)

    return [(vector_actions, "reduce_parts", wrong)]


@_mistake("equal-weights", "I2")
def _equal_weights() -> list[Patch]:
    """A reducer ignores the weights."""
    right = reduce_parts

    def wrong(order: ReduceSpan, codecs: Codecs, elements: int, secret: bytes = b"") -> EncodedMean | str:
        return right(
            replace(order, parts=tuple(replace(part, weight=1.0) for part in order.parts)), codecs, elements, secret
        )

    return [(vector_actions, "reduce_parts", wrong)]


@_mistake("plain-for-radial", "I2")
def _plain_for_radial() -> list[Patch]:
    """A reducer computes a plain mean for spans that need a radial one."""
    right = reduce_parts

    def wrong(order: ReduceSpan, codecs: Codecs, elements: int, secret: bytes = b"") -> EncodedMean | str:
        return right(order, replace(codecs, radial={}), elements, secret)

    return [(vector_actions, "reduce_parts", wrong)]


@_mistake("sender-forgotten", "I2")
def _sender_forgotten() -> list[Patch]:
    """A mean leaves one contribution out but lists it as included."""
    right = reduce_parts

    def wrong(order: ReduceSpan, codecs: Codecs, elements: int, secret: bytes = b"") -> EncodedMean | str:
        parts = order.parts[1:] or order.parts
        reduced = right(replace(order, parts=parts), codecs, elements, secret)
        if isinstance(reduced, EncodedMean):
            return replace(reduced, measured={part.peer: reduced.norm for part in order.parts})
        return reduced

    return [(vector_actions, "reduce_parts", wrong)]


@_mistake("undecoded-bytes", "I1")
def _undecoded_bytes() -> list[Patch]:
    """An owner applies the mean from before it was encoded."""
    right, advance = reduce_parts, SimulatedIsland.advance
    means: dict[tuple[float, bytes], Any] = {}

    def wrong(order: ReduceSpan, codecs: Codecs, elements: int, secret: bytes = b"") -> EncodedMean | str:
        reduced = right(order, codecs, elements, secret)
        if isinstance(reduced, EncodedMean) and order.stage is not ReduceStage.ROW:
            source, _ = codecs.of(order.stage)
            parts = [part for part in order.parts if part.peer in reduced.sound]
            vectors = [source.decode(part.payload, elements) for part in parts]
            means[_machine_key(), bytes(reduced.payload)] = mean_of_span(
                codecs, order.span, vectors, [part.weight for part in parts]
            )
        return reduced

    def apply_undecoded(self: SimulatedIsland, before: SpanState, update: SpanUpdate) -> SpanState:
        mean_N = means.get((_machine_key(), bytes(update.payload)))
        if mean_N is None:
            return advance(self, before, update)
        return absorb(before, entry=update.absorbed, update_N=mean_N, rule=OUTER)

    return [(vector_actions, "reduce_parts", wrong), (SimulatedIsland, "advance", apply_undecoded)]


@_mistake("weights-mixed-up", "I2")
def _weights_mixed_up() -> list[Patch]:
    """A reducer gives each contribution the weight of another."""
    right = reduce_parts

    def wrong(order: ReduceSpan, codecs: Codecs, elements: int, secret: bytes = b"") -> EncodedMean | str:
        weights = [part.weight for part in order.parts]
        parts = [
            replace(part, weight=weight) for part, weight in zip(order.parts, [*weights[1:], *weights[:1]], strict=True)
        ]
        return right(replace(order, parts=tuple(parts)), codecs, elements, secret)

    return [(vector_actions, "reduce_parts", wrong)]


@_mistake("row-counted-twice", "I2", kinds="none")
def _row_counted_twice() -> list[Patch]:
    """An owner counts the mean of its first row twice."""
    right = reduce_parts

    def wrong(order: ReduceSpan, codecs: Codecs, elements: int, secret: bytes = b"") -> EncodedMean | str:
        if order.stage is ReduceStage.FINISH:
            order = replace(order, parts=(*order.parts, order.parts[0]))
        return right(order, codecs, elements, secret)

    return [(vector_actions, "reduce_parts", wrong)]


# -- the island


@_mistake("apply-twice", "I2")
def _apply_twice() -> list[Patch]:
    """A node sometimes passes an entry to its island twice."""
    right = VectorActions.play

    def wrong(self: VectorActions, action: Any) -> None:
        right(self, action)
        if isinstance(action, ApplyEntry) and (self.engine.me.peer[0] + action.entry.round) % 8 == 0:
            right(self, action)

    return [(VectorActions, "play", wrong)]


@_mistake("in-flight-left-out", "I2")
def _in_flight_left_out() -> list[Patch]:
    """A pseudo-gradient does not subtract what is in flight."""
    right = prepare_contribution

    def wrong(span: IslandSpan, **more: Any) -> Any:
        return right(span._replace(in_flight=InFlight()), **more)

    return [(island_module, "prepare_contribution", wrong)]


@_mistake("replaced-in-flight", "I2 I6")
def _replaced_in_flight() -> list[Patch]:
    """Contributions stay in flight when a transfer replaces a span."""
    right = replace_span

    def wrong(span: IslandSpan, **more: Any) -> Any:
        return right(span, **more)._replace(in_flight=span.in_flight)

    return [(island_module, "replace_span", wrong)]


@_mistake("other-momentum", "I1")
def _other_momentum() -> list[Patch]:
    """A peer that replays entries from its disk makes a different outer step than when they arrived."""
    right = absorb

    def wrong(state: SpanState, **more: Any) -> SpanState:
        return right(state, **{**more, "rule": OuterRule(learning_rate=1.0, momentum=0.4)})

    return [(archive_module, "absorb", wrong)]


# -- the log


@_mistake("out-of-order", "I3")
def _out_of_order() -> list[Patch]:
    """A peer absorbs an entry whose parent it lacks; its log then stays there."""
    right = PeerEngine._take_entry

    def wrong(self: PeerEngine, sender: Any, entry: Entry, norm: float, now: float) -> list[Action]:
        head = self.chains.heads.get(entry.span)
        if head is None or entry.parent == head.digest or entry.height <= head.height:
            return right(self, sender, entry, norm, now)
        self.chains.heads[entry.span] = next_head(head, entry)
        return [ApplyEntry(entry=entry, own_included=False)]

    return [(PeerEngine, "_take_entry", wrong)]


@_mistake("own-turns", "I3 I6 I7 I8 I10")
def _own_turns() -> list[Patch]:
    """Each peer computes the turns of ballots from what it measures itself, such as its round trips."""
    right = PeerEngine.__init__

    def wrong(self: PeerEngine, *, me: LocalPeer, rules: RunRules, **others: Any) -> None:
        values = {name: getattr(rules.clock, name) for name in ("start_seconds", "round_seconds", "num_fragments")}
        right(self, me=me, rules=replace(rules, clock=_OwnTurns(**values, factor=1.0 + me.peer[0] / 255.0)), **others)

    return [(PeerEngine, "__init__", wrong)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnTurns(RoundClock):
    factor: float

    @property
    def turn_seconds(self) -> float:
        return self.factor * max(TURN_SHARE * self.round_seconds, SHORTEST_TURN_SECONDS)


@_mistake("dropped-after-a-round", "I10")
def _dropped_after_a_round() -> list[Patch]:
    """A member counts as gone after one round in which no entry names it as present."""
    return [
        (RunRules, "absence_rounds", property(lambda self: 1)),
        (Presence, "_had_entries", lambda self, current: True),
    ]


@_mistake("proved-at-home", "I6 I7 I10", kinds="home")
def _proved_at_home() -> list[Patch]:
    """A proof within a home network counts for everybody."""
    return [(Reach, "_farthest", lambda self, company, now: Network.MACHINE)]


@_mistake("no-majority", "I8")
def _no_majority() -> list[Patch]:
    """A parent gets a child if any member was present."""

    def wrong(self: Roster, places: Iterable[int]) -> bool:
        return any(True for _ in places)

    return [(Roster, "has_majority", wrong)]


@_mistake("half-is-enough", "I6 I8", kinds="partition")
def _half_is_enough() -> list[Patch]:
    """A parent gets a child when exactly half of the electorate names it."""

    def wrong(self: Roster, places: Iterable[int]) -> bool:
        return 2 * self.num_voters(places) >= len(self.voters)

    return [(Roster, "has_majority", wrong)]


@_mistake("counts-the-absent", "I8")
def _counts_the_absent() -> list[Patch]:
    """An owner signs that every member of the roster was present."""
    right = entry_module.build_entry

    def wrong(roster: Roster, *more: Any, **owner: Any) -> Entry | str:
        everybody = tuple(range(len(roster.members)))
        told: list[Any] = [
            replace(one, present=everybody) if isinstance(one, entry_module.Inclusion) else one for one in more
        ]
        return right(roster, *told, **owner)

    return [(exchange, "build_entry", wrong)]


@_mistake("never-reduces-late", "I4")
def _never_reduces_late() -> list[Patch]:
    """A reducer waits for contributions that never arrive."""

    def wrong(self: Exchange, now: float) -> list[Action]:
        return []

    return [(Exchange, "tick", wrong)]


# -- rosters


@_mistake("newcomer-certifies", "I8")
def _newcomer_certifies() -> list[Patch]:
    """A ready newcomer puts itself on the roster by its own vote, and all peers accept any certificate."""
    right = PeerEngine.tick
    certified_once: set[tuple[Any, Digest]] = set()

    def take_any(child: CertifiedRoster, parent: Roster, verify: Verify, rules: object = None) -> None:
        """Accept it."""

    def wrong(self: PeerEngine, now: float) -> list[Action]:
        actions = right(self, now)
        parent, me = self.book.in_force, self.me
        if parent is None or parent.k == 0 or not self.ready or parent.member(me.peer) is not None:
            return actions
        if (me.peer, parent.digest()) in certified_once:
            return actions
        certified_once.add((me.peer, parent.digest()))
        members = (*parent.members, me.member())
        child = replace(parent, parent=parent.digest(), k=parent.k + 1, degraded=False, members=members)
        number = self.rules.clock.ballot_at(now)
        signature = me.sign(vote_statement(child.digest(), number))
        certified = CertifiedRoster(roster=child, ballot=number, votes=((me.peer, signature),))
        reply = RosterReply(rosters=(certified,))
        soon = now + self.rules.clock.round_seconds
        sends = [Send(to=peer, message=reply, deadline=soon) for peer in sorted(self.linked)]
        return [*actions, *self.membership.rosters.take((certified,), now), *sends]

    return [(roster_book, "check_certificate", take_any), (PeerEngine, "tick", wrong)]


@_mistake("minority-certifies", "I8")
def _minority_certifies() -> list[Patch]:
    """A third of the voters is enough to certify a roster."""

    def wrong(parent: Roster, peers: Collection[PeerId]) -> bool:
        return 3 * len(parent.voters.intersection(peers)) >= len(parent.voters)

    return [(module, "is_majority", wrong) for module in (roster, stall, rosters)]


@_mistake("member-not-counted", "I8")
def _member_not_counted() -> list[Patch]:
    """One voter is left out when a majority is counted."""

    def wrong(parent: Roster, peers: Collection[PeerId]) -> bool:
        counted = parent.voters - {max(parent.voters)} if len(parent.voters) > 1 else parent.voters
        return 2 * len(counted.intersection(peers)) > len(counted)

    return [(module, "is_majority", wrong) for module in (roster, stall, rosters)]


@_mistake("rosters-not-served", "I6 I7 I8")
def _rosters_not_served() -> list[Patch]:
    """A peer that asks for rosters gets none."""
    return [(RosterBook, "after", lambda self, known: ())]


# -- catching up and memory


@_mistake("ready-too-early", "I1 I3 I6 I9")
def _ready_too_early() -> list[Patch]:
    """A peer considers itself complete as soon as it holds all spans, whatever others hold."""

    def wrong(self: Differences) -> bool:
        return True

    return [(Differences, "is_complete", wrong)]


@_mistake("anchor-for-momentum", "I1 I6 I7")
def _anchor_for_momentum() -> list[Patch]:
    """A transfer carries the anchor twice, the second time in place of the momentum."""
    right = serve.cut_piece

    def wrong(state: SpanState, offset: int, most_bytes: int) -> memoryview:
        half = 4 * state.elements
        return right(state, offset - half if half <= offset < 2 * half else offset, most_bytes)

    return [(serve, "cut_piece", wrong)]


@_mistake("memory-not-compared", "I1 I6 I7")
def _memory_not_compared() -> list[Patch]:
    """No peer compares its bytes with those of others, or with its own disk."""
    return [
        (Serving, "_compare_content", lambda self, action: None),
        (Serving, "_rebuild", lambda self, span: None),
    ]


@_mistake("absent-entries", "I6 I7")
def _absent_entries() -> list[Patch]:
    """A peer that lacks an entry waits for it and never fetches anything."""
    return [(CatchUp, "pump", lambda self, donors, now, sources=None, holders=(): [])]


@_mistake("heads-not-compared", "I6 I7")
def _heads_not_compared() -> list[Patch]:
    """No peer notices from heartbeats that its heads differ from those of others."""
    return [(Repair, "compare", lambda self, sender, beat, now: [])]


# -- the shell


@_mistake("never-redials", "I6 I7 I8")
def _never_redials() -> list[Patch]:
    """A lost link is never dialled again."""
    right = LinkKeeper._due
    tried: set[tuple[int, Any]] = set()

    def wrong(self: LinkKeeper) -> Iterator[Any]:
        for peer in right(self):
            if (id(self), peer) not in tried:
                tried.add((id(self), peer))
                yield peer

    return [(LinkKeeper, "_due", wrong)]


@_mistake("sleeps-too-long", "I4 I6 I7")
def _sleeps_too_long() -> list[Patch]:
    """A node that receives nothing looks at its clock once per round."""
    return [(PeerEngine, "wake_at", lambda self, now: now + self.rules.clock.round_seconds)]


@_mistake("own-clock-only", "I4 I6 I7")
def _own_clock_only() -> list[Patch]:
    """Each peer uses its own wall clock as swarm time, ahead by up to five seconds."""

    def wrong(self: SwarmClock) -> float:
        return self.raw() + _machine_key() % 5.0

    return [(SwarmClock, "now", wrong)]


@_mistake("incarnation-repeated", "I2 I6 I7 I8 I10", kinds="kill,power,leave")
def _incarnation_repeated() -> list[Patch]:
    """A restarted peer reuses its previous incarnation."""
    right = RunFolder.next_incarnation

    def wrong(self: RunFolder) -> int:
        right(self)
        return 1

    return [(RunFolder, "next_incarnation", wrong)]


@_mistake("nothing-synced", "I2 I6 I7 I8 I9", kinds="power")
def _nothing_synced() -> list[Patch]:
    """Files are written but never synced to the disk."""
    return [(whole_file, "sync_file", lambda path: None)]


@_mistake("wrong-entry-served", "I1 I3 I6 I7 I9 I10", kinds="loss,one-way,partition,stall")
def _wrong_entry_served() -> list[Patch]:
    """The archive returns an entry of the right span, whatever its parent."""
    right = EntryLog.entry_after

    def wrong(self: EntryLog, span: Any, parent: Digest) -> Entry | None:
        found = right(self, span, parent)
        if found is not None:
            return found
        return next((entry for entry in self.kept() if entry.span == span), None)

    return [(EntryLog, "entry_after", wrong)]


@_mistake("checkpoint-of-two-moments", "I1")
def _checkpoint_of_two_moments() -> list[Patch]:
    """A checkpoint holds the current heads and the anchors of the previous save."""
    right = CheckpointFolder.save
    before: dict[Any, dict[Any, SpanState]] = {}

    def wrong(self: CheckpointFolder, states: Any) -> None:
        old = before.get(self._folder, {})
        torn = {
            span: SpanState(head=state.head, anchor_N=old[span].anchor_N.copy(), momentum_N=state.momentum_N.copy())
            if span in old
            else state
            for span, state in states.items()
        }
        before[self._folder] = dict(states)
        right(self, torn)

    return [(CheckpointFolder, "save", wrong)]


@_mistake("rate-that-never-falls", "I1")
def _rate_that_never_falls() -> list[Patch]:
    """A peer that replays entries from its disk takes the outer rate of the run's start, whatever the height."""
    right = absorb

    def wrong(state: SpanState, **more: Any) -> SpanState:
        return right(state, **{**more, "rule": replace(OUTER, final_share=1.0)})

    return [(archive_module, "absorb", wrong)]


def _machine_key() -> float:
    """Return a number that identifies the machine whose process is running."""
    from simulator.process import current_process

    process = current_process()
    return process.clock.key if process is not None else 0.0
