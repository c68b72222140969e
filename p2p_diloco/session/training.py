"""The interface between a session and what its peer does with the run: it trains, exports, or only holds the state."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.ids import PeerId
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.session.held_state import HeldState, StateHost
from p2p_diloco.session.shared_text import SharedText
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.storage.archive import Archive


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """Loss on the held-out text, nats per token."""

    anchor: float
    local: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHost(StateHost):
    """The run, the peer and the callbacks that a training uses.

    Attributes:
        peer, incarnation: this peer and its start.
        settings: settings of this machine.
        folder: the run's folder on this machine.
        reporter: reports figures; for the loop.
        engine: the engine of this peer; for the loop.
        archive: checkpoints and entries on the disk.
        written: returns once all entries so far are on the disk.
        text: the run's text if it is fetched from other peers; None: the training opens its own copy.
    """

    peer: PeerId
    incarnation: int
    settings: PeerSettings
    folder: Path
    reporter: StatusReporter
    engine: PeerEngine
    archive: Archive
    written: Callable[[], Awaitable[object]]
    text: SharedText | None = None


class Pace:
    """Limits that the machine's owner sets on steps. Set in the event loop, read by the training thread.

    Attributes:
        is_paused: whether no steps may be made; θ still follows entries.
        duty: share of the time in which steps may use the device; None: all of it.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.duty: float | None = None

    def set_paused(self, is_paused: bool) -> None:
        """Make no steps while paused; a step in progress is finished."""
        self.is_paused = is_paused

    def set_duty(self, share: float | None) -> None:
        self.duty = share

    def rest_seconds(self, step_seconds: float) -> float:
        """Return the pause after a step that keeps to the share of the time."""
        return 0.0 if self.duty is None else step_seconds * (1.0 - self.duty) / self.duty


class Training(ABC):
    """The part of a peer in the run: it trains, exports, or only holds the state.

    A session calls these methods in the event loop unless noted otherwise.

    Attributes:
        trains: whether it makes steps.
        fewest_checkpoints: number of checkpoints that it needs on the disk.
        model: the user's own model; None: it is built from the manifest.
        state: state of the model, once it is open.
        owns_process: whether this peer may change process-wide settings such as the allocator.
        reads_text: whether it trains on the run's text; a user's own loop has its own data.
        checks_memory: whether `check` refuses a run that does not fit into memory.
        evaluate_seconds: seconds between measurements of the held-out loss; 0: never.
        pace: how the machine's owner limits steps.
    """

    trains = True
    fewest_checkpoints = 1
    model: nn.Module | None = None
    state: TrainedState | None = None
    owns_process = False
    reads_text = False
    checks_memory = False
    evaluate_seconds = 0.0

    def __init__(self) -> None:
        self.pace = Pace()
        self._continued_buffers: Mapping[str, Tensor] = {}

    def continue_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Begin with these buffers, by name, of the run that this peer founds a continuation of; call before `open`."""
        self._continued_buffers = buffers

    def check(self, settings: PeerSettings, manifest: RunManifest | None) -> None:
        """Check the requirements before anything is started; called in a thread that may block.

        A joining peer calls it twice: before it contacts anyone, and with the fetched manifest.

        Args:
            manifest: the manifest once it is known; verified unless this peer founds the run.
        Raises:
            ConfigError: a device or a text is missing, or the run trains another model.
        """

    @abstractmethod
    def open(self, host: TrainingHost) -> HeldState:
        """Create the state of the run at this peer; called in a thread that may block."""

    def parameters(self) -> LocalParameters | None:
        return self.state.local.parameters if self.state is not None else None

    def keep_inner(self) -> None:
        """Save optimiser state and the like at the next step border."""
        if self.state is not None:
            self.state.keep_inner()

    def start(self) -> None:
        """Start training as soon as all spans are loaded."""

    def is_stepping(self) -> bool:
        """Return whether steps are being made."""
        return True

    def stop_stepping(self) -> None:
        """Stop making steps, but keep applying entries to θ."""

    def wait_until_idle(self) -> None:
        """Wait until all submitted updates are applied; called in a thread that may block."""
        assert self.state is not None, "open it first"
        self.state.wait_until_idle()

    async def measure(self) -> HeldOutLoss | None:
        """Return the held-out loss of the current state, or None if it is not measured."""
        return None

    async def serve(self) -> None:
        """Run what goes on beside the steps, until cancelled."""

    async def finish(self, last_round: int) -> None:
        """Called after the last round, once all peers hold the same."""

    async def end(self) -> None:
        """Stop and clean up."""


class NoTraining(Training):
    """The part of a bootstrap peer, and of others that make no steps: it holds the state."""

    trains = False
    owns_process = True

    held: HeldState | None = None
    """The state from `open` to `end`: nothing of it stays in memory while a peer is offline."""

    def open(self, host: TrainingHost) -> HeldState:
        self.held = HeldState(host)
        return self.held

    def wait_until_idle(self) -> None:
        assert self.held is not None, "open it first"
        self.held.wait_until_idle()

    async def end(self) -> None:
        self.held = None


LOOK_SECONDS = 1.0


class Evaluations:
    """Measures the held-out loss now and then, and reports it.

    Args:
        measure: returns the losses of the current state, or None if they are not measured.
        is_whole: returns whether this peer holds all spans.
    """

    def __init__(
        self,
        measure: Callable[[], Awaitable[HeldOutLoss | None]],
        engine: PeerEngine,
        reporter: StatusReporter,
        *,
        now: Callable[[], float],
        is_whole: Callable[[], bool],
    ) -> None:
        self._measure = measure
        self._engine = engine
        self._reporter = reporter
        self._now = now
        self._is_whole = is_whole

    async def run(self, pause_seconds: float) -> None:
        """Measure until cancelled, with a pause after each measurement."""
        while True:
            has_measured = await self.measure()
            await asyncio.sleep(pause_seconds if has_measured else LOOK_SECONDS)

    async def measure(self) -> bool:
        """Measure once, unless this peer is paused or lacks spans; return whether it did."""
        engine = self._engine
        if not engine.serves_state or not self._is_whole() or engine.conditions.is_paused:
            return False
        measured = await self._measure()
        if measured is None:
            return False
        self._reporter.note(anchor_loss=measured.anchor, local_loss=measured.local)
        self._reporter.report(
            "evaluation",
            f"held-out loss {measured.anchor:.4f} (shared model), {measured.local:.4f} (own model)",
            anchor_loss=measured.anchor,
            local_loss=measured.local,
            round=engine.rules.clock.round_at(self._now()),
            tokens=engine.conditions.progress.tokens,
        )
        return True
