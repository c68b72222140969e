"""What must hold after every event, checked for the peer and span that the event touched.

`protocol.md`, section 7, in its strictest reading that is true at every moment:

I1  A peer's (φ, m) at a chain digest is what the entries of that chain make of the start, bit for bit. It may differ
    only where a bit of its own memory flipped, or where it fetched the span from such a peer.
I2  An entry's payload is the encoded weighted mean, radial where the run has marks for that span, of what exactly its
    included members sent for that round, each once. No member's contribution to a span and round is in two entries, and
    no owner signs two. At the island, every contribution leaves the list in flight once, and what was sent is what was
    made (`ledger.py`).
I3  An island absorbs an entry only on top of its parent. A span's height never falls within one life of a peer, but
    once for each span after it has announced that it gives up its branch. (A restarted peer begins at its checkpoint.)
I4  Whenever a machine ticks, its engine is in the round that its clock shows, and no span that it reduces is unsettled
    after the deadline.
I5  Structural in the lab: no action asks an island to wait. Real threads are tested in `tests/trainer`.
I8  For an absorbed entry more than half of its roster were there: each of them named the entry's parent for that span
    and round, under that roster. A roster in any book has votes of more than half of its parent's members (less those
    whose good-bye it quotes), or says its level and has that level's share. A parent has at most one child of level 0,
    ever. No round goes under two rosters: no entry names a roster in a round after the ballot that certified its child
    of level 0, by the earliest certificate that any machine holds.
I9  No engine raises, whatever comes; what goes over the wire comes back the same; all states are finite.

What holds only a while after faults (I6, I7, the mending of I1, the end of forks) the simulator of `testing/` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.lab.island import Complaint
from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.maths import mean_of_span
from p2p_diloco.lab.stage import Violated
from p2p_diloco.lab.toy_run import ORGANISER, verify
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.actions import Action, Send
from p2p_diloco.protocol.ballot import ballot_turn
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.grid import Grid, fold_roster
from p2p_diloco.protocol.messages import Opening
from p2p_diloco.protocol.roster import CertifiedRoster, Roster, vote_statement
from p2p_diloco.protocol.round import FragmentContribution
from p2p_diloco.swarm.vector_work import Codecs

if TYPE_CHECKING:
    from p2p_diloco.lab.playing import Player


class Inspector:
    """Sees every event of a swarm and raises `Violated` at the first one that breaks a promise."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self.rosters: dict[Digest, Roster] = {}
        self.entries: dict[Digest, Entry] = {}
        self.differing: dict[tuple[str, SpanId], float] = {}
        """Since when a peer's bytes differ from what its chain makes of the start; only after a flipped bit."""
        self.has_flipped = False
        self._children: dict[Digest, set[Digest]] = {}
        self._followed_in: dict[Digest, int] = {}
        """For each roster that has a child of level 0, the round of the earliest ballot that certified that."""
        self._last_entry: dict[Digest, int] = {}
        self._truth: dict[tuple[SpanId, Digest], SpanState] = {}
        self._sent: dict[tuple[SpanId, int, PeerId], bytes | memoryview] = {}
        self._named: dict[tuple[SpanId, int, PeerId], tuple[Digest, Digest]] = {}
        self._included: dict[tuple[SpanId, int, PeerId], Digest] = {}
        self._signed: dict[tuple[SpanId, int, Digest], Digest] = {}
        self._may_fall: dict[str, set[SpanId]] = {}

    # -- I1, I3: bytes and chains

    def founded(self, states: dict[SpanId, SpanState]) -> None:
        """Hear what the start is."""
        for span, state in states.items():
            self._truth[span, state.head.digest] = state

    def started(self, machine: Machine) -> None:
        """Hear that a machine begins a life: nothing is announced yet; its checkpoint must be true."""
        self._may_fall.pop(machine.name, None)
        for key in [key for key in self.differing if key[0] == machine.name]:
            del self.differing[key]
        for span, state in machine.vectors.states.items():
            self._compare(machine, span, state)

    def branch_given_up(self, machine: Machine) -> None:
        """Hear a machine announce that it goes by another branch: each span may go back once."""
        self._may_fall[machine.name] = set(self._player.spans)

    def span_given_up(self, machine: Machine, span: SpanId) -> None:
        """Hear a machine announce that it adopts a span: it may go back once."""
        self._may_fall.setdefault(machine.name, set()).add(span)

    def entry_comes_next(self, machine: Machine, state: SpanState, entry: Entry) -> None:
        """Check that an island absorbs an entry in order, and once."""
        if entry.round <= state.head.round:
            text = f"{entry.span}: an entry of round {entry.round} is absorbed on top of round {state.head.round}"
            raise Violated("I2", text, machine.name)
        if entry.parent != state.head.digest:
            raise Violated(
                "I3", f"{entry.span}: an entry of round {entry.round} is absorbed without its parent", machine.name
            )

    def entry_replayed(self, span: SpanId, before: SpanState, entry: Entry) -> None:
        """Hear that a restarted machine goes on from its disk, perhaps as the first to absorb that entry."""
        truth = self._truth.get((span, before.head.digest))
        if truth is not None:
            expected = self._player.maths.absorb(truth, entry)
            self._truth.setdefault((span, expected.head.digest), expected)

    def span_advanced(self, machine: Machine, before: SpanState, entry: Entry, after: SpanState) -> None:
        """Check the bytes after an entry."""
        truth = self._truth.get((entry.span, before.head.digest))
        if truth is None:
            raise Violated("I1", f"{entry.span} stands on a chain that nobody made", machine.name)
        expected = self._player.maths.absorb(truth, entry)
        self._truth.setdefault((entry.span, expected.head.digest), expected)
        self._compare(machine, entry.span, after)

    def span_replaced(self, machine: Machine, span: SpanId, before: SpanState | None, after: SpanState) -> None:
        """Check a transfer: its bytes, and that it does not take the span back unannounced."""
        if before is not None and after.head.height < before.head.height:
            if span not in self._may_fall.get(machine.name, ()):
                heights = f"from height {before.head.height} to {after.head.height}"
                raise Violated("I3", f"{span} goes back {heights}, and no branch was given up", machine.name)
            self._may_fall[machine.name].discard(span)
        self._compare(machine, span, after)

    def shared(self, span: SpanId, state: SpanState) -> SpanState:
        """Return the object that others hold for the same bytes, or `state` itself."""
        truth = self._truth.get((span, state.head.digest))
        return truth if truth is not None and self._is_same(truth, state) else state

    def flipped(self, machine: Machine, span: SpanId) -> None:
        """Hear that a bit of a machine's anchor flipped."""
        self.has_flipped = True
        self._compare(machine, span, machine.vectors.states[span])

    def _is_same(self, one: SpanState, other: SpanState) -> bool:
        maths = self._player.maths
        return one is other or (one.head == other.head and maths.raw(one) == maths.raw(other))

    def _compare(self, machine: Machine, span: SpanId, state: SpanState) -> None:
        truth = self._truth.get((span, state.head.digest))
        if truth is state:
            if self.differing:
                self.differing.pop((machine.name, span), None)
            return
        if truth is not None and self._is_same(truth, state):
            self.differing.pop((machine.name, span), None)
        elif self.has_flipped:
            self.differing.setdefault((machine.name, span), self._player.now)
        else:
            raise Violated(
                "I1", f"{span}: equal chain digests at height {state.head.height}, other bytes", machine.name
            )

    # -- I2: what is counted

    def complain(self, machine: Machine, complaint: Complaint) -> None:
        """Hear what the books of an island say."""
        raise Violated(complaint.invariant, complaint.text, machine.name)

    def contributed(self, machine: Machine, contribution: FragmentContribution) -> None:
        """Note what a member sends."""
        for encoded in contribution.spans:
            self._sent[encoded.span, contribution.round, machine.peer] = encoded.payload

    def opened(self, machine: Machine, actions: Sequence[Action]) -> None:
        """Note which parents a member names, in what it sends and to itself."""
        collection = machine.running.exchange.collection
        openings = [action.message for action in actions if isinstance(action, Send)]
        if collection is not None and machine.peer in collection.openings:
            openings.append(collection.openings[machine.peer])
        for opening in openings:
            if isinstance(opening, Opening):
                fragment = self._player.rules.clock.fragment(opening.round)
                for offer in opening.spans:
                    key = (SpanId(fragment, offer.index), opening.round, machine.peer)
                    self._named[key] = (opening.roster, offer.parent)

    def entry_absorbed(self, machine: Machine, entry: Entry) -> None:
        """Check an entry when the first engine absorbs it."""
        digest = entry.digest()
        if digest in self.entries:
            return
        self.entries[digest] = entry
        roster = self.rosters[entry.roster]
        where = f"the entry of {entry.span} in round {entry.round}"
        self._check_majority(machine, entry, roster, where)
        self._last_entry[entry.roster] = max(entry.round, self._last_entry.get(entry.roster, entry.round))
        self._check_succession(machine, entry.roster)
        places = _places(entry.included, roster)
        if self._signed.setdefault((entry.span, entry.round, entry.roster), digest) != digest:
            raise Violated("I2", f"{where} is the second one that its owner signed", machine.name)
        peers = [roster.members[place].peer for place in places]
        for peer in peers:
            if self._included.setdefault((entry.span, entry.round, peer), digest) != digest:
                name = self._player.by_peer[peer].name
                raise Violated("I2", f"{where} counts {name}, as another entry of that round does", machine.name)
        self._check_mean(machine, entry, peers, where)

    def _check_majority(self, machine: Machine, entry: Entry, roster: Roster, where: str) -> None:
        """Count anew, in the plainest way, who was there; a restarted peer may have said so in an earlier life."""
        present = _places(entry.present, roster)
        if 2 * len(present) <= len(roster.members):
            raise Violated("I8", f"{where} has {len(present)} of {len(roster.members)} members there", machine.name)
        if not set(_places(entry.included, roster)) <= set(present):
            raise Violated("I8", f"{where} includes members that were not there", machine.name)
        for place in present:
            peer = roster.members[place].peer
            if self._named.get((entry.span, entry.round, peer)) != (entry.roster, entry.parent):
                name = self._player.by_peer[peer].name
                raise Violated("I8", f"{where} has {name} there, which did not name its parent", machine.name)

    def _check_mean(self, machine: Machine, entry: Entry, peers: list[PeerId], where: str) -> None:
        """Redo the mean from what was really sent, in a grid by way of the means of the rows."""
        maths = self._player.maths
        payloads = [self._sent.get((entry.span, entry.round, peer)) for peer in peers]
        missing = [self._player.by_peer[peer].name for peer, sent in zip(peers, payloads, strict=True) if sent is None]
        if missing:
            raise Violated("I2", f"{where} counts {', '.join(missing)}, who sent nothing", machine.name)
        vectors = [maths.decode(maths.codecs.contribution, sent) for sent in payloads if sent is not None]
        grid = fold_roster(self.rosters[entry.roster], self._player.rules.group_size)
        mean_N = _mean_of(grid, peers, vectors, entry, maths.codecs)
        if maths.codecs.entry.encode(mean_N) != entry.payload:
            raise Violated("I2", f"{where} is not the mean of what its {len(peers)} members sent", machine.name)

    # -- I4: rounds end

    def ticked(self, machine: Machine) -> None:
        """Check after a tick that no round is held open."""
        engine, clock = machine.running, self._player.rules.clock
        now = machine.local(self._player.now)
        if engine.round != clock.round_at(now):
            raise Violated("I4", f"in round {engine.round} at second {now:.2f}", machine.name)
        collection = engine.exchange.collection
        if collection is not None and now >= clock.reduce_by(collection.round):
            unsettled = [str(span) for span in collection.reduced if span not in collection.settled]
            if unsettled:
                text = f"{', '.join(unsettled)} unsettled in round {collection.round} after the deadline"
                raise Violated("I4", text, machine.name)

    # -- I8: majorities

    def roster_kept(self, machine: Machine, certified: CertifiedRoster) -> None:
        """Check a roster when the first engine takes it: votes are counted here anew, in the plainest way."""
        roster = certified.roster
        digest = roster.digest()
        if digest in self.rosters:
            self._note_succession(machine, certified)  # perhaps by an earlier certificate
            return
        if roster.k == 0:
            if self.rosters or not any(peer == ORGANISER for peer, _ in certified.votes):
                raise Violated("I8", "a second founding, or one without the organiser", machine.name)
            self.rosters[digest] = roster
            return
        parent = self.rosters.get(roster.parent)
        if parent is None:
            raise Violated("I8", f"roster {roster.k} has a parent that nobody certified", machine.name)
        self.rosters[digest] = roster
        self._count_votes(machine, certified, parent)
        if roster.level == 0:
            siblings = self._children.setdefault(roster.parent, set())
            siblings.add(digest)
            if len(siblings) > 1:
                raise Violated("I8", f"two rosters {roster.k} with a majority follow one parent: a fork", machine.name)
        self._note_succession(machine, certified)

    def _note_succession(self, machine: Machine, certified: CertifiedRoster) -> None:
        roster = certified.roster
        if roster.k and not roster.level:
            agreed_in, _ = ballot_turn(certified.ballot)
            self._followed_in[roster.parent] = min(agreed_in, self._followed_in.get(roster.parent, agreed_in))
            self._check_succession(machine, roster.parent)

    def _check_succession(self, machine: Machine, digest: Digest) -> None:
        followed, last = self._followed_in.get(digest), self._last_entry.get(digest)
        if followed is not None and last is not None and last > followed:
            k = self.rosters[digest].k
            text = f"an entry of round {last} names roster {k}, whose child was agreed on in round {followed}"
            raise Violated("I8", text, machine.name)

    def _count_votes(self, machine: Machine, certified: CertifiedRoster, parent: Roster) -> None:
        roster = certified.roster
        statement = vote_statement(roster.digest(), certified.ballot)
        gone = {(w.peer, w.incarnation) for w in roster.goodbyes} if roster.level == 0 else set()
        counted = {m.peer for m in parent.members if (m.peer, m.incarnation) not in gone}
        votes = {peer for peer, signature in certified.votes if verify(peer, statement, signature)} & counted
        enough = 2 * len(votes) > len(counted)
        if roster.level:
            enough = len(votes) * 2 ** (roster.level + 1) >= len(counted) and len(votes) > 0
        if not enough:
            text = f"roster {roster.k} (level {roster.level}) has {len(votes)} votes of {len(counted)} members"
            raise Violated("I8", text, machine.name)


def _places(bitmap: bytes, roster: Roster) -> list[int]:
    return [place for place in range(len(roster.members)) if bitmap[place // 8] >> place % 8 & 1]


def _mean_of(grid: Grid, peers: Sequence[PeerId], vectors: Sequence[Vector], entry: Entry, codecs: Codecs) -> Vector:
    """Return the mean that an owner should have found: of all at once, or of each row and then of the rows."""
    span, weights = entry.span, entry.weights
    if len(grid.rows) == 1:
        return mean_of_span(codecs, span, vectors, weights)
    means, row_weights = [], []
    for row in range(len(grid.rows)):
        here = [place for place, peer in enumerate(peers) if grid.row_of[peer] == row]
        weight = sum(weights[place] for place in here)
        if weight > 0:  # a row of newcomers only weighs nothing among others
            mean_N = mean_of_span(codecs, span, [vectors[place] for place in here], [weights[place] for place in here])
            means.append(codecs.row_mean.decode(codecs.row_mean.encode(mean_N), len(mean_N)))
            row_weights.append(weight)
    return mean_of_span(codecs, span, means, row_weights)
