"""The fused operations of an island give the same bits, and the same refusals, as the step-by-step ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.codec.codec import parts_of as blocks_of
from p2p_diloco.codec.vectors import Vector, compiled_loops, num_blocks, numpy_alone
from p2p_diloco.errors import FrameError, NonFiniteUpdate, P2PDilocoError, RoundError, StateError
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import InFlight, IslandSpan, PendingContribution, SpanState, content_digest
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.span.fused import contribute_span, follow_span
from p2p_diloco.span.reduce import Codecs, EncodedMean, reduce_parts
from p2p_diloco.span_log import LONGEST_BLOCK, AbsorbedEntry, SpanHead
from simulator.maths import radial_mean

ROSTER = sha256(b"a roster")
INT4, INT8 = codec_named("int4"), codec_named("int8")
CODECS = Codecs(contribution=INT4, row_mean=INT8, entry=INT4, rounds_stochastically=True)
OUTER = OuterRule(learning_rate=0.7, momentum=0.3, final_share=0.25, planned_entries=3)  # so high are these spans
SIZES = st.sampled_from([1, 63, 64, 128, 640, 4096, 4097])
SEEDS = st.integers(0, 2**32 - 1)
MERGES = [MergeRule(), MergeRule(kind="blend", alpha=0.5), MergeRule(kind="blend")]


def some(seed: int, elements: int, size: float = 1.0) -> Vector:
    """Return numbers of many magnitudes around `size`."""
    rng = np.random.default_rng(seed)
    powers_N = np.exp2(rng.integers(-20, 3, elements)).astype(np.float32)
    return np.asarray(rng.standard_normal(elements, dtype=np.float32) * powers_N * np.float32(size), np.float32)


def span(seed: int, elements: int, radius: float = 0.0, round_index: int = 5) -> SpanState:
    anchor_N, momentum_N = some(seed, elements), some(seed + 1, elements, 0.01)
    digest = content_digest(anchor_N, momentum_N, ROSTER)
    head = SpanHead(digest=digest, height=3, round=round_index, roster=ROSTER, radius=radius, median_weight=1.0)
    return SpanState(head=head, anchor_N=anchor_N, momentum_N=momentum_N)


def local(state: SpanState, seed: int) -> Vector:
    return state.anchor_N + some(seed, state.elements, 0.02)


def outcome(work: Callable[[], Any]) -> Any:
    """Return the outcome in a form that can be compared: an error as its text."""
    try:
        done = work()
    except P2PDilocoError as error:
        return type(error), str(error)
    norm, payload, advance = (None, None, done) if hasattr(done, "in_flight") else done
    state, in_flight, local_N = advance
    flying = [(one.round, one.decoded_N.tobytes()) for one in in_flight.contributions]
    return norm, payload, state.head, state.anchor_N.tobytes(), state.momentum_N.tobytes(), flying, local_N.tobytes()


def both(work: Callable[[], Any]) -> Any:
    """Run it fused and step by step; return the outcome, which must be equal except for the norm's last digit."""
    assert compiled_loops() is not None
    at_once = outcome(work)
    with numpy_alone():
        by_steps = outcome(work)
    assert at_once[1:] == by_steps[1:]
    assert at_once[0] == (pytest.approx(by_steps[0], rel=1e-14) if isinstance(by_steps[0], float) else by_steps[0])
    return at_once


def contribute(
    state: SpanState, in_flight: InFlight, local_N: Vector, round_index: int = 9, *, pulls_back: bool = False
) -> Any:
    return contribute_span(
        IslandSpan(state, in_flight, local_N),
        round_index=round_index,
        codec=INT4,
        max_norm_ratio=2.0,
        max_in_flight=2,
        pulls_back=pulls_back,
    )


def follow(
    state: SpanState, in_flight: InFlight, local_N: Vector, payload: bytes, *, round_index: int = 9,
    merge: MergeRule = MERGES[0],
) -> Any:  # fmt: skip
    entry = AbsorbedEntry(digest=sha256(payload), round=round_index, roster=ROSTER, radius=1.5, median_weight=2.0)
    return follow_span(
        IslandSpan(state, in_flight, local_N),
        entry=entry,
        payload=payload,
        codecs=CODECS,
        outer_rule=OUTER,
        merge_rule=merge,
    )


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS, elements=SIZES, radius=st.sampled_from([0.0, 1e-3, 1e-1, 1e3]), flying=st.integers(0, 3))
def test_contributing_at_once_is_contributing_step_by_step(
    seed: int, elements: int, radius: float, flying: int
) -> None:
    state = span(seed, elements, radius)
    in_flight = InFlight()
    for own_round in range(flying):
        payload = INT4.encode(some(seed + 7 + own_round, elements, 0.01))
        in_flight = in_flight.with_contribution(
            own_round, PendingContribution(payload, lambda sent: INT4.decode(sent, elements))
        )
    result = both(lambda: contribute(state, in_flight, local(state, seed + 3)))
    assert INT4.squared_norm(result[1], elements) ** 0.5 <= (2.0 * radius or float("inf"))


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, elements=SIZES, radius=st.sampled_from([1e-4, 1e-2, 1e3]), flying=st.booleans())
def test_a_contribution_that_may_pull_back_leaves_four_limits_at_most(
    seed: int, elements: int, radius: float, flying: bool
) -> None:
    state, in_flight, limit = span(seed, elements, radius), InFlight(), 2.0 * radius
    if flying:
        in_flight = in_flight.with_contribution(7, some(seed + 7, elements, 0.01))
    local_N = local(state, seed + 3)
    norm, payload, *_ = both(lambda: contribute(state, in_flight, local_N, pulls_back=True))
    sent = contribute(state, in_flight, local_N, pulls_back=True).advance
    delta_N = state.anchor_N - sent.local_N - sum(in_flight.vectors, np.zeros(elements, np.float32))
    assert np.linalg.norm(delta_N) == pytest.approx(min(norm, 5.0 * limit), rel=1e-3)
    same = contribute(state, in_flight, local_N)
    assert (same.norm, bytes(same.payload)) == (norm, bytes(payload)), "what is sent stays the same"
    assert (sent.local_N is local_N) == (norm <= 5.0 * limit)


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, elements=SIZES)
def test_an_encoding_above_the_limit_is_shortened_even_if_its_vector_is_not(seed: int, elements: int) -> None:
    state = span(seed, elements)
    local_N = local(state, seed + 3)
    first = contribute(state, InFlight(), local_N)
    longest = 0.5 * INT4.squared_norm(first.payload, elements) ** 0.5 * (1.0 - 2.0**-20)
    strict = replace(state, head=replace(state.head, radius=longest))
    result = both(lambda: contribute(strict, InFlight(), local_N))
    assert INT4.squared_norm(result[1], elements) ** 0.5 <= 2.0 * longest


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS, elements=SIZES, merge=st.sampled_from(MERGES), own=st.sampled_from([None, 8, 9]))
def test_following_at_once_is_following_step_by_step(
    seed: int, elements: int, merge: MergeRule, own: int | None
) -> None:
    state = span(seed, elements)
    in_flight, local_N = InFlight(), local(state, seed + 3)
    if own is not None:
        in_flight = contribute(state, in_flight, local_N, round_index=own).advance.in_flight
    payload = INT4.encode(some(seed + 5, elements, 0.01), rounding_seed=b"seed")
    result = both(lambda: follow(state, in_flight, local_N, payload, merge=merge))
    assert result[2].height == 4
    assert result[5] == []


def reduce(
    parts: list[Part], elements: int, *, norm_limit: float = float("inf"), stage: Stage = Stage.WHOLE,
    codecs: Codecs = CODECS, levels: bool = False,
) -> Any:  # fmt: skip
    action = ReduceSpan(
        round=4,
        span=SpanId(0, 0),
        stage=stage,
        parts=tuple(parts),
        norm_limit=norm_limit,
        rounding_seed=b"seed",
        levels=levels,
    )
    at_once = reduce_parts(action, codecs, elements)
    with numpy_alone():
        assert at_once == reduce_parts(action, codecs, elements)
    return at_once


def parts_of(seed: int, elements: int, num_parts: int, size: float = 1.0) -> list[Part]:
    """Return parts of several peers; the first is three times as long as the others."""
    return [
        Part(
            peer=PeerId(sha256(bytes([place]))),
            payload=INT4.encode(some(seed + place, elements, size * (3.0 if place == 0 else 1.0))),
            weight=1.0 + place,
            norm=1.0,
        )
        for place in range(num_parts)
    ]


@settings(deadline=None, max_examples=60)
@given(
    seed=SEEDS,
    elements=SIZES,
    num_parts=st.integers(1, 6),
    limit=st.sampled_from([float("inf"), 10.0]),
    levels=st.booleans(),
)
def test_averaging_at_once_is_averaging_step_by_step(
    seed: int, elements: int, num_parts: int, limit: float, levels: bool
) -> None:
    result = reduce(parts_of(seed, elements, num_parts), elements, norm_limit=limit, levels=levels)
    assert isinstance(result, str) or INT4.squared_norm(result.payload, elements) == pytest.approx(result.norm**2)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, elements=SIZES, num_parts=st.integers(1, 6), share=st.sampled_from([0.5, 1.0]))
def test_radial_means_at_once_are_those_of_decoded_vectors(
    seed: int, elements: int, num_parts: int, share: float
) -> None:
    marks_B = np.random.default_rng(seed).random(num_blocks(elements)) < share
    parts = parts_of(seed, elements, num_parts)
    result = reduce(parts, elements, codecs=replace(CODECS, radial={SpanId(0, 0): marks_B}))
    decoded = [INT4.decode(part.payload, elements) for part in parts]
    mean_N = radial_mean(decoded, [part.weight for part in parts], marks_B)
    assert result.payload == INT4.encode(mean_N, rounding_seed=b"seed")


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, num_parts=st.integers(1, 7), share=st.sampled_from([0.0, 0.5, 1.0]))
def test_among_strangers_long_blocks_are_limited_as_in_the_mean_of_decoded_vectors(
    seed: int, num_parts: int, share: float
) -> None:
    """The first part is three times as long as the others."""
    elements, rng = 640, np.random.default_rng(seed)
    common_N = some(seed, elements)
    parts = [
        emptied(
            replace(part, weight=1.0, payload=INT4.encode((1 + 2 * (place == 0)) * (common_N + vector_N))),
            elements,
            rng,
        )
        for place, (part, vector_N) in enumerate(
            (part, INT4.decode(part.payload, elements)) for part in parts_of(seed, elements, num_parts)
        )
    ]
    marks_B = rng.random(num_blocks(elements)) < share
    result = reduce(parts, elements, codecs=replace(CODECS, radial={SpanId(0, 0): marks_B}), levels=True)
    kept = [part for part in parts if part.peer in result.sound]
    decoded = [INT4.decode(part.payload, elements) for part in kept]
    mean_N = radial_mean(decoded, [1.0] * len(kept), marks_B, LONGEST_BLOCK)
    assert result.payload == INT4.encode(mean_N, rounding_seed=b"seed")


def emptied(part: Part, elements: int, rng: np.random.Generator) -> Part:
    """Return a part with some empty blocks, where scale and codes are zero, or only the codes."""
    payload = np.frombuffer(part.payload, np.uint8).copy()
    scale_bits_B, packed = blocks_of(payload, elements)
    has_no_codes_B = rng.random(len(scale_bits_B)) < 0.6
    packed.reshape(len(scale_bits_B), -1)[has_no_codes_B] = 0
    scale_bits_B[has_no_codes_B & (rng.random(len(scale_bits_B)) < 0.5)] = 0
    return replace(part, payload=payload.tobytes())


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, num_parts=st.integers(1, 4))
def test_radial_means_of_parts_with_empty_blocks_have_nothing_of_other_blocks(seed: int, num_parts: int) -> None:
    elements, rng = 640, np.random.default_rng(seed)
    parts = [emptied(part, elements, rng) for part in parts_of(seed, elements, num_parts)]
    marks_B = np.ones(num_blocks(elements), np.bool_)
    result = reduce(parts, elements, codecs=replace(CODECS, radial={SpanId(0, 0): marks_B}))
    decoded = [INT4.decode(part.payload, elements) for part in parts]
    mean_N = radial_mean(decoded, [part.weight for part in parts], marks_B)
    assert result.payload == INT4.encode(mean_N, rounding_seed=b"seed")


def test_spans_without_marks_have_plain_means() -> None:
    parts, marks_B = parts_of(1, 128, 3), np.ones(2, np.bool_)
    plain, radial = (
        reduce(parts, 128, codecs=replace(CODECS, radial={span_id: marks_B})).payload
        for span_id in (SpanId(0, 1), SpanId(0, 0))
    )
    assert reduce(parts, 128).payload == plain != radial
    assert INT4.squared_norm(radial, 128) > INT4.squared_norm(plain, 128)


@pytest.mark.parametrize("stage", [Stage.ROW, Stage.FINISH])
def test_rows_of_a_grid_have_radial_means_too(stage: Stage) -> None:
    source, target = CODECS.of(stage)
    vectors = [some(place, 128) for place in range(3)]
    parts = [
        replace(part, payload=source.encode(vector_N))
        for part, vector_N in zip(parts_of(1, 128, 3), vectors, strict=True)
    ]
    marks_B = np.ones(2, np.bool_)
    result = reduce(parts, 128, stage=stage, codecs=replace(CODECS, radial={SpanId(0, 0): marks_B}))
    decoded = [source.decode(part.payload, 128) for part in parts]
    mean_N = radial_mean(decoded, [part.weight for part in parts], marks_B)
    assert result.payload == target.encode(mean_N, rounding_seed=None if stage is Stage.ROW else b"seed")


def test_only_a_part_that_is_too_long_or_unreadable_is_left_out_of_the_mean() -> None:
    parts = parts_of(1, 128, 4)
    norms = [INT4.squared_norm(part.payload, 128) ** 0.5 for part in parts]
    assert norms[0] > 1.1 * max(norms[1:])
    assert len(reduce(parts, 128, norm_limit=1.05 * max(norms[1:])).sound) == 3
    for spoilt in (b"\xff" * 68, b"short", bytes(4) + b"\x88" * 64):
        assert len(reduce([parts[1], replace(parts[0], payload=spoilt)], 128).sound) == 1
    assert "weight 0" in reduce([replace(parts[0], weight=0.0)], 128)
    assert "no contribution was sound" in reduce([], 128)


def test_both_ways_agree_at_the_bound_of_an_update() -> None:
    parts = [replace(part, payload=INT4.encode(np.full(128, 3.3e38, np.float32))) for part in parts_of(1, 128, 3)]
    assert isinstance(reduce(parts, 128), EncodedMean)


def test_means_of_rows_have_eight_bits_and_are_computed_step_by_step() -> None:
    result = reduce(parts_of(3, 128, 3), 128, stage=Stage.ROW)
    assert len(result.payload) == INT8.encoded_bytes(128)


def test_only_whole_blocks_of_four_bits_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows that the two properties above really compare two implementations."""
    loops = compiled_loops()
    assert loops is not None
    calls: list[str] = []
    for name in ("contribute4", "average4", "follow4"):
        loop = getattr(loops, name)
        monkeypatch.setattr(loops, name, lambda *args, _loop=loop, _name=name: (calls.append(_name), _loop(*args))[1])
    for elements in (128, 100):
        state = span(1, elements)
        sent = contribute(state, InFlight(), local(state, 2))
        reduce(parts_of(1, elements, 2), elements)
        follow(state, sent.advance.in_flight, sent.advance.local_N, sent.payload)
        assert calls == ["contribute4", "average4", "follow4"]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 127])
def test_a_diverged_island_contributes_nothing(wrong: float, place: int) -> None:
    state = span(1, 128)
    local_N = local(state, 2)
    local_N[place] = wrong
    assert both(lambda: contribute(state, InFlight(), local_N))[0] is NonFiniteUpdate


def test_a_settled_round_is_refused() -> None:
    state = span(1, 128)
    assert both(lambda: contribute(state, InFlight(), local(state, 2), round_index=5))[0] is RoundError
    assert both(lambda: follow(state, InFlight(), local(state, 2), bytes(68), round_index=5))[0] is StateError


@pytest.mark.parametrize("spoil", [
    lambda raw: raw[:-1],
    lambda raw: raw[:4] + b"\x88" + raw[5:],
    lambda raw: raw[:1] + b"\x7f" + raw[2:],
    lambda raw: b"\x01\x00" + raw[2:],
], ids=["short", "a code too low", "a scale too large", "a scale too small"])  # fmt: skip
def test_an_entry_that_no_encoder_writes_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    state = span(1, 128)
    payload = spoil(INT4.encode(some(3, 128)))
    assert both(lambda: follow(state, InFlight(), local(state, 2), payload))[0] is FrameError


def test_a_step_on_damaged_memory_changes_nothing() -> None:
    state = span(1, 128)
    anchor_N = state.anchor_N.copy()
    anchor_N[77] = np.inf
    state = SpanState(head=state.head, anchor_N=anchor_N, momentum_N=state.momentum_N)
    local_N = anchor_N.copy()
    result = both(lambda: follow(state, InFlight(), local_N, INT4.encode(some(3, 128))))
    assert result[0] is NonFiniteUpdate
    assert local_N.tobytes() == anchor_N.tobytes()
