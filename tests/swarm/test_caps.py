"""Caps with real daemons: on loopback by our counters, and between two networks by the counters of the line.

`make homes` runs all of it, including two minutes of flooding a line, and prints measured rates against the caps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.swarm.rate_peer import WARM_UP_SECONDS
from tests.swarm.test_transport_contract import Libp2pStage
from tests.swarm.thin_network import HERE, THERE, ThinNetwork, thin_network
from tests.transport.rate_contract import CAP, Direction, RateContract
from tests.transport.stage import RUN, act

pytestmark = pytest.mark.wall_clock

SCRIPT = Path(__file__).with_name("rate_peer.py")
WIRE_SECONDS = 60.0


def play_on(directory: Path, scene: Callable[[Any], Coroutine[Any, Any, None]], seconds: float) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await act(Libp2pStage(directory=directory), scene)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


@pytest.mark.long
@pytest.mark.timeout(180)
class TestLibp2p(RateContract):
    """`Libp2pTransport`."""

    directory: Path

    @pytest.fixture(autouse=True)
    def _use_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def play(self, scene: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        play_on(self.directory, scene, 150.0)


# -- on the wire


def wire_bytes(network: ThinNetwork) -> tuple[int, int]:
    """Return the bytes that the line has carried from here to there and back, with Ethernet headers."""
    table = subprocess.run([*network.here, "cat", "/proc/net/dev"], check=True, capture_output=True, text=True).stdout
    fields = next(line for line in table.splitlines() if "thin0:" in line).partition(":")[2].split()
    return int(fields[8]), int(fields[0])


def send_single_packets(network: ThinNetwork) -> None:
    """Limit packets to the length of Ethernet: a line between namespaces would carry 64 KiB with one header."""
    for side, device in ((network.here, "thin0"), (network.there, "thin1")):
        subprocess.run([*side, "ip", "link", "set", device, "gso_max_segs", "1"], check=True)


@contextlib.contextmanager
def rate_peer(side: tuple[str, ...], *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a peer on one side; yield its process and address."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [*side, sys.executable, str(SCRIPT), *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_cap_is_kept_on_the_wire_over_a_minute(direction: Direction, tmp_path: Path) -> None:
    up, down = (CAP, 0.0) if direction == "upload" else (0.0, CAP)
    run = RUN.hex()
    with thin_network() as network:
        send_single_packets(network)
        reader = (str(tmp_path / "reader.key"), run, THERE, "0", str(down), "0")
        writer = (str(tmp_path / "writer.key"), run, HERE, str(up), "0", str(WIRE_SECONDS + 5.0))
        with (
            rate_peer(network.there, *reader) as (_, address),
            rate_peer(network.here, *writer, address) as (sending, _),
        ):
            start = wire_bytes(network)[0]
            time.sleep(WARM_UP_SECONDS)
            before, began = wire_bytes(network), time.monotonic()
            time.sleep(WIRE_SECONDS)
            after, took = wire_bytes(network), time.monotonic() - began
            sending.kill()
    rate, back = ((after[way] - before[way]) / took for way in (0, 1))
    early = before[0] - start - CAP * WARM_UP_SECONDS
    print(
        f"{direction} cap {8e-6 * CAP:.1f} Mbit/s: {8e-6 * rate:.2f} Mbit/s on the wire over {took:.0f} s "
        f"({100 * (rate / CAP - 1):+.1f} %), {8e-6 * back:.2f} Mbit/s back; {1e-6 * early:+.2f} MB in the first "
        f"{WARM_UP_SECONDS:.0f} s beside what the cap allows"
    )
    assert 0.9 * CAP < rate < 1.1 * CAP
