"""Signed records and the directory within one process."""

from __future__ import annotations

import asyncio
import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import format_peer_id, sha256
from p2p_diloco.signing import SigningKey
from p2p_diloco.testing.network import MemoryDirectory
from p2p_diloco.transport.directory import (
    MAX_ADDRESSES,
    MAX_RECORD_BYTES,
    PeerRecord,
    PeerRole,
    decode_record,
    sign_record,
)

RUN = sha256(b"the run")
KEY = SigningKey(sha256(b"key"))
END = f"/p2p/{format_peer_id(KEY.peer)}"


def record_of(key: SigningKey = KEY, *, issued_at: float = 1000.0, addresses: tuple[str, ...] = ()) -> PeerRecord:
    return sign_record(
        key, run=RUN, addresses=addresses, can_be_dialled=bool(addresses), role=PeerRole.TRAINER, issued_at=issued_at
    )


@given(
    st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=300), max_size=30).map(tuple),
    st.sampled_from(PeerRole),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_a_record_is_decoded_as_it_was_signed(addresses: tuple[str, ...], role: PeerRole, issued_at: float) -> None:
    record = sign_record(KEY, run=RUN, addresses=addresses, can_be_dialled=True, role=role, issued_at=issued_at)
    assert record.is_authentic()
    assert len(record.encode()) <= MAX_RECORD_BYTES
    assert decode_record(record.encode()) == record
    assert len(record.addresses) <= MAX_ADDRESSES


def test_addresses_beyond_the_limits_of_a_record_are_left_out() -> None:
    addresses = tuple(f"/ip4/203.0.113.{index}/tcp/31337{END}" for index in range(40))
    assert record_of(addresses=addresses).addresses == addresses[:MAX_ADDRESSES]
    assert record_of(addresses=("x" * 300, *addresses[:2])).addresses == addresses[:2]


@pytest.mark.parametrize("index", range(0, len(record_of(addresses=(END,)).encode()), 7))
def test_a_changed_byte_anywhere_is_detected(index: int) -> None:
    encoded = bytearray(record_of(addresses=(END,)).encode())
    encoded[index] ^= 0x10
    with pytest.raises(FrameError):
        decode_record(bytes(encoded))


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(encoded: bytes) -> None:
    with pytest.raises(FrameError):
        decode_record(encoded)


def test_a_signature_of_another_peer_does_not_count() -> None:
    other = SigningKey(sha256(b"other"))
    stolen = dataclasses.replace(record_of(), peer=other.peer)
    with pytest.raises(FrameError, match=r"a peer record of 12D3\.\..* is not signed by it"):
        decode_record(stolen.encode())


def with_field(offset: int, form: str, value: object) -> bytes:
    encoded = bytearray(record_of(addresses=(END,)).encode())
    struct.pack_into(form, encoded, offset, value)
    return bytes(encoded)


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (b"", "has 140 to 2048 bytes, not 0"),
        (bytes(MAX_RECORD_BYTES + 1), "has 140 to 2048 bytes, not 2049"),
        (with_field(0, ">B", 9), "has version 9; this program knows version 1"),
        (with_field(66, ">B", 9), "names the unknown role 9"),
        (with_field(67, ">d", float("inf")), "of time inf names"),
        (with_field(75, ">B", 17), "names 17 addresses; 4 are allowed"),
        (with_field(75, ">B", 4), "ends within its addresses|an address of"),
        (with_field(76, ">H", 300), "an address of 300 bytes"),
        (with_field(80, ">B", 0xFF), "beyond printable ASCII"),
        (with_field(80, ">B", 0x1B), "beyond printable ASCII"),
    ],
)
def test_malformed_records_are_refused_with_their_reason(encoded: bytes, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        decode_record(encoded)


def test_the_directory_keeps_the_newest_record_of_each_peer_until_it_expires() -> None:
    now = [1000.0]
    others = sorted((SigningKey(sha256(b"%d" % index)) for index in range(3)), key=lambda key: key.peer)

    async def main() -> None:
        directory = MemoryDirectory(lambda: now[0])
        for key in reversed(others):
            await directory.announce(record_of(key), expires_at=1100.0)
        newer = record_of(others[0], issued_at=1010.0)
        await directory.announce(newer, expires_at=1200.0)
        await directory.announce(record_of(others[0], issued_at=1005.0), expires_at=9999.0)
        assert await directory.peers() == (newer, record_of(others[1]), record_of(others[2]))
        now[0] = 1150.0
        assert await directory.peers() == (newer,)
        now[0] = 1200.0
        assert await directory.peers() == ()

    asyncio.run(main())


def test_a_directory_that_is_down_raises_an_error() -> None:
    async def main() -> None:
        directory = MemoryDirectory(lambda: 0.0)
        directory.is_down = True
        with pytest.raises(PeerError, match="does not answer"):
            await directory.announce(record_of(), expires_at=1.0)
        with pytest.raises(PeerError, match="does not answer"):
            await directory.peers()

    asyncio.run(main())


def test_the_directory_accepts_only_signed_records() -> None:
    async def main() -> None:
        unsigned = dataclasses.replace(record_of(), signature=bytes(64))
        with pytest.raises(FrameError, match="is not signed by it"):
            await MemoryDirectory(lambda: 0.0).announce(unsigned, expires_at=1.0)

    asyncio.run(main())
