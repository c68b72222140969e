"""The faulty network: the contracts for stopped peers and caps, its faults, and determinism."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.transport.link import MIB, Lane
from simulator.faulty_network import FaultyNetwork, FaultyTransport
from simulator.virtual_time import run_virtual
from tests.testing.test_network import MemoryStage
from tests.transport.failure_contract import StopContract
from tests.transport.rate_contract import RateContract
from tests.transport.stage import RUN, Recorder, Remote, act, in_seconds

A, B, C = (PeerId(bytes([letter]) * 32) for letter in b"abc")

Scene = Callable[[FaultyNetwork, list[FaultyTransport], list[Recorder]], Awaitable[None]]


@dataclass
class FaultyStage(MemoryStage):
    """Peers on one faulty network."""

    network: FaultyNetwork = field(default_factory=lambda: FaultyNetwork(7, bytes_per_second=100e6))

    async def add_remote(self) -> Remote:
        remote = await super().add_remote()
        return replace(
            remote, stop=lambda: self.network.stall(remote.peer), go_on=lambda: self.network.wake(remote.peer)
        )


class TestFaulty(StopContract, RateContract):
    """`FaultyTransport`; `SimulatedTransport`, which extends it, keeps the other contracts."""

    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            await act(FaultyStage(), scene)

        run_virtual(run())


@asynccontextmanager
async def linked_peers(
    network: FaultyNetwork | None = None, num_peers: int = 2
) -> AsyncIterator[tuple[FaultyNetwork, list[FaultyTransport], list[Recorder]]]:
    """Yield a network, peers of which the first is linked to all others, and what they receive."""
    place = network if network is not None else FaultyNetwork(3)
    peers = [place.transport(PeerId(sha256(b"%d" % index)), run=RUN) for index in range(num_peers)]
    heard = [Recorder() for _ in peers]
    for transport, recorder in zip(peers, heard, strict=True):
        transport.serve(recorder)
        await transport.__aenter__()
    for other in peers[1:]:
        await peers[0].dial(other.peer, other.listen_addresses(), in_seconds(10))
    yield place, peers, heard
    for transport in peers:
        await transport.__aexit__(None, None, None)


def post_all(sender: FaultyTransport, receiver: FaultyTransport, count: int) -> None:
    for index in range(count):
        assert sender.post(receiver.peer, index.to_bytes(4, "big"), lane=Lane.BULK, deadline=in_seconds(60))


async def test_losing_frames_keeps_the_order_of_the_others() -> None:
    async with linked_peers(FaultyNetwork(3, loss=0.1)) as (_, peers, heard):
        post_all(peers[0], peers[1], 1000)
        await asyncio.sleep(1)
        came = [int.from_bytes(frame, "big") for frame in heard[1].payloads(Lane.BULK)]
        assert 850 <= len(came) <= 950
        assert came == sorted(came)


def test_two_networks_with_the_same_seed_behave_alike() -> None:
    def history(seed: int) -> list[float]:
        times: list[float] = []

        class Clock(Recorder):
            def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
                times.append(in_seconds(0))

        async def scene() -> None:
            async with linked_peers(FaultyNetwork(seed, loss=0.2), num_peers=4) as (_, peers, _):
                for transport in peers:
                    transport.serve(Clock())
                for other in peers[1:]:
                    post_all(peers[0], other, 20)
                    post_all(other, peers[0], 20)
                await asyncio.sleep(1)

        run_virtual(scene())
        return times

    assert history(1) == history(1) != history(2)


async def test_a_cut_that_is_healed_in_time_only_causes_a_delay() -> None:
    async with linked_peers() as (network, peers, heard):
        network.cut(peers[0].peer, peers[1].peer)
        post_all(peers[0], peers[1], 3)
        await asyncio.sleep(5)
        assert heard[1].frames == []
        network.heal()
        await asyncio.sleep(0.1)
        assert len(heard[1].frames) == 3
        await asyncio.sleep(60)
        assert heard[0].kinds() == heard[1].kinds() == ["up"]


async def test_a_lasting_cut_loses_the_link_at_both_ends_and_blocks_dialling() -> None:
    async with linked_peers() as (network, peers, heard):
        network.isolate(peers[1].peer)
        await asyncio.sleep(20)
        assert heard[0].lost() == heard[1].lost() == ["no answer for 10.0 s"]
        with pytest.raises(PeerError, match="no answer by the deadline"):
            await peers[0].dial(peers[1].peer, peers[1].listen_addresses(), in_seconds(5))
        dialling = asyncio.create_task(peers[0].dial(peers[1].peer, peers[1].listen_addresses(), in_seconds(60)))
        await asyncio.sleep(30)
        network.heal(peers[1].peer)
        await dialling
        assert heard[0].kinds() == ["up", "lost", "up"]


async def test_a_split_leaves_links_within_each_side() -> None:
    async with linked_peers(num_peers=3) as (network, peers, heard):
        network.split([peers[0].peer, peers[1].peer], [peers[2].peer])
        await asyncio.sleep(20)
        assert peers[0].linked_peers() == {peers[1].peer}
        assert heard[2].kinds() == ["up", "lost"]


async def test_a_stopped_peer_later_receives_what_it_missed() -> None:
    async with linked_peers() as (network, peers, heard):
        network.stall(peers[1].peer)
        post_all(peers[0], peers[1], 2)
        await asyncio.sleep(100)
        assert heard[1].frames == []
        assert heard[0].kinds() == ["up"]
        network.wake(peers[1].peer)
        await asyncio.sleep(1)
        assert len(heard[1].frames) == 2
        network.stall(peers[1].peer)
        peers[0].hang_up(peers[1].peer)
        await asyncio.sleep(1)
        assert heard[1].kinds() == ["up"]
        network.wake(peers[1].peer)
        assert heard[1].lost() == [f"{short_peer_id(peers[0].peer)} hung up"]


async def test_frames_posted_by_a_stopped_peer_wait_until_it_wakes() -> None:
    async with linked_peers() as (network, peers, heard):
        network.stall(peers[1].peer)
        assert peers[1].post(peers[0].peer, b"short-lived", lane=Lane.CONTROL, deadline=in_seconds(1))
        assert peers[1].post(peers[0].peer, b"patient", lane=Lane.CONTROL, deadline=in_seconds(100))
        await asyncio.sleep(10)
        network.wake(peers[1].peer)
        await asyncio.sleep(1)
        assert heard[0].payloads(Lane.CONTROL) == [b"patient"]


async def test_a_write_that_stalled_while_its_sender_slept_is_given_up_on_waking() -> None:
    async with linked_peers() as (network, peers, heard):
        network.stall(peers[1].peer)
        for _ in range(3):
            assert peers[0].post(peers[1].peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(5))
        network.stall(peers[0].peer)
        await asyncio.sleep(10)
        assert heard[0].kinds() == ["up"]
        network.wake(peers[0].peer)
        await asyncio.sleep(1)
        assert heard[0].lost() == [f"{short_peer_id(peers[1].peer)} did not read a bulk frame by its deadline"]


async def test_a_peer_that_returns_before_its_death_was_detected_gets_a_fresh_link() -> None:
    async with linked_peers() as (network, peers, heard):
        network.cut(peers[0].peer, peers[1].peer)
        network.kill(peers[1].peer)
        network.heal()
        async with network.transport(peers[1].peer, run=RUN) as again:
            await again.dial(peers[0].peer, peers[0].listen_addresses(), in_seconds(1))
            assert heard[0].kinds() == ["up", "lost", "up"]
            await asyncio.sleep(60)
            assert heard[0].kinds() == ["up", "lost", "up"]


async def test_a_death_behind_a_cut_is_detected_later() -> None:
    async with linked_peers() as (network, peers, heard):
        network.cut(peers[0].peer, peers[1].peer)
        network.kill(peers[1].peer)
        await asyncio.sleep(5)
        assert heard[0].kinds() == ["up"]
        await asyncio.sleep(10)
        assert heard[0].kinds() == ["up", "lost"]


async def test_the_rate_of_a_lane_is_kept() -> None:
    async with linked_peers(FaultyNetwork(3, bytes_per_second=MIB)) as (_, peers, heard):
        begun = in_seconds(0)
        for __ in range(10):
            assert peers[0].post(peers[1].peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(60))
        await heard[1].wait_until(lambda it: len(it.frames) == 10, 60)
        assert in_seconds(0) - begun == pytest.approx(10, abs=0.6)  # the pipe holds one frame, and there is a delay


def blocked_pairs(network: FaultyNetwork) -> list[str]:
    names = {A: "a", B: "b", C: "c"}
    return [names[one] + names[other] for one, other in ((A, B), (A, C), (B, C)) if network.is_blocked(one, other)]


def test_a_cut_blocks_both_directions() -> None:
    network = FaultyNetwork()
    network.cut(A, B)
    assert blocked_pairs(network) == ["ab"]
    assert network.is_blocked(B, A)
    network.heal(B, A)
    assert blocked_pairs(network) == []


def test_a_split_cuts_every_pair_across_it() -> None:
    network = FaultyNetwork()
    network.split([A], [B, C])
    assert blocked_pairs(network) == ["ab", "ac"]
    network.heal(A)
    assert blocked_pairs(network) == []


def test_an_isolated_peer_reaches_nobody_until_healed() -> None:
    network = FaultyNetwork()
    network.isolate(C)
    assert blocked_pairs(network) == ["ac", "bc"]
    network.heal(A)
    assert blocked_pairs(network) == ["ac", "bc"]
    network.heal()
    assert blocked_pairs(network) == []


def test_a_stopped_peer_is_blocked_but_not_cut() -> None:
    network = FaultyNetwork()
    network.stall(A)
    assert blocked_pairs(network) == ["ab", "ac"]
    assert network.is_stalled(A)
    assert not network.is_cut(A, B)
    network.wake(A)
    assert blocked_pairs(network) == []


def test_a_thin_line_is_shared_by_all_its_links_in_each_direction() -> None:
    network = FaultyNetwork()
    thin, one, other = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
    network.limit_line(thin, 100.0)
    assert network.book_line(one, thin, 200, 10.0) == 12.0
    assert network.book_line(other, thin, 100, 10.0) == 13.0
    assert network.book_line(thin, other, 100, 10.0) == 11.0, "the other direction is free"
    assert network.book_line(one, other, 1000, 10.0) == 10.0
    assert network.book_line(one, thin, 50, 10.0, shared=False) == 10.0, "control frames go in between"
    assert network.book_line(one, thin, 100, 20.0) == 21.0
