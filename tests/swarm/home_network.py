"""A small internet of network namespaces: one public place in the middle, and homes that may be closed.

Every home has its own line to the middle, which forwards packets between them. The router of a closed home drops
packets that open a connection from outside (TCP segments with SYN and without ACK) and forwards all others, as home
routers do. There is no address translation: homes have their own addresses.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from benchmarks.private_network import PrivateNetwork
from benchmarks.star_network import DROP_CALLERS

MIDDLE = "45.10.0.1"


@dataclass(frozen=True)
class Place:
    """A place for a process: the prefix of its command, and the address that others know."""

    entrance: tuple[str, ...]
    address: str


@dataclass(frozen=True)
class HomeNetwork:
    """The middle, and the homes around it."""

    middle: Place
    homes: tuple[Place, ...]


@contextlib.contextmanager
def home_network(*are_open: bool) -> Iterator[HomeNetwork]:
    """Make one home for each flag, open if it is set; skip the test if that is not permitted."""
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
        _run(*there, "tc", "filter", "add", "dev", "line", "ingress", "bpf", "da", "bytecode", DROP_CALLERS)
    return Place(there, address)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
