"""Memory for the long vectors that a peer holds all the time, used again and again.

φ and m are replaced span by span with every entry. From the C library's heap, the places of old vectors are taken by
whatever small thing comes next and stays, new vectors find no place, and after a few cycles the heap is twice as large
as what lies in it. Here a place is taken only by a vector of the same length, and its pages are there already: fresh
ones cost more than what is written to them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt

FEWEST_BYTES = 1 << 16
"""Shorter vectors come from the heap: they are no more in its way than anything else."""

MOST_FREE = 3
"""Slabs of one size that wait for a vector: as many as one entry takes and gives back. Others go to the system."""

FEWEST_BYTES_AHEAD = 1 << 20
"""Shorter vectors have their pages when they are written to: so few are not worth a word to another thread."""

_POPULATE_WRITE = 23
_free: dict[int, list[mmap.mmap]] = {}


def empty_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return a float32 vector of unknown content. Its memory serves another one when nobody holds it any more."""
    wanted = 4 * elements
    if wanted < FEWEST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(elements, dtype=np.float32)
    size = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        slab = _free.setdefault(size, []).pop()
    except IndexError:
        slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.asarray(_Lease(slab, elements, is_kept=True))


def passing_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return a float32 vector of unknown content, in memory that the system gets back with it.

    For a length that hardly comes again: a slab that waited for the next one would wait for ever.
    """
    if 4 * elements < FEWEST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(elements, dtype=np.float32)
    slab = mmap.mmap(-1, 4 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.asarray(_Lease(slab, elements, is_kept=False))


def awaited_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return such a vector for what comes from elsewhere; another thread meanwhile has the system find its pages.

    They are found one by one otherwise, by whoever writes to them first; where the system has to ask another, as a
    virtual machine's, that takes longer than all else that is done to what comes.
    """
    vector_N = passing_vector(elements)
    if vector_N.nbytes >= FEWEST_BYTES_AHEAD and sys.platform == "linux":
        _ahead().submit(_find_pages, ref(vector_N))
    return vector_N


def passing_bytes(length: int) -> memoryview:
    """Return so many bytes of unknown content in such memory."""
    return passing_vector(-(-length // 4)).data.cast("B")[:length]


def copy_of(vector_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a float32 copy in such memory."""
    copied_N = empty_vector(len(vector_N))
    np.copyto(copied_N, vector_N)
    return copied_N


def zero_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return zeros in such memory."""
    zeros_N = empty_vector(elements)
    zeros_N.fill(0.0)
    return zeros_N


@cache
def _ahead() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="pages")


def _find_pages(awaited: ref[npt.NDArray[np.float32]]) -> None:
    """Have all pages of a vector be there, if anybody still awaits it; its content stays.

    Whoever can make a peer begin many transfers must not make it find pages for more than one of them. Kernels before
    Linux 5.14 do not know how, and refuse.
    """
    vector_N = awaited()
    if vector_N is None:
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise(vector_N.ctypes.data, vector_N.nbytes, _POPULATE_WRITE)


class _Lease:
    """Holds a slab as long as an array, or a view of it, holds this. No lock: one may be given back in any moment."""

    def __init__(self, slab: mmap.mmap, elements: int, *, is_kept: bool) -> None:
        self._slab = slab
        self._is_kept = is_kept
        address = ctypes.addressof(ctypes.c_char.from_buffer(slab))
        self.__array_interface__: dict[str, Any] = {
            "shape": (elements,),
            "typestr": np.dtype(np.float32).str,
            "data": (address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._is_kept and len(waiting := _free[len(self._slab)]) < MOST_FREE:
            waiting.append(self._slab)
