"""One peer on the network: performs the engine's actions over a transport and passes received messages to the engine.

Nothing is decided here. The loop never touches a whole vector (one worker thread does) and never waits for training.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from p2p_diloco.errors import FrameError, NetworkError, PeerError, clean_text
from p2p_diloco.ids import PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.node.budgets import Line, PeerBudgets
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.clock_watch import ClockWatch
from p2p_diloco.node.serving import Serving
from p2p_diloco.node.surroundings import (
    AddressBook,
    EntryArchive,
    NoArchive,
    PeerMemory,
    ReachBook,
    Replica,
    SpanUpdate,
    SwarmObserver,
)
from p2p_diloco.node.text_exchange import SharedCopy, TextExchange
from p2p_diloco.node.traffic import Traffic, purpose_of
from p2p_diloco.node.vector_worker import Worker
from p2p_diloco.protocol.actions import (
    Action,
    ApplyEntry,
    CompareContent,
    HashSpan,
    KeepBallots,
    KeepLiveliness,
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
    Stage,
    TakeSnapshot,
)
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.results import EntryChecked, EntryCompared, SpanDamaged, SpanReduced
from p2p_diloco.protocol.round.influence import Agreement
from p2p_diloco.protocol.rules import explain_unlisted
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import (
    MOST_PIECE_BYTES,
    BlockRequest,
    EntryRequest,
    Holdings,
    HoldingsRequest,
    Introductions,
    ManifestReply,
    ManifestRequest,
    Message,
    Ping,
    Pong,
    ReachReply,
    ReachRequest,
    Refusal,
    RosterReply,
    RosterRequest,
    SpanReply,
    SpanRequest,
    TextBlock,
    decode_message,
    is_bulk,
    is_bulk_kind,
    kind_of,
    longest_frames,
    message_parts,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.span.reduce import Codecs, EncodedMean, agreement_of, reduce_parts
from p2p_diloco.span.serve import is_sound_piece, state_from_bytes
from p2p_diloco.transport.link import Frame, Lane, SplitFrame, Transport

INTRODUCTION_SECONDS = 10.0
CAUSED_BY_PEERS = frozenset(
    ("refused", "entry-refused", "roster-refused", "proposal-refused", "frame-refused", "content", "donor", "good-bye")
)
"""Topics of reports that a peer can cause at will with its messages; they name it and count against its budget."""
PATIENT_SILENCES = 2
"""Multiple of `silence_seconds` that a started peer waits for the swarm's time before it uses its own clock."""
REPORTED_AFTER_BEATS = 2
"""Heartbeats for which clocks may differ without a report: a peer that woke up sets its clock within one."""
SHORTEST_PAUSE_SECONDS = 1e-3
"""Minimum pause: swarm time and loop time differ by rounding, so shorter pauses might end at once, again and again."""
NOTED_PER_ROUND = frozenset({"skipped", "content-sound"})
"""Topics that occur for every span at once and are reported once per round."""
OWN_STATE = frozenset({"ready", "branch", "adoption"})
"""Topics about changes of this peer's state. No peer can cause many of them, and none may be left out."""
MOST_ROSTER_QUESTIONS = 4
"""Maximum number of different roster requests under way to one peer."""
ASK_AGAIN_SECONDS = 1.0
"""The same roster request is repeated after this time, or after a heartbeat if that is shorter."""
MOST_CHECKED = 4
"""Maximum number of entries of one non-member that are queued in the worker, which checks their vectors."""
MOST_ENTRIES_WAITING = 16
"""Backlog, in entries of the longest size, at which a peer's entry requests are no longer answered.

A peer that catches up requests eight at a time.
"""
COMPARED_SPANS = 8
"""Average number of spans of a round whose entries are compared with this peer's contributions."""
MOST_REPORTED = 1024
MOST_UNKNOWN_BYTES = 4096
"""Maximum length of a frame of another version, which is read for what it says about itself."""
FEWEST_SPLIT_BYTES = 64 * 1024
"""A vector of at least this length is sent without a copy; a shorter one is copied into one buffer with its header."""


class SwarmNode:
    """Drives one engine. Create it in the loop; `run` continues until it is cancelled or the transport is lost."""

    def __init__(
        self,
        *,
        engine: PeerEngine,
        transport: Transport,
        replica: Replica,
        codecs: Codecs,
        memory: PeerMemory,
        clock: SwarmClock,
        observer: SwarmObserver,
        manifest: bytes,
        worker: Worker,
        addresses: AddressBook | None = None,
        archive: EntryArchive | None = None,
        reach: ReachBook | None = None,
        text: SharedCopy | None = None,
        clocks: ClockWatch | None = None,
    ) -> None:
        self.engine = engine
        self.traffic = Traffic()
        self.transport = transport
        self._replica = replica
        self.codecs = codecs
        self._memory = memory
        self._clock = clock
        self.clocks = clocks if clocks is not None else ClockWatch(engine.me.peer)
        self._observer = observer
        self._manifest = manifest
        self._worker = worker
        self._addresses = addresses
        self._reach = reach
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lost: NetworkError | None = None
        self._last_ping = float("-inf")
        self._voices: frozenset[PeerId] = frozenset()
        self._agreed_at = self._loop.time()
        self._has_reported_apart = False
        self._notes = RoundNotes()
        self._budgets = PeerBudgets(engine.rules)
        self._roster_questions: dict[tuple[PeerId, RosterRequest], float] = {}
        self._checked: Counter[PeerId] = Counter()
        self._reported: set[PeerId] = set()
        self._secret = engine.me.sign(b"compared pieces")
        self._most_waiting = MOST_ENTRIES_WAITING * max(engine.rules.entry_bytes.values())
        self._archive = archive if archive is not None else NoArchive()
        self._serving = Serving(
            engine=engine,
            replica=replica,
            archive=self._archive,
            work=self._work,
            post=self._post,
            waiting_bytes=lambda peer: transport.waiting_bytes(peer, Lane.BULK),
            play=self._play,
            now=clock.now,
        )
        self.text = self._share(text) if text is not None else None
        """Fetches and serves the text, in a run that shares it; run it beside this node."""
        rules = engine.rules
        self._longest = longest_frames(
            spans=max(rules.num_spans), payload_bytes=max(*rules.payload_bytes.values(), *rules.entry_bytes.values())
        )
        transport.serve(self, may_read=self._may_read)

    def _share(self, shared: SharedCopy) -> TextExchange:
        return TextExchange(
            shared,
            transport=self.transport,
            post=self._post,
            report=self._report,
            is_stranger=self.engine.is_stranger,
            now=self._clock.now,
        )

    # -- driving the engine

    async def run(self) -> None:
        """Tick until cancelled.

        Raises:
            NetworkError: the transport itself failed.
        """
        self._lost = self._lost or self.transport.lost  # it may have failed before this node listened
        for peer in sorted(self.transport.linked_peers()):
            self.link_up(peer)
        rules = self.engine.rules
        self._clock.begin(
            rules.clock,
            latest_round=self.engine.latest_round(),
            patience_seconds=PATIENT_SILENCES * rules.silence_seconds,
        )
        self._choose_clocks()
        while True:
            if self._lost is not None:
                raise self._lost
            progress, backlog_bytes = self._replica.progress(), self.transport.backlog_bytes()
            changed = replace(self.engine.conditions, progress=progress, upload_backlog_bytes=backlog_bytes)
            self.engine.set_conditions(changed)
            self._ask_for_the_time(self._clock.now())
            now = self._clock.now()  # again: the call above may have set the clock, and let this peer take part
            self._play(self.engine.tick(now))
            self._wake.clear()
            pause = max(self.engine.wake_at(now) - self._clock.now(), SHORTEST_PAUSE_SECONDS)
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def found(self, founding: CertifiedRoster) -> None:
        """Found the run with roster 0."""
        self._play(self.engine.found(founding, self._clock.now()))

    def leave(self) -> None:
        """Announce that this peer leaves; it stays until `may_go` returns True."""
        self._play(self.engine.leave(self._clock.now()))

    def may_go(self) -> bool:
        """Return whether the other members no longer need a vote of this peer."""
        return self.engine.may_go(self._clock.now())

    def span_damaged(self, span: SpanId, reason: str) -> None:
        """Have a span repaired that could not follow a valid entry; the replica has left it unchanged."""
        self._play(self.engine.take_result(SpanDamaged(span=span, reason=reason), self._clock.now()))

    def _ask_for_the_time(self, now: float) -> None:
        """Ask members for their clocks once per heartbeat, and only listen while the time is uncertain."""
        beat, moment = self.engine.rules.heartbeat_seconds, self._loop.time()
        if moment - self._last_ping >= beat:
            # They change when this peer becomes reachable, or heartbeats of other members arrive.
            if self._voices != self.engine.membership.contact.clocks(now):
                self._choose_clocks()
            self._last_ping = moment
            rounds, heads = self.engine.rules.clock, self.engine.chains.heads.values()
            self._clock.poll(rounds.begin(max((head.round for head in heads), default=0) - 1))
            for peer in sorted(self.transport.linked_peers()):
                if self._clock.counts(peer) and self._clock.is_due(peer, beat):
                    self._post(peer, Ping(nonce=self._clock.ask(peer)), now + beat)
            self._look_at_wall_clocks(now)
        disagreement = self._clock.disagreement_seconds
        is_uncertain = disagreement > 0.0 or not self._clock.is_settled
        self.engine.set_conditions(replace(self.engine.conditions, is_time_uncertain=is_uncertain))
        if not disagreement:
            self._agreed_at = moment
            if self._has_reported_apart:
                self._observer.report("clock", "the members' clocks and this peer's agree again")
                self._has_reported_apart = False
        elif not self._has_reported_apart and moment - self._agreed_at > REPORTED_AFTER_BEATS * beat:
            text = (
                f"the members' clocks and this peer's are {disagreement:.1f} s apart; "
                "this peer only listens until they agree"
            )
            self._observer.report("clock", text)
            self._has_reported_apart = True

    def _look_at_wall_clocks(self, now: float) -> None:
        """Note how far this machine's clock is off, and report clocks that differ from most others."""
        roster, me = self.engine.book.in_force, self.engine.me.peer
        if roster is None or not self._clock.is_settled:
            return
        behind_seconds = self._clock.wall_offset_seconds
        self.engine.set_conditions(replace(self.engine.conditions, clock_behind_seconds=behind_seconds))
        founder, before = self.engine.book.founder, self.clocks.correction_seconds
        behind = {peer: beat.clock_behind for peer, beat in self.engine.membership.alive(now).items()}
        behind[me] = behind_seconds
        for peer, sentence in self.clocks.look(behind, roster.peers() | {founder}, yields=me != founder):
            self._report("clock", sentence, None if peer == me else peer)
        if self.clocks.correction_seconds != before and self._addresses is not None:
            self._addresses.clock_corrected()
            for peer in sorted(self.transport.linked_peers()):
                self._introduce_known(peer)

    def _choose_clocks(self) -> None:
        """Count the clocks of the members that this peer can hear."""
        roster, me = self.engine.book.in_force, self.engine.membership.me
        if roster is None:
            return
        member = roster.member(me.peer)
        voices = self._voices = self.engine.membership.contact.clocks(self._clock.now())
        takes_part = member is not None and member.incarnation == me.incarnation
        depends_on_hub = self.engine.membership.contact.depends_on_hub(voices)
        self._clock.follow(voices, is_source=member is not None, takes_part=takes_part, depends_on_hub=depends_on_hub)
        self._last_ping = float("-inf")  # ask new voices at once

    # -- callbacks of the transport

    def link_up(self, peer: PeerId) -> None:
        """Called when `peer` can be reached: introduce the peers that we know."""
        self.engine.link_up(peer)
        self._introduce_known(peer)
        self._wake.set()

    def _introduce_known(self, peer: PeerId) -> None:
        records = self._addresses.introductions() if self._addresses is not None else ()
        if records and self._budgets.admits_link(peer, self._loop.time()):
            self._post(peer, Introductions(records=records), self._clock.now() + INTRODUCTION_SECONDS)

    def link_lost(self, peer: PeerId, reason: str) -> None:
        """Called when the link to `peer` is lost."""
        self.engine.link_lost(peer)
        self._clock.forget(peer)
        name = short_peer_id(peer)
        self._report("link", f"link lost: {reason}" if name in reason else f"link to {name} lost: {reason}", peer)
        self._wake.set()  # its open requests go to other peers at once

    def disturbed(self, peer: PeerId, text: str) -> None:
        """Called when a peer that may have no link wastes this machine's time."""
        self._report("flood", f"{short_peer_id(peer)} {text}", peer)

    def transport_lost(self, error: NetworkError) -> None:
        """Called when the transport has failed: `run` raises the error."""
        self._lost = error
        self._wake.set()

    def _may_read(self, peer: PeerId, lane: Lane, head: bytes, length: int) -> bool:
        """Return whether to read a frame; see `Transport.may_read`. What is not understood is read and refused."""
        kind, name, wrong = kind_of(head), short_peer_id(peer), ""
        if kind is None:
            wrong = f"a frame of no known kind of {length} bytes" if length > MOST_UNKNOWN_BYTES else ""
        elif is_bulk_kind(kind) != (lane is Lane.BULK):
            wrong = f"{kind.__name__} came on the {lane.value} lane"
        elif length > self._longest[kind]:
            wrong = f"a {kind.__name__} of {length} bytes; in this run it has at most {self._longest[kind]}"
        if wrong:
            self._report("frame-refused", f"{name} sent a bad frame: {wrong}; closing the link", peer)
            raise FrameError(f"{name} sent a bad frame: {wrong}")
        if kind is None:
            return True
        is_admitted = self._budgets.admits(peer, kind, self._loop.time())
        if not is_admitted:
            self.traffic.count_received("transfer" if lane is Lane.BULK else "control", length)
        return is_admitted

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        """Pass a frame to the engine, or answer it here if it concerns the clock, the manifest or addresses."""
        try:
            message = decode_message(frame)
        except FrameError as error:
            self._report("frame-refused", f"{short_peer_id(peer)} sent a bad frame: {error}; closing the link", peer)
            self.transport.hang_up(peer)
            return
        self.traffic.count_received(purpose_of(message), len(frame))
        now = self._clock.now()
        if self._is_unlisted(peer) and not isinstance(message, ManifestRequest):
            self._turn_away(peer, now)
            return
        match message:
            case Ping():
                self._clock.poll()  # a machine that has just woken up does not know the time
                settled = self._clock.is_settled
                pong = Pong(nonce=message.nonce, clock_seconds=self._clock.own(), is_settled=settled)
                self._post(peer, pong, now + 5.0)
            case Pong():
                self._clock.take_answer(peer, message.nonce, message.clock_seconds, is_settled=message.is_settled)
            case ManifestRequest():
                self._post(peer, ManifestReply(manifest=self._manifest), now + 30.0)
            case ManifestReply():
                pass
            case Introductions():
                if self._addresses is not None:
                    self._addresses.introduced(message.records)
            case ReachRequest() | ReachReply():
                if self._reach is not None:
                    self._reach.receive(peer, message)
            case EntryRequest() | SpanRequest() | HoldingsRequest() | BlockRequest() if (
                self.engine.membership.is_paused
            ):
                pass  # the requester turns to another peer
            case HoldingsRequest() | Holdings() | BlockRequest() | TextBlock():
                if self.text is not None:
                    self.text.receive(peer, message)
            case Entry():
                self._check_entry(peer, message)
            case SpanReply() if not is_sound_piece(message):
                text = f"{short_peer_id(peer)} served a piece with invalid numbers; closing the link"
                self._report("frame-refused", text, peer)
                self.transport.hang_up(peer)
            case EntryRequest():
                if self.transport.waiting_bytes(peer, Lane.BULK) < self._most_waiting:
                    self._play(self.engine.receive(peer, message, now), on_request=True, caused_by=peer)
            case _:
                if isinstance(message, RosterReply):
                    self._roster_questions = {key: at for key, at in self._roster_questions.items() if key[0] != peer}
                self._play(self.engine.receive(peer, message, now), caused_by=peer)

    def _check_entry(self, peer: PeerId, entry: Entry) -> None:
        elements = self.engine.rules.span_elements.get(entry.span)
        if elements is None or self.engine.chains.is_known(entry):
            return
        if entry.roster not in self.engine.book:  # it only waits for its roster, whatever its numbers
            self._take_entry(peer, entry, 0.0)
            return
        if self.engine.is_stranger(peer) and self._checked[peer] >= MOST_CHECKED:
            self._budgets.leave_out(peer, self._loop.time())
            return
        self._checked[peer] += 1

        def checked(norm: float | str) -> None:
            self._checked[peer] -= 1
            if not self._checked[peer]:
                del self._checked[peer]
            if isinstance(norm, str):
                self._report("frame-refused", norm, peer)
            else:
                self._take_entry(peer, entry, norm)

        self._work(checked, peer, self._norm_of, entry, elements)

    def _take_entry(self, peer: PeerId, entry: Entry, norm: float) -> None:
        checked = EntryChecked(sender=peer, entry=entry, payload_norm=norm)
        self._play(self.engine.take_result(checked, self._clock.now()), caused_by=peer)

    def _norm_of(self, entry: Entry, elements: int) -> float | str:
        """Return the norm of an entry's payload, or what is wrong with it; runs on the worker."""
        try:
            return self.codecs.entry.norm(entry.payload, elements)
        except PeerError as error:
            return str(error)

    # -- unlisted peers

    def _is_unlisted(self, peer: PeerId) -> bool:
        """Return whether the run has a list of participants, and `peer` is neither on it nor the founder."""
        return not self.engine.rules.may_be_member(peer) and self.engine.is_stranger(peer)

    def _turn_away(self, peer: PeerId, now: float) -> None:
        """Explain to an unlisted peer, once, why it gets only the manifest."""
        if peer not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(peer)
            reason = explain_unlisted(peer).encode()
            self._post(peer, Refusal(round=0, newer_roster=False, reason=reason), now + 5.0)

    # -- the worker

    def _work(self, then: Callable[[Any], None], peer: PeerId | None, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the worker thread and pass its result to `then` in the loop; report a `PeerError`."""

        def done(result: Any, error: BaseException | None) -> None:
            if isinstance(error, PeerError):
                name = short_peer_id(peer) if peer is not None else "this peer"
                self._report("frame-refused", f"{name}: {error}", peer)
            elif error is not None:
                self._loop.call_exception_handler({"message": "vector work failed", "exception": error})
            else:
                then(result)

        self._worker.submit(done, function, *args)

    def _reduce(self, action: ReduceSpan) -> None:
        def reduced(result: EncodedMean | str) -> None:
            if isinstance(result, str):
                self._notes.note("skipped", f"skipped {action.span} in round {action.round}: {result}")
                if action.stage is Stage.ROW:
                    self._play(self.engine.take_result(SpanReduced(order=action), self._clock.now()))
                return
            for peer, reason in result.dropped:
                text = f"round {action.round}, {action.span}: {short_peer_id(peer)}: {reason}"
                self._notes.note("contribution-dropped", text, about=peer)
            mean = SpanReduced(
                order=action,
                sound=result.sound,
                payload=result.payload,
                payload_norm=result.norm,
                measured=result.measured,
            )
            self._play(self.engine.take_result(mean, self._clock.now()))

        self._work(reduced, None, reduce_parts, action, self.codecs, self.engine.rules.span_elements[action.span])

    def _compare(self, entry: Entry, own: bytes | memoryview) -> None:
        """Find out how an entry agrees with this peer's contribution to it, for some spans of a large fragment."""
        rules, secret = self.engine.rules, sha256(self._secret, entry.digest())
        if secret[-1] * rules.num_spans[entry.span.fragment] >= 256 * COMPARED_SPANS:
            return

        def compared(agreement: Agreement) -> None:
            self.engine.take_result(EntryCompared(entry=entry, agreement=agreement), self._clock.now())

        elements = rules.span_elements[entry.span]
        self._work(compared, None, agreement_of, entry.payload, own, self.codecs, elements, secret)

    # -- performing actions

    def _play(self, actions: Sequence[Action], *, on_request: bool = False, caused_by: PeerId | None = None) -> None:
        frames: dict[int, Frame] = {}
        for action in actions:
            match action:
                case Send() if not self._may_send(action):
                    pass
                case Send():
                    self._note_refusal(action)
                    self._post(action.to, action.message, action.deadline, frames=frames, on_request=on_request)
                case KeepBallots():
                    self._memory.keep_ballots(action.ballots)
                case KeepLiveliness():
                    self._memory.keep_liveliness(action.liveliness)
                case KeepRoster():
                    if action.is_in_force:
                        self._memory.keep_roster(action.certified)
                    self._choose_clocks()
                case RoundClosed():
                    for topic, text, about in self._notes.take():
                        self._report(topic, text, about)
                    for topic, text in self._budgets.flush(self._loop.time()):
                        self._observer.report(topic, text)
                    self._observer.round_closed(action)
                case Report() if action.topic in NOTED_PER_ROUND:
                    self._notes.note(action.topic, action.text)
                case Report():
                    self._report(action.topic, action.text, caused_by if action.topic in CAUSED_BY_PEERS else None)
                case _:
                    self._play_vectors(action)
        if actions:
            self._wake.set()

    def _report(self, topic: str, text: str, peer: PeerId | None) -> None:
        """Report a text. If `peer` caused it, the text names that peer and counts against its budget."""
        text = clean_text(text)
        if peer is None or topic in OWN_STATE:
            self._observer.report(topic, text)
            return
        name = short_peer_id(peer)
        line = Line(topic, text if name in text else f"{name}: {text}")
        is_member = not self.engine.is_stranger(peer)
        for topic, text in self._budgets.take(peer, line, self._loop.time(), is_member=is_member):
            self._observer.report(topic, text)

    def _may_send(self, action: Send) -> bool:
        """Return whether to send a message; a roster request is not repeated while it is under way."""
        question = action.message
        if not isinstance(question, RosterRequest):
            return True
        now, to = self._loop.time(), action.to
        self._roster_questions = {key: until for key, until in self._roster_questions.items() if until > now}
        under_way = sum(peer == to for peer, _ in self._roster_questions)
        if (to, question) in self._roster_questions or under_way >= MOST_ROSTER_QUESTIONS:
            return False
        self._roster_questions[to, question] = now + min(self.engine.rules.heartbeat_seconds, ASK_AGAIN_SECONDS)
        return True

    def _note_refusal(self, action: Send) -> None:
        refusal = action.message
        if isinstance(refusal, Refusal):
            reason = refusal.reason.decode("utf-8", "replace")
            text = f"round {refusal.round}: {short_peer_id(action.to)}: {reason}"
            self._notes.note("contribution-dropped", text, about=action.to)

    def _play_vectors(self, action: Action) -> None:
        match action:
            case TakeSnapshot():
                self._replica.take_snapshot(
                    action.round, action.fragment, action.deadline, self._contribute, action.spans
                )
            case ReduceSpan():
                self._reduce(action)
            case ApplyEntry():
                self._archive.keep_entry(action.entry)
                self._replica.apply(_update(action))
                if action.own is not None:
                    self._compare(action.entry, action.own)
            case ReplaceSpan():
                held = self._replica.span_state(action.span)
                if not action.is_mended:
                    self._archive.give_up(action.span)
                if action.is_mended or held is not None:
                    height = max(action.head.height, held.head.height if held is not None else 0)
                    self._archive.distrust(action.span, height, is_mended=action.is_mended)
                self._replica.replace(action.span, state_from_bytes(action.head, action.state))
            case (
                ServeSpan()
                | ServeEntry()
                | ServeContent()
                | CompareContent()
                | RebuildSpan()
                | RebuildParent()
                | HashSpan()
            ):
                self._serving.play(action)

    def _contribute(self, contribution: Any) -> None:
        if contribution is not None:
            self._play(self.engine.take_result(contribution, self._clock.now()))

    def _post(
        self,
        to: PeerId,
        message: Message,
        deadline: float,
        *,
        frames: dict[int, Frame] | None = None,
        on_request: bool = False,
    ) -> None:
        """Post a message; one that goes to many peers is encoded once. Without a link it is dropped."""
        if self._is_unlisted(to) and not isinstance(message, ManifestReply | Refusal):
            return
        frame = frames.get(id(message)) if frames is not None else None
        if frame is None:
            frame = _frame_of(message)
            if frames is not None:
                frames[id(message)] = frame
        lane = Lane.BULK if is_bulk(message) else Lane.CONTROL
        at = self._loop.time() + max(deadline - self._clock.now(), 0.05)
        if self.transport.post(to, frame, lane=lane, deadline=at):
            self.traffic.count_sent(purpose_of(message, on_request=on_request), len(frame))


def _frame_of(message: Message) -> Frame:
    head, vector = message_parts(message)
    # A waiting piece keeps all of an old version of its span in memory: only the longest are worth that.
    fewest = MOST_PIECE_BYTES if isinstance(message, SpanReply) else FEWEST_SPLIT_BYTES
    return SplitFrame(head, vector) if len(vector) >= fewest else b"".join((head, vector))


def _update(action: ApplyEntry) -> SpanUpdate:
    entry = action.entry
    return SpanUpdate(
        span=entry.span, absorbed=entry.absorbed(), payload=entry.payload, own_included=action.own_included
    )


class RoundNotes:
    """Collects texts until the round is over: a round that skips every span makes one report, not many.

    For each subject it keeps the first text and counts the others.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, PeerId | None], str] = {}
        self._more: dict[tuple[str, PeerId | None], int] = {}

    def note(self, topic: str, text: str, *, about: PeerId | None = None) -> None:
        """Add a text. `about` is the peer that it blames; each peer is a separate subject, so none hides another."""
        subject = (topic, about)
        if subject in self._first:
            self._more[subject] = self._more.get(subject, 0) + 1
        else:
            self._first[subject] = text

    def take(self) -> list[tuple[str, str, PeerId | None]]:
        """Return topic, text and peer of each subject, in order of their first texts, and start over."""
        first, more = self._first, self._more
        self._first, self._more = {}, {}
        return [
            (topic, f"{text} (and {more[topic, about]} more like it)" if (topic, about) in more else text, about)
            for (topic, about), text in first.items()
        ]
