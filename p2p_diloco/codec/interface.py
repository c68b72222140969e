"""The codec interface: exact sizes, encode, decode, exact norm; and what all codecs share.

A codec is stateless. Peers that encode the same vector with the same seed get the same bytes, and peers that decode the
same bytes get the same float32 values, bit for bit: everything in this package is integer arithmetic, or single float
operations that IEEE 754 defines completely (no sums whose order a library could choose).

Axes: N elements of a span, B blocks of a span, K elements of a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.vectors import LARGEST, SMALLEST, Bits, Bytes, Vector
from p2p_diloco.errors import FrameError, NonFiniteUpdate
from p2p_diloco.ids import sha256

Encoded: TypeAlias = bytes | bytearray | memoryview
"""An encoded span; any contiguous buffer of bytes."""

_ROUNDING_DOMAIN = b"p2p-diloco stochastic rounding v1\0"
_LANES_PER_WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(ABC):
    """Turns a span's vector into bytes and back. Any number of elements can be encoded; the last block may be short.

    Attributes:
        name: name in manifests.
    """

    name: str

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector, which depends only on the number of elements."""

    @abstractmethod
    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Encode a vector.

        Too small values become 0 and too large ones are clipped: see `vectors.py`.

        Args:
            vector_N: float32, shape (N,). Not changed.
            rounding_seed: None rounds to nearest, ties to even. With a seed, rounding is stochastic: a value between
                two codes becomes the upper one with a probability equal to its distance from the lower one, so that
                errors are zero on average. The same vector and seed give the same bytes (see `RoundingBits`).
        Returns:
            Exactly `encoded_bytes(N)` bytes for `decode`.
        Raises:
            NonFiniteUpdate: `vector_N` holds a NaN or an infinity.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Decode bytes from a peer; all values of the result are within the bounds of `vectors.py`.

        Args:
            encoded: untrusted bytes. Not changed, not kept.
            elements: number of elements of the span, from the manifest, never from the peer.
        Returns:
            float32, shape (elements,), freshly allocated.
        Raises:
            FrameError: the size is wrong, a value is not finite or out of bounds, or no encoder writes such a scale or
                code.
        """

    def reader(self, encoded: Encoded, elements: int) -> Callable[[slice], Vector]:
        """Return a function that decodes a slice of the elements; slices begin and end at blocks, or at the end.

        Raises:
            FrameError: as for `decode`; a wrong size here, anything else when the invalid part is read.
        """
        received = self._received(encoded, elements)
        return lambda here: self.decode(self.bytes_of(received, elements, here), here.stop - here.start)

    @abstractmethod
    def bytes_of(self, received: Bytes, elements: int, here: slice) -> bytes:
        """Return the encoding of a slice of the elements, which begins and ends at blocks, or at the end."""

    def add_up(self, encoded: Sequence[Encoded], shares: Sequence[np.float32], elements: int) -> Vector:
        """Return Σ share · decoded values, in order.

        Multiply and add round separately, element by element: the result has the same bits as decoding all and then
        averaging.

        Args:
            encoded: at least one; each as in `decode`.
            shares: one for each.
        Returns:
            float32, shape (elements,), freshly allocated; not finite where a sum overflows.
        Raises:
            FrameError: as for `decode`.
        """
        first, *others = zip(encoded, shares, strict=True)
        sum_N = self.decode(first[0], elements)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(sum_N, first[1], out=sum_N)
            for one, share in others:
                addend_N = self.decode(one, elements)
                np.multiply(addend_N, share, out=addend_N)
                np.add(sum_N, addend_N, out=sum_N)
        return sum_N

    @abstractmethod
    def squared_norm(self, encoded: Encoded, elements: int) -> float:
        """Return the squared 2-norm of the decoded values.

        It is the exact sum of the exact squares, rounded to float64 once: equal on all machines, and equal to
        `math.fsum` over the squares.

        Raises:
            FrameError: as for `decode`.
        """

    def norm(self, encoded: Encoded, elements: int) -> float:
        """Return the exact norm of the decoded values; errors as for `decode`."""
        return math.sqrt(self.squared_norm(encoded, elements))

    def _received(self, encoded: Encoded, elements: int) -> Bytes:
        """View bytes from a peer as an array.

        Raises:
            FrameError: there are more or fewer bytes than expected.
        """
        received_bytes, expected_bytes = memoryview(encoded).nbytes, self.encoded_bytes(elements)
        if received_bytes != expected_bytes:
            raise FrameError(
                f"{self.name} span of {elements} elements has {received_bytes} bytes; expected {expected_bytes}"
            )
        return np.frombuffer(encoded, dtype=np.uint8)


class RoundingBits:
    """A stream of 16 random bits per element, in the order of the elements; reproducible from a seed.

    The bits are those of Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key =
    the first 16 bytes of SHA-256(domain + seed) as two little-endian words, counter 1, 2, 3, …; element i uses bits
    16 (i mod 4) to 16 (i mod 4) + 15 of word i // 4. Only raw words are used: NumPy guarantees that this stream stays
    the same, but not its distributions. `tests/codec/test_rounding.py` has the same in plain Python.
    """

    __slots__ = ("_philox",)

    def __init__(self, seed: bytes) -> None:
        key = np.frombuffer(sha256(_ROUNDING_DOMAIN, seed)[:16], dtype="<u8").astype(np.uint64)
        self._philox = np.random.Philox(key=key)

    def draw(self, elements: int) -> Bits:
        """Return the bits of the next elements; all draws except the last must be multiples of four elements."""
        words = self._philox.random_raw(-(-elements // _LANES_PER_WORD))
        lanes_N: Bits = words.astype("<u8", copy=False).view("<u2")[:elements]
        return lanes_N


def contiguous_vector(vector_N: Vector) -> Vector:
    """Return one of our own vectors as a contiguous array; a wrong type or shape is our own bug."""
    assert vector_N.dtype == np.float32, f"codecs take float32, not {vector_N.dtype}"
    assert vector_N.ndim == 1, f"codecs take flat vectors, not shape {vector_N.shape}"
    return np.ascontiguousarray(vector_N)


def refuse_non_finite_update(vector_N: Vector) -> None:
    """Raise NonFiniteUpdate if one of our own vectors holds a NaN or an infinity."""
    count_text = _non_finite_text(vector_N)
    if count_text:
        raise NonFiniteUpdate(f"the update to encode holds {count_text}; it is skipped in this round")


def within_bounds(vector_N: Vector) -> Vector:
    """Return finite values within the bounds: too small ones become zero, too large ones are clipped.

    Returns the same vector if nothing is out of bounds.
    """
    magnitude_N = np.abs(vector_N)
    if not _is_out_of_bounds(magnitude_N).any():
        return vector_N
    return np.where(magnitude_N < SMALLEST, np.float32(0), np.clip(vector_N, np.float32(-LARGEST), np.float32(LARGEST)))


def refuse_frame_out_of_bounds(name: str, vector_N: Vector) -> None:
    """Raise FrameError if a peer's vector holds a NaN, an infinity, or a value that no encoder writes."""
    count_text = _non_finite_text(vector_N)
    if count_text:
        raise FrameError(f"{name} span holds {count_text}")
    wrong_N = _is_out_of_bounds(np.abs(vector_N))
    if wrong_N.any():
        element = int(np.argmax(wrong_N))
        raise FrameError(
            f"{name} span holds {int(np.count_nonzero(wrong_N))} of {vector_N.size} values out of bounds, the first at "
            f"element {element} ({vector_N[element]:.3g}); expected 0 or a magnitude from {SMALLEST:.3g} to "
            f"{LARGEST:.3g}"
        )


def _is_out_of_bounds(magnitude_N: Vector) -> npt.NDArray[np.bool_]:
    wrong_N: npt.NDArray[np.bool_] = (magnitude_N > LARGEST) | ((magnitude_N < SMALLEST) & (magnitude_N != 0))
    return wrong_N


def _non_finite_text(vector_N: Vector) -> str:
    finite_N = np.isfinite(vector_N)
    if finite_N.all():
        return ""
    count = vector_N.size - int(np.count_nonzero(finite_N))
    return f"{count} of {vector_N.size} values that are not finite, the first at element {int(np.argmin(finite_N))}"
