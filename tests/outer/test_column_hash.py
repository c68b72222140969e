"""Columns are hashed as `hashlib` hashes them, and nothing of a vector is left out."""

from __future__ import annotations

from hashlib import blake2s

import numpy as np
import pytest

from p2p_diloco.kernels.choice import numpy_alone
from p2p_diloco.outer.column_hash import hash_columns
from p2p_diloco.outer.vector import Vector


def numbers(elements: int) -> Vector:
    return np.random.default_rng(elements).standard_normal(elements, dtype=np.float32)


@pytest.mark.parametrize("elements", [256, 512, 5000, 70_000])
def test_each_column_is_one_message_and_the_rest_is_there(elements: int) -> None:
    vector_N = numbers(elements)
    digests, rest = hash_columns(vector_N)
    whole = elements // 256 * 256
    columns = [vector_N[column:whole:16].astype("<f4").tobytes() for column in range(16)]
    assert digests == b"".join(blake2s(column).digest() for column in columns)
    assert rest == vector_N[whole:].astype("<f4").tobytes()


@pytest.mark.parametrize("elements", [0, 1, 255, 256, 257, 16_384, 100_001])
def test_loops_and_hashlib_say_the_same(elements: int) -> None:
    vector_N = numbers(elements)
    compiled = hash_columns(vector_N)
    with numpy_alone():
        assert hash_columns(vector_N) == compiled
    assert len(compiled[0]) == (512 if elements >= 256 else 0)


@pytest.mark.parametrize("elements", [16, 300, 4096])
def test_each_element_shows(elements: int) -> None:
    vector_N = numbers(elements)
    before = hash_columns(vector_N)
    for place in range(elements):
        changed_N = vector_N.copy()
        changed_N.view(np.uint32)[place] ^= 1
        assert hash_columns(changed_N) != before


def test_where_the_vector_lies_does_not_show() -> None:
    wide_N = numbers(2000)
    assert hash_columns(wide_N[::2]) == hash_columns(wide_N[::2].copy())
