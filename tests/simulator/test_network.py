"""The simulator's transport keeps the contract of all transports, and what its network adds to the faulty network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.transport.link import Lane, Transport, TransportLimits
from simulator.clock import MachineClock
from simulator.network import SimulatedNetwork, SimulatedTransport
from simulator.process import Process
from simulator.simulation import play
from tests.simulator.test_faulty_network import FaultyStage
from tests.transport.contract import LinkContract
from tests.transport.failure_contract import FailureContract, StopContract
from tests.transport.stage import RUN, Recorder, act, in_seconds


def simulated_network() -> SimulatedNetwork:
    return SimulatedNetwork(7, delay_seconds=(0.01, 0.05))


def transport_of(
    network: SimulatedNetwork, name: bytes, *, believes_open: bool = True, **more: Any
) -> SimulatedTransport:
    # Switched on at second 0: its monotonic clock shows true time, as the contract's own deadlines do.
    process = Process(MachineClock(0.0))
    return network.simulated_transport(
        PeerId(sha256(name)), run=more.pop("run", RUN), believes_open=believes_open, process=process, **more
    )


@dataclass
class SimulatedStage(FaultyStage):
    """Peers on one simulated network, each in its own process."""

    def make(
        self, *, run: Digest = RUN, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> Transport:
        self.num_peers += 1
        assert isinstance(self.network, SimulatedNetwork)
        return transport_of(
            self.network, b"peer %d" % self.num_peers, believes_open=can_be_dialled, run=run, limits=limits
        )


class TestSimulated(LinkContract, FailureContract, StopContract):
    """`SimulatedTransport`."""

    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            await act(SimulatedStage(network=simulated_network()), scene)

        play(run)


def arrivals(change: Callable[[SimulatedNetwork, list[SimulatedTransport]], None]) -> list[float]:
    """Return the delays in seconds after which each of 50 frames arrived, sent one per second."""

    async def scene() -> list[float]:
        network, recorder, came = simulated_network(), Recorder(), []
        one, other = (transport_of(network, name) for name in (b"one", b"other"))
        async with one, other:
            await one.dial(other.peer, other.listen_addresses(), in_seconds(10))
            change(network, [one, other])
            other.serve(recorder)
            sent_at = asyncio.get_running_loop().time()
            for index in range(50):
                one.post(other.peer, b"%d" % index, lane=Lane.CONTROL, deadline=in_seconds(60))
                before = len(recorder.frames)
                await asyncio.sleep(0.5)
                if len(recorder.frames) > before:
                    came.append(asyncio.get_running_loop().time() - sent_at)
                await asyncio.sleep(0.5)
        return came

    return play(scene)


def test_a_muted_direction_loses_every_frame_and_the_other_loses_none() -> None:
    def mute(network: SimulatedNetwork, peers: list[SimulatedTransport]) -> None:
        network.mute([peers[0].peer], [peers[1].peer])

    def mute_back(network: SimulatedNetwork, peers: list[SimulatedTransport]) -> None:
        network.mute([peers[1].peer], [peers[0].peer])

    assert arrivals(mute) == []
    assert len(arrivals(mute_back)) == 50


def test_loss_drops_its_share_of_the_frames() -> None:
    def lose(network: SimulatedNetwork, peers: list[SimulatedTransport]) -> None:
        network.trouble.loss = 0.5

    assert 10 < len(arrivals(lose)) < 40


def test_lag_delays_every_frame_of_a_link() -> None:
    def lag(network: SimulatedNetwork, peers: list[SimulatedTransport]) -> None:
        network.trouble.lag_seconds = 500.0

    assert len(arrivals(lag)) <= 1
