"""Where hivemind comes in: imported when first needed, in parts, silenced, and untyped behind this line.

hivemind 1.1.12 ships no type hints that a checker can use, brings its own log handler, and renames a log level. What
crosses this border is `Any` on the far side and plain values on ours.
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
    """Passes hivemind's messages on as debugging notes: what matters to people is said by us."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.debug("%s: %s", record.name, clean_text(record.getMessage()))


@functools.cache
def load_hivemind() -> Any:
    """Import what is needed of hivemind, silence and guard it; return the package.

    Takes a while: call it outside the loop first. Its log output goes to our logger at debug level; every msgpack
    message is scanned before it is parsed.
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
    """Return the module of protobuf messages that p2pd speaks."""
    load_hivemind()
    return importlib.import_module("hivemind.proto.p2pd_pb2")


def _package_by_parts() -> Any:
    """Return hivemind so that importing a part of it imports that part only.

    The package itself imports all of its parts, and with its layers for experts all of SciPy: 42 MB of which a peer
    needs nothing. Who asks the package for something that is not there yet gets the whole.
    """
    if "hivemind" in sys.modules:
        return sys.modules["hivemind"]
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.loader is None:
        return importlib.import_module("hivemind")  # which says that it is missing
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def import_whole(name: str) -> Any:
        if f"hivemind.{name}" in sys.modules:  # being imported just now
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
    """Put right what a dictionary says of itself: a size that is no number ends a search for all keys, and for ever."""
    dictionary.maxsize = math.inf
    expiries = (entry.expiration_time for entry in dictionary.data.values())
    dictionary.latest_expiration_time = max(expiries, default=-math.inf)
