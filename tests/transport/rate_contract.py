"""The contract of all transports for caps, as tests: subclass `RateContract` and give it a stage.

It runs in `tests/simulator/test_faulty_network.py` (virtual time: a minute costs nothing) and, with fewer seconds, in
`tests/swarm/test_caps.py` (libp2p, real processes).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest

from p2p_diloco.rate import WIRE_SHARE
from p2p_diloco.transport.link import KIB, MIB, Lane, Transport, TransportLimits
from tests.transport.stage import Stage, in_seconds, link

CAP = 2.5e6
"""20 Mbit/s."""
FRAME_BYTES = 2 * MIB

Direction = Literal["upload", "download"]


def capped(direction: Direction, bytes_per_second: float = CAP) -> TransportLimits:
    if direction == "upload":
        return TransportLimits(upload_bytes_per_second=bytes_per_second, linger_seconds=0.01)
    return TransportLimits(download_bytes_per_second=bytes_per_second, linger_seconds=0.01)


async def keep_full(sender: Transport, receiver: Transport, seconds: float) -> None:
    """Keep frames waiting all the time."""
    end = in_seconds(seconds)
    while in_seconds(0) < end:
        while sender.counters.bulk.bytes_waiting < 3 * FRAME_BYTES:
            assert sender.post(receiver.peer, bytes(FRAME_BYTES), lane=Lane.BULK, deadline=in_seconds(600))
        await asyncio.sleep(0.05)


async def measured_rate(stage: Stage, direction: Direction, seconds: float, rate: float = CAP) -> float:
    """Return the wire rate of complete frames, in bytes per second, from two peers to one or from one to two."""
    hub, _ = await stage.add(limits=capped(direction, rate))
    others = [await stage.add(limits=TransportLimits(linger_seconds=0.01)) for _ in range(2)]
    for other, heard in others:
        await link(hub, other, heard)
    pairs = [(hub, other) if direction == "upload" else (other, hub) for other, _ in others]
    begun = in_seconds(0)
    await asyncio.gather(*(keep_full(sender, receiver, seconds) for sender, receiver in pairs))
    took = in_seconds(0) - begun
    bulk = hub.counters.bulk
    return WIRE_SHARE * (bulk.bytes_sent if direction == "upload" else bulk.bytes_received) / took


class RateContract(ABC):
    """The tests. Each takes a stage; all time is loop time."""

    SECONDS = 60.0

    @abstractmethod
    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Run `scene` on a fresh stage, in a fresh loop, and close everything."""

    @pytest.mark.parametrize("direction", ["upload", "download"])
    def test_a_cap_is_kept_and_used(self, direction: Direction) -> None:
        async def scene(stage: Stage) -> None:
            rate = await measured_rate(stage, direction, self.SECONDS)
            print(f"{direction} cap {8e-6 * CAP:.1f} Mbit/s: {8e-6 * rate:.2f} Mbit/s over {self.SECONDS:.0f} s")
            frames_under_way = 2 * WIRE_SHARE * FRAME_BYTES / self.SECONDS
            assert 0.9 * CAP - frames_under_way < rate < 1.1 * CAP + frames_under_way

        self.play(scene)

    @pytest.mark.parametrize("direction", ["upload", "download"])
    def test_control_frames_do_not_wait_for_a_cap(self, direction: Direction) -> None:
        async def scene(stage: Stage) -> None:
            limits = capped(direction, 128 * KIB)
            one, _ = await stage.add(limits=limits if direction == "upload" else None)
            two, heard = await stage.add(limits=limits if direction == "download" else None)
            await link(one, two, heard)
            assert one.post(two.peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(60))
            for number in range(10):
                begun = in_seconds(0)
                assert one.post(two.peer, bytes([number]), lane=Lane.CONTROL, deadline=in_seconds(10))
                await heard.wait_until(lambda it, wanted=number: len(it.payloads(Lane.CONTROL)) > wanted)
                assert in_seconds(0) - begun < 1.0
            assert heard.payloads(Lane.BULK) == [], "a MiB takes eight seconds through this cap"

        self.play(scene)

    def test_a_flood_from_one_peer_does_not_delay_another(self) -> None:
        async def scene(stage: Stage) -> None:
            (flood, _), (small, _) = await stage.add(), await stage.add()
            hub, heard = await stage.add(limits=capped("download"))
            await link(flood, hub, heard)
            await small.dial(hub.peer, hub.listen_addresses(), in_seconds(10))
            for _ in range(20):
                assert flood.post(hub.peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(600))
            assert small.post(hub.peer, bytes(100 * KIB), lane=Lane.BULK, deadline=in_seconds(10))
            await heard.wait_until(lambda it: any(peer == small.peer for peer, _, _ in it.frames))
            assert len(heard.frames) < 10, "twenty frames of the flood were posted before"

        self.play(scene)

    def test_a_stopped_peer_delays_nobody_under_a_cap(self) -> None:
        async def scene(stage: Stage) -> None:
            remote = await stage.add_remote()
            one, one_heard = await stage.add(limits=capped("upload"))
            two, two_heard = await stage.add()
            await link(one, two, two_heard)
            await one.dial(remote.peer, remote.addresses, in_seconds(10))
            remote.stop()
            deadline = in_seconds(4)
            for _ in range(20):
                assert one.post(remote.peer, bytes(MIB), lane=Lane.BULK, deadline=deadline)
            for _ in range(3):
                assert one.post(two.peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(60))
            await two_heard.wait_until(lambda it: len(it.frames) == 3)
            await one_heard.wait_until(lambda it: len(it.lost()) == 1)
            assert one.linked_peers() == {two.peer}
            remote.go_on()

        self.play(scene)
