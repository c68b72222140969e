"""Serving vectors to other peers: snapshots that stay, entries from disk, and corrected memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p2p_diloco.ids import ZERO_DIGEST, SpanId, sha256
from p2p_diloco.protocol.actions import RebuildSpan
from p2p_diloco.protocol.engine import CYCLES_IN_MEMORY
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import EntryAbsent, EntryRequest, SpanReply, SpanRequest
from p2p_diloco.span import serve
from p2p_diloco.span.serve import state_bytes
from simulator.hostility import Caller
from simulator.machine import Machine
from simulator.process import run_in
from simulator.simulation import Simulation, play
from tests.node.test_node import RULES, SPAN, act, node_of

HOUR = 3600.0
LATEST = SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16)


def test_a_version_that_a_peer_has_started_to_fetch_is_served_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PIECE_BYTES", 200)

    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        await swarm.run_to_round(0)
        state = founder.vectors.states[SPAN]
        raw, version = state_bytes(state), state.head.digest
        reply = await caller.ask(founder.peer, LATEST, SpanReply)
        parts = [reply.piece]
        await swarm.grows("founder", entries=16)
        assert founder.vectors.states[SPAN].head.digest != version
        while sum(map(len, parts)) < len(raw):
            request = SpanRequest(span=SPAN, version=version, offset=sum(map(len, parts)), most_bytes=1 << 16)
            reply = await caller.ask(founder.peer, request, SpanReply)
            assert reply.head == state.head
            parts.append(reply.piece)
        assert b"".join(parts) == raw

    act(scene)


def test_a_span_that_is_being_fetched_is_served_once_it_has_arrived() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        await swarm.run_to_round(0)
        await swarm.run(6.0)  # nothing is due meanwhile
        state = founder.vectors.states.pop(SPAN)
        began = swarm.now
        swarm.at(began + 3 * serve.SERVE_AGAIN_SECONDS, founder.vectors.states.__setitem__, SPAN, state)
        reply = await caller.ask(founder.peer, LATEST, SpanReply)
        assert reply.piece == state_bytes(state)[: len(reply.piece)]
        assert swarm.now - began < 5 * serve.SERVE_AGAIN_SECONDS

    act(scene)


def test_the_number_of_snapshots_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MOST_VERSIONS", 2)

    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        for index in range(4):
            await caller.ask(founder.peer, replace(LATEST, span=SpanId(0, index)), SpanReply)
        assert len(node_of(founder).vectors.serving.pieces.versions) == 2

    act(scene)


def test_an_entry_no_longer_in_memory_is_served_from_disk() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        await swarm.grows("founder", entries=8 * (CYCLES_IN_MEMORY + 2))
        first = next(entry for entry in swarm.inspector.entries.values() if entry.span == SPAN)
        assert founder.running.chains.entry_after(SPAN, first.parent) is None
        assert await caller.ask(founder.peer, EntryRequest(span=SPAN, parent=first.parent), Entry) == first
        assert node_of(founder).traffic.sent["transfer"] > 0
        unknown = sha256(b"unknown")
        absent = await caller.ask(founder.peer, EntryRequest(span=SPAN, parent=unknown), EntryAbsent)
        assert absent == EntryAbsent(span=SPAN, parent=unknown)

    act(scene)


def test_a_peer_that_its_owner_has_paused_serves_nothing_until_it_resumes() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        await swarm.grows("founder", entries=8)
        newest = next(entry for entry in reversed(swarm.inspector.entries.values()) if entry.span == SPAN)
        request = EntryRequest(span=SPAN, parent=newest.parent)
        engine, sent = founder.running, node_of(founder).traffic.sent
        assert await caller.ask(founder.peer, request, Entry) == newest
        engine.set_conditions(replace(engine.conditions, is_paused=True))
        before = sent["transfer"]
        for each in (request, LATEST):
            caller.say(founder.peer, each)
        await swarm.run(10.0)
        assert sent["transfer"] == before
        engine.set_conditions(replace(engine.conditions, is_paused=False))
        assert await caller.ask(founder.peer, request, Entry) == newest
        assert (await caller.ask(founder.peer, LATEST, SpanReply)).piece

    act(scene)


@pytest.mark.parametrize("num_peers", [2, 3])
@pytest.mark.parametrize("saves", [True, False], ids=["from its own disk", "from others"])
def test_a_flipped_bit_is_found_reported_and_corrected_within_a_scrub_period(num_peers: int, saves: bool) -> None:
    async def scene() -> None:
        async with Simulation(seed=5, rules=RULES, as_bytes=False) as swarm:
            names = ["ada", "ben", "cleo"][:num_peers]
            for name in names:
                swarm.add(name, founds=name == "ada", start=False).checkpoint_seconds = HOUR
                swarm.start(name)
            await swarm.until(swarm.all_ready, 200.0)
            await swarm.grows("ada", entries=32)
            ben, ada = swarm.machines["ben"], swarm.machines["ada"]
            place = int(np.abs(ben.vectors.states[SPAN].anchor_N).argmax())
            assert swarm.flip_bit("ben", SPAN, place, 31)
            for name in names:
                if not saves and (num_peers > 2 or name == "ben"):  # of two, at least one must know
                    for path in swarm.machines[name].disk.path.rglob("*.safetensors"):
                        path.unlink()
            clock = swarm.rules.clock
            period = swarm.rules.scrub_cycles * clock.num_fragments * clock.round_seconds
            mended = "damaged in memory" if saves else "fetching it"

            def found_and_mended() -> bool:
                return any(mended in text for text in ben.texts("content")) and not swarm.inspector.differing

            await swarm.until(found_and_mended, (1 if saves or num_peers > 2 else 2) * period + 3 * clock.round_seconds)
            assert not any("fetching" in text for text in ada.texts("content"))
            await swarm.until(swarm.agreed, within=64.0)

    play(scene)


def test_a_peer_that_holds_nothing_rebuilds_nothing() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        founder.vectors.drop()
        assert founder.process is not None
        run_in(founder.process, node_of(founder).vectors.serving.play, RebuildSpan(span=SPAN))
        await swarm.run(1.0)
        assert founder.texts("content") == []

    act(scene)
