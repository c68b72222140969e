"""Peer for benchmarks: the code of a real peer, with a swarm clock that runs only during turns.

Engine, node, island thread, archive, disk and transport with its daemon are those of a real peer. This peer has no
address directory, status file, checkpoints or evaluation. All code takes the clock as an argument, so time can stop
between turns and jump.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvloop

from p2p_diloco.app.cli.peer_process import wake_politely
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.training.training_thread import TrainingThread
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.node import SwarmNode
from p2p_diloco.node.vector_actions import VectorWorker
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.engine import PeerEngine, SavedState
from p2p_diloco.protocol.membership.local import LocalPeer
from p2p_diloco.protocol.round.round import newcomers_of
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE
from p2p_diloco.protocol.wire.member import NO_PLACE, Member, ReachProof
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster
from p2p_diloco.session.founding import found_roster, genesis_digest, genesis_states
from p2p_diloco.session.held_state import StateHost
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.span.known_answer import warm_up
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.storage.run_folder import RunFolder
from p2p_diloco.transport.libp2p import Libp2pTransport

LINK_SECONDS = 60.0
LOOK_SECONDS = 0.02
SETTLE_SECONDS = 5.0
SETTLE_LINGER_SECONDS = 1.0
KEEP_CHECKPOINTS = 3
HOME = "127.0.0.1"

STANDSTILL_SECONDS = 1e-3
"""Distance to the start of the next round at which swarm time stops when a turn is over."""

_Result = TypeVar("_Result")


class StageClock:
    """Swarm time that runs only during turns, from an agreed time of the monotonic clock until the end of the turn."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._at, self._until = seconds, time.monotonic(), float("inf")

    def set(self, seconds: float, at: float, until: float = float("inf")) -> None:
        """Set the clock to `seconds` when the monotonic clock shows `at`. It runs to `until` and stops there."""
        self._seconds, self._at, self._until = seconds, at, until

    def raw(self) -> float:
        """Return swarm seconds."""
        return self.bounded(self._seconds + time.monotonic() - self._at)

    def bounded(self, seconds: float) -> float:
        """Return `seconds`, or the time at which the clock stops if that is earlier."""
        return min(seconds, self._until)


class StagedSwarmClock(SwarmClock):
    """Swarm time as peers agree on it, but never past the end of a turn, whatever the offset to other peers."""

    def __init__(self, stage: StageClock) -> None:
        super().__init__(stage.raw)
        self._stage = stage

    def now(self) -> float:
        """Return swarm seconds."""
        return self._stage.bounded(super().now())


class Listener:
    """Observer that keeps the last event texts, to explain why an exchange was incomplete."""

    def __init__(self) -> None:
        self.sentences: deque[str] = deque(maxlen=4)

    def report(self, topic: str, text: str) -> None:
        """Store the text of an event."""
        self.sentences.append(text)

    def round_closed(self, closed: RoundClosed) -> None:
        """Ignore the result of a round."""


class StagedPeer(ABC):
    """One peer, whose event loop runs only inside `run`. A benchmark adds the commands and the training thread.

    Args:
        order: first message of the parent: the peer's place and folder, the signed manifest and the organiser's key,
            and the address to listen on if it is not this machine's. The run is made for the benchmark, so all peers
            know that key and found the run alike.
        plan: plan of the run.
    """

    def __init__(self, order: Mapping[str, Any], plan: RunPlan) -> None:
        wake_politely()  # as `p2p-diloco join` does
        torch.set_num_threads(1)
        folder = Path(order["folder"])
        self.plan = plan
        self.place = int(order["place"])
        self.failures: list[BaseException] = []
        self.listener = Listener()
        self.stage = StageClock(plan.rules.clock.begin(-1))
        self.clock = StagedSwarmClock(self.stage)
        self.key = load_or_create_identity(folder / "identity.key")
        self.engine: PeerEngine
        self.thread: TrainingThread
        self.organiser = SigningKey(bytes.fromhex(order["organiser"]))
        self._manifest = bytes.fromhex(order["manifest"])
        self._prover: SigningKey | None = None
        self._memory = RunFolder(folder, plan.rules.run)
        self._services = contextlib.AsyncExitStack()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="entries")
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._worker = VectorWorker(self._loop)
        self.node: SwarmNode
        self.transport = Libp2pTransport(
            peer=self.key.peer,
            run=plan.rules.run,
            identity_path=folder / "identity.key",
            host_maddrs=(f"/ip4/{order.get('address', HOME)}/tcp/0",),
        )

    # -- assembly

    def start(self) -> dict[str, Any]:
        """Start the transport. Return what other peers need, including the key, so that they can sign reach proofs."""
        warm_up()
        self.run(self._enter_transport())
        return {
            "peer": self.key.peer.hex(),
            "addresses": self.transport.listen_addresses(),
            "key": self.key.private_bytes().hex(),
            "pid": os.getpid(),
        }

    async def _enter_transport(self) -> None:
        await self._services.enter_async_context(self.transport)

    @abstractmethod
    def make_thread(self, states: dict[SpanId, SpanState]) -> TrainingThread:
        """Return the thread that owns θ, not started, with these states of the spans."""

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Create the same start and founding roster as all other peers, assemble this one, and connect to them.

        Args:
            words: what each peer returned from `start`, in order of places.
        """
        start = self.make_start()
        founding = self.found(words, genesis_digest(start))
        self.assemble(founding, genesis_states(start, founding.roster))
        self.link(words)

    def make_start(self) -> dict[SpanId, Vector]:
        """Return the initial φ, the same on all peers."""
        return make_start(self.plan)

    def found(self, words: list[dict[str, Any]], genesis: Digest) -> CertifiedRoster:
        """Return the founding roster, which lists the first peer."""
        founder = Member(peer=PeerId(bytes.fromhex(words[0]["peer"])), incarnation=1)
        return found_roster(self.plan, founder, self.organiser, genesis, cycle=0)

    def assemble(self, founding: CertifiedRoster, states: dict[SpanId, SpanState]) -> None:
        """Assemble engine, island and node; without states, this peer has to fetch them."""
        self.run(self._assemble(founding, states))

    async def _assemble(self, founding: CertifiedRoster, states: dict[SpanId, SpanState]) -> None:
        key, heads = self.key, {span: state.head for span, state in states.items()}
        me = LocalPeer(peer=key.peer, incarnation=1, can_be_dialled=True, trains=True, sign=key.sign)
        recalled = SavedState(rosters=(founding,), heads=heads or None)
        self.engine = PeerEngine(me=me, rules=self.plan.rules, verify=is_signed_by, recalled=recalled)
        # No need to compare states before taking part: all peers have just made the same one.
        self.engine.membership.local.set_ready(bool(states))
        self.thread = self.make_thread(states)
        self.thread.start()
        archive = Archive(
            self._memory.path,
            plan=self.plan,
            keep=KEEP_CHECKPOINTS,
            soon=lambda write: self._loop.run_in_executor(self._writer, write),
            report=lambda topic, text: self.in_loop(lambda: self.listener.report(topic, text)),
        )
        self.node = SwarmNode(
            engine=self.engine,
            transport=self.transport,
            replica=self.thread.state,
            codecs=self.plan.codecs,
            memory=self._memory,
            clock=self.clock,
            observer=self.listener,
            manifest=self._manifest,
            worker=self._worker,
            archive=archive,
        )

    def link(self, words: list[dict[str, Any]]) -> None:
        """Connect to all other peers."""
        if len(words) > 1:
            self._prover = SigningKey(bytes.fromhex(words[0 if self.place else 1]["key"]))
        self.run(self._link(words))

    async def _link(self, words: list[dict[str, Any]]) -> None:
        """Dial the peers with lower places, and wait until those with higher places have dialled this one."""
        deadline = self._loop.time() + LINK_SECONDS
        for other in words[: self.place]:
            await self.transport.dial(PeerId(bytes.fromhex(other["peer"])), other["addresses"], deadline)
        async with asyncio.timeout_at(deadline):
            while len(self.transport.linked_peers()) < len(words) - 1:  # noqa: ASYNC110  # a moment at the start
                await asyncio.sleep(LOOK_SECONDS)

    def in_loop(self, call: Callable[[], None]) -> None:
        """Schedule a call in the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # a thread may call this after the loop was closed
            self._loop.call_soon_threadsafe(call)

    def state_host(self) -> StateHost:
        """Return the host of this peer's state."""

        def damaged(span: SpanId, reason: str) -> None:
            self.failures.append(StateError(f"{span}: {reason}"))

        return StateHost(
            plan=self.plan, now=self.clock.now, in_loop=self.in_loop, died=self.failures.append, damaged=damaged
        )

    def close(self) -> None:
        """Stop the transport with its daemon, and all threads."""
        self.run(self._services.aclose())
        self.thread.stop()
        self.thread.state.close()
        self._worker.close()
        self._writer.shutdown()
        self._runner.close()

    # -- turns

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run the event loop until `work` is done."""
        return self._runner.run(work)

    @asynccontextmanager
    async def driven(self, round_index: int, at: float, num_rounds: int = 0) -> AsyncIterator[asyncio.Future[None]]:
        """Run swarm time, from the start of a round, and the node inside the block.

        Args:
            at: start of the round on the monotonic clock.
            num_rounds: number of rounds after which swarm time stops, just before the next; 0: it does not stop.
        """
        clock = self.plan.rules.clock
        until = clock.begin(round_index + num_rounds) - STANDSTILL_SECONDS if num_rounds else float("inf")
        self._prove(max(clock.cycle(round_index), 0))
        self.stage.set(clock.begin(round_index), at, until)
        await asyncio.sleep(max(at - time.monotonic(), 0.0))
        driving = asyncio.ensure_future(self.node.run())
        try:
            yield driving
        finally:
            driving.cancel()
            await asyncio.wait({driving})

    def _prove(self, cycle: int) -> None:
        """Sign a proof that this peer can be dialled: with the founder's key, for the founder with the next peer's."""
        if self._prover is not None:
            unsigned = ReachProof(prover=self._prover.peer, place=NO_PLACE, cycle=cycle, signature=NO_SIGNATURE)
            signature = self._prover.sign(unsigned.statement(self.plan.rules.run, self.key.peer))
            proofs = (replace(unsigned, signature=signature),)
            self.engine.set_conditions(replace(self.engine.conditions, proofs=proofs))

    async def compare_contents(self, round_index: int, at: float) -> bool:
        """Run a round without contributions, and return whether the content digests have been compared.

        Peers compare them after every start. A fragment that changes cannot be compared: peers would hash all of it
        repeatedly and in vain, and would still answer requests for digests during a measurement.
        """
        scrub, give_up = self.engine.catch_up.scrub, at + SETTLE_SECONDS
        others = self.transport.linked_peers()
        async with self.driven(round_index, at):
            while not scrub.is_verified(others) and time.monotonic() < give_up:  # noqa: ASYNC110  # not measured
                await asyncio.sleep(LOOK_SECONDS)
            await asyncio.sleep(SETTLE_LINGER_SECONDS)  # other peers still request digests from this one
            await self._wait_for_vectors()
        return scrub.is_verified(others)

    def check(self, driving: asyncio.Future[None]) -> None:
        """Raise the error of the node or the island's thread, if one failed."""
        if driving.done():
            driving.result()
        for failure in self.failures:
            raise failure

    async def _wait_for_vectors(self) -> None:
        """Wait until all submitted vector work is done."""
        done = asyncio.Event()
        self._worker.submit(lambda result, error: done.set(), lambda: None)
        await done.wait()

    async def wait_for_disk(self) -> None:
        """Wait until all pending writes are on disk."""
        await self._loop.run_in_executor(self._writer, lambda: None)

    def governing_roster(self, round_index: int) -> Roster | None:
        """Return the roster that governs a round, or None if there is none yet."""
        governing = self.engine.book.governing(round_index)
        return governing[0] if governing is not None else None

    def missing_members(self, round_index: int) -> str:
        """Return a text unless the roster that governs a round lists all linked peers as old members."""
        roster, num_peers = self.governing_roster(round_index), len(self.transport.linked_peers()) + 1
        if roster is None:
            return "there is no roster"
        clock, book = self.engine.rules.clock, self.engine.book
        first_cycle = clock.cycle(book.last_before(roster.digest()) + 1)
        newcomers = newcomers_of(roster, book.parent_of(roster), clock.cycle(round_index), first_cycle)
        if len(roster.members) == num_peers and not newcomers:
            return ""
        return f"the roster lists {len(roster.members)} of {num_peers} peers, {len(newcomers)} for the first time"
