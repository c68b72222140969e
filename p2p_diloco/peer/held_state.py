"""The agreed state of a run as one peer holds it: spans that follow entries on a thread of their own.

Neither the event loop nor training touches a whole vector for it. `HeldState` is all that a peer without a model has,
such as a bootstrap while it is a member; `TrainedState` adds the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.protocol.engine import Progress
from p2p_diloco.span.known_answer import check_known_answer
from p2p_diloco.span.replica import MEMORY_ERRORS, Answer, SpanDamaged, SpanUpdate


class HeldState:
    """A `Replica` without a model.

    Args:
        in_loop: hands a call over to the event loop.
        died: called in the loop with any error that is not damaged memory.
        damaged: called in the loop with a span that must be replaced because memory is damaged.
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
        self._follower = ThreadPoolExecutor(1, thread_name_prefix="follower")

    def hold(self, states: Mapping[SpanId, SpanState]) -> None:
        """Hold these spans; before the first entry."""
        self._states = dict(states)
        self._damaged_spans.clear()

    def drop(self) -> None:
        """Hold nothing any more."""
        self._states = {}

    def close(self) -> None:
        """End the thread after what it is doing."""
        self._follower.shutdown(wait=False, cancel_futures=True)

    def wait_until_idle(self) -> None:
        """Wait until everything that was handed over is done; for a thread that may wait."""
        self._follower.submit(lambda: None).result()

    # -- for the event loop

    def span_state(self, span: SpanId) -> SpanState | None:
        """Return the span, while it is held and sound."""
        return self._states.get(span) if span not in self._damaged_spans else None

    def states(self) -> dict[SpanId, SpanState]:
        """Return all spans as they are now."""
        return dict(self._states)

    def moving_states(self) -> Mapping[SpanId, SpanState]:
        """Return a view of the spans as they are whenever it is read: it keeps none that has been replaced.

        Empty while one is damaged, so that no checkpoint is made of it.
        """
        return MappingProxyType(self._states if not self._damaged_spans else {})

    def apply(self, update: SpanUpdate) -> None:
        """Follow an entry of a span that is held, soon."""
        self._soon(lambda: self._follow(update))

    def replace(self, span: SpanId, state: SpanState) -> None:
        """Hold a transferred span, before updates that are handed over later."""
        held = self._states
        self._soon(lambda: self._put(held, span, state))

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

    # -- on the thread that follows

    def _follow(self, update: SpanUpdate) -> None:
        """Follow an entry; a span that cannot is left as it is, and follows no more before it is replaced."""
        held = self._states
        state = held.get(update.span)
        if state is None or update.span in self._damaged_spans:
            return  # dropped meanwhile, or to be replaced by what comes after this entry
        try:
            self._advance(held, state, update)
        except MEMORY_ERRORS as error:
            reason = str(error)
            self._damaged_spans.add(update.span)
            self._in_loop(lambda: self._damaged(update.span, reason))

    def _advance(self, held: dict[SpanId, SpanState], state: SpanState, update: SpanUpdate) -> None:
        update_N = self._plan.codecs.entry.decode(update.payload, state.elements)
        held[update.span] = absorb(state, entry=update.absorbed, update_N=update_N, rule=self._plan.outer)

    def _put(self, held: dict[SpanId, SpanState], span: SpanId, state: SpanState) -> None:
        held[span] = state
        self._damaged_spans.discard(span)

    def _soon(self, work: Callable[[], None]) -> None:
        if not self._has_checked:
            self._has_checked = True
            self._follower.submit(check_known_answer).add_done_callback(self._note_failure)
        self._follower.submit(work).add_done_callback(self._note_failure)

    def _note_failure(self, done: Future[None]) -> None:
        failure = None if done.cancelled() else done.exception()
        if failure is not None:
            self._in_loop(lambda: self._died(failure))
