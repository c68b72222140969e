"""Proofs of reachability: who asks whom, who is dialled, and what a stranger can make of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.messages import ReachReply, ReachRequest, decode_message
from p2p_diloco.protocol.reach import Standing
from p2p_diloco.signing import SigningKey
from p2p_diloco.swarm.reach_keeper import PROBES_A_MINUTE, PROBES_A_MINUTE_FOR_ONE, ReachKeeper, announced
from p2p_diloco.transport.link import Lane, SilentListener
from p2p_diloco.transport.memory import MemoryNetwork, MemoryTransport
from p2p_diloco.transport.virtual_time import run_virtual
from tests.swarm.link_stage import ANN, BEN, CLEO, DAN, EVE, RUN, now

HOST = "45.10.0.2"


class Keeper(SilentListener):
    """One peer of a scene: its transport, seen by all at one public address, its keeper and what came of it."""

    def __init__(self, transport: MemoryTransport, members: frozenset[PeerId], listed: frozenset[PeerId]) -> None:
        self.transport = transport
        self.standings: list[Standing] = []
        self.probed: list[PeerId] = []
        roster = SimpleNamespace(peers=lambda: members)
        self.engine: Any = SimpleNamespace(
            me=SimpleNamespace(peer=transport.peer),
            book=SimpleNamespace(in_force=roster if members else None, founder=transport.peer),
            membership=SimpleNamespace(heard={}, can_be_dialled=False),
            rules=SimpleNamespace(may_be_member=listed.__contains__),
            wanted_links=lambda: None,
        )
        transport.remote_hosts = self.hosts  # type: ignore[method-assign]
        self._probe, transport.probe = transport.probe, self.probe  # type: ignore[method-assign]
        self.reach = ReachKeeper(
            transport=transport, engine=self.engine, is_own_host=lambda host: False, hear=self.standings.append
        )
        transport.listener = self

    async def hosts(self) -> dict[PeerId, tuple[str, ...]]:
        return dict.fromkeys(self.transport.linked_peers(), (HOST,))

    async def probe(self, peer: PeerId, host: str, port: int, deadline: float) -> None:
        self.probed.append(peer)
        await self._probe(peer, host, port, deadline)

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        message = decode_message(frame)
        assert isinstance(message, ReachRequest | ReachReply)
        self.reach.receive(peer, message)


class Scene:
    """Keepers on one memory network, all members of one run unless said otherwise."""

    def __init__(self, exits: AsyncExitStack) -> None:
        self._exits = exits
        self._network = MemoryNetwork(1)
        self._tasks: list[asyncio.Task[None]] = []

    async def add(
        self, key: SigningKey, *, members: tuple[SigningKey, ...], dialable: bool = True, runs: bool = True
    ) -> Keeper:
        transport = self._network.transport(key.peer, run=RUN, can_be_dialled=dialable)
        await self._exits.enter_async_context(transport)
        everybody = frozenset(k.peer for k in (ANN, BEN, CLEO, DAN))
        keeper = Keeper(transport, frozenset(k.peer for k in members), everybody)
        if runs:
            task = asyncio.create_task(keeper.reach.run())
            self._exits.callback(task.cancel)
        return keeper

    async def link(self, one: Keeper, two: Keeper) -> None:
        await one.transport.dial(two.transport.peer, two.transport.listen_addresses(), now() + 5.0)


def play(scene: Any) -> None:
    async def act() -> None:
        async with AsyncExitStack() as exits:
            await scene(Scene(exits))

    run_virtual(act())


def test_a_peer_becomes_dialable_when_a_member_has_dialled_it_and_within_a_second() -> None:
    async def scene(stage: Scene) -> None:
        ann, ben = [await stage.add(key, members=(ANN, BEN)) for key in (ANN, BEN)]
        assert not ann.engine.membership.can_be_dialled
        await stage.link(ann, ben)
        await asyncio.sleep(1.0)
        assert ann.engine.membership.can_be_dialled
        assert ann.reach.addresses == (f"/ip4/{HOST}/tcp/1",)
        assert [standing.num_proved for standing in ann.standings] == [1], "said when it changes, not each turn"

    play(scene)


def test_who_only_dials_out_stays_so_and_hears_why() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        ben = await stage.add(BEN, members=(ANN, BEN))
        await stage.link(ben, ann)
        ben.transport._can_be_dialled = False
        ben.transport.listen_ports = lambda: (7,)  # type: ignore[method-assign]
        await asyncio.sleep(2.0)
        assert not ben.engine.membership.can_be_dialled
        assert [failure.reason for failure in ben.reach.standing.failures] == [f"{HOST}:7 refused"]
        assert ben.reach.addresses == ()

    play(scene)


def test_a_strangers_yes_is_not_asked_for_and_not_believed() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        eve = await stage.add(EVE, members=(), runs=False)
        await stage.link(eve, ann)
        await asyncio.sleep(2.0)
        ann.reach.receive(EVE.peer, ReachReply(nonce=1, host=HOST.encode(), port=1, reason=b""))
        assert not ann.engine.membership.can_be_dialled

    play(scene)


def test_an_answer_that_names_no_address_or_another_question_is_dropped() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        ben = await stage.add(BEN, members=(ANN, BEN), runs=False)
        asked: list[ReachRequest] = []
        ben.reach.receive = lambda peer, message: asked.append(message)  # type: ignore[method-assign,assignment,return-value]
        await stage.link(ann, ben)
        await asyncio.sleep(1.0)
        (request,) = asked
        for reply in (
            ReachReply(nonce=request.nonce + 1, host=HOST.encode(), port=1, reason=b""),
            ReachReply(nonce=request.nonce, host=b"\xff\x1b[31m", port=1, reason=b""),
        ):
            ann.reach.receive(BEN.peer, reply)
        assert not ann.engine.membership.can_be_dialled

    play(scene)


def test_a_reason_brings_no_control_characters() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        ben = await stage.add(BEN, members=(ANN, BEN), runs=False)
        asked: list[ReachRequest] = []
        ben.reach.receive = lambda peer, message: asked.append(message)  # type: ignore[method-assign,assignment,return-value]
        await stage.link(ann, ben)
        await asyncio.sleep(1.0)
        ann.reach.receive(
            BEN.peer, ReachReply(nonce=asked[0].nonce, host=HOST.encode(), port=1, reason=b"\x1b[31mred\n")
        )
        assert [failure.reason for failure in ann.reach.standing.failures] == ["?[31mred?"]

    play(scene)


def test_an_address_that_was_proved_brings_no_control_characters_and_names_a_port_of_this_peer() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        ben = await stage.add(BEN, members=(ANN, BEN), runs=False)
        asked: list[ReachRequest] = []
        ben.reach.receive = lambda peer, message: asked.append(message)  # type: ignore[method-assign,assignment,return-value]
        await stage.link(ann, ben)
        await asyncio.sleep(1.0)
        zoned = HOST.encode() + b"%\x1b[2J/tcp/9"
        ann.reach.receive(BEN.peer, ReachReply(nonce=asked[0].nonce, host=zoned, port=9, reason=b""))
        assert not ann.engine.membership.can_be_dialled, "nobody was asked to dial that port"
        await asyncio.sleep(60.0)
        ann.reach.receive(BEN.peer, ReachReply(nonce=asked[-1].nonce, host=zoned, port=1, reason=b""))
        assert ann.reach.addresses == (f"/ip4/{HOST}/tcp/1",)

    play(scene)


def test_an_asker_has_us_dial_its_own_host_only_and_few_times_a_minute() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        dan = await stage.add(DAN, members=(), runs=False)
        await stage.link(dan, ann)
        for nonce in range(100):
            ann.reach.receive(DAN.peer, ReachRequest(nonce=nonce, ports=(1,)))
            await asyncio.sleep(0.1)
        assert ann.probed == [DAN.peer] * PROBES_A_MINUTE_FOR_ONE
        ann.reach.receive(CLEO.peer, ReachRequest(nonce=0, ports=(1,)))
        await asyncio.sleep(1.0)
        assert CLEO.peer not in ann.probed, "who is not connected has no host"

    play(scene)


def test_strangers_leave_half_of_the_budget_to_members() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        strangers = [PeerId(bytes([number]) * 32) for number in range(100)]
        ann.engine.rules.may_be_member = lambda peer: True
        for peer in strangers:
            ann.reach.receive(peer, ReachRequest(nonce=0, ports=(1,)))
            await asyncio.sleep(0.1)
        assert sum(ann.reach._may_probe(peer) for peer in strangers) == 0
        assert len(ann.reach._probed_at) == PROBES_A_MINUTE // 2
        assert ann.reach._may_probe(BEN.peer)

    play(scene)


def test_who_may_be_no_member_is_not_dialled() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        eve = await stage.add(EVE, members=(), runs=False)
        await stage.link(eve, ann)
        ann.reach.receive(EVE.peer, ReachRequest(nonce=0, ports=(1,)))
        await asyncio.sleep(1.0)
        assert ann.probed == []

    play(scene)


def test_where_it_was_reached_is_announced_before_where_it_listens() -> None:
    proved, listening = ("/ip4/45.10.0.2/tcp/1",), ("/ip4/192.168.1.7/tcp/1/p2p/x", "/ip4/45.10.0.2/tcp/1/p2p/x")
    assert announced(proved, listening, "/p2p/x") == (listening[1], listening[0])
