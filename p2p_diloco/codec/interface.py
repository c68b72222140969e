"""The codec interface: exact sizes, encode, decode, exact norm.

A codec is stateless. Peers that encode the same vector with the same seed get the same bytes, and peers that decode the
same bytes get the same float32 values, bit for bit: everything in this package is integer arithmetic, or single float
operations that IEEE 754 defines completely (no sums whose order a library could choose).

Axes: N elements of a span, B blocks of a span, K elements of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector on the host."""

Encoded: TypeAlias = bytes | bytearray | memoryview
"""An encoded span; any contiguous buffer of bytes."""


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

        Too small values become 0 and too large ones are clipped: see `kernels/bounds.py`.

        Args:
            vector_N: float32, shape (N,). Not changed.
            rounding_seed: None rounds to nearest, ties to even. With a seed, rounding is stochastic: a value between
                two codes becomes the upper one with a probability equal to its distance from the lower one, so that
                errors are zero on average. The same vector and seed give the same bytes (see `rounding.py`).
        Returns:
            Exactly `encoded_bytes(N)` bytes for `decode`.
        Raises:
            NonFiniteUpdate: `vector_N` holds a NaN or an infinity.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Decode bytes from a peer; all values of the result are within the bounds of `kernels/bounds.py`.

        Args:
            encoded: untrusted bytes. Not changed, not kept.
            elements: number of elements of the span, from the manifest, never from the peer.
        Returns:
            float32, shape (elements,), freshly allocated.
        Raises:
            FrameError: the size is wrong, a value is not finite or out of bounds, or no encoder writes such a scale or
                code.
        """

    @abstractmethod
    def reader(self, encoded: Encoded, elements: int) -> Callable[[slice], Vector]:
        """Return a function that decodes a slice of the elements; slices begin and end at blocks, or at the end.

        Raises:
            FrameError: as for `decode`; either here, or when the invalid part is read.
        """

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
