"""Sixteen columns of words at once give the digests of `hashlib.blake2s`, one after the other."""

from __future__ import annotations

from hashlib import blake2s

import numpy as np
import pytest

from p2p_diloco.kernels.choice import column_kernels, frozen, numpy_alone

ALL_BITS, NO_BITS = 0xFFFFFFFF, 0


@pytest.mark.parametrize("blocks", [1, 2, 3, 17])
@pytest.mark.parametrize("words", ["random", "ones", "zeros"])
def test_digests_are_those_of_hashlib(blocks: int, words: str) -> None:
    loops = column_kernels()
    if loops is None:
        pytest.skip("no loops can be compiled here")
    rows = 16 * blocks
    drawn = np.random.default_rng(blocks).integers(0, 1 << 32, (rows, 16), dtype=np.uint32)
    table = {"random": drawn, "ones": np.full_like(drawn, ALL_BITS), "zeros": np.full_like(drawn, NO_BITS)}[words]
    state_H = np.empty(128, np.uint32)
    loops.column_digests(frozen(table.ravel()), state_H)
    for column in range(16):
        expected = blake2s(table[:, column].astype("<u4").tobytes()).digest()
        assert state_H.reshape(8, 16)[:, column].astype("<u4").tobytes() == expected


def test_they_can_be_done_without() -> None:
    with numpy_alone():
        assert column_kernels() is None
