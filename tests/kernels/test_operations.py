"""Operations on vectors: which of the two forms is called, and the parts of the NumPy forms."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.kernels import operations
from p2p_diloco.kernels.choice import Operation, is_vector, loops_of, numpy_alone
from p2p_diloco.kernels.operations import CACHED_ELEMENTS, iterate_blocks, pack4, unpack4


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
    move = Operation("vectors", "follow", lambda *all: called.append(all), outputs=1, fewest=64, are_vectors=True)
    one_N, moved_N = np.ones(64, np.float32), np.zeros(64, np.float32)
    move(one_N, one_N, one_N, one_N, moved_N)
    assert (called, moved_N.tolist()) == ([], [2.0] * 64)
    for wrong_N in WRONG:
        move(one_N, one_N, one_N, one_N, wrong_N)
        move(wrong_N, one_N, one_N, one_N, moved_N)
    move(*(one_N[:63],) * 4, moved_N[:63])
    with numpy_alone():
        move(one_N, one_N, one_N, one_N, moved_N)
    assert len(called) == 2 * len(WRONG) + 2
    assert moved_N.tolist() == [2.0] * 64


def all_operations() -> list[Operation]:
    held = [one for each in vars(operations).values() for one in (each.values() if isinstance(each, dict) else [each])]
    return [one for one in held if isinstance(one, Operation)]


def test_every_operation_has_its_loop() -> None:
    assert len(all_operations()) >= 15
    for operation in all_operations():
        assert callable(getattr(loops_of(operation.loops), operation.name))


def test_a_fused_pass_is_refused_without_loops() -> None:
    vector_N = np.ones(64, np.float32)
    rooms = np.zeros(1, np.uint16), np.zeros(32, np.uint8), np.zeros(1, np.int64)
    limits = np.float32(7), np.uint32(0x0080), np.uint32(0x7E00)
    both, rates, into = rooms[:2], limits[:1] * 2, (np.empty_like(vector_N), np.empty_like(vector_N))
    assert operations.contribute4(vector_N, vector_N, *limits, *rooms) == 0.0
    assert operations.follow4(both, both, (vector_N,) * 3, rates, limits, (*into, np.empty_like(vector_N)))
    with numpy_alone():
        assert np.isnan(operations.contribute4(vector_N, vector_N, *limits, *rooms))
        assert not operations.follow4(both, both, (vector_N,) * 3, rates, limits, (*into, np.empty_like(vector_N)))


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
