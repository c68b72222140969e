"""A peer of this project, but for its training: engine, node, island thread, archive, disk and transport are a
volunteer's.

The whole vector is one fragment, so that one round is one exchange. Swarm time stands still between turns: the clock is
an argument of everything, and the loop runs only while there is something to do. What a volunteer has beside it and
this peer has not: directory, status file, checkpoints, evaluation, and the comparison of contents every few cycles.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from p2p_diloco.bench.averaging.synthetic_island import SyntheticIsland, tensors_of
from p2p_diloco.bench.averaging.textbook import seed_of
from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.island.model import model_shape
from p2p_diloco.manifest import decode_signed_manifest
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.attendance import Self
from p2p_diloco.protocol.engine import PeerEngine, Recalled
from p2p_diloco.protocol.roster import CertifiedRoster, Member
from p2p_diloco.protocol.round import newcomers_of
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.swarm.clock_sync import SwarmClock
from p2p_diloco.swarm.node import SwarmNode
from p2p_diloco.swarm.vector_work import warm_up
from p2p_diloco.swarm.vector_worker import VectorWorker
from p2p_diloco.trainer.archive import Archive
from p2p_diloco.trainer.founding import found_roster, genesis_digest, genesis_states
from p2p_diloco.trainer.island_thread import IslandThread
from p2p_diloco.trainer.last_round import state_digest
from p2p_diloco.trainer.peer_memory import RunFolder
from p2p_diloco.trainer.run_plan import RunPlan, plan_tensors
from p2p_diloco.transport.identity import load_or_create_identity
from p2p_diloco.transport.libp2p import Libp2pTransport

LINK_SECONDS = 60.0
LOOK_SECONDS = 0.02
TRIAL_LINGER_SECONDS = 1.0
"""In turns that do not count, rosters are voted on that list everybody: that takes a few words to and fro."""
LINGER_SECONDS = 0.1
SETTLE_SECONDS = 5.0
KEEP_CHECKPOINTS = 3
START_SCALE = 0.02


class StageClock:
    """Swarm time that runs only in turns: from a round's begin at an agreed moment of the monotonic clock on."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._at = seconds, time.monotonic()

    def set(self, seconds: float, at: float) -> None:
        """Let it show `seconds` when the monotonic clock shows `at`."""
        self._seconds, self._at = seconds, at

    def raw(self) -> float:
        """Return swarm seconds."""
        return self._seconds + time.monotonic() - self._at


class Listener:
    """Keeps the last sentences, for whoever must find out why a turn was not whole."""

    def __init__(self) -> None:
        self.sentences: deque[str] = deque(maxlen=4)

    def report(self, topic: str, text: str) -> None:
        """Hear a sentence."""
        self.sentences.append(text)

    def round_closed(self, closed: RoundClosed) -> None:
        """Hear what came of a round."""


class OurPeer:
    """One peer; its loop runs inside these calls only."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._order = order
        self._place, self._num_peers = int(order["place"]), int(order["num_peers"])
        self._signed = decode_signed_manifest(bytes.fromhex(order["manifest"]))
        self._plan = _plan_of(order)
        folder = Path(order["folder"])
        self._key = load_or_create_identity(folder / "identity.key")
        self._memory = RunFolder(folder, self._plan.rules.run)
        self._stage = StageClock(self._plan.rules.clock.begin(-1))
        self._clock = SwarmClock(self._stage.raw)
        self._listener = Listener()
        self._services = contextlib.AsyncExitStack()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="entries")
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._worker = VectorWorker(self._loop)
        self._applied = asyncio.Event()
        self._applied_at, self._num_absorbed, self._is_in_all = 0.0, 0, True
        self._failures: list[BaseException] = []
        self._transport = Libp2pTransport(
            peer=self._key.peer,
            run=self._plan.rules.run,
            identity_path=folder / "identity.key",
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
        )
        self._engine: PeerEngine
        self._thread: IslandThread
        self._island: SyntheticIsland
        self._node: SwarmNode

    # -- for the worker

    def start(self) -> dict[str, Any]:
        """Start the transport."""
        warm_up()
        self._runner.run(self._enter_transport())
        return {"peer": self._key.peer.hex(), "addresses": self._transport.listen_addresses()}

    async def _enter_transport(self) -> None:
        await self._services.enter_async_context(self._transport)

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Hold the same start and the same founding roster as all others, and have a link to each of them."""
        start = _start_of(self._plan)
        founding = self._founding(PeerId(bytes.fromhex(words[0]["peer"])), start)
        states = genesis_states(start, founding.roster)
        self._runner.run(self._assemble(founding, states))
        self._runner.run(self._link(words))

    def prepare(self, turn: int) -> None:
        """Go away from the anchor, as training would have done."""
        self._thread.wait_until_idle()
        self._island.walk(seed_of(self._place, turn))

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        """Begin the round of this turn at `at`, and go on until all its entries are in φ, m and θ, and on the disk."""
        trouble = self._runner.run(self._play(turn, at, TRIAL_LINGER_SECONDS if is_trial else LINGER_SECONDS))
        return {"applied_at": self._applied_at, "trouble": trouble}

    def settle(self, turn: int, at: float) -> dict[str, Any]:
        """Sit through a round without an exchange, so that contents are compared with others as after every start.

        A fragment that moves in every round cannot be compared: peers would hash all of it in vain, again and again.
        """
        return {"is_settled": self._runner.run(self._settle(turn, at))}

    def digest(self) -> str:
        """Return a hash of φ and m."""
        return state_digest(self._thread.states())

    def close(self) -> None:
        """End the transport with its daemon, and all threads."""
        self._runner.run(self._services.aclose())
        self._thread.stop()
        self._worker.close()
        self._writer.shutdown()
        self._runner.close()

    # -- putting it together

    def _founding(self, founder: PeerId, start: dict[SpanId, Any]) -> CertifiedRoster:
        """Return roster 0. All make the same one: the run is made for this bench, and all know its organiser's key."""
        organiser = SigningKey(bytes.fromhex(self._order["organiser"]))
        member = Member(peer=founder, incarnation=1, can_be_dialled=True)
        return found_roster(self._plan, member, organiser, genesis_digest(start), cycle=0)

    async def _assemble(self, founding: CertifiedRoster, states: dict[SpanId, SpanState]) -> None:
        """Put engine, island and node together; without states this peer has to fetch them."""
        plan, key = self._plan, self._key
        me = Self(peer=key.peer, incarnation=1, can_be_dialled=True, trains=True, sign=key.sign)
        heads = {span: state.head for span, state in states.items()}
        recalled = Recalled(rosters=(founding,), heads=heads or None)
        self._engine = PeerEngine(me=me, rules=plan.rules, verify=is_signed_by, recalled=recalled)
        # It need not compare its state with others before it takes part: all have just made the same one.
        self._engine.membership.ready = bool(states)
        self._island = SyntheticIsland(plan=plan, absorbed=self._note_absorbed)
        self._begin(states)
        self._thread = IslandThread(
            island=self._island, now=self._clock.now, in_loop=self._in_loop, died=self._failures.append
        )
        self._thread.stop_training()
        self._thread.start()
        self._node = self._make_node()

    def _begin(self, states: dict[SpanId, SpanState]) -> None:
        self._island.begin(states)

    def _make_node(self) -> SwarmNode:
        archive = Archive(
            self._memory.path,
            plan=self._plan,
            keep=KEEP_CHECKPOINTS,
            soon=lambda write: self._loop.run_in_executor(self._writer, write),
            hear=lambda topic, text: self._in_loop(lambda: self._listener.report(topic, text)),
        )
        return SwarmNode(
            engine=self._engine,
            transport=self._transport,
            replica=self._thread,
            codecs=self._plan.codecs,
            memory=self._memory,
            clock=self._clock,
            observer=self._listener,
            manifest=self._signed.encode(),
            worker=self._worker,
            archive=archive,
        )

    async def _link(self, words: list[dict[str, Any]]) -> None:
        """Dial those before this peer, and stay until those behind it have called."""
        deadline = self._loop.time() + LINK_SECONDS
        for other in words[: self._place]:
            await self._transport.dial(PeerId(bytes.fromhex(other["peer"])), other["addresses"], deadline)
        async with asyncio.timeout_at(deadline):
            while len(self._transport.linked_peers()) < self._num_peers - 1:  # noqa: ASYNC110  # a moment at the start
                await asyncio.sleep(LOOK_SECONDS)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # a thread may have something to say when the loop is closed already
            self._loop.call_soon_threadsafe(call)

    # -- a turn

    def _note_absorbed(self, at: float, is_in: bool) -> None:
        """Count an entry; called by the island's thread."""
        self._num_absorbed += 1
        self._is_in_all = self._is_in_all and is_in
        self._applied_at = at
        if self._num_absorbed == len(self._plan.places):
            self._in_loop(self._applied.set)

    async def _play(self, turn: int, at: float, linger_seconds: float) -> str:
        self._num_absorbed, self._is_in_all, self._applied_at = 0, True, at
        self._applied.clear()
        self._listener.sentences.clear()
        async with self._driven(turn, at) as driving:
            await self._wait_for_entries(driving, self._plan.rules.clock.round_seconds)
            # What is on its way to the disk belongs to the exchange too.
            await self._loop.run_in_executor(self._writer, lambda: None)
            trouble = self._trouble(turn)
            await asyncio.sleep(linger_seconds)
        return trouble

    async def _settle(self, turn: int, at: float) -> bool:
        scrub, give_up = self._engine.catch_up.scrub, at + SETTLE_SECONDS
        others = self._transport.linked_peers()
        async with self._driven(turn, at):
            while not scrub.is_verified(others) and time.monotonic() < give_up:  # noqa: ASYNC110  # not measured
                await asyncio.sleep(LOOK_SECONDS)
            await asyncio.sleep(TRIAL_LINGER_SECONDS)  # others ask this one
        return scrub.is_verified(others)

    @asynccontextmanager
    async def _driven(self, turn: int, at: float) -> AsyncIterator[asyncio.Future[None]]:
        """Have swarm time run from this turn's round on, and the node with it, while inside."""
        self._stage.set(self._plan.rules.clock.begin(turn), at)
        await asyncio.sleep(max(at - time.monotonic(), 0.0))
        driving = asyncio.ensure_future(self._node.run())
        try:
            yield driving
        finally:
            driving.cancel()
            await asyncio.wait({driving})

    async def _wait_for_entries(self, driving: asyncio.Future[None], seconds: float) -> None:
        applied = asyncio.ensure_future(self._applied.wait())
        try:
            waits: set[asyncio.Future[Any]] = {applied, driving}
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if driving.done():
                driving.result()
            for failure in self._failures:
                raise failure
        finally:
            applied.cancel()

    def _trouble(self, turn: int) -> str:
        """Say what is lacking for an exchange of all among all, or nothing."""
        num_spans = len(self._plan.places)
        governing = self._engine.book.governing(turn)
        members = governing[0].members if governing is not None else ()
        newcomers = newcomers_of(governing[0], self._engine.book.parent_of(governing[0])) if governing else ()
        if len(members) != self._num_peers or newcomers:
            return f"the roster lists {len(members)} of {self._num_peers} peers, {len(newcomers)} for the first time"
        if self._num_absorbed == num_spans and self._is_in_all:
            return ""
        said = " | ".join(self._listener.sentences) or "nothing"
        included = "all" if self._is_in_all else "not all"
        return f"{self._num_absorbed} of {num_spans} entries came, {included} with this peer; it said: {said}"


def _plan_of(order: Mapping[str, Any]) -> RunPlan:
    manifest = decode_signed_manifest(bytes.fromhex(order["manifest"])).manifest
    return plan_tensors(manifest, model_shape(manifest.model.size), tensors_of(int(order["parameters"])))


def _start_of(plan: RunPlan) -> dict[SpanId, Any]:
    """Return φ at the start, the same for all."""
    rng = np.random.Generator(np.random.Philox(key=0))
    return {
        span: np.float32(START_SCALE) * rng.standard_normal(place.stop - place.start, dtype=np.float32)
        for span, place in plan.places.items()
    }
