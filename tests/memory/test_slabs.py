"""Vectors reuse each other's memory, but only once nothing refers to it."""

from __future__ import annotations

import gc
import mmap
import resource
import sys
import threading
from typing import Any
from weakref import ref

import numpy as np
import pytest

from p2p_diloco.memory.slabs import (
    FEWEST_BYTES,
    FEWEST_BYTES_AHEAD,
    MOST_FREE,
    awaited_vector,
    copy_of,
    empty_vector,
    page_thread,
    passing_bytes,
    passing_vector,
    zero_vector,
)

LONG = FEWEST_BYTES // 4 + 12_345  # a length that no other test has


def address(vector_N: np.ndarray) -> int:
    return int(vector_N.__array_interface__["data"][0])


def test_memory_is_reused_for_a_vector_of_the_same_length() -> None:
    first_N = empty_vector(LONG)
    place = address(first_N)
    del first_N
    assert address(empty_vector(LONG + 1)) == place, "a few elements more fit the same pages"
    assert address(empty_vector(2 * LONG)) != place


def test_a_view_keeps_the_memory_in_use() -> None:
    whole_N = zero_vector(LONG)
    part_N = whole_N[100:200]
    part_N.flags.writeable = False
    place = address(whole_N)
    del whole_N
    others = [empty_vector(LONG) for _ in range(3)]
    for other_N in others:
        other_N.fill(7.0)
    assert place not in map(address, others)
    assert not part_N.any()
    del part_N, others, other_N
    gc.collect()
    assert place in [address(each) for each in [empty_vector(LONG) for _ in range(4)]]


@pytest.mark.parametrize("elements", [0, 1, FEWEST_BYTES // 4 - 1, FEWEST_BYTES // 4, LONG])
def test_vectors_have_the_requested_shape_and_contents(elements: int) -> None:
    expected_N = np.arange(elements, dtype=np.float32)
    for vector_N in (
        empty_vector(elements),
        zero_vector(elements),
        copy_of(expected_N),
        passing_vector(elements),
        awaited_vector(elements),
    ):
        assert vector_N.shape == (elements,)
        assert vector_N.dtype == np.float32
        assert vector_N.flags.writeable
        assert vector_N.flags.c_contiguous
        assert vector_N.flags.aligned
    assert np.array_equal(copy_of(expected_N), expected_N)
    assert not zero_vector(elements).any()


def test_threads_never_share_memory() -> None:
    broken: list[int] = []

    def work(number: int) -> None:
        held_N = copy_of(np.full(LONG, number, np.float32))
        for _ in range(200):
            next_N = copy_of(held_N)
            if next_N[0] != number or next_N[-1] != number:
                broken.append(number)
            held_N = next_N

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not broken


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[ref[mmap.mmap]]:
    """Return references to all memory that is mapped from now on."""
    found: list[ref[mmap.mmap]] = []
    map_memory = mmap.mmap

    def noted(*args: Any, **more: Any) -> mmap.mmap:
        slab = map_memory(*args, **more)
        found.append(ref(slab))
        return slab

    monkeypatch.setattr(mmap, "mmap", noted)
    return found


def test_few_free_slabs_are_kept(mapped: list[ref[mmap.mmap]]) -> None:
    burst = [empty_vector(LONG + 50_000) for _ in range(3 * MOST_FREE)]
    assert len(mapped) == len(burst)
    del burst
    assert sum(slab() is not None for slab in mapped) == MOST_FREE


def test_a_passing_vector_leaves_no_free_slab(mapped: list[ref[mmap.mmap]]) -> None:
    length = LONG + 100_000
    passing_N = passing_vector(length)
    passing_N.fill(7.0)
    part_N = passing_N[:10]
    (slab,) = mapped
    del passing_N
    assert slab() is not None
    assert (part_N == 7.0).all()
    del part_N
    assert slab() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the system is asked in Linux's words")
def test_pages_of_an_awaited_vector_are_mapped_before_it_is_written() -> None:
    awaited_N = awaited_vector(4 * FEWEST_BYTES_AHEAD)
    page_thread().submit(int).result()  # one thread, in order: earlier work is done
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    awaited_N.fill(7.0)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < awaited_N.nbytes // mmap.PAGESIZE // 8
    assert (awaited_N == 7.0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="the system is asked in Linux's words")
def test_a_dropped_awaited_vector_is_freed_before_its_turn() -> None:
    turn = threading.Event()
    page_thread().submit(turn.wait)
    awaited_N = awaited_vector(FEWEST_BYTES_AHEAD)
    gone = ref(awaited_N)
    del awaited_N
    assert gone() is None
    turn.set()


@pytest.mark.parametrize("length", [0, 1, 3, FEWEST_BYTES - 1, FEWEST_BYTES, 4 * LONG + 3])
def test_passing_bytes_have_the_requested_length(length: int) -> None:
    room = passing_bytes(length)
    room[:] = bytes([7]) * length
    assert room == bytes([7]) * length
