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

from p2p_diloco.errors import clean_text
from p2p_diloco.transport.msgpack_guard import check_msgpack

logger = logging.getLogger(__name__)


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
