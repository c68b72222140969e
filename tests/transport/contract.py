"""The contract of all transports, as tests: subclass `LinkContract` and give it a stage.

It runs in `tests/testing/test_network.py` (memory, virtual time), `tests/simulator/test_network.py` (the simulator's
network) and `tests/swarm/test_transport_contract.py` (libp2p, real processes). Behaviour with bad peers is in
`failure_contract.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import format_peer_id
from p2p_diloco.transport.link import FRAME_PREFIX_BYTES, KIB, MIB, Lane, SplitFrame, TransportLimits
from tests.transport.stage import Stage, in_seconds, link

SMALL = TransportLimits(control_frame_bytes=4 * KIB, bulk_frame_bytes=64 * KIB)


class LinkContract(ABC):
    """The tests. Each takes a stage; all time is loop time."""

    @abstractmethod
    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Run `scene` on a fresh stage, in a fresh loop, and close everything."""

    def test_frames_of_a_lane_arrive_whole_and_in_order(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(), await stage.add()
            await link(one, two, heard)
            frames = [bytes([index]) * (1 + 7919 * index) for index in range(100)]
            assert all(one.post(two.peer, frame, lane=Lane.BULK, deadline=in_seconds(10)) for frame in frames)
            await heard.wait_until(lambda it: len(it.frames) == len(frames))
            assert heard.payloads(Lane.BULK) == frames
            assert {peer for peer, _, _ in heard.frames} == {one.peer}

        self.play(scene)

    def test_a_frame_in_two_parts_arrives_as_one(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(), await stage.add()
            await link(one, two, heard)
            vector = bytes(range(256)) * 4096
            frames = [SplitFrame(b"head", memoryview(vector)[:length]) for length in (1, 100_000, len(vector))]
            assert all(one.post(two.peer, frame, lane=Lane.BULK, deadline=in_seconds(10)) for frame in frames)
            await heard.wait_until(lambda it: len(it.frames) == len(frames))
            assert heard.payloads(Lane.BULK) == [b"head" + bytes(frame.vector) for frame in frames]
            assert one.counters.bulk.bytes_sent == sum(len(frame) + FRAME_PREFIX_BYTES for frame in frames)

        self.play(scene)

    def test_a_probe_dials_a_linked_peer_afresh_and_fails_if_it_only_dials_out(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(), await stage.add()
            await link(one, two, heard)
            (host,) = (await one.remote_hosts())[two.peer]
            (port,) = two.listen_ports()
            await one.probe(two.peer, host, port, in_seconds(5))
            assert one.linked_peers() == {two.peer}, "the probe opens no second link"
            hidden, _ = await stage.add(can_be_dialled=False)
            assert hidden.listen_ports() == ()
            await link(hidden, two, heard)
            (host,) = (await two.remote_hosts())[hidden.peer]
            with pytest.raises(PeerError, match=f"{host}:1"):
                await two.probe(hidden.peer, host, 1, in_seconds(5))

        self.play(scene)

    def test_waiting_bytes_are_counted_per_peer(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(), await stage.add()
            assert one.waiting_bytes(two.peer, Lane.BULK) == 0, "nothing waits without a link"
            await link(one, two, heard)
            for _ in range(30):
                assert one.post(two.peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(30))
            assert 20 * MIB < one.waiting_bytes(two.peer, Lane.BULK) <= 30 * MIB
            assert one.waiting_bytes(two.peer, Lane.CONTROL) == 0
            await heard.wait_until(lambda it: len(it.frames) == 30)
            assert one.waiting_bytes(two.peer, Lane.BULK) == 0

        self.play(scene)

    def test_a_link_carries_both_lanes_both_ways(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            await link(one, two, two_heard)
            two_heard.echo = two
            for lane in Lane:
                assert one.post(two.peer, lane.value.encode(), lane=lane, deadline=in_seconds(10))
            await one_heard.wait_until(lambda it: len(it.frames) == 2)
            assert {(lane, frame) for _, lane, frame in one_heard.frames} == {
                (Lane.CONTROL, b"control"),
                (Lane.BULK, b"bulk"),
            }
            for transport in (one, two):
                for lane, frame_bytes in ((Lane.CONTROL, 7), (Lane.BULK, 4)):
                    counted = transport.counters.lane(lane)
                    assert (counted.frames_sent, counted.frames_received) == (1, 1)
                    assert (counted.bytes_sent, counted.bytes_received) == (4 + frame_bytes, 4 + frame_bytes)

        self.play(scene)

    def test_the_longest_frame_of_each_lane_passes(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(limits=SMALL), await stage.add(limits=SMALL)
            await link(one, two, heard)
            for lane in Lane:
                assert one.post(two.peer, bytes(SMALL.frame_bytes(lane)), lane=lane, deadline=in_seconds(10))
            await heard.wait_until(lambda it: len(it.frames) == 2)

        self.play(scene)

    def test_control_frames_do_not_wait_for_vectors(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(), await stage.add()
            await link(one, two, heard)
            for _ in range(64):
                assert one.post(two.peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(60))
            assert one.post(two.peer, b"first", lane=Lane.CONTROL, deadline=in_seconds(10))
            await heard.wait_until(lambda it: len(it.frames) == 65, 60)
            assert heard.frames[-1][1] is Lane.BULK

        self.play(scene)

    def test_dialling_a_linked_peer_changes_nothing(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            await link(one, two, two_heard)
            await one.dial(two.peer, two.listen_addresses(), in_seconds(10))
            await two.dial(one.peer, (), in_seconds(10))
            assert one_heard.kinds() == two_heard.kinds() == ["up"]
            assert one.linked_peers() == {two.peer}
            assert two.linked_peers() == {one.peer}

        self.play(scene)

    def test_both_may_dial_at_once(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            two_heard.echo = two
            await asyncio.gather(
                *(one.dial(two.peer, two.listen_addresses(), in_seconds(10)) for _ in range(3)),
                *(two.dial(one.peer, one.listen_addresses(), in_seconds(10)) for _ in range(3)),
            )
            for index in range(20):
                assert one.post(two.peer, bytes([index]), lane=Lane.CONTROL, deadline=in_seconds(10))
            await one_heard.wait_until(lambda it: len(it.frames) == 20)
            assert one_heard.payloads(Lane.CONTROL) == [bytes([index]) for index in range(20)]
            assert one_heard.kinds() == two_heard.kinds() == ["up"]

        self.play(scene)

    def test_a_peer_that_cannot_be_dialled_dials_out_and_receives_answers(self) -> None:
        async def scene(stage: Stage) -> None:
            (hidden, hidden_heard), (two, two_heard) = await stage.add(can_be_dialled=False), await stage.add()
            assert hidden.listen_addresses() == ()
            assert all(address.endswith(f"/p2p/{format_peer_id(two.peer)}") for address in two.listen_addresses())
            await link(hidden, two, two_heard)
            assert two.post(hidden.peer, b"hello", lane=Lane.BULK, deadline=in_seconds(10))
            await hidden_heard.wait_until(lambda it: it.payloads(Lane.BULK) == [b"hello"])

        self.play(scene)

    def test_hanging_up_is_reported_once_at_both_ends(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            await link(one, two, two_heard)
            one.hang_up(two.peer)
            one.hang_up(two.peer)
            assert one_heard.kinds() == ["up", "lost"]
            assert one.linked_peers() == frozenset()
            await two_heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert not two.post(one.peer, b"late", lane=Lane.CONTROL, deadline=in_seconds(1))
            await link(two, one, one_heard)
            assert one_heard.kinds() == ["up", "lost", "up"]

        self.play(scene)

    def test_posting_without_a_link_returns_false(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, _) = await stage.add(), await stage.add()
            assert not one.post(two.peer, b"hello", lane=Lane.CONTROL, deadline=in_seconds(1))

        self.play(scene)

    def test_a_full_queue_accepts_no_more(self) -> None:
        async def scene(stage: Stage) -> None:
            limits = TransportLimits(bulk_queue_bytes=4 * MIB, linger_seconds=0.01)
            (one, _), (two, heard) = await stage.add(limits=limits), await stage.add()
            await link(one, two, heard)
            taken = [one.post(two.peer, bytes(MIB), lane=Lane.BULK, deadline=in_seconds(10)) for _ in range(10)]
            assert 4 <= sum(taken) <= 6
            assert not taken[-1]
            assert one.post(two.peer, b"free", lane=Lane.CONTROL, deadline=in_seconds(10))

        self.play(scene)

    def test_a_frame_past_its_deadline_is_dropped(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(), await stage.add()
            await link(one, two, heard)
            assert one.post(two.peer, b"late", lane=Lane.CONTROL, deadline=in_seconds(-1))
            assert one.post(two.peer, b"timely", lane=Lane.CONTROL, deadline=in_seconds(10))
            await heard.wait_until(lambda it: it.payloads(Lane.CONTROL) == [b"timely"])
            assert one.counters.control.frames_dropped == 1

        self.play(scene)

    @pytest.mark.parametrize("frame", [b"", bytes(SMALL.control_frame_bytes + 1)])
    def test_an_empty_or_too_long_frame_is_the_callers_bug(self, frame: bytes) -> None:
        async def scene(stage: Stage) -> None:
            one, _ = await stage.add(limits=SMALL)
            with pytest.raises(ValueError, match="a control frame holds 1 to 4096 bytes, not"):
                one.post(one.peer, frame, lane=Lane.CONTROL, deadline=in_seconds(1))

        self.play(scene)
