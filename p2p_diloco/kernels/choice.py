"""Choose compiled loops if available. Without numba, or if it cannot cache compiled code, NumPy is used.

Importing numba takes a second, so it is imported only for the first vector. All loops are then called once, so that
compilation errors appear before real vectors arrive, and no round waits for a compiler.
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
    """Return the first error that makes loops unavailable; empty if there was none.

    Loops switched off by `numpy_alone` do not count as unavailable.
    """
    return "" if _switched_off or not _failures else _failures[0]


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view. Pass loop inputs this way: a writeable array would trigger another compilation."""
    view = array.view()
    view.flags.writeable = False
    return view


@contextmanager
def numpy_alone() -> Iterator[None]:
    """Disable compiled loops inside the block, in all threads, for comparison."""
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
    except Exception as error:  # no numba, no writeable cache folder, a truncated cache, …
        _failures.append(f"{type(error).__name__}: {error}")
        return None
    return loops
