"""The contract of `Codec`, checked for all codecs."""

from __future__ import annotations

import hashlib
import math
import re
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.codec import CODEC_NAMES, Codec, codec_named
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.errors import FrameError, NonFiniteUpdate

reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=150)
all_codecs = pytest.mark.parametrize("codec", [codec_named(name) for name in CODEC_NAMES], ids=CODEC_NAMES)
# One element, around a pair, around a block, and around the 2^15 elements of one chunk.
SIZES = (1, 2, 3, 63, 64, 65, 127, 128, 129, 1000, 2**15 - 1, 2**15, 2**15 + 1, 2**16 + 67)
FLOAT32_MAX = float(np.finfo(np.float32).max)
finite_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
finite_vectors = st.lists(finite_floats, max_size=200).map(lambda values: np.array(values, dtype=np.float32))
seeds = st.none() | st.binary(max_size=40)


def fixed_vector(elements: int, exponents: int = 7) -> Vector:
    """Return values that need no random generator: a multiplicative hash over several orders of magnitude."""
    index_N = np.arange(elements, dtype=np.uint64)
    hash_N = (index_N * np.uint64(2654435761)) % np.uint64(2**24)
    mantissa_N = (hash_N.astype(np.int64) - 2**23).astype(np.float32)
    return np.ldexp(mantissa_N, (index_N % np.uint64(exponents)).astype(np.int32) - 30).astype(np.float32)


def exact_squared_norm(values_N: Vector) -> float:
    return math.fsum(value * value for value in values_N.astype(np.float64).tolist())


@all_codecs
@pytest.mark.parametrize("elements", SIZES)
def test_encoded_size_is_known_from_the_number_of_elements(codec: Codec, elements: int) -> None:
    for seed in (None, b"seed"):
        encoded = codec.encode(fixed_vector(elements), rounding_seed=seed)
        assert type(encoded) is bytes
        assert len(encoded) == codec.encoded_bytes(elements)
        decoded_N = codec.decode(encoded, elements)
        assert decoded_N.dtype == np.float32
        assert decoded_N.shape == (elements,)


@all_codecs
def test_no_elements_take_no_bytes(codec: Codec) -> None:
    assert codec.encoded_bytes(0) == 0
    assert codec.encode(np.empty(0, dtype=np.float32)) == b""
    assert codec.decode(b"", 0).shape == (0,)
    assert codec.squared_norm(b"", 0) == 0.0


@all_codecs
@given(vector_N=finite_vectors, seed=seeds)
@reproducible
def test_every_finite_vector_decodes_to_finite_values(codec: Codec, vector_N: Vector, seed: bytes | None) -> None:
    encoded = codec.encode(vector_N, rounding_seed=seed)
    assert len(encoded) == codec.encoded_bytes(vector_N.size)
    assert np.isfinite(codec.decode(encoded, vector_N.size)).all()


@all_codecs
@given(vector_N=finite_vectors, seed=seeds)
@reproducible
def test_squared_norm_is_the_exact_norm_of_the_decoded_values(
    codec: Codec, vector_N: Vector, seed: bytes | None
) -> None:
    encoded = codec.encode(vector_N, rounding_seed=seed)
    decoded_N = codec.decode(encoded, vector_N.size)
    exact = sum(Fraction(value) ** 2 for value in decoded_N.tolist())
    # Exact rationals: float64 can hold squares of the smallest float32 values, but this proof is shorter.
    assert codec.squared_norm(encoded, vector_N.size) == float(exact)


@all_codecs
@pytest.mark.parametrize("elements", SIZES)
def test_squared_norm_equals_fsum_across_chunks(codec: Codec, elements: int) -> None:
    encoded = codec.encode(fixed_vector(elements))
    decoded_N = codec.decode(encoded, elements)
    assert codec.squared_norm(encoded, elements) == exact_squared_norm(decoded_N)


@all_codecs
def test_squared_norm_does_not_depend_on_the_order_of_blocks(codec: Codec) -> None:
    vector_BK = fixed_vector(64 * 50, exponents=60).reshape(50, 64)
    forward = codec.encode(vector_BK.reshape(-1))
    backward = codec.encode(np.ascontiguousarray(vector_BK[::-1]).reshape(-1))
    assert codec.squared_norm(forward, 3200) == codec.squared_norm(backward, 3200)


@all_codecs
@given(elements=st.integers(min_value=0, max_value=300), encoded=st.binary(max_size=1300))
@reproducible
def test_bytes_of_any_length_decode_or_raise_frame_error(codec: Codec, elements: int, encoded: bytes) -> None:
    for call in (codec.decode, codec.squared_norm):
        if len(encoded) != codec.encoded_bytes(elements):
            with pytest.raises(FrameError, match=f"{elements} elements has {len(encoded)} bytes"):
                call(encoded, elements)


@all_codecs
@given(sample=st.data())
@reproducible
def test_random_bytes_of_the_right_size_decode_to_finite_values_or_raise_frame_error(
    codec: Codec, sample: st.DataObject
) -> None:
    elements = sample.draw(st.integers(min_value=1, max_value=200))
    size = codec.encoded_bytes(elements)
    encoded = bytearray(sample.draw(st.binary(min_size=size, max_size=size)))
    check_that_hostile_bytes_are_harmless(codec, encoded, elements)


@all_codecs
@given(sample=st.data())
@reproducible
def test_a_damaged_encoding_decodes_to_finite_values_or_raises_frame_error(codec: Codec, sample: st.DataObject) -> None:
    elements = sample.draw(st.integers(min_value=1, max_value=200))
    encoded = bytearray(codec.encode(fixed_vector(elements)))
    for _ in range(sample.draw(st.integers(min_value=1, max_value=4))):
        encoded[sample.draw(st.integers(0, len(encoded) - 1))] = sample.draw(st.integers(0, 255))
    check_that_hostile_bytes_are_harmless(codec, encoded, elements)


def check_that_hostile_bytes_are_harmless(codec: Codec, encoded: bytearray, elements: int) -> None:
    before = bytes(encoded)
    try:
        decoded_N = codec.decode(encoded, elements)
    except FrameError as refused:
        with pytest.raises(FrameError, match=re.escape(str(refused))):
            codec.squared_norm(encoded, elements)
    else:
        assert np.isfinite(decoded_N).all()
        assert codec.squared_norm(encoded, elements) == exact_squared_norm(decoded_N)
        # A decoded vector can be encoded again.
        codec.encode(decoded_N)
    assert bytes(encoded) == before


@all_codecs
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001], ids=hex)
@pytest.mark.parametrize("element", [0, 64, 2**15 + 3])
def test_a_vector_that_is_not_finite_is_not_encoded(codec: Codec, bits: int, element: int) -> None:
    vector_N = fixed_vector(2**15 + 5)
    vector_N.view(np.uint32)[element] = bits
    with pytest.raises(NonFiniteUpdate, match=rf"1 of 32773 values .* not finite, the first at element {element};"):
        codec.encode(vector_N)


@all_codecs
def test_stochastic_bytes_depend_on_the_seed_alone(codec: Codec) -> None:
    vector_N = fixed_vector(5000)
    first = codec.encode(vector_N, rounding_seed=b"round 7, span 3")
    assert first == codec.encode(vector_N.copy(), rounding_seed=b"round 7, span 3")
    if codec.name != "float32":
        assert first != codec.encode(vector_N, rounding_seed=b"round 7, span 4")
        assert first != codec.encode(vector_N)


@all_codecs
def test_encoding_changes_neither_the_vector_nor_the_global_random_state(codec: Codec) -> None:
    vector_N = fixed_vector(1000)
    before = vector_N.tobytes()
    vector_N.flags.writeable = False
    state_before = repr(np.random.get_state())
    codec.encode(vector_N, rounding_seed=b"seed")
    assert repr(np.random.get_state()) == state_before
    assert vector_N.tobytes() == before


@all_codecs
def test_a_strided_vector_encodes_like_its_copy(codec: Codec) -> None:
    strided_N = fixed_vector(2000)[::2]
    assert codec.encode(strided_N) == codec.encode(strided_N.copy())


@all_codecs
def test_any_buffer_of_bytes_decodes_alike_and_the_result_owns_its_memory(codec: Codec) -> None:
    encoded = codec.encode(fixed_vector(777))
    expected_N = codec.decode(encoded, 777)
    shifted = memoryview(b"x" + encoded)[1:]
    for buffer in (bytearray(encoded), memoryview(encoded), shifted):
        decoded_N = codec.decode(buffer, 777)
        assert decoded_N.tobytes() == expected_N.tobytes()
        assert codec.squared_norm(buffer, 777) == codec.squared_norm(encoded, 777)
        assert decoded_N.flags.writeable
    decoded_N += 1
    assert shifted == encoded


@all_codecs
def test_zeros_encode_to_zero_bytes_and_decode_to_zeros_with_any_seed(codec: Codec) -> None:
    zeros_N = np.zeros(200, dtype=np.float32)
    for seed in (None, b"a", b"b"):
        encoded = codec.encode(zeros_N, rounding_seed=seed)
        assert encoded == bytes(codec.encoded_bytes(200))
        assert codec.decode(encoded, 200).tobytes() == zeros_N.tobytes()


@all_codecs
@pytest.mark.parametrize("seed", [None, b"seed"])
def test_extreme_vectors_keep_their_size_within_the_bounds_of_an_update(codec: Codec, seed: bytes | None) -> None:
    smallest = float(np.finfo(np.float32).smallest_subnormal)
    for value in (FLOAT32_MAX, -FLOAT32_MAX, 2.0**64, smallest, -smallest, 1e-40, -(2.0**-66), 2.0**-63):
        vector_N = np.full(65, value, dtype=np.float32)
        with np.errstate(all="raise"):
            encoded = codec.encode(vector_N, rounding_seed=seed)
            decoded_N = codec.decode(encoded, 65)
        magnitude_N = np.abs(decoded_N)
        assert ((magnitude_N == 0) | ((magnitude_N >= 2.0**-64) & (magnitude_N <= 2.0**64))).all()
        near = float(np.clip(value, -(2.0**64), 2.0**64))
        assert (np.abs(decoded_N.astype(np.float64) - near) <= max(abs(near) / 64, 2.0**-64)).all()


@all_codecs
def test_a_vector_of_another_type_or_shape_fails_an_assertion(codec: Codec) -> None:
    wrong: list[npt.NDArray[np.generic]] = [np.zeros(4, dtype=np.float64), np.zeros((2, 2), dtype=np.float32)]
    for vector in wrong:
        with pytest.raises(AssertionError, match=r"codecs take (float32, not float64|flat vectors, not shape)"):
            codec.encode(vector)  # type: ignore[arg-type]


FIRST_VERSION = {
    ("float32", None): "9716bdc3af79b0fa",
    ("float32", b"golden"): "9716bdc3af79b0fa",
    ("bfloat16", None): "64e0118f749ef0f0",
    ("bfloat16", b"golden"): "aeedc60b406f040e",
    ("int8", None): "98594c9753e71ba8",
    ("int8", b"golden"): "2b4d684aeeeb7860",
    ("int4", None): "eb8fdbad1414379b",
    ("int4", b"golden"): "0c7d8aeccfd41738",
}


@pytest.mark.parametrize(("name", "seed"), FIRST_VERSION)
def test_bytes_are_those_of_the_first_version(name: str, seed: bytes | None) -> None:
    encoded = codec_named(name).encode(fixed_vector(2**15 + 99), rounding_seed=seed)
    assert hashlib.sha256(encoded).hexdigest()[:16] == FIRST_VERSION[name, seed]
