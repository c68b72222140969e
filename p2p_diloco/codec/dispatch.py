"""Choose the form of an operation on vectors: its definition in NumPy, or the compiled loop with the same bits.

NumPy is used without numba, and if numba cannot cache compiled code. Importing numba takes a second, so it is imported
only for the first vector. All loops are then compiled, or read from the cache, so that errors appear before real
vectors arrive, and no round waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")

_switched_off = False
_failures: list[str] = []


def with_loop(
    *, fewest: int = 1, of_vectors: bool = False
) -> Callable[[Callable[Inputs, Result]], Callable[Inputs, Result]]:
    """Decorate the NumPy form of an operation on arrays, to call the compiled loop of that name where it can be used.

    Args:
        fewest: least length of the first array for which a loop is worth its call.
        of_vectors: whether all arrays are float32 vectors of one length. Loops check nothing: for others the NumPy
            form is called, and raises the error.
    """

    def decorate(by_numpy: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
        @wraps(by_numpy)
        def operate(*arguments: Inputs.args, **named: Inputs.kwargs) -> Result:
            is_suited = len(arguments[0]) >= fewest and (not of_vectors or _are_alike(arguments))  # type: ignore[arg-type]
            loops = compiled_loops() if is_suited else None
            form = by_numpy if loops is None else getattr(loops, by_numpy.__name__)
            found: Result = form(*arguments, **named)
            return found

        return operate

    return decorate


def _are_alike(arguments: tuple[Any, ...]) -> bool:
    arrays = [one for one in arguments if isinstance(one, np.ndarray)]
    return all(is_vector(one) and len(one) == len(arrays[0]) and one.flags.c_contiguous for one in arrays)


def is_vector(candidate: npt.NDArray[Any]) -> bool:
    """Return whether `candidate` is one-dimensional float32 in this machine's byte order."""
    return candidate.ndim == 1 and candidate.dtype == np.dtype(np.float32)


def compiled_loops() -> ModuleType | None:
    """Return the module of compiled loops, or None; the first call compiles them, or reads them from the cache."""
    return None if _switched_off else _loaded()


@cache
def _loaded() -> ModuleType | None:
    try:
        from p2p_diloco.codec import loops
    except Exception as error:  # no numba, no writeable cache folder, a truncated cache, …
        _failures.append(f"{type(error).__name__}: {error}")
        return None
    return loops


def why_no_loops() -> str:
    """Return the error that makes loops unavailable; empty if there was none.

    Loops switched off by `numpy_alone` do not count as unavailable.
    """
    return "" if _switched_off or not _failures else _failures[0]


@contextmanager
def numpy_alone() -> Iterator[None]:
    """Disable compiled loops inside the block, in all threads, for comparison."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before
