"""Packets with another sender or receiver are whole: their checksums are those of a packet that was made so."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from internet.packets import TCP, UDP, is_readable, readdressed, receiver_of, sender_of

addresses = st.binary(min_size=4, max_size=4)
endpoints = st.tuples(addresses, st.integers(0, 65_535))


def ones_sum(some: bytes) -> int:
    padded = some + b"\0" * (len(some) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def made(protocol: int, sender: tuple[bytes, int], receiver: tuple[bytes, int], content: bytes) -> bytes:
    ports = struct.pack("!HH", sender[1], receiver[1])
    body = ports + (bytes(8) + b"\x50\x10\xff\xff" if protocol == TCP else struct.pack("!H", 8 + len(content)))
    rest = (bytes(2) if protocol == TCP else b"") + content
    pseudo = sender[0] + receiver[0] + struct.pack("!BBH", 0, protocol, len(body) + 2 + len(rest))
    checksum = ~ones_sum(pseudo + body + bytes(2) + rest) & 0xFFFF
    whole = body + struct.pack("!H", checksum) + rest
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(whole), 7, 0, 64, protocol, 0) + sender[0] + receiver[0]
    return header[:10] + struct.pack("!H", ~ones_sum(header) & 0xFFFF) + header[12:] + whole


def is_whole(packet: bytes) -> bool:
    pseudo = packet[12:20] + struct.pack("!BBH", 0, packet[9], len(packet) - 20)
    return ones_sum(packet[:20]) == 0xFFFF and ones_sum(pseudo + packet[20:]) == 0xFFFF


@given(st.sampled_from((TCP, UDP)), endpoints, endpoints, endpoints, endpoints, st.binary(max_size=64))
def test_a_readdressed_packet_is_whole_and_says_what_it_was_told(
    protocol: int,
    sender: tuple[bytes, int],
    receiver: tuple[bytes, int],
    other_sender: tuple[bytes, int],
    other_receiver: tuple[bytes, int],
    content: bytes,
) -> None:
    packet = made(protocol, sender, receiver, content)
    assert is_readable(packet)
    assert is_whole(packet)
    changed = readdressed(packet, sender=other_sender, receiver=other_receiver)
    assert is_whole(changed)
    assert (sender_of(changed), receiver_of(changed)) == (other_sender, other_receiver)
    assert changed[20 + 4 :][:2] == packet[20 + 4 :][:2]
    assert changed[-len(content) or len(changed) :] == packet[-len(content) or len(packet) :]


@pytest.mark.parametrize(
    "packet", [b"", b"\x45" + bytes(18), b"\x60" + bytes(60), b"\x45" + bytes(8) + b"\x01" + bytes(30)]
)
def test_what_is_no_packet_of_tcp_or_udp_is_not_readable(packet: bytes) -> None:
    assert not is_readable(packet)
