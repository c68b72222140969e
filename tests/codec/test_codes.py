"""Operations on vectors: which of the two forms is called, and the parts of the NumPy forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec import codes
from p2p_diloco.codec.codes import pack4, unpack4
from p2p_diloco.codec.vectors import CACHED_ELEMENTS, compiled_loops, is_vector, iterate_blocks, numpy_alone, with_loop


@settings(deadline=None)
@given(elements=st.integers(min_value=0, max_value=5 * CACHED_ELEMENTS))
def test_blocks_hold_every_element_exactly_once_and_in_order(elements: int) -> None:
    positions = [position for block in iterate_blocks(elements) for position in range(block.start, block.stop)]
    assert positions == list(range(elements))


def test_a_vector_is_one_dimensional_float32() -> None:
    assert is_vector(np.zeros(3, dtype=np.float32))
    assert not is_vector(np.zeros((3, 1), dtype=np.float32))
    assert not is_vector(np.zeros(3, dtype=np.float64))
    assert not is_vector(np.zeros(3, dtype=np.dtype(np.float32).newbyteorder("S")))


WRONG = [np.zeros(65, np.float32), np.zeros(64), np.zeros(64, ">f4"), np.zeros((64, 1), np.float32)]


def test_loops_take_only_vectors_of_one_kind_and_length_with_enough_elements() -> None:
    called: list[Any] = []

    @with_loop(fewest=64, of_vectors=True)
    def follow(*arguments: Any) -> None:
        called.append(arguments)

    one_N, moved_N = np.ones(64, np.float32), np.zeros(64, np.float32)
    follow(one_N, one_N, one_N, one_N, moved_N)
    assert (called, moved_N.tolist()) == ([], [2.0] * 64)
    for wrong_N in (*WRONG, np.ones(128, np.float32)[::2]):
        follow(one_N, one_N, one_N, one_N, wrong_N)
        follow(wrong_N, one_N, one_N, one_N, moved_N)
    follow(*(one_N[:63],) * 4, moved_N[:63])
    with numpy_alone():
        follow(one_N, one_N, one_N, one_N, moved_N)
    assert len(called) == 2 * len(WRONG) + 4
    assert moved_N.tolist() == [2.0] * 64


def test_loops_refuse_what_they_were_not_compiled_for() -> None:
    """Otherwise numba would compile again, which takes seconds, while a round waits."""
    loops = compiled_loops()
    assert loops is not None
    with pytest.raises(TypeError, match="No matching definition"):
        loops.is_finite(np.ones(64))


def test_a_fused_pass_is_refused_without_loops() -> None:
    vector_N = np.ones(64, np.float32)
    rooms = np.zeros(1, np.uint16), np.zeros(32, np.uint8), np.zeros(1, np.int64)
    limits = np.float32(7), np.uint32(0x0080), np.uint32(0x7E00)
    both, rates = rooms[:2], (np.float32(0.7), np.float32(0.7))
    into = (np.empty_like(vector_N), np.empty_like(vector_N), np.empty_like(vector_N))
    assert codes.contribute4(vector_N, vector_N, limits, *rooms) == 0.0
    assert codes.follow4(both, both, (vector_N, vector_N, vector_N), rates, limits, into)
    with numpy_alone():
        assert np.isnan(codes.contribute4(vector_N, vector_N, limits, *rooms))
        assert not codes.follow4(both, both, (vector_N, vector_N, vector_N), rates, limits, into)


def test_every_pair_of_codes_survives_packing() -> None:
    codes = [(low, high) for low in range(-7, 8) for high in range(-7, 8)]
    codes_N = np.array(codes, dtype=np.int8).reshape(-1)
    packed = pack4(codes_N.copy().view(np.uint8))
    assert packed.tolist() == [(low & 15) | (high & 15) << 4 for low, high in codes]
    assert unpack4(packed).tolist() == codes_N.tolist()


def test_all_256_bytes_unpack_to_two_signed_nibbles() -> None:
    every_byte = np.arange(256, dtype=np.uint8)
    signed = [nibble - 16 if nibble > 7 else nibble for nibble in range(16)]
    assert unpack4(every_byte).reshape(256, 2).tolist() == [[signed[b & 15], signed[b >> 4]] for b in range(256)]
    assert every_byte.tolist() == list(range(256))
