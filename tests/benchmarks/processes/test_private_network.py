"""A private network counts no foreign bytes, and ends with its creator."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import private_network
from benchmarks.meters import loopback_bytes
from benchmarks.private_network import PrivateNetwork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

TALKER = (
    "import socket; "
    "receiver = socket.socket(type=socket.SOCK_DGRAM); receiver.bind(('127.0.0.1', 0)); "
    "[receiver.sendto(bytes(1000), receiver.getsockname()) for _ in range(100)]"
)


def test_traffic_in_a_private_network_is_counted_only_there() -> None:
    with PrivateNetwork() as network, PrivateNetwork() as other:
        if not (network.is_private and other.is_private):
            pytest.skip("this machine lets nobody make networks of its own")
        before = loopback_bytes(network.pid), loopback_bytes(other.pid)
        subprocess.run([*network.entrance, sys.executable, "-c", TALKER], check=True)
        assert loopback_bytes(network.pid) - before[0] >= 100 * 1000
        assert loopback_bytes(other.pid) == before[1]
        holder = network.pid
    assert not network.entrance
    with pytest.raises(FileNotFoundError):
        loopback_bytes(holder)


def test_without_permission_the_machines_network_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_network.shutil, "which", lambda tool: None)
    with PrivateNetwork() as network:
        assert not network.is_private
        assert network.entrance == ()
        assert loopback_bytes(network.pid) >= 0
