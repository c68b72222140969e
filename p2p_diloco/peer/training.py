"""The interface between a session and the training that runs at its peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.peer.evaluation import HeldOutLoss
from p2p_diloco.peer.held_state import HeldState
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.peer.trained_state import TrainedState
from p2p_diloco.span.replica import SpanDamaged
from p2p_diloco.training.parameters import LocalParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHost:
    """The run, the peer and the callbacks that a training works with.

    Attributes:
        plan: of the run.
        run: its id.
        peer, incarnation: this start of this peer.
        settings: of this machine.
        folder: of the run on this machine.
        now: swarm seconds, callable from any thread.
        in_loop: hands a call over to the event loop.
        died: called in the loop when training ended with an error.
        damaged: called in the loop with a span that must be replaced.
        hear: told, in the loop, what could not be kept; `(topic, text)`.
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
    hear: Callable[[str, str], None]


class Training(ABC):
    """Trains a model at a peer. A session calls these methods in the event loop unless they say otherwise.

    Attributes:
        model: the model of an own loop; None: it is built from the manifest.
        state: of the model, once it is open.
        owns_process: whether the allocator and the like are this peer's to set.
        evaluate_seconds: between two measurements of the held-out loss; 0: none.
    """

    model: nn.Module | None = None
    state: TrainedState | None = None
    owns_process = False
    evaluate_seconds = 0.0

    def check(self, settings: PeerSettings, manifest: RunManifest | None) -> None:
        """Refuse what is not here, before anything is begun; in a thread that may wait.

        A joiner calls it twice: before anybody is asked, and with what was answered.

        Args:
            manifest: once it is at hand, and verified unless this peer founds the run.
        Raises:
            ConfigError: a device or a text is missing, or the run trains another model.
        """

    @abstractmethod
    def open(self, host: TrainingHost) -> HeldState:
        """Make the state of the run at this peer; in a thread that may wait."""

    def parameters(self) -> LocalParameters | None:
        """Return θ, if there is a model."""
        return self.state.local.parameters if self.state is not None else None

    def keep_inner(self) -> None:
        """Keep the optimiser's state and the like at the next step border."""
        if self.state is not None:
            self.state.keep_inner()

    def start(self) -> None:
        """Begin to step as soon as all spans are there."""

    def is_stepping(self) -> bool:
        """Return whether steps are made."""
        return True

    def stop_stepping(self) -> None:
        """Make no steps any more, but let θ follow entries."""

    def wait_until_idle(self) -> None:
        """Wait until everything that was handed over is followed; in a thread that may wait."""
        assert self.state is not None, "open it first"
        self.state.wait_until_idle()

    async def measure(self) -> HeldOutLoss | None:
        """Return the held-out loss of the state that is held now, or None where none is measured."""
        return None

    async def end(self) -> None:
        """End what was begun."""


class NoTraining(Training):
    """What a bootstrap peer has in place of a model: it holds the state while nobody else does, and trains nothing."""

    owns_process = True

    def open(self, host: TrainingHost) -> HeldState:
        """Make a state without a model."""
        return HeldState(host.plan, in_loop=host.in_loop, died=host.died, damaged=host.damaged)
