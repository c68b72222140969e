"""Commands and peers of several machines, each with a state directory of its own, as real processes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from p2p_diloco.status.status_file import PeerStatus, read_status
from tests.status.kept_events import read_events

PROJECT = Path(__file__).resolve().parents[2]
INVITE = re.compile(r"p2pdiloco://[0-9a-f]{64}\?[^\s\"']+")
PATIENCE_SECONDS = 240.0


class Machines:
    """Commands in one folder, and peers with a state directory each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *words: str, program: tuple[str, ...] = ("-m", "p2p_diloco")) -> str:
        """Run a command to its end and return its output."""
        done = subprocess.run(
            [sys.executable, *program, *words],
            cwd=self.folder,
            env=self._environment("organiser"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, name: str, *words: str, program: tuple[str, ...] = ("-m", "p2p_diloco")) -> None:
        """Start a peer."""
        with self.log(name).open("ab") as log:
            self.peers[name] = subprocess.Popen(
                [sys.executable, *program, *words, "--host-maddrs", "/ip4/127.0.0.1/tcp/0"],
                cwd=self.folder,
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """End a peer as a power cut does."""
        peer = self.peers.pop(name)
        peer.kill()
        peer.wait()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def state(self, name: str) -> Path:
        return self.folder / f"state-{name}"

    def status(self, name: str) -> PeerStatus:
        return read_status(self.state(name)) or PeerStatus()

    def events(self, name: str, topic: str) -> list[str]:
        return [event.text for event in read_events(self.state(name), topic)]

    def invite(self, name: str) -> str:
        def found() -> list[str]:
            return INVITE.findall(self.log(name).read_text(errors="replace"))

        self.wait("an invite", found)
        return found()[0]

    def wait(self, what: str, is_so: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            for name, peer in self.peers.items():
                assert peer.poll() in (None, 0), f"{name} ended with {peer.returncode}\n{self.story()}"
            assert time.monotonic() < until, f"waited in vain for {what}\n{self.story()}"
            time.sleep(0.25)

    def story(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name).read_text(errors='replace')[-3000:]}" for name in self.peers)

    def close(self) -> None:
        for peer in self.peers.values():
            with contextlib.suppress(ProcessLookupError):
                peer.kill()
            peer.wait()

    def _environment(self, name: str) -> dict[str, str]:
        kept = {key: text for key, text in os.environ.items() if not key.startswith("P2P_DILOCO_")}
        paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return kept | {
            "PYTHONPATH": os.pathsep.join(paths),
            "P2P_DILOCO_STATE_DIRECTORY": str(self.state(name)),
            "P2P_DILOCO_NO_PORT_MAPPING": "true",
            "P2P_DILOCO_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def wait_for_end(machines: Machines, names: list[str]) -> None:
    """Wait until all peers have ended after their last round, with the same state."""
    machines.wait("the last round", lambda: all(machines.peers[name].poll() is not None for name in names))
    digests = {machines.status(name).state_digest for name in names}
    assert len(digests) == 1, machines.story()
    assert "" not in digests, machines.story()
