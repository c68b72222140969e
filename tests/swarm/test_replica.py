"""The replica of the tests keeps the contract of all replicas."""

from __future__ import annotations

from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.swarm.replica import SpanUpdate
from p2p_diloco.transport.virtual_time import VirtualTimeLoop
from tests.swarm.fake_island import CODECS, SPAN_ELEMENTS, FakeIsland
from tests.swarm.replica_contract import ReplicaContract, ReplicaInTest

SPANS = tuple(SpanId(fragment, index) for fragment in range(2) for index in range(3))


class TestFakeIsland(ReplicaContract):
    """An island without a model, in virtual time."""

    def make(self) -> ReplicaInTest:
        loop = VirtualTimeLoop()
        island = FakeIsland(
            spans=SPANS, now=loop.time, seed=int(PeerId(sha256(b"p"))[0]), step_seconds=1.0, trains=True, loop=loop
        )
        return ReplicaInTest(
            replica=island,
            spans=dict.fromkeys(SPANS, SPAN_ELEMENTS),
            codecs=CODECS,
            settle=lambda: loop.run_until_complete(_two_steps(loop)),
            close=loop.close,
        )


async def _two_steps(loop: VirtualTimeLoop) -> None:
    until = loop.create_future()
    loop.call_later(2.5, until.set_result, None)
    await until


def test_an_update_is_a_value() -> None:
    it = TestFakeIsland().make()
    assert it.update(SPANS[0], 2) == it.update(SPANS[0], 2)
    assert isinstance(it.update(SPANS[0], 2), SpanUpdate)
    it.close()
