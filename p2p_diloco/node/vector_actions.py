"""Performs the engine's actions on vectors: on a worker thread, so that the event loop never touches a whole vector.

Results of the thread return in batches, with few wake-ups of the loop: an executor creates two futures, two locks and a
wake-up for every call, and an exchange makes about a hundred calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.node.ports import EntryArchive, Replica, SpanUpdate
from p2p_diloco.node.reports import Reports
from p2p_diloco.protocol.actions import (
    Action,
    ApplyEntry,
    CompareContent,
    HashSpan,
    RebuildParent,
    RebuildSpan,
    ReduceSpan,
    ReplaceSpan,
    ServeContent,
    ServeEntry,
    ServeSpan,
    Stage,
)
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.results import (
    ContentCompared,
    EntryChecked,
    EntryCompared,
    ParentRebuilt,
    Result,
    SpanHashed,
    SpanRebuilt,
    SpanReduced,
)
from p2p_diloco.protocol.round.influence import Agreement
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import ContentReply, EntryAbsent, Message, SpanReply
from p2p_diloco.span.reduce import Codecs, EncodedMean, agreement_of, reduce_parts
from p2p_diloco.span.serve import Contents, Pieces, content_digests, state_bytes, state_from_bytes
from p2p_diloco.span_log import SpanHead

MOST_ENTRIES_WAITING = 16
"""Backlog, in entries of the longest size, at which a peer's entry requests are no longer answered.

A peer that catches up requests eight at a time.
"""
HASH_SECONDS = 10.0
REBUILD_AGAIN_SECONDS, REBUILD_TRIES = 0.25, 8
SLOW_LINK = 4.0
"""Multiple of `piece_seconds` that a piece may take: the last one of those requested at once waits for all others."""
MOST_CHECKED = 4
"""Maximum number of entries of one non-member that are queued in the worker, which checks their vectors."""
COMPARED_SPANS = 8
"""Average number of spans of a round whose entries are compared with this peer's contributions."""

Done = Callable[[Any, BaseException | None], None]
"""Called in the loop with a function's result, or with the exception that it raised."""


class Worker(Protocol):
    """Runs functions one after another."""

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function`, then pass its result or exception to `done`."""
        ...


class _Order(NamedTuple):
    done: Done
    function: Callable[..., Any]
    args: tuple[Any, ...]


class VectorWorker:
    """A single worker thread. Create and use it in the loop's thread, and `close` it.

    Args:
        loop: the loop that receives results; closing it before this worker loses results and nothing else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "vectors") -> None:
        self._loop = loop
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._finished: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` after everything submitted before; `done` is called in the loop."""
        self._orders.put(_Order(done, function, args))

    def close(self) -> None:
        """End the thread after the call in progress. Queued functions are not run, and no `done` is called any more."""
        self._is_closed = True
        self._orders.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end; return False if it did not end in time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._is_closed:
            self._finished.append((order.done, *_run(order.function, order.args)))
            # The first result wakes the loop, which then takes all results. Append before counting: otherwise the loop
            # could empty the queue in between and miss this result.
            if len(self._finished) == 1:
                self._wake_loop()

    def _wake_loop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:  # the loop is closed: no one needs the results
            self._is_closed = True

    def _hand_over(self) -> None:
        while self._finished and not self._is_closed:
            done, result, error = self._finished[0]
            try:
                done(result, error)
            except Exception as mistake:
                context = {"message": "the callback for a result of vector work failed", "exception": mistake}
                self._loop.call_exception_handler(context)
            finally:
                # Remove it only now: while it is there, the thread need not wake the loop for further results.
                self._finished.popleft()


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*args), None
    except BaseException as error:
        return None, error


class Post(Protocol):
    """Posts a message to a peer, if there is a link to it."""

    def __call__(self, to: PeerId, message: Message, deadline: float, *, on_request: bool = False) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorParts:
    """The parts of a node that work on vectors needs.

    Attributes:
        play: performs the engine's actions.
        waiting_bytes: returns the bytes posted to a peer that are not written yet.
        now: returns swarm seconds.
    """

    engine: PeerEngine
    replica: Replica
    archive: EntryArchive
    worker: Worker
    reports: Reports
    post: Post
    play: Callable[..., None]
    waiting_bytes: Callable[[PeerId], int]
    now: Callable[[], float]

    def take(self, result: Result, caused_by: PeerId | None = None) -> None:
        """Pass a result to the engine, and perform what follows from it."""
        self.play(self.engine.take_result(result, self.now()), caused_by=caused_by)

    def work(self, then: Callable[[Any], None], peer: PeerId | None, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the worker thread and pass its result to `then` in the loop; report a `PeerError`."""

        def done(result: Any, error: BaseException | None) -> None:
            if isinstance(error, PeerError):
                name = short_peer_id(peer) if peer is not None else "this peer"
                self.reports.report("frame-refused", f"{name}: {error}", peer)
            elif error is not None:
                context = {"message": "vector work failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
            else:
                then(result)

        self.worker.submit(done, function, *args)


class Serving:
    """Performs the actions that serve other peers from this peer's vectors and disk, or compare with them."""

    def __init__(self, parts: VectorParts) -> None:
        self._parts, self._engine = parts, parts.engine
        rules = parts.engine.rules
        self._most_waiting = MOST_ENTRIES_WAITING * max(rules.entry_bytes.values())
        good_for_seconds = min(rules.clock.round_seconds, HASH_SECONDS)
        self._contents = Contents(
            work=parts.work, now=parts.now, good_for_seconds=good_for_seconds, linked=parts.engine.linked
        )
        self.pieces = Pieces(
            span_state=parts.replica.span_state,
            post=self._post_piece,
            waiting_bytes=parts.waiting_bytes,
            keep_seconds=SLOW_LINK * rules.piece_seconds,
        )

    def has_room_for_entry(self, peer: PeerId) -> bool:
        """Return whether one more entry may be queued for `peer`."""
        return self._parts.waiting_bytes(peer) < self._most_waiting

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

    def _post_piece(self, to: PeerId, reply: SpanReply) -> None:
        self._parts.post(to, reply, self._parts.now() + SLOW_LINK * self._engine.rules.piece_seconds)

    # -- entries

    def _serve_entry(self, action: ServeEntry) -> None:
        def found(entry: Entry | None) -> None:
            absent = EntryAbsent(span=action.span, parent=action.parent)
            deadline = self._parts.now() + self._engine.rules.clock.round_seconds
            self._parts.post(action.to, entry or absent, deadline, on_request=True)

        self._parts.work(found, action.to, self._parts.archive.entry_after, action.span, action.parent)

    # -- digests

    def _states(self, fragment: int) -> list[Any] | None:
        spans = [SpanId(fragment, index) for index in range(self._engine.rules.num_spans[fragment])]
        states = [self._parts.replica.span_state(span) for span in spans]
        return None if any(state is None for state in states) else states

    def _serve_content(self, action: ServeContent) -> None:
        states = self._states(action.fragment)
        if states is None:
            return

        def hashed(digests: Any) -> None:
            reply: Message = ContentReply(fragment=action.fragment, digests=digests)
            if action.question is not None:
                reply = self._engine.sign_content(action.question, digests)
            self._parts.post(action.to, reply, self._parts.now() + self._engine.rules.silence_seconds)

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
            self._parts.take(compared, caused_by=action.peer)

        self._contents.hash(action.link, ("compare", action.peer, action.fragment), states, hashed)

    # -- rebuilding

    def _rebuild(self, span: SpanId, tries: int = REBUILD_TRIES) -> None:
        held, head = self._parts.replica.span_state(span), self._engine.chains.heads.get(span)
        if head is None:
            return
        digest = held.head.digest if held is not None else head.digest  # a damaged span: use the tip of its log

        def rebuild() -> tuple[SpanHead | None, bytes | None]:
            should_be = self._parts.archive.rebuild(span, digest)
            if should_be is None:
                return None, None
            differs = held is None or content_digests([should_be]) != content_digests([held])
            return should_be.head, state_bytes(should_be) if differs else None

        def rebuilt(found: tuple[SpanHead | None, bytes | None]) -> None:
            if found[0] is None and held is None and tries > 1:
                # The entry that revealed the damage has just arrived and may not be on disk yet.
                asyncio.get_running_loop().call_later(REBUILD_AGAIN_SECONDS, self._rebuild, span, tries - 1)
                return
            self._parts.take(SpanRebuilt(span=span, head=found[0], state=found[1]))

        self._parts.work(rebuilt, None, rebuild)

    def _rebuild_parent(self, action: RebuildParent) -> None:
        def rebuild() -> tuple[SpanHead | None, bytes | None]:
            before = self._parts.archive.rebuild_parent(action.span, action.tip)
            return (None, None) if before is None else (before.head, state_bytes(before))

        def rebuilt(found: tuple[SpanHead | None, bytes | None]) -> None:
            self._parts.take(ParentRebuilt(span=action.span, tip=action.tip, parent=found[0], state=found[1]))

        self._parts.work(rebuilt, None, rebuild)

    # -- transferred spans

    def _hash(self, action: HashSpan) -> None:
        def content() -> Digest:
            ((_, content),) = content_digests([state_from_bytes(action.head, action.state)])
            return content

        def hashed(found: Digest) -> None:
            self._parts.take(SpanHashed(span=action.span, head=action.head, content=found))

        self._parts.work(hashed, None, content)


class VectorActions:
    """Reduces, checks, compares, applies and replaces spans, and has them served."""

    def __init__(self, parts: VectorParts, codecs: Codecs) -> None:
        self.codecs = codecs
        self.serving = Serving(parts)
        self._parts, self.engine = parts, parts.engine
        self._checked: Counter[PeerId] = Counter()
        self._secret = parts.engine.me.sign(b"compared pieces")

    def play(self, action: Action) -> None:
        """Perform an action. Once the worker is done, the result is passed to the engine, or sent to a requester."""
        match action:
            case ReduceSpan():
                self._reduce(action)
            case ApplyEntry():
                self._apply(action)
            case ReplaceSpan():
                self._replace(action)
            case _:
                self.serving.play(action)

    def check_entry(self, peer: PeerId, entry: Entry) -> bool:
        """Have an entry's vector checked, then pass it to the engine; return False if too many of `peer` wait."""
        elements = self.engine.rules.span_elements.get(entry.span)
        if elements is None or self.engine.chains.is_known(entry):
            return True
        if entry.roster not in self.engine.book:  # it only waits for its roster, whatever its numbers
            self._take_entry(peer, entry, 0.0)
            return True
        if self.engine.is_stranger(peer) and self._checked[peer] >= MOST_CHECKED:
            return False
        self._checked[peer] += 1

        def checked(norm: float | str) -> None:
            self._checked[peer] -= 1
            if not self._checked[peer]:
                del self._checked[peer]
            if isinstance(norm, str):
                self._parts.reports.report("frame-refused", norm, peer)
            else:
                self._take_entry(peer, entry, norm)

        self._parts.work(checked, peer, self._norm_of, entry, elements)
        return True

    def _take_entry(self, peer: PeerId, entry: Entry, norm: float) -> None:
        self._parts.take(EntryChecked(sender=peer, entry=entry, payload_norm=norm), caused_by=peer)

    def _norm_of(self, entry: Entry, elements: int) -> float | str:
        """Return the norm of an entry's payload, or what is wrong with it; runs on the worker."""
        try:
            return self.codecs.entry.norm(entry.payload, elements)
        except PeerError as error:
            return str(error)

    def _reduce(self, action: ReduceSpan) -> None:
        def reduced(result: EncodedMean | str) -> None:
            notes = self._parts.reports.notes
            if isinstance(result, str):
                notes.note("skipped", f"skipped {action.span} in round {action.round}: {result}")
                if action.stage is Stage.ROW:
                    self._parts.take(SpanReduced(order=action))
                return
            for peer, reason in result.dropped:
                text = f"round {action.round}, {action.span}: {short_peer_id(peer)}: {reason}"
                notes.note("contribution-dropped", text, about=peer)
            mean = SpanReduced(
                order=action,
                sound=result.sound,
                payload=result.payload,
                payload_norm=result.norm,
                measured=result.measured,
                against=result.against,
            )
            self._parts.take(mean)

        elements, secret = self.engine.rules.span_elements[action.span], sha256(self._secret, action.rounding_seed)
        self._parts.work(reduced, None, reduce_parts, action, self.codecs, elements, secret)

    def _apply(self, action: ApplyEntry) -> None:
        entry = action.entry
        self._parts.archive.keep_entry(entry)
        self._parts.replica.apply(
            SpanUpdate(
                span=entry.span, absorbed=entry.absorbed(), payload=entry.payload, own_included=action.own_included
            )
        )
        if action.own is not None:
            self._compare(entry, action.own)

    def _compare(self, entry: Entry, own: bytes | memoryview) -> None:
        """Find out how an entry agrees with this peer's contribution to it, for some spans of a large fragment."""
        rules, secret = self.engine.rules, sha256(self._secret, entry.digest())
        if secret[-1] * rules.num_spans[entry.span.fragment] >= 256 * COMPARED_SPANS:
            return

        def compared(agreement: Agreement) -> None:
            self.engine.take_result(EntryCompared(entry=entry, agreement=agreement), self._parts.now())

        elements = rules.span_elements[entry.span]
        self._parts.work(compared, None, agreement_of, entry.payload, own, self.codecs, elements, secret)

    def _replace(self, action: ReplaceSpan) -> None:
        held = self._parts.replica.span_state(action.span)
        if not action.is_mended:
            self._parts.archive.give_up(action.span)
        if action.is_mended or held is not None:
            height = max(action.head.height, held.head.height if held is not None else 0)
            self._parts.archive.distrust(action.span, height, is_mended=action.is_mended)
        self._parts.replica.replace(action.span, state_from_bytes(action.head, action.state))
