"""A peer's session in a run, from the verified manifest to the final checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from p2p_diloco.bandwidth.forecast import STATE_BYTES_PER_ELEMENT
from p2p_diloco.bandwidth.line import LineWatch
from p2p_diloco.config.manifest import VerifiedManifest
from p2p_diloco.config.settings import PeerSettings, bytes_per_second
from p2p_diloco.errors import ConfigError, DaemonEnded, StateError
from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id
from p2p_diloco.kernels.choice import why_no_loops
from p2p_diloco.memory.heap import trim_now_and_then
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.clock_watch import ClockWatch
from p2p_diloco.node.link_keeper import LinkKeeper
from p2p_diloco.node.node import SwarmNode
from p2p_diloco.node.reach_keeper import ReachKeeper, announced
from p2p_diloco.node.text_exchange import SharedCopy
from p2p_diloco.node.vector_worker import VectorWorker
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.vector import Vector
from p2p_diloco.peer.archivist import FEWEST_CHECKPOINTS, Archivist, ArchivistParts
from p2p_diloco.peer.contact import Contact
from p2p_diloco.peer.founding import found_roster, genesis_digest, genesis_states, make_start
from p2p_diloco.peer.guest_watch import LEAVE_SECONDS, GuestWatch
from p2p_diloco.peer.held_state import HeldState
from p2p_diloco.peer.last_round import state_digest, wait_for_agreement, wait_until_over
from p2p_diloco.peer.peer_plan import PeerPlan
from p2p_diloco.peer.run_plan import RunPlan, plan_run
from p2p_diloco.peer.shared_text import SharedText
from p2p_diloco.peer.stop import StopRequest
from p2p_diloco.peer.training import NoTraining, TrainingHost
from p2p_diloco.peer.waiting import first_error, result_before, wait_for_first
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.attendance import LocalPeer
from p2p_diloco.protocol.membership.reach import Standing
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.span.known_answer import check_known_answer
from p2p_diloco.span.vector_work import warm_up
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.disk_rule import Saving
from p2p_diloco.storage.run_folder import RunFolder
from p2p_diloco.storage.saving import Saver, WatchedMemory, pause_between_checkpoints
from p2p_diloco.storage.text_copy import OwnText, TextStore
from p2p_diloco.transport.addresses import without_loopback
from p2p_diloco.transport.directory import Directory, PeerRecord, PeerRole, sign_record
from p2p_diloco.transport.link import SilentListener, Transport
from p2p_diloco.transport.reach_probe import is_own_host

LEAVE_PAUSE_SECONDS = 0.05
MOST_WAITED = 0.4
"""Share of the time for leaving that a peer waits for the end of the round and for a roster without it."""
HOUSEKEEPING_SECONDS = 1.0
_LIVING = frozenset({"catching up", "training", "following", "serving", "not stepping", "paused"})
"""Phases between the start and the end of a peer."""
KEPT_OFFSET_SECONDS, KEEP_CLOCK_SECONDS = 0.05, 10.0
"""Write the offset between swarm time and wall clock after a change of this much, and at most this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """The parts of a session.

    Attributes:
        start: initial φ to found the run from; cleared once it is no longer needed, since it is as large as the model.
        text: copy of the text, in a run that shares it.
    """

    plan: PeerPlan
    key: SigningKey
    verified: VerifiedManifest
    folder: RunFolder
    transport: Transport
    directory: Directory
    known: dict[PeerId, tuple[str, ...]]
    line: LineWatch | None = None
    guest: GuestWatch | None = None
    start: dict[SpanId, Vector] = field(default_factory=dict)
    records: tuple[bytes, ...] = ()
    has_met_somebody: bool = False
    text: OwnText | TextStore | None = None


class PeerSession:
    """Connects engine, network and training, and runs them until the end."""

    def __init__(self, parts: SessionParts, reporter: StatusReporter, stop: StopRequest) -> None:
        self._parts = parts
        self._reporter = reporter
        self._stop = stop
        self._plan: RunPlan = plan_run(parts.verified.manifest)
        self._training = parts.plan.training or NoTraining()
        offset = parts.folder.recall_clock_offset()
        self._clock = SwarmClock(parts.plan.clocks.steady, wall=parts.plan.clocks.wall, offset_seconds=offset)
        self._wall_clocks = ClockWatch(parts.key.peer)
        self._engine = self._make_engine()
        self._keeper = LinkKeeper(
            transport=parts.transport,
            directory=parts.directory,
            record=self._record,
            known=parts.known,
            unix_seconds=self._unix_seconds,
            report=reporter.report,
            wanted=self._engine.wanted_links,
            is_stranger=self._engine.is_unknown,
        )
        parts.transport.is_needed = self._is_needed
        self._reach = ReachKeeper(
            transport=parts.transport,
            engine=self._engine,
            is_own_host=is_own_host,
            now=self._clock.now,
            verify=is_signed_by,
            on_change=self._on_reach_changed,
        )
        self._keeper.introduced(parts.records)
        self._contact = Contact(
            parts.transport,
            self._keeper,
            self._engine,
            reporter,
            known=parts.known,
            has_met_somebody=parts.has_met_somebody,
            own_model=parts.verified.manifest.model.is_own_loop,
            has_seen_outsiders=lambda: self._reach.has_seen_outsiders,
        )
        reporter.follow(self._engine, line=parts.line, failed_dials=self._keeper.failures)
        reporter.note(ports=parts.transport.listen_ports())
        self._worker = VectorWorker(asyncio.get_running_loop())
        self._text_worker = VectorWorker(asyncio.get_running_loop(), "text") if parts.text is not None else None
        self._failure: asyncio.Future[None] | None = None
        self._state: HeldState | None = None
        self._node: SwarmNode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="entries")
        self._offline = asyncio.Event()
        self._archive = self._make_archive()
        self._saver = Saver(
            self._archive,
            states=self._all_states,
            is_ready=lambda: self._engine.ready,
            pause_seconds=pause_between_checkpoints(
                self._plan.rules, self._num_checkpoints(), archives=parts.plan.exports is not None
            ),
            saved=self._training.keep_inner,
            report=reporter.report,
        )
        self._archivist = self._make_archivist()
        self._next_start = NextStart(parts.folder, soon=self._write_soon, refused=self._report_addresses)

    def _is_needed(self, peer: PeerId) -> bool:
        return self._engine.book.in_force is not None and not self._engine.is_stranger(peer)

    def _make_archive(self) -> Archive:
        archive = Archive(
            self._parts.folder.path,
            plan=self._plan,
            keep=self._num_checkpoints(),
            soon=self._write_soon,
            report=lambda topic, text: self._in_loop(lambda: self._reporter.report(topic, text)),
        )
        self._parts.folder.make_room = archive.make_room
        return archive

    def _num_checkpoints(self) -> int:
        keep = self._parts.plan.settings.keep_checkpoints
        return max(keep, FEWEST_CHECKPOINTS) if self._parts.plan.exports is not None else keep

    def _make_archivist(self) -> Archivist | None:
        parts = self._parts
        if parts.plan.exports is None:
            return None
        return Archivist(
            ArchivistParts(
                exports=parts.plan.exports,
                plan=self._plan,
                settings=parts.plan.settings,
                folder=parts.folder.path,
                me=parts.key.peer,
                engine=self._engine,
                archive=self._archive,
                now=self._clock.now,
                tips=self._tips,
                written=lambda: asyncio.get_running_loop().run_in_executor(self._writer, lambda: None),
                reporter=self._reporter,
                text=self._fetched_text(),
            )
        )

    def _tips(self) -> Mapping[SpanId, Digest] | None:
        states = self._all_states()
        return {span: state.head.digest for span, state in states.items()} if states is not None else None

    def _fetched_text(self) -> SharedText | None:
        return SharedText(self._parts.text) if isinstance(self._parts.text, TextStore) else None

    def _write_soon(self, write: Callable[[], None]) -> object:
        return asyncio.get_running_loop().run_in_executor(self._writer, write)

    def _make_engine(self) -> PeerEngine:
        folder, key = self._parts.folder, self._parts.key
        me = LocalPeer(
            peer=key.peer,
            incarnation=folder.next_incarnation(),
            can_be_dialled=False,  # until other peers have proved it
            trains=self._parts.plan.trains,
            sign=key.sign,
            archives=self._parts.plan.exports is not None,
        )
        recalled = folder.recall()
        engine = PeerEngine(me=me, rules=self._plan.rules, verify=is_signed_by, recalled=recalled)
        engine.exchange.upload_budget.bytes_per_second = self._parts.transport.limits.upload_bytes_per_second
        return engine

    async def run(self) -> bool:
        """Run this peer until it is asked to stop, until the last round, or until it goes offline.

        Returns:
            Whether it only went offline, and takes part again later.
        """
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        plan = self._parts.plan
        if plan.settings.threads is not None:
            torch.set_num_threads(plan.settings.threads)
        self._worker.submit(self._report_loops, warm_up)
        self._worker.submit(self._check_answer, check_known_answer)
        if plan.until_round is not None:
            self._stop.end_after(plan.until_round)
        try:
            self._state = await asyncio.to_thread(self._training.open, self._host())
            node = self._node = self._make_node()
            await self._take_up_state(node)
            if self._parts.guest is not None:
                self._parts.guest.attach(self)
            self._training.start()
            await self._live(node)
        except Exception:
            if isinstance(self._parts.transport.lost, DaemonEnded):
                if self._reporter.facts.phase == "finished":
                    return False
                await result_before(self._save_offline(), self._stop.wait_for_stop())
            raise
        finally:
            if self._parts.guest is not None:
                self._parts.guest.detach()
            self._parts.transport.listener = SilentListener()  # ignore what still arrives
            self._worker.close()
            if self._text_worker is not None:
                self._text_worker.close()
            self._writer.shutdown(wait=False)
            await self._training.end()
            if self._state is not None:
                self._state.close()
        return self._is_only_offline()

    async def _save_offline(self) -> None:
        """Save what is learnt, without the others; also what a founder holds until others do."""
        if self._state is not None:
            self._training.stop_stepping()
            await asyncio.to_thread(self._training.wait_until_idle)
            self._engine.progress = self._held().progress()
            await self._saver.save()

    def _is_only_offline(self) -> bool:
        return self._offline.is_set() and not self._stop.is_leaving

    def _host(self) -> TrainingHost:
        parts = self._parts
        return TrainingHost(
            plan=self._plan,
            run=parts.verified.run,
            peer=parts.key.peer,
            incarnation=self._engine.me.incarnation,
            settings=parts.plan.settings,
            folder=parts.folder.path,
            now=self._clock.now,
            in_loop=self._in_loop,
            died=self._fail,
            damaged=self._span_damaged,
            report=self._reporter.report,
            text=self._fetched_text(),
        )

    def _held(self) -> HeldState:
        assert self._state is not None, "open the training first"
        return self._state

    def _report_addresses(self, sentence: str) -> None:
        self._in_loop(partial(self._reporter.report, "addresses", sentence))

    def _in_loop(self, call: Callable[[], None]) -> None:
        """Schedule a call in the loop; a thread may still call this after the loop is closed."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def _report_loops(self, result: object, error: BaseException | None) -> None:
        """Report that loops could not be compiled; without them the peer is slower, but computes the same bytes."""
        if reason := why_no_loops():
            self._reporter.report(
                "loops",
                f"numba's compiled loops are not available here ({reason}); using NumPy instead, with the same bytes "
                "and about three times the processor time",
            )

    def _check_answer(self, result: object, error: BaseException | None) -> None:
        """Fail if this machine computes other bytes than the known answer."""
        if isinstance(error, ConfigError):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _span_damaged(self, span: SpanId, reason: str) -> None:
        assert self._node is not None, "entries come through the node"
        self._node.span_damaged(span, reason)

    def _make_node(self) -> SwarmNode:
        return SwarmNode(
            engine=self._engine,
            transport=self._parts.transport,
            replica=self._held(),
            codecs=self._plan.codecs,
            memory=WatchedMemory(self._parts.folder, self._fail, soon=self._write_soon),
            clock=self._clock,
            observer=self._reporter,
            manifest=self._parts.verified.encoded,
            worker=self._worker,
            addresses=self._keeper,
            archive=self._archive,
            reach=self._reach,
            text=self._shared_copy(),
            clocks=self._wall_clocks,
        )

    def _shared_copy(self) -> SharedCopy | None:
        parts, worker = self._parts, self._text_worker
        if parts.text is None or worker is None:
            return None
        return SharedCopy(copy=parts.text, worker=worker, line=self._line_rate, failed=self._fail)

    def _line_rate(self) -> float | None:
        line, limits = self._parts.line, self._parts.transport.limits
        return line.upload_bytes_per_second() if line is not None else limits.upload_bytes_per_second

    # -- limits of the machine's owner

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint."""
        return STATE_BYTES_PER_ELEMENT * sum(self._plan.rules.span_elements.values())

    def set_paused(self, is_paused: bool) -> None:
        """Pause, or run again: paused, this peer follows the run, but trains, averages and serves nothing."""
        self._engine.membership.is_paused = is_paused
        self._training.set_paused(is_paused)

    def apply_limits(self, settings: PeerSettings) -> None:
        """Take over changed caps, and the share of the device."""
        up, down = bytes_per_second(settings.max_upload), bytes_per_second(settings.max_download)
        transport, line = self._parts.transport, self._parts.line
        if (transport.limits.upload_bytes_per_second, transport.limits.download_bytes_per_second) != (up, down):
            transport.set_caps(upload=up, download=down)
        for notice in line.follow(transport.limits) if line is not None else ():
            self._reporter.report(notice.topic, notice.text, **notice.figures)
        self._training.set_duty(settings.gpu_duty)

    def limit_saving(self, saving: Saving) -> None:
        """Write less to the disk, or all again."""
        self._archive.limit_saving(saving)

    def go_offline(self) -> None:
        """Leave as on request; this session then ends."""
        self._offline.set()

    def publish(self) -> None:
        """Publish the status now."""
        if self._node is not None:
            self._publish(self._node, self._clock.now())

    # -- the state to begin with

    async def _take_up_state(self, node: SwarmNode) -> None:
        """Load the checkpoint and the entries on disk, or found the run, or start empty and fetch the state."""
        rosters = self._engine.book
        states = await asyncio.to_thread(self._archive.recall)
        if states is not None:
            self._hold(states)
        elif (founding := self._parts.plan.founding) is not None and (
            rosters.in_force is None or rosters.in_force.k == 0
        ):
            await self._found(node, founding.organiser_key)
        self._parts.start.clear()
        self._reporter.note(phase="catching up")

    async def _found(self, node: SwarmNode, organiser: SigningKey) -> None:
        untrained = self._training.parameters()
        own = self._parts.plan.settings.model
        start = self._parts.start or await asyncio.to_thread(make_start, self._plan, untrained, own)
        rosters = self._engine.book
        founding = rosters.chain()[0] if rosters.in_force is not None else None
        if founding is None:
            cycle = self._plan.rules.clock.cycle(self._plan.rules.clock.round_at(self._clock.now()))
            founding = found_roster(self._plan, self._engine.me.member(), organiser, genesis_digest(start), cycle)
            alone = "; start further bootstraps with its invite (the run file would found another run)"
            manifest = self._parts.verified.manifest
            named = manifest.founder is not None
            self._reporter.report("founded", f'founded "{manifest.name}"{alone if named else ""}')
        self._hold(genesis_states(start, founding.roster))
        node.found(founding)

    def _hold(self, states: dict[SpanId, SpanState]) -> None:
        self._held().hold(states)
        self._engine.hold_state({span: state.head for span, state in states.items()})

    # -- running

    async def _live(self, node: SwarmNode) -> None:
        async with self._services(node) as services:
            end = asyncio.ensure_future(self._wait_for_end())
            try:
                await asyncio.wait({end, services, self._failed()}, return_when=asyncio.FIRST_COMPLETED)
                if services.done():
                    await services
                if self._failed().done():
                    self._failed().result()
                end.result()
                await self._end(node)
            finally:
                end.cancel()

    async def _wait_for_end(self) -> None:
        offline = self._wait_for_offline()
        await wait_for_first(self._stop.wait_for_leave(), offline, self._wait_for_last_round())

    async def _wait_for_offline(self) -> None:
        await self._offline.wait()

    def _failed(self) -> asyncio.Future[None]:
        assert self._failure is not None
        return self._failure

    @asynccontextmanager
    async def _services(self, node: SwarmNode) -> AsyncIterator[asyncio.Task[None]]:
        """Run node, links, status, memory, evaluation and checkpoints; the task ends only if one of them fails."""
        task = asyncio.ensure_future(self._serve(node))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})
            failure = None if task.cancelled() else task.exception()
            if failure is not None:
                raise first_error(failure)

    async def _serve(self, node: SwarmNode) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run(), name="swarm")
            tasks.create_task(self._keeper.run(), name="links")
            tasks.create_task(self._reach.run(), name="reach")
            tasks.create_task(self._keep_house(node), name="housekeeping")
            if node.text is not None:
                tasks.create_task(node.text.run(), name="text")
            if self._training.owns_process:
                tasks.create_task(trim_now_and_then(), name="memory")
            if self._training.evaluate_seconds > 0:
                tasks.create_task(self._evaluate(), name="evaluation")
            tasks.create_task(self._saver.run(), name="checkpoints")
            if self._archivist is not None:
                tasks.create_task(self._archivist.run(), name="exports")

    def _addresses(self) -> tuple[str, ...]:
        """Return the addresses to announce: proved ones first, loopback only if there is nothing else."""
        listening = without_loopback(self._parts.transport.listen_addresses())
        return announced(self._reach.addresses, listening, f"/p2p/{format_peer_id(self._parts.key.peer)}")

    def _on_reach_changed(self, standing: Standing) -> None:
        self._reporter.report_reach(standing, self._parts.transport.listen_ports(), trains=self._parts.plan.trains)
        self._keeper.announce_again()

    def _record(self) -> PeerRecord:
        return sign_record(
            self._parts.key,
            run=self._parts.verified.run,
            addresses=self._addresses(),
            can_be_dialled=self._reach.standing.is_reachable,
            role=PeerRole.TRAINER if self._parts.plan.trains else PeerRole.BOOTSTRAP,
            issued_at=self._unix_seconds(),
        )

    def _unix_seconds(self) -> float:
        """Return the time to compare with others' records: this machine's, corrected if most others' differs."""
        return self._parts.plan.clocks.wall() + self._wall_clocks.correction_seconds

    async def _keep_house(self, node: SwarmNode) -> None:
        """Do what is due once a second, and publish the status."""
        moment = asyncio.get_running_loop().time
        while True:
            now = self._clock.now()
            self._drop_start_once_others_hold_it(now)
            self._contact.watch()
            self._follow_line(now)
            self._publish(node, now)
            self._next_start.keep(self._clock, self._keeper.kept_addresses(), moment())
            await asyncio.sleep(HOUSEKEEPING_SECONDS)

    def _follow_line(self, now: float) -> None:
        """Fit the upload budget and this peer's share of the averaging to its line."""
        if self._parts.line is not None:
            for notice in self._parts.line.steer(self._engine, now):
                self._reporter.report(notice.topic, notice.text, **notice.figures)

    def _publish(self, node: SwarmNode, now: float) -> None:
        reporter, manifest = self._reporter, self._parts.verified.manifest
        if (self._engine.ready or self._only_serves()) and reporter.facts.phase in _LIVING:
            reporter.note(phase=self._phase())
        reporter.note(addresses=self._addresses(), ports=self._parts.transport.listen_ports())
        reporter.publish(self._engine, node, manifest, self._plan.num_parameters, now)

    def _phase(self) -> str:
        if self._engine.membership.is_paused:
            return "paused"
        if self._archivist is not None:
            return "following"
        if not self._parts.plan.trains:
            return "serving"
        return "training" if self._training.is_stepping() else "not stepping"

    def _only_serves(self) -> bool:
        """Return whether this is a further bootstrap peer, which introduces others and never holds the state."""
        return self._engine.book.in_force is not None and not self._engine.repair.follows

    def _drop_start_once_others_hold_it(self, now: float) -> None:
        if not self._parts.plan.trains and self._engine.holds_needlessly(now):
            self._held().drop()
            self._engine.drop_state()
            self._reporter.note(phase="serving")
            self._reporter.report("start", "other peers hold the state now and send it to new peers")

    async def _evaluate(self) -> None:
        while True:
            has_measured = await self._evaluate_once()
            await asyncio.sleep(self._training.evaluate_seconds if has_measured else HOUSEKEEPING_SECONDS)

    async def _evaluate_once(self) -> bool:
        if not self._engine.serves_state or self._all_states() is None or self._engine.membership.is_paused:
            return False
        measured = await self._training.measure()
        if measured is None:
            return False
        self._reporter.note(anchor_loss=measured.anchor, local_loss=measured.local)
        self._reporter.report(
            "evaluation",
            f"held-out loss {measured.anchor:.4f} (shared model), {measured.local:.4f} (own model)",
            anchor_loss=measured.anchor,
            local_loss=measured.local,
            round=self._engine.rules.clock.round_at(self._clock.now()),
            tokens=self._engine.progress.tokens,
        )
        return True

    def _all_states(self) -> Mapping[SpanId, SpanState] | None:
        """Return a live view of the spans, or None while one is missing."""
        states = self._held().moving_states()
        return states if len(states) == len(self._plan.places) else None

    # -- ending

    async def _wait_for_last_round(self) -> None:
        """Wait until the last round is over and all ready live peers have the same tips as this one."""
        last_round = await self._stop.wait_for_last_round()
        await wait_until_over(self._engine, self._clock.now, last_round)
        self._training.stop_stepping()
        if await wait_for_agreement(self._engine, self._clock.now):
            if self._archivist is not None:
                await self._archivist.finish(last_round)
        else:
            self._reporter.report("branch", f"some live peers have other bytes than this one after round {last_round}")

    async def _end(self, node: SwarmNode) -> None:
        """Finish the round, announce the leave, save a checkpoint; return early if asked to stop at once."""
        told = self._stop.is_leaving or self._offline.is_set()
        self._reporter.note(phase="leaving")
        work = asyncio.ensure_future(self._finish(node, told))
        hurry = asyncio.ensure_future(self._stop.wait_for_stop())
        try:
            await asyncio.wait({work, hurry, self._failed()}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed().done():
                self._failed().result()
            if work.done():
                work.result()
        finally:
            work.cancel()
            hurry.cancel()

    def _longest_wait(self) -> float:
        """Return how long to wait for others while leaving, seconds; the rest of the time is for saving."""
        if self._stop.is_leaving:
            within = self._stop.within_seconds
        else:
            within = LEAVE_SECONDS if self._offline.is_set() else None
        return math.inf if within is None else MOST_WAITED * within

    async def _finish(self, node: SwarmNode, told: bool) -> None:
        clock = self._plan.rules.clock
        if told:
            node.leave()
            moment = asyncio.get_running_loop().time
            give_up_at = moment() + self._longest_wait()
            end_of_round = clock.begin(clock.round_at(self._clock.now()) + 1)
            await asyncio.sleep(min(max(end_of_round - self._clock.now(), 0.0), self._longest_wait()))
            while not node.may_go() and moment() < give_up_at:  # noqa: ASYNC110  # there is no event for votes
                await asyncio.sleep(LEAVE_PAUSE_SECONDS)
        if self._parts.plan.keeps_state:
            self._training.stop_stepping()
            await asyncio.to_thread(self._training.wait_until_idle)
            self._engine.progress = self._held().progress()  # with the steps since the last heartbeat
            if self._longest_wait() == math.inf:
                await self._evaluate_once()
            digest = await asyncio.to_thread(state_digest, self._held().states())
            self._reporter.note(state_digest=digest)
            await self._saver.save()
            if not told:
                node.leave()
        if self._is_only_offline():
            self._reporter.note(phase="paused")
            return
        self._reporter.note(phase="finished")
        self._publish(node, self._clock.now())
        digest = self._reporter.facts.state_digest
        text = f"finished with state {digest[:16]}" if digest else "finished"
        self._reporter.report("finished", text, state_digest=digest)


class NextStart:
    """Saves what the next start of a peer needs: the clock offset, and the addresses at which other peers were reached.

    It writes changed values in a separate thread.

    Args:
        soon: runs a call in that thread.
        refused: called there with a sentence if the addresses cannot be written; the peer continues.
    """

    def __init__(
        self, folder: RunFolder, *, soon: Callable[[Callable[[], None]], object], refused: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._soon = soon
        self._refused = refused
        self._offset, self._offset_at = folder.recall_clock_offset(), float("-inf")
        self._addresses: dict[PeerId, tuple[str, ...]] = {}

    def keep(self, clock: SwarmClock, addresses: dict[PeerId, tuple[str, ...]], moment: float) -> None:
        """Save both if they have changed; call this about once a second.

        Args:
            addresses: addresses by peer, the best first.
            moment: seconds of any monotonic clock.
        """
        offset = clock.wall_offset_seconds
        has_moved = abs(offset - self._offset) > KEPT_OFFSET_SECONDS
        if clock.is_settled and has_moved and moment - self._offset_at >= KEEP_CLOCK_SECONDS:
            self._offset, self._offset_at = offset, moment
            self._soon(partial(self._folder.keep_clock_offset, offset))
        if list(addresses.items()) != list(self._addresses.items()):
            self._addresses = addresses
            self._soon(partial(self._keep_addresses, addresses))

    def _keep_addresses(self, known: dict[PeerId, tuple[str, ...]]) -> None:
        try:
            self._folder.keep_addresses(known)
        except StateError as error:
            self._refused(str(error))
