"""Bad frames, unsound vectors and stalls of one peer: the others name it and continue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from p2p_diloco.ids import SpanId, short_peer_id
from p2p_diloco.node.budgets import LINES_PER_MINUTE
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.round.round import EncodedSpan, FragmentContribution
from p2p_diloco.protocol.wire.messages import (
    PROTOCOL_VERSION,
    Message,
    Refusal,
    SpanReply,
    encode_message,
    is_bulk,
)
from p2p_diloco.transport.link import Lane
from simulator.hostility import Caller
from simulator.lies import degraded_child, lone_vote
from simulator.machine import Machine
from simulator.run import SPAN_ELEMENTS, run_rules, signer
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

NUM_PEERS = 4
VILLAIN = "p3"
VERSION = bytes((PROTOCOL_VERSION,))
RULES = run_rules(num_spans=(8, 8), stalled_cycles=8, heartbeat_seconds=2.0, round_seconds=16.0)


def add_all(swarm: Simulation) -> None:
    swarm.add("bootstrap", trains=False, founds=True)
    for number in range(NUM_PEERS):
        swarm.add(f"p{number}", step_seconds=0.9 + 0.1 * number)


@asynccontextmanager
async def agreeing_swarm() -> AsyncIterator[Simulation]:
    """Yield a swarm of four members that train; at the end all must agree."""
    async with Simulation(rules=RULES, as_bytes=False) as swarm:
        add_all(swarm)
        await swarm.until(swarm.all_settled, within=600.0)
        await swarm.outlive("bootstrap")
        await swarm.grows("p0", entries=16)
        yield swarm
        await swarm.until(lambda: swarm.all_ready() and swarm.agreed(), within=128.0)


def send(swarm: Simulation, to: Machine, message: Message) -> None:
    """Send a message from the villain, bypassing its node."""
    transport = swarm.machines[VILLAIN].transport
    assert transport is not None
    lane = Lane.BULK if is_bulk(message) else Lane.CONTROL
    transport.post_unchanged(to.peer, encode_message(message), lane=lane, deadline=swarm.loop.true_seconds() + 5.0)


def contribute(swarm: Simulation, spoil: Callable[[EncodedSpan], EncodedSpan] | None) -> None:
    """Let the villain contribute spoilt spans from now on, or sound ones again."""
    villain = swarm.machines[VILLAIN]
    villain.is_liar = True
    villain.vectors.mischief = None if spoil is None else lambda contribution: with_spans(contribution, spoil)


def others(swarm: Simulation) -> list[Machine]:
    return [machine for machine in swarm.running() if machine.name != VILLAIN]


def all_texts(machines: list[Machine], topic: str) -> list[str]:
    return [text for machine in machines for text in machine.texts(topic)]


def with_spans(contribution: FragmentContribution, spoil: Callable[[EncodedSpan], EncodedSpan]) -> FragmentContribution:
    return replace(contribution, spans=tuple(spoil(encoded) for encoded in contribution.spans))


# -- frames


BAD_FRAMES = {
    "short": (VERSION, Lane.CONTROL, "frame ends early"),
    "version": (b"\xc8" + bytes(40), Lane.CONTROL, "protocol version 200"),
    "kind": (VERSION + b"\xff" + bytes(40), Lane.BULK, "kind 255"),
    "lane": (VERSION + b"\x02" + bytes(8), Lane.BULK, "Ping came on the bulk lane"),
    "count": (VERSION + b"\x0b\x00\x00\xff\xff\x00\x00", Lane.CONTROL, "65535 items"),
}


async def test_the_sender_of_a_bad_frame_is_named_and_hung_up_and_rounds_continue() -> None:
    async with agreeing_swarm() as swarm:
        target = swarm.machines["p0"]
        for number, (name, (frame, lane, says)) in enumerate(BAD_FRAMES.items()):
            async with Caller(swarm, name) as stranger:
                await stranger.dial(target)
                stranger.send(target.peer, frame, lane)
                await swarm.run(2.0)
                assert len(target.texts("frame-refused")) == number + 1
                text = target.texts("frame-refused")[-1]
                assert short_peer_id(stranger.peer) in text
                assert says in text
                assert stranger.transport.linked_peers() == frozenset()
        for machine in swarm.running():
            await swarm.grows(machine.name, entries=8, within=40.0)
        await swarm.until(swarm.all_ready, within=40.0)


async def test_a_peer_that_serves_numbers_that_are_not_finite_is_named_and_hung_up() -> None:
    async with agreeing_swarm() as swarm:
        villain, target = swarm.machines[VILLAIN], swarm.machines["p0"]
        head = target.running.chains.heads[SpanId(0, 0)]
        piece = np.full(2 * SPAN_ELEMENTS, np.nan, dtype="<f4").tobytes()
        reply = SpanReply(span=SpanId(0, 0), head=head, total_bytes=len(piece), offset=0, piece=piece)
        send(swarm, target, reply)
        await swarm.run(0.5)
        assert [short_peer_id(villain.peer) in text for text in target.texts("frame-refused")] == [True]
        await swarm.grows("p0", within=60.0)


# -- rosters


async def test_a_roster_with_the_vote_of_one_member_changes_nothing_and_its_sender_is_refused() -> None:
    async with agreeing_swarm() as swarm:
        villain, target = swarm.machines[VILLAIN], swarm.machines["p0"]
        parent = target.running.book.in_force
        assert parent is not None
        mine = parent.member(villain.peer)
        assert mine is not None
        lie = degraded_child(parent, mine, swarm.rules.clock.cycle(swarm.round))
        word = lone_vote(lie, swarm.rules.clock.ballot_at(target.swarm_now()), villain.peer, signer(villain.peer))
        for _ in range(10):
            for machine in others(swarm):
                send(swarm, machine, word)
            await swarm.run(5.0)
        for machine in others(swarm):
            assert machine.running.book.in_force is not None
            assert machine.running.book.num_degraded() == 0
            assert "degraded" in machine.texts("roster-refused")[0] or "majority" in machine.texts("roster-refused")[0]
            await swarm.grows(machine.name, within=60.0)


# -- text shown to users


async def test_a_refusal_with_escape_sequences_is_shown_clean_and_a_flood_of_them_is_counted() -> None:
    async with agreeing_swarm() as swarm:
        villain, target = swarm.machines[VILLAIN], swarm.machines["p0"]
        word = Refusal(round=3, newer_roster=False, reason=b"no\x1b[2J\nall is well \xe2\x80\xae\x07")
        for _ in range(1000):
            send(swarm, target, word)
            await swarm.run(0.02)
        texts = target.texts("refused")
        assert LINES_PER_MINUTE // 2 <= len(texts) <= LINES_PER_MINUTE
        assert texts[0] == f"{short_peer_id(villain.peer)}: contribution to round 3 left out: no?[2J?all is well ??"
        await swarm.run(80.0)
        (counted,) = target.texts("flood")
        left_out = 1000 - len(texts)
        assert counted == f"in the last minute {left_out} more lines about {short_peer_id(villain.peer)} were left out"


# -- contributions


def wrong_size(encoded: EncodedSpan) -> EncodedSpan:
    return replace(encoded, payload=encoded.payload[:-1])


def not_finite(encoded: EncodedSpan) -> EncodedSpan:
    return replace(encoded, payload=b"\xff" * len(encoded.payload))


def far_too_long(encoded: EncodedSpan) -> EncodedSpan:
    scaled = bytearray(encoded.payload)
    scaled[-2:] = b"\x80\x50"
    scaled[:2] = b"\x80\x50"
    return replace(encoded, payload=bytes(scaled))


def largest_scale(bits: int) -> Callable[[EncodedSpan], EncodedSpan]:
    """Return a function that fills a contribution with the largest finite numbers of this scale."""

    def spoil(encoded: EncodedSpan) -> EncodedSpan:
        return replace(encoded, payload=bits.to_bytes(2, "little") + b"\x77" * (len(encoded.payload) - 2))

    return spoil


@pytest.mark.parametrize("bits", [0x7E12, 0x5E12], ids=["3e38", "2^64"])
async def test_the_largest_finite_contribution_in_the_first_cycle_is_left_out_and_training_continues(bits: int) -> None:
    async with Simulation(seed=3, rules=RULES, as_bytes=False) as swarm:
        add_all(swarm)
        contribute(swarm, largest_scale(bits))

        def have_two_entries() -> bool:
            heads = [machine.running.chains.heads for machine in others(swarm)]
            return all(len(held) >= 8 and all(head.height >= 2 for head in held.values()) for held in heads)

        await swarm.until(have_two_entries, within=300.0)
        dropped = all_texts(others(swarm), "contribution-dropped")
        assert any(short_peer_id(swarm.machines[VILLAIN].peer) in text for text in dropped)
        for machine in others(swarm):
            for state in machine.vectors.states.values():
                assert np.abs(state.anchor_N).max() < 100.0, "they start at less than one"
        contribute(swarm, None)
        await swarm.until(swarm.all_ready, within=180.0)
        await swarm.grows("p0", entries=16)
        await swarm.until(swarm.agreed, within=64.0)


@pytest.mark.parametrize("spoil", [not_finite, far_too_long])
async def test_an_unsound_contribution_is_dropped_by_name_and_the_round_continues(
    spoil: Callable[[EncodedSpan], EncodedSpan],
) -> None:
    async with agreeing_swarm() as swarm:
        villain = swarm.machines[VILLAIN]
        contribute(swarm, spoil)
        await swarm.run_to_round(swarm.round + 4)
        dropped = all_texts(others(swarm), "contribution-dropped")
        assert dropped
        assert all(short_peer_id(villain.peer) in text for text in dropped)
        assert len(dropped) <= 4 * len(others(swarm)), "one line per round, not per span"
        closed = list(others(swarm)[0].closed)[-2:]
        assert [round.num_entries for round in closed] == [8, 8]
        assert all(round.num_included <= 8 * (NUM_PEERS - 1) + 2 for round in closed)
        contribute(swarm, None)


async def test_a_contribution_of_the_wrong_size_is_refused_and_the_round_continues() -> None:
    async with agreeing_swarm() as swarm:
        villain = swarm.machines[VILLAIN]
        contribute(swarm, wrong_size)
        await swarm.run_to_round(swarm.round + 4)
        refusals = villain.texts("refused")
        assert refusals
        assert all("bytes" in text for text in refusals)
        dropped = all_texts(others(swarm), "contribution-dropped")
        assert dropped
        assert all(short_peer_id(villain.peer) in text for text in dropped)
        closed = list(others(swarm)[0].closed)[-2:]
        assert [round.num_entries for round in closed] == [8, 8]
        contribute(swarm, None)


# -- stalls


async def test_a_reducer_that_stalls_costs_only_its_own_spans() -> None:
    async with agreeing_swarm() as swarm:
        villain, witness = swarm.machines[VILLAIN], swarm.machines["p0"]
        await swarm.run_to_round(swarm.round + 1)
        grid = witness.running.book.grid()
        assert grid is not None
        fragment = swarm.rules.clock.fragment(swarm.round)
        owned = {peer: len(grid.owned(peer, fragment, 8)) for peer in grid.reducers()}
        assert owned[villain.peer] == 2
        swarm.stop(VILLAIN)
        this_round = swarm.round
        await swarm.run_to_round(this_round + 1)
        await swarm.run(0.1)
        (closed,) = [closed for closed in witness.closed if closed.round == this_round]
        assert closed.num_entries == 8 - 2
        assert closed.num_included == (8 - 2) * (NUM_PEERS - 1)
        # A roster without the stalled peer is certified, and no span is skipped any more.
        await swarm.until(lambda: swarm.members("p0") == {machine.name for machine in others(swarm)}, within=120.0)
        await swarm.run_to_round(swarm.round + 2)
        await swarm.run(0.1)
        assert witness.closed[-1].num_entries == 8
        swarm.go_on(VILLAIN)
        await swarm.until(swarm.all_ready, within=180.0)


def stop_after(engine: PeerEngine, last_round: int | None) -> None:
    engine.set_conditions(replace(engine.conditions, last_round=last_round))


async def test_skipped_spans_are_reported_once_per_round() -> None:
    async with agreeing_swarm() as swarm:
        witness = swarm.machines["p0"]
        await swarm.run_to_round(swarm.round + 1)
        before = len(witness.texts("skipped"))
        for machine in others(swarm):
            if machine is not witness:
                stop_after(machine.running, swarm.round)
        stop_after(swarm.machines[VILLAIN].running, swarm.round)
        await swarm.run_to_round(swarm.round + 3)
        await swarm.run(0.1)
        texts = witness.texts("skipped")[before:]
        assert len(texts) == 2
        assert all("(and 1 more like it)" in text for text in texts)
        for machine in swarm.running():
            stop_after(machine.running, None)
        await swarm.grows("p0", within=60.0)
