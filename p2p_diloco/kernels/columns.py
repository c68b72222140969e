"""BLAKE2s of sixteen messages at once, whose words lie side by side: column c of a table of words is one message.

What one message must do one step after the other, sixteen do together in a vector register. The bits are those of
`hashlib.blake2s`; RFC 7693 is the source of the round, the constants and the order of words.
Loops check nothing.

Legend: words are unsigned 32-bit; W words, laid out row by row, sixteen to a row; H = 8 x 16 words of state.
"""

# Sixteen names in a row are registers: an array here would be memory, and the loop over columns no vector loop.

from __future__ import annotations

import numpy as np
from numba import njit

from p2p_diloco.kernels.choice import frozen

COLUMNS = 16
BLOCK_WORDS = 16
"""Of each column: what BLAKE2s takes at a time."""
DIGEST_WORDS = 8
_START = tuple(
    np.uint32(word)
    for word in (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
)
_PARAMETERS = np.uint32(0x01010020)
"""Digests of 32 bytes, no key."""
_ALL, _NONE = np.uint32(0xFFFFFFFF), np.uint32(0)
_word = np.uint32
_7, _8, _12, _16, _20, _24, _25 = (np.uint32(bits) for bits in (7, 8, 12, 16, 20, 24, 25))

_compiled = njit(cache=True, nogil=True, error_model="numpy", boundscheck=False)
_within = njit(error_model="numpy", boundscheck=False)


@_within
def _mix(a, b, c, d, x, y):  # type: ignore[no-untyped-def]
    """G of RFC 7693. numba counts in 64 bits unless told otherwise after each step."""
    a = _word(a + b + x)
    d = _word(d ^ a)
    d = _word(_word(d >> _16) | _word(d << _16))
    c = _word(c + d)
    b = _word(b ^ c)
    b = _word(_word(b >> _12) | _word(b << _20))
    a = _word(a + b + y)
    d = _word(d ^ a)
    d = _word(_word(d >> _8) | _word(d << _24))
    c = _word(c + d)
    b = _word(b ^ c)
    b = _word(_word(b >> _7) | _word(b << _25))
    return a, b, c, d


# fmt: off
@_within
def _round(  # type: ignore[no-untyped-def]
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
):
    """Mix columns, then diagonals, with words in the order of the round."""
    v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
    v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
    v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
    v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
    v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
    v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
    v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
    v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15


# fmt: on


@_compiled
def _compress(words_W, at, state_H, low, high, last):  # type: ignore[no-untyped-def]
    """F of RFC 7693 for one block of each column, which begins at word `at`."""
    for c in range(COLUMNS):
        m0 = words_W[at + c]
        m1 = words_W[at + 16 + c]
        m2 = words_W[at + 32 + c]
        m3 = words_W[at + 48 + c]
        m4 = words_W[at + 64 + c]
        m5 = words_W[at + 80 + c]
        m6 = words_W[at + 96 + c]
        m7 = words_W[at + 112 + c]
        m8 = words_W[at + 128 + c]
        m9 = words_W[at + 144 + c]
        m10 = words_W[at + 160 + c]
        m11 = words_W[at + 176 + c]
        m12 = words_W[at + 192 + c]
        m13 = words_W[at + 208 + c]
        m14 = words_W[at + 224 + c]
        m15 = words_W[at + 240 + c]
        v0 = state_H[c]
        v1 = state_H[16 + c]
        v2 = state_H[32 + c]
        v3 = state_H[48 + c]
        v4 = state_H[64 + c]
        v5 = state_H[80 + c]
        v6 = state_H[96 + c]
        v7 = state_H[112 + c]
        v8, v9, v10, v11, v12, v13, v14, v15 = _START
        v12, v13, v14 = _word(v12 ^ low), _word(v13 ^ high), _word(v14 ^ last)
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m14, m10, m4, m8, m9, m15, m13, m6, m1, m12, m0, m2, m11, m7, m5, m3,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m11, m8, m12, m0, m5, m2, m15, m13, m10, m14, m3, m6, m7, m1, m9, m4,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m7, m9, m3, m1, m13, m12, m11, m14, m2, m6, m5, m10, m4, m0, m15, m8,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m9, m0, m5, m7, m2, m4, m10, m15, m14, m1, m11, m12, m6, m8, m3, m13,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m2, m12, m6, m10, m0, m11, m8, m3, m4, m13, m7, m5, m15, m14, m1, m9,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m12, m5, m1, m15, m14, m13, m4, m10, m0, m7, m6, m3, m9, m2, m8, m11,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m13, m11, m7, m14, m12, m1, m3, m9, m5, m0, m15, m4, m8, m6, m2, m10,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m6, m15, m14, m9, m11, m3, m0, m8, m12, m2, m13, m7, m1, m4, m10, m5,
        )  # fmt: skip
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
            m10, m2, m8, m4, m7, m6, m1, m5, m15, m11, m9, m14, m3, m12, m13, m0,
        )  # fmt: skip
        state_H[c] = _word(state_H[c] ^ v0 ^ v8)
        state_H[16 + c] = _word(state_H[16 + c] ^ v1 ^ v9)
        state_H[32 + c] = _word(state_H[32 + c] ^ v2 ^ v10)
        state_H[48 + c] = _word(state_H[48 + c] ^ v3 ^ v11)
        state_H[64 + c] = _word(state_H[64 + c] ^ v4 ^ v12)
        state_H[80 + c] = _word(state_H[80 + c] ^ v5 ^ v13)
        state_H[96 + c] = _word(state_H[96 + c] ^ v6 ^ v14)
        state_H[112 + c] = _word(state_H[112 + c] ^ v7 ^ v15)


@_compiled
def column_digests(words_W, state_H):  # type: ignore[no-untyped-def]
    """Leave the digests in `state_H`, word by word: word i of column c at 16 i + c. Whole blocks, at least one."""
    for i in range(DIGEST_WORDS):
        for c in range(COLUMNS):
            state_H[COLUMNS * i + c] = _START[i]
    for c in range(COLUMNS):
        state_H[c] = _word(state_H[c] ^ _PARAMETERS)
    blocks = words_W.size // (COLUMNS * BLOCK_WORDS)
    for block in range(blocks):
        hashed_bytes = np.uint64(4 * BLOCK_WORDS * (block + 1))
        low, high = _word(hashed_bytes), _word(hashed_bytes >> np.uint64(32))
        _compress(words_W, COLUMNS * BLOCK_WORDS * block, state_H, low, high, _ALL if block == blocks - 1 else _NONE)


def try_out() -> None:
    """Use each loop once, as `outer/` does."""
    column_digests(frozen(np.zeros(COLUMNS * BLOCK_WORDS, np.uint32)), np.empty(COLUMNS * DIGEST_WORDS, np.uint32))
