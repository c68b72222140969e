"""Peer that serves or fetches the whole state, with engine, node, island thread and transport of a real peer.

Donors start with the same random vectors. The joiner is the peer with the highest place, and starts with nothing.
Swarm time and the event loop run only in `play`, see `our_peer`. The joiner kills the configured donors when half of
the bytes have arrived, because only it knows when that is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.averaging.our_peer import plan_of
from benchmarks.averaging.synthetic_island import SyntheticState
from benchmarks.meters import family_of
from benchmarks.staged_peer import StagedPeer
from benchmarks.state.transfer import cpu_seconds_apart
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.log.head import GENESIS_ROUND, SpanHead
from p2p_diloco.log.limits import FOUNDING_WEIGHT, founding_radius
from p2p_diloco.outer.state import SpanState, state_digest
from p2p_diloco.peer.founding import found_roster
from p2p_diloco.peer.processor import wake_politely
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.peer.training_thread import TrainingThread
from p2p_diloco.protocol.repair.repair import BYTES_PER_ELEMENT_OF_STATE
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.signing import SigningKey
from p2p_diloco.span.vector_work import warm_up

LOOK_SECONDS = 0.02
HANG_UP_SECONDS = 0.2
LAG_SECONDS = 0.02
"""Interval at which the lag of an event loop is measured."""


class StatePeer:
    """A donor, or the joiner, which has the highest place.

    Args:
        order: as for `OurPeer`, and `killed`: number of donors to kill half-way, counted from the last donor.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        wake_politely()  # as `p2p-diloco join` does
        torch.set_num_threads(1)
        self._place = int(order["place"])
        self._num_peers = int(order["num_peers"])
        self._plan = plan_of(order)
        self._organiser = SigningKey(bytes.fromhex(order["organiser"]))
        self._peer = StagedPeer(
            signed=decode_signed_manifest(bytes.fromhex(order["manifest"])),
            plan=self._plan,
            organiser=self._organiser,
            folder=Path(order["folder"]),
        )
        self._is_joiner = self._place == self._num_peers - 1
        self._num_killed = int(order["killed"])
        self._victims: list[list[int]] = []
        self._joiner: PeerId

    # -- commands of the worker

    def start(self) -> dict[str, Any]:
        """Start the transport."""
        warm_up()
        return {**self._peer.start(), "pid": os.getpid()}

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Create the state, unless this is the joiner, and connect to all other peers."""
        founder = Member(peer=PeerId(bytes.fromhex(words[0]["peer"])), incarnation=1)
        founding = found_roster(self._plan, founder, self._organiser, sha256(b"bench"), cycle=0)
        states = {} if self._is_joiner else made_states(self._plan)
        self._peer.assemble(founding, states, self._make_thread)
        self._peer.link(words, self._place)
        self._joiner = PeerId(bytes.fromhex(words[-1]["peer"]))
        donors = words[:-1]
        self._victims = [
            [process.pid for process in family_of(word["pid"])] for word in donors[len(donors) - self._num_killed :]
        ]

    def _make_thread(self, states: dict[SpanId, SpanState]) -> TrainingThread:
        peer = self._peer
        state = SyntheticState(self._plan, absorbed=lambda at, is_in: None, **peer.of_state())
        state.hold(states)
        return TrainingThread(state=state, step=None, in_loop=peer.in_loop, died=peer.failures.append)

    def prepare(self, turn: int) -> None:
        """Do nothing: there are no contributions."""

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        """Fetch everything, starting at `at`, or serve until the joiner disconnects.

        Returns:
            `lags`: lag of this peer's event loop in seconds, one value each `LAG_SECONDS`. The joiner also returns
            `installed_at`, `ready_at`, and the CPU time of the killed peers, with their daemons separate
            (`lost_cpu_seconds`).
        """
        return self._peer.run(self._fetch(turn, at) if self._is_joiner else self._serve(turn, at))

    def digest(self) -> str:
        """Return a hash of φ and m."""
        states = self._peer.thread.state.states()
        return state_digest([states[span] for span in sorted(states)]).hex()

    def close(self) -> None:
        """Stop the transport with its daemon, and all threads."""
        self._peer.close()

    # -- a turn

    async def _serve(self, turn: int, at: float) -> dict[str, Any]:
        lags: list[float] = []
        async with self._peer.driven(turn, at), _watched(lags):
            while self._joiner in self._peer.transport.linked_peers():  # noqa: ASYNC110  # no event to wait for
                await asyncio.sleep(0.1)
        return {"lags": lags}

    async def _fetch(self, turn: int, at: float) -> dict[str, Any]:
        lags: list[float] = []
        installed_at, lost_cpu_seconds = 0.0, (0.0, 0.0)
        half = BYTES_PER_ELEMENT_OF_STATE * self._plan.num_parameters // 2
        victims = self._victims
        async with self._peer.driven(turn, at) as driving, _watched(lags):
            while not self._peer.engine.ready:
                if driving.done():
                    driving.result()
                if victims and self._peer.node.traffic.received["transfer"] >= half:
                    lost_cpu_seconds = cpu_seconds_apart(victims)
                    for pids in victims:
                        os.kill(pids[0], signal.SIGKILL)
                    victims = []
                if not installed_at and len(self._peer.thread.state.states()) == len(self._plan.places):
                    installed_at = time.monotonic()
                await asyncio.sleep(LOOK_SECONDS)
            ready_at = time.monotonic()
        for peer in self._peer.transport.linked_peers():
            self._peer.transport.hang_up(peer)
        await asyncio.sleep(HANG_UP_SECONDS)  # not measured
        return {
            "lags": lags,
            "installed_at": installed_at,
            "ready_at": ready_at,
            "lost_cpu_seconds": lost_cpu_seconds,
            "received_bytes": self._peer.node.traffic.received["transfer"],
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
