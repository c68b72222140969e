"""Star network with a place for each peer, whose uplink can be limited.

Each place is a network namespace; another one in the middle has a bridge. Traffic that a place sends goes through
`tbf`. Traffic that it receives is not delayed, so only the uplink is thin, as on home connections. A place can also
lose packets: what it sends or receives, to and from one other place or all, or only attempts to connect to it.
"""

from __future__ import annotations

import ipaddress
import itertools
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from benchmarks.private_network import PrivateNetwork
from p2p_diloco.errors import ConfigError

_BURST_BYTES = 80_000
"""Bucket size that holds one send with the headers of all its packets. The kernel sends up to 64 KiB at once, and
network cards of real machines segment it. With a smaller bucket, the kernel segments it on the cores that train."""
_QUEUE_MILLISECONDS = 400
_SUBNET = "45.88.0"
"""Addresses as on the internet: peers treat those of private networks differently."""

# Filters in classic BPF over an Ethernet frame: 2 drops a packet, _NEXT leaves it to the next filter, the last passes.
_NEXT = 2**32 - 1
DROP_ALL = "1,6 0 0 2"
DROP_CALLERS = (
    "11,40 0 0 12,21 0 8 2048,48 0 0 23,21 0 6 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 2 2,6 0 0 2,"
    f"6 0 0 {_NEXT},6 0 0 {_NEXT}"
)
"""Drops TCP segments over IPv4 that have SYN and no ACK, as home routers do to those who call from outside."""
_ADDRESS_AT = {"ingress": 26, "egress": 30}
"""Offset of the address of the other place: source of a packet that comes in, destination of one that goes out."""

Direction = Literal["ingress", "egress"]


class StarNetwork:
    """A star of network namespaces. Entering creates it, leaving removes it.

    Attributes:
        interface: name of the interface that connects the processes.
    """

    interface = "uplink"

    def __init__(self, num_places: int) -> None:
        self._middle = PrivateNetwork()
        self._places = [PrivateNetwork(within=self._middle) for _ in range(num_places)]
        self._ends = ExitStack()
        self._filters = itertools.count(1)
        self._filtered: set[int] = set()

    def __enter__(self) -> Self:
        """Create the network.

        Raises:
            ConfigError: this machine does not permit it.
        """
        with ExitStack() as ends:
            for network in (self._middle, *self._places):
                ends.enter_context(network)
                if not network.is_private:
                    raise ConfigError(
                        "cannot create network namespaces, which are needed to limit uplinks; run it as root, with "
                        "unshare, nsenter, ip and tc installed"
                    )
            _run(self._middle, "ip", "link", "add", "middle", "type", "bridge")
            _run(self._middle, "ip", "link", "set", "middle", "up")
            for place in range(len(self._places)):
                self._join(place)
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    def _join(self, place: int) -> None:
        network, end = self._places[place], f"place{place}"
        _run(
            self._middle, "ip", "link", "add", end, "type", "veth", "peer", "name", self.interface, "netns",
            str(network.pid),
        )  # fmt: skip
        _run(self._middle, "ip", "link", "set", end, "master", "middle")
        _run(self._middle, "ip", "link", "set", end, "up")
        _run(network, "ip", "address", "add", f"{self.address_of(place)}/24", "dev", self.interface)
        _run(network, "ip", "link", "set", self.interface, "up")

    @property
    def is_private(self) -> bool:
        """Always true: entering fails unless all namespaces are private."""
        return True

    @property
    def pid(self) -> int:
        """Id of a process in the middle namespace."""
        return self._middle.pid

    def entrance_of(self, place: int) -> tuple[str, ...]:
        """Return the command prefix of the peer at `place`."""
        return self._places[place].entrance

    def address_of(self, place: int) -> str:
        """Return the address of a place."""
        return f"{_SUBNET}.{place + 1}"

    def set_uplinks(self, bits_per_second: float | None) -> None:
        """Limit the upload rate of each place; None removes the limit."""
        for network in self._places:
            if bits_per_second is None:
                _run(network, "tc", "qdisc", "replace", "dev", self.interface, "root", "noqueue")
                continue
            # A burst holds at least ten milliseconds of traffic, because kernel timers may be that coarse.
            burst = max(_BURST_BYTES, int(bits_per_second / 8 / 100))
            _run(
                network, "tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", "rate",
                f"{int(bits_per_second)}bit", "burst", str(burst), "latency", f"{_QUEUE_MILLISECONDS}ms",
            )  # fmt: skip

    def drop(self, place: int, direction: Direction, other: int | None = None) -> Callable[[], None]:
        """Lose what a place receives ("ingress") or sends ("egress"), to or from another place or all.

        Returns:
            Ends this loss.
        """
        packets = DROP_ALL if other is None else _drop_address(self.address_of(other), _ADDRESS_AT[direction])
        return self._filter(place, direction, packets)

    def close_to_callers(self, place: int) -> Callable[[], None]:
        """Put a home router before a place: it can open connections, but nobody can connect to it. Return the end."""
        return self._filter(place, "ingress", DROP_CALLERS)

    def _filter(self, place: int, direction: Direction, packets: str) -> Callable[[], None]:
        network, number = self._places[place], str(next(self._filters))
        if place not in self._filtered:
            self._filtered.add(place)
            _run(network, "tc", "qdisc", "add", "dev", self.interface, "clsact")
        where = ("dev", self.interface, direction, "pref", number)
        _run(network, "tc", "filter", "add", *where, "bpf", "da", "bytecode", packets)
        return lambda: _run(network, "tc", "filter", "del", *where)


def _drop_address(address: str, offset: int) -> str:
    number = int(ipaddress.IPv4Address(address))
    return f"6,40 0 0 12,21 0 3 2048,32 0 0 {offset},21 0 1 {number},6 0 0 2,6 0 0 {_NEXT}"


def _run(network: PrivateNetwork, *command: str) -> None:
    done = subprocess.run([*network.entrance, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}; run it as root, on Linux, with iproute2")
