"""Whether there are compiled loops here. Without numba, or where it cannot keep what it compiled, NumPy does the work.

numba takes a second to import, so nobody does before the first vector comes. All loops are used once then: what cannot
be compiled here must show before real vectors come, and no round should wait for a compiler.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy.typing as npt

_switched_off = False
_failures: list[str] = []


def block_kernels() -> ModuleType | None:
    """Return the loops of `kernels/blocks.py`, or None."""
    return _loops("blocks")


def vector_kernels() -> ModuleType | None:
    """Return the loops of `kernels/vectors.py`, or None."""
    return _loops("vectors")


def span_kernels() -> ModuleType | None:
    """Return the loops of `kernels/spans.py`, or None."""
    return _loops("spans")


def radial_kernels() -> ModuleType | None:
    """Return the loops of `kernels/radial.py`, or None."""
    return _loops("radial")


def why_no_loops() -> str:
    """Return what went wrong with the first loops that cannot be used; empty where all that were tried can.

    Loops that `numpy_alone` has switched off are not missing.
    """
    return "" if _switched_off or not _failures else _failures[0]


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


def _loops(name: str) -> ModuleType | None:
    return None if _switched_off else _tried_out(name)


@cache
def _tried_out(name: str) -> ModuleType | None:
    try:
        loops = importlib.import_module(f"p2p_diloco.kernels.{name}")
        loops.try_out()
    except Exception as error:  # no numba, no place to keep what it compiled, a cache that was cut off, …
        _failures.append(f"{type(error).__name__}: {error}")
        return None
    return loops
