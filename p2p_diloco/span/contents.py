"""Content digests of spans, for peers that compare them.

One span is hashed at a time, so that no round waits for a whole fragment. Two peers that request the same digest at
about the same time are answered from one hash. A hash is reused for seconds only, because contents are compared in
order to detect failing memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import ref

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.span.vector_work import content_digests

Pairs = tuple[tuple[Digest, Digest], ...]
"""Chain and content digest of each span."""
Work = Callable[..., None]


class _Known(NamedTuple):
    """A hash, weak references to the arrays that it is of, and when it was made."""

    arrays: tuple[ref[Any], ref[Any]]
    pair: tuple[Digest, Digest]
    made_at: float

    def is_of(self, state: SpanState) -> bool:
        return self.arrays[0]() is state.anchor_N and self.arrays[1]() is state.momentum_N


class Contents:
    """Hashes spans on the worker.

    Args:
        work: runs a function there and passes its result on in the loop.
        now: returns seconds; may be called from any thread.
        good_for_seconds: how long a hash is reused; much less than the time between two comparisons.
        linked: peers with a link; for other peers no more spans are hashed.
    """

    def __init__(
        self, *, work: Work, now: Callable[[], float], good_for_seconds: float, linked: Collection[PeerId]
    ) -> None:
        self._work = work
        self._now = now
        self._good_for_seconds = good_for_seconds
        self._linked = linked
        self._known: dict[Digest, _Known] = {}
        self._under_way: set[tuple[PeerId, object]] = set()

    def hash(self, peer: PeerId, question: object, states: Sequence[SpanState], then: Callable[[Pairs], None]) -> None:
        """Pass the digests of `states` to `then`, in the loop. Ignore the call while the same request is under way.

        Args:
            peer, question: identify the request. Hashing may take longer than a requester waits before it asks again.
        """
        key = (peer, question)
        if key not in self._under_way:
            self._under_way.add(key)
            self._go_on(key, states, (), then)

    def _go_on(
        self, key: tuple[PeerId, object], states: Sequence[SpanState], pairs: Pairs, then: Callable[[Pairs], None]
    ) -> None:
        is_done = len(pairs) == len(states)
        if is_done or key[0] not in self._linked:
            self._under_way.discard(key)
            if is_done:
                then(pairs)
            return

        def hashed(pair: tuple[Digest, Digest]) -> None:
            self._go_on(key, states, (*pairs, pair), then)

        self._work(hashed, key[0], self._hash_one, states[len(pairs)])

    def _hash_one(self, state: SpanState) -> tuple[Digest, Digest]:
        """Return a span's digests; runs on the worker, so that a second request finds the result of the first."""
        known, now = self._known.get(state.head.digest), self._now()
        if known is not None and known.is_of(state) and now - known.made_at < self._good_for_seconds:
            return known.pair
        (pair,) = content_digests([state])
        self._known = {key: one for key, one in self._known.items() if now - one.made_at < self._good_for_seconds}
        self._known[state.head.digest] = _Known((ref(state.anchor_N), ref(state.momentum_N)), pair, self._now())
        return pair
