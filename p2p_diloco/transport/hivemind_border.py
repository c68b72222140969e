"""The interface to hivemind: imported on first use, in parts, with its logging redirected.

hivemind 1.1.12 has no usable type hints, installs its own log handler, and renames a log level. Its objects are `Any`;
our side uses plain values.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import sys
from typing import Any

from p2p_diloco.errors import FrameError, clean_text

logger = logging.getLogger(__name__)
MAX_DEPTH = 16
MAX_MESSAGE_BYTES = 2 * 1024 * 1024
MAX_ITEMS = 8192
"""Four times the items of a shard of 512 records: parsing takes a microsecond or more for each."""

_PLAIN = {0xC0: 0, 0xC2: 0, 0xC3: 0} | {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_SIZED_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_NESTING_EXTENSIONS = frozenset({0x40, 0x50})
"""hivemind's tuple and dictionary: extensions whose content is parsed as msgpack again."""


class _ToOurLogger(logging.Handler):
    """Forwards hivemind's log messages at debug level; we report what matters to users ourselves."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.debug("%s: %s", record.name, clean_text(record.getMessage()))


@functools.cache
def load_hivemind() -> Any:
    """Import the needed parts of hivemind, redirect its logging and guard its parser; return the package.

    The first call is slow: make it outside the event loop. Log output goes to our logger at debug level, and every
    msgpack message is scanned before it is parsed.
    """
    package = _package_by_parts()
    log_module = importlib.import_module("hivemind.utils.logging")
    log_module.use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    theirs = logging.getLogger("hivemind")
    theirs.propagate = False
    theirs.setLevel(logging.WARNING)
    theirs.addHandler(_ToOurLogger())
    _guard_parser(
        importlib.import_module("hivemind.utils.serializer").MSGPackSerializer,
        importlib.import_module("hivemind.dht.storage").DictionaryDHTValue,
    )
    return package


@functools.cache
def p2pd_messages() -> Any:
    """Return the module with p2pd's protobuf messages."""
    load_hivemind()
    return importlib.import_module("hivemind.proto.p2pd_pb2")


def _package_by_parts() -> Any:
    """Return the hivemind package such that importing a part of it imports only that part.

    The package imports all of its parts, and with its expert layers all of SciPy: 42 MB that a peer does not need.
    Accessing a missing attribute of the package imports the whole.
    """
    if "hivemind" in sys.modules:
        return sys.modules["hivemind"]
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.loader is None:
        return importlib.import_module("hivemind")  # raises the import error
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def import_whole(name: str) -> Any:
        if f"hivemind.{name}" in sys.modules:  # currently being imported
            return sys.modules[f"hivemind.{name}"]
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module 'hivemind' has no attribute {name!r}")
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = import_whole
    sys.modules["hivemind"] = package
    return package


def _guard_parser(serializer: Any, dictionary_class: Any) -> None:
    parse = serializer.loads

    def loads(encoded: bytes) -> Any:
        check_msgpack(bytes(encoded))
        parsed = parse(encoded)
        if isinstance(parsed, dictionary_class):
            _restore_bounds(parsed)
        return parsed

    serializer.loads = staticmethod(loads)


def _restore_bounds(dictionary: Any) -> None:
    """Recompute a dictionary's metadata: a size that is not a number would permanently break searches for all keys."""
    dictionary.maxsize = math.inf
    expiries = (entry.expiration_time for entry in dictionary.data.values())
    dictionary.latest_expiration_time = max(expiries, default=-math.inf)


def check_msgpack(encoded: bytes) -> None:
    """Scan msgpack bytes before they are parsed, without building objects.

    msgpack's parser recurses in C: a record of 1.9 kB with two hundred nested lists causes a segmentation fault, and
    hivemind's DHT parses messages of unknown peers. This scan uses its own stack.

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
