"""Serves other peers from this peer's spans: pieces for those that fetch them, digests for those that compare them.

Pieces are views of the state, put into frames no sooner than the link takes them. Whatever a peer requests, only a
short list of requests and a few frames wait for it here. Spans move on while they are fetched, so a version that a peer
has begun to fetch is kept until its last piece; see `Versions`.

Of the digests, one span is hashed at a time, so that no round waits for a whole fragment. Two peers that request the
same digest at about the same time are answered from one hash. A hash is reused for seconds only, because contents are
compared in order to detect failing memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from p2p_diloco.codec.vectors import LARGEST_ANCHOR, LARGEST_MOMENTUM
from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState, content_digest, is_sound
from p2p_diloco.protocol.actions import ServeSpan
from p2p_diloco.protocol.repair.fetcher import MOST_REQUESTS_PER_DONOR, Want
from p2p_diloco.protocol.wire.entry import HEAD_LAYOUT
from p2p_diloco.protocol.wire.frames import to_bytes
from p2p_diloco.protocol.wire.messages import MOST_PIECE_BYTES, SpanReply
from p2p_diloco.span_log import SpanHead

PIECE_BYTES = MOST_PIECE_BYTES
"""Longest piece that is served; a requester may ask for shorter ones."""
AHEAD_BYTES, TOTAL_AHEAD_BYTES = 4 << 20, 64 << 20
"""Pieces are put into frames while fewer bytes than this wait to be written to the peer, and to all served peers."""
MOST_REQUESTS = 64
"""Maximum number of waiting requests per peer; further ones are dropped, and their sender counts them as lost."""
LOOK_AGAIN_SECONDS = 0.01
SERVE_AGAIN_SECONDS, SERVE_TRIES = 0.25, 8
"""Pause before a span that is not here yet is looked up again, and the number of attempts."""
MOST_VERSIONS = 64
MOST_VERSIONS_OF_A_PEER = MOST_REQUESTS_PER_DONOR[Want.SPAN]
"""Maximum spans that a peer fetches at a time from one donor. It may have begun others, which it now gets elsewhere."""
SERVED_BYTES = 4 << 20
"""Maximum bytes of versions kept after their last piece was sent, in addition to the latest one. A lost link loses what
waits to be written, and without the version, earlier pieces would have to be sent again."""

Pairs = tuple[tuple[Digest, Digest], ...]
"""Chain and content digest of each span."""
Work = Callable[..., None]


# -- pieces


class Pieces:
    """Answers requests for pieces, in order for each peer.

    Args:
        span_state: returns the current state of a span, or None.
        waiting_bytes: returns the bytes that wait to be written to a peer.
        keep_seconds: how long a version is kept for the next request.
    """

    def __init__(
        self,
        *,
        span_state: Callable[[SpanId], SpanState | None],
        post: Callable[[PeerId, SpanReply], None],
        waiting_bytes: Callable[[PeerId], int],
        keep_seconds: float,
    ) -> None:
        self._post = post
        self._waiting_bytes = waiting_bytes
        self._keep_seconds = keep_seconds
        self._loop = asyncio.get_running_loop()
        self._requests: dict[PeerId, deque[ServeSpan]] = {}
        self._served: set[PeerId] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        self.versions = Versions(span_state=span_state, now=self._loop.time, keep_seconds=keep_seconds)
        """Kept for the peers that fetch them."""

    def serve(self, request: ServeSpan) -> None:
        """Answer a request now, or once the link to the peer has taken what waits."""
        waiting = self._requests.setdefault(request.to, deque())
        if len(waiting) < MOST_REQUESTS:
            waiting.append(request)
        self._answer(request.to)

    def _answer(self, peer: PeerId) -> None:
        waiting = self._requests[peer]
        self._served.add(peer)
        while waiting and self._has_room(peer):
            self._cut(waiting.popleft())
        if not waiting:
            del self._requests[peer]
        elif self._looking is None:
            self._looking = self._loop.call_later(LOOK_AGAIN_SECONDS, self._look_again)

    def _has_room(self, peer: PeerId) -> bool:
        if self._waiting_bytes(peer) >= AHEAD_BYTES:
            return False
        self._served = {served for served in self._served if served == peer or self._waiting_bytes(served)}
        return sum(map(self._waiting_bytes, self._served)) < TOTAL_AHEAD_BYTES

    def _look_again(self) -> None:
        self._looking = None
        for peer in tuple(self._requests):
            self._answer(peer)

    def _cut(self, request: ServeSpan, tries: int = SERVE_TRIES) -> None:
        state = self.versions.take(request.to, request.span, request.version)
        if state is None:
            # The span may be on its way to the replica, which takes it at a step border. Without an answer, the
            # requester counts the request as lost and waits long for other donors.
            if tries > 1:
                self._loop.call_later(SERVE_AGAIN_SECONDS, self._cut, request, tries - 1)
            return
        offset = request.offset if request.version == state.head.digest else 0
        piece = cut_piece(state, offset, min(request.most_bytes, PIECE_BYTES) & ~3)
        if piece:
            total_bytes = 8 * state.elements
            reply = SpanReply(span=request.span, head=state.head, total_bytes=total_bytes, offset=offset, piece=piece)
            self._post(request.to, reply)
            if offset + len(piece) == total_bytes:
                self.versions.served_to_the_end(request.to, request.span)
        self._forget_later()

    def _forget_later(self) -> None:
        if self._forgetting is None and len(self.versions):
            self._forgetting = self._loop.call_later(self._keep_seconds, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        self.versions.forget_old()
        self._forget_later()


class _KeptVersion(NamedTuple):
    """A version, when a piece of it was last requested, and whether that was the last piece."""

    state: SpanState
    requested_at: float
    is_served: bool


class Versions:
    """Versions that were requested and may be requested again, by requester: later pieces match the first ones.

    States are frozen, so a version costs memory only once its span has moved on: then eight bytes for each parameter.
    It is kept while a peer fetches it and no longer: a peer fetches one version of a span at a time, a few spans at a
    time, and is done with the last piece.

    Args:
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
        self._kept = {key: kept for key, kept in self._kept.items() if kept.requested_at > before}

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


# -- digests


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

    def hash(self, peer: PeerId, request: object, states: Sequence[SpanState], then: Callable[[Pairs], None]) -> None:
        """Pass the digests of `states` to `then`, in the loop. Ignore the call while the same request is under way.

        Args:
            peer, request: identify the request. Hashing may take longer than a requester waits before it asks again.
        """
        key = (peer, request)
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


# -- bytes of a span


def content_digests(states: Sequence[SpanState]) -> tuple[tuple[Digest, Digest], ...]:
    """Return the chain digest and the content digest of each span.

    The content digest covers the whole head, so it also identifies the span's height, round and radius.
    """
    return tuple((state.head.digest, _content_of(state)) for state in states)


def _content_of(state: SpanState) -> Digest:
    content = content_digest(state.anchor_N, state.momentum_N, state.head.digest)
    return sha256(content, to_bytes(state.head, HEAD_LAYOUT))


def state_bytes(state: SpanState) -> bytes:
    """Return anchor, then momentum, as little-endian float32: the content of a span's transfer."""
    return np.concatenate((state.anchor_N, state.momentum_N)).astype("<f4", copy=False).tobytes()


def cut_piece(state: SpanState, offset: int, most_bytes: int) -> memoryview:
    """Return a piece of what `state_bytes` returns, as a view of the span's own memory: nothing is copied.

    A piece never crosses the end of the anchor, so it may be shorter. Past the end of the momentum it is empty.
    """
    half = 4 * state.elements
    vector_N, start = (state.anchor_N, offset) if offset < half else (state.momentum_N, offset - half)
    return np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B")[start : start + most_bytes]


def is_sound_piece(reply: SpanReply) -> bool:
    """Return whether a piece of a transfer holds complete numbers within the bounds of φ and m."""
    if len(reply.piece) % 4:
        return False
    numbers_N = np.frombuffer(reply.piece, dtype="<f4").astype("=f4", copy=False)
    left = max(0, reply.total_bytes // 2 - reply.offset) // 4  # numbers of φ, which comes first
    return is_sound(numbers_N[:left], largest=LARGEST_ANCHOR) and is_sound(numbers_N[left:], largest=LARGEST_MOMENTUM)


def state_from_bytes(head: SpanHead, raw: bytes | memoryview) -> SpanState:
    """Build a span from transferred bytes whose pieces were found finite.

    Args:
        raw: ownership is transferred; the vectors use its memory.
    """
    both_N = np.frombuffer(raw, dtype="<f4").astype(np.float32, copy=False)
    half = len(both_N) // 2
    return SpanState(head=head, anchor_N=both_N[:half], momentum_N=both_N[half:])
