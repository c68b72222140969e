"""The stage of a simulated swarm: one clock, all links, and the engines' actions performed on fake vectors."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping

from fake_run import (
    ALL_SPANS,
    PAYLOAD_BYTES,
    PIECE_BYTES,
    ROUND_SECONDS,
    Machine,
    absorbed_bytes,
    believed_proofs,
    run_rules,
)
from made import change

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.actions import (
    Action,
    ApplyEntry,
    CompareContent,
    HashSpan,
    KeepActivity,
    KeepBallots,
    KeepRoster,
    RebuildParent,
    RebuildSpan,
    ReduceSpan,
    ReplaceSpan,
    Report,
    RequestContribution,
    RoundClosed,
    Send,
    ServeContent,
    ServeEntry,
    ServeSpan,
)
from p2p_diloco.protocol.results import (
    ContentCompared,
    EntryChecked,
    ParentRebuilt,
    SpanHashed,
    SpanRebuilt,
    SpanReduced,
)
from p2p_diloco.protocol.round.round import EncodedSpan, FragmentContribution
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import HEAD_LAYOUT, Entry, included_places, next_head
from p2p_diloco.protocol.wire.frames import to_bytes
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    EntryAbsent,
    Message,
    SpanReply,
    SpanVector,
    decode_message,
    encode_message,
    is_bulk,
)
from p2p_diloco.protocol.wire.roster import (
    CertifiedRoster,
    Roster,
)
from p2p_diloco.span_log import SpanHead

MOST_FRAMES = 512


class Stage:
    """One clock and all links; performs the actions of the engines."""

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
        self.vector_loss = 0.0
        """Of contributions' vectors alone: openings and all else arrive."""
        self.duplication = duplication
        self.is_lost: Callable[[Machine, Machine, Message], bool] = lambda sender, target, message: False
        """Which messages never arrive, besides those that `loss` draws."""
        self.rules = rules if rules is not None else run_rules()
        self.machines: dict[str, Machine] = {}
        self.by_id: dict[PeerId, Machine] = {}
        self.links: set[frozenset[str]] = set()
        self.islands: dict[str, int] = {}
        self.known_bytes: dict[tuple[SpanId, Digest], bytes] = {}
        self.entries: dict[Digest, Entry] = {}
        self.children: dict[tuple[Digest, bool], set[Digest]] = {}
        self.rosters: dict[Digest, Roster] = {}
        self.followed_in: dict[Digest, int] = {}
        """For each roster that has a child with a majority, the round of the earliest ballot that certified that."""
        self.last_entry: dict[Digest, int] = {}
        self.num_messages = 0
        self.check_bytes = True
        self.knows_forged = False
        """A test has made an entry that no honest peers could: rounds under two rosters are its doing."""
        self.takes_checkpoints = True
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._frames: dict[int, tuple[Message, Message]] = {}
        """What was sent of late and what comes of it, by the identity of what was sent."""
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

    def run_to_cycle_end(self) -> None:
        clock = self.rules.clock
        cycle = clock.cycle(clock.round_at(self.now))
        self.run_to(clock.begin((cycle + 1) * clock.num_fragments))

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
                if asleep or not self._reachable(a, b):
                    continue
                if link in self.links and not self._wanted(a, b):
                    self._cut(link)
                elif link not in self.links and self._wanted(a, b):
                    self.links.add(link)
                    for here, there in ((a, b), (b, a)):
                        self._link_up(self.machines[here], self.machines[there])
        self.at(self.now + 1.0 + self.random.random(), self._dial)

    def _wanted(self, a: str, b: str) -> bool:
        """Return whether one of two machines would dial the other."""
        for here, there in ((a, b), (b, a)):
            wanted = self.machines[here].rules_engine.wanted_links()
            if wanted is None or self.machines[there].peer in wanted:
                return True
        return False

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
        """Schedule an event at a machine for its current life; while the machine is paused, the event waits."""
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
            change(machine.engine, proofs=believed_proofs(machine.engine, self._local(machine)))
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
            case KeepActivity():
                machine.disk.activity = action.activity
            case KeepRoster():
                if action.is_in_force:
                    self._keep_roster(machine, action.certified)
            case RequestContribution():
                self._later(machine, self.random.uniform(0.0, 0.5), lambda: self._snapshot(machine, action))
            case ReduceSpan():
                self._later(machine, self.random.uniform(0.0, 0.2), lambda: self._reduce(machine, action))
            case ApplyEntry():
                machine.disk.entries.setdefault(action.entry.span, {})[action.entry.parent] = action.entry
                self._apply(machine, action.entry)
            case ReplaceSpan():
                if not action.is_mended:
                    machine.disk.entries.pop(action.span, None)
                self.place(machine, action.span, action.head, bytes(action.state))
            case ServeSpan():
                self._serve_span(machine, action)
            case ServeEntry():
                entry = machine.disk.entries.get(action.span, {}).get(action.parent)
                absent = EntryAbsent(span=action.span, parent=action.parent)
                self._send(machine, action.to, entry or absent, self._local(machine) + ROUND_SECONDS)
            case RebuildSpan():
                self._later(machine, 0.1, lambda: self._rebuild(machine, action.span))
            case RebuildParent():
                self._later(machine, 0.1, lambda: self._rebuild_parent(machine, action))
            case HashSpan():
                content = self._content_of(action.head, bytes(action.state))
                self.perform(
                    machine,
                    machine.rules_engine.take_result(
                        SpanHashed(span=action.span, head=action.head, content=content), self._local(machine)
                    ),
                )
            case ServeContent():
                digests = self._content(machine, action.fragment)
                reply: Message = ContentReply(fragment=action.fragment, digests=digests)
                if action.question is not None:
                    reply = machine.rules_engine.sign_content(action.question, digests)
                self._send(machine, action.to, reply, self.now + 9)
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
        if self.is_lost(machine, target, message):
            return
        self.num_messages += 1
        arriving = self._carried(message)
        loss = max(self.loss, self.vector_loss) if isinstance(message, SpanVector) else self.loss
        copies = (self.random.random() >= loss) + (self.random.random() < self.duplication)
        for _ in range(copies):
            lane = (machine.peer, to, is_bulk(message))
            arrival = max(self.now + self.random.uniform(*self.delay), self._last_arrival.get(lane, self.now))
            self._last_arrival[lane] = arrival
            delay = arrival - self.now
            if self._local(machine) + delay <= deadline:
                self._later(target, delay, lambda: self._receive(target, machine.peer, arriving))

    def _carried(self, message: Message) -> Message:
        """Return a message as decoded from its frame, once for all receivers: messages are frozen."""
        sent, arriving = self._frames.get(id(message), (None, message))
        if sent is not message:
            if len(self._frames) >= MOST_FRAMES:
                self._frames.clear()
            arriving = decode_message(encode_message(message))
            self._frames[id(message)] = (message, arriving)
        return arriving

    def _receive(self, machine: Machine, sender: PeerId, message: Message) -> None:
        engine, now = machine.rules_engine, self._local(machine)
        if isinstance(message, Entry):
            self.perform(machine, engine.take_result(EntryChecked(sender=sender, entry=message, payload_norm=1.0), now))
        else:
            self.perform(machine, engine.receive(sender, message, now))

    # -- the fake island

    def _snapshot(self, machine: Machine, order: RequestContribution) -> None:
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
            if order.spans is None or span in order.spans
        )
        contribution = FragmentContribution(
            round=order.round, fragment=order.fragment, tokens=100, steps=10, spans=spans
        )
        engine = machine.rules_engine
        self.perform(machine, engine.take_result(contribution, self._local(machine)))

    def _reduce(self, machine: Machine, order: ReduceSpan) -> None:
        payload = sha256(order.rounding_seed, *(part.payload for part in order.parts))[:PAYLOAD_BYTES]
        sound = frozenset(part.peer for part in order.parts)
        engine = machine.rules_engine
        mean = SpanReduced(order=order, sound=sound, payload=payload, payload_norm=1.0)
        self.perform(machine, engine.take_result(mean, self._local(machine)))

    def _apply(self, machine: Machine, entry: Entry) -> None:
        head, state = machine.vectors[entry.span]
        assert entry.parent == head.digest, f"{machine.name}: an entry came out of order (I3)"
        assert entry.round > head.round, "a contribution would be counted twice (I2)"
        self.entries[entry.digest()] = entry
        self.last_entry[entry.roster] = max(entry.round, self.last_entry.get(entry.roster, entry.round))
        self._check_succession(entry.roster)
        self.place(machine, entry.span, next_head(head, entry), absorbed_bytes(state, entry))

    def place(self, machine: Machine, span: SpanId, head: SpanHead, state: bytes) -> None:
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
            (found[span][0].digest, self._content_of(*found[span])) for span in ALL_SPANS if span.fragment == fragment
        )

    def _content_of(self, head: SpanHead, state: bytes) -> Digest:
        return sha256(state, to_bytes(head, HEAD_LAYOUT))

    def _compare(self, machine: Machine, order: CompareContent) -> None:
        mine = self._content(machine, order.fragment)
        pairs = [(a, b) for a, b in zip(mine, order.digests, strict=False) if a[0] == b[0]]
        num_equal = sum(a == b for a, b in pairs)
        differing = tuple(
            SpanId(order.fragment, place)
            for place, (a, b) in enumerate(zip(mine, order.digests, strict=False))
            if a[0] == b[0] and a != b
        )
        result = ContentCompared(peer=order.peer, fragment=order.fragment, num_equal=num_equal, differing=differing)
        self.perform(machine, machine.rules_engine.take_result(result, self._local(machine)))

    def _rebuild(self, machine: Machine, span: SpanId) -> None:
        held = machine.vectors[span]
        engine, now = machine.rules_engine, self._local(machine)
        if span not in machine.disk.checkpoint:
            return self.perform(machine, engine.take_result(SpanRebuilt(span=span), now))
        head, state = machine.disk.rebuilt(span, held[0].digest)
        reached = head if head.digest == held[0].digest else None
        result = SpanRebuilt(span=span, head=reached, state=state if state != held[1] else None)
        self.perform(machine, engine.take_result(result, now))

    def _rebuild_parent(self, machine: Machine, order: RebuildParent) -> None:
        before = machine.disk.rebuilt_before(order.span, order.tip) if order.span in machine.disk.checkpoint else None
        parent, state = before if before is not None else (None, None)
        result = ParentRebuilt(span=order.span, tip=order.tip, parent=parent, state=state)
        self.perform(machine, machine.rules_engine.take_result(result, self._local(machine)))

    # -- disks

    def _check_succession(self, roster: Digest) -> None:
        last, followed = self.last_entry.get(roster, -1), self.followed_in.get(roster)
        assert self.knows_forged or followed is None or last <= followed, (
            f"round {last} goes under roster {self.rosters[roster].k}, whose child was agreed on in round {followed}"
        )

    def _keep_roster(self, machine: Machine, certified: CertifiedRoster) -> None:
        if certified.roster.k and not certified.roster.degraded:
            agreed_in, parent = self.rules.clock.agreed_in(certified.ballot), certified.roster.parent
            self.followed_in[parent] = min(agreed_in, self.followed_in.get(parent, agreed_in))
            self._check_succession(parent)
        machine.disk.rosters.append(certified)
        roster = certified.roster
        self.rosters[roster.digest()] = roster
        siblings = self.children.setdefault((roster.parent, roster.degraded), set())
        siblings.add(roster.digest())
        assert roster.degraded or len(siblings) == 1, "two children of one roster were certified by majorities (I8)"
        engine = machine.engine
        if engine is not None and not machine.trains and engine.holds_needlessly(self._local(machine)):
            engine.drop_state()
            machine.vectors.clear()

    def _checkpoint_later(self, machine: Machine) -> None:
        def checkpoint() -> None:
            if self.takes_checkpoints:
                machine.disk.checkpoint = dict(machine.vectors) if len(machine.vectors) == len(ALL_SPANS) else {}
            self._checkpoint_later(machine)

        self._later(machine, self.random.uniform(5.0, 20.0), checkpoint)

    def included_once(self) -> bool:
        """Return whether every member's contribution to a span and round is in at most one entry (I2)."""
        seen: set[tuple[SpanId, int, PeerId]] = set()
        for entry in self.entries.values():
            roster = self.rosters[entry.roster]
            for place in included_places(entry):
                key = (entry.span, entry.round, roster.members[place].peer)
                if key in seen:
                    return False
                seen.add(key)
        return True
