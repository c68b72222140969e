"""A hash of a long vector in sixteen columns, which processors hash side by side.

SHA-256 takes one step after the other: on a processor without instructions for it 3 to 5 ns for each byte, more than
half of all that is done to a span when a newcomer fetches it. Sixteen columns at once take a quarter of that. Whoever
cannot compile hashes them one after the other, to the same digests.

Legend: N = elements of a vector; R = rows of sixteen.
"""

from __future__ import annotations

from hashlib import blake2s

import numpy as np

from p2p_diloco.kernels.choice import column_kernels, frozen
from p2p_diloco.outer.vector import Vector

COLUMNS = 16
BLOCK_WORDS = 16
"""Words of a column that BLAKE2s takes at a time; whole blocks of all columns are hashed in columns."""
DIGEST_WORDS = 8


def hash_columns(vector_N: Vector) -> tuple[bytes, memoryview]:
    """Return the BLAKE2s digests of a vector's columns, one after the other, and what is left behind the last block.

    Column c holds the elements c, c + 16, c + 32, …, as little-endian float32, of as many whole blocks as there are.

    Args:
        vector_N: float32, shape (N,). Not changed.
    Returns:
        512 bytes, none of a vector of less than 256 elements; and the bytes of the last N mod 256 elements.
    """
    flat_N = np.ascontiguousarray(vector_N, dtype=np.float32)
    whole = flat_N.size // (COLUMNS * BLOCK_WORDS) * COLUMNS * BLOCK_WORDS
    rest = flat_N[whole:].astype("<f4", copy=False).data.cast("B")
    return (_digests(flat_N[:whole].view(np.uint32)) if whole else b""), rest


def _digests(words_W: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> bytes:
    loops = column_kernels()
    if loops is None:
        columns_CR = words_W.reshape(-1, COLUMNS).T
        return b"".join(blake2s(column_R.astype("<u4").data).digest() for column_R in columns_CR)
    state_H = np.empty(DIGEST_WORDS * COLUMNS, dtype=np.uint32)
    loops.column_digests(frozen(words_W), state_H)
    return state_H.reshape(DIGEST_WORDS, COLUMNS).T.astype("<u4").tobytes()
