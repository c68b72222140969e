"""A peer that does not train holds the spans that others fetch, and follows entries."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_run import entry_payload, small_plan, start_states, update_of

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.session.held_state import HeldState, StateHost
from p2p_diloco.span import known_answer

PLAN = small_plan()
SPAN = SpanId(0, 0)
PATIENCE_SECONDS = 30.0


def held(damaged: Callable[[SpanId, str], None] = print) -> tuple[HeldState, queue.Queue[BaseException]]:
    deaths: queue.Queue[BaseException] = queue.Queue()

    def in_loop(call: Callable[[], None]) -> None:
        call()

    host = StateHost(plan=PLAN, now=lambda: 0.0, in_loop=in_loop, died=deaths.put, damaged=damaged)
    return HeldState(host), deaths


def half_update() -> Any:
    vector_N = np.full(PLAN.rules.span_elements[SPAN], 0.5, np.float32)
    return update_of(SPAN, 0, entry_payload(PLAN, vector_N)), vector_N


def test_the_initial_state_is_held_until_it_is_dropped() -> None:
    state, _ = held()
    assert state.span_state(SPAN) is None
    start = start_states(PLAN)
    state.hold(start)
    assert all(state.span_state(span) is start[span] for span in PLAN.places)
    state.drop()
    assert state.span_state(SPAN) is None
    state.close()


def test_entries_are_followed_bit_for_bit() -> None:
    state, _ = held()
    start = start_states(PLAN)
    state.hold(start)
    update, vector_N = half_update()
    state.apply(update)
    state.wait_until_idle()
    decoded_N = PLAN.codecs.entry.decode(update.payload, len(vector_N))
    expected = absorb(start[SPAN], entry=update.absorbed, update_N=decoded_N, rule=PLAN.outer)
    now = state.span_state(SPAN)
    assert now is not None
    assert now.head == expected.head
    assert np.array_equal(now.anchor_N, expected.anchor_N)
    assert np.array_equal(now.momentum_N, expected.momentum_N)
    state.close()


def test_an_entry_of_a_span_that_is_not_held_is_ignored() -> None:
    state, deaths = held()
    state.apply(half_update()[0])
    state.wait_until_idle()
    assert state.span_state(SPAN) is None
    assert deaths.empty()
    state.close()


def test_a_transferred_span_is_replaced_before_later_entries() -> None:
    state, _ = held()
    start = start_states(PLAN)[SPAN]
    moved = SpanState(
        head=replace(start.head, height=5), anchor_N=start.anchor_N.copy(), momentum_N=start.momentum_N.copy()
    )
    state.replace(SPAN, moved)
    state.apply(half_update()[0])
    state.wait_until_idle()
    now = state.span_state(SPAN)
    assert now is not None
    assert now.head.height == 6
    state.close()


def test_a_pending_entry_does_not_restore_a_dropped_state() -> None:
    state, _ = held()
    state.hold(start_states(PLAN))
    update = half_update()[0]
    state.apply(update)
    state.drop()
    state.wait_until_idle()
    assert state.span_state(SPAN) is None
    state.close()


def test_a_span_that_cannot_follow_an_entry_is_reported_once_and_stops_until_it_is_replaced() -> None:
    told: list[tuple[SpanId, str]] = []
    state, deaths = held(lambda span, reason: told.append((span, reason)))
    start = start_states(PLAN)
    spoilt_N = start[SPAN].anchor_N.copy()
    spoilt_N[3] = np.inf
    state.hold({**start, SPAN: replace(start[SPAN], anchor_N=spoilt_N)})
    update = half_update()[0]
    for _ in range(2):
        state.apply(update)
        state.wait_until_idle()
        assert state.span_state(SPAN) is None, "a damaged span is given to nobody"
    assert [span for span, _ in told] == [SPAN]
    assert "1 non-finite numbers" in told[0][1]
    state.replace(SPAN, start[SPAN])
    state.apply(update)
    state.wait_until_idle()
    now = state.span_state(SPAN)
    assert now is not None
    assert now.head.height == 1
    assert deaths.empty()
    state.close()


def test_another_error_ends_the_peer() -> None:
    state, deaths = held()
    state.hold(start_states(PLAN))
    state.apply(replace(half_update()[0], payload=None))  # type: ignore[arg-type]
    assert isinstance(deaths.get(timeout=PATIENCE_SECONDS), TypeError)
    state.close()


def test_it_neither_trains_nor_contributes() -> None:
    state, _ = held()
    answers: list[object] = []
    state.request_contribution(0, 0, float("inf"), answers.append)
    assert answers == [None]
    assert (state.progress().steps, state.progress().tokens) == (0, 0)
    state.close()


def test_a_machine_that_computes_other_bytes_is_refused_before_it_follows_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_answer, "KNOWN_ANSWER", "of another machine")
    state, deaths = held()
    state.hold(start_states(PLAN))
    state.apply(half_update()[0])
    assert isinstance(deaths.get(timeout=PATIENCE_SECONDS), ConfigError)
    state.close()
