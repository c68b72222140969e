"""What a peer holds that does not train: a bootstrap, while it is a member.

It follows the entries as everybody does, in a worker of its own, so that the event loop touches no vector.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.protocol.engine import Progress
from p2p_diloco.swarm.known_answer import check_known_answer
from p2p_diloco.swarm.replica import MEMORY_ERRORS, Answer, SpanDamaged, SpanUpdate
from p2p_diloco.trainer.run_plan import RunPlan


class HeldState:
    """A `Replica` without an island.

    Args:
        in_loop: hands a call over to the event loop.
        died: told, in the loop, of any error that is not damaged memory.
        damaged: told of spans to be replaced because memory is damaged.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        in_loop: Callable[[Callable[[], None]], None],
        died: Callable[[BaseException], None],
        damaged: SpanDamaged,
    ) -> None:
        self._has_checked = False
        self._damaged = damaged
        self._damaged_spans: set[SpanId] = set()
        self._plan = plan
        self._in_loop = in_loop
        self._died = died
        self._states: dict[SpanId, SpanState] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="held state")

    def hold(self, states: dict[SpanId, SpanState]) -> None:
        """Hold these spans."""
        self._states = dict(states)
        self._damaged_spans.clear()

    def drop(self) -> None:
        """Hold nothing any more."""
        self._states = {}

    def close(self) -> None:
        """End the worker."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the span, while it is held and sound."""
        return self._states.get(span) if span not in self._damaged_spans else None

    def moving_states(self) -> dict[SpanId, SpanState]:
        """Return all sound spans that are held."""
        return {span: state for span, state in self._states.items() if span not in self._damaged_spans}

    def apply(self, update: SpanUpdate) -> None:
        """Absorb an update of a span that is held, soon."""
        self._soon(lambda: self._absorb(update))

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Hold a transferred span, before updates that are handed over later."""
        held = self._states

        def put() -> None:
            held[span] = state
            self._damaged_spans.discard(span)

        self._soon(put)

    def take_snapshot(
        self,
        round_index: int,
        fragment: int,
        deadline: float,
        answer: Answer,
        spans: frozenset[SpanId] | None = None,
    ) -> None:
        """Contribute nothing."""
        answer(None)

    def progress(self) -> Progress:
        """Return that nothing is trained."""
        return Progress()

    def _absorb(self, update: SpanUpdate) -> None:
        held = self._states
        state = held.get(update.span)
        if state is None or update.span in self._damaged_spans:
            return  # dropped meanwhile, or to be replaced by what stands behind this entry
        try:
            update_N = self._plan.codecs.entry.decode(update.payload, state.elements)
            held[update.span] = absorb(state, entry=update.absorbed, update_N=update_N, rule=self._plan.outer)
        except MEMORY_ERRORS as error:
            reason = str(error)
            self._damaged_spans.add(update.span)
            self._in_loop(lambda: self._damaged(update.span, reason))

    def _soon(self, work: Callable[[], None]) -> None:
        if not self._has_checked:
            self._has_checked = True
            self._worker.submit(check_known_answer).add_done_callback(self._note_failure)
        self._worker.submit(work).add_done_callback(self._note_failure)

    def _note_failure(self, done: Future[None]) -> None:
        failure = None if done.cancelled() else done.exception()
        if failure is not None:
            self._in_loop(lambda: self._died(failure))
