"""hivemind behind its wrapper: silent, and guarded against messages from strangers."""

from __future__ import annotations

import importlib
import logging
import math
import subprocess
import sys

import msgpack
import pytest

from p2p_diloco.errors import FrameError
from p2p_diloco.transport import hivemind_border
from p2p_diloco.transport.hivemind_border import load_hivemind, p2pd_messages


def test_hivemind_logs_only_through_our_logger(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    load_hivemind()
    with caplog.at_level(logging.DEBUG, logger="p2p_diloco.transport.hivemind_border"):
        logging.getLogger("hivemind.dht.node").warning("noise about %s", "nothing")
        logging.getLogger("hivemind.dht.node").info("more noise")
    ours = [record for record in caplog.records if record.name == hivemind_border.__name__]
    assert [(record.levelname, record.getMessage()) for record in ours] == [
        ("DEBUG", "hivemind.dht.node: noise about nothing")
    ]
    assert not logging.getLogger("hivemind").propagate
    assert capsys.readouterr().err == ""
    assert logging.getLevelName(logging.WARNING) == "WARNING"


def test_nested_messages_are_refused_before_they_are_parsed() -> None:
    load_hivemind()
    serializer = importlib.import_module("hivemind.utils.serializer").MSGPackSerializer
    assert serializer.loads(serializer.dumps((1, [b"two", {"three": 3.0}]))) == (1, [b"two", {"three": 3.0}])
    protocol = importlib.import_module("hivemind.dht.protocol").DHTProtocol
    for parse in (serializer.loads, protocol.serializer.loads):
        with pytest.raises(FrameError, match="nests more than 16 levels deep"):
            parse(b"\x91" * 1900 + b"\xc0")


def test_the_dictionary_of_the_dht_passes_the_guard() -> None:
    load_hivemind()
    storage = importlib.import_module("hivemind.dht.storage")
    serializer = importlib.import_module("hivemind.utils.serializer").MSGPackSerializer
    dictionary = storage.DictionaryDHTValue()
    for index in range(100):
        assert dictionary.store(bytes([index]) * 32, bytes(500), 4e9)
    assert len(serializer.loads(serializer.dumps(dictionary))) == 100


@pytest.mark.parametrize(("size", "latest"), [("many", 4e9), (-1, 4e9), ([], 4e9), (None, "never"), (None, None)])
def test_an_invalid_header_of_a_strangers_dictionary_is_corrected(size: object, latest: object) -> None:
    load_hivemind()
    storage = importlib.import_module("hivemind.dht.storage")
    serializer = importlib.import_module("hivemind.utils.serializer").MSGPackSerializer
    body = serializer.dumps([size, latest, [[b"one", b"value", 4e9], [b"two", b"value", 3e9]]])
    dictionary = serializer.loads(msgpack.packb(msgpack.ExtType(0x50, body)))
    assert isinstance(dictionary, storage.DictionaryDHTValue)
    assert (dictionary.maxsize, dictionary.latest_expiration_time) == (math.inf, 4e9)
    assert dictionary.store(b"three", b"value", 5e9)
    assert sorted(key for key, _ in dictionary.items()) == [b"one", b"three", b"two"]


def test_the_messages_of_the_daemon_are_available() -> None:
    messages = p2pd_messages()
    assert messages.Request(type=messages.Request.IDENTIFY).SerializeToString() == b"\x08\x00"


PARTS = """
import sys
from p2p_diloco.transport.hivemind_border import load_hivemind, p2pd_messages
package = load_hivemind()
p2pd_messages()
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
found = {name.split(".")[0] for name in sys.modules} | {".".join(name.split(".")[:2]) for name in sys.modules}
assert not found & {"scipy", "hivemind.moe", "hivemind.optim", "hivemind.averaging"}, found
assert not hasattr(package, "__wrapped__")
assert "hivemind.optim" not in sys.modules
import hivemind
assert hivemind is package
assert hivemind.Optimizer.__module__ == "hivemind.optim.optimizer"
assert hivemind.p2p.P2P is P2P
assert hivemind.__version__
"""


def test_only_parts_are_imported_and_the_whole_package_on_request() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PARTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
