"""True packets of real sockets cross the internet of namespaces."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from internet.line import LineKind
from internet.middle import SitePlan
from internet.places import Internet, NoInternetError

DELAY = 0.04
LINE = LineKind(delay=DELAY, up_bits=50e6, down_bits=50e6)
SERVE = """
import socket
with socket.create_server(("0.0.0.0", 31337)) as server:
    print("listening", flush=True)
    while True:
        caller, (host, port) = server.accept()
        total = 0
        while some := caller.recv(1 << 16):
            total += len(some)
        caller.sendall(f"{host} {total}".encode())
        caller.close()
"""
CALL = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 31337), timeout=5.0) as server:
    took = time.monotonic() - began
    server.sendall(bytes(300_000))
    server.shutdown(socket.SHUT_WR)
    print(took, server.recv(100).decode())
"""


@pytest.fixture
def internet() -> Iterator[Internet]:
    sites = {
        "middle": SitePlan(address="45.10.0.1", line=LINE, machines={"server": "45.10.0.1"}),
        "home": SitePlan(address="45.10.1.1", line=LINE, machines={"inside": "192.168.1.2"}, has_router=True),
    }
    try:
        with Internet(sites) as made:
            yield made
    except NoInternetError as error:
        pytest.skip(str(error))


def call(internet: Internet, caller: str, address: str) -> list[str]:
    command = [*internet.places[caller].entrance, sys.executable, "-c", CALL, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0).stdout.split()


def test_a_machine_behind_a_router_calls_out_over_its_line_and_cannot_be_called(internet: Internet) -> None:
    servers = [
        subprocess.Popen(
            [*internet.places[place].entrance, sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True
        )
        for place in ("server", "inside")
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
        took, host, total = call(internet, "inside", "45.10.0.1")
        assert float(took) >= 4 * DELAY  # there and back, over both lines
        assert (host, total) == ("45.10.1.1", "300000")
        assert internet.look()["sites"]["home"]["up"]["bytes"] > 300_000
        began = time.monotonic()
        assert call(internet, "server", "45.10.1.1") == []
        assert time.monotonic() - began >= 5.0  # the router says nothing
    finally:
        for server in servers:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()
