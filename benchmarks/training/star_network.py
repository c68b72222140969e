"""A network with a place for each peer, all joined in the middle, each with its own uplink that can be made thin.

A namespace for each place and one for the middle, with a bridge in it. What a place sends goes through `tbf`; what it
receives does not wait, so that the uplink alone is thin, as at home.
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from benchmarks.private_network import PrivateNetwork
from p2p_diloco.errors import ConfigError

_BURST_BYTES = 80_000
"""What one send may hold with the headers of all its packets. An island's kernel hands up to 64 KiB over at once, and
cards of real machines cut that; a bucket that does not hold it has the kernel cut it, on the cores that train."""
_QUEUE_MILLISECONDS = 400
_SUBNET = "10.88.0"


class StarNetwork:
    """Enter to make, leave to end.

    Attributes:
        interface: by which its processes reach each other.
    """

    interface = "uplink"

    def __init__(self, num_places: int) -> None:
        self._middle = PrivateNetwork()
        self._places = [PrivateNetwork(within=self._middle) for _ in range(num_places)]
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            ConfigError: this machine does not let us.
        """
        with ExitStack() as ends:
            for network in (self._middle, *self._places):
                ends.enter_context(network)
                if not network.is_private:
                    raise ConfigError(
                        "no network namespaces can be made here, and without them no line can be made thin; run it as "
                        "root, with unshare, nsenter, ip and tc installed"
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
        """Whether nobody else is in it: it would not have come about otherwise."""
        return True

    @property
    def pid(self) -> int:
        """A process that lives in the middle."""
        return self._middle.pid

    def entrance_of(self, place: int) -> tuple[str, ...]:
        """The words before the command of the peer at `place`."""
        return self._places[place].entrance

    def address_of(self, place: int) -> str:
        """Return the address of a place."""
        return f"{_SUBNET}.{place + 1}"

    def set_uplinks(self, bits_per_second: float | None) -> None:
        """Let each place send so much; None: as much as it can."""
        for network in self._places:
            if bits_per_second is None:
                _run(network, "tc", "qdisc", "replace", "dev", self.interface, "root", "noqueue")
                continue
            # A burst is at least what passes in ten milliseconds, between two looks of the kernel at its timers.
            burst = max(_BURST_BYTES, int(bits_per_second / 8 / 100))
            _run(
                network, "tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", "rate",
                f"{int(bits_per_second)}bit", "burst", str(burst), "latency", f"{_QUEUE_MILLISECONDS}ms",
            )  # fmt: skip


def _run(network: PrivateNetwork, *command: str) -> None:
    done = subprocess.run([*network.entrance, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}; run it as root, on Linux, with iproute2")
