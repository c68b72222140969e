"""IPv4 packets as bytes: who sends them to whom, and the same packet with another sender or receiver."""

from __future__ import annotations

import socket
from collections.abc import Sequence

Endpoint = tuple[bytes, int]
"""An IPv4 address as four bytes, and a port."""

TCP, UDP = 6, 17
_CHECKSUM_AT = {TCP: 16, UDP: 6}
_IP_CHECKSUM_AT, _PROTOCOL_AT, _SENDER_AT, _RECEIVER_AT = 10, 9, 12, 16
_SHORTEST_HEADER = 20


def packed(address: str) -> bytes:
    """Return an IPv4 address as four bytes."""
    return socket.inet_aton(address)


def is_readable(packet: bytes) -> bool:
    """Return whether this is an IPv4 packet of TCP or UDP with its ports; others are not carried."""
    if len(packet) < _SHORTEST_HEADER or packet[0] >> 4 != 4 or packet[_PROTOCOL_AT] not in _CHECKSUM_AT:
        return False
    return len(packet) >= _header_bytes(packet) + 8


def protocol_of(packet: bytes) -> int:
    """Return the number of the protocol: `TCP` or `UDP`."""
    return packet[_PROTOCOL_AT]


def receiver_address(packet: bytes) -> bytes:
    """Return the address that a packet goes to."""
    return packet[_RECEIVER_AT : _RECEIVER_AT + 4]


def sender_of(packet: bytes) -> Endpoint:
    """Return the address and port that a packet comes from."""
    at = _header_bytes(packet)
    return packet[_SENDER_AT : _SENDER_AT + 4], int.from_bytes(packet[at : at + 2], "big")


def receiver_of(packet: bytes) -> Endpoint:
    """Return the address and port that a packet goes to."""
    at = _header_bytes(packet)
    return receiver_address(packet), int.from_bytes(packet[at + 2 : at + 4], "big")


def readdressed(packet: bytes, *, sender: Endpoint | None = None, receiver: Endpoint | None = None) -> bytes:
    """Return a packet with another sender or receiver, and with the checksums that belong to it (RFC 1624)."""
    changed, at = bytearray(packet), _header_bytes(packet)
    words: list[tuple[int, bytes, bool]] = []
    if sender is not None:
        words += [(_SENDER_AT, sender[0], True), (at, sender[1].to_bytes(2, "big"), False)]
    if receiver is not None:
        words += [(_RECEIVER_AT, receiver[0], True), (at + 2, receiver[1].to_bytes(2, "big"), False)]
    checksum_at = at + _CHECKSUM_AT[protocol_of(packet)]
    has_checksum = protocol_of(packet) == TCP or changed[checksum_at : checksum_at + 2] != b"\0\0"
    in_header = [(packet[place : place + len(new)], new) for place, new, is_address in words if is_address]
    in_both = [(packet[place : place + len(new)], new) for place, new, _ in words]
    _mend(changed, _IP_CHECKSUM_AT, in_header)
    if has_checksum:
        _mend(changed, checksum_at, in_both)
    for place, new, _ in words:
        changed[place : place + len(new)] = new
    return bytes(changed)


def _header_bytes(packet: bytes) -> int:
    return 4 * (packet[0] & 0x0F)


def _mend(packet: bytearray, at: int, changes: Sequence[tuple[bytes, bytes]]) -> None:
    total = ~int.from_bytes(packet[at : at + 2], "big") & 0xFFFF
    for old, new in changes:
        total += sum(~word & 0xFFFF for word in _words(old)) + sum(_words(new))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    packet[at : at + 2] = (~total & 0xFFFF).to_bytes(2, "big")


def _words(some: bytes) -> list[int]:
    return [int.from_bytes(some[place : place + 2], "big") for place in range(0, len(some), 2)]
