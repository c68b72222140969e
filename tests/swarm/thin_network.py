"""Two network namespaces and a thin line between them, if the machine permits it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

HERE, THERE = "10.77.0.1", "10.77.0.2"
BURST_BYTES = 16_000
QUEUE_MILLISECONDS = 400


@dataclass(frozen=True)
class ThinNetwork:
    """Commands that start a process on either side, and the line's rate from here to there and back."""

    here: tuple[str, ...]
    there: tuple[str, ...]

    def set_rate(self, bytes_per_second: float, *, back: float | None = None) -> None:
        """Set the rate of both directions, or another one from there to here."""
        for side, device, wanted in ((self.here, "thin0", None), (self.there, "thin1", back)):
            rate = f"{int(8 * (wanted or bytes_per_second))}bit"
            tbf = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_MILLISECONDS}ms"]
            _run(*side, "tc", "qdisc", "replace", "dev", device, "root", *tbf)


@contextlib.contextmanager
def thin_network() -> Iterator[ThinNetwork]:
    """Make two namespaces, linked by one line; skip the test if that is not permitted."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, to make networks of its own")
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(2)]
    here, there = (("nsenter", "--target", str(holder.pid), "--net") for holder in holders)
    try:
        try:
            _wait_for_namespaces(here, there)
            _run(*here, "ip", "link", "add", "thin0", "type", "veth", "peer", "thin1", "netns", str(holders[1].pid))
            for side, device, address in ((here, "thin0", HERE), (there, "thin1", THERE)):
                _run(*side, "ip", "address", "add", f"{address}/24", "dev", device)
                for name in ("lo", device):
                    _run(*side, "ip", "link", "set", name, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine lets nobody make networks of its own: {error.stderr.strip()}")
        yield ThinNetwork(here=here, there=there)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _wait_for_namespaces(here: tuple[str, ...], there: tuple[str, ...]) -> None:
    """Wait until both holders have left the namespace in which they were started."""
    outside = _run("readlink", "/proc/self/ns/net")
    for _ in range(200):
        if outside not in {_run(*side, "readlink", "/proc/self/ns/net") for side in (here, there)}:
            return
    raise subprocess.CalledProcessError(1, "unshare", stderr="no new namespace came about")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
