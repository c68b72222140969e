"""The contract of all transports for peers that misbehave, die, stop, or are absent."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.transport.link import KIB, MIB, Lane, TransportLimits
from tests.transport.stage import OTHER_RUN, RUN, Recorder, Stage, in_seconds, link

SMALL = TransportLimits(control_frame_bytes=4 * KIB, bulk_frame_bytes=64 * KIB)


class FailureContract(ABC):
    """The tests. Each takes a stage; all time is loop time."""

    @abstractmethod
    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Run `scene` on a fresh stage, in a fresh loop, and close everything."""

    @pytest.mark.parametrize("lane", list(Lane))
    def test_a_peer_that_sends_too_long_a_frame_loses_its_link(self, lane: Lane) -> None:
        async def scene(stage: Stage) -> None:
            (hostile, hostile_heard), (two, heard) = await stage.add(), await stage.add(limits=SMALL)
            await link(hostile, two, heard)
            frame_bytes = SMALL.frame_bytes(lane) + 1
            assert hostile.post(two.peer, bytes(frame_bytes), lane=lane, deadline=in_seconds(10))
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert heard.frames == []
            assert heard.lost() == [
                f"{short_peer_id(hostile.peer)} announced a {lane.value} frame of {frame_bytes} bytes "
                f"where 1 to {SMALL.frame_bytes(lane)} are allowed"
            ]
            await hostile_heard.wait_until(lambda it: it.kinds() == ["up", "lost"])

        self.play(scene)

    def test_a_peer_of_another_run_gets_no_link(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add(run=OTHER_RUN)
            with pytest.raises(PeerError, match=rf"is not in run {RUN.hex()[:16]}"):
                await one.dial(two.peer, two.listen_addresses(), in_seconds(10))
            assert one_heard.links == two_heard.links == []

        self.play(scene)

    def test_an_address_without_a_listener_is_refused(self) -> None:
        async def scene(stage: Stage) -> None:
            one, _ = await stage.add()
            nobody = PeerId(sha256(b"nobody"))
            with pytest.raises(PeerError, match=rf"{short_peer_id(nobody)} cannot be dialled: .*refused"):
                await one.dial(nobody, [stage.vacant_address(nobody)], in_seconds(10))

        self.play(scene)

    def test_a_peer_without_its_own_addresses_cannot_be_dialled(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, _) = await stage.add(), await stage.add()
            nobody = PeerId(sha256(b"nobody"))
            for addresses in ((), two.listen_addresses()):
                with pytest.raises(PeerError, match=f"none of its {len(addresses)} addresses"):
                    await one.dial(nobody, addresses, in_seconds(10))

        self.play(scene)

    def test_a_peer_cannot_dial_itself(self) -> None:
        async def scene(stage: Stage) -> None:
            one, _ = await stage.add()
            with pytest.raises(PeerError, match="is this peer itself"):
                await one.dial(one.peer, one.listen_addresses(), in_seconds(10))

        self.play(scene)

    def test_closing_sends_waiting_frames_and_notifies_the_others(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            leaver, leaver_heard = stage.make(limits=TransportLimits(linger_seconds=20)), Recorder()
            leaver.serve(leaver_heard)
            async with leaver:
                await link(leaver, one, one_heard)
                await link(leaver, two, two_heard)
                for peer in (one.peer, two.peer):
                    for index in range(8):
                        assert leaver.post(peer, bytes([index]) * MIB, lane=Lane.BULK, deadline=in_seconds(10))
                    assert leaver.post(peer, b"good-bye", lane=Lane.CONTROL, deadline=in_seconds(10))
            assert leaver_heard.kinds() == ["up", "up"]
            assert leaver.linked_peers() == frozenset()
            for heard in (one_heard, two_heard):
                await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
                assert heard.payloads(Lane.CONTROL) == [b"good-bye"]
                assert [frame[0] for frame in heard.payloads(Lane.BULK)] == list(range(8))
                assert heard.lost() == [f"{short_peer_id(leaver.peer)} closed the connection"]

        self.play(scene)

    def test_frames_posted_before_closing_arrive_while_the_other_end_keeps_sending(self) -> None:
        async def scene(stage: Stage) -> None:
            one, heard = await stage.add()
            leaver, leaver_heard = stage.make(limits=TransportLimits(linger_seconds=20)), Recorder()
            leaver.serve(leaver_heard)

            async def talk() -> None:
                while leaver.peer in one.linked_peers():
                    for lane in Lane:
                        one.post(leaver.peer, bytes(200), lane=lane, deadline=in_seconds(10))
                    await asyncio.sleep(0.001)

            async with asyncio.TaskGroup() as talking:
                async with leaver:
                    await link(leaver, one, heard)
                    talking.create_task(talk())
                    for index in range(8):
                        assert leaver.post(one.peer, bytes([index]) * MIB, lane=Lane.BULK, deadline=in_seconds(10))
                    assert leaver.post(one.peer, b"good-bye", lane=Lane.CONTROL, deadline=in_seconds(10))
                await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert [frame[0] for frame in heard.payloads(Lane.BULK)] == list(range(8))
            assert heard.payloads(Lane.CONTROL) == [b"good-bye"]
            assert heard.lost() == [f"{short_peer_id(leaver.peer)} closed the connection"]

        self.play(scene)

    def test_a_listener_that_refuses_a_frame_closes_the_link(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            await link(one, two, two_heard)
            two_heard.refuse = PeerError("that peer talks nonsense")
            assert one.post(two.peer, b"nonsense", lane=Lane.CONTROL, deadline=in_seconds(10))
            await two_heard.wait_until(lambda it: it.lost() == ["that peer talks nonsense"])
            await one_heard.wait_until(lambda it: it.kinds() == ["up", "lost"])

        self.play(scene)

    def test_a_frame_that_may_not_be_read_is_skipped_and_the_next_one_arrives(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, _), (two, heard) = await stage.add(), await stage.add()
            await link(one, two, heard)
            asked: list[tuple[Lane, bytes, int]] = []

            def may_read(_: PeerId, lane: Lane, head: bytes, length: int) -> bool:
                asked.append((lane, head, length))
                return head != b"no"

            two.serve(may_read=may_read)
            for lane in Lane:
                for frame in (b"no" * 40_000, b"yes", b"n"):
                    assert one.post(two.peer, frame, lane=lane, deadline=in_seconds(10))
                await heard.wait_until(lambda it, lane=lane: it.payloads(lane) == [b"yes", b"n"])  # type: ignore[misc]
                assert [each[1:] for each in asked if each[0] is lane] == [(b"no", 80_000), (b"ye", 3), (b"n", 1)]
                assert two.counters.lane(lane).bytes_received == 80_004 + 3 + 4 + 1 + 4, "what is skipped came, too"
            assert heard.lost() == []

        self.play(scene)

    def test_a_frame_that_is_refused_by_its_head_closes_the_link(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            await link(one, two, two_heard)

            def may_read(*_: object) -> bool:
                raise FrameError("a frame of that kind is never as long")

            two.serve(may_read=may_read)
            assert one.post(two.peer, bytes(50_000), lane=Lane.BULK, deadline=in_seconds(10))
            await two_heard.wait_until(lambda it: it.lost() == ["a frame of that kind is never as long"])
            await one_heard.wait_until(lambda it: it.kinds() == ["up", "lost"])

        self.play(scene)

    def test_a_bug_in_the_listener_is_reported_and_closes_no_link(self) -> None:
        async def scene(stage: Stage) -> None:
            reported: list[BaseException] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
            (one, _), (two, heard) = await stage.add(), await stage.add()
            await link(one, two, heard)
            heard.refuse = KeyError("a bug")
            for _ in range(2):
                assert one.post(two.peer, b"frame", lane=Lane.CONTROL, deadline=in_seconds(10))
            await heard.wait_until(lambda it: len(it.frames) == 2)
            await asyncio.sleep(0)
            assert reported == [heard.refuse, heard.refuse]
            assert heard.lost() == []

        self.play(scene)

    def test_hanging_up_within_a_callback_ends_the_frames(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
            await link(one, two, two_heard)

            class HangsUp(Recorder):
                def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
                    super().frame_received(peer, lane, frame)
                    two.hang_up(peer)

            hangs_up = HangsUp()
            two.serve(hangs_up)
            for _ in range(5):
                assert one.post(two.peer, b"frame", lane=Lane.CONTROL, deadline=in_seconds(10))
            await one_heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            assert len(hangs_up.frames) == 1
            assert hangs_up.kinds() == ["lost"]

        self.play(scene)

    def test_links_beyond_the_limit_are_refused(self) -> None:
        async def scene(stage: Stage) -> None:
            one, one_heard = await stage.add(limits=TransportLimits(links=1))
            (two, two_heard), (three, three_heard) = await stage.add(), await stage.add()
            await link(two, one, one_heard)
            with pytest.raises(PeerError):
                await three.dial(one.peer, one.listen_addresses(), in_seconds(10))
            assert three_heard.links == []
            assert one.linked_peers() == {two.peer}
            assert two_heard.kinds() == ["up"]
            one.serve(is_needed=lambda peer: peer == three.peer)
            await three.dial(one.peer, one.listen_addresses(), in_seconds(10))
            await one_heard.wait_until(lambda it: len(it.links) == 2)

        self.play(scene)

    def test_unwelcome_peers_are_refused(self) -> None:
        async def scene(stage: Stage) -> None:
            (one, one_heard), (two, _), (three, _) = await stage.add(), await stage.add(), await stage.add()
            one.serve(is_welcome=lambda peer: peer != three.peer)
            with pytest.raises(PeerError):
                await three.dial(one.peer, one.listen_addresses(), in_seconds(10))
            await link(two, one, one_heard)
            assert one.linked_peers() == {two.peer}

        self.play(scene)

    def test_a_killed_peer_is_detected_at_once(self) -> None:
        async def scene(stage: Stage) -> None:
            remote = await stage.add_remote()
            one, heard = await stage.add()
            await one.dial(remote.peer, remote.addresses, in_seconds(10))
            assert one.post(remote.peer, b"ping", lane=Lane.CONTROL, deadline=in_seconds(10))
            await heard.wait_until(lambda it: it.payloads(Lane.CONTROL) == [b"ping"])
            remote.kill()
            await heard.wait_until(lambda it: it.kinds() == ["up", "lost"])
            with pytest.raises(PeerError):
                await one.dial(remote.peer, remote.addresses, in_seconds(2))

        self.play(scene)


class StopContract(ABC):
    """The tests with a peer that is stopped, as by SIGSTOP, where the network can do that."""

    @abstractmethod
    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Run `scene` on a fresh stage, in a fresh loop, and close everything."""

    def test_a_stopped_peer_loses_its_link_and_delays_nobody(self) -> None:
        async def scene(stage: Stage) -> None:
            remote = await stage.add_remote()
            hasty = TransportLimits(frame_seconds=2.0, slowest_bytes_per_second=1.0 * MIB)
            (one, one_heard), (two, two_heard) = await stage.add(limits=hasty), await stage.add()
            two_heard.echo = two
            await link(one, two, two_heard)
            await one.dial(remote.peer, remote.addresses, in_seconds(10))
            remote.stop()
            deadline = in_seconds(3)
            posted = 0
            while posted < 100 and one.post(remote.peer, bytes(MIB), lane=Lane.BULK, deadline=deadline):
                posted += 1
            assert one.post(two.peer, b"still here", lane=Lane.CONTROL, deadline=in_seconds(10))
            await one_heard.wait_until(lambda it: it.payloads(Lane.CONTROL) == [b"still here"])
            assert one_heard.lost() == []
            await one_heard.wait_until(lambda it: len(it.lost()) == 1)
            assert one_heard.lost() == [f"{short_peer_id(remote.peer)} did not read a bulk frame by its deadline"]
            assert one.linked_peers() == {two.peer}
            remote.go_on()

        self.play(scene)

    def test_a_stopped_peer_does_not_answer_a_dial(self) -> None:
        async def scene(stage: Stage) -> None:
            remote = await stage.add_remote()
            one, heard = await stage.add()
            remote.stop()
            begun = in_seconds(0)
            with pytest.raises(PeerError, match="cannot be dialled: no answer by the deadline at"):
                await one.dial(remote.peer, remote.addresses, in_seconds(1))
            assert 0.9 < in_seconds(0) - begun < 5
            remote.go_on()
            await one.dial(remote.peer, remote.addresses, in_seconds(10))
            assert heard.kinds() == ["up"]

        self.play(scene)
