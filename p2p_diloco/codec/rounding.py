"""Random bits for stochastic rounding, reproducible from a seed.

The bits are those of Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = the
first 16 bytes of SHA-256(domain + seed) as two little-endian words, counter 1, 2, 3, …; element i uses bits
16 (i mod 4) to 16 (i mod 4) + 15 of word i // 4. Only raw words are used: NumPy guarantees that this stream stays the
same, but not its distributions. `tests/codec/test_rounding.py` has the same in plain Python.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2p_diloco.ids import sha256

_DOMAIN = b"p2p-diloco stochastic rounding v1\0"
_LANES_PER_WORD = 4


class RoundingBits:
    """A stream of 16 random bits per element, in the order of the elements."""

    __slots__ = ("_philox",)

    def __init__(self, seed: bytes) -> None:
        key = np.frombuffer(sha256(_DOMAIN, seed)[:16], dtype="<u8").astype(np.uint64)
        self._philox = np.random.Philox(key=key)

    def draw(self, elements: int) -> npt.NDArray[np.uint16]:
        """Return the bits of the next elements; all draws except the last must be multiples of four elements."""
        words = self._philox.random_raw(-(-elements // _LANES_PER_WORD))
        lanes_N: npt.NDArray[np.uint16] = words.astype("<u8", copy=False).view("<u2")[:elements]
        return lanes_N
