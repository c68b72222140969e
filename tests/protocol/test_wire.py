"""The bounded binary form."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.wire.frames import (
    F32,
    F64,
    FLAG,
    I64,
    MOST_COUNTED,
    SPAN,
    U8,
    U16,
    U32,
    U64,
    Field,
    FrameReader,
    Layout,
    blob,
    blob_view,
    fixed,
    many,
    optional,
    pair,
    put_length,
    record,
    take_fields,
    to_bytes,
)


@dataclass(frozen=True)
class Box:
    number: int
    words: tuple[bytes, ...]
    place: SpanId | None
    two: tuple[int, bool]


BOX: Layout = (
    ("number", U64),
    ("words", many(blob(8), 4)),
    ("place", optional(SPAN)),
    ("two", pair(U16, FLAG)),
)
boxes = st.builds(
    Box,
    number=st.integers(0, MOST_COUNTED),
    words=st.lists(st.binary(max_size=8), max_size=4).map(tuple),
    place=st.none() | st.builds(SpanId, st.integers(0, 65535), st.integers(0, 2**32 - 1)),
    two=st.tuples(st.integers(0, 65535), st.booleans()),
)


def put(field: Field, value: object) -> bytes:
    out = bytearray()
    field.put(out, value)
    return bytes(out)


def take(field: Field, frame: bytes) -> object:
    return field.take(FrameReader(frame))


@given(boxes)
def test_every_value_survives_encoding_and_decoding(box: Box) -> None:
    reader = FrameReader(to_bytes(box, BOX))
    assert Box(**take_fields(reader, BOX)) == box
    reader.expect_end()


@given(st.binary(max_size=200))
def test_random_bytes_only_raise_frame_errors(frame: bytes) -> None:
    reader = FrameReader(frame)
    try:
        box = Box(**take_fields(reader, BOX))
    except FrameError:
        return
    assert to_bytes(box, BOX) == frame[: len(frame) - reader.remaining]


@given(boxes, st.integers(0, 100))
def test_a_truncated_frame_is_refused(box: Box, cut: int) -> None:
    frame = to_bytes(box, BOX)
    with pytest.raises(FrameError, match="frame"):
        take_fields(FrameReader(frame[: min(cut, len(frame) - 1)]), BOX)


def test_a_blob_can_be_read_as_a_view_and_written_separately() -> None:
    field = blob_view(4)
    front = bytearray()
    put_length(front, 4, 4)
    frame = bytes(front) + b"blob"
    assert frame == put(field, b"blob") == put(blob(4), b"blob")
    taken = take(field, frame)
    assert isinstance(taken, memoryview)
    assert taken == b"blob"
    assert taken.obj is frame, "nothing was copied"


def test_a_blob_that_is_too_long_is_refused_in_either_form() -> None:
    for field in (blob(3), blob_view(3)):
        with pytest.raises(FrameError, match="4 bytes where at most 3 fit"):
            put(field, b"blob")
        with pytest.raises(FrameError, match="announces 4 bytes where at most 3 fit"):
            take(field, put(blob(4), b"blob"))
    with pytest.raises(FrameError, match="4 bytes where at most 3 fit"):
        put_length(bytearray(), 4, 3)


def test_a_frame_with_trailing_bytes_is_refused() -> None:
    reader = FrameReader(b"\1\2")
    U8.take(reader)
    with pytest.raises(FrameError, match="1 bytes after its last field at offset 1"):
        reader.expect_end()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("field", "code"), [(F32, "<f"), (F64, "<d")])
def test_non_finite_numbers_are_refused(field: Field, code: str, value: float) -> None:
    with pytest.raises(FrameError, match="not finite"):
        take(field, struct.pack(code, value))


@pytest.mark.parametrize(("field", "code"), [(U64, "<Q"), (I64, "<q")])
def test_counts_leave_room_for_growth(field: Field, code: str) -> None:
    assert take(field, struct.pack(code, MOST_COUNTED)) == MOST_COUNTED
    with pytest.raises(FrameError, match="at most"):
        take(field, struct.pack(code, MOST_COUNTED + 1))


def test_a_flag_is_zero_or_one() -> None:
    with pytest.raises(FrameError, match="holds 2 where 0 or 1"):
        take(FLAG, b"\2")


def test_a_list_cannot_announce_more_than_its_frame_holds() -> None:
    field = many(U64, 1 << 30)
    with pytest.raises(FrameError, match="announces 1000000 items"):
        take(field, put(U32, 1_000_000) + bytes(16))
    with pytest.raises(FrameError, match="at most 2 fit"):
        take(many(U8, 2), put(U32, 3) + bytes(16))


def test_a_blob_cannot_announce_more_than_is_allowed() -> None:
    with pytest.raises(FrameError, match="announces 9 bytes where at most 8 fit"):
        take(blob(8), put(U32, 9) + bytes(9))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        (fixed(4), b"123", "3 bytes where 4"),
        (blob(2), b"123", "3 bytes where at most 2"),
        (many(U8, 1), (1, 2), "2 items where at most 1"),
    ],
)
def test_values_that_do_not_fit_are_not_written(field: Field, value: object, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        put(field, value)


def test_a_record_is_its_fields() -> None:
    box = Box(1, (b"x",), None, (2, True))
    assert put(record(Box, BOX), box) == to_bytes(box, BOX)


def test_counts_saturate_when_written() -> None:
    for field in (U64, I64):
        out = bytearray()
        field.put(out, 1 << 63)
        assert field.take(FrameReader(out)) == MOST_COUNTED
