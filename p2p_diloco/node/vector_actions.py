"""Performs the engine's actions on vectors: on the worker, so that the event loop never touches a whole vector."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.node.reports import Reports
from p2p_diloco.node.serving import Post, Serving
from p2p_diloco.node.surroundings import EntryArchive, Replica, SpanUpdate
from p2p_diloco.node.vector_worker import Worker
from p2p_diloco.protocol.actions import Action, ApplyEntry, ReduceSpan, ReplaceSpan, Stage
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.results import EntryChecked, EntryCompared, Result, SpanReduced
from p2p_diloco.protocol.round.influence import Agreement
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.span.reduce import Codecs, EncodedMean, agreement_of, reduce_parts
from p2p_diloco.span.serve import state_from_bytes

MOST_CHECKED = 4
"""Maximum number of entries of one non-member that are queued in the worker, which checks their vectors."""
COMPARED_SPANS = 8
"""Average number of spans of a round whose entries are compared with this peer's contributions."""


class VectorActions:
    """Reduces, checks, compares, applies and replaces spans, and has them served.

    Args:
        play: performs the engine's actions.
        now: returns swarm seconds.
    """

    def __init__(
        self,
        *,
        engine: PeerEngine,
        replica: Replica,
        archive: EntryArchive,
        codecs: Codecs,
        worker: Worker,
        post: Post,
        waiting_bytes: Callable[[PeerId], int],
        play: Callable[..., None],
        reports: Reports,
        now: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.codecs = codecs
        self.serving = Serving(
            engine=engine,
            replica=replica,
            archive=archive,
            work=self._work,
            post=post,
            waiting_bytes=waiting_bytes,
            play=play,
            now=now,
        )
        self._replica = replica
        self._archive = archive
        self._worker = worker
        self._play = play
        self._reports = reports
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._checked: Counter[PeerId] = Counter()
        self._secret = engine.me.sign(b"compared pieces")

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
                self._reports.report("frame-refused", norm, peer)
            else:
                self._take_entry(peer, entry, norm)

        self._work(checked, peer, self._norm_of, entry, elements)
        return True

    def _take_entry(self, peer: PeerId, entry: Entry, norm: float) -> None:
        self._take(EntryChecked(sender=peer, entry=entry, payload_norm=norm), caused_by=peer)

    def _norm_of(self, entry: Entry, elements: int) -> float | str:
        """Return the norm of an entry's payload, or what is wrong with it; runs on the worker."""
        try:
            return self.codecs.entry.norm(entry.payload, elements)
        except PeerError as error:
            return str(error)

    def _reduce(self, action: ReduceSpan) -> None:
        def reduced(result: EncodedMean | str) -> None:
            notes = self._reports.notes
            if isinstance(result, str):
                notes.note("skipped", f"skipped {action.span} in round {action.round}: {result}")
                if action.stage is Stage.ROW:
                    self._take(SpanReduced(order=action))
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
            )
            self._take(mean)

        self._work(reduced, None, reduce_parts, action, self.codecs, self.engine.rules.span_elements[action.span])

    def _apply(self, action: ApplyEntry) -> None:
        entry = action.entry
        self._archive.keep_entry(entry)
        self._replica.apply(
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
            self.engine.take_result(EntryCompared(entry=entry, agreement=agreement), self._now())

        elements = rules.span_elements[entry.span]
        self._work(compared, None, agreement_of, entry.payload, own, self.codecs, elements, secret)

    def _replace(self, action: ReplaceSpan) -> None:
        held = self._replica.span_state(action.span)
        if not action.is_mended:
            self._archive.give_up(action.span)
        if action.is_mended or held is not None:
            height = max(action.head.height, held.head.height if held is not None else 0)
            self._archive.distrust(action.span, height, is_mended=action.is_mended)
        self._replica.replace(action.span, state_from_bytes(action.head, action.state))

    def _take(self, result: Result, caused_by: PeerId | None = None) -> None:
        self._play(self.engine.take_result(result, self._now()), caused_by=caused_by)

    def _work(self, then: Callable[[Any], None], peer: PeerId | None, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the worker thread and pass its result to `then` in the loop; report a `PeerError`."""

        def done(result: Any, error: BaseException | None) -> None:
            if isinstance(error, PeerError):
                name = short_peer_id(peer) if peer is not None else "this peer"
                self._reports.report("frame-refused", f"{name}: {error}", peer)
            elif error is not None:
                self._loop.call_exception_handler({"message": "vector work failed", "exception": error})
            else:
                then(result)

        self._worker.submit(done, function, *args)
