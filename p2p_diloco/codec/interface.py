"""What every codec can do: exact sizes, bytes out, values back, an exact norm.

A codec is a pure value. Peers that encode the same vector with the same seed get the same bytes, and peers that
decode the same bytes get the same float32 values, bit for bit: everything in this room is integer arithmetic, or
single operations on floats that IEEE 754 defines completely (no sums whose order a library could choose).

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
    """Turns a span's vector into bytes and back.

    Attributes:
        name: as the manifest spells it.
        block_elements: spans are cut at multiples of it, so that no block belongs to two spans. Any number of elements
            can be encoded; the last block may be short.
    """

    name: str
    block_elements: int

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """Return the exact size of an encoded vector; it depends on the number of elements alone."""

    @abstractmethod
    def encode(self, vector_N: Vector, *, rounding_seed: bytes | None = None) -> bytes:
        """Encode a vector.

        Values that are too small become 0 and those that are too large are clipped: see `kernels/bounds.py`.

        Args:
            vector_N: float32, shape (N,). Not changed.
            rounding_seed: None rounds to nearest, ties to even. Bytes round stochastically: a value between two codes
                takes the upper one with a probability equal to its distance from the lower one, so that errors
                vanish in the mean. Whoever has vector and seed gets the same bytes (see `rounding.py`). A codec that
                leaves elements out (`topk2.py`) takes no seed: its errors would not vanish.
        Returns:
            Exactly `encoded_bytes(N)` bytes that `decode` takes.
        Raises:
            NonFiniteUpdate: `vector_N` holds a NaN or an infinity.
            ValueError: a seed was given to a codec that takes none; a manifest cannot ask for that.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, elements: int) -> Vector:
        """Decode what a peer sent; every value of the result is within the bounds of `kernels/bounds.py`.

        Args:
            encoded: bytes from anywhere. Not changed, not kept.
            elements: number of elements that the span has, from the manifest, never from the peer.
        Returns:
            float32, shape (elements,), freshly allocated.
        Raises:
            FrameError: wrong size, a value not finite or out of bounds, or a scale or code that no encoder writes.
        """

    def reader(self, encoded: Encoded, elements: int) -> Callable[[slice], Vector]:
        """Return what decodes a slice of the elements at a time; slices begin and end at blocks, or at the end.

        A codec whose slices cannot be decoded by themselves decodes all at once, here.

        Raises:
            FrameError: where `decode` raises it; then, or when what is wrong is read.
        """
        return self.decode(encoded, elements).__getitem__

    def add_up(self, encoded: Sequence[Encoded], shares: Sequence[np.float32], elements: int) -> Vector:
        """Return Σ share · decoded values, in order.

        Multiply and add are two roundings, element by element: the same bits as decoding all and averaging them.

        Args:
            encoded: at least one; each as in `decode`.
            shares: one for each.
        Returns:
            float32, shape (elements,), freshly allocated; not finite where a sum overflows.
        Raises:
            FrameError: where `decode` raises it.
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
            FrameError: where `decode` raises it.
        """
