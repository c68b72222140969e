"""Pieces are served as fast as lines accept them: little is queued, and versions are kept as long as needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import ServeSpan
from p2p_diloco.protocol.wire.messages import MOST_PIECE_BYTES, SpanReply, encode_message
from p2p_diloco.span import serve
from p2p_diloco.span.serve import Pieces
from p2p_diloco.span_log import SpanHead
from p2p_diloco.transport.byte_stream import FIRST_BYTES
from simulator.simulation import play

ASKER, OTHER = PeerId(b"a" * 32), PeerId(b"o" * 32)
SPAN = SpanId(0, 0)
KEEP_SECONDS = 100.0


def state_at(version: bytes, elements: int = 1000) -> SpanState:
    head = SpanHead(digest=sha256(version), height=1, round=0, roster=sha256(b"r"), radius=0.0, median_weight=0.0)
    numbers_N = np.frombuffer(sha256(version) * elements, np.uint8)[: 4 * elements].astype(np.float32)[:elements]
    return SpanState(head=head, anchor_N=numbers_N, momentum_N=numbers_N.copy())


class Line:
    """A peer's line: posted frames wait until they are read."""

    def __init__(self) -> None:
        self.states: dict[SpanId, SpanState] = {SPAN: state_at(b"1")}
        self.waiting: dict[PeerId, list[SpanReply]] = {ASKER: [], OTHER: []}
        self.pieces = Pieces(
            span_state=self.states.get,
            post=lambda peer, reply: self.waiting[peer].append(reply),
            waiting_bytes=self.waiting_bytes,
            keep_seconds=KEEP_SECONDS,
        )

    def waiting_bytes(self, peer: PeerId) -> int:
        return sum(len(reply.piece) for reply in self.waiting[peer])

    def ask(
        self, peer: PeerId = ASKER, offset: int = 0, version: Digest = ZERO_DIGEST, most_bytes: int = 1 << 16
    ) -> None:
        self.pieces.serve(ServeSpan(to=peer, span=SPAN, version=version, offset=offset, most_bytes=most_bytes))

    def read(self, peer: PeerId = ASKER) -> list[SpanReply]:
        read, self.waiting[peer] = self.waiting[peer], []
        return read


def act(scene: Callable[[Line], Awaitable[None]]) -> None:
    async def on_a_line() -> None:
        await scene(Line())

    play(on_a_line)


def test_a_piece_is_a_view_no_longer_than_was_asked_for_in_whole_numbers() -> None:
    async def scene(line: Line) -> None:
        line.ask(most_bytes=103)
        (reply,) = line.read()
        assert (reply.offset, len(reply.piece), reply.total_bytes) == (0, 100, 8000)
        assert np.shares_memory(np.frombuffer(reply.piece, np.uint8), line.states[SPAN].anchor_N)

    act(scene)


@pytest.mark.parametrize(("offset", "most_bytes"), [(0, 0), (0, 3), (8000, 100), (1 << 60, 100)])
def test_a_request_for_zero_bytes_gets_nothing(offset: int, most_bytes: int) -> None:
    async def scene(line: Line) -> None:
        line.ask(offset=offset, version=line.states[SPAN].head.digest, most_bytes=most_bytes)
        assert line.read() == []

    act(scene)


def test_an_asker_that_reads_nothing_costs_a_few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "AHEAD_BYTES", 10_000)

    async def scene(line: Line) -> None:
        for _ in range(10_000):
            line.ask()
        assert line.waiting_bytes(ASKER) == 12_000, "the one that crosses the mark is the last"
        await asyncio.sleep(60.0)
        assert line.waiting_bytes(ASKER) == 12_000
        served = 0
        while line.waiting_bytes(ASKER):
            served += len(line.read())
            await asyncio.sleep(1.0)
        assert served == 3 + serve.MOST_REQUESTS, "those beyond were dropped"

    act(scene)


def test_all_askers_together_are_bounded_and_each_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "TOTAL_AHEAD_BYTES", 10_000)

    async def scene(line: Line) -> None:
        for _ in range(8):
            line.ask(ASKER)
            line.ask(OTHER)
        assert line.waiting_bytes(ASKER) + line.waiting_bytes(OTHER) == 12_000
        served = {ASKER: 0, OTHER: 0}
        for _ in range(20):
            for peer in served:
                served[peer] += len(line.read(peer))
            await asyncio.sleep(1.0)
        assert served == {ASKER: 8, OTHER: 8}

    act(scene)


def test_a_version_is_kept_while_it_is_requested_and_then_dropped() -> None:
    async def scene(line: Line) -> None:
        old = line.states[SPAN].head
        line.ask()
        line.states[SPAN] = state_at(b"2")
        for _ in range(5):
            await asyncio.sleep(0.9 * KEEP_SECONDS)
            line.ask(offset=400, version=old.digest, most_bytes=40)
        assert {reply.head for reply in line.read()} == {old}
        await asyncio.sleep(2.5 * KEEP_SECONDS)
        assert len(line.pieces.versions) == 0
        line.ask(offset=400, version=old.digest, most_bytes=40)
        (reply,) = line.read()
        assert (reply.head, reply.offset) == (line.states[SPAN].head, 0), "the one of now, from its front"

    act(scene)


def test_many_spans_fetched_to_the_end_leave_few_versions_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SERVED_BYTES", 0)

    async def scene(line: Line) -> None:
        for index in range(5):
            state = line.states[SPAN] = state_at(bytes([index]))
            for peer in (ASKER, OTHER):
                line.ask(peer)
                line.ask(peer, offset=4000, version=state.head.digest)
        line.ask(offset=4000, version=state.head.digest, most_bytes=2000)
        assert len(line.pieces.versions) == 2, "one is being fetched, one was the last"

    act(scene)


def test_a_span_that_is_being_fetched_is_served_once_it_has_arrived() -> None:
    async def scene(line: Line) -> None:
        state = line.states.pop(SPAN)
        line.ask()
        await asyncio.sleep(2.5 * serve.SERVE_AGAIN_SECONDS)
        assert line.read() == []
        line.states[SPAN] = state
        await asyncio.sleep(serve.SERVE_AGAIN_SECONDS)
        assert len(line.read()) == 1
        del line.states[SPAN]
        line.pieces = Line().pieces
        line.ask()
        await asyncio.sleep(2 * serve.SERVE_TRIES * serve.SERVE_AGAIN_SECONDS)
        assert line.read() == [], "not for ever"

    act(scene)


def test_the_longest_piece_is_read_into_memory_that_need_not_grow() -> None:
    head = SpanHead(
        digest=sha256(b"head"), height=2**40, round=2**40, roster=ZERO_DIGEST, radius=1.0, median_weight=1.0
    )
    reply = SpanReply(
        span=SpanId(2**16 - 1, 2**16 - 1), head=head, total_bytes=2**40, offset=2**40, piece=bytes(MOST_PIECE_BYTES)
    )
    assert MOST_PIECE_BYTES < len(encode_message(reply)) <= FIRST_BYTES
