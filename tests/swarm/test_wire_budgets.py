"""Limits on the work that one stranger's messages cause: requests, answers, sending, checking."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.ids import Digest, SpanId, sha256, short_peer_id
from p2p_diloco.node.node import ASK_AGAIN_SECONDS, MOST_ROSTER_REQUESTS
from p2p_diloco.protocol.rules import explain_unlisted
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import (
    HeadsReply,
    HeadsRequest,
    Introductions,
    ManifestReply,
    ManifestRequest,
    Message,
    Ping,
    Pong,
    Refusal,
    RosterReply,
    RosterRequest,
    SpanReply,
    SpanRequest,
)
from simulator.hostility import Caller
from simulator.machine import Machine
from simulator.run import MANIFEST, RUN, key_named
from simulator.simulation import Simulation
from tests.node.test_node import RULES, act

SPAN = SpanId(0, 1)
SECONDS = 20.0


def entry(roster: Digest, number: int) -> Entry:
    return Entry(
        run=RUN,
        round=2,
        span=SPAN,
        parent=sha256(b"parent %d" % number),
        height=40 + number,
        roster=roster,
        present=b"\x01",
        included=b"\x01",
        weights=(1.0,),
        tokens=1,
        median_norm=1.0,
        median_weight=1.0,
        payload=bytes(48),
        signature=bytes(64),
    )


def test_a_flood_of_entries_of_unknown_rosters_causes_a_few_requests_and_no_work() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        for number in range(2000):
            caller.say(founder.peer, entry(sha256(b"roster %d" % number), number))
            await swarm.run(SECONDS / 2000)
        beats = SECONDS / min(swarm.rules.heartbeat_seconds, ASK_AGAIN_SECONDS)
        assert 1 <= len(caller.of(RosterRequest)) <= beats + 1, "the same request, once per heartbeat"

    act(scene)


def test_a_peer_gets_a_few_roster_requests_at_once_and_more_when_it_answers() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        refusal = Refusal(round=0, newer_roster=True, reason=b"")
        for _ in range(50):
            caller.say(founder.peer, refusal)
        await swarm.run(0.5)
        assert len(caller.of(RosterRequest)) == 1 <= MOST_ROSTER_REQUESTS
        caller.say(founder.peer, RosterReply(rosters=()))
        caller.say(founder.peer, refusal)
        await swarm.run(0.5)
        assert len(caller.of(RosterRequest)) == 2

    act(scene)


def test_a_flood_of_requests_gets_answers_up_to_a_budget_and_one_line() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        for _ in range(2000):
            caller.say(founder.peer, RosterRequest(known=()))
            await swarm.run(SECONDS / 2000)
        await swarm.run(1.0)
        assert 64 <= len(caller.of(RosterReply)) <= 64 + 4 * SECONDS + 1
        await swarm.run(80.0)
        (text,) = founder.texts("flood")
        name = short_peer_id(caller.peer)
        assert text.startswith("in the last minute ")
        assert text.endswith(f" messages of {name} were dropped because it sends too many")
        assert founder.peer in caller.transport.linked_peers(), "an honest peer could have sent all this"

    act(scene)


def test_a_peer_that_links_repeatedly_gets_a_few_introductions() -> None:
    async def scene(swarm: Simulation, founder: Machine, caller: Caller) -> None:
        for _ in range(50):
            caller.transport.hang_up(founder.peer)
            await swarm.run(0.1)
            await caller.dial(founder)
            await swarm.run(0.3)
        assert 8 <= len(caller.of(Introductions)) <= 8 + 0.2 * 20.0 + 2

    act(scene)


# -- runs that list their members

QUESTIONS: list[tuple[Message, type[Message]]] = [
    (RosterRequest(known=()), RosterReply),
    (HeadsRequest(fragment=0), HeadsReply),
    (SpanRequest(span=SPAN, version=bytes(32), offset=0, most_bytes=1 << 20), SpanReply),
    (Ping(nonce=1), Pong),
]


@pytest.mark.parametrize("is_listed", [True, False])
async def test_an_unlisted_peer_gets_only_the_manifest_and_one_sentence(is_listed: bool) -> None:
    people = {key_named("founder").peer, *([key_named("caller").peer] if is_listed else ())}
    rules = replace(RULES, listed=frozenset(people))
    async with Simulation(seed=3, rules=rules, as_bytes=False) as swarm:
        founder = swarm.add("founder", founds=True)
        await swarm.run(1.0)
        async with Caller(swarm) as caller:
            await caller.dial(founder)
            reply = await caller.ask(founder.peer, ManifestRequest(nonce=0), ManifestReply)
            assert reply == ManifestReply(manifest=MANIFEST)
            for question, _ in QUESTIONS:
                for _ in range(10):
                    caller.say(founder.peer, question)
            await swarm.run(10.0)
            for _, answer in QUESTIONS:
                assert bool(caller.of(answer)) == is_listed, answer.__name__
            told = [refusal.reason.decode() for refusal in caller.of(Refusal)]
            assert told == ([] if is_listed else [explain_unlisted(caller.peer)])
            if not is_listed:
                assert {type(message) for _, message in caller.heard} == {ManifestReply, Refusal}
