"""Reusable memory for the long vectors that a peer holds permanently.

φ and m are replaced span by span with every entry. On the C library's heap, small long-lived allocations would take
the place of old vectors, new vectors would not fit, and after a few cycles the heap would be twice as large as its
contents. Here, memory is reused only for vectors of the same length, and its pages are already mapped: mapping new ones
costs more than writing to them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from p2p_diloco.memory.heap import advise

FEWEST_BYTES = 1 << 16
"""Shorter vectors come from the heap, where they do no harm."""

MOST_FREE = 3
"""Maximum free slabs per size: as many as one entry allocates and frees. Others are returned to the system."""

FEWEST_BYTES_AHEAD = 1 << 20
"""Shorter vectors get their pages on the first write: so few pages are not worth a task for another thread."""

_POPULATE_WRITE = 23
_free: dict[int, list[mmap.mmap]] = {}


def empty_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return an uninitialised float32 vector, whose memory is reused after it is freed."""
    return _vector(elements, is_kept=True)


def passing_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return an uninitialised float32 vector, whose memory is returned to the system when it is freed.

    Use it for lengths that rarely recur, for which a kept slab would never be reused.
    """
    return _vector(elements, is_kept=False)


def awaited_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return such a vector for incoming data, and map its pages in another thread meanwhile.

    Otherwise pages are mapped one by one on the first write. In a virtual machine, that takes longer than all other
    processing of the incoming data.
    """
    vector_N = passing_vector(elements)
    if vector_N.nbytes >= FEWEST_BYTES_AHEAD and sys.platform == "linux":
        page_thread().submit(_find_pages, ref(vector_N))
    return vector_N


def passing_bytes(length: int) -> memoryview:
    """Return `length` uninitialised bytes in memory of a `passing_vector`."""
    return passing_vector(-(-length // 4)).data.cast("B")[:length]


def copy_of(vector_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a float32 copy in memory of an `empty_vector`."""
    copied_N = empty_vector(len(vector_N))
    np.copyto(copied_N, vector_N)
    return copied_N


def zero_vector(elements: int) -> npt.NDArray[np.float32]:
    """Return zeros in memory of an `empty_vector`."""
    zeros_N = empty_vector(elements)
    zeros_N.fill(0.0)
    return zeros_N


def _vector(elements: int, *, is_kept: bool) -> npt.NDArray[np.float32]:
    if 4 * elements < FEWEST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(elements, dtype=np.float32)
    size = -(-4 * elements // mmap.PAGESIZE) * mmap.PAGESIZE
    slab = None
    if is_kept:
        with suppress(IndexError):
            slab = _free.setdefault(size, []).pop()
    if slab is None:
        slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.asarray(_Lease(slab, elements, is_kept=is_kept))


@cache
def page_thread() -> ThreadPoolExecutor:
    """Return the one thread that maps pages of awaited vectors, in order."""
    return ThreadPoolExecutor(1, thread_name_prefix="pages")


def _find_pages(awaited: ref[npt.NDArray[np.float32]]) -> None:
    """Map all pages of a vector if it is still in use, without changing its content.

    A single thread does this, so that a peer that starts many transfers cannot make us map more than one at a time.
    Kernels before Linux 5.14 do not support this, and return an error.
    """
    vector_N = awaited()
    if vector_N is None:
        return
    advise(vector_N.ctypes.data, vector_N.nbytes, _POPULATE_WRITE)


class _Lease:
    """Owns a slab while an array or a view of it exists. It uses no lock, since `__del__` can run at any time."""

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
