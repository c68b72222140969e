"""Conversion between floats and their bits inside compiled loops."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from p2p_diloco.codec.loops import bits_of, float_of


@njit
def _there(value):  # type: ignore[no-untyped-def]
    return bits_of(value)


@njit
def _back(bits):  # type: ignore[no-untyped-def]
    return float_of(bits)


@pytest.mark.parametrize("bits", [0, 1, 0x3F800000, 0x80000000, 0x7F7FFFFF, 0x00800000, 0xFF800000])
def test_a_float_converts_to_its_bits_and_back(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)[0]
    assert _there(value) == bits
    assert np.array([_back(np.uint32(bits))], np.float32).view(np.uint32)[0] == bits
