"""Namespaces with a TUN device each, and the process that carries packets between them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.private_network import PrivateNetwork
from internet.middle import SitePlan

PROJECT = Path(__file__).resolve().parent.parent
TUN = Path("/dev/net/tun")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
DEVICE, MTU = "line", 1500
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_END_SECONDS = 10.0


class NoInternetError(Exception):
    """This machine does not let us make networks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a process can run.

    Attributes:
        entrance: prefix of its command.
        address: the machine's own address.
        public_address: the address of its site, which others see.
    """

    entrance: tuple[str, ...]
    address: str
    public_address: str


class Internet:
    """Sites whose machines exchange true packets, from entering this context until leaving it.

    Args:
        congestion: congestion control of TCP, such as "cubic"; None: the machine's own.
        seed: of losses, jitter and routers' ports.
    Raises:
        NoInternetError: it needs root, `/dev/net/tun` and namespaces.
    """

    def __init__(self, sites: dict[str, SitePlan], *, seed: int = 0, congestion: str | None = None) -> None:
        self.sites = sites
        self.places: dict[str, Place] = {}
        self._seed, self._congestion = seed, congestion
        self._exits = ExitStack()
        self._carrier: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if os.geteuid() or not TUN.exists():
            raise NoInternetError("needs root and /dev/net/tun, to make networks of its own")
        with ExitStack() as exits:
            devices = {}
            for site in self.sites.values():
                for machine, address in site.machines.items():
                    with _congestion_of_new_networks(self._congestion):
                        network = exits.enter_context(PrivateNetwork())
                    if not network.is_private:
                        raise NoInternetError("this machine lets nobody make networks of its own")
                    devices[machine] = device = _open_tun(network.pid)
                    exits.callback(os.close, device)
                    self._furnish(network, address)
                    self.places[machine] = Place(network.entrance, address, site.address)
            self._start(devices, Path(exits.enter_context(tempfile.TemporaryDirectory())))
            exits.callback(self._end)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def congestion(self) -> str:
        """Congestion control of TCP that the machines use."""
        place = next(iter(self.places.values()))
        command = [*place.entrance, "cat", str(CONGESTION)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def look(self) -> dict[str, Any]:
        """Return the bytes and packets that each site's line has carried, up and down."""
        self._tell(look=True)
        assert self._carrier is not None, "entered"
        assert self._carrier.stdout is not None, "it was given"
        found: dict[str, Any] = json.loads(self._carrier.stdout.readline())
        return found

    def cut(self, site: str, *, is_cut: bool = True) -> None:
        """Let a line carry nothing, or carry again."""
        self._tell(site=site, is_cut=is_cut)

    def lose(self, site: str, share: float) -> None:
        """Let a line lose a further share of its packets."""
        self._tell(site=site, loss=share)

    def restart_router(self, site: str, *, address: str | None = None) -> None:
        """Restart a site's router: it forgets all connections, and may get another public address."""
        self._tell(site=site, restart=True, **({} if address is None else {"address": address}))

    def _furnish(self, network: PrivateNetwork, address: str) -> None:
        commands = [
            f"ip address add {address}/32 dev {DEVICE}",
            f"ip link set {DEVICE} mtu {MTU} up",
            f"ip route add default dev {DEVICE}",
        ]
        done = subprocess.run(
            [*network.entrance, "sh", "-ec", "\n".join(commands)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NoInternetError(f"cannot set up a network: {done.stderr.strip()}")

    def _start(self, devices: dict[str, int], folder: Path) -> None:
        path = folder / "sites.json"
        sites = {name: dataclasses.asdict(site) for name, site in self.sites.items()}
        path.write_text(json.dumps({"seed": self._seed, "sites": sites, "devices": devices}))
        self._carrier = subprocess.Popen(
            [sys.executable, "-m", "internet.carrier", str(path)], cwd=PROJECT, pass_fds=tuple(devices.values()),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _tell(self, **command: object) -> None:
        assert self._carrier is not None, "entered"
        assert self._carrier.stdin is not None, "it was given"
        self._carrier.stdin.write(json.dumps(command) + "\n")
        self._carrier.stdin.flush()

    def _end(self) -> None:
        assert self._carrier is not None, "it was started"
        try:
            self._carrier.communicate(timeout=_END_SECONDS)
        finally:
            self._carrier.kill()
            self._carrier.wait()


@contextlib.contextmanager
def _congestion_of_new_networks(name: str | None) -> Iterator[None]:
    """Set the machine's congestion control, which new networks take over, and restore it afterwards."""
    before = CONGESTION.read_text()
    try:
        if name is not None:
            CONGESTION.write_text(name)
        yield
    except OSError as error:
        raise NoInternetError(f"this machine has no congestion control {name}: {error.strerror}") from None
    finally:
        CONGESTION.write_text(before)


def _open_tun(pid: int) -> int:
    """Make the device in the network namespace of a process, and return its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net", "rb") as home, open(f"/proc/{pid}/ns/net", "rb") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise NoInternetError(f"cannot enter a network: {os.strerror(ctypes.get_errno())}")
        try:
            device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)
    return device
