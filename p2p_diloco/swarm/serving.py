"""What a peer does for others with its vectors: pieces of spans, entries from its disk, digests; never in the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import Action, CompareContent, RebuildSpan, ServeContent, ServeEntry, ServeSpan
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.messages import ContentReply, EntryAbsent, Message, SpanReply
from p2p_diloco.swarm.replica import Replica
from p2p_diloco.swarm.surroundings import EntryArchive
from p2p_diloco.swarm.vector_work import content_digests, state_bytes

PIECE_BYTES = 1 << 16
"""Small, so that progress shows on slow links: what counts is that pieces come, not how soon all have."""
SERVE_AGAIN_SECONDS, SERVE_TRIES = 0.25, 8
"""How soon a span is looked for again that is not here yet, and how often."""
MOST_SNAPSHOTS = 64
SLOW_LINK = 4.0
"""Pieces wait for each other: the last of those asked for at once may take so many times as long as the first."""


class Work(Protocol):
    """Runs a function on the worker and hands its result over in the loop; a `PeerError` is told of `peer`."""

    def __call__(
        self, then: Callable[[Any], None], peer: PeerId | None, function: Callable[..., Any], *args: Any
    ) -> None: ...


class Post(Protocol):
    """Posts a message to a peer, if it has a link."""

    def __call__(self, to: PeerId, message: Message, deadline: float, *, on_request: bool = False) -> None: ...


class Serving:
    """Plays the actions that serve others or compare with them.

    Spans move on while they are fetched. The version that somebody has begun to fetch is kept, so that its later
    pieces fit the first; states are frozen, so a snapshot costs memory only once the span has moved.

    Args:
        play: takes what the engine wants done.
        now: swarm seconds.
    """

    def __init__(
        self,
        *,
        engine: PeerEngine,
        replica: Replica,
        archive: EntryArchive,
        work: Work,
        post: Post,
        play: Callable[[list[Action]], None],
        now: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._archive = archive
        self._work = work
        self._post = post
        self._play = play
        self._now = now
        self._snapshots: dict[tuple[SpanId, Digest], SpanState] = {}

    def play(self, action: ServeSpan | ServeEntry | ServeContent | CompareContent | RebuildSpan) -> None:
        """Do what was asked; the answer goes out, or to the engine, when the worker is done."""
        match action:
            case ServeSpan():
                self._serve_span(action)
            case ServeEntry():
                self._serve_entry(action)
            case ServeContent():
                self._serve_content(action)
            case CompareContent():
                self._compare_content(action)
            case RebuildSpan():
                self._rebuild(action.span)

    # -- pieces of spans

    def _version(self, span: SpanId, version: Digest) -> SpanState | None:
        """Return the version that is asked for while it is kept, else the one of now; remember it as just asked for."""
        kept = self._snapshots.pop((span, version), None)
        state = kept if kept is not None else self._replica.span_state(span)
        if state is not None:
            self._snapshots[span, state.head.digest] = state
            while len(self._snapshots) > MOST_SNAPSHOTS:
                del self._snapshots[next(iter(self._snapshots))]
        return state

    def _serve_span(self, action: ServeSpan, tries: int = SERVE_TRIES) -> None:
        state = self._version(action.span, action.version)
        if state is None:
            # It is on its way to the replica, which takes it at a step border; without an answer the question counts as
            # lost, and whoever asks waits long for others.
            if tries > 1:
                asyncio.get_running_loop().call_later(SERVE_AGAIN_SECONDS, self._serve_span, action, tries - 1)
            return

        def cut(raw: bytes) -> None:
            offset = action.offset if action.version == state.head.digest else 0
            if offset >= len(raw):
                return
            piece = raw[offset : offset + PIECE_BYTES]
            reply = SpanReply(span=action.span, head=state.head, total_bytes=len(raw), offset=offset, piece=piece)
            self._post(action.to, reply, self._now() + SLOW_LINK * self._engine.rules.piece_seconds)

        self._work(cut, action.to, state_bytes, state)

    # -- entries

    def _serve_entry(self, action: ServeEntry) -> None:
        def found(entry: Entry | None) -> None:
            absent = EntryAbsent(span=action.span, parent=action.parent)
            deadline = self._now() + self._engine.rules.clock.round_seconds
            self._post(action.to, entry or absent, deadline, on_request=True)

        self._work(found, action.to, self._archive.entry_after, action.span, action.parent)

    # -- digests

    def _states(self, fragment: int) -> list[Any] | None:
        spans = [SpanId(fragment, index) for index in range(self._engine.rules.num_spans[fragment])]
        states = [self._replica.span_state(span) for span in spans]
        return None if any(state is None for state in states) else states

    def _serve_content(self, action: ServeContent) -> None:
        states = self._states(action.fragment)
        if states is None:
            return

        def hashed(digests: Any) -> None:
            reply = ContentReply(fragment=action.fragment, digests=digests)
            self._post(action.to, reply, self._now() + self._engine.rules.silence_seconds)

        self._work(hashed, action.to, content_digests, states)

    def _compare_content(self, action: CompareContent) -> None:
        states = self._states(action.fragment)
        if states is None or len(states) != len(action.digests):
            return

        def hashed(mine: Any) -> None:
            same = [a == b for a, b in zip(mine, action.digests, strict=True)]
            differing = [
                SpanId(action.fragment, index)
                for index, (a, b) in enumerate(zip(mine, action.digests, strict=True))
                if a[0] == b[0] and a[1] != b[1]
            ]
            arguments = (action.peer, action.fragment, sum(same), differing, self._now())
            self._play(self._engine.content_compared(*arguments))

        self._work(hashed, action.peer, content_digests, states)

    # -- what a span should be

    def _rebuild(self, span: SpanId) -> None:
        held = self._replica.span_state(span)
        if held is None:
            return

        def rebuilt(should_be: SpanState | None) -> None:
            state = None
            if should_be is not None and content_digests([should_be]) != content_digests([held]):
                state = state_bytes(should_be)
            head = should_be.head if should_be is not None else None
            self._play(self._engine.span_rebuilt(span, head, state, self._now()))

        self._work(rebuilt, None, self._archive.rebuild, span, held.head.digest)
