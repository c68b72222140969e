"""Properties of the memory network beyond the contract: weather and determinism."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from p2p_diloco.errors import ConfigError, PeerError
from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.transport.link import MIB, Lane
from p2p_diloco.transport.memory import MemoryNetwork, MemoryTransport
from simulator.virtual_time import run_virtual
from tests.transport.stage import RUN, Recorder, in_seconds

Scene = Callable[[MemoryNetwork, list[MemoryTransport], list[Recorder]], Awaitable[None]]


def play(scene: Scene, network: MemoryNetwork | None = None, num_peers: int = 2) -> None:
    """Run `scene` with peers; the first is linked to all others."""

    async def main() -> None:
        place = network if network is not None else MemoryNetwork(3)
        peers = [place.transport(PeerId(sha256(b"%d" % index)), run=RUN) for index in range(num_peers)]
        heard = [Recorder() for _ in peers]
        for transport, recorder in zip(peers, heard, strict=True):
            transport.listener = recorder
            await transport.__aenter__()
        for other in peers[1:]:
            await peers[0].dial(other.peer, other.listen_addresses(), in_seconds(10))
        await scene(place, peers, heard)
        for transport in peers:
            await transport.__aexit__(None, None, None)

    run_virtual(main())


def post_all(sender: MemoryTransport, receiver: MemoryTransport, count: int) -> None:
    for index in range(count):
        assert sender.post(receiver.peer, index.to_bytes(4, "big"), lane=Lane.BULK, deadline=in_seconds(60))


def test_losing_frames_keeps_the_order_of_the_others() -> None:
    async def scene(_: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        post_all(peers[0], peers[1], 1000)
        await asyncio.sleep(1)
        came = [int.from_bytes(frame, "big") for frame in heard[1].payloads(Lane.BULK)]
        assert 850 <= len(came) <= 950
        assert came == sorted(came)

    play(scene, MemoryNetwork(3, loss=0.1))


def test_two_networks_with_the_same_seed_behave_alike() -> None:
    def history(seed: int) -> list[float]:
        times: list[float] = []

        async def scene(_: MemoryNetwork, peers: list[MemoryTransport], __: list[Recorder]) -> None:
            class Clock(Recorder):
                def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
                    times.append(in_seconds(0))

            for transport in peers:
                transport.listener = Clock()
            for other in peers[1:]:
                post_all(peers[0], other, 20)
                post_all(other, peers[0], 20)
            await asyncio.sleep(1)

        play(scene, MemoryNetwork(seed, loss=0.2), num_peers=4)
        return times

    assert history(1) == history(1) != history(2)


def test_a_cut_that_is_healed_in_time_only_causes_a_delay() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        network.cut(peers[0].peer, peers[1].peer)
        post_all(peers[0], peers[1], 3)
        await asyncio.sleep(5)
        assert heard[1].frames == []
        network.heal()
        await asyncio.sleep(0.1)
        assert len(heard[1].frames) == 3
        await asyncio.sleep(60)
        assert heard[0].kinds() == heard[1].kinds() == ["up"]

    play(scene)


def test_a_lasting_cut_loses_the_link_at_both_ends_and_blocks_dialling() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
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

    play(scene)


def test_a_split_leaves_links_within_each_side() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        network.split([peers[0].peer, peers[1].peer], [peers[2].peer])
        await asyncio.sleep(20)
        assert peers[0].linked_peers() == {peers[1].peer}
        assert heard[2].kinds() == ["up", "lost"]

    play(scene, num_peers=3)


def test_a_stopped_peer_later_receives_what_it_missed() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
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

    play(scene)


def test_frames_posted_by_a_stopped_peer_wait_until_it_wakes() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        network.stall(peers[1].peer)
        assert peers[1].post(peers[0].peer, b"short-lived", lane=Lane.CONTROL, deadline=in_seconds(1))
        assert peers[1].post(peers[0].peer, b"patient", lane=Lane.CONTROL, deadline=in_seconds(100))
        await asyncio.sleep(10)
        network.wake(peers[1].peer)
        await asyncio.sleep(1)
        assert heard[0].payloads(Lane.CONTROL) == [b"patient"]

    play(scene)


def test_a_write_that_stalled_while_its_sender_slept_is_given_up_on_waking() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        network.stall(peers[1].peer)
        for _ in range(3):
            assert peers[0].post(peers[1].peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(5))
        network.stall(peers[0].peer)
        await asyncio.sleep(10)
        assert heard[0].kinds() == ["up"]
        network.wake(peers[0].peer)
        await asyncio.sleep(1)
        assert heard[0].lost() == [f"{short_peer_id(peers[1].peer)} did not read a bulk frame by its deadline"]

    play(scene)


def test_a_killed_peer_receives_nothing_more_and_may_return() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        network.kill(peers[1].peer)
        network.kill(peers[1].peer)
        assert not peers[1].post(peers[0].peer, b"ghost", lane=Lane.CONTROL, deadline=in_seconds(1))
        with pytest.raises(PeerError, match="this peer is offline"):
            await peers[1].dial(peers[0].peer, peers[0].listen_addresses(), in_seconds(1))
        await asyncio.sleep(1)
        assert heard[0].kinds() == ["up", "lost"]
        assert heard[1].kinds() == ["up"]
        async with network.transport(peers[1].peer, run=RUN) as again:
            await again.dial(peers[0].peer, peers[0].listen_addresses(), in_seconds(1))
            assert heard[0].kinds() == ["up", "lost", "up"]

    play(scene)


def test_a_peer_that_returns_before_its_death_was_detected_gets_a_fresh_link() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        network.cut(peers[0].peer, peers[1].peer)
        network.kill(peers[1].peer)
        network.heal()
        async with network.transport(peers[1].peer, run=RUN) as again:
            await again.dial(peers[0].peer, peers[0].listen_addresses(), in_seconds(1))
            assert heard[0].kinds() == ["up", "lost", "up"]
            await asyncio.sleep(60)
            assert heard[0].kinds() == ["up", "lost", "up"]

    play(scene)


def test_a_death_behind_a_cut_is_detected_later() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        network.cut(peers[0].peer, peers[1].peer)
        network.kill(peers[1].peer)
        await asyncio.sleep(5)
        assert heard[0].kinds() == ["up"]
        await asyncio.sleep(10)
        assert heard[0].kinds() == ["up", "lost"]

    play(scene)


def test_a_peer_is_online_only_once() -> None:
    async def scene(network: MemoryNetwork, peers: list[MemoryTransport], _: list[Recorder]) -> None:
        with pytest.raises(ConfigError, match="is already online"):
            await network.transport(peers[0].peer, run=RUN).__aenter__()

    play(scene)


def test_the_rate_of_a_lane_is_kept() -> None:
    async def scene(_: MemoryNetwork, peers: list[MemoryTransport], heard: list[Recorder]) -> None:
        begun = in_seconds(0)
        for __ in range(10):
            assert peers[0].post(peers[1].peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(60))
        await heard[1].wait_until(lambda it: len(it.frames) == 10, 60)
        assert in_seconds(0) - begun == pytest.approx(10, abs=0.6)  # the pipe holds one frame, and there is a delay

    play(scene, MemoryNetwork(3, bytes_per_second=MIB))
