"""Msgpack from strangers is scanned before it is parsed."""

from __future__ import annotations

import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import FrameError
from p2p_diloco.transport.hivemind_border import MAX_DEPTH, MAX_ITEMS, MAX_MESSAGE_BYTES, check_msgpack

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=300),
    st.binary(max_size=300),
    st.builds(msgpack.ExtType, st.integers(0, 0x3F), st.binary(max_size=40)),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(st.text(max_size=5), inner)),
    max_leaves=20,
)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def nested_in_extensions(depth: int) -> bytes:
    packed = b"\xc0"
    for _ in range(depth):
        packed = msgpack.packb(msgpack.ExtType(0x40, packed))
    return packed


@given(values)
def test_everything_packed_by_msgpack_passes(value: object) -> None:
    check_msgpack(msgpack.packb(value))


@given(values, st.data())
def test_nothing_truncated_passes(value: object, draw: st.DataObject) -> None:
    packed = msgpack.packb(value)
    end = draw.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(FrameError):
        check_msgpack(packed[:end])


@given(st.binary(max_size=200))
def test_any_bytes_pass_or_are_refused(encoded: bytes) -> None:
    try:
        check_msgpack(encoded)
    except FrameError:
        pass
    else:
        assert encoded


def test_depth_is_bounded() -> None:
    check_msgpack(nested(MAX_DEPTH - 1))
    for depth in (MAX_DEPTH, 200, 100_000):
        with pytest.raises(FrameError, match="nests more than 16 levels deep"):
            check_msgpack(nested(depth))


def test_depth_within_extensions_is_bounded() -> None:
    check_msgpack(nested_in_extensions(MAX_DEPTH - 1))
    with pytest.raises(FrameError, match="nests more than 16 levels deep"):
        check_msgpack(nested_in_extensions(200))


def test_maps_are_nesting_too() -> None:
    with pytest.raises(FrameError, match="nests more than 16 levels deep"):
        check_msgpack(b"\x81\xc0" * 200 + b"\xc0")


def test_bytes_after_the_first_item_of_an_extension_are_skipped_with_it() -> None:
    check_msgpack(b"\x92" + bytes((0xD5, 0x50)) + b"\xc0\xc1" + b"\xc0")


def test_an_item_must_not_exceed_its_extension() -> None:
    with pytest.raises(FrameError, match="ends early"):
        check_msgpack(b"\x92" + bytes((0xD5, 0x50)) + b"\xa5x" + b"yyyyyyy")


def test_a_container_that_claims_more_items_than_bytes_is_refused_at_once() -> None:
    with pytest.raises(FrameError, match="ends early"):
        check_msgpack(b"\xdd\xff\xff\xff\xff\xc0")


def test_size_and_items_are_bounded() -> None:
    with pytest.raises(FrameError, match="a msgpack message of 2097153 bytes where at most 2097152 are allowed"):
        check_msgpack(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(FrameError, match="holds more than 8192 items"):
        check_msgpack(msgpack.packb([None] * MAX_ITEMS))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(FrameError, match="unknown type 0xc1"):
        check_msgpack(b"\xc1")


def test_long_byte_strings_are_cheap() -> None:
    check_msgpack(msgpack.packb([bytes(1024 * 1024), math.pi, {"a" * 70_000: [1, -1, -(2**40)]}]))
