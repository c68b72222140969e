"""Serves other peers from this peer's vectors and disk, outside the event loop: pieces of spans, entries, digests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.log import SpanHead
from p2p_diloco.node.surroundings import EntryArchive, Replica
from p2p_diloco.protocol.actions import (
    Action,
    CompareContent,
    HashSpan,
    RebuildParent,
    RebuildSpan,
    ServeContent,
    ServeEntry,
    ServeSpan,
)
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.results import ContentCompared, ParentRebuilt, Result, SpanHashed, SpanRebuilt
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import ContentReply, EntryAbsent, Message, SpanReply
from p2p_diloco.span.serve import Contents, Pieces, Work, content_digests, state_bytes, state_from_bytes

MOST_ENTRIES_WAITING = 16
"""Backlog, in entries of the longest size, at which a peer's entry requests are no longer answered.

A peer that catches up requests eight at a time.
"""
HASH_SECONDS = 10.0
REBUILD_AGAIN_SECONDS, REBUILD_TRIES = 0.25, 8
SLOW_LINK = 4.0
"""Multiple of `piece_seconds` that a piece may take: the last one of those requested at once waits for all others."""


class Post(Protocol):
    """Posts a message to a peer, if there is a link to it."""

    def __call__(self, to: PeerId, message: Message, deadline: float, *, on_request: bool = False) -> None: ...


class Serving:
    """Performs the actions that serve other peers or compare with them.

    Args:
        waiting_bytes: returns the bytes posted to a peer that are not written yet.
        play: performs the engine's actions.
        now: returns swarm seconds.
    """

    def __init__(
        self,
        *,
        engine: PeerEngine,
        replica: Replica,
        archive: EntryArchive,
        work: Work,
        post: Post,
        waiting_bytes: Callable[[PeerId], int],
        play: Callable[..., None],
        now: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._archive = archive
        self._work = work
        self._post = post
        self._play = play
        self._now = now
        self._waiting_bytes = waiting_bytes
        self._most_waiting = MOST_ENTRIES_WAITING * max(engine.rules.entry_bytes.values())
        good_for_seconds = min(engine.rules.clock.round_seconds, HASH_SECONDS)
        self._contents = Contents(work=work, now=now, good_for_seconds=good_for_seconds, linked=engine.linked)
        self.pieces = Pieces(
            span_state=replica.span_state,
            post=self._post_piece,
            waiting_bytes=waiting_bytes,
            keep_seconds=SLOW_LINK * engine.rules.piece_seconds,
        )

    def has_room_for_entry(self, peer: PeerId) -> bool:
        """Return whether one more entry may be queued for `peer`."""
        return self._waiting_bytes(peer) < self._most_waiting

    def play(self, action: Action) -> None:
        """Perform an action. Once the worker is done, its result is sent to the requester or passed to the engine."""
        match action:
            case ServeSpan():
                self.pieces.serve(action)
            case ServeEntry():
                self._serve_entry(action)
            case ServeContent():
                self._serve_content(action)
            case CompareContent():
                self._compare_content(action)
            case RebuildSpan():
                self._rebuild(action.span)
            case RebuildParent():
                self._rebuild_parent(action)
            case HashSpan():
                self._hash(action)

    def _take(self, result: Result, caused_by: PeerId | None = None) -> None:
        self._play(self._engine.take_result(result, self._now()), caused_by=caused_by)

    def _post_piece(self, to: PeerId, reply: SpanReply) -> None:
        self._post(to, reply, self._now() + SLOW_LINK * self._engine.rules.piece_seconds)

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
            reply: Message = ContentReply(fragment=action.fragment, digests=digests)
            if action.question is not None:
                reply = self._engine.sign_content(action.question, digests)
            self._post(action.to, reply, self._now() + self._engine.rules.silence_seconds)

        self._contents.hash(action.to, ("serve", action.fragment, action.question), states, hashed)

    def _compare_content(self, action: CompareContent) -> None:
        states = self._states(action.fragment)
        if states is None or len(states) != len(action.digests):
            return

        def hashed(mine: Any) -> None:
            same = [a == b for a, b in zip(mine, action.digests, strict=True)]
            differing = tuple(
                SpanId(action.fragment, index)
                for index, (a, b) in enumerate(zip(mine, action.digests, strict=True))
                if a[0] == b[0] and a[1] != b[1]
            )
            compared = ContentCompared(
                peer=action.peer, fragment=action.fragment, num_equal=sum(same), differing=differing
            )
            self._take(compared, caused_by=action.peer)

        self._contents.hash(action.link, ("compare", action.peer, action.fragment), states, hashed)

    # -- rebuilding

    def _rebuild(self, span: SpanId, tries: int = REBUILD_TRIES) -> None:
        held, head = self._replica.span_state(span), self._engine.chains.heads.get(span)
        if head is None:
            return
        digest = held.head.digest if held is not None else head.digest  # a damaged span: use the tip of its log

        def rebuild() -> tuple[SpanHead | None, bytes | None]:
            should_be = self._archive.rebuild(span, digest)
            if should_be is None:
                return None, None
            differs = held is None or content_digests([should_be]) != content_digests([held])
            return should_be.head, state_bytes(should_be) if differs else None

        def rebuilt(found: tuple[SpanHead | None, bytes | None]) -> None:
            if found[0] is None and held is None and tries > 1:
                # The entry that revealed the damage has just arrived and may not be on disk yet.
                asyncio.get_running_loop().call_later(REBUILD_AGAIN_SECONDS, self._rebuild, span, tries - 1)
                return
            self._take(SpanRebuilt(span=span, head=found[0], state=found[1]))

        self._work(rebuilt, None, rebuild)

    def _rebuild_parent(self, action: RebuildParent) -> None:
        def rebuild() -> tuple[SpanHead | None, bytes | None]:
            before = self._archive.rebuild_parent(action.span, action.tip)
            return (None, None) if before is None else (before.head, state_bytes(before))

        def rebuilt(found: tuple[SpanHead | None, bytes | None]) -> None:
            self._take(ParentRebuilt(span=action.span, tip=action.tip, parent=found[0], state=found[1]))

        self._work(rebuilt, None, rebuild)

    # -- transferred spans

    def _hash(self, action: HashSpan) -> None:
        def content() -> Digest:
            ((_, content),) = content_digests([state_from_bytes(action.head, action.state)])
            return content

        def hashed(found: Digest) -> None:
            self._take(SpanHashed(span=action.span, head=action.head, content=found))

        self._work(hashed, None, content)
