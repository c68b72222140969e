"""Claims about one island's span from event to event: every learnt change is contributed exactly once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.vectors import Vector, euclidean_norm
from p2p_diloco.errors import NonFiniteUpdate, RoundError, StateError
from p2p_diloco.ids import sha256
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import (
    MOST_LEFT,
    PATIENT_FOR,
    InFlight,
    IslandSpan,
    SpanState,
    Unsent,
    advance_span,
    genesis_state,
    prepare_contribution,
    pull_back,
    record_contribution,
    replace_span,
    state_digest,
)
from p2p_diloco.span_log import (
    RADIUS_BOUNDS,
    RADIUS_MOVED,
    AbsorbedEntry,
    SpanHead,
    counted_norm,
    founding_radius,
    within_reach,
)

ROSTER = sha256(b"roster 0")
PLAIN = OuterRule(learning_rate=1.0, momentum=0.0)
KEEP = MergeRule()
HALF = MergeRule(kind="blend", alpha=0.5)


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def span_at(anchor: float, *, round_index: int = 0, radius: float = 1e6) -> SpanState:
    head = SpanHead(
        digest=sha256(b"head"), height=1, round=round_index, roster=ROSTER, radius=radius, median_weight=1.0
    )
    return SpanState(head=head, anchor_N=vector(anchor), momentum_N=vector(0.0))


def flying(**values: float) -> InFlight:
    """Return contributions in flight: `flying(r4=2.0)` holds one of round 4 that decodes to 2."""
    in_flight = InFlight()
    for name, value in values.items():
        in_flight = in_flight.with_contribution(int(name[1:]), vector(value))
    return in_flight


def receive(span: IslandSpan, round_index: int, update: float, merge: MergeRule = KEEP) -> IslandSpan:
    entry = AbsorbedEntry(
        digest=sha256(bytes([round_index])), round=round_index, roster=ROSTER, radius=1.0, median_weight=1.0
    )
    return advance_span(span, entry=entry, update_N=vector(update), outer_rule=PLAIN, merge_rule=merge)


def residual(span: IslandSpan) -> float:
    return float(span.state.anchor_N[0] - span.local_N[0] - sum(float(c[0]) for c in span.in_flight.vectors))


def test_a_contribution_is_the_residual() -> None:
    prepared = prepare_contribution(IslandSpan(span_at(10.0), flying(r4=2.0), vector(3.0)), round_index=8)
    assert prepared.delta_N.tolist() == [5.0]
    assert (prepared.norm, prepared.limit) == (5.0, 4e6)


def test_a_contribution_is_clipped_to_four_times_the_last_radius_and_keeps_its_norm_before() -> None:
    prepared = prepare_contribution(IslandSpan(span_at(10.0, radius=0.75), InFlight(), vector(2.0)), round_index=1)
    assert prepared.delta_N.tolist() == pytest.approx([3.0], rel=1e-6)
    assert euclidean_norm(prepared.delta_N) <= prepared.limit == 3.0
    assert prepared.norm == 8.0


def test_the_clipped_part_is_in_the_next_contribution() -> None:
    state, local_N = span_at(10.0, radius=1.0), vector(2.0)
    first = prepare_contribution(IslandSpan(state, InFlight(), local_N), round_index=1)
    span = record_contribution(IslandSpan(state, InFlight(), local_N), round_index=1, sent=first.delta_N)
    second = prepare_contribution(span, round_index=2)
    assert float(first.delta_N[0]) == pytest.approx(4.0, rel=1e-6)
    assert float(first.delta_N[0]) + float(second.delta_N[0]) == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize(
    ("state", "in_flight"), [(span_at(1.0, round_index=6), InFlight()), (span_at(1.0), flying(r6=1.0))]
)
@pytest.mark.parametrize("round_index", [5, 6])
def test_a_resolved_round_gets_no_contribution(state: SpanState, in_flight: InFlight, round_index: int) -> None:
    with pytest.raises(RoundError, match=f"round {round_index} is over: the span is at round 6; wait"):
        prepare_contribution(IslandSpan(state, in_flight, vector(0.0)), round_index=round_index)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_island_contributes_nothing(value: float) -> None:
    with pytest.raises(NonFiniteUpdate, match="local parameters are not finite in a span of 1 elements"):
        prepare_contribution(IslandSpan(span_at(1.0, radius=1.0), InFlight(), vector(value)), round_index=3)


def test_what_five_contributions_cannot_send_is_given_up_and_four_limits_are_left() -> None:
    before = IslandSpan(span_at(100.0, radius=1.0), flying(r1=2.0), vector(3.0))
    prepared = prepare_contribution(before, round_index=2)
    pulled = pull_back(before, prepared)
    assert (residual(before), residual(pulled)) == (95.0, pytest.approx(20.0, rel=1e-6))
    after = record_contribution(pulled, round_index=2, sent=prepared.delta_N)
    assert residual(after) == pytest.approx(MOST_LEFT * prepared.limit, rel=1e-6)
    assert (after.state, after.in_flight.rounds) == (before.state, (1, 2))
    assert before.local_N.tolist() == [3.0]


def test_what_five_contributions_can_send_is_not_given_up() -> None:
    before = IslandSpan(span_at(20.0, radius=1.0), InFlight(), vector(0.0))
    assert pull_back(before, prepare_contribution(before, round_index=1)) is before


def test_what_was_given_up_is_in_no_later_contribution_and_what_is_in_flight_leaves_once() -> None:
    span = IslandSpan(span_at(100.0, radius=1.0), flying(r1=2.0), vector(3.0))
    prepared = prepare_contribution(span, round_index=2)
    span = record_contribution(pull_back(span, prepared), round_index=2, sent=prepared.delta_N)
    for round_index in (1, 2):
        span = receive(span, round_index, update=1.0)
    assert (residual(span), len(span.in_flight)) == (pytest.approx(16.0, rel=1e-6), 0)
    assert span.local_N.tolist() == pytest.approx([98.0 - 16.0], rel=1e-6)


@settings(deadline=None, max_examples=100)
@given(steps=st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.5, 2.0)), min_size=1, max_size=30))
def test_lengths_add_up_and_are_equal_while_nothing_is_clipped(steps: list[tuple[float, float]]) -> None:
    unsent, learnt, sent, given_up, is_clipped = Unsent(), 0.0, 0.0, 0.0, False
    for made, limit in steps:
        norm = unsent.length + made
        is_clipped |= norm > limit
        unsent, lengths = unsent.after(norm, limit)
        assert is_clipped or lengths == (made, made, 0.0)
        learnt, sent, given_up = learnt + lengths.learnt, sent + lengths.sent, given_up + lengths.given_up
    assert learnt == pytest.approx(sum(made for made, _ in steps))
    assert sent + given_up + unsent.length == pytest.approx(learnt)


def given_up_of(norms_and_limits: list[tuple[float, float]]) -> list[float]:
    unsent, given_up = Unsent(), []
    for norm, limit in norms_and_limits:
        unsent, lengths = unsent.after(norm, limit)
        given_up.append(lengths.given_up)
    return given_up


def test_nothing_is_given_up_until_too_much_was_left_eight_times_in_a_row() -> None:
    too_much, enough = (50.0, 1.0), (5.0, 1.0)
    row = [too_much] * PATIENT_FOR
    assert given_up_of([enough, *row, too_much]) == [0.0] * (1 + PATIENT_FOR) + [45.0]
    assert not any(given_up_of([enough, *row[1:], enough, *row]))


def test_nothing_is_given_up_while_the_limit_rises() -> None:
    rising = [(1e6, 1.5**step) for step in range(2 * PATIENT_FOR)]
    assert not any(given_up_of(rising))
    level = [(1e6, 1.5 ** (2 * PATIENT_FOR))] * (PATIENT_FOR + 2)
    assert [bool(length) for length in given_up_of(rising + level)[-2:]] == [False, True]
    assert not any(given_up_of([(1e9, 1.0)] * (PATIENT_FOR + 1) + [(1e9, 1.5)]))


def test_a_limit_that_goes_up_and_down_puts_nothing_off() -> None:
    swinging = [(1e6, 1.0 if step % 3 else 1.5) for step in range(3 * PATIENT_FOR)]
    assert any(given_up_of(swinging))


@pytest.mark.parametrize("times", [1.0, 30.0, 1000.0])
def test_a_run_whose_norms_are_far_from_the_founding_radius_gives_nothing_up(times: float) -> None:
    radius, unsent, length = founding_radius(1), Unsent(), times * founding_radius(1)
    for _ in range(60):
        norm = unsent.length + length
        unsent, lengths = unsent.after(norm, 4.0 * radius)
        assert lengths.given_up == 0.0
        radius = within_reach(counted_norm(norm, lengths.sent), radius, RADIUS_BOUNDS, RADIUS_MOVED)
    assert unsent.length == 0.0


def test_an_island_that_always_learns_too_much_keeps_four_limits() -> None:
    span, unsent, limit = IslandSpan(span_at(0.0, radius=1.0), InFlight(), vector(0.0)), Unsent(), 4.0
    for round_index in range(1, 40):
        span = span._replace(local_N=span.local_N - 10.0 * limit)
        prepared = prepare_contribution(span, round_index=round_index)
        pulls_back = unsent.pulls_back(prepared.limit)
        span = pull_back(span, prepared) if pulls_back else span
        unsent, lengths = unsent.after(prepared.norm, prepared.limit)
        span = record_contribution(span, round_index=round_index, sent=prepared.delta_N)
        assert pulls_back == (round_index > PATIENT_FOR + 1)
        assert unsent.length == pytest.approx(residual(span), rel=1e-4)
    assert residual(span) == pytest.approx(MOST_LEFT * limit, rel=1e-4)
    assert lengths == pytest.approx((10.0 * limit, limit, 9.0 * limit), rel=1e-4)


def test_recording_leaves_only_the_unsent_part_in_the_residual() -> None:
    local_N = vector(3.0)
    span = record_contribution(IslandSpan(span_at(10.0), InFlight(), local_N), round_index=4, sent=vector(6.5))
    assert residual(span) == 0.5
    assert span.local_N is local_N


def test_the_oldest_beyond_the_limit_are_taken_out_of_local_as_if_included() -> None:
    before = IslandSpan(span_at(10.0), flying(r1=1.0, r2=2.0), vector(3.0))
    after = record_contribution(before, round_index=3, sent=vector(4.0), max_in_flight=1)
    assert after.in_flight.rounds == (3,)
    assert after.local_N.tolist() == [3.0 + 1.0 + 2.0]
    assert residual(after) == residual(before) - 4.0
    assert before.local_N.tolist() == [3.0]


def test_an_entry_after_an_overflow_does_not_take_the_contribution_out_again() -> None:
    span = IslandSpan(span_at(10.0), flying(r1=1.0), vector(3.0))
    span = record_contribution(span, round_index=2, sent=vector(2.0), max_in_flight=1)
    assert receive(span, 1, update=1.0).local_N.tolist() == [span.local_N[0] - 1.0]


def test_the_entry_of_its_round_takes_a_contribution_out() -> None:
    before = IslandSpan(span_at(10.0), flying(r1=4.0, r2=1.0), vector(3.0))
    after = receive(before, 1, update=2.0)
    assert after.state.anchor_N.tolist() == [8.0]
    assert after.local_N.tolist() == [3.0 - 2.0 + 4.0]
    assert after.in_flight.rounds == (2,)
    assert residual(after) == residual(before)


def test_a_skipped_contribution_stays_in_local_and_returns_to_the_residual() -> None:
    before = IslandSpan(span_at(10.0), flying(r1=4.0, r2=1.0), vector(3.0))
    after = receive(before, 2, update=2.0)
    assert len(after.in_flight) == 0
    assert after.local_N.tolist() == [3.0 - 2.0 + 1.0]
    assert residual(after) == residual(before) + 4.0


def test_blend_multiplies_the_residual_and_contributions_in_flight_by_the_local_share() -> None:
    before = IslandSpan(span_at(10.0), flying(r1=4.0, r2=1.0), vector(3.0))
    after = receive(before, 1, update=2.0, merge=HALF)
    assert after.local_N.tolist() == [0.5 * 3.0 + 0.5 * 8.0]
    assert [c.tolist() for c in after.in_flight.vectors] == [[0.5]]
    assert residual(after) == 0.5 * (8.0 - 3.0 - 1.0)


def test_a_blend_without_a_local_share_keeps_nothing_of_local_or_of_contributions_in_flight() -> None:
    before = IslandSpan(span_at(10.0), flying(r1=4.0, r2=1.0), vector(3.0))
    after = receive(before, 1, update=2.0, merge=MergeRule(kind="blend"))
    assert after.in_flight.rounds == (2,)
    assert residual(after) == 0.0


def test_a_refused_entry_changes_nothing() -> None:
    before = IslandSpan(span_at(10.0, round_index=4), flying(r5=4.0), vector(3.0))
    digest = state_digest([before.state])
    with pytest.raises(StateError, match="entry of round 4 cannot follow round 4"):
        receive(before, 4, update=2.0)
    with pytest.raises(NonFiniteUpdate):
        receive(before, 5, update=math.nan)
    assert state_digest([before.state]) == digest
    assert (before.in_flight.rounds, before.local_N.tolist()) == ((5,), [3.0])


def test_a_replacement_treats_all_contributions_in_flight_as_included() -> None:
    before = IslandSpan(span_at(10.0), flying(r1=4.0, r2=1.0), vector(3.0))
    replacement = span_at(7.0, round_index=9)
    after = replace_span(before, replacement=replacement, merge_rule=KEEP)
    assert after.state is replacement
    assert len(after.in_flight) == 0
    assert after.local_N.tolist() == [3.0 + (7.0 - 10.0) + 4.0 + 1.0]
    assert residual(after) == residual(before)


def test_a_replacement_with_nothing_in_flight_moves_local_with_the_anchor() -> None:
    after = replace_span(IslandSpan(span_at(10.0), InFlight(), vector(3.0)), replacement=span_at(7.0), merge_rule=KEEP)
    assert after.local_N.tolist() == [0.0]


def test_blend_mixes_local_with_a_replacement_and_empties_the_list() -> None:
    before = IslandSpan(span_at(10.0), flying(r1=4.0), vector(3.0))
    after = replace_span(before, replacement=span_at(7.0), merge_rule=HALF)
    assert after.local_N.tolist() == [5.0]
    assert len(after.in_flight) == 0


def test_a_replacement_of_another_length_is_refused() -> None:
    wide = genesis_state(vector(1.0, 2.0), ROSTER)
    with pytest.raises(StateError, match="a replacement of 2 elements does not match a span of 1"):
        replace_span(IslandSpan(span_at(1.0), InFlight(), vector(0.0)), replacement=wide, merge_rule=KEEP)


def test_replaying_equals_a_replacement_if_all_contributions_were_included() -> None:
    # A single island: each entry equals its contribution. Replayed or replaced, θ keeps only its later steps.
    sent = IslandSpan(span_at(10.0), flying(r1=4.0, r2=1.0), vector(3.0))
    replayed = receive(receive(sent, 1, update=4.0), 2, update=1.0)
    replaced = replace_span(sent, replacement=replayed.state, merge_rule=KEEP)
    assert replaced.local_N.tolist() == replayed.local_N.tolist()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["inner step", "contribute", "entry", "replacement"]),
        st.integers(-50, 50),
        st.integers(0, 9),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(events=EVENTS)
def test_the_residual_is_always_what_the_island_learnt_and_did_not_contribute(
    events: list[tuple[str, int, int]],
) -> None:
    span = IslandSpan(genesis_state(vector(0.0), ROSTER), InFlight(), vector(0.0))
    untold = 0.0
    for round_index, (event, value, choice) in enumerate(events):
        flight = {own_round: float(c[0]) for own_round, c in span.in_flight.contributions}
        if event == "inner step":
            span = span._replace(local_N=span.local_N - np.float32(value))
            untold += value
        elif event == "contribute":
            prepared = prepare_contribution(span, round_index=round_index, max_norm_ratio=math.inf)
            assert prepared.delta_N.tolist() == [untold]
            span = record_contribution(span, round_index=round_index, sent=vector(value), max_in_flight=3)
            assert len(span.in_flight) <= 3
            untold -= value
        elif event == "replacement":
            replacement = SpanState(head=span.state.head, anchor_N=vector(value), momentum_N=vector(0.0))
            span = replace_span(span, replacement=replacement, merge_rule=KEEP)
            assert len(span.in_flight) == 0
        else:
            entry_round = [*flight, round_index][choice % (len(flight) + 1)]
            span = receive(span, entry_round, float(value))
            untold += sum(c for own_round, c in flight.items() if own_round < entry_round)
            assert all(own_round > entry_round for own_round in span.in_flight.rounds)
        assert residual(span) == untold


@settings(deadline=None)
@given(events=EVENTS)
def test_the_same_events_give_the_same_bits(events: list[tuple[str, int, int]]) -> None:
    def play() -> bytes:
        span = IslandSpan(genesis_state(vector(0.1), ROSTER), InFlight(), vector(0.1))
        trace = b""
        for round_index, (event, value, _) in enumerate(events):
            if event == "inner step":
                span = span._replace(local_N=span.local_N * np.float32(0.9) + np.float32(value) / np.float32(3.0))
            elif event == "contribute":
                delta_N = prepare_contribution(span, round_index=round_index, max_norm_ratio=1.3).delta_N
                span = record_contribution(span, round_index=round_index, sent=delta_N)
            else:
                span = receive(span, round_index, value / 7.0, HALF if event == "replacement" else KEEP)
            trace += state_digest([span.state]) + span.local_N.tobytes()
        return trace

    assert play() == play()
