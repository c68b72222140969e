"""Complete sessions in one process and virtual time: real engines, models and files; a memory network, no threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from small_run import CLOCK_START, ORGANISER, peer_key, small_manifest, write_text

from p2p_diloco.app.models.archivist import Archivist
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.training import built_in
from p2p_diloco.app.training.built_in import BuiltInTraining
from p2p_diloco.app.training.training_thread import TrainingThread
from p2p_diloco.config.invite import Invite
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.ids import PeerId
from p2p_diloco.session import held_state, session
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.peer_plan import Clocks, Founding, PeerPlan
from p2p_diloco.session.session import PeerSession, SessionParts
from p2p_diloco.session.training import Training
from p2p_diloco.status.event_log import TOPICS, PeerEvent
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.storage.export_folder import ExportPlan
from p2p_diloco.storage.run_folder import RunFolder
from p2p_diloco.testing.network import MemoryDirectory
from simulator.faulty_network import FaultyNetwork
from simulator.virtual_time import AtOnce, VirtualTimeLoop

_T = TypeVar("_T")

STEP_SECONDS = 0.5


class LoopWorker(AtOnce):
    """A worker without a thread, so there is nothing to close."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "") -> None:
        pass

    def close(self) -> None:
        """Do nothing."""


class LoopTraining(TrainingThread):
    """Training whose steps are timers of the virtual loop instead of a thread."""

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_soon(self._reach_border)
        self.state.wake_with(lambda: None)

    def wait_until_idle(self) -> None:
        self.state.border()

    def join(self, timeout_seconds: float) -> bool:
        self.state.border()  # as the thread does, to finish pending work
        return super().join(timeout_seconds)

    def _reach_border(self) -> None:
        try:
            self.state.border()
            if self.may_step():
                assert self._step is not None
                self._step()
        except Exception as error:
            self.state.host.died(error)
            return
        if not self._stopping:
            self._timer = asyncio.get_running_loop().call_later(STEP_SECONDS, self._reach_border)


class InlineExecutor(Executor):
    """An executor that runs at once what a worker thread would run soon."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, function: Callable[..., _T], /, *arguments: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


class Watcher:
    """A `PeerObserver` that records everything."""

    def __init__(self) -> None:
        self.statuses: list[PeerStatus] = []
        self.events: list[PeerEvent] = []
        self.invites: list[str] = []
        self.own_models: list[bool] = []

    def listening(self, invite: str, *, own_model: bool) -> None:
        self.invites.append(invite)
        self.own_models.append(own_model)

    def status(self, status: PeerStatus) -> None:
        self.statuses.append(status)

    def event(self, event: PeerEvent) -> None:
        assert event.topic in TOPICS, f"explain {event.topic} in status/event_log.py"
        self.events.append(event)

    def texts(self, topic: str) -> list[str]:
        return [event.text for event in self.events if event.topic == topic]

    @property
    def last(self) -> PeerStatus:
        return self.statuses[-1]


class SessionStage:
    """A network on which sessions run; create it in the virtual loop."""

    def __init__(self, folder: Path, **values: Any) -> None:
        self.manifest = small_manifest(values)
        self.network = FaultyNetwork(seed=1, delay_seconds=(0.01, 0.05))
        self._directory = MemoryDirectory(self.now)
        self._folder = folder
        self.text = write_text(folder)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def begin(self, round_index: int) -> float:
        return CLOCK_START + round_index * self.manifest.rounds.round_seconds

    async def sleep_to(self, round_index: int, seconds: float = 0.0) -> None:
        """Sleep until some seconds of a round have passed."""
        await asyncio.sleep(max(self.begin(round_index) + seconds - self.now(), 0.0))

    def folder(self, name: str) -> Path:
        return self._folder / name

    def run_folder(self, name: str) -> RunFolder:
        return RunFolder(self.folder(name), self.manifest.digest())

    async def play(
        self,
        name: str,
        watcher: Watcher,
        stop: StopRequest,
        *,
        founds: bool = False,
        trains: bool = True,
        can_be_dialled: bool = True,
        until_round: int | None = None,
        evaluate_seconds: float = 0.0,
        data: str | None = None,
        known: dict[PeerId, tuple[str, ...]] | None = None,
        keep_trace: bool = False,
        batch: Literal["auto", "planned"] = "auto",
        exports: ExportPlan | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        """Run a peer until it ends."""
        run = self.manifest.digest()
        reporter = StatusReporter(observer=watcher, unix_seconds=self.now, steady=self.now)
        transport = self.network.transport(peer_key(name).peer, run=run, can_be_dialled=can_be_dialled)
        async with transport:
            signed = self.manifest.sign(ORGANISER)
            source: Founding | Invite = Invite(run=run, bootstraps=())
            if founds:
                source = Founding(signed=signed, organiser_key=ORGANISER, make_start=make_start)
            training: Training | None = Archivist(exports) if exports is not None else None
            if trains:
                training = BuiltInTraining(evaluate_seconds=evaluate_seconds)
            plan = PeerPlan(
                settings=PeerSettings(
                    state_directory=self.folder(name),
                    data=data or str(self.text),
                    device="cpu",
                    threads=1,
                    keep_trace=keep_trace,
                    batch=batch,
                ),
                source=source,
                training=training,
                until_round=until_round,
                clocks=clocks or Clocks(steady=self.now, wall=self.now),
            )
            parts = SessionParts(
                plan=plan,
                key=peer_key(name),
                verified=signed.verify(run),
                folder=self.run_folder(name),
                transport=transport,
                directory=self._directory,
                known=known or {},
            )
            await PeerSession(parts, reporter, stop).run()


def run_stage(monkeypatch: pytest.MonkeyPatch, scene: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a scene in virtual time that starts shortly before round 0."""
    with stage_runner(monkeypatch) as runner:
        return runner.run(scene())


def stage_runner(monkeypatch: pytest.MonkeyPatch) -> asyncio.Runner:
    """Return what runs scenes in virtual time and without threads, from shortly before round 0."""
    monkeypatch.setattr(built_in, "TrainingThread", LoopTraining)
    monkeypatch.setattr(session, "VectorWorker", LoopWorker)
    monkeypatch.setattr(held_state, "ThreadPoolExecutor", InlineExecutor)
    return asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(CLOCK_START - 4.0))
