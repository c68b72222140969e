"""The contract of every `Replica` that trains. Subclass it in a test module and implement `make`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2p_diloco.ids import ZERO_DIGEST, SpanId, sha256
from p2p_diloco.node.ports import Replica, SpanUpdate
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span_log import AbsorbedEntry

ROSTER = sha256(b"roster")
ALWAYS = math.inf
NEVER = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInTest:
    """A replica and what a test needs to know about it.

    Attributes:
        spans: all its spans and their lengths.
        settle: lets it do what was handed over, and make at least one inner step if it holds all spans.
        close: ends it.
    """

    replica: Replica
    spans: dict[SpanId, int]
    codecs: Codecs
    settle: Callable[[], None]
    close: Callable[[], None]

    def start(self, span: SpanId) -> SpanState:
        return genesis_state(np.full(self.spans[span], 0.25, dtype=np.float32), ROSTER)

    def hold_all(self) -> None:
        for span in self.spans:
            self.replica.replace(span, self.start(span))
        self.settle()

    def update(self, span: SpanId, round_index: int) -> SpanUpdate:
        payload = self.codecs.entry.encode(np.full(self.spans[span], 0.5, dtype=np.float32))
        absorbed = AbsorbedEntry(
            digest=sha256(b"entry", b"%d" % round_index),
            round=round_index,
            roster=ROSTER,
            radius=100.0,
            median_weight=1.0,
        )
        return SpanUpdate(span=span, absorbed=absorbed, payload=payload, own_included=False)

    def snapshot(self, round_index: int, fragment: int, deadline: float) -> list[FragmentContribution | None]:
        answers: list[FragmentContribution | None] = []
        self.replica.request_contribution(round_index, fragment, deadline, answers.append)
        self.settle()
        return answers


class ReplicaContract(ABC):
    """The tests."""

    @abstractmethod
    def make(self) -> ReplicaInTest:
        """Return a fresh replica that holds nothing."""

    def test_spans_that_are_not_chosen_are_contributed_later(self) -> None:
        it = self.make()
        it.hold_all()
        chosen = next(span for span in it.spans if span.fragment == 0)
        answers: list[FragmentContribution | None] = []
        for round_index, spans in ((2, frozenset({chosen})), (4, None), (6, frozenset[SpanId]())):
            it.replica.request_contribution(round_index, 0, ALWAYS, answers.append, spans)
            it.settle()
        one, rest, none = answers
        assert one is not None
        assert rest is not None
        assert none is not None
        assert [encoded.span for encoded in one.spans] == [chosen]
        assert {encoded.span for encoded in rest.spans} == {span for span in it.spans if span.fragment == 0}
        assert none.spans == ()
        assert none.steps > 0
        it.close()

    def test_nothing_is_held_at_first(self) -> None:
        it = self.make()
        assert all(it.replica.span_state(span) is None for span in it.spans)
        assert it.replica.progress().steps == 0
        assert it.snapshot(0, 0, ALWAYS) == [None]
        it.close()

    def test_a_transferred_span_is_held_unchanged(self) -> None:
        it = self.make()
        span = next(iter(it.spans))
        it.replica.replace(span, it.start(span))
        it.settle()
        held = it.replica.span_state(span)
        assert held is not None
        assert held.head == it.start(span).head
        assert held.anchor_N.tobytes() == it.start(span).anchor_N.tobytes()
        it.close()

    def test_updates_are_absorbed_in_the_order_in_which_they_are_handed_over(self) -> None:
        it = self.make()
        span = next(iter(it.spans))
        it.hold_all()
        before = it.replica.span_state(span)
        assert before is not None
        updates = [it.update(span, round_index) for round_index in (2, 4, 6)]
        for update in updates:
            it.replica.apply(update)
        it.settle()
        after = it.replica.span_state(span)
        assert after is not None
        digest = before.head.digest
        for update in updates:
            digest = sha256(digest, update.absorbed.digest)
        assert (after.head.digest, after.head.height, after.head.round) == (digest, 3, 6)
        assert not before.anchor_N.flags.writeable, "an earlier read still holds the old state"
        assert before.head.height == 0
        it.close()

    def test_a_replacement_precedes_updates_that_are_handed_over_later(self) -> None:
        it = self.make()
        span = next(iter(it.spans))
        it.hold_all()
        it.replica.apply(it.update(span, 2))
        it.replica.replace(span, it.start(span))
        it.replica.apply(it.update(span, 4))
        it.settle()
        held = it.replica.span_state(span)
        assert held is not None
        assert (held.head.height, held.head.round) == (1, 4)
        it.close()

    def test_a_contribution_names_the_parent_of_each_span_and_fits_the_codec(self) -> None:
        it = self.make()
        it.hold_all()
        (contribution,) = it.snapshot(4, 0, ALWAYS)
        assert contribution is not None
        assert contribution.round == 4
        assert contribution.steps > 0
        assert contribution.tokens > 0
        assert sorted(encoded.span for encoded in contribution.spans) == [s for s in sorted(it.spans) if not s.fragment]
        for encoded in contribution.spans:
            state = it.replica.span_state(encoded.span)
            assert state is not None
            assert encoded.parent == state.head.digest != ZERO_DIGEST
            assert np.isfinite(it.codecs.contribution.decode(encoded.payload, it.spans[encoded.span])).all()
        it.close()

    def test_no_span_is_contributed_twice_to_a_round_or_after_its_entry(self) -> None:
        it = self.make()
        it.hold_all()
        first = next(iter(it.spans))
        it.replica.apply(it.update(first, 4))
        (contribution,) = it.snapshot(4, 0, ALWAYS)
        assert contribution is not None
        assert first not in [encoded.span for encoded in contribution.spans]
        (again,) = it.snapshot(4, 0, ALWAYS)
        assert again is None or again.spans == ()
        it.close()

    def test_after_the_deadline_nothing_is_contributed(self) -> None:
        it = self.make()
        it.hold_all()
        assert it.snapshot(4, 0, NEVER) == [None]
        it.close()
