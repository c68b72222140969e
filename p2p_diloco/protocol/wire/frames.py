"""A bounded binary encoding of frozen values: little-endian, fixed order, no tags, nothing that a stranger can inflate.

A class declares the encoding of each field beside its type, as in `nonce: Annotated[int, U64]`. Digests, peers, spans,
flags and values of such classes need none. Fields are encoded in the order of the class. A list cannot have more
elements than its frame has bytes, because each element takes at least one byte of the frame, whose length the transport
has capped. Numbers that are not finite are refused, so no later module has to check for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import DIGEST_BYTES, PEER_ID_BYTES, Digest, PeerId, SpanId

Value = TypeVar("Value")


class FrameReader:
    """Reads values from the front of one frame; its errors name positions."""

    __slots__ = ("_at", "_frame")

    def __init__(self, frame: bytes | bytearray | memoryview) -> None:
        self._frame = memoryview(frame)
        self._at = 0

    @property
    def remaining(self) -> int:
        """Number of bytes not read yet."""
        return len(self._frame) - self._at

    def take(self, num_bytes: int) -> memoryview:
        """Return the next `num_bytes` without copying them."""
        if num_bytes > self.remaining:
            raise FrameError(
                f"frame ends early: {num_bytes} bytes expected at offset {self._at}, {self.remaining} left"
            )
        self._at += num_bytes
        return self._frame[self._at - num_bytes : self._at]

    def expect_end(self) -> None:
        """Refuse a frame that continues after its last field."""
        if self.remaining:
            raise FrameError(f"frame is too long: {self.remaining} bytes after its last field at offset {self._at}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The encoding of one value; `smallest` and `largest` are the numbers of bytes that it can take."""

    put: Callable[[bytearray, Any], None]
    take: Callable[[FrameReader], Any]
    smallest: int
    largest: int


Layout = tuple[tuple[str, Field], ...]
"""Names and encodings of the fields of a value, in their order."""


def number(code: str, most: int | None = None, *, saturates: bool = False) -> Field:
    """Return the field of a number with a `struct` code; decoding refuses values above `most`.

    A field that saturates also encodes at most `most`. So when other peers drive a count to its limit, the frames of
    honest peers are still accepted.
    """
    packer = struct.Struct("<" + code)

    def put(out: bytearray, value: Any) -> None:
        out += packer.pack(min(value, most) if saturates and most is not None else value)

    def take(reader: FrameReader) -> Any:
        value = packer.unpack(reader.take(packer.size))[0]
        if isinstance(value, float) and not math.isfinite(value):
            raise FrameError(f"frame holds the number {value}, which is not finite")
        if most is not None and value > most:
            raise FrameError(f"frame holds the number {value}; at most {most} is allowed")
        return value

    return Field(put=put, take=take, smallest=packer.size, largest=packer.size)


MOST_COUNTED = (1 << 62) - 1
"""Largest count that a frame may hold; counts saturate there, so adding to a stranger's count cannot exceed 64 bits."""

U8, U16, U32, U64 = number("B"), number("H"), number("I"), number("Q", MOST_COUNTED, saturates=True)
I64, F32, F64 = number("q", MOST_COUNTED, saturates=True), number("f"), number("d")


def _take_flag(reader: FrameReader) -> bool:
    value = reader.take(1)[0]
    if value > 1:
        raise FrameError(f"frame holds {value} where 0 or 1 was expected")
    return bool(value)


FLAG = Field(put=lambda out, value: out.append(1 if value else 0), take=_take_flag, smallest=1, largest=1)


def fixed(num_bytes: int) -> Field:
    """Return the field of exactly `num_bytes` bytes."""

    def put(out: bytearray, value: bytes) -> None:
        if len(value) != num_bytes:
            raise FrameError(f"{len(value)} bytes where {num_bytes} were expected")
        out += value

    return Field(put=put, take=lambda reader: bytes(reader.take(num_bytes)), smallest=num_bytes, largest=num_bytes)


def blob(most_bytes: int) -> Field:
    """Return the field of up to `most_bytes` bytes, preceded by their length."""
    view = blob_view(most_bytes)
    return Field(put=view.put, take=lambda reader: bytes(view.take(reader)), smallest=4, largest=view.largest)


def blob_view(most_bytes: int) -> Field:
    """Return a field like `blob` that decodes to a view of the frame. The view keeps the whole frame in memory."""

    def put(out: bytearray, value: bytes | memoryview) -> None:
        put_length(out, len(value), most_bytes)
        out += value

    def take(reader: FrameReader) -> memoryview:
        length = U32.take(reader)
        if length > most_bytes:
            raise FrameError(f"frame announces {length} bytes where at most {most_bytes} fit")
        return reader.take(length)

    return Field(put=put, take=take, smallest=4, largest=4 + most_bytes)


def put_length(out: bytearray, num_bytes: int, most_bytes: int) -> None:
    """Append the length that precedes a blob of `num_bytes`; the caller appends the blob."""
    if num_bytes > most_bytes:
        raise FrameError(f"{num_bytes} bytes where at most {most_bytes} fit")
    U32.put(out, num_bytes)


def many(item: Field, most: int) -> Field:
    """Return the field of a tuple of up to `most` items, preceded by their count."""

    def put(out: bytearray, values: tuple[Any, ...]) -> None:
        if len(values) > most:
            raise FrameError(f"{len(values)} items where at most {most} fit")
        U32.put(out, len(values))
        for value in values:
            item.put(out, value)

    def take(reader: FrameReader) -> tuple[Any, ...]:
        count = U32.take(reader)
        if count > most or count * item.smallest > reader.remaining:
            raise FrameError(f"frame announces {count} items; at most {most} fit and {reader.remaining} bytes are left")
        return tuple(item.take(reader) for _ in range(count))

    return Field(put=put, take=take, smallest=4, largest=4 + most * item.largest)


def optional(item: Field) -> Field:
    """Return the field of a value or None."""

    def put(out: bytearray, value: Any) -> None:
        FLAG.put(out, value is not None)
        if value is not None:
            item.put(out, value)

    return Field(
        put=put,
        take=lambda reader: item.take(reader) if _take_flag(reader) else None,
        smallest=1,
        largest=1 + item.largest,
    )


def pair(first: Field, second: Field) -> Field:
    """Return the field of a tuple of two values."""

    def put(out: bytearray, value: tuple[Any, Any]) -> None:
        first.put(out, value[0])
        second.put(out, value[1])

    return Field(
        put=put,
        take=lambda reader: (first.take(reader), second.take(reader)),
        smallest=first.smallest + second.smallest,
        largest=first.largest + second.largest,
    )


def record(kind: type[Any], layout: Layout | None = None) -> Field:
    """Return the field of a value of class `kind`, by the layout of its class or by another one."""
    layout = layout if layout is not None else layout_of(kind)
    return Field(
        put=lambda out, value: put_fields(out, value, layout),
        take=lambda reader: kind(**take_fields(reader, layout)),
        smallest=sum(field.smallest for _, field in layout),
        largest=sum(field.largest for _, field in layout),
    )


def put_fields(out: bytearray, value: object, layout: Layout) -> None:
    """Append the fields of `value` to `out`."""
    for name, field in layout:
        field.put(out, getattr(value, name))


def take_fields(reader: FrameReader, layout: Layout) -> dict[str, Any]:
    """Read the fields of a value from `reader`, as arguments for its constructor."""
    return {name: field.take(reader) for name, field in layout}


def take_value(reader: FrameReader, kind: type[Value]) -> Value:
    """Read a value of a class that declares its layout."""
    return kind(**take_fields(reader, layout_of(kind)))


def to_bytes(value: object, layout: Layout | None = None) -> bytes:
    """Return the canonical bytes of `value`, which are hashed and signed, by the layout of its class or another one."""
    out = bytearray()
    put_fields(out, value, layout if layout is not None else layout_of(type(value)))
    return bytes(out)


def signed_bytes(value: object) -> bytes:
    """Return the canonical bytes of all fields of `value` but the last, which is a signature of them."""
    return to_bytes(value, layout_of(type(value))[:-1])


def layout_of(kind: type[Any]) -> Layout:
    """Return the layout that a class declares."""
    layout = _LAYOUTS.get(kind)
    if layout is None:
        hints = get_type_hints(kind, include_extras=True)
        layout = _LAYOUTS[kind] = tuple((each.name, _declared(hints[each.name])) for each in fields(kind))
    return layout


def _declared(hint: Any) -> Field:
    if get_origin(hint) is Annotated:
        return cast(Field, get_args(hint)[1])
    return _FIELD_OF_TYPE[hint] if hint in _FIELD_OF_TYPE else record(hint)


def _put_span(out: bytearray, span: SpanId) -> None:
    U16.put(out, span.fragment)
    U32.put(out, span.index)


DIGEST = fixed(DIGEST_BYTES)
PEER = fixed(PEER_ID_BYTES)
SIGNATURE = fixed(64)
SPAN = Field(
    put=_put_span,
    take=lambda reader: SpanId(cast(int, U16.take(reader)), cast(int, U32.take(reader))),
    smallest=6,
    largest=6,
)
_FIELD_OF_TYPE: dict[Any, Field] = {Digest: DIGEST, PeerId: PEER, SpanId: SPAN, bool: FLAG}
_LAYOUTS: dict[type[Any], Layout] = {}
