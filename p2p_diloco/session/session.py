"""A peer's session in a run, from the verified manifest to the final checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from p2p_diloco.bandwidth.forecast import STATE_BYTES_PER_ELEMENT
from p2p_diloco.bandwidth.uplink import UplinkWatch
from p2p_diloco.codec.vectors import Vector, why_no_loops
from p2p_diloco.config.manifest import VerifiedManifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.config.settings import PeerSettings, bytes_per_second
from p2p_diloco.errors import ConfigError, DaemonEnded, StateError
from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.memory.heap import trim_now_and_then
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.node import SwarmNode
from p2p_diloco.node.text_exchange import SharedCopy
from p2p_diloco.node.vector_actions import VectorWorker
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.local import LocalPeer
from p2p_diloco.protocol.membership.reach import Standing
from p2p_diloco.session.contact import Contact, NextStart
from p2p_diloco.session.ending import (
    StopRequest,
    first_error_alone,
    result_before,
    state_digest,
    wait_for_agreement,
    wait_for_first,
    wait_until_over,
)
from p2p_diloco.session.founding import found_roster, genesis_digest, genesis_states, start_from
from p2p_diloco.session.guest_watch import LEAVE_SECONDS, GuestWatch
from p2p_diloco.session.held_state import HeldState
from p2p_diloco.session.member_watch import MemberWatch
from p2p_diloco.session.peer_plan import PeerPlan
from p2p_diloco.session.shared_text import SharedText
from p2p_diloco.session.training import Evaluations, NoTraining, TrainingHost
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.span.known_answer import check_known_answer, warm_up
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.storage.archive import Archive, Saver, Saving, pause_between_checkpoints
from p2p_diloco.storage.run_folder import RunFolder, WatchedMemory
from p2p_diloco.storage.text_copy import OwnText, TextStore
from p2p_diloco.transport.directory import Directory
from p2p_diloco.transport.link import Transport, TransportListener

LEAVE_PAUSE_SECONDS = 0.05
MOST_WAITED = 0.4
"""Share of the time for leaving that a peer waits for the end of the round and for a roster without it."""
HOUSEKEEPING_SECONDS = 1.0
_LIVING = frozenset({"catching up", "training", "following", "serving", "not stepping", "paused"})
"""Phases between the start and the end of a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """The parts of a session.

    Attributes:
        start: initial φ to found the run from; cleared once it is no longer needed, since it is as large as the model.
        text: copy of the text, in a run that shares it.
        name: what the owner calls this peer.
    """

    plan: PeerPlan
    key: SigningKey
    verified: VerifiedManifest
    folder: RunFolder
    transport: Transport
    directory: Directory
    known: dict[PeerId, tuple[str, ...]]
    line: UplinkWatch | None = None
    guest: GuestWatch | None = None
    start: dict[SpanId, Vector] = field(default_factory=dict)
    records: tuple[bytes, ...] = ()
    has_met_somebody: bool = False
    text: OwnText | TextStore | None = None
    name: str = ""


class _Threads:
    """The threads of a session beside the training's, and how they reach the event loop.

    Attributes:
        vectors: works on vectors.
        text: works on the text that is shared; None: none is.
    """

    def __init__(self, *, shares_text: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="entries")
        self.vectors = VectorWorker(self._loop)
        self.text = VectorWorker(self._loop, "text") if shares_text else None

    def write_soon(self, write: Callable[[], None]) -> asyncio.Future[None]:
        return self._loop.run_in_executor(self._writer, write)

    def in_loop(self, call: Callable[[], None]) -> None:
        """Schedule a call in the loop; a thread may still call this after the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def fail(self, error: BaseException) -> None:
        """Let `raise_failure` raise this; only the first one counts."""
        if not self._failure.done():
            self._failure.set_exception(error)

    async def raise_failure(self) -> None:
        """Wait until a thread has failed, and raise its error."""
        await asyncio.shield(self._failure)  # several wait for it, one after the other

    def close(self) -> None:
        self.vectors.close()
        if self.text is not None:
            self.text.close()
        self._writer.shutdown(wait=False)


class PeerSession:
    """Connects engine, network and training, and runs them until the end."""

    def __init__(self, parts: SessionParts, reporter: StatusReporter, stop: StopRequest) -> None:
        plan, folder, transport = parts.plan, parts.folder, parts.transport
        self._parts = parts
        self._reporter = reporter
        self._stop = stop
        self._offline = asyncio.Event()
        self._threads = threads = _Threads(shares_text=parts.text is not None)
        self._run: RunPlan = plan_run(parts.verified.manifest)
        self._training = plan.training or NoTraining()
        self._clock = SwarmClock(plan.clocks.steady, wall=plan.clocks.wall, offset_seconds=folder.recall_clock_offset())
        self._engine = _engine_of(parts, self._run)
        transport.serve(is_needed=self._is_needed)
        self._contact = Contact(
            transport,
            parts.directory,
            self._engine,
            reporter,
            key=parts.key,
            now=self._clock.now,
            wall=plan.clocks.wall,
            known=parts.known,
            records=parts.records,
            has_met_somebody=parts.has_met_somebody,
            own_model=parts.verified.manifest.model.is_own_loop,
        )
        reporter.follow(self._engine, line=parts.line, failed_dials=self._contact.keeper.failures)
        reporter.note_reach(standing=Standing(is_reachable=False), ports=transport.listen_ports())
        self._archive = Archive(
            folder.path,
            plan=self._run,
            keep=_num_checkpoints(plan),
            soon=threads.write_soon,
            report=lambda topic, text: threads.in_loop(lambda: reporter.report(topic, text)),
        )
        folder.make_room_with(self._archive.make_room)
        self._saver = Saver(
            self._archive,
            states=self._all_states,
            is_ready=lambda: self._engine.ready,
            pause_seconds=pause_between_checkpoints(
                self._run.rules, _num_checkpoints(plan), archives=plan.keeps_state and not plan.trains
            ),
            saved=self._training.keep_inner,
            report=reporter.report,
        )
        self._evaluations = Evaluations(
            self._training.measure, self._engine, reporter, now=self._clock.now, is_whole=self._is_whole
        )
        self._next_start = NextStart(
            folder,
            soon=threads.write_soon,
            refused=lambda text: threads.in_loop(lambda: reporter.report("addresses", text)),
        )
        self._members = MemberWatch(
            folder.path,
            self._engine,
            soon=threads.write_soon,
            report=reporter.report,
            now=self._clock.now,
            wall=plan.clocks.wall,
        )
        self._state: HeldState | None = None
        self._node: SwarmNode | None = None

    async def run(self) -> bool:
        """Run this peer until it is asked to stop, until the last round, or until it goes offline.

        Returns:
            Whether it only went offline, and takes part again later.
        """
        plan = self._parts.plan
        if plan.settings.threads is not None:
            torch.set_num_threads(plan.settings.threads)
        self._threads.vectors.submit(self._report_loops, warm_up)
        self._threads.vectors.submit(self._check_answer, check_known_answer)
        if plan.until_round is not None:
            self._stop.end_after(plan.until_round)
        try:
            with first_error_alone():
                await self._live()
        except Exception:
            if isinstance(self._parts.transport.lost, DaemonEnded):
                if self._reporter.latest.phase == "finished":
                    return False
                await result_before(self._save_offline(), self._stop.wait_for_stop())
            raise
        finally:
            await self._close()
        return self._is_only_offline()

    async def _live(self) -> None:
        """Open the training, take up the state, run all services until the end, and leave.

        A service that fails during the leave does not keep this peer from saving what it has learnt.
        """
        self._state = await asyncio.to_thread(self._training.open, self._host())
        self._node = node = self._make_node(self._state)
        await self._take_up_state(node)
        if self._parts.guest is not None:
            self._parts.guest.attach(self)
        self._training.start()
        failure = self._threads.raise_failure
        async with self._serving(node) as serving:
            leave, offline = self._stop.wait_for_leave(), _is_set(self._offline)
            await wait_for_first(leave, offline, self._wait_for_last_round(), _end_of(serving), failure())
            on_request = self._stop.is_leaving or self._offline.is_set()
            self._reporter.note(phase="leaving")
            await wait_for_first(self._leave(node, on_request), self._stop.wait_for_stop(), failure())

    @contextlib.asynccontextmanager
    async def _serving(self, node: SwarmNode) -> AsyncIterator[asyncio.Task[None]]:
        """Run all services in the block; raise at its end what one of them has failed with."""
        task = asyncio.ensure_future(self._serve(node))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})
            error = None if task.cancelled() else task.exception()
            if error is not None:
                raise error

    async def _serve(self, node: SwarmNode) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, service in self._services(node):
                tasks.create_task(service, name=name)

    def _services(self, node: SwarmNode) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Yield what runs beside the training, with a name each; only a training without a service ends by itself."""
        yield "swarm", node.run()
        yield "links", self._contact.keeper.run()
        yield "reach", self._contact.reach.run()
        yield "housekeeping", self._keep_house(node)
        yield "checkpoints", self._saver.run()
        if node.text is not None:
            yield "text", node.text.run()
        if self._training.owns_process:
            yield "memory", trim_now_and_then()
        if self._training.evaluate_seconds > 0:
            yield "evaluation", self._evaluations.run(self._training.evaluate_seconds)
        yield "training", self._training.serve()

    async def _close(self) -> None:
        if self._parts.guest is not None:
            self._parts.guest.detach()
        self._parts.transport.serve(TransportListener())  # ignore what still arrives
        await self._members.save()
        self._threads.close()
        await self._training.end()
        if self._state is not None:
            self._state.close()

    # -- the parts

    def _host(self) -> TrainingHost:
        parts = self._parts
        return TrainingHost(
            plan=self._run,
            peer=parts.key.peer,
            incarnation=self._engine.me.incarnation,
            settings=parts.plan.settings,
            folder=parts.folder.path,
            now=self._clock.now,
            in_loop=self._threads.in_loop,
            died=self._threads.fail,
            damaged=self._span_damaged,
            report=self._reporter.report,
            reporter=self._reporter,
            engine=self._engine,
            archive=self._archive,
            written=lambda: self._threads.write_soon(lambda: None),
            text=self._fetched_text(),
        )

    def _make_node(self, state: HeldState) -> SwarmNode:
        parts, text = self._parts, None
        if parts.text is not None and self._threads.text is not None:
            text = SharedCopy(
                copy=parts.text, worker=self._threads.text, line=self._line_rate, failed=self._threads.fail
            )
        return SwarmNode(
            engine=self._engine,
            transport=parts.transport,
            replica=state,
            codecs=self._run.codecs,
            memory=WatchedMemory(parts.folder, self._threads.fail, soon=self._threads.write_soon),
            clock=self._clock,
            observer=self._reporter,
            manifest=parts.verified.encoded,
            worker=self._threads.vectors,
            addresses=self._contact.keeper,
            archive=self._archive,
            reach=self._contact.reach,
            text=text,
            clocks=self._contact.clocks,
        )

    def _is_needed(self, peer: PeerId) -> bool:
        return self._engine.book.in_force is not None and not self._engine.is_stranger(peer)

    def _fetched_text(self) -> SharedText | None:
        return SharedText(self._parts.text) if isinstance(self._parts.text, TextStore) else None

    def _line_rate(self) -> float | None:
        line, limits = self._parts.line, self._parts.transport.limits
        return line.upload_bytes_per_second() if line is not None else limits.upload_bytes_per_second

    def _held(self) -> HeldState:
        assert self._state is not None, "open the training first"
        return self._state

    def _all_states(self) -> Mapping[SpanId, SpanState] | None:
        """Return a live view of the spans, or None while one is missing."""
        states = self._held().moving_states()
        return states if len(states) == len(self._run.places) else None

    def _is_whole(self) -> bool:
        return self._all_states() is not None

    # -- failures

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
            self._threads.fail(error)

    def _span_damaged(self, span: SpanId, reason: str) -> None:
        assert self._node is not None, "entries come through the node"
        self._node.span_damaged(span, reason)

    # -- limits of the machine's owner: see `Guest`

    @property
    def checkpoint_bytes(self) -> int:
        return STATE_BYTES_PER_ELEMENT * sum(self._run.rules.span_elements.values())

    def set_paused(self, is_paused: bool) -> None:
        """Pause, or run again: paused, this peer follows the run, but trains, averages and serves nothing."""
        self._engine.set_conditions(replace(self._engine.conditions, is_paused=is_paused))
        self._training.pace.set_paused(is_paused)

    def apply_limits(self, settings: PeerSettings) -> None:
        up, down = bytes_per_second(settings.max_upload), bytes_per_second(settings.max_download)
        transport, line = self._parts.transport, self._parts.line
        if (transport.limits.upload_bytes_per_second, transport.limits.download_bytes_per_second) != (up, down):
            transport.set_caps(upload=up, download=down)
        for notice in line.follow(transport.limits) if line is not None else ():
            self._reporter.report(notice.topic, notice.text, **notice.figures)
        self._training.pace.set_duty(settings.gpu_duty)

    def limit_saving(self, saving: Saving) -> None:
        self._archive.limit_saving(saving)

    def go_offline(self) -> None:
        """Leave as on request; this session then ends."""
        self._offline.set()

    def publish(self) -> None:
        if self._node is not None:
            self._publish(self._node)

    # -- the state to begin with

    async def _take_up_state(self, node: SwarmNode) -> None:
        """Load the checkpoint and the entries on disk, or found the run, or start empty and fetch the state."""
        states = await asyncio.to_thread(self._archive.recall)
        in_force = self._engine.book.in_force  # others may have sent it meanwhile
        if states is not None:
            heads, credit = {span: state.head for span, state in states.items()}, self._engine.credit
            await asyncio.to_thread(credit.replay, heads, self._archive.entry_after, self._engine.book)
            self._hold(states)
        elif (founding := self._parts.plan.founding) is not None and (in_force is None or in_force.k == 0):
            await self._found(node, founding.organiser_key)
        self._parts.start.clear()
        plan = self._parts.plan
        self._reporter.note(phase="catching up" if plan.trains or plan.keeps_state else "serving")

    async def _found(self, node: SwarmNode, organiser: SigningKey) -> None:
        start = self._parts.start or await asyncio.to_thread(self._untrained)
        rosters = self._engine.book
        founding = rosters.chain()[0] if rosters.in_force is not None else None
        if founding is None:
            cycle = self._run.rules.clock.cycle(self._run.rules.clock.round_at(self._clock.now()))
            founding = found_roster(self._run, self._engine.me.member(), organiser, genesis_digest(start), cycle)
            alone = "; start further bootstraps with its invite (the run file would found another run)"
            manifest = self._parts.verified.manifest
            named = manifest.founder is not None
            self._reporter.report("founded", f'founded "{manifest.name}"{alone if named else ""}')
        elif await asyncio.to_thread(genesis_digest, start) != founding.roster.genesis:
            raise StateError(
                f"{self._parts.folder.path} holds the first roster of the run but no sound checkpoint, and the model "
                "to begin with is not the one that the run was founded with; restore a checkpoint or the first model, "
                "or found another run with another --state-directory"
            )
        self._hold(genesis_states(start, founding.roster))
        node.found(founding)

    def _untrained(self) -> dict[SpanId, Vector]:
        plan, parameters = self._parts.plan, self._training.parameters()
        if parameters is not None:
            return start_from(self._run, parameters)
        assert plan.founding is not None, "only a founder begins with an untrained model"
        if plan.founding.make_start is None:  # its start file is gone, and so are its checkpoints
            raise ConfigError("this founder has no model to begin with; restore a checkpoint, or give its start file")
        return plan.founding.make_start(self._run, plan.settings.model)

    def _hold(self, states: dict[SpanId, SpanState]) -> None:
        self._held().hold(states)
        self._engine.hold_state({span: state.head for span, state in states.items()})

    # -- housekeeping

    async def _keep_house(self, node: SwarmNode) -> None:
        """Do what is due once a second, and publish the status."""
        loop = asyncio.get_running_loop()
        while True:
            now = self._clock.now()
            self._drop_start_once_others_hold_it(now)
            self._contact.watch()
            for notice in self._parts.line.steer(self._engine, now) if self._parts.line is not None else ():
                self._reporter.report(notice.topic, notice.text, **notice.figures)
            self._publish(node)
            self._members.look(loop.time())
            self._next_start.keep(self._clock, self._contact.keeper.kept_addresses(), loop.time())
            await asyncio.sleep(HOUSEKEEPING_SECONDS)

    def _publish(self, node: SwarmNode) -> None:
        reporter, manifest = self._reporter, self._parts.verified.manifest
        # A further bootstrap peer introduces others, and never holds the state.
        only_serves = self._engine.book.in_force is not None and not self._engine.repair.follows
        if (self._engine.ready or only_serves) and reporter.latest.phase in _LIVING:
            reporter.note(phase=self._phase())
        reporter.note_reach(ports=self._parts.transport.listen_ports())
        reporter.note(addresses=self._contact.addresses())
        reporter.publish(self._engine, node, manifest, self._run.num_parameters, self._clock.now())

    def _phase(self) -> str:
        if self._engine.membership.local.conditions.is_paused:
            return "paused"
        if not self._parts.plan.trains:
            return "following" if self._parts.plan.keeps_state else "serving"
        return "training" if self._training.is_stepping() else "not stepping"

    def _drop_start_once_others_hold_it(self, now: float) -> None:
        if not self._parts.plan.trains and self._engine.holds_needlessly(now):
            self._held().drop()
            self._engine.drop_state()
            self._reporter.note(phase="serving")
            self._reporter.report("start", "other peers hold the state now and send it to new peers")

    # -- ending

    async def _wait_for_last_round(self) -> None:
        """Wait until the last round is over and all ready live peers have the same tips as this one."""
        last_round = await self._stop.wait_for_last_round()
        await wait_until_over(self._engine, self._clock.now, last_round)
        self._training.stop_stepping()
        if await wait_for_agreement(self._engine, self._clock.now):
            await self._training.finish(last_round)
        else:
            self._reporter.report("branch", f"some live peers have other bytes than this one after round {last_round}")

    def _longest_wait(self) -> float:
        """Return how long to wait for others while leaving, seconds; the rest of the time is for saving."""
        if self._stop.is_leaving:
            within = self._stop.within_seconds
        else:
            within = LEAVE_SECONDS if self._offline.is_set() else None
        return math.inf if within is None else MOST_WAITED * within

    async def _leave(self, node: SwarmNode, on_request: bool) -> None:
        """Finish the round, announce the leave, and save a checkpoint.

        Args:
            on_request: whether this peer was asked to leave, before the last round.
        """
        if on_request:
            node.leave()
            await self._wait_for_others(node)
        if self._parts.plan.keeps_state:
            await self._stop_training()
            if self._longest_wait() == math.inf:
                await self._evaluations.measure()
            if not self._is_only_offline():
                digest = await asyncio.to_thread(state_digest, self._held().states())
                self._reporter.note(state_digest=digest)
            await self._saver.save()
            if not on_request:
                node.leave()
        if self._is_only_offline():
            self._reporter.note(phase="paused")
            return
        self._reporter.note(phase="finished")
        self._publish(node)
        digest = self._reporter.latest.state_digest
        text = f"finished with state {digest[:16]}" if digest else "finished"
        self._reporter.report("finished", text, state_digest=digest)

    async def _wait_for_others(self, node: SwarmNode) -> None:
        """Wait until the round is over and others no longer need this peer, or until the time for that is over."""
        loop, clock, longest = asyncio.get_running_loop(), self._run.rules.clock, self._longest_wait()
        give_up_at = loop.time() + longest
        end_of_round = clock.begin(clock.round_at(self._clock.now()) + 1)
        await asyncio.sleep(min(max(end_of_round - self._clock.now(), 0.0), longest))
        while not node.may_go() and loop.time() < give_up_at:  # noqa: ASYNC110  # there is no event for votes
            await asyncio.sleep(LEAVE_PAUSE_SECONDS)

    async def _stop_training(self) -> None:
        self._training.stop_stepping()
        await asyncio.to_thread(self._training.wait_until_idle)
        progress = self._held().progress()  # with the steps since the last heartbeat
        self._engine.set_conditions(replace(self._engine.conditions, progress=progress))

    async def _save_offline(self) -> None:
        """Save what is learnt, without the others; also what a founder holds until others do."""
        if self._state is not None:
            await self._stop_training()
            await self._saver.save()

    def _is_only_offline(self) -> bool:
        return self._offline.is_set() and not self._stop.is_leaving


def _engine_of(parts: SessionParts, run: RunPlan) -> PeerEngine:
    me = LocalPeer(
        peer=parts.key.peer,
        incarnation=parts.folder.next_incarnation(),
        can_be_dialled=False,  # until other peers have proved it
        trains=parts.plan.trains,
        sign=parts.key.sign,
        archives=parts.plan.keeps_state and not parts.plan.trains,
        name=parts.name.encode("utf-8"),
    )
    engine = PeerEngine(me=me, rules=run.rules, verify=is_signed_by, recalled=parts.folder.recall())
    rate = parts.transport.limits.upload_bytes_per_second
    engine.set_conditions(replace(engine.conditions, upload_bytes_per_second=rate))
    return engine


def _num_checkpoints(plan: PeerPlan) -> int:
    keep = plan.settings.keep_checkpoints
    return max(keep, plan.training.fewest_checkpoints) if plan.training is not None else keep


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()


async def _end_of(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)
