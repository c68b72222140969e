"""What each action of the engine does to a lab machine: the virtual counterpart of `swarm/node.py`.

A new action gets a line in `_players` and a function here; nothing else in the lab knows the list of actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import SpanId
from p2p_diloco.lab.invariants import Inspector
from p2p_diloco.lab.island import Command, Replacement, Update
from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.maths import SharedMaths
from p2p_diloco.lab.network import Half
from p2p_diloco.lab.stage import Stage, Violated
from p2p_diloco.lab.trace import Trace
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import (
    Action,
    ApplyEntry,
    CompareContent,
    HashSpan,
    KeepBallots,
    KeepGoodbye,
    KeepRoster,
    RebuildParent,
    RebuildSpan,
    ReduceSpan,
    ReplaceSpan,
    Report,
    RoundClosed,
    Send,
    ServeContent,
    ServeEntry,
    ServeSpan,
    TakeSnapshot,
)
from p2p_diloco.protocol.actions import Stage as ReduceStage
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.messages import (
    ContentReply,
    EntryAbsent,
    Message,
    SpanReply,
    decode_message,
    encode_message,
    is_bulk,
)
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.swarm.pieces import SERVE_AGAIN_SECONDS, SERVE_TRIES
from p2p_diloco.swarm.vector_work import is_sound_piece, reduce_parts, state_from_bytes

PIECE_BYTES = 40
"""Spans of the lab are small; several pieces each keep transfers that are cut off in the play."""
REDUCE_SECONDS = 0.4
REBUILD_SECONDS = 0.2
LOOK_SECONDS = 0.5
ENCODED_SHARE = 0.01
"""Messages are handed over as they are; this share goes through its wire form, so that those are played too."""


class Player(Stage):
    """A stage that plays the engines' actions."""

    def __init__(self, seed: int, *, start: float, rules: RunRules, maths: SharedMaths, trace: Trace | None) -> None:
        super().__init__(seed, start=start, trace=trace)
        self.rules = rules
        self.maths = maths
        self.spans = tuple(rules.span_elements)
        self.inspector = Inspector(self)
        self._players: dict[type[Any], Callable[[Machine, Any], None]] = {
            Send: self._send,
            KeepBallots: lambda machine, action: machine.disk.keep_ballots(action.ballots),
            KeepGoodbye: lambda machine, action: machine.disk.keep_goodbye(action.goodbye),
            KeepRoster: self._keep_roster,
            TakeSnapshot: self._hand_over,
            ReduceSpan: lambda machine, action: self.later(
                machine, self.rng.random() * REDUCE_SECONDS, self._reduce, machine, action
            ),
            ApplyEntry: self._apply,
            ReplaceSpan: self._replace,
            ServeSpan: self._serve_span,
            ServeEntry: self._serve_entry,
            ServeContent: self._serve_content,
            RebuildSpan: lambda machine, action: self.later(machine, REBUILD_SECONDS, self._rebuild, machine, action),
            RebuildParent: lambda machine, action: self.later(
                machine, REBUILD_SECONDS, self._rebuild_parent, machine, action
            ),
            HashSpan: self._hash_span,
            CompareContent: self._compare_content,
            RoundClosed: lambda machine, action: machine.closed.append(action),
            Report: self._report,
        }

    def perform(self, machine: Machine, actions: Sequence[Action]) -> None:
        """Play what an engine wants done, in order."""
        for action in actions:
            self._players[type(action)](machine, action)

    # -- messages

    def _send(self, machine: Machine, action: Send) -> None:
        half = machine.links.get(action.to)
        if half is None:
            return
        message = action.message
        for arrival in self.network.arrivals(half, self.now, is_bulk(message)):
            if machine.local(arrival) <= action.deadline:
                self.at(arrival, self._arrive, half, message)
            elif self.trace is not None:
                self.trace.message(self.now, machine.name, "too late", half.target.name, message)

    def _arrive(self, half: Half, message: Message) -> None:
        if not half.is_up:
            return
        target = half.target
        if target.paused_at is not None:
            target.backlog.append((self._receive, (target, half.sender, message)))
            return
        try:
            self._receive(target, half.sender, message)
        except Exception as error:
            self.failed(target, error)

    def _receive(self, machine: Machine, sender: Machine, message: Message) -> None:
        if self.trace is not None:
            self.trace.message(self.now, machine.name, "from", sender.name, message)
        if self.rng.random() < ENCODED_SHARE:
            message = _through_the_wire(message)
        if type(message) is Entry:
            self._check_entry(machine, sender, message)
        elif type(message) is SpanReply and not is_sound_piece(message):
            raise Violated("I9", f"{sender} served numbers that no sound state holds", machine.name)
        else:
            actions = machine.running.receive(sender.peer, message, machine.local(self.now))
            if actions:
                self.perform(machine, actions)

    def _check_entry(self, machine: Machine, sender: Machine, entry: Entry) -> None:
        engine = machine.running
        if entry.span not in self.rules.span_elements or engine.chains.is_known(entry):
            return
        try:
            norm = self.maths.norm(self.maths.codecs.entry, entry.payload)
        except FrameError as error:
            raise Violated("I9", f"{sender} sent an entry that does not decode: {error}", machine.name) from error
        self.perform(machine, engine.entry_checked(sender.peer, entry, norm, machine.local(self.now)))

    # -- the disk, and people

    def _keep_roster(self, machine: Machine, action: KeepRoster) -> None:
        machine.disk.keep_roster(action.certified)
        self.inspector.roster_kept(machine, action.certified)
        self.later(machine, LOOK_SECONDS * (1.0 + self.rng.random()), self.look_around, machine)

    def _report(self, machine: Machine, action: Report) -> None:
        self.note(machine, action.topic, action.text)
        machine.reports.append((self.now, action))
        machine.topics.add(action.topic)
        if action.topic == "ready":
            machine.ready_at = self.now
        if action.topic == "branch":
            self.inspector.branch_given_up(machine)

    # -- the island: commands wait for its next step border

    def _hand_over(self, machine: Machine, command: Command) -> None:
        machine.vectors.commands.append(command)
        if not machine.border_is_due:
            machine.border_is_due = True
            self.later(machine, self.rng.random() * machine.step_seconds, self._reach_border, machine)

    def quicken(self, machine: Machine) -> None:
        """Let a machine that is slow no more reach a border as soon as it now would; its slow step ends early."""
        if machine.runs and machine.border_is_due:
            self.later(machine, self.rng.random() * machine.step_seconds, self._reach_border, machine)

    def _reach_border(self, machine: Machine) -> None:
        machine.border_is_due = False
        island = machine.vectors
        while island.commands:
            command = island.commands.popleft()
            match command:
                case Update():
                    self._absorb(machine, command)
                case Replacement():
                    self._take(machine, command)
                case TakeSnapshot():
                    self._contribute(machine, command)
        island.load()

    def _apply(self, machine: Machine, action: ApplyEntry) -> None:
        machine.disk.keep_entry(action.entry)
        self.inspector.entry_absorbed(machine, action.entry)
        self._hand_over(machine, Update(action.entry, action.own_included))

    def _absorb(self, machine: Machine, update: Update) -> None:
        island, span = machine.vectors, update.entry.span
        before = island.states.get(span)
        if before is None and not machine.trains:
            return  # dropped meanwhile
        assert before is not None, f"{machine} absorbs an entry of {span}, which it does not hold"
        self.inspector.entry_comes_next(machine, before, update.entry)
        advanced = self.maths.absorb(before, update.entry)
        island.absorb(update, advanced)
        self.inspector.span_advanced(machine, before, update.entry, advanced)

    def _replace(self, machine: Machine, action: ReplaceSpan) -> None:
        if not action.is_mended:
            machine.disk.give_up(action.span)
        if action.is_adoption:
            self.inspector.span_given_up(machine, action.span)
        self._hand_over(machine, Replacement(action.span, state_from_bytes(action.head, action.state)))

    def _take(self, machine: Machine, command: Replacement) -> None:
        before = machine.vectors.states.get(command.span)
        state = self.inspector.shared(command.span, command.state)
        machine.vectors.replace(Replacement(command.span, state))
        self.inspector.span_replaced(machine, command.span, before, state)

    def _contribute(self, machine: Machine, order: TakeSnapshot) -> None:
        now = machine.local(self.now)
        if now > order.deadline or not machine.contributes:
            return
        contribution = machine.vectors.contribute(order, machine.steps_made(self.now))
        if contribution is not None:
            self.inspector.contributed(machine, contribution)
            actions = machine.running.contribution_ready(contribution, now)
            self.inspector.opened(machine, actions)
            self.perform(machine, actions)

    # -- vector work for others

    def _reduce(self, machine: Machine, order: ReduceSpan) -> None:
        reduced = reduce_parts(order, self.maths.codecs, self.rules.span_elements[order.span])
        if isinstance(reduced, str):
            self.note(machine, "void", f"{order.span} in round {order.round}: {reduced}")
            if order.stage is ReduceStage.ROW:
                now = machine.local(self.now)
                self.perform(machine, machine.running.span_reduced(order, frozenset(), b"", 0.0, now))
            return
        now = machine.local(self.now)
        self.perform(machine, machine.running.span_reduced(order, reduced.sound, reduced.payload, reduced.norm, now))

    def _serve_span(self, machine: Machine, action: ServeSpan, tries: int = SERVE_TRIES) -> None:
        state = machine.vectors.states.get(action.span)
        if state is None:
            if tries > 1:
                self.later(machine, SERVE_AGAIN_SECONDS, self._serve_span, machine, action, tries - 1)
            return
        raw = self.maths.raw(state)
        offset = action.offset if action.version == state.head.digest else 0
        if offset < len(raw):
            piece = raw[offset : offset + min(PIECE_BYTES, action.most_bytes)]
            reply = SpanReply(span=action.span, head=state.head, total_bytes=len(raw), offset=offset, piece=piece)
            self._answer(machine, action.to, reply)

    def _serve_entry(self, machine: Machine, action: ServeEntry) -> None:
        entry = machine.disk.entry_after(action.span, action.parent)
        self._answer(machine, action.to, entry or EntryAbsent(span=action.span, parent=action.parent))

    def _rebuild(self, machine: Machine, action: RebuildSpan) -> None:
        span, held, disk = action.span, machine.vectors.states.get(action.span), machine.disk
        engine, now = machine.running, machine.local(self.now)
        found = (
            disk.rebuilt(span, self.maths, held.head.digest) if held is not None and span in disk.checkpoint else None
        )
        if found is None or held is None or found.head.digest != held.head.digest:
            self.perform(machine, engine.span_rebuilt(span, None, None, now))
            return
        state = self.maths.raw(found) if self.maths.content(found) != self.maths.content(held) else None
        self.perform(machine, engine.span_rebuilt(span, found.head, state, now))

    def _rebuild_parent(self, machine: Machine, action: RebuildParent) -> None:
        span, disk = action.span, machine.disk
        found = disk.rebuilt_before(span, self.maths, action.tip) if span in disk.checkpoint else None
        engine, now = machine.running, machine.local(self.now)
        head, raw = (None, None) if found is None else (found.head, self.maths.raw(found))
        self.perform(machine, engine.parent_rebuilt(span, action.tip, head, raw, now))

    def _hash_span(self, machine: Machine, action: HashSpan) -> None:
        state = self.inspector.shared(action.span, state_from_bytes(action.head, action.state))
        content = self.maths.content(state)
        now = machine.local(self.now)
        self.perform(machine, machine.running.span_hashed(action.span, action.head, content, now))

    def _serve_content(self, machine: Machine, action: ServeContent) -> None:
        states = self._states(machine, action.fragment)
        if states is not None:
            digests = tuple((state.head.digest, self.maths.content(state)) for state in states)
            self._answer(machine, action.to, ContentReply(fragment=action.fragment, digests=digests))

    def _compare_content(self, machine: Machine, action: CompareContent) -> None:
        states = self._states(machine, action.fragment)
        if states is None or len(states) != len(action.digests):
            return
        mine = [(state.head.digest, self.maths.content(state)) for state in states]
        num_equal = sum(a == b for a, b in zip(mine, action.digests, strict=True))
        differing = [
            SpanId(action.fragment, index)
            for index, (a, b) in enumerate(zip(mine, action.digests, strict=True))
            if a[0] == b[0] and a[1] != b[1]
        ]
        now = machine.local(self.now)
        self.perform(machine, machine.running.content_compared(action.peer, action.fragment, num_equal, differing, now))

    def _states(self, machine: Machine, fragment: int) -> list[SpanState] | None:
        found = [machine.vectors.states.get(span) for span in self.spans if span.fragment == fragment]
        states = [state for state in found if state is not None]
        return states if len(states) == len(found) else None

    def _answer(self, machine: Machine, to: Any, message: Message) -> None:
        deadline = machine.local(self.now) + self.rules.silence_seconds
        self._send(machine, Send(to=to, message=message, deadline=deadline))


def _through_the_wire(message: Message) -> Message:
    decoded = decode_message(encode_message(message))
    if decoded != message:
        raise Violated("I9", f"the wire form of a message changes it: {message}")
    return decoded
