"""Compiled loops over blocks give the bytes, values and norms of the NumPy code for any vector."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.codec import BlockCodec, Int4Codec, Int8Codec
from p2p_diloco.codec.vectors import Vector, numpy_alone
from p2p_diloco.errors import FrameError, NonFiniteUpdate
from p2p_diloco.outer.mean import shares_of
from simulator.maths import weighted_mean

reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=60)
both_codecs = pytest.mark.parametrize("codec", [Int8Codec(), Int4Codec()], ids=["int8", "int4"])
seeds = st.integers(min_value=0, max_value=2**32 - 1)
sizes = st.integers(min_value=0, max_value=2000) | st.sampled_from([64, 128, 1 << 15, (1 << 18) + 63, 1 << 18])


def hostile(seed: int, elements: int) -> Vector:
    """Return finite floats of all magnitudes, also subnormal ones, with blocks of zeros and of ordinary numbers."""
    rng = np.random.default_rng(seed)
    bits_N = rng.integers(0, 1 << 32, elements, dtype=np.uint32)
    vector_N = bits_N.view(np.float32)
    vector_N[~np.isfinite(vector_N)] = 0.0
    kind_N = np.repeat(rng.integers(0, 4, -(-elements // 64)), 64)[:elements]
    vector_N[kind_N == 0] = 0.0
    ordinary_N = rng.standard_normal(elements, dtype=np.float32)
    return np.where(kind_N == 1, ordinary_N, vector_N)


def by_numpy(codec: BlockCodec, vector_N: Vector, rounding_seed: bytes | None) -> tuple[bytes, Vector, float]:
    with numpy_alone():
        return all_of(codec, vector_N, rounding_seed)


def all_of(codec: BlockCodec, vector_N: Vector, rounding_seed: bytes | None) -> tuple[bytes, Vector, float]:
    encoded = codec.encode(vector_N, rounding_seed=rounding_seed)
    return encoded, codec.decode(encoded, len(vector_N)), codec.squared_norm(encoded, len(vector_N))


@both_codecs
@reproducible
@given(seed=seeds, elements=sizes, rounding_seed=st.none() | st.binary(max_size=4))
def test_bytes_values_and_norms_match_numpy(
    codec: BlockCodec, seed: int, elements: int, rounding_seed: bytes | None
) -> None:
    vector_N = hostile(seed, elements)
    encoded, decoded_N, norm = all_of(codec, vector_N, rounding_seed)
    expected, expected_N, expected_norm = by_numpy(codec, vector_N, rounding_seed)
    assert encoded == expected
    assert np.array_equal(decoded_N.view(np.uint32), expected_N.view(np.uint32))
    assert norm == expected_norm


@both_codecs
@reproducible
@given(seed=seeds, elements=sizes, weights=st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=5))
def test_adding_up_equals_decoding_and_averaging(
    codec: BlockCodec, seed: int, elements: int, weights: list[float]
) -> None:
    encoded = [codec.encode(hostile(seed + place, elements) * np.float32(0.25)) for place in range(len(weights))]
    shares = shares_of(weights, len(weights))
    sum_N = codec.add_up(encoded, shares, elements)
    with numpy_alone():
        expected_N = codec.add_up(encoded, shares, elements)
        decoded = [codec.decode(one, elements) for one in encoded]
    assert np.array_equal(sum_N.view(np.uint32), expected_N.view(np.uint32))
    assert np.array_equal(sum_N.view(np.uint32), weighted_mean(decoded, weights).view(np.uint32))


@both_codecs
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 300, 383])
def test_a_value_that_is_not_finite_is_refused_with_its_place(codec: BlockCodec, wrong: float, place: int) -> None:
    vector_N = hostile(5, 384)
    vector_N[place] = wrong
    with pytest.raises(NonFiniteUpdate, match=f"1 of 384 values that are not finite, the first at element {place}"):
        codec.encode(vector_N)


@both_codecs
@pytest.mark.parametrize("element", [0, 1, 63, 64, 383])
def test_a_code_that_no_encoder_writes_is_refused_with_its_place(codec: BlockCodec, element: int) -> None:
    encoded = bytearray(codec.encode(hostile(6, 384)))
    codes = 2 * 384 // 64
    if codec.code_bits == 8:
        encoded[codes + element] = 0x80
    else:
        place = codes + element // 2
        encoded[place] = encoded[place] & (0x0F, 0xF0)[1 - element % 2] | (0x08, 0x80)[element % 2]
    sound = codec.encode(hostile(7, 384))
    with pytest.raises(FrameError, match=f"element {element} of 384 has the code -"):
        codec.add_up([sound, encoded], [np.float32(0.5)] * 2, 384)
    for read in (codec.decode, codec.squared_norm):
        with pytest.raises(FrameError, match=f"element {element} of 384 has the code -"):
            read(encoded, 384)
