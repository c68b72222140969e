"""Star network with a place for each peer, whose uplink can be limited.

Each place is a network namespace; another one in the middle has a bridge. Traffic that a place sends goes through
`tbf`. Traffic that it receives is not delayed, so only the uplink is thin, as on home connections.
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from benchmarks.private_network import PrivateNetwork
from p2p_diloco.errors import ConfigError

_BURST_BYTES = 80_000
"""Bucket size that holds one send with the headers of all its packets. The kernel sends up to 64 KiB at once, and
network cards of real machines segment it. With a smaller bucket, the kernel segments it on the cores that train."""
_QUEUE_MILLISECONDS = 400
_SUBNET = "10.88.0"


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


def _run(network: PrivateNetwork, *command: str) -> None:
    done = subprocess.run([*network.entrance, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}; run it as root, on Linux, with iproute2")
