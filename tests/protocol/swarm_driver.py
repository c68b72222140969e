"""A swarm in one heap of virtual time: the real `PeerEngine`s, fake vectors, links that break, machines that die.

Everything follows from the seed. The driver checks on the way what must hold at every moment: entries reach an island
in parent order and equal chain digests mean equal bytes (I1, I3), no contribution is counted twice (I2), at most one
child of a roster is certified by a majority (I8).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from p2p_diloco.ids import GENESIS_ROUND, Digest, PeerId, SpanHead, SpanId, sha256
from p2p_diloco.protocol.actions import (
    Action,
    ApplyEntry,
    CompareContent,
    KeepBallots,
    KeepGoodbye,
    KeepRoster,
    ReduceSpan,
    ReplaceSpan,
    Report,
    RoundClosed,
    Send,
    ServeContent,
    ServeSpan,
    TakeSnapshot,
)
from p2p_diloco.protocol.ballot import NO_BALLOTS, Ballots
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.engine import PeerEngine, Recalled
from p2p_diloco.protocol.entry import Entry, included_places, next_head
from p2p_diloco.protocol.membership import Self
from p2p_diloco.protocol.messages import ContentReply, Message, SpanReply, decode_message, encode_message, is_bulk
from p2p_diloco.protocol.roster import (
    CertifiedRoster,
    Goodbye,
    Member,
    Roster,
    founding_roster,
    founding_statement,
)
from p2p_diloco.protocol.round import EncodedSpan, FragmentContribution
from p2p_diloco.protocol.rules import RunRules

RUN = sha256(b"a run")
ROUND_SECONDS = 8.0
NUM_SPANS = (3, 2)
SPAN_ELEMENTS = 4
PAYLOAD_BYTES = 6
PIECE_BYTES = 20
START_SECONDS = 0.0
MINUTE = 60.0


def peer_id(name: str) -> PeerId:
    return PeerId(sha256(b"peer", name.encode()))


def sign_as(peer: PeerId, statement: bytes) -> bytes:
    """A cheap stand-in for Ed25519: nobody in this swarm forges but tests that say so."""
    return sha256(b"signed by", peer, statement) * 2


def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    return signature == sign_as(peer, statement)


ORGANISER = peer_id("organiser")
ALL_SPANS = tuple(SpanId(f, i) for f, count in enumerate(NUM_SPANS) for i in range(count))
CYCLE_SECONDS = ROUND_SECONDS * len(NUM_SPANS)


def run_rules(*, void_cycles: int = 8, group_size: int = 16) -> RunRules:
    clock = RoundClock(start_seconds=START_SECONDS, round_seconds=ROUND_SECONDS, num_fragments=len(NUM_SPANS))
    return RunRules(
        run=RUN,
        organiser=ORGANISER,
        clock=clock,
        num_spans=NUM_SPANS,
        span_elements=dict.fromkeys(ALL_SPANS, SPAN_ELEMENTS),
        payload_bytes=dict.fromkeys(ALL_SPANS, PAYLOAD_BYTES),
        entry_bytes=dict.fromkeys(ALL_SPANS, PAYLOAD_BYTES),
        group_size=group_size,
        void_cycles=void_cycles,
        heartbeat_seconds=1.0,
        weight_clip=4.0,
        contribution_limit=2.0,
        entry_limit=3.0,
        retained_cycles=16,
    )


def genesis_heads(founding: Roster) -> dict[SpanId, SpanHead]:
    return {
        span: SpanHead(
            digest=sha256(b"start", repr(span).encode()),
            height=0,
            round=GENESIS_ROUND,
            roster=founding.digest(),
            radius=0.0,
            median_weight=0.0,
        )
        for span in ALL_SPANS
    }


def genesis_bytes(span: SpanId) -> bytes:
    return sha256(b"bytes", repr(span).encode())


def found_run(founder: PeerId, incarnation: int, can_be_dialled: bool) -> CertifiedRoster:
    member = Member(peer=founder, incarnation=incarnation, can_be_dialled=can_be_dialled)
    roster = founding_roster(RUN, sha256(b"genesis"), member)
    return CertifiedRoster(
        roster=roster, ballot=0, votes=((ORGANISER, sign_as(ORGANISER, founding_statement(roster.digest()))),)
    )


@dataclass
class Disk:
    """What survives a kill."""

    incarnation: int = 0
    rosters: list[CertifiedRoster] = field(default_factory=list)
    ballots: Ballots = NO_BALLOTS
    goodbye: Goodbye | None = None
    checkpoint: dict[SpanId, tuple[SpanHead, bytes]] = field(default_factory=dict)


@dataclass
class Machine:
    """One peer with its disk, its island's vectors and what it has reported."""

    name: str
    peer: PeerId
    dialable: bool
    trains: bool
    offset: float = 0.0
    disk: Disk = field(default_factory=Disk)
    engine: PeerEngine | None = None
    vectors: dict[SpanId, tuple[SpanHead, bytes]] = field(default_factory=dict)
    paused: bool = False
    backlog: list[Callable[[], None]] = field(default_factory=list)
    life: int = 0
    wakes: int = 0
    reports: list[tuple[float, Report]] = field(default_factory=list)
    closed: list[RoundClosed] = field(default_factory=list)
    contributes: bool = True

    @property
    def rules_engine(self) -> PeerEngine:
        assert self.engine is not None, f"{self.name} is not running"
        return self.engine

    @property
    def roster(self) -> Roster:
        roster = self.rules_engine.book.in_force
        assert roster is not None
        return roster

    def topics(self) -> list[str]:
        return [report.topic for _, report in self.reports]


class Swarm:
    """All machines, all links, one clock."""

    def __init__(
        self,
        seed: int = 0,
        *,
        start: float = -10.0,
        delay: tuple[float, float] = (0.01, 0.1),
        loss: float = 0.0,
        duplication: float = 0.0,
        rules: RunRules | None = None,
    ) -> None:
        self.now = start
        self.random = random.Random(seed)
        self.delay = delay
        self.loss = loss
        self.duplication = duplication
        self.rules = rules if rules is not None else run_rules()
        self.machines: dict[str, Machine] = {}
        self.by_id: dict[PeerId, Machine] = {}
        self.links: set[frozenset[str]] = set()
        self.islands: dict[str, int] = {}
        self.known_bytes: dict[tuple[SpanId, Digest], bytes] = {}
        self.entries: dict[Digest, Entry] = {}
        self.children: dict[tuple[Digest, int], set[Digest]] = {}
        self.rosters: dict[Digest, Roster] = {}
        self.num_messages = 0
        self.check_bytes = True
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._last_arrival: dict[tuple[PeerId, PeerId, bool], float] = {}
        self._dial()

    # -- time

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, event))

    def run(self, seconds: float) -> None:
        self.run_to(self.now + seconds)

    def run_to(self, time: float) -> None:
        while self._heap and self._heap[0][0] <= time:
            self.now, _, event = heapq.heappop(self._heap)
            event()
        self.now = time

    def run_until(self, claim: Callable[[], bool], within: float, step: float = 0.5) -> float:
        begin = self.now
        while not claim():
            assert self.now - begin <= within, f"not within {within} s; {self.describe()}"
            self.run(step)
        return self.now - begin

    def run_to_cycle_end(self) -> None:
        clock = self.rules.clock
        cycle = clock.cycle(clock.round_at(self.now))
        self.run_to(clock.begin((cycle + 1) * clock.num_fragments))

    # -- machines

    def add(
        self, name: str, *, dialable: bool = True, trains: bool = True, offset: float = 0.0, found: bool = False
    ) -> Machine:
        machine = Machine(name=name, peer=peer_id(name), dialable=dialable, trains=trains, offset=offset)
        self.machines[name] = machine
        self.by_id[machine.peer] = machine
        self.start(name, found=found)
        return machine

    def start(self, name: str, *, found: bool = False, keep_disk: bool = True) -> Machine:
        machine = self.machines[name]
        assert machine.engine is None
        incarnation = machine.disk.incarnation + 1
        if not keep_disk:
            machine.disk = Disk()
        machine.disk.incarnation = incarnation
        me = Self(
            peer=machine.peer,
            incarnation=incarnation,
            can_be_dialled=machine.dialable,
            trains=machine.trains,
            sign=lambda statement: sign_as(machine.peer, statement),
        )
        heads = {span: head for span, (head, _) in machine.disk.checkpoint.items()}
        recalled = Recalled(
            rosters=tuple(machine.disk.rosters),
            ballots=machine.disk.ballots,
            goodbye=machine.disk.goodbye,
            heads=heads or None,
        )
        machine.engine = PeerEngine(me=me, rules=self.rules, verify=verify, recalled=recalled)
        machine.vectors = dict(machine.disk.checkpoint)
        machine.life += 1
        machine.paused = False
        machine.backlog.clear()
        if found:
            founding = found_run(machine.peer, incarnation, machine.dialable)
            heads = genesis_heads(founding.roster)
            machine.vectors = {span: (head, genesis_bytes(span)) for span, head in heads.items()}
            machine.engine.hold_state(heads)
            self.perform(machine, machine.engine.found(founding, self._local(machine)))
        self._tick(machine)
        self._checkpoint_later(machine)
        return machine

    def kill(self, name: str) -> None:
        machine = self.machines[name]
        machine.engine = None
        machine.life += 1
        for link in [link for link in self.links if name in link]:
            self._cut(link)

    def pause(self, name: str) -> None:
        self.machines[name].paused = True

    def resume(self, name: str) -> None:
        machine = self.machines[name]
        machine.paused = False
        backlog, machine.backlog = machine.backlog, []
        for event in backlog:
            event()
        self._tick(machine)

    def leave(self, name: str) -> None:
        machine = self.machines[name]
        self.perform(machine, machine.rules_engine.leave(self._local(machine)))

    def partition(self, *islands: Iterable[str]) -> None:
        self.islands = {name: place for place, names in enumerate(islands) for name in names}
        for link in [link for link in self.links if not self._reachable(*sorted(link))]:
            self._cut(link)

    def heal(self) -> None:
        self.islands = {}

    def running(self, *, trains: bool = True) -> list[Machine]:
        return [m for m in self.machines.values() if m.engine is not None and (m.trains or not trains)]

    # -- claims

    def agreed(self, names: Iterable[str] | None = None) -> bool:
        """Tell whether these machines hold the same bytes of every span at the same heads."""
        machines = [self.machines[name] for name in names] if names is not None else self.running()
        first = machines[0].vectors
        return len(first) == len(ALL_SPANS) and all(machine.vectors == first for machine in machines)

    def members(self, name: str) -> set[str]:
        return {self.by_id[peer].name for peer in self.machines[name].roster.peers()}

    def all_members(self) -> bool:
        """Tell whether the roster in force everywhere lists exactly those that run, at their incarnations."""
        running = self.running()
        wanted = {(m.peer, m.rules_engine.me.incarnation) for m in running}
        return all(
            m.rules_engine.book.in_force is not None
            and {(x.peer, x.incarnation) for x in m.roster.members} == wanted
            for m in running
        )

    def height(self, name: str) -> int:
        return sum(head.height for head, _ in self.machines[name].vectors.values())

    def describe(self) -> str:
        lines = [f"t={self.now:.1f} round {self.rules.clock.round_at(self.now)}"]
        for machine in self.machines.values():
            engine = machine.engine
            if engine is None:
                lines.append(f"  {machine.name}: not running")
                continue
            roster = engine.book.in_force
            names = sorted(self.by_id[m.peer].name for m in roster.members) if roster is not None else []
            k = roster.k if roster is not None else None
            lines.append(
                f"  {machine.name}: k={k} {names} ready={engine.ready} height={self.height(machine.name)} "
                f"void={engine.membership.void_cycles} level={engine.membership.level()} "
                f"last={[f'{t:.0f} {r.topic}: {r.text}' for t, r in machine.reports[-4:]]}"
            )
        return "\n".join(lines)

    # -- links

    def _reachable(self, a: str, b: str) -> bool:
        one, other = self.machines[a], self.machines[b]
        up = one.engine is not None and other.engine is not None
        return up and (one.dialable or other.dialable) and self.islands.get(a) == self.islands.get(b)

    def _dial(self) -> None:
        names = sorted(self.machines)
        for place, a in enumerate(names):
            for b in names[place + 1 :]:
                link = frozenset((a, b))
                asleep = self.machines[a].paused or self.machines[b].paused
                if link not in self.links and not asleep and self._reachable(a, b):
                    self.links.add(link)
                    for here, there in ((a, b), (b, a)):
                        self._link_up(self.machines[here], self.machines[there])
        self.at(self.now + 1.0 + self.random.random(), self._dial)

    def _link_up(self, here: Machine, there: Machine) -> None:
        here.rules_engine.link_up(there.peer)
        self._schedule(here)

    def _cut(self, link: frozenset[str]) -> None:
        self.links.discard(link)
        for here, there in ((a, b) for a in link for b in link if a != b):
            machine, lost = self.machines[here], self.machines[there].peer
            self._later(machine, 0.5, lambda machine=machine, lost=lost: machine.rules_engine.link_lost(lost))  # type: ignore[misc]

    def break_links(self) -> None:
        """Break every link at once, as when all machines have slept long enough."""
        for link in list(self.links):
            self._cut(link)

    # -- playing actions

    def _local(self, machine: Machine) -> float:
        return self.now + machine.offset

    def _later(self, machine: Machine, delay: float, event: Callable[[], None]) -> None:
        """Let something happen at a machine if it still lives the same life; when paused, once it goes on."""
        life = machine.life

        def happen() -> None:
            if machine.life != life or machine.engine is None:
                return
            if machine.paused:
                machine.backlog.append(happen)
                return
            event()

        self.at(self.now + delay, happen)

    def _tick(self, machine: Machine) -> None:
        if machine.engine is not None and not machine.paused:
            self.perform(machine, machine.engine.tick(self._local(machine)))

    def _schedule(self, machine: Machine) -> None:
        machine.wakes += 1
        wakes = machine.wakes
        local = self._local(machine)
        delay = max(machine.rules_engine.wake_at(local) - local, 0.0) + 1e-6
        self._later(machine, delay, lambda: self._tick(machine) if machine.wakes == wakes else None)

    def perform(self, machine: Machine, actions: list[Action]) -> None:
        for action in actions:
            self._perform(machine, action)
        if machine.engine is not None:
            self._schedule(machine)

    def _perform(self, machine: Machine, action: Action) -> None:
        match action:
            case Send():
                self._send(machine, action.to, action.message, action.deadline)
            case KeepBallots():
                machine.disk.ballots = action.ballots
            case KeepRoster():
                self._keep_roster(machine, action.certified)
            case KeepGoodbye():
                machine.disk.goodbye = action.goodbye
            case TakeSnapshot():
                self._later(machine, self.random.uniform(0.0, 0.5), lambda: self._snapshot(machine, action))
            case ReduceSpan():
                self._later(machine, self.random.uniform(0.0, 0.2), lambda: self._reduce(machine, action))
            case ApplyEntry():
                self._apply(machine, action.entry)
            case ReplaceSpan():
                self._place(machine, action.span, action.head, action.state)
            case ServeSpan():
                self._serve_span(machine, action)
            case ServeContent():
                digests = self._content(machine, action.fragment)
                self._send(machine, action.to, ContentReply(fragment=action.fragment, digests=digests), self.now + 9)
            case CompareContent():
                self._compare(machine, action)
            case RoundClosed():
                machine.closed.append(action)
            case Report():
                machine.reports.append((self.now, action))

    def _send(self, machine: Machine, to: PeerId, message: Message, deadline: float) -> None:
        target = self.by_id.get(to)
        if target is None or frozenset((machine.name, target.name)) not in self.links:
            return
        self.num_messages += 1
        frame = encode_message(message)
        copies = (self.random.random() >= self.loss) + (self.random.random() < self.duplication)
        for _ in range(copies):
            lane = (machine.peer, to, is_bulk(message))
            arrival = max(self.now + self.random.uniform(*self.delay), self._last_arrival.get(lane, self.now))
            self._last_arrival[lane] = arrival
            delay = arrival - self.now
            if self._local(machine) + delay <= deadline:
                self._later(target, delay, lambda: self._receive(target, machine.peer, frame))

    def _receive(self, machine: Machine, sender: PeerId, frame: bytes) -> None:
        message = decode_message(frame)
        engine, now = machine.rules_engine, self._local(machine)
        if isinstance(message, Entry):
            self.perform(machine, engine.entry_checked(sender, message, 1.0, now))
        else:
            self.perform(machine, engine.receive(sender, message, now))

    # -- the fake island

    def _snapshot(self, machine: Machine, order: TakeSnapshot) -> None:
        if not machine.contributes or self._local(machine) > order.deadline:
            return
        spans = tuple(
            EncodedSpan(
                span=span,
                parent=machine.vectors[span][0].digest,
                norm=1.0,
                payload=self.random.randbytes(PAYLOAD_BYTES),
            )
            for span in ALL_SPANS
            if span.fragment == order.fragment and machine.vectors[span][0].round < order.round
        )
        contribution = FragmentContribution(
            round=order.round, fragment=order.fragment, tokens=100, steps=10, spans=spans
        )
        engine = machine.rules_engine
        self.perform(machine, engine.contribution_ready(contribution, self._local(machine)))

    def _reduce(self, machine: Machine, order: ReduceSpan) -> None:
        payload = sha256(order.rounding_seed, *(part.payload for part in order.parts))[:PAYLOAD_BYTES]
        sound = frozenset(part.peer for part in order.parts)
        engine = machine.rules_engine
        self.perform(
            machine, engine.span_reduced(order.round, order.span, sound, payload, 1.0, self._local(machine))
        )

    def _apply(self, machine: Machine, entry: Entry) -> None:
        head, state = machine.vectors[entry.span]
        assert entry.parent == head.digest, f"{machine.name}: an entry came out of order (I3)"
        assert entry.round > head.round, "a contribution would be counted twice (I2)"
        self.entries[entry.digest()] = entry
        self._place(machine, entry.span, next_head(head, entry), sha256(state, entry.payload))

    def _place(self, machine: Machine, span: SpanId, head: SpanHead, state: bytes) -> None:
        known = self.known_bytes.setdefault((span, head.digest), state)
        assert known == state or not self.check_bytes, f"{machine.name}: equal chain digests, different bytes (I1)"
        machine.vectors[span] = (head, state)

    def _serve_span(self, machine: Machine, order: ServeSpan) -> None:
        if order.span not in machine.vectors:
            return
        head, state = machine.vectors[order.span]
        offset = order.offset if order.version == head.digest else 0
        reply = SpanReply(
            span=order.span,
            head=head,
            total_bytes=len(state),
            offset=offset,
            piece=state[offset : offset + PIECE_BYTES],
        )
        self._send(machine, order.to, reply, self._local(machine) + ROUND_SECONDS)

    def _content(self, machine: Machine, fragment: int) -> tuple[tuple[Digest, Digest], ...]:
        found: Mapping[SpanId, tuple[SpanHead, bytes]] = machine.vectors
        return tuple(
            (found[span][0].digest, sha256(found[span][1])) for span in ALL_SPANS if span.fragment == fragment
        )

    def _compare(self, machine: Machine, order: CompareContent) -> None:
        mine = self._content(machine, order.fragment)
        pairs = [(a, b) for a, b in zip(mine, order.digests, strict=False) if a[0] == b[0]]
        num_equal = sum(a == b for a, b in pairs)
        differing = [
            SpanId(order.fragment, place)
            for place, (a, b) in enumerate(zip(mine, order.digests, strict=False))
            if a[0] == b[0] and a != b
        ]
        engine, now = machine.rules_engine, self._local(machine)
        self.perform(machine, engine.content_compared(order.peer, order.fragment, num_equal, differing, now))

    # -- disks

    def _keep_roster(self, machine: Machine, certified: CertifiedRoster) -> None:
        machine.disk.rosters.append(certified)
        roster = certified.roster
        self.rosters[roster.digest()] = roster
        siblings = self.children.setdefault((roster.parent, roster.level), set())
        siblings.add(roster.digest())
        assert roster.level or len(siblings) == 1, "two children of one roster were certified by majorities (I8)"
        engine = machine.engine
        if not machine.trains and roster.k > 0 and engine is not None and not engine.is_hub:
            engine.drop_state()
            machine.vectors.clear()

    def _checkpoint_later(self, machine: Machine) -> None:
        def checkpoint() -> None:
            machine.disk.checkpoint = dict(machine.vectors) if len(machine.vectors) == len(ALL_SPANS) else {}
            self._checkpoint_later(machine)

        self._later(machine, self.random.uniform(5.0, 20.0), checkpoint)

    def included_once(self) -> bool:
        """Tell whether every member's contribution to a span and round is in at most one entry (I2)."""
        seen: set[tuple[SpanId, int, PeerId]] = set()
        for entry in self.entries.values():
            roster = self.rosters[entry.roster]
            for place in included_places(entry):
                key = (entry.span, entry.round, roster.members[place].peer)
                if key in seen:
                    return False
                seen.add(key)
        return True
