"""The parts of protobuf's encoding that are read and written here without its library. This module is pure."""

from __future__ import annotations

_WITH_LENGTH = 2


def encode_varint(number: int) -> bytes:
    """Return an unsigned number in protobuf's form, which multiaddrs use too: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def encode_field(number: int, value: bytes) -> bytes:
    """Return a field that has a length; it may be appended to an encoded message."""
    return encode_varint(number << 3 | _WITH_LENGTH) + encode_varint(len(value)) + value


def fields_of(message: bytes) -> dict[int, bytes]:
    """Return the fields of a message by number, the last of each, if all of them have a length.

    Raises:
        ValueError: a field is of another type, or the message is malformed.
    """
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(message):
        tag, at = _take_varint(message, at)
        if tag & 7 != _WITH_LENGTH:
            raise ValueError(f"a field of wire type {tag & 7}")
        length, at = _take_varint(message, at)
        if at + length > len(message):
            raise ValueError("a field that ends early")
        fields[tag >> 3] = message[at : at + length]
        at += length
    return fields


def _take_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(message) and shift < 28:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return number, at
    raise ValueError("a number that does not end")
