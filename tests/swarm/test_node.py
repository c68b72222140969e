"""The shell alone: what it answers itself, what it refuses, what it counts. Whole swarms are in `test_memory_*`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.messages import (
    ContentReply,
    ContentRequest,
    EntryRequest,
    Introductions,
    ManifestReply,
    ManifestRequest,
    Message,
    Ping,
    Pong,
    SpanReply,
    SpanRequest,
    SpanVector,
    decode_message,
    encode_message,
    is_bulk,
)
from p2p_diloco.swarm import pieces
from p2p_diloco.swarm.vector_work import content_digests, state_bytes
from p2p_diloco.transport.directory import decode_record
from p2p_diloco.transport.link import Lane, SilentListener
from p2p_diloco.transport.memory import MemoryTransport
from tests.swarm.memory_machine import MANIFEST, RUN, Machine, key_of
from tests.swarm.memory_stage import MemorySwarm, play

SPAN = SpanId(0, 1)


class Caller(SilentListener):
    """A peer without an engine: says what a test wants said and keeps what it hears."""

    def __init__(self, transport: MemoryTransport, target: PeerId) -> None:
        self.heard: list[Message] = []
        self.transport = transport
        self._target = target
        transport.listener = self

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
        message = decode_message(frame)
        assert is_bulk(message) == (lane is Lane.BULK)
        self.heard.append(message)

    def say(self, message: Message) -> None:
        lane = Lane.BULK if is_bulk(message) else Lane.CONTROL
        deadline = asyncio.get_running_loop().time() + 5.0
        assert self.transport.post(self._target, encode_message(message), lane=lane, deadline=deadline)

    async def ask(self, question: Message, kind: type[Any]) -> Any:
        """Say something and return the next answer of a kind."""
        before = len(self.of(kind))
        self.say(question)
        async with asyncio.timeout(5.0):
            while len(self.of(kind)) == before:
                await asyncio.sleep(0.05)  # virtual: costs nothing
        return self.of(kind)[before]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


@asynccontextmanager
async def calling(swarm: MemorySwarm, target: Machine) -> AsyncIterator[Caller]:
    """Have somebody call a machine."""
    assert target.transport is not None
    transport = swarm.network.transport(key_of("caller").peer, run=RUN, can_be_dialled=False)
    caller = Caller(transport, target.peer)
    async with transport:
        deadline = asyncio.get_running_loop().time() + 5.0
        await transport.dial(target.peer, target.transport.listen_addresses(), deadline)
        yield caller


def act(scene: Callable[[MemorySwarm, Machine, Caller], Coroutine[Any, Any, None]]) -> None:
    """Play a scene with a founder that trains alone and somebody who calls it."""

    async def whole() -> None:
        swarm = MemorySwarm(seed=3)
        founder = swarm.add("founder", founds=True)
        await swarm.run(1.0)
        async with calling(swarm, founder) as caller:
            await scene(swarm, founder, caller)
        await swarm.close()

    play(whole)


def count_clock(founder: Machine, caller: Caller) -> None:
    """Let the caller's clock count at the founder, until the next roster, as if it were a member."""
    assert founder.clock is not None
    founder.clock.listen_to((caller.transport.peer,), is_voice=True, takes_part=True)


def test_the_clock_and_the_manifest_are_answered_without_the_engine() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        pong = await caller.ask(Ping(nonce=7), Pong)
        assert pong.nonce == 7
        assert abs(pong.clock_seconds - swarm.unix_seconds()) < 0.5
        assert await caller.ask(ManifestRequest(nonce=0), ManifestReply) == ManifestReply(manifest=MANIFEST)
        caller.say(ManifestReply(manifest=b"unasked"))
        await swarm.run(1.0)
        assert founder.peer in caller.transport.linked_peers()

    act(scene)


def test_a_new_acquaintance_is_told_signed_records() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        await swarm.run(1.0)
        (word,) = caller.of(Introductions)
        assert [decode_record(record).peer for record in word.records] == [founder.peer]

    act(scene)


def test_peers_are_pinged_until_they_answer_and_then_once_in_a_while() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        beat = swarm.rules.heartbeat_seconds
        await swarm.run(3.5 * beat)
        assert not caller.of(Ping), "a stranger's clock is nobody's business"
        count_clock(founder, caller)
        await swarm.run(3.5 * beat)
        asked_before = len(caller.of(Ping))
        assert asked_before >= 3
        while len(caller.of(Ping)) == asked_before:  # an answer counts only if it comes soon
            await asyncio.sleep(0.05)
        pings = caller.of(Ping)
        caller.say(Pong(nonce=pings[-1].nonce, clock_seconds=swarm.unix_seconds()))
        await swarm.run(5 * beat)
        assert len(caller.of(Ping)) <= len(pings) + 1

    act(scene)


def test_a_clock_that_is_years_off_does_not_make_the_shell_spin() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        count_clock(founder, caller)
        await swarm.run(2.5 * swarm.rules.heartbeat_seconds)
        caller.say(Pong(nonce=caller.of(Ping)[-1].nonce, clock_seconds=0.1))
        await swarm.run(5 * swarm.rules.heartbeat_seconds)  # for ever, if a pause is shorter than the clocks resolve

    act(scene)


def test_a_span_is_served_in_pieces_from_the_offset_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)

    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        await swarm.run_to_round(0)
        assert founder.island is not None
        state = founder.island.states[SPAN]
        raw, version = state_bytes(state), state.head.digest
        parts: list[bytes | memoryview] = []
        while sum(map(len, parts)) < len(raw):
            request = SpanRequest(span=SPAN, version=version, offset=sum(map(len, parts)), most_bytes=1 << 16)
            reply = await caller.ask(request, SpanReply)
            assert (reply.head, reply.total_bytes) == (state.head, len(raw))
            parts.append(reply.piece)
        assert b"".join(parts) == raw
        old = await caller.ask(SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=200, most_bytes=1 << 16), SpanReply)
        assert old.offset == 0, "another version begins at its front"
        caller.say(SpanRequest(span=SPAN, version=version, offset=len(raw), most_bytes=1 << 16))
        await swarm.run(1.0)
        assert len(caller.of(SpanReply)) == len(parts) + 1, "nothing lies behind the end"
        assert founder.running.traffic.sent["transfer"] > len(raw)

    act(scene)


def test_contents_are_hashed_for_who_asks() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        reply = await caller.ask(ContentRequest(fragment=1), ContentReply)
        assert founder.island is not None
        states = [founder.island.states[SpanId(1, index)] for index in range(4)]
        assert reply.digests == content_digests(states)
        caller.say(ContentReply(fragment=1, digests=reply.digests))
        caller.say(ContentReply(fragment=1, digests=reply.digests[:2]))
        founder.island.drop()
        before = len(caller.of(ContentReply))
        caller.say(ContentRequest(fragment=1))
        caller.say(SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16))
        await swarm.run(1.0)
        assert len(caller.of(ContentReply)) == before, "who holds nothing answers nothing"
        assert caller.of(SpanReply) == []

    act(scene)


def test_an_entry_of_the_wrong_size_is_refused_by_name_and_a_known_one_costs_no_work() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        await swarm.grows("founder", entries=4, within=90.0)
        start = founder.engine.book.chain()
        assert start
        head = founder.engine.chains.heads[SPAN]
        entry = await _any_entry(founder, caller)
        caller.say(replace(entry, payload=b"", height=head.height + 9))
        await swarm.run(1.0)
        (text,) = founder.texts("frame-refused")
        assert short_peer_id(caller.transport.peer) in text
        caller.say(replace(entry, payload=b"", height=0))
        caller.say(replace(entry, span=SpanId(9, 9)))
        await swarm.run(1.0)
        assert len(founder.texts("frame-refused")) == 1
        assert founder.running.traffic.sent["transfer"] > 0, "an entry on request is a transfer"

    act(scene)


async def _any_entry(founder: Machine, caller: Caller) -> Entry:
    kept = founder.engine.chains._kept[SPAN]
    entry: Entry = await caller.ask(EntryRequest(span=SPAN, parent=next(iter(kept))), Entry)
    return entry


def test_a_bulk_frame_on_the_control_lane_is_hung_up() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        frame = encode_message(SpanVector(round=0, span=SPAN, payload=b""))
        deadline = asyncio.get_running_loop().time() + 5.0
        caller.transport.post(founder.peer, frame, lane=Lane.CONTROL, deadline=deadline)
        await swarm.run(1.0)
        assert caller.transport.linked_peers() == frozenset()
        (text,) = founder.texts("frame-refused")
        assert "SpanVector came on the control lane" in text

    act(scene)


def test_a_lost_link_is_reported_with_its_reason() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        caller.transport.hang_up(founder.peer)
        await swarm.run(1.0)
        (text,) = [text for text in founder.texts("link") if "lost" in text]
        assert short_peer_id(caller.transport.peer) in text
        assert founder.engine.linked == set()

    act(scene)


def test_bytes_are_counted_by_purpose_as_the_transport_counts_them() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        await swarm.run(20.0)
        assert founder.transport is not None
        counters = founder.transport.counters
        assert founder.running.traffic.sent["control"] == counters.control.bytes_sent
        assert sum(founder.running.traffic.sent.values()) == counters.control.bytes_sent + counters.bulk.bytes_sent

    act(scene)


def test_when_the_transport_dies_the_node_says_so() -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=3)
        founder = swarm.add("founder", founds=True)
        await swarm.run(1.0)
        founder.running.transport_lost(NetworkError("the daemon ended"))
        with pytest.raises(ExceptionGroup) as caught:
            await swarm.run(5.0)
        assert caught.group_contains(NetworkError, match="the daemon ended")

    play(scene)


def test_a_bug_in_vector_work_goes_to_the_loops_handler_and_ends_nothing() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        founder.running._work(lambda _: None, None, fail)
        await swarm.run(1.0)
        assert [type(context["exception"]) for context in told] == [ZeroDivisionError]
        asyncio.get_running_loop().set_exception_handler(None)

    act(scene)


def test_a_node_without_an_address_book_introduces_nobody() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        founder.running._addresses = None
        before = len(caller.of(Introductions))
        founder.running.link_up(caller.transport.peer)
        caller.say(Introductions(records=()))
        await swarm.run(1.0)
        assert len(caller.of(Introductions)) == before or before == 0

    act(scene)
