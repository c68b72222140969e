"""The node without its engine: what it answers itself, what it refuses, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import ZERO_DIGEST, SpanId, short_peer_id
from p2p_diloco.node import vector_actions
from p2p_diloco.node.node import SwarmNode
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryRequest,
    Introductions,
    ManifestReply,
    ManifestRequest,
    Ping,
    Pong,
    RosterRequest,
    SpanReply,
    SpanRequest,
    SpanVector,
    encode_message,
)
from p2p_diloco.span import serve
from p2p_diloco.span.serve import content_digests, state_bytes
from p2p_diloco.transport.directory import decode_record
from p2p_diloco.transport.link import Lane
from simulator.hostility import Caller
from simulator.inspector import Violated
from simulator.machine import Machine
from simulator.process import run_in
from simulator.run import MANIFEST, run_rules
from simulator.simulation import Simulation, play

SPAN = SpanId(0, 1)
RULES = run_rules(num_spans=(4, 4), stalled_cycles=8, heartbeat_seconds=2.0, round_seconds=16.0, span_elements=64)


def act(scene: Callable[[Simulation, Machine, Caller], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with a founder that trains alone and a peer that calls it."""

    async def whole() -> None:
        async with Simulation(seed=3, rules=RULES, as_bytes=False) as swarm:
            founder = swarm.add("founder", founds=True)
            await swarm.run(1.0)
            async with Caller(swarm) as caller:
                await caller.dial(founder)
                await scene(swarm, founder, caller)

    play(whole)


def node_of(machine: Machine) -> SwarmNode:
    assert machine.node is not None
    return machine.node


def count_clock(founder: Machine, caller: Caller) -> None:
    """Count the caller's clock at the founder until the next roster, as if the caller were a member."""
    clock, process = founder.swarm_clock, founder.process
    assert clock is not None
    assert process is not None
    run_in(process, lambda: clock.follow((caller.peer,), is_source=True, takes_part=True))


def test_the_clock_and_the_manifest_are_answered_without_the_engine() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        pong = await caller.ask(founder.peer, Ping(nonce=7), Pong)
        assert pong.nonce == 7
        assert abs(pong.clock_seconds - swarm.loop.true_seconds()) < 0.5
        reply = await caller.ask(founder.peer, ManifestRequest(nonce=0), ManifestReply)
        assert reply == ManifestReply(manifest=MANIFEST)
        caller.say(founder.peer, ManifestReply(manifest=b"unasked"))
        await swarm.run(1.0)
        assert founder.peer in caller.transport.linked_peers()

    act(scene)


def test_a_new_link_receives_signed_records() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        await swarm.run(1.0)
        (word,) = caller.of(Introductions)
        assert [decode_record(record).peer for record in word.records] == [founder.peer]

    act(scene)


def test_peers_are_pinged_until_they_answer_and_then_occasionally() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        beat = swarm.rules.heartbeat_seconds
        await swarm.run(3.5 * beat)
        assert not caller.of(Ping), "a stranger's clock is nobody's business"
        count_clock(founder, caller)
        await swarm.run(3.5 * beat)
        asked_before = len(caller.of(Ping))
        assert asked_before >= 3
        while len(caller.of(Ping)) == asked_before:  # an answer counts only if it comes soon
            await swarm.run(0.05)
        pings = caller.of(Ping)
        caller.say(founder.peer, Pong(nonce=pings[-1].nonce, clock_seconds=swarm.loop.true_seconds()))
        await swarm.run(5 * beat)
        assert len(caller.of(Ping)) <= len(pings) + 1

    act(scene)


def test_a_clock_that_is_years_off_does_not_make_the_shell_spin() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        count_clock(founder, caller)
        await swarm.run(2.5 * swarm.rules.heartbeat_seconds)
        caller.say(founder.peer, Pong(nonce=caller.of(Ping)[-1].nonce, clock_seconds=0.1))
        await swarm.run(5 * swarm.rules.heartbeat_seconds)  # forever, if a pause is shorter than the clock resolution

    act(scene)


def test_a_span_is_served_in_pieces_from_the_offset_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PIECE_BYTES", 200)

    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        state = founder.vectors.states[SPAN]
        raw, version = state_bytes(state), state.head.digest
        parts: list[bytes | memoryview] = []
        while sum(map(len, parts)) < len(raw):
            request = SpanRequest(span=SPAN, version=version, offset=sum(map(len, parts)), most_bytes=1 << 16)
            reply = await caller.ask(founder.peer, request, SpanReply)
            assert (reply.head, reply.total_bytes) == (state.head, len(raw))
            parts.append(reply.piece)
        assert b"".join(parts) == raw
        outdated = SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=200, most_bytes=1 << 16)
        old = await caller.ask(founder.peer, outdated, SpanReply)
        assert old.offset == 0, "another version begins at its front"
        await swarm.run(1.0)
        before = len(caller.of(SpanReply))
        caller.say(founder.peer, SpanRequest(span=SPAN, version=version, offset=len(raw), most_bytes=1 << 16))
        await swarm.run(1.0)
        assert len(caller.of(SpanReply)) == before, "nothing lies behind the end"
        assert node_of(founder).traffic.sent["transfer"] > len(raw)

    act(scene)


def test_contents_are_hashed_on_request() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        reply = await caller.ask(founder.peer, ContentRequest(fragment=1), ContentReply)
        states = [founder.vectors.states[SpanId(1, index)] for index in range(4)]
        assert reply.digests == content_digests(states)
        caller.say(founder.peer, ContentReply(fragment=1, digests=reply.digests))
        caller.say(founder.peer, ContentReply(fragment=1, digests=reply.digests[:2]))
        founder.vectors.drop()
        before = len(caller.of(ContentReply))
        caller.say(founder.peer, ContentRequest(fragment=1))
        caller.say(founder.peer, SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16))
        await swarm.run(1.0)
        assert len(caller.of(ContentReply)) == before, "who holds nothing answers nothing"
        assert caller.of(SpanReply) == []

    act(scene)


def test_an_entry_of_the_wrong_size_is_refused_by_name_and_a_known_one_costs_no_work() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        await swarm.grows("founder", entries=4, within=90.0)
        start = founder.running.book.chain()
        assert start
        head = founder.running.chains.heads[SPAN]
        entry = await _any_entry(swarm, founder, caller)
        caller.say(founder.peer, replace(entry, payload=b"", height=head.height + 9))
        await swarm.run(1.0)
        (text,) = founder.texts("frame-refused")
        assert short_peer_id(caller.peer) in text
        caller.say(founder.peer, replace(entry, payload=b"", height=0))
        caller.say(founder.peer, replace(entry, span=SpanId(9, 9)))
        await swarm.run(1.0)
        assert len(founder.texts("frame-refused")) == 1
        assert node_of(founder).traffic.sent["transfer"] > 0, "an entry on request is a transfer"

    act(scene)


async def _any_entry(swarm: Simulation, founder: Machine, caller: Caller) -> Entry:
    *_, kept = (entry for entry in swarm.inspector.entries.values() if entry.span == SPAN)
    entry: Entry = await caller.ask(founder.peer, EntryRequest(span=SPAN, parent=kept.parent), Entry)
    return entry


def test_a_bulk_frame_on_the_control_lane_closes_the_link() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        frame = encode_message(SpanVector(round=0, span=SPAN, payload=b""))
        caller.send(founder.peer, frame, Lane.CONTROL)
        await swarm.run(1.0)
        assert caller.transport.linked_peers() == frozenset()
        (text,) = founder.texts("frame-refused")
        assert f"{short_peer_id(caller.peer)} sent a bad frame: SpanVector came on the control lane" in text

    act(scene)


def test_a_frame_longer_than_any_of_its_kind_in_this_run_closes_the_link_and_is_named_with_its_sender() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        caller.send(founder.peer, encode_message(SpanVector(round=0, span=SPAN, payload=bytes(100_000))), Lane.BULK)
        await swarm.run(1.0)
        assert caller.transport.linked_peers() == frozenset()
        (text,) = founder.texts("frame-refused")
        assert "a SpanVector of 100020 bytes; in this run it has at most" in text
        assert short_peer_id(caller.peer) in text

    act(scene)


def test_frames_beyond_a_peers_budget_are_not_decoded() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        broken = encode_message(RosterRequest(known=()))[:-1]  # decoding one closes the link
        for _ in range(500):
            caller.say(founder.peer, RosterRequest(known=()))
        caller.send(founder.peer, broken, Lane.CONTROL)
        await swarm.run(1.0)
        assert founder.texts("frame-refused") == []
        assert caller.transport.linked_peers() == {founder.peer}
        await swarm.run(30.0)
        caller.send(founder.peer, broken, Lane.CONTROL)
        await swarm.run(1.0)
        assert caller.transport.linked_peers() == frozenset(), "its budget is back, and so is the error"

    act(scene)


def test_a_lost_link_is_reported_with_its_reason() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        caller.transport.hang_up(founder.peer)
        await swarm.run(1.0)
        (text,) = [text for text in founder.texts("link") if "lost" in text]
        assert short_peer_id(caller.peer) in text
        assert founder.running.linked == set()

    act(scene)


def test_bytes_are_counted_by_purpose_as_the_transport_counts_them() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        await swarm.run(20.0)
        assert founder.transport is not None
        counters = founder.transport.counters
        assert node_of(founder).traffic.sent["control"] == counters.control.bytes_sent
        assert sum(node_of(founder).traffic.sent.values()) == counters.control.bytes_sent + counters.bulk.bytes_sent

    act(scene)


def test_when_the_transport_fails_the_node_ends_with_its_error() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        node_of(founder).transport_lost(NetworkError("the daemon ended"))
        with pytest.raises(Violated, match="I9: ExceptionGroup"):
            await swarm.run(5.0)
        assert founder.task is not None
        error = founder.task.exception()
        assert isinstance(error, ExceptionGroup)
        assert [str(cause) for cause in error.exceptions] == ["the daemon ended"]

    act(scene)


def test_a_bug_in_vector_work_goes_to_the_loops_handler_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        found: list[dict[str, Any]] = []
        swarm.loop.set_exception_handler(lambda _, context: found.append(context))
        monkeypatch.setattr(vector_actions, "reduce_parts", fail)
        await swarm.run(3 * RULES.clock.round_seconds)
        assert {type(context["exception"]) for context in found} == {ZeroDivisionError}
        assert founder.task is not None
        assert not founder.task.done()
        swarm.loop.set_exception_handler(None)

    act(scene)


def test_a_node_without_an_address_book_introduces_no_peers() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        node_of(founder)._addresses = None
        before = len(caller.of(Introductions))
        assert founder.process is not None
        run_in(founder.process, node_of(founder).link_up, caller.peer)
        caller.say(founder.peer, Introductions(records=()))
        await swarm.run(1.0)
        assert len(caller.of(Introductions)) == before or before == 0

    act(scene)
