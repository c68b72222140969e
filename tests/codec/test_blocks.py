"""Claims about blocks of scaled codes, with a reference in plain Python that rounds through `struct`."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.codec import BlockCodec, Int4Codec, Int8Codec, RoundingBits, largest_scale_bits
from p2p_diloco.codec.vectors import Vector, num_blocks
from p2p_diloco.errors import FrameError

pytestmark = pytest.mark.usefixtures("loops")

reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=200)
both_codecs = pytest.mark.parametrize("codec", [Int8Codec(), Int4Codec()], ids=["int8", "int4"])
finite_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
# Like an update: many values of similar size, a few far larger.
mild_floats = st.floats(min_value=-1.0, max_value=1.0, width=32)
vectors = st.lists(finite_floats, max_size=140) | st.lists(mild_floats, max_size=140)
FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST_SCALE = 0x1F80


def to_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def bfloat16_value(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def reference_scale_bits(block: list[float], largest_code: int) -> int:
    peak = max(abs(value) for value in block)
    if peak == 0:
        return 0
    bits = float32_bits(to_float32(peak / largest_code))
    rounded_up = bits // 65536 + (bits % 65536 > 0)
    ceiling = float32_bits(to_float32(2.0**64 / largest_code)) // 65536
    return min(max(rounded_up, SMALLEST_SCALE), ceiling)


def reference_code(value: float, scale: float, largest_code: int, bits: int | None) -> int:
    if scale == 0:
        return 0
    quotient = to_float32(value * to_float32(1 / scale))
    quotient = min(max(quotient, -largest_code), largest_code)
    if bits is not None:
        quotient = to_float32(quotient + ((bits + 0.5) / 65536 - 0.5))
    return round(quotient)


def reference_encode(values: list[float], largest_code: int, seed: bytes | None) -> bytes:
    noise = [None] * len(values) if seed is None else RoundingBits(seed).draw(len(values)).tolist()
    scales, codes = [], []
    for start in range(0, len(values), 64):
        block = values[start : start + 64]
        scales.append(reference_scale_bits(block, largest_code))
        scale = bfloat16_value(scales[-1])
        pairs = zip(block, noise[start : start + 64], strict=True)
        codes += [reference_code(value, scale, largest_code, bits) for value, bits in pairs]
    head = struct.pack(f"<{len(scales)}H", *scales)
    if largest_code == 127:
        return head + struct.pack(f"<{len(codes)}b", *codes)
    codes += [0] * (len(codes) % 2)
    return head + bytes((low & 15) | (high & 15) << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def reference_decode(encoded: bytes, elements: int, largest_code: int) -> list[float]:
    border = 2 * math.ceil(elements / 64)
    scales = [bfloat16_value(bits) for bits in struct.unpack(f"<{border // 2}H", encoded[:border])]
    if largest_code == 127:
        codes = list(struct.unpack(f"<{elements}b", encoded[border:]))
    else:
        nibbles = [nibble for byte in encoded[border:] for nibble in (byte & 15, byte >> 4)]
        codes = [nibble - 16 if nibble > 7 else nibble for nibble in nibbles][:elements]
    return [to_float32(scales[place // 64] * code) for place, code in enumerate(codes)]


@both_codecs
@given(values=vectors, seed=st.none() | st.binary(max_size=8))
@reproducible
def test_bytes_match_the_reference(codec: BlockCodec, values: list[float], seed: bytes | None) -> None:
    encoded = codec.encode(np.array(values, dtype=np.float32), rounding_seed=seed)
    assert encoded == reference_encode(values, codec.largest_code, seed)


@both_codecs
@given(values=vectors)
@reproducible
def test_decoded_values_match_the_reference(codec: BlockCodec, values: list[float]) -> None:
    encoded = codec.encode(np.array(values, dtype=np.float32))
    expected = np.array(reference_decode(encoded, len(values), codec.largest_code), dtype=np.float32)
    assert codec.decode(encoded, len(values)).tobytes() == expected.tobytes()


@both_codecs
@pytest.mark.parametrize("seed", [None, b"seed"])
def test_chunks_join_without_a_seam(codec: BlockCodec, seed: bytes | None) -> None:
    elements = 2**15 + 129
    vector_N = np.random.Generator(np.random.PCG64(1)).standard_normal(elements, dtype=np.float32)
    encoded = codec.encode(vector_N, rounding_seed=seed)
    assert encoded == reference_encode(vector_N.tolist(), codec.largest_code, seed)
    assert codec.decode(encoded, elements).tolist() == reference_decode(encoded, elements, codec.largest_code)


@both_codecs
@given(values=st.lists(finite_floats, min_size=1, max_size=64), seed=st.none() | st.binary(max_size=8))
@reproducible
def test_error_is_below_a_step_and_below_half_a_step_to_nearest(
    codec: BlockCodec, values: list[float], seed: bytes | None
) -> None:
    encoded = codec.encode(np.array(values, dtype=np.float32), rounding_seed=seed)
    decoded_N = codec.decode(encoded, len(values))
    scale_bits = struct.unpack("<H", encoded[:2])[0]
    scale = Fraction(bfloat16_value(scale_bits))
    peak = max(abs(Fraction(value)) for value in values)
    if scale_bits < largest_scale_bits(codec.largest_code):
        # A scale is at most 1/128 above what the peak needs, unless the peak is tiny.
        assert scale <= max(peak / codec.largest_code * Fraction(129, 128), Fraction(2) ** -64)
    step = scale if seed is not None else scale / 2
    clipped = max(Fraction(0), peak - codec.largest_code * scale)
    for value, decoded in zip(values, decoded_N.tolist(), strict=True):
        # Two roundings of the quotient to 24 bits move it by less than 2^-15 of a step.
        assert abs(Fraction(value) - Fraction(decoded)) <= max(step, clipped) * (1 + Fraction(1, 2**14))


@both_codecs
def test_the_peak_of_a_block_is_not_clipped(codec: BlockCodec) -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    vector_BK = rng.standard_normal((400, 64), dtype=np.float32)
    decoded_BK = codec.decode(codec.encode(vector_BK.reshape(-1)), vector_BK.size).reshape(400, 64)
    peak_B = np.abs(vector_BK).argmax(axis=1)
    rows = np.arange(400)
    error_B = np.abs(decoded_BK[rows, peak_B] - vector_BK[rows, peak_B])
    assert (error_B <= np.abs(vector_BK).max(axis=1) / (2 * codec.largest_code) * 1.01).all()


@both_codecs
def test_every_block_has_its_own_scale(codec: BlockCodec) -> None:
    vector_BK = np.ldexp(np.ones((20, 64), dtype=np.float32), np.arange(-60, 60, 6)[:, None]).astype(np.float32)
    decoded_BK = codec.decode(codec.encode(vector_BK.reshape(-1)), vector_BK.size).reshape(20, 64)
    np.testing.assert_allclose(decoded_BK, vector_BK, rtol=1 / 128)


@both_codecs
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.73, 0.999])
def test_stochastic_rounding_rounds_up_with_the_probability_of_the_remainder(
    codec: BlockCodec, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EveryDrawOnce(RoundingBits):
        first = 0

        def draw(self, elements: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
            type(self).first += elements
            return np.arange(self.first - elements, self.first).astype(np.uint16)

    monkeypatch.setattr("p2p_diloco.codec.codec.RoundingBits", EveryDrawOnce)
    vector_BK = np.full((2**10, 64), -2 - fraction, dtype=np.float32)
    # A peak of exactly the largest code makes the scale one.
    vector_BK[:, 0] = codec.largest_code
    decoded_BK = codec.decode(codec.encode(vector_BK.reshape(-1), rounding_seed=b""), 2**16).reshape(2**10, 64)
    assert (decoded_BK[:, 0] == codec.largest_code).all()
    assert set(np.unique(decoded_BK[:, 1:]).tolist()) <= {-2.0, -3.0}
    assert np.mean(decoded_BK[:, 1:] == -3.0) == pytest.approx(fraction, abs=2**-9)


@both_codecs
def test_the_mean_over_seeds_approaches_the_vector(codec: BlockCodec) -> None:
    vector_N = np.random.Generator(np.random.PCG64(3)).standard_normal(640, dtype=np.float32)
    num_seeds = 600
    decoded_SN = np.stack(
        [codec.decode(codec.encode(vector_N, rounding_seed=bytes([n % 256, n // 256])), 640) for n in range(num_seeds)]
    ).astype(np.float64)
    step_N = np.repeat(np.abs(vector_N.reshape(10, 64)).max(axis=1) / codec.largest_code, 64)
    # The variance of stochastic rounding is at most a quarter of a step squared; five standard errors.
    assert (np.abs(decoded_SN.mean(axis=0) - vector_N) <= 5 * 0.51 * step_N / math.sqrt(num_seeds)).all()
    # Errors of different elements are independent: their mean vanishes faster than each of them.
    total_error = np.abs((decoded_SN - vector_N) / step_N).mean(axis=0).mean()
    assert abs(((decoded_SN - vector_N) / step_N).mean()) < 5 * 0.51 / math.sqrt(num_seeds * 640) < total_error


@both_codecs
def test_a_zero_block_between_others_stays_zero(codec: BlockCodec) -> None:
    vector_N = np.ones(192, dtype=np.float32)
    vector_N[64:128] = 0
    for seed in (None, b"seed"):
        decoded_N = codec.decode(codec.encode(vector_N, rounding_seed=seed), 192)
        assert decoded_N[64:128].tobytes() == bytes(256)
        assert (decoded_N[:64] > 0.8).all()


@both_codecs
def test_negative_zero_becomes_zero(codec: BlockCodec) -> None:
    assert codec.decode(codec.encode(np.array([-0.0, 1.0], dtype=np.float32)), 2)[:1].tobytes() == bytes(4)


@both_codecs
def test_scales_are_never_tiny_and_values_stay_within_the_bound_of_an_update(codec: BlockCodec) -> None:
    tiny_N = np.full(64, np.finfo(np.float32).smallest_subnormal, dtype=np.float32)
    assert codec.encode(tiny_N)[:2] == struct.pack("<H", SMALLEST_SCALE)
    assert bfloat16_value(SMALLEST_SCALE) == 2.0**-64
    bits = largest_scale_bits(codec.largest_code)
    assert bfloat16_value(bits) * codec.largest_code <= 2.0**64
    assert bfloat16_value(bits + 1) * codec.largest_code > 2.0**64
    for value in (FLOAT32_MAX, 2.0**64):
        huge_N = np.full(64, value, dtype=np.float32)
        assert codec.encode(huge_N)[:2] == struct.pack("<H", bits)
        # The bound itself is clipped by less than a step.
        assert 2.0**64 - float(codec.decode(codec.encode(huge_N), 64)[0]) < bfloat16_value(bits)


@both_codecs
def test_decoding_is_the_same_where_subnormal_numbers_are_flushed(codec: BlockCodec) -> None:
    magnitude_BK = np.ldexp(np.ones((40, 64), dtype=np.float32), np.arange(-140, -100)[:, None])
    encoded = codec.encode((magnitude_BK * np.linspace(-1, 1, 64)).astype(np.float32).reshape(-1))
    expected = codec.decode(encoded, 2560).tobytes()
    norm = codec.squared_norm(encoded, 2560)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert codec.decode(encoded, 2560).tobytes() == expected
        assert codec.squared_norm(encoded, 2560) == norm
    finally:
        torch.set_flush_denormal(False)


@both_codecs
@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (0x7F80, "inf"),
        (0xFF80, "-inf"),
        (0x7FC0, "nan"),
        (0xBF80, "-1"),
        (0x8000, "-0"),
        (0x7F7F, "3.39e+38"),
        (SMALLEST_SCALE - 1, "5.4e-20"),
        (0x0001, "9.18e-41"),
    ],
)
def test_a_scale_that_no_encoder_writes_is_refused(codec: BlockCodec, bits: int, text: str) -> None:
    encoded = bytearray(codec.encode(np.ones(192, dtype=np.float32)))
    encoded[2:4] = struct.pack("<H", bits)
    limit = {"int8": "1.45e+17", "int4": "2.63e+18"}[codec.name]
    for call in (codec.decode, codec.squared_norm):
        with pytest.raises(FrameError) as error:
            call(encoded, 192)
        assert str(error.value) == (
            f"{codec.name} block 1 of 3 has a scale of {text}; expected 0 or a number from 5.42e-20 to {limit}"
        )


@both_codecs
def test_both_limits_of_the_scale_are_accepted(codec: BlockCodec) -> None:
    for bits in (SMALLEST_SCALE, largest_scale_bits(codec.largest_code)):
        encoded = bytearray(codec.encode(np.full(64, codec.largest_code, dtype=np.float32)))
        encoded[:2] = struct.pack("<H", bits)
        decoded_N = codec.decode(encoded, 64)
        assert decoded_N[0] == codec.largest_code * np.float32(bfloat16_value(bits))
        exact: Fraction = 64 * Fraction(float(decoded_N[0])) ** 2
        assert codec.squared_norm(encoded, 64) == float(exact)


def test_the_short_last_block_is_counted() -> None:
    assert [num_blocks(elements) for elements in (0, 1, 63, 64, 65, 128)] == [0, 1, 1, 1, 2, 2]


def test_a_heavy_tail_affects_only_its_own_block() -> None:
    vector_N = np.random.Generator(np.random.PCG64(4)).standard_normal(640, dtype=np.float32)
    quiet: Vector = vector_N.copy()
    vector_N[5] = 1e6
    codec = Int4Codec()
    loud_N = codec.decode(codec.encode(vector_N), 640)
    assert loud_N[64:].tobytes() == codec.decode(codec.encode(quiet), 640)[64:].tobytes()
