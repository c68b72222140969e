"""Claims about the bfloat16 codec, with rounding in rational numbers as the reference."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec import codec as codec_module
from p2p_diloco.codec.codec import Bfloat16Codec, RoundingBits
from p2p_diloco.errors import FrameError

CODEC = Bfloat16Codec()
reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=300)
floats_within_bounds = st.floats(min_value=-(2.0**64), max_value=2.0**64, width=32).filter(
    lambda value: value == 0 or abs(value) >= 2.0**-64
)
SMALLEST_BITS, LARGEST_BITS = 0x1F80, 0x5F80


def float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def value_of(upper_bits: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", upper_bits << 16))[0])


def nearest_bits(value: float) -> int:
    """Compare both neighbours as rational numbers: no bit tricks."""
    bits = float32_bits(value)
    lower, upper = bits >> 16, (bits >> 16) + 1
    to_lower, to_upper = abs(Fraction(value) - value_of(lower)), abs(Fraction(value) - value_of(upper))
    return lower if to_lower < to_upper or (to_lower == to_upper and lower % 2 == 0) else upper


@given(values=st.lists(floats_within_bounds, max_size=60))
@reproducible
def test_nearest_rounding_matches_rational_arithmetic(values: list[float]) -> None:
    vector_N = np.array(values, dtype=np.float32)
    expected = struct.pack(f"<{len(values)}H", *(nearest_bits(value) for value in values))
    assert CODEC.encode(vector_N) == expected


@given(values=st.lists(floats_within_bounds, max_size=60), seed=st.binary(max_size=8))
@reproducible
def test_stochastic_rounding_adds_the_random_bits_below_the_cut(values: list[float], seed: bytes) -> None:
    noise = RoundingBits(seed).draw(len(values)).tolist()
    expected = []
    for value, bits in zip(values, noise, strict=True):
        expected.append((float32_bits(value) + bits) >> 16)
    encoded = CODEC.encode(np.array(values, dtype=np.float32), rounding_seed=seed)
    assert list(struct.unpack(f"<{len(values)}H", encoded)) == expected


@pytest.mark.parametrize("value", [1.00390625, 1.0 + 2**-20, -3.14159, 1e-18, 0.1])
def test_stochastic_rounding_is_exactly_unbiased(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class EveryDrawOnce(RoundingBits):
        def draw(self, elements: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
            first = getattr(self, "first", 0)
            self.first = first + elements
            return np.arange(first, first + elements).astype(np.uint16)

    monkeypatch.setattr(codec_module, "RoundingBits", EveryDrawOnce)
    vector_N = np.full(2**16, value, dtype=np.float32)
    decoded_N = CODEC.decode(CODEC.encode(vector_N, rounding_seed=b""), 2**16)
    mean = sum(Fraction(rounded) * int(count) for rounded, count in zip(*counts(decoded_N), strict=True)) / 2**16
    assert mean == Fraction(float(vector_N[0]))


def counts(values_N: np.ndarray[tuple[int], np.dtype[np.float32]]) -> tuple[list[float], list[int]]:
    values, numbers = np.unique(values_N, return_counts=True)
    return values.tolist(), numbers.tolist()


@given(value=floats_within_bounds, seed=st.none() | st.binary(max_size=8))
@reproducible
def test_error_is_below_one_unit_and_below_half_a_unit_to_nearest(value: float, seed: bytes | None) -> None:
    decoded = float(CODEC.decode(CODEC.encode(np.array([value], dtype=np.float32), rounding_seed=seed), 1)[0])
    share = Fraction(1, 256 if seed is None else 128)
    assert abs(Fraction(decoded) - Fraction(value)) <= abs(Fraction(value)) * share


@pytest.mark.parametrize("seed", [None, b"seed"])
def test_values_too_large_are_clipped_and_values_too_small_become_zero(seed: bytes | None) -> None:
    largest = np.finfo(np.float32).max
    encoded = CODEC.encode(np.array([largest, -largest, 2.0**-65] * 200, dtype=np.float32), rounding_seed=seed)
    assert encoded == struct.pack("<3H", LARGEST_BITS, 0x8000 | LARGEST_BITS, 0) * 200


@pytest.mark.parametrize("bits", [0x0001, 0x0080, SMALLEST_BITS - 1, LARGEST_BITS + 1, 0x7F7F], ids=hex)
def test_a_frame_with_a_value_that_no_encoder_writes_is_refused(bits: int) -> None:
    encoded = struct.pack("<3H", 0x3F80, 0x3F80, bits)
    for call in (CODEC.decode, CODEC.squared_norm):
        with pytest.raises(FrameError, match="bfloat16 span holds 1 of 3 values out of bounds, the first at element 2"):
            call(encoded, 3)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81], ids=hex)
def test_a_frame_with_a_value_that_is_not_finite_is_refused(bits: int) -> None:
    encoded = struct.pack("<3H", 0x3F80, 0x3F80, bits)
    for call in (CODEC.decode, CODEC.squared_norm):
        with pytest.raises(FrameError, match="bfloat16 span holds 1 of 3 values that are not finite, the first at el"):
            call(encoded, 3)


def test_all_patterns_within_bounds_are_restored_bit_for_bit() -> None:
    patterns_N = np.arange(2**16, dtype=np.uint32)
    magnitude_N = patterns_N & 0x7FFF
    within_N = (magnitude_N >= SMALLEST_BITS) & (magnitude_N <= LARGEST_BITS)
    patterns_N = patterns_N[within_N | (magnitude_N == 0)]
    vector_N = (patterns_N << 16).view(np.float32)
    for seed in (None, b"seed"):
        encoded = CODEC.encode(vector_N, rounding_seed=seed)
        assert encoded == patterns_N.astype("<u2").tobytes()
        assert CODEC.decode(encoded, vector_N.size).tobytes() == vector_N.tobytes()
