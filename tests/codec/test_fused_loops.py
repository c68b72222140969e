"""One pass over a span gives the same bits as the other loops one after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p2p_diloco.codec.codec import Int4Codec
from p2p_diloco.codec.vectors import Vector, compiled_loops, read_only
from p2p_diloco.outer.mean import NO_LIMITS

BLOCKS = 40
ELEMENTS = 64 * BLOCKS
LIMITS = Int4Codec().loop_limits()
RATES = (np.float32(0.7), np.float32(0.3))
LEAST = np.int32(-7)
PLAIN = read_only(np.empty(0, np.bool_))
LOOPS = compiled_loops()
assert LOOPS is not None


def vector(seed: int, size: float = 1.0) -> Vector:
    """Return numbers of many magnitudes, including a few blocks of zeros."""
    rng = np.random.default_rng(seed)
    numbers_N = rng.standard_normal(ELEMENTS) * np.exp2(np.repeat(rng.integers(-30, 4, BLOCKS), 64)) * size
    numbers_N[np.repeat(rng.random(BLOCKS) < 0.1, 64)] = 0.0
    return read_only(numbers_N.astype(np.float32))


def places() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.empty(BLOCKS, np.uint16), np.empty(32 * BLOCKS, np.uint8), np.empty(BLOCKS, np.int64)


def encoded(vector_N: Vector, noise_N: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bits of scales, codes, and sums of squared codes, as computed by the loops over blocks."""
    scale_bits_B, packed, squares_B = places()
    noise_N = noise_N if noise_N is not None else np.empty(0, np.uint16)
    assert LOOPS.encode(vector_N, noise_N, LIMITS, scale_bits_B, packed)
    assert LOOPS.code_squares(read_only(packed), LEAST, squares_B)
    return read_only(scale_bits_B), read_only(packed), squares_B


def decoded(scale_bits_B: np.ndarray, packed: np.ndarray) -> Vector:
    out_N = np.empty(ELEMENTS, np.float32)
    assert LOOPS.decode(scale_bits_B, packed, LEAST, out_N)
    return read_only(out_N)


@pytest.mark.parametrize("seed", range(5))
def test_contributing_matches_the_separate_loops(seed: int) -> None:
    anchor_N, local_N = vector(seed), vector(seed + 100)
    places_of_ours = places()
    squared = LOOPS.contribute4(anchor_N, local_N, LIMITS, *places_of_ours)
    delta_N = np.empty(ELEMENTS, np.float32)
    np.subtract(anchor_N, local_N, out=delta_N)
    assert squared == LOOPS.sum_of_squares(read_only(delta_N))
    for ours, expected in zip(places_of_ours, encoded(read_only(delta_N)), strict=True):
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_contribution_that_is_not_finite_has_no_length(wrong: float) -> None:
    local_N = vector(1).copy()
    local_N[70] = wrong
    assert math.isnan(LOOPS.contribute4(vector(0), read_only(local_N), LIMITS, *places()))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_own", [True, False])
def test_following_matches_the_separate_loops(seed: int, has_own: bool) -> None:
    now = anchor_N, momentum_N, local_N = vector(seed), vector(seed + 1, 0.01), vector(seed + 2)
    entry, own = encoded(vector(seed + 3, 0.1))[:2], encoded(vector(seed + 4, 0.1))[:2]
    leaving = own if has_own else (own[0][:0], own[1][:0])
    ours = tuple(np.empty(ELEMENTS, np.float32) for _ in now)
    assert LOOPS.follow4(entry, leaving, now, RATES, LIMITS, ours)
    expected = tuple(np.empty(ELEMENTS, np.float32) for _ in now)
    assert LOOPS.outer_step(anchor_N, momentum_N, decoded(*entry), RATES, expected[0], expected[1])
    after_N = read_only(expected[0])
    if has_own:
        LOOPS.follow(local_N, anchor_N, after_N, decoded(*own), expected[2])
    else:
        expected[2][:] = local_N + (after_N - anchor_N)
    for mine, theirs in zip(ours, expected, strict=True):
        assert np.array_equal(mine.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_averaging_matches_the_separate_loops(seed: int, is_drawn: bool, num_parts: int) -> None:
    parts = [encoded(vector(seed + place, 0.1)) for place in range(num_parts)]
    shares_P = np.random.default_rng(seed).random(num_parts, dtype=np.float32)
    noise_N = np.random.default_rng(seed).integers(0, 1 << 16, ELEMENTS if is_drawn else 0, dtype=np.uint16)
    scales_PB, codes_PN = np.stack([part[0] for part in parts]), np.stack([part[1] for part in parts])
    scale_bits_B, packed, squares_B = places()
    squares_PB = np.empty((num_parts, BLOCKS), np.int64)
    mine = (scale_bits_B, packed, squares_PB, squares_B)
    assert LOOPS.average4(scales_PB, codes_PN, shares_P, PLAIN, NO_LIMITS, noise_N, LIMITS, *mine)
    mean_N = np.empty(ELEMENTS, np.float32)
    for place, (part, share) in enumerate(zip(parts, shares_P, strict=True)):
        assert LOOPS.accumulate(*part[:2], LEAST, share, place == 0, mean_N)
        assert np.array_equal(squares_PB[place], part[2])
    for ours, expected in zip((scale_bits_B, packed, squares_B), encoded(read_only(mean_N), noise_N), strict=True):
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("bits", [1, 0x7F, LIMITS[2] + 1, 0x7F80, 0x8000, 0xFFFF])
def test_a_scale_that_no_encoder_writes_is_refused(bits: int) -> None:
    scale_bits_B, packed, squares_B = encoded(vector(1))
    wrong_B = scale_bits_B.copy()
    wrong_B[-1] = bits
    now, ours = (vector(1),) * 3, tuple(np.empty(ELEMENTS, np.float32) for _ in range(3))
    nothing = (scale_bits_B[:0], packed[:0])
    assert not LOOPS.follow4((read_only(wrong_B), packed), nothing, now, RATES, LIMITS, ours)
    none_N, one_P = np.empty(0, np.uint16), np.ones(1, np.float32)
    mine = (*places()[:2], np.empty((1, BLOCKS), np.int64), squares_B)
    assert not LOOPS.average4(wrong_B[None], packed.copy()[None], one_P, PLAIN, NO_LIMITS, none_N, LIMITS, *mine)
