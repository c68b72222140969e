"""The node's view of this peer's outer state. The training side holds it; the node never sees θ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from p2p_diloco.errors import FrameError, NonFiniteUpdate, StateError
from p2p_diloco.ids import SpanId
from p2p_diloco.log.head import AbsorbedEntry
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.protocol.round.round import FragmentContribution

Answer = Callable[[FragmentContribution | None], None]
SpanDamaged = Callable[[SpanId, str], None]
"""Called in the loop when a span could not follow a valid entry, with the reason."""
MEMORY_ERRORS = (FrameError, NonFiniteUpdate, StateError)
"""Errors that show damaged memory when they come from a valid entry: a sound state follows every valid entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanUpdate:
    """A valid entry on its way to the outer state; updates of one span arrive in parent order."""

    span: SpanId
    absorbed: AbsorbedEntry
    payload: bytes | memoryview
    own_included: bool


class Replica(Protocol):
    """Called from the event loop; every call returns immediately and leaves the work to the replica's own thread."""

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the current state of a span: frozen, so that it can be read while the replica moves on.

        Also None if memory is damaged: the span could not follow a valid entry, and stops until `replace` repairs it.
        """
        ...

    def apply(self, update: SpanUpdate) -> None:
        """Absorb an update at the next step border."""
        ...

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Take a transferred span at the next step border, before updates that are passed later."""
        ...

    def take_snapshot(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Make this peer's contribution to a round at the next step border and pass it to `answer`, in the loop.

        `spans` are the spans of the fragment to contribute; None: all. The others stay for a later round.
        `deadline` is in swarm seconds. After it, or if there is nothing to contribute, `answer` is called with None.
        """
        ...

    def progress(self) -> Progress:
        """Return what heartbeats report about this island."""
        ...
