"""What the shell does for others with its vectors: snapshots that stay, entries from disk, memory put right."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from p2p_diloco.ids import ZERO_DIGEST, SpanId, sha256
from p2p_diloco.protocol.actions import RebuildSpan
from p2p_diloco.protocol.engine import CYCLES_IN_MEMORY
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.messages import EntryAbsent, EntryRequest, SpanReply, SpanRequest
from p2p_diloco.swarm import pieces, versions
from p2p_diloco.swarm.vector_work import state_bytes
from tests.swarm.memory_machine import Machine
from tests.swarm.memory_stage import MemorySwarm, play
from tests.swarm.test_node import SPAN, Caller, act


def test_a_version_that_somebody_has_begun_to_fetch_is_served_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)

    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        await swarm.run_to_round(0)
        assert founder.island is not None
        state = founder.island.states[SPAN]
        raw, version = state_bytes(state), state.head.digest
        reply = await caller.ask(SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16), SpanReply)
        parts = [reply.piece]
        await swarm.grows("founder", entries=16)
        assert founder.island.states[SPAN].head.digest != version
        while sum(map(len, parts)) < len(raw):
            request = SpanRequest(span=SPAN, version=version, offset=sum(map(len, parts)), most_bytes=1 << 16)
            reply = await caller.ask(request, SpanReply)
            assert reply.head == state.head
            parts.append(reply.piece)
        assert b"".join(parts) == raw

    act(scene)


def test_a_span_that_is_on_its_way_here_is_served_once_it_has_come() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        await swarm.run_to_round(0)
        assert founder.island is not None
        state = founder.island.states.pop(SPAN)
        loop = asyncio.get_running_loop()
        loop.call_later(3 * pieces.SERVE_AGAIN_SECONDS, founder.island.states.__setitem__, SPAN, state)
        began = loop.time()
        reply = await caller.ask(SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16), SpanReply)
        assert reply.piece == state_bytes(state)[: len(reply.piece)]
        assert loop.time() - began < 5 * pieces.SERVE_AGAIN_SECONDS

    act(scene)


def test_snapshots_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MOST_VERSIONS", 2)

    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        for index in range(4):
            await caller.ask(
                SpanRequest(span=SpanId(0, index), version=ZERO_DIGEST, offset=0, most_bytes=1 << 16), SpanReply
            )
        assert len(founder.running._serving.pieces.versions) == 2

    act(scene)


def test_an_entry_that_memory_has_forgotten_comes_from_the_disk() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        await swarm.grows("founder", entries=8 * (CYCLES_IN_MEMORY + 2))
        parents = founder.disk.entries[SPAN]
        first = next(iter(parents))
        assert founder.engine.chains.entry_after(SPAN, first) is None
        assert await caller.ask(EntryRequest(span=SPAN, parent=first), Entry) == parents[first]
        assert founder.running.traffic.sent["transfer"] > 0
        unknown = sha256(b"unknown")
        absent = await caller.ask(EntryRequest(span=SPAN, parent=unknown), EntryAbsent)
        assert absent == EntryAbsent(span=SPAN, parent=unknown)

    act(scene)


def flip(machine: Machine, span: SpanId) -> None:
    """Flip a bit of a machine's anchor, as bad memory does."""
    assert machine.island is not None
    machine.island.settle()
    state = machine.island.states[span]
    anchor_N = state.anchor_N.copy()
    anchor_N.view(np.uint32)[np.abs(anchor_N).argmax()] ^= 1 << 31
    machine.island.states[span] = replace(state, anchor_N=anchor_N)


@pytest.mark.parametrize("num_peers", [2, 3])
@pytest.mark.parametrize("saves", [True, False], ids=["from its own disk", "from others"])
def test_a_bit_that_flips_in_one_memory_is_found_said_and_mended_in_a_scrub_period(num_peers: int, saves: bool) -> None:
    async def scene() -> None:
        swarm = MemorySwarm(seed=5)
        names = ["ada", "ben", "cleo"][:num_peers]
        for name in names:
            swarm.add(name, founds=name == "ada")
        await swarm.until(swarm.all_members, 200.0)
        for name in names:
            if saves or (num_peers == 2 and name == "ada"):
                swarm.save(name)  # of two, one at least must know
        await swarm.grows("ada", entries=8)
        flip(swarm.machines["ben"], SPAN)
        clock = swarm.rules.clock
        period = swarm.rules.scrub_cycles * clock.num_fragments * clock.round_seconds
        mended = "damaged in memory" if saves else "fetching it"

        def found_and_mended() -> bool:
            return any(mended in text for text in swarm.machines["ben"].texts("content")) and swarm.agreed()

        await swarm.until(found_and_mended, (1 if saves or num_peers > 2 else 2) * period + 3 * clock.round_seconds)
        assert not any("fetching" in text for text in swarm.machines["ada"].texts("content"))
        await swarm.finish()
        await swarm.close()

    play(scene)


def test_who_holds_nothing_has_nothing_rebuilt() -> None:
    async def scene(swarm: MemorySwarm, founder: Machine, caller: Caller) -> None:
        assert founder.island is not None
        founder.island.drop()
        founder.running._serving.play(RebuildSpan(span=SPAN))
        await swarm.run(1.0)
        assert founder.texts("content") == []

    act(scene)
