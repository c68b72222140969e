"""Scan msgpack bytes before they are parsed.

msgpack's parser recurses in C: a record of 1.9 kB with two hundred nested lists causes a segmentation fault, and
hivemind's DHT parses messages of unknown peers. This scan uses its own stack.
"""

from __future__ import annotations

from p2p_diloco.errors import FrameError

MAX_DEPTH = 16
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_ITEMS = 200_000

_PLAIN = {0xC0: 0, 0xC2: 0, 0xC3: 0} | {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_SIZED_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_NESTING_EXTENSIONS = frozenset({0x40, 0x50})
"""hivemind's tuple and dictionary: extensions whose content is parsed as msgpack again."""


def check_msgpack(encoded: bytes) -> None:
    """Scan `encoded` without building objects.

    Raises:
        FrameError: it is longer, deeper or has more items than any honest message, or ends early.
    """
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise FrameError(f"a msgpack message of {len(encoded)} bytes where at most {MAX_MESSAGE_BYTES} are allowed")
    _Scan(encoded).run()


class _Scan:
    """One scan. Each open container is (remaining items, end of its bytes, whether to continue at that end)."""

    __slots__ = ("encoded", "offset", "open")

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded
        self.offset = 0
        self.open: list[tuple[int, int, bool]] = [(1, len(encoded), False)]

    def run(self) -> None:
        for _ in range(MAX_ITEMS):
            self._leave_finished()
            if not self.open:
                return
            if len(self.open) > MAX_DEPTH:
                raise FrameError(f"a msgpack message nests more than {MAX_DEPTH} levels deep")
            left, end, skips = self.open.pop()
            self.open.append((left - 1, end, skips))
            self._pass_item(end)
            if self.offset > end:
                raise FrameError(f"a msgpack message ends early, at byte {end}")
        raise FrameError(f"a msgpack message holds more than {MAX_ITEMS} items")

    def _leave_finished(self) -> None:
        while self.open and self.open[-1][0] == 0:
            _, end, skips = self.open.pop()
            if skips:
                self.offset = end

    def _pass_item(self, end: int) -> None:
        first = self._number(1, end)
        if first <= 0x7F or first >= 0xE0:
            return
        if first <= 0x9F:
            self._open_container((first & 0x0F) * (2 if first <= 0x8F else 1), end)
        elif first <= 0xBF:
            self.offset += first & 0x1F
        elif first in _PLAIN:
            self.offset += _PLAIN[first]
        elif first in _SIZED:
            length = self._number(_SIZED[first], end)
            self.offset += length
        elif first in _CONTAINERS:
            width, items_each = _CONTAINERS[first]
            self._open_container(self._number(width, end) * items_each, end)
        elif first in _FIXED_EXTENSIONS:
            self._pass_extension(_FIXED_EXTENSIONS[first], end)
        elif first in _SIZED_EXTENSIONS:
            self._pass_extension(self._number(_SIZED_EXTENSIONS[first], end), end)
        else:
            raise FrameError(f"a msgpack message holds the unknown type 0x{first:02x}")

    def _open_container(self, items: int, end: int) -> None:
        if items > end - self.offset:
            raise FrameError(f"a msgpack message ends early, at byte {end}")
        self.open.append((items, end, False))

    def _pass_extension(self, length: int, end: int) -> None:
        code = self._number(1, end)
        stop = self.offset + length
        if stop > end:
            raise FrameError(f"a msgpack message ends early, at byte {end}")
        if code in _NESTING_EXTENSIONS:
            self.open.append((1, stop, True))
        else:
            self.offset = stop

    def _number(self, width: int, end: int) -> int:
        stop = self.offset + width
        if stop > end:
            raise FrameError(f"a msgpack message ends early, at byte {end}")
        number = int.from_bytes(self.encoded[self.offset : stop], "big")
        self.offset = stop
        return number
