"""Claims about the random bits, with Philox-4x64-10 in plain Python as the reference."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from p2p_diloco.codec.codec import RoundingBits

MASK = 2**64 - 1


def philox_block(counter: int, key: tuple[int, int]) -> list[int]:
    """Return the four words of one counter value (Salmon et al. 2011, with the constants of Random123)."""
    words = [counter >> (64 * place) & MASK for place in range(4)]
    key0, key1 = key
    for _ in range(10):
        product0 = 0xD2E7470EE14C6C93 * words[0]
        product1 = 0xCA5A826395121157 * words[2]
        words = [product1 >> 64 ^ words[1] ^ key0, product1 & MASK, product0 >> 64 ^ words[3] ^ key1, product0 & MASK]
        key0 = (key0 + 0x9E3779B97F4A7C15) & MASK
        key1 = (key1 + 0xBB67AE8584CAA73B) & MASK
    return words


def test_reference_matches_the_known_answers_of_random123() -> None:
    assert philox_block(0, (0, 0)) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox_block(2**256 - 1, (MASK, MASK)) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@pytest.mark.parametrize("seed", [b"", b"run 1, round 2, span 3", bytes(range(256))])
def test_bits_match_the_published_generator(seed: bytes) -> None:
    digest = hashlib.sha256(b"p2p-diloco stochastic rounding v1\0" + seed).digest()
    key = (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))
    expected = [
        word >> (16 * lane) & 0xFFFF
        for counter in range(1, 9)
        for word in philox_block(counter, key)
        for lane in range(4)
    ]
    assert RoundingBits(seed).draw(8 * 16).tolist() == expected


def test_drawing_in_pieces_gives_the_same_bits() -> None:
    whole = RoundingBits(b"seed").draw(103).tolist()
    pieces = RoundingBits(b"seed")
    assert [bits for elements in (4, 12, 80, 7) for bits in pieces.draw(elements).tolist()] == whole


def test_no_elements_take_no_bits() -> None:
    assert RoundingBits(b"seed").draw(0).size == 0


def test_bits_are_evenly_distributed() -> None:
    bits_N = RoundingBits(b"seed").draw(2**18).astype(np.float64)
    # Standard error of the mean of 2^18 uniform draws from 0 to 65535: 37.
    assert abs(bits_N.mean() - 32767.5) < 4 * 37
    for bit in range(16):
        assert abs(np.mean(bits_N.astype(np.int64) >> bit & 1) - 0.5) < 4 / 2**10
