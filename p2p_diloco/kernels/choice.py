"""Choose between the two forms of an operation on vectors: a compiled loop, or NumPy code with the same bits.

NumPy is used without numba, and if numba cannot cache compiled code. Importing numba takes a second, so it is imported
only for the first vector. All loops of a module are then called once, so that compilation errors appear before real
vectors arrive, and no round waits for a compiler.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

LOOPS = ("blocks", "vectors", "spans", "radial")
"""Modules of this package with compiled loops."""

_switched_off = False
_failures: list[str] = []


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on arrays; call it with its inputs, then the arrays that it writes.

    Attributes:
        loops, name: module and name of the compiled loop.
        by_numpy: the same in NumPy.
        outputs: number of arrays, the last arguments, that it writes.
        fewest: least length of the first array for which a loop is worth its call.
        are_vectors: whether all arrays are float32 vectors of one length. Loops check nothing: for others the NumPy
            form is called, and raises the error.
    """

    loops: str
    name: str
    by_numpy: Callable[..., Any]
    outputs: int
    fewest: int = 1
    are_vectors: bool = False

    def __call__(self, *arguments: Any) -> Any:
        """Return what the loop returns, or the NumPy form."""
        loops = loops_of(self.loops) if self._suits(arguments) else None
        if loops is None:
            return self.by_numpy(*arguments)
        num_inputs = len(arguments) - self.outputs
        inputs = (frozen(one) if isinstance(one, np.ndarray) else one for one in arguments[:num_inputs])
        return getattr(loops, self.name)(*inputs, *arguments[num_inputs:])

    def _suits(self, arguments: tuple[Any, ...]) -> bool:
        first = arguments[0]
        if len(first) < self.fewest:
            return False
        arrays = (one for one in arguments if isinstance(one, np.ndarray))
        return not self.are_vectors or all(is_vector(one) and len(one) == len(first) for one in arrays)


def is_vector(candidate: npt.NDArray[Any]) -> bool:
    """Return whether `candidate` is one-dimensional float32 in this machine's byte order."""
    return candidate.ndim == 1 and candidate.dtype == np.dtype(np.float32)


def loops_of(name: str) -> ModuleType | None:
    """Return a module of compiled loops, or None."""
    return None if _switched_off else _tried_out(name)


def compile_loops() -> None:
    """Compile all loops, or load them from the cache."""
    for name in LOOPS:
        loops_of(name)


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


@cache
def _tried_out(name: str) -> ModuleType | None:
    try:
        loops = importlib.import_module(f"p2p_diloco.kernels.{name}")
        loops.try_out()
    except Exception as error:  # no numba, no writeable cache folder, a truncated cache, …
        _failures.append(f"{type(error).__name__}: {error}")
        return None
    return loops
