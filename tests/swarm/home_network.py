"""A small internet of network namespaces: one public place in the middle, and homes that may let nobody in.

Every home has a line of its own to the middle, which passes packets on between them. The router of a closed home drops
what opens a connection from outside (TCP segments with SYN and without ACK) and lets everything else through, as home
routers do. What is not there is address translation: homes have addresses of their own.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from benchmarks.private_network import PrivateNetwork

MIDDLE = "45.10.0.1"
# Classic BPF over an Ethernet frame: 2 drops a TCP segment over IPv4 that has SYN and no ACK, 0 lets all others pass.
_NO_CALLERS = (
    "11,40 0 0 12,21 0 8 2048,48 0 0 23,21 0 6 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 2 2,6 0 0 2,6 0 0 0,6 0 0 0"
)


@dataclass(frozen=True)
class Place:
    """Where a process may live: what its command begins with, and the address that others know."""

    entrance: tuple[str, ...]
    address: str


@dataclass(frozen=True)
class HomeNetwork:
    """The middle, and the homes around it."""

    middle: Place
    homes: tuple[Place, ...]


@contextlib.contextmanager
def home_network(*are_open: bool) -> Iterator[HomeNetwork]:
    """Make a home for each flag, open to others where it is set; skip the test where that is not permitted."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, to make networks of its own")
    with contextlib.ExitStack() as exits:
        middle = exits.enter_context(PrivateNetwork())
        if not middle.is_private:
            pytest.skip("this machine lets nobody make networks of its own")
        homes = []
        try:
            _run(*middle.entrance, "ip", "address", "add", f"{MIDDLE}/32", "dev", "lo")
            _run(*middle.entrance, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for number, is_open in enumerate(are_open, start=1):
                home = exits.enter_context(PrivateNetwork(within=middle))
                homes.append(_connect(middle, home, number, is_open=is_open))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine lets nobody lay lines between networks: {error.stderr.strip()}")
        yield HomeNetwork(middle=Place(middle.entrance, MIDDLE), homes=tuple(homes))


def _connect(middle: PrivateNetwork, home: PrivateNetwork, number: int, *, is_open: bool) -> Place:
    router, address = f"45.10.{number}.1", f"45.10.{number}.2"
    here, there = middle.entrance, home.entrance
    line = f"line{number}"
    _run(*here, "ip", "link", "add", line, "type", "veth", "peer", "line", "netns", str(home.pid))
    for side, device, own in ((here, line, router), (there, "line", address)):
        _run(*side, "ip", "address", "add", f"{own}/24", "dev", device)
        _run(*side, "ip", "link", "set", device, "up")
    _run(*there, "ip", "route", "add", "default", "via", router)
    if not is_open:
        _run(*there, "tc", "qdisc", "add", "dev", "line", "clsact")
        _run(*there, "tc", "filter", "add", "dev", "line", "ingress", "bpf", "da", "bytecode", _NO_CALLERS)
    return Place(there, address)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
