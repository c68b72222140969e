"""Each place reaches all others, and sends no faster than its uplink allows."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks import private_network
from benchmarks.star_network import StarNetwork
from p2p_diloco.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as door:
    print("open", flush=True)
    for _ in range(2):
        with door.accept()[0] as line:
            while line.recv(1 << 20): pass
            line.send(b"x")
"""
SENDER = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as line:
    began = time.monotonic()
    line.sendall(bytes(5_000_000))
    line.shutdown(socket.SHUT_WR)
    line.recv(1)
    print(4e7 / (time.monotonic() - began))
"""


def bits_per_second(network: StarNetwork) -> float:
    sent = [*network.entrance_of(1), sys.executable, "-c", SENDER, network.address_of(0)]
    return float(subprocess.run(sent, check=True, capture_output=True, text=True).stdout)


def star(places: int, ends: contextlib.ExitStack) -> StarNetwork:
    try:
        return ends.enter_context(StarNetwork(places))
    except ConfigError as error:
        pytest.skip(f"this machine lets nobody make networks of its own: {error}")


def test_an_uplink_is_as_thin_as_configured() -> None:
    with contextlib.ExitStack() as ends:
        network = star(2, ends)
        sink = subprocess.Popen(
            [*network.entrance_of(0), sys.executable, "-c", SINK, network.address_of(0)], stdout=subprocess.PIPE
        )
        with sink:
            assert sink.stdout is not None
            assert sink.stdout.readline() == b"open\n"
            network.set_uplinks(20e6)
            thin = bits_per_second(network)
            network.set_uplinks(None)
            thick = bits_per_second(network)
    assert thin < 21e6  # the bucket is full at first: 80 kB of 5 MB
    assert thick > 1.5 * thin


LISTENER = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as door:
    print("open", flush=True)
    while True: door.accept()[0].close()
"""
CALLER = """
import socket, sys
try: socket.create_connection((sys.argv[1], 5001), 0.5).close()
except OSError: print("no")
else: print("yes")
"""


def can_connect(network: StarNetwork, caller: int, callee: int) -> bool:
    called = [*network.entrance_of(caller), sys.executable, "-c", CALLER, network.address_of(callee)]
    return subprocess.run(called, check=True, capture_output=True, text=True).stdout == "yes\n"


@contextlib.contextmanager
def listening(network: StarNetwork, places: int) -> Iterator[None]:
    listeners = [
        subprocess.Popen(
            [*network.entrance_of(place), sys.executable, "-c", LISTENER, network.address_of(place)],
            stdout=subprocess.PIPE,
        )
        for place in range(places)
    ]
    try:
        for listener in listeners:
            assert listener.stdout is not None
            assert listener.stdout.readline() == b"open\n"
        yield
    finally:
        for listener in listeners:
            listener.kill()
            listener.communicate()


def test_a_place_loses_packets_of_one_other_or_of_all_until_the_end_of_the_loss() -> None:
    with contextlib.ExitStack() as ends:
        network = star(3, ends)
        ends.enter_context(listening(network, 3))
        assert can_connect(network, 1, 0)
        stop = network.drop(1, "egress", 0)
        assert not can_connect(network, 1, 0)
        assert can_connect(network, 1, 2), "only what goes to place 0 is lost"
        stop()
        assert can_connect(network, 1, 0)
        stop = network.drop(1, "ingress", 2)
        assert not can_connect(network, 1, 2)
        assert can_connect(network, 1, 0)
        everything = network.drop(1, "ingress")
        assert not can_connect(network, 1, 0)
        everything()
        stop()
        assert can_connect(network, 1, 2)


def test_a_place_behind_a_router_can_call_but_not_be_called() -> None:
    with contextlib.ExitStack() as ends:
        network = star(2, ends)
        ends.enter_context(listening(network, 2))
        stop = network.close_to_callers(1)
        assert can_connect(network, 1, 0)
        assert not can_connect(network, 0, 1)
        stop()
        assert can_connect(network, 0, 1)


def test_a_network_that_cannot_be_created_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_network.shutil, "which", lambda tool: None)
    with pytest.raises(ConfigError, match="cannot create network namespaces"), StarNetwork(2):
        pass
