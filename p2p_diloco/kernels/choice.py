"""Whether there are compiled loops here. Without numba, or where it cannot keep what it compiled, NumPy does the work.

numba takes a second to import, so nobody does before the first vector comes. All loops are used once then: what cannot
be compiled here must show before real vectors come, and no round should wait for a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy.typing as npt

_switched_off = False


def block_kernels() -> ModuleType | None:
    """Return the loops of `kernels/blocks.py`, or None."""
    return None if _switched_off else _blocks()


def vector_kernels() -> ModuleType | None:
    """Return the loops of `kernels/vectors.py`, or None."""
    return None if _switched_off else _vectors()


def span_kernels() -> ModuleType | None:
    """Return the loops of `kernels/spans.py`, or None."""
    return None if _switched_off else _spans()


def radial_kernels() -> ModuleType | None:
    """Return the loops of `kernels/radial.py`, or None."""
    return None if _switched_off else _radial()


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view that refuses writes. What a loop reads comes as one: it is compiled once more for another kind."""
    view = array.view()
    view.flags.writeable = False
    return view


@contextmanager
def numpy_alone() -> Iterator[None]:
    """Do without compiled loops for a while, in all threads: to compare."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


@cache
def _blocks() -> ModuleType | None:
    try:
        from p2p_diloco.kernels import blocks

        blocks.try_out()
    except Exception:  # no numba, no place to keep what it compiled, a cache that was cut off, loops switched off, …
        return None
    return blocks


@cache
def _vectors() -> ModuleType | None:
    try:
        from p2p_diloco.kernels import vectors

        vectors.try_out()
    except Exception:
        return None
    return vectors


@cache
def _spans() -> ModuleType | None:
    try:
        from p2p_diloco.kernels import spans

        spans.try_out()
    except Exception:
        return None
    return spans


@cache
def _radial() -> ModuleType | None:
    try:
        from p2p_diloco.kernels import radial

        radial.try_out()
    except Exception:
        return None
    return radial
