"""The node's view of this peer's outer state. The training side holds it; the node never sees θ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from p2p_diloco.errors import FrameError, NonFiniteUpdate, StateError
from p2p_diloco.ids import SpanId
from p2p_diloco.log.head import AbsorbedEntry
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.engine import Progress
from p2p_diloco.protocol.round.round import FragmentContribution

Answer = Callable[[FragmentContribution | None], None]
SpanDamaged = Callable[[SpanId, str], None]
"""Told, in the loop, that a span could not follow a valid entry, and why."""
MEMORY_ERRORS = (FrameError, NonFiniteUpdate, StateError)
"""Errors of following a valid entry when memory is damaged: a sound state follows every valid entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanUpdate:
    """A valid entry on its way to the outer state; updates of one span come in parent order."""

    span: SpanId
    absorbed: AbsorbedEntry
    payload: bytes | memoryview
    own_included: bool


class Replica(Protocol):
    """Called from the event loop; every call returns at once and leaves the work to the replica's own thread."""

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the span as it is now: frozen, so that it can be read while the replica moves on.

        None also where memory is damaged: an entry that is valid could not be followed, and the span stands still until
        `replace` puts it right.
        """
        ...

    def apply(self, update: SpanUpdate) -> None:
        """Absorb an update at the next step border."""
        ...

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Take a transferred span at the next step border, before updates that are handed over later."""
        ...

    def take_snapshot(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Make this peer's contribution to a round at the next step border and hand it to `answer`, in the loop.

        `spans` are those of the fragment to contribute; None: all. The others stay for a later round.
        `deadline` is in swarm seconds; None is answered after it, or when there is nothing to contribute.
        """
        ...

    def progress(self) -> Progress:
        """Return what heartbeats say of this island."""
        ...
