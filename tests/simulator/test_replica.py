"""The simulator's replica keeps the contract of all replicas."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

from p2p_diloco.ids import SpanId
from p2p_diloco.node.ports import SpanUpdate
from simulator.island import SimulatedIsland
from simulator.maths import SharedMaths
from simulator.process import SimulationLoop
from simulator.run import codecs_of
from tests.swarm.replica_contract import ReplicaContract, ReplicaInTest

SPANS = tuple(SpanId(fragment, index) for fragment in range(2) for index in range(3))
ELEMENTS = 64
CODECS = codecs_of("int4")


def ignore(*_: object) -> None:
    """Do nothing."""


WATCH = SimpleNamespace(complain=ignore, advancing=ignore, advanced=ignore, replaced=ignore, contributed=ignore)


async def new_island() -> SimulatedIsland:
    return SimulatedIsland(
        maths=SharedMaths(CODECS, ELEMENTS),
        spans=SPANS,
        noise=random.Random(1),
        trains=True,
        step_seconds=1.0,
        now=asyncio.get_running_loop().time,
        share=lambda span, state: state,
        watch=WATCH,
    )


class TestSimulatedIsland(ReplicaContract):
    """An island with a few elements, in virtual time."""

    def make(self) -> ReplicaInTest:
        loop = SimulationLoop()
        return ReplicaInTest(
            replica=loop.run_until_complete(new_island()),
            spans=dict.fromkeys(SPANS, ELEMENTS),
            codecs=CODECS,
            settle=lambda: loop.run_until_complete(asyncio.sleep(2.5)),
            close=loop.close,
        )


def test_an_update_is_a_value() -> None:
    it = TestSimulatedIsland().make()
    assert it.update(SPANS[0], 2) == it.update(SPANS[0], 2)
    assert isinstance(it.update(SPANS[0], 2), SpanUpdate)
    it.close()
