"""The interface between a session and the training that runs at its peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.node.surroundings import SpanDamaged
from p2p_diloco.peer.evaluation import HeldOutLoss
from p2p_diloco.peer.held_state import HeldState
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.peer.run_text import SharedText
from p2p_diloco.peer.trained_state import TrainedState
from p2p_diloco.training.parameters import LocalParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHost:
    """The run, the peer and the callbacks that a training uses.

    Attributes:
        plan: plan of the run.
        run: run id.
        peer, incarnation: this peer and its start.
        settings: settings of this machine.
        folder: the run's folder on this machine.
        now: returns swarm seconds; callable from any thread.
        in_loop: schedules a call in the event loop.
        died: called in the loop if training ends with an error.
        damaged: called in the loop with a span that must be replaced.
        report: called in the loop with `(topic, text)` to report something, such as a failed save.
        text: the run's text if it is fetched from other peers; None: the training opens its own copy.
    """

    plan: RunPlan
    run: Digest
    peer: PeerId
    incarnation: int
    settings: PeerSettings
    folder: Path
    now: Callable[[], float]
    in_loop: Callable[[Callable[[], None]], None]
    died: Callable[[BaseException], None]
    damaged: SpanDamaged
    report: Callable[[str, str], None]
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
    """Trains a model at a peer. A session calls these methods in the event loop unless noted otherwise.

    Attributes:
        model: the user's own model; None: it is built from the manifest.
        state: state of the model, once it is open.
        owns_process: whether this peer may change process-wide settings such as the allocator.
        reads_text: whether it trains on the run's text; a user's own loop has its own data.
        evaluate_seconds: seconds between measurements of the held-out loss; 0: never.
        pace: how the machine's owner limits steps.
    """

    model: nn.Module | None = None
    state: TrainedState | None = None
    owns_process = False
    reads_text = False
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
        """Return θ, if there is a model."""
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

    async def end(self) -> None:
        """Stop and clean up."""


class NoTraining(Training):
    """The training of a bootstrap peer or an archivist: it holds the state, and trains nothing."""

    owns_process = True

    def __init__(self) -> None:
        super().__init__()
        self._held: HeldState | None = None

    def open(self, host: TrainingHost) -> HeldState:
        self._held = HeldState(host.plan, in_loop=host.in_loop, died=host.died, damaged=host.damaged)
        return self._held

    def wait_until_idle(self) -> None:
        assert self._held is not None, "open it first"
        self._held.wait_until_idle()
