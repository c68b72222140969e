"""Peer that serves or fetches the whole state, with engine, node, island thread and transport of a real peer.

Donors start with the same random vectors. The joiner is the peer with the highest place, and starts with nothing.
Swarm time and the event loop run only in `transfer`. The joiner kills the configured donors when half of the bytes have
arrived, because only it knows when that is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.averaging.our_peer import OurPeer
from benchmarks.meters import family_of
from benchmarks.state.transfer import cpu_seconds_apart
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.repair.repair import BYTES_PER_ELEMENT_OF_STATE
from p2p_diloco.span_log import FOUNDING_WEIGHT, GENESIS_ROUND, SpanHead, founding_radius

LOOK_SECONDS = 0.02
HANG_UP_SECONDS = 0.2
LAG_SECONDS = 0.02
"""Interval at which the lag of an event loop is measured."""


class StatePeer(OurPeer):
    """A donor, or the joiner, which has the highest place.

    Args:
        order: as for `OurPeer`, and `killed`: number of donors to kill half-way, counted from the last donor.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        super().__init__(order)
        self._is_joiner = self.place == int(order["num_peers"]) - 1
        self._num_killed = int(order["killed"])
        self._victims: list[list[int]] = []
        self._joiner: PeerId

    # -- commands of the worker

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Create the state, unless this is the joiner, and connect to all other peers."""
        self.assemble(self.found(words, sha256(b"bench")), {} if self._is_joiner else made_states(self.plan))
        self.link(words)
        self._joiner = PeerId(bytes.fromhex(words[-1]["peer"]))
        donors = words[:-1]
        self._victims = [
            [process.pid for process in family_of(word["pid"])] for word in donors[len(donors) - self._num_killed :]
        ]

    def transfer(self, at: float) -> dict[str, Any]:
        """Fetch everything, starting at `at`, or serve until the joiner disconnects.

        Returns:
            `lags`: lag of this peer's event loop in seconds, one value each `LAG_SECONDS`. The joiner also returns
            `installed_at`, `ready_at`, and the CPU time of the killed peers, with their daemons separate
            (`lost_cpu_seconds`).
        """
        return self.run(self._fetch(at) if self._is_joiner else self._serve(at))

    # -- the transfer

    async def _serve(self, at: float) -> dict[str, Any]:
        lags: list[float] = []
        async with self.driven(0, at), _watched(lags):
            while self._joiner in self.transport.linked_peers():  # noqa: ASYNC110  # no event to wait for
                await asyncio.sleep(0.1)
        return {"lags": lags}

    async def _fetch(self, at: float) -> dict[str, Any]:
        lags: list[float] = []
        installed_at, lost_cpu_seconds = 0.0, (0.0, 0.0)
        half = BYTES_PER_ELEMENT_OF_STATE * self.plan.num_parameters // 2
        victims = self._victims
        async with self.driven(0, at) as driving, _watched(lags):
            while not self.engine.ready:
                if driving.done():
                    driving.result()
                if victims and self.node.traffic.received["transfer"] >= half:
                    lost_cpu_seconds = cpu_seconds_apart(victims)
                    for pids in victims:
                        os.kill(pids[0], signal.SIGKILL)
                    victims = []
                if not installed_at and len(self.thread.state.states()) == len(self.plan.places):
                    installed_at = time.monotonic()
                await asyncio.sleep(LOOK_SECONDS)
            ready_at = time.monotonic()
        for peer in self.transport.linked_peers():
            self.transport.hang_up(peer)
        await asyncio.sleep(HANG_UP_SECONDS)  # not measured
        return {
            "lags": lags,
            "installed_at": installed_at,
            "ready_at": ready_at,
            "lost_cpu_seconds": lost_cpu_seconds,
            "received_bytes": self.node.traffic.received["transfer"],
        }


@asynccontextmanager
async def _watched(lags: list[float]) -> AsyncIterator[None]:
    """Record the lag of the event loop inside the block."""

    async def watch() -> None:
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            lags.append(max(time.monotonic() - due, 0.0))

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


def made_states(plan: RunPlan) -> dict[SpanId, SpanState]:
    """Return φ and m of all spans, the same on all donors: random numbers, which no link can compress."""
    return {span: _made_state(span, place.stop - place.start) for span, place in plan.places.items()}


def _made_state(span: SpanId, elements: int) -> SpanState:
    rng = np.random.Generator(np.random.Philox(key=span.fragment * 65_536 + span.index))
    head = SpanHead(
        digest=sha256(str(span).encode()),
        height=0,
        round=GENESIS_ROUND,
        roster=sha256(b"bench"),
        radius=founding_radius(elements),
        median_weight=FOUNDING_WEIGHT,
    )
    anchor_N, momentum_N = (rng.random(elements, dtype=np.float32) for _ in range(2))
    return SpanState(head=head, anchor_N=anchor_N, momentum_N=momentum_N)
