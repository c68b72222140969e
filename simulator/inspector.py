"""Invariants that must hold at every moment, checked for the peer and span that an event touched.

The contract's invariants, in the strictest form that holds at every moment:

I1  A peer's (φ, m) at a chain digest equals, bit for bit, the result of applying that chain's entries to the initial
    state. It may differ only if a bit of its own memory flipped, or if it fetched the span from such a peer.
I2  An entry's payload is the encoded weighted mean, radial where the run has marks for that span, of exactly what its
    included members sent for that round, each once. No member's contribution to a span and round is in two entries, and
    no owner signs two. At the island, every contribution leaves the in-flight list once, and what was sent is what was
    made (`ledger.py`).
I3  An island absorbs an entry only on top of its parent. A span's height never falls within one life of a peer, except
    once per span after the peer has announced that it gives up its branch or adopts that span. (A restarted peer begins
    at its checkpoint.)
I4  Whenever a node ticks, its engine is in the round that its clock shows, and no span that it reduces is unsettled
    after the deadline.
I5  Holds by structure here: the shell never makes an island wait. Real threads are tested in `tests/session`.
I8  For each absorbed entry, more than half of its roster's electorate was present: each of them named the entry's
    parent for that span and round, under that roster. A roster in any book has votes of more than half of its parent's
    electorate, or is marked degraded and has a vote. A parent has at most one child that is not degraded. No round runs
    under two rosters: no entry names a roster in a round after the ballot that certified its child with a majority, by
    the earliest certificate that any peer holds.
I9  No process fails, whatever it receives; all states are finite.
I10 No majority drops a member that runs, wants to stay, has been linked with all who voted for that for two rounds, and
    was present for an entry of that line in the second half of the time after which a member counts as gone. Each of
    those who voted has held such an entry for two rounds. (Later ones may come after the promises.)

Invariants that hold only some time after the troubles (I6, I7, repair of I1, end of forks) are in `liveness.py`.
A check that is impossible because a hostile peer takes part counts as skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import Action, Send
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.grid import Grid, fold_roster
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.protocol.rules import ABSENT_CYCLES, SHORTEST_ABSENCE_SECONDS, RunRules
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import Opening
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, vote_statement
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span_log import LONGEST_BLOCK, SpanHead
from simulator.maths import SharedMaths, mean_of_span
from simulator.run import ORGANISER, verify


class Inspected(Protocol):
    """The parts of a machine that the inspector needs."""

    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> PeerId: ...
    @property
    def is_hostile(self) -> bool: ...
    def is_there(self, incarnation: int) -> bool: ...
    def linked_seconds(self, peer: PeerId) -> float: ...


class Violated(Exception):
    """An invariant does not hold.

    Attributes:
        invariant: its name in the contract.
        machine: name of the machine concerned, or empty.
    """

    def __init__(self, invariant: str, text: str, machine: str = "") -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.machine = machine


class Inspector:
    """Observes every peer; calls `violated` with the invariant, a text and the machine if an invariant is broken.

    Args:
        machines: by peer; filled in by the simulation.
        now: returns true time in seconds.
    Attributes:
        checks, skipped: number of checks, and how many of them could not be made.
        restored: peers whose disks were restored from a backup. They have forgotten what they signed since that backup,
            so only they may sign something that contradicts it. Forks can arise then, and must end like any other.
        losses: number of times that each peer's disk was wiped or restored from a backup. What the peer signs
            afterwards may contradict what it signed before.
        may_drop: whether majorities may drop members that are there, as in attacks that should succeed.
        differing: time since which a peer's bytes differ from those of its chain; only after a flipped bit.
    """

    def __init__(
        self,
        *,
        rules: RunRules,
        maths: SharedMaths,
        machines: Mapping[PeerId, Inspected],
        now: Callable[[], float],
        violated: Callable[[str, str, str], None],
    ) -> None:
        self.rosters: dict[Digest, Roster] = {}
        self.entries: dict[Digest, Entry] = {}
        self.differing: dict[tuple[str, SpanId], float] = {}
        self.may_drop = False
        self.has_flipped = False
        self.restored: set[PeerId] = set()
        self.losses: Counter[PeerId] = Counter()
        self.absorbed_at: dict[int, float] = {}
        """Time at which the last peer absorbed its last entry, by round."""
        self.checks = 0
        self.skipped = 0
        self._rules = rules
        self._maths = maths
        self._machines = machines
        self._now = now
        self.violated = violated
        self._children: dict[Digest, dict[Digest, frozenset[PeerId]]] = {}
        """The children of each roster that a majority certified, and the voters of each: no peer votes for two."""
        self._truth: dict[tuple[SpanId, Digest], SpanState] = {}
        self._leading: dict[tuple[SpanId, Digest], Entry] = {}
        """The entry that leads to a chain digest."""
        self._sent: dict[tuple[SpanId, int, PeerId], bytes | memoryview] = {}
        self._named: dict[tuple[SpanId, int, PeerId], tuple[Digest, Digest]] = {}
        self._included: dict[tuple[SpanId, int, PeerId, int], Digest] = {}
        """The entry that includes a contribution, by span, round, peer and incarnation. A peer that leaves a line whose
        time is ahead reaches a round of the same number again, with another contribution."""
        self._signed: dict[tuple[SpanId, int, Digest], Digest] = {}
        self._may_fall: dict[str, set[SpanId]] = {}
        self._voted_in: dict[tuple[Digest, PeerId, int], int] = {}
        """The round of the earliest ballot in which a voter's vote certified a child of a roster, by roster, voter and
        the number of times that the voter's disk had been lost."""
        self._named_in: dict[tuple[Digest, PeerId, int], int] = {}
        """The last round with an entry under a roster at which a voter was present; same keys."""
        self._seen_in: dict[tuple[PeerId, PeerId], dict[tuple[int, Digest], float]] = {}

    def _broken(self, invariant: str, text: str, machine: Inspected | None) -> None:
        if machine is None or not machine.is_hostile:
            self.violated(invariant, text, machine.name if machine is not None else "")

    # -- I1, I3: bytes and chains

    def founded(self, states: Mapping[SpanId, SpanState]) -> None:
        """Record the initial state of the run."""
        for span, state in states.items():
            self._truth.setdefault((span, state.head.digest), state)

    def started(self, machine: Inspected, states: Mapping[SpanId, SpanState]) -> None:
        """Record that a machine starts with the states on its disk, and check them. Earlier announcements lapse."""
        self._may_fall.pop(machine.name, None)
        for key in [key for key in self.differing if key[0] == machine.name]:
            del self.differing[key]
        for span, state in states.items():
            self._compare(machine, span, state)

    def branch_given_up(self, machine: Inspected) -> None:
        """Record that a machine announces a switch to another branch: each span may go back once."""
        self._may_fall[machine.name] = set(self._rules.span_elements)

    def span_given_up(self, machine: Inspected, text: str) -> None:
        """Record that a machine announces that it adopts the span at the start of `text`: it may go back once."""
        given_up = {span for span in self._rules.span_elements if text.startswith(f"{span} ")}
        self._may_fall.setdefault(machine.name, set()).update(given_up)

    def advancing(self, machine: Inspected, state: SpanState, update: SpanUpdate) -> None:
        """Check that an island absorbs an entry in order, and only once."""
        self.checks += 1
        entry = self.entries.get(update.absorbed.digest)
        if update.absorbed.round <= state.head.round:
            text = f"absorbed an entry of round {update.absorbed.round} on top of round {state.head.round}"
            self._broken("I2", f"{update.span}: {text}", machine)
        elif entry is None:
            self._broken("I3", f"{update.span}: absorbed an entry that no log has kept", machine)
        elif entry.parent != state.head.digest:
            text = f"{update.span}: absorbed an entry of round {entry.round} without its parent"
            self._broken("I3", text, machine)

    def advanced(self, machine: Inspected, span: SpanId, after: SpanState) -> None:
        """Check the bytes after an entry."""
        round_index = after.head.round
        self.absorbed_at[round_index] = max(self._now(), self.absorbed_at.get(round_index, 0.0))
        self._compare(machine, span, after)

    def replaced(self, machine: Inspected, span: SpanId, before: SpanState | None, after: SpanState) -> None:
        """Check a transfer: its bytes, and that it does not move the span back unannounced."""
        self.checks += 1
        if before is not None and after.head.height < before.head.height:
            if span in self._may_fall.get(machine.name, ()):
                self._may_fall[machine.name].discard(span)
            else:
                heights = f"from height {before.head.height} to {after.head.height}"
                self._broken("I3", f"{span} goes back {heights}, and no branch was given up", machine)
        self._compare(machine, span, after)

    def shared(self, span: SpanId, state: SpanState) -> SpanState:
        """Return the object that other peers hold for the same bytes, or else `state` itself."""
        truth = self.truth(span, state.head)
        return truth if truth is not None and self._is_same(truth, state) else state

    def flipped(self, machine: Inspected, span: SpanId, state: SpanState) -> None:
        """Record that a bit of a machine's anchor flipped."""
        self.has_flipped = True
        self._compare(machine, span, state)

    def truth(self, span: SpanId, head: SpanHead) -> SpanState | None:
        """Return the state that the known entries give up to `head`; None if they do not lead there."""
        path: list[Entry] = []
        digest = head.digest
        while (found := self._truth.get((span, digest))) is None:
            entry = self._leading.get((span, digest))
            if entry is None:
                return None
            path.append(entry)
            digest = entry.parent
        for entry in reversed(path):
            found = self._maths.follow(found, entry.absorbed(), entry.payload)
            self._truth[span, found.head.digest] = found
        return found

    def _is_same(self, one: SpanState, other: SpanState) -> bool:
        return one is other or (one.head == other.head and self._maths.raw(one) == self._maths.raw(other))

    def _compare(self, machine: Inspected, span: SpanId, state: SpanState) -> None:
        self.checks += 1
        truth = self.truth(span, state.head)
        if truth is None:
            self._broken("I1", f"{span} is on an unknown chain", machine)
        elif self._is_same(truth, state):
            self.differing.pop((machine.name, span), None)
        elif self.has_flipped:
            self.differing.setdefault((machine.name, span), self._now())
        else:
            self._broken("I1", f"{span}: equal chain digests at height {state.head.height}, other bytes", machine)

    # -- I2: what is counted

    def contributed(self, machine: Inspected, contribution: FragmentContribution) -> None:
        """Record what a member sends."""
        for encoded in contribution.spans:
            self._sent[encoded.span, contribution.round, machine.peer] = encoded.payload

    def opened(self, machine: Inspected, engine: PeerEngine, actions: Sequence[Action]) -> None:
        """Record the parents that a member names in the openings it sends and in its own."""
        openings = {id(a.message): a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Opening)}
        collection = engine.exchange.collection
        if collection is not None and machine.peer in collection.openings:
            own = collection.openings[machine.peer]
            openings[id(own)] = own
        for opening in openings.values():
            fragment = self._rules.clock.fragment(opening.round)
            for offer in opening.spans:
                self._named[SpanId(fragment, offer.index), opening.round, machine.peer] = (
                    opening.roster,
                    offer.parent,
                )

    def entry_kept(self, machine: Inspected, entry: Entry) -> None:
        """Check an entry when the first engine absorbs it, and note who has learnt by it that a member is there."""
        digest, roster = entry.digest(), self.rosters.get(entry.roster)
        if roster is not None:
            for place in _places(entry.present, roster):
                seen = self._seen_in.setdefault((machine.peer, roster.members[place].peer), {})
                seen.setdefault((entry.round, entry.roster), self._now())
        if digest in self.entries:
            return
        self.entries[digest] = entry
        self._leading[entry.span, sha256(entry.parent, digest)] = entry
        where = f"the entry of {entry.span} in round {entry.round}"
        if roster is None:
            self._broken("I8", f"{where} names a roster that no peer keeps", machine)
            return
        self._check_majority(machine, entry, roster, where)
        for place in roster.voter_places.intersection(_places(entry.present, roster)):
            voter = roster.members[place].peer
            key = (entry.roster, voter, self.losses[voter])
            self._named_in[key] = max(entry.round, self._named_in.get(key, entry.round))
            self._check_succession(machine, *key)
        places = _places(entry.included, roster)
        signed = self._signed.setdefault((entry.span, entry.round, entry.roster), digest)
        if signed != digest and not roster.peers() & self.restored:
            self._broken("I2", f"{where} is the second one that its owner signed", machine)
        peers = [roster.members[place].peer for place in places]
        for place, peer in zip(places, peers, strict=True):
            incarnation = roster.members[place].incarnation
            counted = self._included.setdefault((entry.span, entry.round, peer, incarnation), digest)
            if counted != digest and not self._machines[peer].is_hostile:
                name = self._machines[peer].name
                self._broken("I2", f"{where} counts {name}, as another entry of that round does", machine)
        self._check_mean(machine, entry, peers, roster, where)

    def _check_majority(self, machine: Inspected, entry: Entry, roster: Roster, where: str) -> None:
        """Recount the members present, in the simplest way. A restarted peer may have named it in an earlier life."""
        present = _places(entry.present, roster)
        self.checks += 1
        there = {roster.members[place].peer for place in present} & roster.voters
        if 2 * len(there) <= len(roster.voters):
            text = f"{where} has {len(there)} of {len(roster.voters)} voters present"
            self._broken("I8", text, machine)
        if not set(_places(entry.included, roster)) <= set(present):
            self._broken("I8", f"{where} includes members that were not present", machine)
        for place in present:
            peer = roster.members[place].peer
            self.checks += 1
            if self._machines[peer].is_hostile:
                self.skipped += 1
            elif self._named.get((entry.span, entry.round, peer)) != (entry.roster, entry.parent):
                name = self._machines[peer].name
                self._broken("I8", f"{where} lists {name} as present, which did not name its parent", machine)

    def _check_mean(self, machine: Inspected, entry: Entry, peers: list[PeerId], roster: Roster, where: str) -> None:
        """Recompute the mean from what was really sent; in a grid, by way of the means of the rows."""
        maths = self._maths
        self.checks += 1
        if any(self._machines[member.peer].is_hostile for member in roster.members):
            self.skipped += 1
            return
        payloads = [self._sent.get((entry.span, entry.round, peer)) for peer in peers]
        missing = [self._machines[peer].name for peer, sent in zip(peers, payloads, strict=True) if sent is None]
        if missing:
            self._broken("I2", f"{where} counts {', '.join(missing)}, which sent nothing", machine)
            return
        vectors = [maths.decode(maths.codecs.contribution, sent) for sent in payloads if sent is not None]
        grid, longest = fold_roster(roster, self._rules.group_size), LONGEST_BLOCK if self._rules.has_strangers else 0.0
        mean_N = _mean_of(grid, peers, vectors, entry, maths.codecs, longest)
        if maths.codecs.entry.encode(mean_N) != entry.payload:
            self._broken("I2", f"{where} is not the mean of what its {len(peers)} members sent", machine)

    # -- I4: rounds end

    def ticked(self, machine: Inspected, engine: PeerEngine, now: float) -> None:
        """Check after a tick that no round is held open; `now` is swarm time in seconds."""
        clock = self._rules.clock
        self.checks += 1
        if engine.round != clock.round_at(now) and not engine.conditions.is_time_uncertain:
            self._broken(
                "I4", f"the engine is in round {engine.round} and the clock in round {clock.round_at(now)}", machine
            )
        collection = engine.exchange.collection
        if collection is not None and now >= clock.reduce_by(collection.round):
            unsettled = [str(span) for span in collection.reduced if span not in collection.settled]
            if unsettled:
                text = f"{', '.join(unsettled)} unsettled in round {collection.round} after the deadline"
                self._broken("I4", text, machine)

    # -- I8: majorities

    def roster_kept(self, machine: Inspected, certified: CertifiedRoster) -> None:
        """Check a roster when the first engine takes it; the votes are recounted in the simplest way."""
        roster = certified.roster
        digest = roster.digest()
        if roster.k and not roster.degraded:
            agreed_in = self._rules.clock.agreed_in(certified.ballot)
            for voter, _ in certified.votes:
                key = (roster.parent, voter, self.losses[voter])
                self._voted_in[key] = min(agreed_in, self._voted_in.get(key, agreed_in))
                self._check_succession(machine, *key)
        if digest in self.rosters:
            return
        self.checks += 1
        if roster.k == 0:
            if self.rosters or not any(peer == ORGANISER for peer, _ in certified.votes):
                self._broken("I8", "a second founding, or one without the organiser", machine)
            self.rosters[digest] = roster
            return
        parent = self.rosters.get(roster.parent)
        self.rosters[digest] = roster
        if parent is None:
            self._broken("I8", f"roster {roster.k} has a parent that was never certified", machine)
            return
        self._count_votes(machine, certified, parent)
        if not roster.degraded:
            if not self.may_drop:
                self._check_dropped(machine, certified, parent)
            siblings = self._children.setdefault(roster.parent, {})
            voters = parent.voters & {peer for peer, _ in certified.votes}
            is_fork = any(not voters & others <= self.restored for others in siblings.values())
            siblings[digest] = voters
            if is_fork:
                self._broken("I8", f"two rosters {roster.k} with a majority follow one parent: a fork", machine)

    def _check_succession(self, machine: Inspected, digest: Digest, voter: PeerId, losses: int) -> None:
        """Check that no voter is in an entry under a roster after the round in which its vote certified a child."""
        key = (digest, voter, losses)
        voted, named = self._voted_in.get(key), self._named_in.get(key)
        if voted is not None and named is not None and named > voted and not self._machines[voter].is_hostile:
            name = self._machines[voter].name
            text = f"{name} is in an entry of round {named} under a roster whose child it voted for in round {voted}"
            self._broken("I8", text, machine)

    def _check_dropped(self, machine: Inspected, certified: CertifiedRoster, parent: Roster) -> None:
        """Check that each member that is gone had gone indeed (I10)."""
        voters = [peer for peer, _ in certified.votes]
        clock = self._rules.clock
        half = max(ABSENT_CYCLES * clock.num_fragments, SHORTEST_ABSENCE_SECONDS / clock.round_seconds) // 2
        current = clock.ballot_round(certified.ballot)
        recently = set(range(int(current - half), current - 1))
        for peer in parent.peers() - certified.roster.peers():
            member, dropped = parent.member(peer), self._machines[peer]
            if member is None or not member.trains or dropped.is_hostile:
                continue
            self.checks += 1
            is_near = dropped.is_there(member.incarnation) and all(
                voter == peer or self._machines[voter].linked_seconds(peer) >= 2 * clock.round_seconds
                for voter in voters
            )
            line, before = self._line(parent), self._now() - 2 * clock.round_seconds
            present = [
                {
                    index
                    for (index, digest), at in self._seen_in.get((voter, peer), {}).items()
                    if at <= before and digest in line and index in recently
                }
                for voter in voters
            ]
            if is_near and all(present):
                last = min(map(max, present))
                text = f"roster {certified.roster.k} drops {dropped.name}, present in round {last} of {current}"
                self._broken("I10", text, machine)

    def _line(self, roster: Roster) -> set[Digest]:
        """Return the digests of a roster and those before it that are known."""
        line = {roster.digest()}
        while (parent := self.rosters.get(roster.parent)) is not None:
            line.add(roster.parent)
            roster = parent
        return line

    def _count_votes(self, machine: Inspected, certified: CertifiedRoster, parent: Roster) -> None:
        roster = certified.roster
        statement = vote_statement(roster.digest(), certified.ballot)
        counted = parent.voters
        votes = {peer for peer, signature in certified.votes if verify(peer, statement, signature)}
        enough = 2 * len(votes & counted) > len(counted)
        if roster.degraded:
            counted = parent.peers()
            enough = bool(votes & counted)
        if not enough:
            text = f"roster {roster.k} (degraded: {roster.degraded}) has {len(votes & counted)} votes of {len(counted)}"
            self._broken("I8", text, machine)


def _places(bitmap: bytes, roster: Roster) -> list[int]:
    return [place for place in range(len(roster.members)) if bitmap[place // 8] >> place % 8 & 1]


def _mean_of(
    grid: Grid, peers: Sequence[PeerId], vectors: Sequence[Vector], entry: Entry, codecs: Codecs, longest: float
) -> Vector:
    """Return the mean that an owner should have computed: over all at once, or over each row and then the rows.

    Args:
        longest: limit on the blocks of contributions, in medians.
    """
    span, weights = entry.span, entry.weights
    if len(grid.rows) == 1:
        return mean_of_span(codecs, span, vectors, weights, longest)
    means, row_weights = [], []
    for row in range(len(grid.rows)):
        here = [place for place, peer in enumerate(peers) if grid.row_of[peer] == row]
        weight = sum(weights[place] for place in here)
        if weight > 0:  # a row without contributions has no weight
            own, shares = [vectors[place] for place in here], [weights[place] for place in here]
            mean_N = mean_of_span(codecs, span, own, shares, longest)
            means.append(codecs.row_mean.decode(codecs.row_mean.encode(mean_N), len(mean_N)))
            row_weights.append(weight)
    return mean_of_span(codecs, span, means, row_weights)
