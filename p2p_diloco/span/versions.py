"""Versions of spans that other peers are fetching, kept so that later pieces match the first ones.

States are frozen, so a version costs memory only once its span has moved on: then eight bytes for each parameter. It is
kept while a peer fetches it and no longer: a peer fetches one version of a span at a time, a few spans at a time, and
is done with the last piece.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.repair.catch_up import MOST_ASKED_PER_DONOR
from p2p_diloco.protocol.repair.transfer import Want

MOST_VERSIONS = 64
MOST_VERSIONS_OF_A_PEER = MOST_ASKED_PER_DONOR[Want.SPAN]
"""Maximum spans that a peer fetches at a time from one donor. It may have begun others, which it now gets elsewhere."""
SERVED_BYTES = 4 << 20
"""Maximum bytes of versions kept after their last piece was sent, in addition to the latest one. A lost link loses what
waits to be written, and without the version, earlier pieces would have to be sent again."""


class _KeptVersion(NamedTuple):
    """A version, when a piece of it was last requested, and whether that was the last piece."""

    state: SpanState
    asked_at: float
    is_served: bool


class Versions:
    """Versions that were requested and may be requested again, by requester.

    Args:
        span_state: returns the current state of a span, or None.
        now: returns seconds.
        keep_seconds: how long a version is kept for the next request.
    """

    def __init__(
        self, *, span_state: Callable[[SpanId], SpanState | None], now: Callable[[], float], keep_seconds: float
    ) -> None:
        self._span_state = span_state
        self._now = now
        self._keep_seconds = keep_seconds
        self._kept: dict[tuple[PeerId, SpanId], _KeptVersion] = {}
        """In the order in which they were last requested."""

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, peer: PeerId, span: SpanId, version: Digest) -> SpanState | None:
        """Return the requested version if it is kept for any peer, else the current one; keep it for `peer`."""
        state = self._find(span, version) or self._span_state(span)
        if state is not None:
            self._keep(peer, span, _KeptVersion(state, self._now(), is_served=False))
        return state

    def served_to_the_end(self, peer: PeerId, span: SpanId) -> None:
        """Record that the last piece of its version was sent to `peer`."""
        kept = self._kept.get((peer, span))
        if kept is not None:
            self._keep(peer, span, kept._replace(is_served=True))

    def forget_old(self) -> None:
        """Forget versions that are not requested any more: their requester is gone, or fetches elsewhere."""
        before = self._now() - self._keep_seconds
        self._kept = {key: kept for key, kept in self._kept.items() if kept.asked_at > before}

    def _find(self, span: SpanId, version: Digest) -> SpanState | None:
        kept = (one.state for (_, of), one in self._kept.items() if of == span and one.state.head.digest == version)
        return next(kept, None)

    def _keep(self, peer: PeerId, span: SpanId, kept: _KeptVersion) -> None:
        self._kept.pop((peer, span), None)
        self._kept[peer, span] = kept
        fetched = [key for key, one in self._kept.items() if key[0] == peer and not one.is_served]
        for key in [*fetched[:-MOST_VERSIONS_OF_A_PEER], *self._long_served()]:
            del self._kept[key]
        while len(self._kept) > MOST_VERSIONS:
            del self._kept[next(iter(self._kept))]

    def _long_served(self) -> list[tuple[PeerId, SpanId]]:
        """Return the fully served versions that exceed `SERVED_BYTES`; never the latest one."""
        served = [(key, 8 * one.state.elements) for key, one in self._kept.items() if one.is_served]
        sizes = accumulate(size for _, size in reversed(served))
        return [key for (key, _), size in list(zip(reversed(served), sizes, strict=True))[1:] if size > SERVED_BYTES]
