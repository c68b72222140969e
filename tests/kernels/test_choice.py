"""Without numba NumPy does the work, and nothing else changes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from p2p_diloco.codec.int4 import Int4Codec
from p2p_diloco.kernels import choice


def test_loops_are_there_where_numba_is() -> None:
    kernels = choice.block_kernels()
    assert kernels is not None
    assert kernels is choice.block_kernels()
    with choice.numpy_alone():
        assert choice.block_kernels() is None
    assert choice.block_kernels() is kernels


def test_without_numba_numpy_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    vector_N = np.linspace(-1.0, 1.0, 640, dtype=np.float32)
    encoded = Int4Codec().encode(vector_N)
    choice._blocks.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.startswith("p2p_diloco.kernels.b")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("p2p_diloco.kernels.blocks", raising=False)
    try:
        assert choice.block_kernels() is None
        assert Int4Codec().encode(vector_N) == encoded
    finally:
        choice._blocks.cache_clear()
