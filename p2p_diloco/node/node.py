"""One peer on the network: performs the engine's actions over a transport and passes received messages to the engine.

Nothing is decided here. The loop never touches a whole vector (one worker thread does) and never waits for training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from p2p_diloco.errors import FrameError, NetworkError
from p2p_diloco.ids import PeerId, SpanId, short_peer_id
from p2p_diloco.node.budgets import PeerBudgets
from p2p_diloco.node.clock_keeper import ClockKeeper, ClockWatch
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.link_keeper import LinkKeeper
from p2p_diloco.node.ports import (
    EntryArchive,
    PeerMemory,
    Replica,
    SwarmObserver,
)
from p2p_diloco.node.reach_keeper import ReachKeeper
from p2p_diloco.node.reports import Reports
from p2p_diloco.node.text_exchange import SharedCopy, TextExchange
from p2p_diloco.node.vector_actions import VectorActions, VectorParts, Worker
from p2p_diloco.protocol.actions import (
    Action,
    KeepActivity,
    KeepBallots,
    KeepRoster,
    Report,
    RequestContribution,
    RoundClosed,
    Send,
)
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.results import SpanDamaged
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
    Opening,
    Ping,
    Pong,
    ReachReply,
    ReachRequest,
    Refusal,
    RosterReply,
    RosterRequest,
    SpanReply,
    SpanRequest,
    SpanVector,
    TextBlock,
    decode_message,
    is_bulk,
    is_bulk_kind,
    kind_of,
    longest_frames,
    message_parts,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span.serve import is_sound_piece
from p2p_diloco.transport.link import Frame, Lane, SplitFrame, Transport, TransportListener

INTRODUCTION_SECONDS = 10.0
SHORTEST_PAUSE_SECONDS = 1e-3
"""Minimum pause: swarm time and loop time differ by rounding, so shorter pauses might end at once, again and again."""
MOST_ROSTER_REQUESTS = 4
"""Maximum number of different roster requests under way to one peer."""
ASK_AGAIN_SECONDS = 1.0
"""The same roster request is repeated after this time, or after a heartbeat if that is shorter."""
MOST_REPORTED = 1024
MOST_UNKNOWN_BYTES = 4096
"""Maximum length of a frame of another version, which is read for what it says about itself."""
FEWEST_SPLIT_BYTES = 64 * 1024
"""A vector of at least this length is sent without a copy; a shorter one is copied into one buffer with its header."""


Purpose = Literal["vectors", "control", "transfer"]
FRAME_PREFIX_BYTES = 4


@dataclass(slots=True)
class Traffic:
    """Bytes by purpose, including frame prefixes."""

    sent: dict[Purpose, int] = field(default_factory=lambda: {"vectors": 0, "control": 0, "transfer": 0})
    received: dict[Purpose, int] = field(default_factory=lambda: {"vectors": 0, "control": 0, "transfer": 0})

    def count_sent(self, purpose: Purpose, frame_bytes: int) -> None:
        self.sent[purpose] += frame_bytes + FRAME_PREFIX_BYTES

    def count_received(self, purpose: Purpose, frame_bytes: int) -> None:
        self.received[purpose] += frame_bytes + FRAME_PREFIX_BYTES


class SwarmNode(TransportListener):
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
        archive: EntryArchive,
        addresses: LinkKeeper | None = None,
        reach: ReachKeeper | None = None,
        text: SharedCopy | None = None,
        clocks: ClockWatch | None = None,
    ) -> None:
        self.engine = engine
        self.traffic = Traffic()
        self.transport = transport
        self._replica = replica
        self._memory = memory
        self._clock = clock
        self._budgets = PeerBudgets(engine.rules)
        self._reports = Reports(observer, self._budgets, is_stranger=engine.is_stranger)
        self.clocks = ClockKeeper(
            clock,
            clocks if clocks is not None else ClockWatch(engine.me.peer),
            engine=engine,
            transport=transport,
            post=self._post,
            report=self._reports.report,
            corrected=self._clock_corrected,
        )
        self._manifest = manifest
        self._addresses = addresses
        self._reach = reach
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lost: NetworkError | None = None
        self._roster_requests: dict[tuple[PeerId, RosterRequest], float] = {}
        self._turned_away: set[PeerId] = set()
        parts = VectorParts(
            engine=engine,
            replica=replica,
            archive=archive,
            worker=worker,
            reports=self._reports,
            post=self._post,
            play=self._play,
            waiting_bytes=lambda peer: transport.waiting_bytes(peer, Lane.BULK),
            now=clock.now,
        )
        self.vectors = VectorActions(parts, codecs)
        self.text: TextExchange | None = None
        """Fetches and serves the text, in a run that shares it; run it beside this node."""
        if text is not None:
            self.text = TextExchange(
                text,
                transport=transport,
                post=self._post,
                report=self._reports.report,
                is_stranger=engine.is_stranger,
                now=clock.now,
            )
        rules = engine.rules
        self._longest = longest_frames(
            spans=max(rules.num_spans), payload_bytes=max(*rules.payload_bytes.values(), *rules.entry_bytes.values())
        )
        transport.serve(self, may_read=self._may_read)

    # -- driving the engine

    async def run(self) -> None:
        """Tick until cancelled.

        Raises:
            NetworkError: the transport itself failed.
        """
        self._lost = self._lost or self.transport.lost  # it may have failed before this node listened
        for peer in sorted(self.transport.linked_peers()):
            self.link_up(peer)
        self.clocks.begin()
        while True:
            if self._lost is not None:
                raise self._lost
            progress, backlog_bytes = self._replica.progress(), self.transport.backlog_bytes()
            changed = replace(self.engine.conditions, progress=progress, upload_backlog_bytes=backlog_bytes)
            self.engine.set_conditions(changed)
            self.clocks.tick(self._clock.now())
            now = self._clock.now()  # again: the call above may have set the clock, and let this peer take part
            self._play(self.engine.tick(now))
            self._wake.clear()
            pause = max(self.engine.wake_at(now) - self._clock.now(), SHORTEST_PAUSE_SECONDS)
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def now(self) -> float:
        """Return swarm time in seconds."""
        return self._clock.now()

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

    def _clock_corrected(self) -> None:
        if self._addresses is not None:
            self._addresses.clock_corrected()
            for peer in sorted(self.transport.linked_peers()):
                self._introduce_known(peer)

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
        self.engine.link_lost(peer)
        self._clock.forget(peer)
        name = short_peer_id(peer)
        text = f"link lost: {reason}" if name in reason else f"link to {name} lost: {reason}"
        self._reports.report("link", text, peer)
        self._wake.set()  # its open requests go to other peers at once

    def disturbed(self, peer: PeerId, text: str) -> None:
        """Called when a peer that may have no link wastes this machine's time."""
        self._reports.report("flood", f"{short_peer_id(peer)} {text}", peer)

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
            self._reports.report("frame-refused", f"{name} sent a bad frame: {wrong}; closing the link", peer)
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
            self._refuse(peer, f"sent a bad frame: {error}")
            return
        self.traffic.count_received(purpose_of(message), len(frame))
        now = self._clock.now()
        if self._is_unlisted(peer) and not isinstance(message, ManifestRequest):
            self._turn_away(peer, now)
            return
        match message:
            case Ping() | Pong():
                self.clocks.receive(peer, message, now)
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
                self.engine.conditions.is_paused
            ):
                pass  # the requester turns to another peer
            case HoldingsRequest() | Holdings() | BlockRequest() | TextBlock():
                if self.text is not None:
                    self.text.receive(peer, message)
            case Entry():
                if not self.vectors.check_entry(peer, message):
                    self._budgets.leave_out(peer, self._loop.time())
            case SpanReply() if not is_sound_piece(message):
                self._refuse(peer, "served a piece with invalid numbers")
            case EntryRequest():
                if self.vectors.serving.has_room_for_entry(peer):
                    self._play(self.engine.receive(peer, message, now), on_request=True, caused_by=peer)
            case _:
                if isinstance(message, RosterReply):
                    self._roster_requests = {key: at for key, at in self._roster_requests.items() if key[0] != peer}
                self._play(self.engine.receive(peer, message, now), caused_by=peer)

    def _refuse(self, peer: PeerId, why: str) -> None:
        self._reports.report("frame-refused", f"{short_peer_id(peer)} {why}; closing the link", peer)
        self.transport.hang_up(peer)

    # -- unlisted peers

    def _is_unlisted(self, peer: PeerId) -> bool:
        """Return whether the run has a list of participants, and `peer` is neither on it nor the founder."""
        return not self.engine.rules.may_be_member(peer) and self.engine.is_stranger(peer)

    def _turn_away(self, peer: PeerId, now: float) -> None:
        """Explain to an unlisted peer, once, why it gets only the manifest."""
        if peer not in self._turned_away and len(self._turned_away) < MOST_REPORTED:
            self._turned_away.add(peer)
            reason = explain_unlisted(peer).encode()
            self._post(peer, Refusal(round=0, newer_roster=False, reason=reason), now + 5.0)

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
                case KeepActivity():
                    self._memory.keep_activity(action.activity)
                case KeepRoster():
                    if action.is_in_force:
                        self._memory.keep_roster(action.certified)
                    self.clocks.choose_sources()
                case RoundClosed():
                    self._reports.close_round(action)
                case Report():
                    self._reports.report_of_engine(action.topic, action.text, caused_by)
                case RequestContribution():
                    self._replica.request_contribution(
                        action.round, action.fragment, action.deadline, self._contribute, action.spans
                    )
                case _:
                    self.vectors.play(action)
        if actions:
            self._wake.set()

    def _may_send(self, action: Send) -> bool:
        """Return whether to send a message; a roster request is not repeated while it is under way."""
        request = action.message
        if not isinstance(request, RosterRequest):
            return True
        now, to = self._loop.time(), action.to
        self._roster_requests = {key: until for key, until in self._roster_requests.items() if until > now}
        under_way = sum(peer == to for peer, _ in self._roster_requests)
        if (to, request) in self._roster_requests or under_way >= MOST_ROSTER_REQUESTS:
            return False
        self._roster_requests[to, request] = now + min(self.engine.rules.heartbeat_seconds, ASK_AGAIN_SECONDS)
        return True

    def _note_refusal(self, action: Send) -> None:
        refusal = action.message
        if isinstance(refusal, Refusal):
            reason = refusal.reason.decode("utf-8", "replace")
            text = f"round {refusal.round}: {short_peer_id(action.to)}: {reason}"
            self._reports.notes.note("contribution-dropped", text, about=action.to)

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


def purpose_of(message: Message, *, on_request: bool = False) -> Purpose:
    """Return the purpose of a message; an entry sent on request is a transfer."""
    if isinstance(message, SpanReply | TextBlock) or (on_request and is_bulk(message)):
        return "transfer"
    if isinstance(message, Opening | SpanVector) or is_bulk(message):
        return "vectors"
    return "control"


def _frame_of(message: Message) -> Frame:
    head, vector = message_parts(message)
    # A waiting piece keeps all of an old version of its span in memory: only the longest are worth that.
    fewest = MOST_PIECE_BYTES if isinstance(message, SpanReply) else FEWEST_SPLIT_BYTES
    return SplitFrame(head, vector) if len(vector) >= fewest else b"".join((head, vector))
