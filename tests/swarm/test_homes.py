"""Peers behind home routers reach the bootstrap peer but not each other, and train through the peers they reach.

`make homes` runs these and prints the figures. The routers are those of `home_network.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from p2p_diloco.status.event_log import PeerEvent
from tests.status.kept_events import read_events
from tests.swarm.home_network import Place, home_network
from tests.swarm.process_swarm import FRAGMENTS, PROJECT, PeerProcess, ProcessSwarm

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(900)]

PROGRAM = (sys.executable, "-m", "p2p_diloco")
BEFORE_FIRST_ENTRY_SECONDS = 30.0
LEAST_PARTICIPATION = 0.90
SETTLING_CYCLES, WATCHED_CYCLES = 3, 10
LEAST_ENTRIES = 0.95
ROUND_SECONDS = 3.0


class Machine:
    """One machine of the README: its own home folder, and a place in the network."""

    def __init__(self, folder: Path, place: Place) -> None:
        self.folder = folder
        self.place = place
        self._running: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        folder.mkdir()

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("P2P_DILOCO_", "XDG_"))}
        return {**kept, "HOME": str(self.folder), "PYTHONPATH": str(PROJECT), "TMPDIR": str(self.folder)}

    def start(self, *words: str) -> Path:
        """Start a command of the program; return the file with its output."""
        path = self.folder / f"{words[0]}.log"
        self._logs.append(path.open("w"))
        self._running.append(
            subprocess.Popen(
                [*self.place.entrance, *PROGRAM, *words], cwd=self.folder, env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=self._logs[-1], stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
        return path

    def ask(self, *words: str) -> str:
        command = [*self.place.entrance, *PROGRAM, *words]
        done = subprocess.run(command, cwd=self.folder, env=self.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("status", "--json"))
        return found

    def events(self, *topics: str) -> tuple[PeerEvent, ...]:
        return read_events(self.folder / ".local" / "share" / "p2p-diloco", *topics)

    def end(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGINT)
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
            process.kill()
            process.wait()
        for log in self._logs:
            log.close()


@contextlib.contextmanager
def machines(*places: Place) -> Iterator[tuple[Machine, ...]]:
    root = Path(tempfile.mkdtemp(prefix="p2pd-homes-"))
    found = tuple(Machine(root / str(number), place) for number, place in enumerate(places))
    try:
        yield found
    finally:
        for machine in reversed(found):
            machine.end()
        shutil.rmtree(root, ignore_errors=True)


def wait(what: str, is_so: Callable[[], Any], seconds: float, story: Callable[[], str] = str) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"waited {seconds:.0f} s in vain until {what}\n{story()}"
        time.sleep(0.25)


def join_command(log: Path) -> list[str]:
    """Return the words of the join command, which is the first line that a bootstrap peer prints."""
    wait("the bootstrap prints the join command", lambda: "\n" in log.read_text(), 60.0, log.read_text)
    words = shlex.split(log.read_text().splitlines()[0])
    assert tuple(words[:-2]) == PROGRAM
    return words[-2:]


def test_two_homes_learn_from_each_other_with_the_commands_of_the_readme() -> None:
    with home_network(False, False) as network, machines(network.middle, *network.homes) as (middle, one, two):
        middle.ask("new")
        invite = join_command(middle.start("bootstrap", "run.toml", "--public-name", network.middle.address))
        logs = [home.start(*invite) for home in (one, two)]

        def story() -> str:
            return "\n\n".join(log.read_text()[-3000:] for log in logs)

        wait("both homes are ready", lambda: one.events("ready") and two.events("ready"), 240.0, story)
        ready = max(home.events("ready")[0].time for home in (one, two))

        def first_with_both() -> float | None:
            rounds = (event for event in one.events("round") if event.figures["num_included"])
            both = (e for e in rounds if int(e.figures["num_included"]) == 2 * int(e.figures["num_entries"]))
            return next((event.time - ready for event in both), None)

        wait("contributions of both are in entries", lambda: first_with_both() is not None, 120.0, story)
        seconds = first_with_both()
        assert seconds is not None
        time.sleep(100.0)
        shown = [home.status() for home in (one, two)]
        for status in shown:
            print(
                f"two homes: both in entries {seconds:.1f} s after the second was ready; participation "
                f"{100 * status['participation']:.1f} %; {status['reach']}"
            )
        assert seconds <= BEFORE_FIRST_ENTRY_SECONDS, story()
        for status in shown:
            assert not status["reachable"]
            assert status["reach"].startswith("outbound only: no member could dial it (45.10.")
            assert status["trouble"] == ""
            assert LEAST_PARTICIPATION <= status["participation"] <= 1.0
        assert shown[0]["reach"] in " ".join(one.ask("status").split())


def spans_with_entries(peer: PeerProcess, *, cycles: int, since: float) -> float:
    """Return the share of spans with entries, in rounds that ended within `cycles` cycles after `since`."""
    until = since + cycles * FRAGMENTS * ROUND_SECONDS
    rounds = [closed for closed in peer.rounds(since) if closed.time < until]
    assert rounds
    return sum(closed.num_entries for closed in rounds) / sum(closed.num_spans for closed in rounds)


@pytest.mark.parametrize(("num_peers", "num_open"), [(4, 1), (8, 2)])
def test_a_few_reachable_peers_average_for_all(num_peers: int, num_open: int) -> None:
    are_open = [number < num_open for number in range(num_peers)]
    with home_network(*are_open) as network, ProcessSwarm(patience_seconds=180.0, round_seconds=ROUND_SECONDS) as swarm:
        middle = network.middle
        swarm.start("bootstrap", founds=True, trains=False, within=middle.entrance, host=middle.address)
        names = [f"home-{number}" for number in range(num_peers)]
        for name, home in zip(names, network.homes, strict=True):
            swarm.start(name, within=home.entrance, host=home.address)
        swarm.wait("all are members", lambda: all(swarm.peers[n].status.num_members == num_peers for n in names))
        members = time.time()
        cycle = FRAGMENTS * ROUND_SECONDS
        time.sleep((SETTLING_CYCLES + WATCHED_CYCLES + 1) * cycle)
        statuses = {name: swarm.peers[name].status for name in names}
        since = members + SETTLING_CYCLES * cycle
        shares = [spans_with_entries(swarm.peers[name], cycles=WATCHED_CYCLES, since=since) for name in names]
        print(
            f"{num_open} of {num_peers} can be reached: {100 * min(shares):.1f} % of spans got entries at least; "
            f"participation {100 * min(s.participation or 0.0 for s in statuses.values()):.1f} % and more"
        )
        assert [status.reachable for status in statuses.values()] == are_open, [s.reach for s in statuses.values()]
        assert min(shares) >= LEAST_ENTRIES, swarm.story()
        for status in statuses.values():
            assert status.participation is not None
            assert status.participation <= 1.0
            assert status.reach.startswith("reachable at 45.10." if status.reachable else "outbound only: no member")


ROUTER = """
import socket, struct
router = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
router.bind(("0.0.0.0", 5351))
while True:
    asked, asker = router.recvfrom(64)
    if asked[1] == 0:
        answer = struct.pack("!BBHI4s", 0, 128, 0, 1, socket.inet_aton("45.99.0.9"))
    else:
        version, kind, _, inside, outside, seconds = struct.unpack("!BBHHHI", asked[:12])
        answer = struct.pack("!BBHIHHI", 0, 128 + kind, 0, 1, inside, outside, seconds)
    router.sendto(answer, asker)
"""
LISTENER = """
import asyncio, sys
from pathlib import Path
from p2p_diloco.ids import sha256
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport.libp2p import Libp2pTransport

async def listen(path):
    key = load_or_create_identity(path)
    async with Libp2pTransport(
        peer=key.peer, run=sha256(b"run"), identity_path=path, map_port=sys.argv[2] == "map"
    ) as transport:
        for _ in range(40):
            await asyncio.sleep(0.5)
            if any("45.99.0.9" in address for address in transport.listen_addresses()):
                print(len(transport.listen_ports()), transport.listen_addresses())
                return

asyncio.run(listen(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("word", ["map", "do not"])
def test_a_port_opened_by_the_router_is_announced_unless_that_is_off(word: str, tmp_path: Path) -> None:
    """The router is a short NAT-PMP server: no real router is used in these tests, and no UPnP."""
    with home_network(False) as network:
        router = subprocess.Popen([*network.middle.entrance, sys.executable, "-c", ROUTER])
        try:
            command = [*network.homes[0].entrance, sys.executable, "-c", LISTENER, str(tmp_path / "key"), word]
            environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120.0)
        finally:
            router.kill()
            router.wait()
        assert done.returncode == 0, done.stderr
        assert ("/ip4/45.99.0.9/tcp/" in done.stdout) == (word == "map"), done.stdout
        assert done.stdout.startswith("2 " if word == "map" else "")
