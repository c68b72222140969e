"""Lookups come every second at first, then less and less often, and often again when a link is missing."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.ids import PeerId
from p2p_diloco.node.link_keeper import (
    CALM_AFTER_LOOKS,
    CALM_LOOK_SECONDS,
    CONTENT_LOOK_SECONDS,
    LOOK_SECONDS,
    LinkKeeper,
    LookPace,
)
from p2p_diloco.transport.directory import PeerRole, sign_record
from tests.swarm.link_stage import ANN, BEN, CLEO, DAN, EVE, RUN, Scene, now, play


def settled() -> LookPace:
    """Return a pace after its first looks, the last of them at second 0."""
    pace = LookPace()
    for _ in range(CALM_AFTER_LOOKS):
        assert pace.is_due(0.0)
        pace.looked(0.0)
    return pace


def next_look(pace: LookPace, now: float) -> float:
    while not pace.is_due(now):
        now += pace.turn_seconds()
    pace.looked(now)
    return now


def test_the_first_looks_come_every_second() -> None:
    pace = LookPace()
    for second in range(CALM_AFTER_LOOKS):
        assert pace.turn_seconds() == LOOK_SECONDS
        assert next_look(pace, float(second)) == second
    assert pace.turn_seconds() == CALM_LOOK_SECONDS


def test_pauses_grow_to_a_minute() -> None:
    pace, at, pauses = settled(), 0.0, []
    for _ in range(7):
        pauses.append(next_look(pace, at) - at)
        at += pauses[-1]
    assert pauses == [5.0, 10.0, 20.0, 40.0, CONTENT_LOOK_SECONDS, CONTENT_LOOK_SECONDS, CONTENT_LOOK_SECONDS]


@pytest.mark.parametrize("looks", [0, 1, 3, 9])
def test_a_hurry_restarts_the_short_pauses(looks: int) -> None:
    pace, at = settled(), 0.0
    for _ in range(looks):
        at = next_look(pace, at)
    pace.hurry()
    assert not pace.is_due(at + CALM_LOOK_SECONDS - 0.1)
    assert next_look(pace, at) == at + CALM_LOOK_SECONDS


def test_a_hurry_while_the_swarm_forms_slows_nothing_down() -> None:
    pace = LookPace()
    pace.looked(0.0)
    pace.hurry()
    assert pace.is_due(0.0)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_lookups_are_always_five_seconds_to_a_minute_apart(hurries: list[bool]) -> None:
    pace, at = settled(), 0.0
    for hurry in hurries:
        if hurry:
            pace.hurry()
        pause = next_look(pace, at) - at
        assert CALM_LOOK_SECONDS <= pause <= CONTENT_LOOK_SECONDS
        at += pause


# -- how often a link keeper looks

FORMING_SECONDS = CALM_AFTER_LOOKS * LOOK_SECONDS + 1.0
SETTLING_SECONDS = FORMING_SECONDS + 4 * CONTENT_LOOK_SECONDS


async def settle_with_two_links(scene: Scene, wanted: set[PeerId]) -> LinkKeeper:
    """Let Ann link with Ben and Cleo, whom she wants, until her lookups are as rare as they get."""
    wanted |= {BEN.peer, CLEO.peer}
    await scene.transport(BEN)
    await scene.transport(CLEO)
    keeper = await scene.keeper(ANN, known=(BEN, CLEO), wanted=lambda _: frozenset(wanted))
    await asyncio.sleep(SETTLING_SECONDS)
    assert scene.linked(ANN) == {BEN.peer, CLEO.peer}
    return keeper


def test_a_swarm_that_forms_looks_every_second() -> None:
    async def act(scene: Scene) -> None:
        begin = now()
        await scene.keeper(ANN, known=(BEN,))
        await asyncio.sleep(CALM_AFTER_LOOKS * LOOK_SECONDS)
        assert scene.directory.looks_since(begin - 1.0) == CALM_AFTER_LOOKS

    play(act)


def test_a_peer_that_knows_all_wanted_peers_looks_rarely_and_dials_as_before() -> None:
    async def act(scene: Scene) -> None:
        wanted: set[PeerId] = set()
        keeper = await settle_with_two_links(scene, wanted)
        begin = now()
        await asyncio.sleep(10 * CONTENT_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) in range(9, 12)
        wanted.add(DAN.peer)
        keeper.introduced((scene.record(DAN).encode(),))
        begin, scene.dials[:] = now(), []
        await asyncio.sleep(CONTENT_LOOK_SECONDS / 2)
        assert len(scene.dials) >= 4, "retries do not wait for looks"
        assert scene.directory.looks_since(begin) <= 1

    play(act)


def test_lookups_are_frequent_while_a_wanted_peer_is_unknown() -> None:
    async def act(scene: Scene) -> None:
        wanted: set[PeerId] = set()
        await settle_with_two_links(scene, wanted)
        wanted.add(DAN.peer)
        begin = now()
        await asyncio.sleep(10 * CALM_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) in range(9, 12)
        await scene.transport(DAN)
        await scene.directory.announce(scene.record(DAN), now() + 6000.0)
        await asyncio.sleep(2 * CALM_LOOK_SECONDS)
        assert DAN.peer in scene.linked(ANN)
        await asyncio.sleep(SETTLING_SECONDS)
        begin = now()
        await asyncio.sleep(10 * CONTENT_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) in range(9, 12), "and seldom again when it is known"

    play(act)


def test_a_wanted_peer_that_cannot_be_dialled_is_not_looked_for() -> None:
    async def act(scene: Scene) -> None:
        wanted: set[PeerId] = set()
        await settle_with_two_links(scene, wanted)
        hidden = sign_record(DAN, run=RUN, addresses=(), can_be_dialled=False, role=PeerRole.TRAINER, issued_at=now())
        await scene.directory.announce(hidden, now() + 6000.0)
        await asyncio.sleep(2 * CONTENT_LOOK_SECONDS)
        wanted.add(DAN.peer)
        begin = now()
        await asyncio.sleep(10 * CONTENT_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) in range(9, 12)

    play(act)


async def dial_as_dan(scene: Scene) -> None:
    """Let Dan, whom Ann does not know, link with her."""
    dan = scene.network.find(DAN.peer) or await scene.transport(DAN)
    await dan.dial(ANN.peer, scene.record(ANN).addresses, now() + 1.0)


def test_after_losing_a_wanted_link_it_looks_soon_and_then_less_and_less() -> None:
    async def act(scene: Scene) -> None:
        await settle_with_two_links(scene, set())
        await dial_as_dan(scene)
        await asyncio.sleep(2 * CONTENT_LOOK_SECONDS)
        begin = now()
        scene.network.kill(BEN.peer)
        await asyncio.sleep(4 * CALM_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) == 2
        await asyncio.sleep(10 * CONTENT_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) <= 14

    play(act)


def test_losing_an_unwanted_link_does_not_speed_up_lookups() -> None:
    async def act(scene: Scene) -> None:
        await settle_with_two_links(scene, set())
        begin = now()
        ann = scene.network.find(ANN.peer)
        assert ann is not None
        for _ in range(60):
            await dial_as_dan(scene)
            await asyncio.sleep(CALM_LOOK_SECONDS + 1.0)
            assert DAN.peer in scene.linked(ANN)
            ann.hang_up(DAN.peer)
            await asyncio.sleep(CALM_LOOK_SECONDS - 1.0)
        assert scene.directory.looks_since(begin) in range(9, 12)

    play(act)


def test_lookups_are_frequent_with_few_links() -> None:
    async def act(scene: Scene) -> None:
        await scene.transport(BEN)
        await scene.keeper(ANN, known=(BEN,), wanted=lambda _: frozenset({BEN.peer}))
        await asyncio.sleep(SETTLING_SECONDS)
        begin = now()
        await asyncio.sleep(10 * CALM_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) in range(9, 12)

    play(act)


def test_a_directory_that_fails_is_asked_again_soon() -> None:
    async def act(scene: Scene) -> None:
        await settle_with_two_links(scene, set())
        scene.directory.is_down = True
        await asyncio.sleep(2 * CONTENT_LOOK_SECONDS)
        begin = now()
        await asyncio.sleep(10 * CALM_LOOK_SECONDS)
        assert scene.directory.looks_since(begin) in range(9, 12)

    play(act)


@pytest.mark.parametrize("newcomer_dialable", [True, False])
def test_in_a_small_run_a_newcomer_and_peers_that_look_rarely_find_each_other_soon(newcomer_dialable: bool) -> None:
    async def act(scene: Scene) -> None:
        for key in (ANN, BEN, CLEO):
            await scene.keeper(key)
        await asyncio.sleep(SETTLING_SECONDS)
        begin = now()
        await asyncio.sleep(10 * CONTENT_LOOK_SECONDS)
        looks = scene.directory.looks_since(begin)
        assert looks <= 2 * 12 + 10 * CONTENT_LOOK_SECONDS / CALM_LOOK_SECONDS, "all but the last to come look seldom"
        await scene.keeper(DAN, dialable=newcomer_dialable)
        await asyncio.sleep(3.0)
        assert scene.linked(DAN) == {ANN.peer, BEN.peer, CLEO.peer}

    play(act)


def test_a_peer_that_cannot_be_dialled_finds_a_newcomer_soon() -> None:
    async def act(scene: Scene) -> None:
        for key in (ANN, BEN, CLEO):
            await scene.keeper(key)
        await scene.keeper(EVE, dialable=False)
        await asyncio.sleep(SETTLING_SECONDS)
        await scene.keeper(DAN)
        await asyncio.sleep(CALM_LOOK_SECONDS + 2.0)
        assert EVE.peer in scene.linked(DAN)

    play(act)
