"""Flat float32 vectors: blocks, norms, and the bounds within which every outer step is finite and equal everywhere.

Every element of an update is 0, or from 2^-64 to 2^64 in magnitude; codecs write and accept nothing else. Every element
of φ and m is 0 or at least 2^-64: the outer step turns smaller values into positive zero. Two claims follow, for any
number of updates in any order.

**The step stays finite.** Let |m| ≤ 2^89 and |φ| ≤ 2^119, as at the founding, with 0 ≤ μ ≤ 1 and η ≤ 16 in float32.
Rounding is monotonic, and 2^89 and 2^119 are float32 numbers, whose next larger neighbours are 2^66 and 2^96 away.

* |μ m + g| ≤ 2^89 + 2^64, which is less than half-way to 2^89's neighbour, so it is rounded to at most 2^89.
* Likewise |g + μ m| is at most 2^89, so |η (g + μ m)| is at most 2^93, which is less than half-way to 2^119's
  neighbour. So |φ − η (g + μ m)| is rounded to at most 2^119.

**A processor that flushes subnormal numbers, those below 2^-126, gets the same bytes.** With η and μ of at least 2^-24
(or μ = 0), μ m and μ m' are 0 or at least 2^-88, and what is added to them is a multiple of 2^-87; so sums are
multiples of 2^-111, and neither is subnormal. η (g + μ m') may be subnormal, and may then become 0 or not: it is below
2^-125, which changes no φ of 2^-64 or more, and a φ of 0 stays 0, because the result is too small. Codecs multiply
scales of at least 2^-64 by integers.

Some operations have two forms: the definition in NumPy, and a compiled loop with the same bits (`loops.py`). NumPy is
used without numba, and if numba cannot cache compiled code. Importing numba takes a second, so it is imported only for
the first vector. All loops are then compiled, or read from the cache, so that errors appear before real vectors arrive,
and no round waits for a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""One-dimensional float32 array on the host, shape (N,)."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
Wide: TypeAlias = npt.NDArray[np.float64]
Bits: TypeAlias = npt.NDArray[np.uint16]
"""Bits of bfloat16 numbers, or of random numbers for rounding."""
Integers: TypeAlias = npt.NDArray[np.int64]

SMALLEST = 2.0**-64
"""Smallest nonzero magnitude in φ, m and an update; anything smaller is stored as 0."""
LARGEST = 2.0**64
"""Largest magnitude of an element of an update."""
LARGEST_MOMENTUM = 2.0**89
LARGEST_ANCHOR = 2.0**119
SMALLEST_RATE, LARGEST_RATE = 2.0**-24, 16.0
"""Range of the outer learning rate η; the momentum μ is 0 or at least SMALLEST_RATE."""

BLOCK = 64
"""Elements that share a scale of a codec, and a length of a radial mean."""
CACHED_ELEMENTS = 16_384
"""64 KiB per operand: four of them fit into the second-level cache of any machine of the last ten years. Several passes
over so many elements cost less than one pass over a long vector."""
CHUNK_ELEMENTS = 1 << 20
"""4 MiB of float32: what is copied between the host and a device at a time."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_FLOAT32_FRACTION_BITS, _BFLOAT16_FRACTION_BITS = 23, 7
_FLOAT32_UNIT_EXPONENT, _BFLOAT16_UNIT_EXPONENT = -149, -133
_BFLOAT16_EXPONENTS = 256
_LOW_BITS = 24
# A float64 bin holds integers exactly up to 2^53, more than 2^14 addends of at most 2^36 each.
_FLOAT_BINNED = 1 << 14
# A bin of int64 holds the sum of more elements.
_INTEGER_BINNED = 1 << 26
_NO_WEIGHTS: Integers = np.empty(0, dtype=np.int64)

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")

_switched_off = False
_failures: list[str] = []


# -- two forms of an operation


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


# -- slices and views


def iterate_blocks(elements: int, most: int = CACHED_ELEMENTS) -> Iterator[slice]:
    """Yield slices that cover `range(elements)` in order, each element once."""
    for start in range(0, elements, most):
        yield slice(start, min(start + most, elements))


def num_blocks(elements: int) -> int:
    """Return the number of blocks of `BLOCK` elements; the last one may be short."""
    return -(-elements // BLOCK)


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view; the owner of the memory must not write to it either."""
    view = array.view()
    view.setflags(write=False)
    return view


# -- bounds


def zero_small(vector_N: Vector) -> None:
    """Set values to zero, in place, that are too small for the agreed state."""
    is_kept_N = np.abs(vector_N) >= SMALLEST
    if not is_kept_N.all():
        vector_N *= is_kept_N  # faster than masked assignment; NaN stays NaN
        vector_N += 0.0  # no negative zeros


@with_loop(fewest=BLOCK, of_vectors=True)
def is_finite(vector_N: Vector) -> bool:
    return all(bool(np.isfinite(vector_N[block]).all()) for block in iterate_blocks(len(vector_N)))


def count_non_finite(vector_N: Vector) -> int:
    return 0 if is_finite(vector_N) else len(vector_N) - int(np.count_nonzero(np.isfinite(vector_N)))


@with_loop(fewest=BLOCK, of_vectors=True)
def is_within(vector_N: Vector, most_bits: np.uint32) -> bool:
    """Return whether all values are 0, or not too small and at most a float, given by its bits, in magnitude."""
    magnitude_N = np.abs(vector_N)
    return bool(np.all((magnitude_N == 0) | ((magnitude_N >= SMALLEST) & (magnitude_N <= most_bits.view(np.float32)))))


# -- norms


def euclidean_norm(vector_N: Vector) -> float:
    """Return the Euclidean norm; NaN or infinity if `vector_N` holds one.

    Squares of float32 are exact in float64. Their sum may differ by an ulp between NumPy builds and the compiled loop.
    That is harmless: a peer sends the norm of its own vector as a value, and nobody recomputes it.
    """
    return math.sqrt(sum_of_squares(vector_N))


@with_loop(fewest=BLOCK, of_vectors=True)
def sum_of_squares(vector_N: Vector) -> float:
    """Return the sum of the squares in float64; its order, and so its last digit, is another one than the loop's."""
    wide_blocks = (vector_N[block].astype(np.float64) for block in iterate_blocks(len(vector_N)))
    return math.fsum(float(np.sum(wide * wide)) for wide in wide_blocks)


def squared_norm_of_float32(vector_N: Vector) -> float:
    """Return the exact sum of the squares of finite values, rounded to float64 once: equal on all machines.

    A float is an integer times a power of two. Integers are summed exactly per exponent, and the few sums are combined
    into one Python integer: the result of `math.fsum`, at array speed.
    """
    total = 0
    for chunk in iterate_blocks(vector_N.size, _FLOAT_BINNED):
        shift_N, integer_N = _split_float(vector_N[chunk].view(np.uint32) & _MAGNITUDE, _FLOAT32_FRACTION_BITS)
        square_N = integer_N * integer_N
        total += _sum_of_bins(np.bincount(shift_N, weights=square_N & ((1 << _LOW_BITS) - 1)))
        total += _sum_of_bins(np.bincount(shift_N, weights=square_N >> _LOW_BITS)) << _LOW_BITS
    return math.ldexp(float(total), 2 * _FLOAT32_UNIT_EXPONENT)


def squared_norm_of_bfloat16(bits_N: Bits, weights_N: Integers = _NO_WEIGHTS) -> float:
    """Return the exact sum of weight · square of finite bfloat16 values, rounded once; see `squared_norm_of_float32`.

    Args:
        bits_N: bits of the values.
        weights_N: integers from 0 to 2^20; empty means 1 for all.
    """
    total = 0
    for chunk in iterate_blocks(bits_N.size, _INTEGER_BINNED):
        bins_E = np.zeros(_BFLOAT16_EXPONENTS, dtype=np.int64)
        bin_squares(bits_N[chunk], weights_N[chunk], bins_E)
        total += _sum_of_bins(bins_E)
    return math.ldexp(float(total), 2 * _BFLOAT16_UNIT_EXPONENT)


@with_loop()
def bin_squares(bits_N: Bits, weights_N: Integers, bins_E: Integers) -> None:
    """Add weight · square of each bfloat16 value exactly to the bin of its exponent, in units of its last place.

    Squares are integers below 2^16 and weights at most 2^20, so a bin holds 2^27 addends.
    """
    for chunk in iterate_blocks(len(bits_N), _FLOAT_BINNED):
        shift_N, integer_N = _split_float(bits_N[chunk] & np.uint16(0x7FFF), _BFLOAT16_FRACTION_BITS)
        square_N = integer_N * integer_N * (weights_N[chunk] if len(weights_N) else 1)
        bins_E += np.bincount(shift_N, weights=square_N, minlength=len(bins_E)).astype(np.int64)


def _split_float(magnitude_N: npt.NDArray[np.unsignedinteger], fraction_bits: int) -> tuple[Integers, Integers]:
    """Split each magnitude into `integer · 2^shift` units of the smallest subnormal; return shifts and integers."""
    exponent_N = (magnitude_N >> fraction_bits).astype(np.int64)
    fraction_N = magnitude_N.astype(np.int64) & ((1 << fraction_bits) - 1)
    integer_N = fraction_N | ((exponent_N > 0).astype(np.int64) << fraction_bits)
    return np.maximum(exponent_N, 1) - 1, integer_N


def _sum_of_bins(bins_E: npt.NDArray[Any]) -> int:
    """Return the exact sum of `bin · 4^shift`."""
    return sum(int(bins_E[shift]) << (2 * shift) for shift in np.flatnonzero(bins_E).tolist())
