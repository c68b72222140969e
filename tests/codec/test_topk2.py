"""Claims about the largest elements of each block, with a reference in plain Python that sorts and adds with `fsum`."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.interface import Vector
from p2p_diloco.codec.topk2 import TopK2Codec, num_blocks, num_kept
from p2p_diloco.errors import FrameError, NonFiniteUpdate

CODEC = TopK2Codec()
FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST, LARGEST = 2.0**-64, 2.0**64
BLOCK, KEPT = 4096, 128
reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=200)
finite_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
# Around the bound below which a magnitude becomes zero.
tiny_floats = st.integers(-(2**24), 2**24).map(lambda units: math.ldexp(units, -87))
# Whole numbers: many ties, and sums without rounding.
small_integers = st.integers(-9, 9).map(float)
SIZES = [(1, 8), (31, 8), (32, 8), (33, 8), (64, 8), (96, 11), (4095, 228), (4096, 228), (4097, 236), (8197, 464)]


def vector_of(values: list[float]) -> Vector:
    return np.array(values, dtype=np.float32)


def heavy_vector(elements: int, seed: int) -> Vector:
    rng = np.random.Generator(np.random.PCG64(seed))
    return np.clip(rng.standard_cauchy(elements) ** 5, -LARGEST, LARGEST).astype(np.float32)


def nearest_bfloat16(mean: float) -> int:
    """Return the bits of the nearest allowed scale, or of zero; Python rounds ties to even."""
    if mean < SMALLEST / 2:
        return 0
    fraction, exponent = math.frexp(max(mean, SMALLEST))
    value = min(math.ldexp(round(fraction * 256), exponent - 8), LARGEST)
    return int(struct.unpack("<I", struct.pack("<f", value))[0]) >> 16


def reference_block(block: list[float]) -> tuple[int, int, list[int], list[int]]:
    largest_first = sorted(range(len(block)), key=lambda place: (-abs(block[place]), place))
    places = sorted(largest_first[: max(1, len(block) // 32)])
    magnitudes = [abs(block[place]) for place in places]
    middle = math.fsum(magnitudes) / len(magnitudes)
    lows = [value for value in magnitudes if value <= middle]
    highs = [value for value in magnitudes if value > middle] or lows
    codes = [(abs(block[place]) > middle) + 2 * (block[place] < 0) for place in places]
    low, high = (nearest_bfloat16(math.fsum(values) / len(values)) for values in (lows, highs))
    return low, high, places, codes


def reference_encode(values: list[float]) -> bytes:
    blocks = [reference_block(values[start : start + BLOCK]) for start in range(0, len(values), BLOCK)]
    places = [place for _, _, block_places, _ in blocks for place in block_places]
    codes = [code for _, _, _, block_codes in blocks for code in block_codes]
    scales = [low for low, _, _, _ in blocks] + [high for _, high, _, _ in blocks]
    place_bits = sum(place << (12 * index) for index, place in enumerate(places))
    code_bits = sum(code << (2 * index) for index, code in enumerate(codes))
    return (
        struct.pack(f"<{len(scales)}H", *scales)
        + place_bits.to_bytes(3 * math.ceil(len(places) / 2), "little")
        + code_bits.to_bytes(math.ceil(len(codes) / 4), "little")
    )


def refusal(encoded: bytes, elements: int) -> str:
    """Return the error text, which is the same for both readers."""
    with pytest.raises(FrameError) as of_decode:
        CODEC.decode(encoded, elements)
    with pytest.raises(FrameError) as of_norm:
        CODEC.squared_norm(encoded, elements)
    assert str(of_decode.value) == str(of_norm.value)
    return str(of_decode.value)


def test_bytes_worked_out_by_hand() -> None:
    vector_N = np.zeros(96, dtype=np.float32)
    vector_N[[5, 40, 95]] = 1, -3, 2
    vector_N[60] = 0.5
    encoded = CODEC.encode(vector_N)
    # The mean of 1, 3 and 2 is 2: low is the mean of 1 and 2, high is 3. Places 5, 40, 95 and a zero; codes 0, 3, 0.
    assert encoded == bytes.fromhex("c03f 4040 058002 5f0000 0c")
    expected_N = np.zeros(96, dtype=np.float32)
    expected_N[[5, 40, 95]] = 1.5, -3, 1.5
    assert CODEC.decode(encoded, 96).tobytes() == expected_N.tobytes()
    assert CODEC.squared_norm(encoded, 96) == 2.25 + 9 + 2.25


@pytest.mark.parametrize(("elements", "size"), SIZES)
def test_size_depends_only_on_the_number_of_elements(elements: int, size: int) -> None:
    assert CODEC.encoded_bytes(elements) == size
    for vector_N in (np.zeros(elements, np.float32), heavy_vector(elements, 1)):
        assert len(CODEC.encode(vector_N)) == size


def test_one_element_of_32_is_kept_in_each_block_and_at_least_one() -> None:
    sizes = (0, 1, 63, 64, 4095, 4096, 4097, 4160, 8192)
    assert [num_kept(elements) for elements in sizes] == [0, 1, 1, 2, 127, 128, 129, 130, 256]
    assert [num_blocks(elements) for elements in sizes] == [0, 1, 1, 1, 1, 1, 2, 2, 2]


@given(values=st.lists(small_integers, max_size=300))
@reproducible
def test_bytes_match_the_reference_with_ties(values: list[float]) -> None:
    assert CODEC.encode(vector_of(values)) == reference_encode(values)


@pytest.mark.parametrize("elements", [4095, 4096, 4097, 2 * 4096 + 5, 2**18 + 4096 + 77])
@pytest.mark.parametrize("steps", [1, 3, 2**20])
def test_bytes_match_the_reference_across_blocks_and_chunks(elements: int, steps: int) -> None:
    rng = np.random.Generator(np.random.PCG64(elements))
    vector_N = (rng.standard_normal(elements) * steps).round().astype(np.float32)
    assert CODEC.encode(vector_N) == reference_encode(vector_N.tolist())


def test_the_first_of_equal_magnitudes_are_kept() -> None:
    vector_N = np.ones(2 * BLOCK, dtype=np.float32)
    vector_N[[7, 4000]] = -1, -5
    kept_N = np.flatnonzero(CODEC.decode(CODEC.encode(vector_N), vector_N.size))
    assert kept_N.tolist() == [*range(127), 4000, *range(BLOCK, BLOCK + KEPT)]


def test_a_block_of_equal_magnitudes_is_restored_exactly() -> None:
    for elements in (1, 31, 4095, 4096):
        vector_N = np.zeros(elements, dtype=np.float32)
        vector_N[: num_kept(elements)] = -0.75
        assert CODEC.decode(CODEC.encode(vector_N), elements).tobytes() == vector_N.tobytes()


@given(values=st.lists(finite_floats, max_size=200))
@reproducible
def test_signs_are_kept_and_negative_zero_becomes_zero(values: list[float]) -> None:
    decoded_N = CODEC.decode(CODEC.encode(vector_of(values)), len(values))
    assert not np.signbit(decoded_N[decoded_N == 0]).any()
    for value, decoded in zip(values, decoded_N.tolist(), strict=True):
        assert decoded == 0 or value == 0 or (decoded > 0) == (value > 0)


@pytest.mark.parametrize(("value", "nearest"), [(257, 256), (259, 260), (-257, -256), (257.001, 258)])
def test_a_mean_half_way_between_two_scales_rounds_to_even(value: float, nearest: float) -> None:
    assert CODEC.decode(CODEC.encode(vector_of([value])), 1).tolist() == [nearest]


def test_a_negative_value_that_becomes_zero_loses_its_sign() -> None:
    encoded = CODEC.encode(vector_of([-SMALLEST / 4]))
    assert encoded == bytes(7) + b"\x02"
    assert CODEC.decode(encoded, 1).tobytes() == bytes(4)


def test_negative_zero_has_the_code_of_zero() -> None:
    assert CODEC.encode(vector_of([-0.0] * 70)) == CODEC.encode(vector_of([0.0] * 70))


@given(values=st.lists(finite_floats, max_size=200) | st.lists(tiny_floats, max_size=100))
@example(values=[SMALLEST / 2])
@example(values=[math.nextafter(SMALLEST / 2, 0)])
@example(values=[SMALLEST / 4] * 64)
@example(values=[FLOAT32_MAX] * 64)
@reproducible
def test_the_residual_is_never_longer_than_the_vector(values: list[float]) -> None:
    check_that_nothing_grows(vector_of(values))


@pytest.mark.parametrize("elements", [4095, 4096, 4097, 8197])
@pytest.mark.parametrize("seed", range(3))
def test_the_residual_of_heavy_tails_is_never_longer_than_the_vector(elements: int, seed: int) -> None:
    check_that_nothing_grows(heavy_vector(elements, seed))


def check_that_nothing_grows(vector_N: Vector) -> None:
    decoded_N = CODEC.decode(CODEC.encode(vector_N), vector_N.size)
    before = [Fraction(value) for value in vector_N.tolist()]
    left = [value - Fraction(decoded) for value, decoded in zip(before, decoded_N.tolist(), strict=True)]
    assert sum(value * value for value in left) <= sum(value * value for value in before)


@given(values=st.lists(finite_floats, max_size=300) | st.lists(tiny_floats, max_size=100))
@reproducible
def test_scales_are_the_means_of_low_and_high_magnitudes(values: list[float]) -> None:
    encoded = CODEC.encode(vector_of(values))
    expected = reference_encode(values)
    border = 4 * num_blocks(len(values))
    scales, expected_scales = (np.frombuffer(found[:border], dtype="<u2").astype(int) for found in (encoded, expected))
    # Where float64 rounds a sum, a mean may fall on the other side of a tie.
    assert (np.abs(scales - expected_scales) <= 1).all()
    assert encoded[border:] == expected[border:]


@pytest.mark.parametrize("elements", [1, 33, 4096, 4097, 2**18 + 4096 + 77])
def test_squared_norm_is_exact(elements: int) -> None:
    encoded = CODEC.encode(heavy_vector(elements, 5))
    exact = sum((Fraction(value) ** 2 for value in CODEC.decode(encoded, elements).tolist() if value), Fraction(0))
    assert CODEC.squared_norm(encoded, elements) == float(exact)


def test_squared_norm_does_not_depend_on_the_order_of_blocks() -> None:
    vector_BL = heavy_vector(20 * BLOCK, 6).reshape(20, BLOCK)
    norms = [
        CODEC.squared_norm(CODEC.encode(np.ascontiguousarray(blocks).reshape(-1)), vector_BL.size)
        for blocks in (vector_BL, vector_BL[::-1])
    ]
    assert norms[0] == norms[1]


@pytest.mark.parametrize("value", [FLOAT32_MAX, -FLOAT32_MAX, 3e38, SMALLEST, SMALLEST / 2, SMALLEST / 3, 2.0**-149])
@pytest.mark.parametrize("elements", [65, 4096])
def test_huge_and_tiny_values_stay_within_the_bounds_of_an_update(value: float, elements: int) -> None:
    with np.errstate(all="raise"):
        decoded_N = CODEC.decode(CODEC.encode(np.full(elements, value, dtype=np.float32)), elements)
    kept_N = decoded_N[: num_kept(elements)].astype(np.float64)
    near = float(np.clip(value, -LARGEST, LARGEST))
    assert (np.abs(kept_N - near) <= max(abs(near) / 256, SMALLEST / 2)).all()
    assert ((kept_N == 0) | (np.abs(kept_N) >= SMALLEST)).all()
    assert not decoded_N[num_kept(elements) :].any()


@pytest.mark.parametrize("elements", [1, 64, 4096, 5000])
def test_zeros_decode_to_zeros(elements: int) -> None:
    zeros_N = np.zeros(elements, dtype=np.float32)
    encoded = CODEC.encode(zeros_N)
    assert CODEC.decode(encoded, elements).tobytes() == zeros_N.tobytes()
    assert CODEC.squared_norm(encoded, elements) == 0.0


def test_a_rounding_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^topk2 cannot round stochastically; encode without a rounding seed, or use"):
        CODEC.encode(np.ones(4, dtype=np.float32), rounding_seed=b"")


@pytest.mark.parametrize("element", [0, 4095, 4096, 2**18 + 4])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_one_value_that_is_not_finite_refuses_the_vector(element: int, value: float) -> None:
    vector_N = np.zeros(2**18 + 5, dtype=np.float32)
    vector_N[element] = value
    with pytest.raises(NonFiniteUpdate, match=f"1 of 262149 values .* not finite, the first at element {element};"):
        CODEC.encode(vector_N)


def test_decoding_is_the_same_where_subnormal_numbers_are_flushed() -> None:
    encoded = CODEC.encode(np.ldexp(np.ones(640, dtype=np.float32), -127 + np.arange(640) % 3).astype(np.float32))
    expected, norm = CODEC.decode(encoded, 640).tobytes(), CODEC.squared_norm(encoded, 640)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert (CODEC.decode(encoded, 640).tobytes(), CODEC.squared_norm(encoded, 640)) == (expected, norm)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("is_high", [False, True])
@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (0x7F80, "inf"),
        (0xFF80, "-inf"),
        (0x7FC0, "nan"),
        (0xBF80, "-1"),
        (0x8000, "-0"),
        (0x1F7F, "5.4e-20"),
        (0x5F81, "1.86e+19"),
        (0x0001, "9.18e-41"),
    ],
)
def test_a_scale_that_no_encoder_writes_is_refused(is_high: bool, bits: int, text: str) -> None:
    encoded = bytearray(CODEC.encode(np.ones(3 * BLOCK, dtype=np.float32)))
    at = 2 * (3 * is_high + 1)
    encoded[at : at + 2] = struct.pack("<H", bits)
    expected = f"topk2 block 1 of 3 has a scale of {text}; expected 0 or a number from 5.42e-20 to 1.84e+19"
    assert refusal(encoded, 3 * BLOCK) == expected


def test_the_limits_of_scales_are_accepted() -> None:
    for low, high in ((0, 0x5F80), (0x1F80, 0x1F80), (0x5F80, 0x5F80), (0, 0)):
        encoded = struct.pack("<HH", low, high) + bytes([0, 16, 0, 4])
        assert np.isfinite(CODEC.decode(encoded, 64)).all()


def test_a_high_scale_below_the_low_one_is_refused() -> None:
    encoded = bytearray(CODEC.encode(np.ones(BLOCK + 5, dtype=np.float32)))
    encoded[6:8] = struct.pack("<H", 0x3F00)
    assert refusal(encoded, BLOCK + 5) == "topk2 block 1 of 2 has a high scale of 0.5; expected 1 or more"


@pytest.mark.parametrize(("places", "pair"), [((3, 3, 4), (3, 3)), ((4, 9, 8), (9, 8)), ((5, 4, 4), (5, 4))])
def test_places_that_do_not_increase_are_refused(places: tuple[int, int, int], pair: tuple[int, int]) -> None:
    place_bits = sum(place << (12 * index) for index, place in enumerate(places))
    encoded = bytes(4) + place_bits.to_bytes(6, "little") + bytes(1)
    before, after = pair
    assert (
        refusal(encoded, 96)
        == f"topk2 span of 96 elements keeps element {after} after {before}; expected increasing order"
    )


def test_places_start_again_in_each_block() -> None:
    vector_N = np.zeros(2 * BLOCK, dtype=np.float32)
    vector_N[BLOCK - 1], vector_N[BLOCK] = 1, 2
    assert CODEC.decode(CODEC.encode(vector_N), 2 * BLOCK)[BLOCK - 1 : BLOCK + 1].tolist() == [1, 2]


@pytest.mark.parametrize("place", [5, 6, 4095])
def test_a_place_beyond_a_short_block_is_refused(place: int) -> None:
    encoded = bytearray(CODEC.encode(np.ones(BLOCK + 5, dtype=np.float32)))
    encoded[8 + 192 : 8 + 195] = place.to_bytes(3, "little")
    expected = f"topk2 span of 4101 elements keeps element {BLOCK + place}; expected 0 to 4100"
    assert refusal(encoded, BLOCK + 5) == expected


@pytest.mark.parametrize("place", [1, 16, 4095])
def test_the_empty_place_must_be_empty(place: int) -> None:
    encoded = bytes(4) + (place << 12).to_bytes(3, "little") + bytes(1)
    assert refusal(encoded, 1) == "topk2 span of 1 elements has a place 2; expected 0 there"


@pytest.mark.parametrize("code", [0b0100, 0b110000, 0b10000000])
def test_empty_codes_must_be_empty(code: int) -> None:
    assert refusal(bytes(7) + bytes([code]), 40) == "topk2 span of 40 elements has a code 2; expected 0 there"


@pytest.mark.parametrize("elements", [0, 1, 4096, 4097])
def test_a_span_of_another_size_is_refused(elements: int) -> None:
    size = CODEC.encoded_bytes(elements)
    expected = f"topk2 span of {elements} elements has {size + 1} bytes; expected {size}"
    assert refusal(bytes(size + 1), elements) == expected
