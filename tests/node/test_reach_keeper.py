"""Proofs of reachability: which peers are asked, which are dialled, and how strangers can abuse it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from p2p_diloco.ids import PeerId
from p2p_diloco.node.reach_keeper import PROBES_A_MINUTE, PROBES_A_MINUTE_FOR_ONE, ReachKeeper, announced
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.membership.local import Conditions
from p2p_diloco.protocol.membership.reach import ANSWER_SECONDS, PROOF_SECONDS, Standing
from p2p_diloco.protocol.membership.reach_proofs import place_of
from p2p_diloco.protocol.wire.member import Member, ReachProof
from p2p_diloco.protocol.wire.messages import ReachReply, ReachRequest, decode_message
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.testing.network import MemoryTransport
from p2p_diloco.transport.link import Lane, TransportListener
from simulator.faulty_network import FaultyNetwork
from simulator.virtual_time import run_virtual
from tests.swarm.link_stage import ANN, BEN, CLEO, DAN, EVE, RUN, now

HOST = "45.10.0.2"
CYCLE = 7
CLOCK = RoundClock(start_seconds=0.0, round_seconds=8.0, num_fragments=1)


def member(peer: PeerId) -> Member:
    return Member(peer=peer, incarnation=1, counts=peer != CLEO.peer)


def answer(
    nonce: int, *, host: bytes = HOST.encode(), port: int = 1, reason: bytes = b"", signature: bytes = bytes(64)
) -> ReachReply:
    return ReachReply(nonce=nonce, host=host, port=port, reason=reason, cycle=CYCLE, signature=signature)


def signed(nonce: int, by: SigningKey, about: SigningKey, *, host: bytes = HOST.encode(), port: int = 1) -> ReachReply:
    """A yes with a proof of a prover."""
    place = place_of(RUN, HOST)
    proof = ReachProof(prover=by.peer, place=place, cycle=CYCLE, signature=bytes(64))
    return answer(nonce, host=host, port=port, signature=by.sign(proof.statement(RUN, about.peer)))


class Keeper(TransportListener):
    """One peer of a scene: its transport, seen by all at one public address, its keeper and its results."""

    def __init__(
        self, transport: MemoryTransport, key: SigningKey, members: frozenset[PeerId], listed: frozenset[PeerId]
    ) -> None:
        self.transport = transport
        self.standings: list[Standing] = []
        self.probed: list[PeerId] = []
        self.days_ahead = 0
        self.probe_seconds = 0.0
        self.num_asked = 0
        roster = SimpleNamespace(peers=lambda: members, members=[member(peer) for peer in sorted(members)])
        self.engine: Any = SimpleNamespace(
            me=SimpleNamespace(peer=transport.peer, sign=key.sign),
            book=SimpleNamespace(in_force=roster if members else None, founder=transport.peer),
            membership=SimpleNamespace(liveness=SimpleNamespace(views={})),
            rules=SimpleNamespace(
                may_be_member=listed.__contains__, run=RUN, clock=CLOCK, cycle_seconds=CLOCK.round_seconds
            ),
            conditions=Conditions(),
            set_conditions=self.set_conditions,
            wanted_links=lambda: None,
        )
        transport.remote_hosts = self.hosts  # type: ignore[method-assign]
        self._probe, transport.probe = transport.probe, self.probe  # type: ignore[method-assign]
        self.reach = ReachKeeper(
            transport=transport,
            engine=self.engine,
            is_own_host=lambda host: False,
            now=lambda: CYCLE * CLOCK.round_seconds + 86_400.0 * self.days_ahead,
            verify=is_signed_by,
            on_change=self.standings.append,
        )
        transport.serve(self)

    def set_conditions(self, conditions: Conditions) -> None:
        self.engine.conditions = conditions

    async def hosts(self) -> dict[PeerId, tuple[str, ...]]:
        return dict.fromkeys(self.transport.linked_peers(), (HOST,))

    async def probe(self, peer: PeerId, host: str, port: int, deadline: float) -> None:
        self.probed.append(peer)
        await asyncio.sleep(self.probe_seconds)
        await self._probe(peer, host, port, deadline)

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        message = decode_message(frame)
        assert isinstance(message, ReachRequest | ReachReply)
        self.num_asked += isinstance(message, ReachRequest)
        self.reach.receive(peer, message)


class Scene:
    """Keepers on one memory network, all members of one run unless stated otherwise."""

    def __init__(self, exits: AsyncExitStack) -> None:
        self._exits = exits
        self._network = FaultyNetwork(1)
        self._tasks: list[asyncio.Task[None]] = []

    async def add(
        self, key: SigningKey, *, members: tuple[SigningKey, ...], dialable: bool = True, runs: bool = True
    ) -> Keeper:
        transport = self._network.transport(key.peer, run=RUN, can_be_dialled=dialable)
        await self._exits.enter_async_context(transport)
        everybody = frozenset(k.peer for k in (ANN, BEN, CLEO, DAN))
        keeper = Keeper(transport, key, frozenset(k.peer for k in members), everybody)
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


async def ann_asks_ben(stage: Scene) -> tuple[Keeper, list[ReachRequest]]:
    """Let Ann ask Ben, who does not answer; return Ann and her request."""
    ann = await stage.add(ANN, members=(ANN, BEN))
    ben = await stage.add(BEN, members=(ANN, BEN), runs=False)
    asked: list[ReachRequest] = []
    ben.reach.receive = lambda peer, message: asked.append(message)  # type: ignore[method-assign,assignment,return-value]
    await stage.link(ann, ben)
    await asyncio.sleep(1.0)
    return ann, asked


def test_a_peer_becomes_dialable_within_a_second_of_a_members_dial() -> None:
    async def scene(stage: Scene) -> None:
        ann, ben = [await stage.add(key, members=(ANN, BEN)) for key in (ANN, BEN)]
        assert not ann.engine.conditions.can_be_dialled
        await stage.link(ann, ben)
        await asyncio.sleep(1.0)
        assert ann.engine.conditions.can_be_dialled
        assert ann.reach.addresses == (f"/ip4/{HOST}/tcp/1",)
        assert [standing.num_proved for standing in ann.standings] == [1], "said when it changes, not each turn"
        (proof,) = ann.engine.conditions.proofs
        assert (proof.prover, proof.cycle, proof.place) == (BEN.peer, CYCLE, place_of(RUN, HOST))
        assert is_signed_by(BEN.peer, proof.statement(RUN, ANN.peer), proof.signature)

    play(scene)


def test_a_peer_that_only_dials_out_stays_undialable_and_gets_the_reason() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        ben = await stage.add(BEN, members=(ANN, BEN), dialable=False)
        await stage.link(ben, ann)
        ben.transport.listen_ports = lambda: (7,)  # type: ignore[method-assign]
        await asyncio.sleep(2.0)
        assert not ben.engine.conditions.can_be_dialled
        assert [failure.reason for failure in ben.reach.standing.failures] == [f"{HOST}:7 refused"]
        assert ben.reach.addresses == ()

    play(scene)


def test_a_strangers_yes_is_neither_requested_nor_believed() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        eve = await stage.add(EVE, members=(), runs=False)
        await stage.link(eve, ann)
        await asyncio.sleep(2.0)
        ann.reach.receive(EVE.peer, signed(1, EVE, ANN))
        assert not ann.engine.conditions.can_be_dialled

    play(scene)


def test_a_yes_without_a_matching_proof_is_not_counted() -> None:
    async def scene(stage: Scene) -> None:
        ann, asked = await ann_asks_ben(stage)
        for bad in (answer, lambda nonce: signed(nonce, EVE, ANN), lambda nonce: signed(nonce, BEN, CLEO)):
            ann.reach.receive(BEN.peer, bad(asked[-1].nonce))
            assert not ann.engine.conditions.can_be_dialled
            await asyncio.sleep(600.0)
        elsewhere = signed(asked[-1].nonce, BEN, ANN, host=b"45.10.0.3")
        ann.reach.receive(BEN.peer, elsewhere)
        assert ann.engine.conditions.proofs == ()

    play(scene)


def test_a_peer_that_does_not_know_the_time_answers_once_it_does() -> None:
    async def scene(stage: Scene) -> None:
        ann, ben = [await stage.add(key, members=(ANN, BEN)) for key in (ANN, BEN)]
        ben.set_conditions(Conditions(is_time_uncertain=True))
        await stage.link(ann, ben)
        await asyncio.sleep(5.0)
        assert not ann.engine.conditions.can_be_dialled
        ben.set_conditions(Conditions())
        await asyncio.sleep(1.0)
        assert ann.engine.conditions.can_be_dialled

    play(scene)


def test_peers_whose_proofs_count_are_asked_even_if_others_have_answered() -> None:
    async def scene(stage: Scene) -> None:
        ann, cleo = [await stage.add(key, members=(ANN, BEN, CLEO, DAN)) for key in (ANN, CLEO)]
        await stage.link(ann, cleo)
        await asyncio.sleep(2.0)
        assert [proof.prover for proof in ann.engine.conditions.proofs] == [CLEO.peer], "it has just been listed"
        for key in (BEN, DAN):
            await stage.link(ann, await stage.add(key, members=(ANN, BEN, CLEO, DAN)))
        await asyncio.sleep(2.0)
        assert {proof.prover for proof in ann.engine.conditions.proofs} == {CLEO.peer, BEN.peer, DAN.peer}

    play(scene)


def test_an_hour_old_proof_is_no_longer_shown() -> None:
    async def scene(stage: Scene) -> None:
        ann, ben = [await stage.add(key, members=(ANN, BEN)) for key in (ANN, BEN)]
        await stage.link(ann, ben)
        await asyncio.sleep(2.0)
        ben.reach.receive = lambda peer, message: None  # type: ignore[method-assign]
        await asyncio.sleep(PROOF_SECONDS)
        assert ann.engine.conditions.proofs == ()

    play(scene)


def test_a_proof_is_signed_again_when_swarm_time_has_been_corrected_by_a_day() -> None:
    async def scene(stage: Scene) -> None:
        ann, ben = [await stage.add(key, members=(ANN, BEN)) for key in (ANN, BEN)]
        ben.probe_seconds = 0.5
        await stage.link(ann, ben)
        await asyncio.sleep(ANSWER_SECONDS)
        ann.days_ahead = 1
        await asyncio.sleep(3 * ANSWER_SECONDS)
        assert ben.num_asked <= 5, "Ben does not know that time yet, and is not asked all the time"
        ben.days_ahead = 1
        await asyncio.sleep(2 * ANSWER_SECONDS)
        (proof,) = ann.engine.conditions.proofs
        assert proof.cycle == CYCLE + 86_400 // 8
        num_asked = ben.num_asked
        await asyncio.sleep(600.0)
        assert ben.num_asked == num_asked

    play(scene)


def test_an_answer_that_names_no_address_or_another_question_is_dropped() -> None:
    async def scene(stage: Scene) -> None:
        ann, asked = await ann_asks_ben(stage)
        (request,) = asked
        for reply in (
            signed(request.nonce + 1, BEN, ANN),
            answer(request.nonce, host=b"\xff\x1b[31m"),
        ):
            ann.reach.receive(BEN.peer, reply)
        assert not ann.engine.conditions.can_be_dialled

    play(scene)


def test_control_characters_are_removed_from_a_reason() -> None:
    async def scene(stage: Scene) -> None:
        ann, asked = await ann_asks_ben(stage)
        ann.reach.receive(BEN.peer, answer(asked[0].nonce, reason=b"\x1b[31mred\n"))
        assert [failure.reason for failure in ann.reach.standing.failures] == ["?[31mred?"]

    play(scene)


def test_a_proved_address_has_no_control_characters_and_names_a_port_of_this_peer() -> None:
    async def scene(stage: Scene) -> None:
        ann, asked = await ann_asks_ben(stage)
        zoned = HOST.encode() + b"%\x1b[2J/tcp/9"
        ann.reach.receive(BEN.peer, signed(asked[0].nonce, BEN, ANN, host=zoned, port=9))
        assert not ann.engine.conditions.can_be_dialled, "nobody was asked to dial that port"
        await asyncio.sleep(60.0)
        ann.reach.receive(BEN.peer, signed(asked[-1].nonce, BEN, ANN, host=zoned))
        assert ann.reach.addresses == (f"/ip4/{HOST}/tcp/1",)

    play(scene)


def test_an_asker_can_make_us_dial_only_its_own_host_a_few_times_a_minute() -> None:
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

        async def hosts() -> dict[PeerId, tuple[str, ...]]:
            return dict.fromkeys((*strangers, BEN.peer), (HOST,))

        ann.transport.remote_hosts = hosts  # type: ignore[method-assign]
        for peer in (*strangers, BEN.peer):
            ann.reach.receive(peer, ReachRequest(nonce=0, ports=(1,)))
            await asyncio.sleep(0.1)
        assert ann.probed == [*strangers[: PROBES_A_MINUTE // 2], BEN.peer]

    play(scene)


def test_a_peer_that_may_not_be_a_member_is_not_dialled() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.add(ANN, members=(ANN, BEN))
        eve = await stage.add(EVE, members=(), runs=False)
        await stage.link(eve, ann)
        ann.reach.receive(EVE.peer, ReachRequest(nonce=0, ports=(1,)))
        await asyncio.sleep(1.0)
        assert ann.probed == []

    play(scene)


def test_the_proved_address_is_announced_before_the_listen_address() -> None:
    proved, listening = ("/ip4/45.10.0.2/tcp/1",), ("/ip4/192.168.1.7/tcp/1/p2p/x", "/ip4/45.10.0.2/tcp/1/p2p/x")
    assert announced(proved, listening, "/p2p/x") == (listening[1], listening[0])


def test_a_peer_that_a_friend_outside_has_reached_also_shows_what_its_own_network_proved() -> None:
    """The rule may not count the friend's proof yet, and those that it counts may all be at home."""

    def seeing(keeper: Keeper, hosts: dict[PeerId, str]) -> None:
        async def seen() -> dict[PeerId, tuple[str, ...]]:
            return {peer: (hosts[peer],) for peer in keeper.transport.linked_peers()}

        keeper.transport.remote_hosts = seen  # type: ignore[method-assign]

    async def scene(stage: Scene) -> None:
        ann, ben, cleo = [await stage.add(key, members=(ANN, BEN, CLEO)) for key in (ANN, BEN, CLEO)]
        seeing(ann, {BEN.peer: "192.168.1.6", CLEO.peer: HOST})
        seeing(ben, {ANN.peer: "192.168.1.5", CLEO.peer: HOST})
        seeing(cleo, {ANN.peer: HOST, BEN.peer: HOST})
        await stage.link(ann, ben)
        await stage.link(ann, cleo)
        await asyncio.sleep(2.0)
        assert ann.reach.standing.num_proved == 1
        assert {proof.prover for proof in ann.engine.conditions.proofs} == {BEN.peer, CLEO.peer}

    play(scene)
