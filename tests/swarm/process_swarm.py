"""A swarm of real processes over loopback and the real transport, which can be killed, frozen and woken at will.

The peers' view is read from their folders. Leaving the swarm ends every process and checks that none is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.chaos.paced_island import set_wall_clock
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.ids import format_peer_id
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.signing import SigningKey
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import PeerStatus, read_status
from p2p_diloco.storage.identity import load_or_create_identity, write_name
from p2p_diloco.storage.run_folder import RunFolder
from p2p_diloco.storage.text_copy import list_own_text
from tests.status.kept_events import read_events

ORGANISER = SigningKey(b"o" * 32)
SCRIPT = Path(__file__).with_name("swarm_peer.py")
PROJECT = Path(__file__).parent.parent.parent
LYING_SCRIPT = PROJECT / "tests" / "processes" / "lying_peer.py"
CRASHING_SCRIPT = PROJECT / "tests" / "processes" / "crashing_peer.py"
WRONG_CLOCK_SCRIPT = PROJECT / "tests" / "processes" / "wrong_clock_peer.py"
ROUND_SECONDS = 1.5
SPANS = 8
FRAGMENTS = 2
PATIENCE_SECONDS = 60.0
"""Patience for what takes a second on an idle machine: other tests may run at the same time."""
LATE_SECONDS = 0.5 * ROUND_SECONDS
"""Time that a busy machine may need after a round's deadline to record its end."""
NICENESS = 5


def tiny_manifest(values: Mapping[str, Any] | None = None, round_seconds: float = ROUND_SECONDS) -> RunManifest:
    """Return a run with rounds of a second or two and a model that trains in a millisecond."""
    return draft_manifest(
        organiser=ORGANISER.peer,
        now_seconds=time.time(),
        name="faults",
        values={
            "model": {"layers": 1, "width": 32, "heads": 2, "feed_forward": 64, "context": 32},
            "rounds": {
                "clock_start": time.time(),
                "round_seconds": round_seconds,
                "fragments": FRAGMENTS,
                "spans_per_fragment": SPANS,
            },
            **(values or {}),
        },
    )


@dataclass
class PeerProcess:
    """One peer: its folder outlives its processes."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    seen: list[psutil.Process] = field(default_factory=list)

    @property
    def status(self) -> PeerStatus:
        return read_status(self.folder) or PeerStatus()

    def events(self, *topics: str, since: float = 0.0) -> tuple[PeerEvent, ...]:
        return tuple(event for event in read_events(self.folder, *topics) if event.time >= since)

    def rounds(self, since: float = 0.0) -> list[ClosedRound]:
        return [ClosedRound(time=event.time, **event.figures) for event in self.events("round", since=since)]

    def family(self) -> list[psutil.Process]:
        """Return the peer's process, its libp2p daemon and their children."""
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


@dataclass(frozen=True, kw_only=True)
class ClosedRound:
    """A peer's record of a round that is over."""

    time: float
    round: int
    num_spans: int
    num_entries: int
    num_included: int
    num_ready: int
    num_members: int

    def is_whole(self, num_members: int) -> bool:
        """Return whether all spans got an entry that includes each of `num_members`."""
        return (
            self.num_members == num_members
            and self.num_entries == self.num_spans
            and self.num_included == self.num_spans * num_members
        )


def drawn_text() -> bytes:
    """Return a random text from which even the smallest model learns something at once."""
    letters = random.Random(7)
    words = ["".join(letters.choices("etaoinshrdlu", k=letters.randint(1, 8))) for _ in range(300)]
    return " ".join(letters.choices(words, k=20_000)).encode()


class ProcessSwarm:
    """All processes of one test."""

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        round_seconds: float = ROUND_SECONDS,
        keep_traces: bool = False,
        text: bytes | None = None,
        listed: Sequence[str] = (),
        shares_text: bool = False,
    ) -> None:
        self._keep_diaries = keep_traces
        self.patience_seconds = patience_seconds
        self.round_seconds = round_seconds
        self.peers: dict[str, PeerProcess] = {}
        # A short path, because it contains the daemons' sockets.
        self._root = Path(tempfile.mkdtemp(prefix="p2pd-faults-"))
        self.text = self._root / "text.txt"
        self.text.write_bytes(text if text is not None else drawn_text())
        values = {**(values or {}), **({"trust": self._list(listed)} if listed else {})}
        if shares_text:
            digest = list_own_text(str(self.text)).digest
            values["data"] = {"path": str(self.text), "share": True, "files": digest.hex()}
        self.manifest = tiny_manifest(values, round_seconds)

    def _list(self, names: Sequence[str]) -> dict[str, Any]:
        """Create the identities of peers before they start, for a run that lists them."""
        keys = []
        for name in names:
            settings = PeerSettings(state_directory=self._root / name)
            settings.state_directory.mkdir()
            keys.append(load_or_create_identity(settings.identity_file))
        peers = [format_peer_id(key.peer) for key in keys]
        return {"mode": "listed", "peers": peers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            left = self._end_all()
            assert not left, f"processes that outlived their peers: {left}"
            assert not list(self._root.glob("p2p-diloco-*")), "a daemon's socket directory is left"
        finally:
            shutil.rmtree(self._root, ignore_errors=True)

    # -- starting and ending

    def start(
        self,
        name: str,
        *,
        founds: bool = False,
        trains: bool = True,
        dial_out_only: bool = False,
        via: Sequence[str] = (),
        within: Sequence[str] = (),
        serves_slowly: float = 0.0,
        host: str = "127.0.0.1",
        max_upload: str | None = None,
        lie: str | None = None,
        crash: str | None = None,
        wall_ahead: float | None = None,
        invite: str | None = None,
        port: int = 0,
        has_text: bool = True,
        flips_text: bool = False,
        block_cycles: int | None = None,
        called: str = "",
    ) -> PeerProcess:
        """Start a peer, or restart it.

        Args:
            invite: the invite that it gets; None: the one that the founder printed first.
            port: port to listen on; 0: the one that it had before.
            via: peers whose addresses it gets in addition to those of the invite.
            within: a command that starts the process, such as one that enters a network namespace.
            serves_slowly: seconds that it waits before it serves a small piece of a span.
            host: the address that it listens on.
            max_upload: a cap, as on the command line.
            wall_ahead: seconds by which its wall clock is ahead, until `set_wall_clock`; None: it is the machine's. Its
        records have times of its own clock.
            has_text: whether it has a copy of the text.
            flips_text: whether it flips a bit in each piece of the text that it sends.
            block_cycles: cycles of a block of credit; None: as usual.
            called: the name that its owner gives it.
            crash: step of a round at which it may fail, once `arm` was called; see tests/processes/crashing_peer.py.
            lie: lie of a hostile member, told once the file `lie` is in its folder; see tests/processes/lying_peer.py.
        """
        peer = self.peers.setdefault(name, PeerProcess(name=name, folder=self._root / name))
        peer.folder.mkdir(exist_ok=True)
        write_name(peer.folder, called)
        order = {
            "folder": str(peer.folder),
            "text": str(self.text) if has_text else None,
            "flips_text": flips_text,
            "block_cycles": block_cycles,
            "trains": trains,
            "dial_out_only": dial_out_only,
            "manifest": self.manifest.sign(ORGANISER).encode().hex() if founds else None,
            "organiser": ORGANISER.private_bytes().hex() if founds else None,
            "invite": None if founds else invite or self.invite(),
            "port": port,
            "serves_slowly": serves_slowly,
            "host": host,
            "max_upload": max_upload,
            "lie": lie,
            "crash": crash,
            "keep_trace": self._keep_diaries and trains,
            "initial_peers": [address for other in via for address in self.peers[other].status.addresses],
        }
        (peer.folder / "order.json").write_text(json.dumps(order))
        script = LYING_SCRIPT if lie else CRASHING_SCRIPT if crash else SCRIPT
        if wall_ahead is not None:
            self.set_wall_clock(name, wall_ahead)
            script = WRONG_CLOCK_SCRIPT
        with (peer.folder / "output.log").open("ab") as output:
            peer.process = subprocess.Popen(
                [*within, sys.executable, str(script), str(peer.folder / "order.json")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=lambda: os.nice(NICENESS) and None,
            )
        return peer

    def _environment(self) -> dict[str, str]:
        paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "TMPDIR": str(self._root),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def invite(self) -> str:
        """Wait for the invite that the founder prints, and return it."""
        files = [peer.folder / "invite" for peer in self.peers.values()]
        self.wait("an invite", lambda: any(file.exists() for file in files))
        return next(file for file in files if file.exists()).read_text()

    def kill(self, name: str) -> float:
        """Kill a peer without warning; return when."""
        peer = self._running(name)
        self._note_families()
        peer.process.kill()  # type: ignore[union-attr]
        peer.process.wait()  # type: ignore[union-attr]
        return time.time()

    def freeze(self, name: str, *, with_daemon: bool = True) -> float:
        """Stop a peer and return when.

        With its daemon it is silent, as behind a closed lid; without, its connections stay open but nobody reads from
        them.
        """
        peer = self._running(name)
        assert peer.process is not None
        for process in peer.family():
            if with_daemon or process.pid == peer.process.pid:
                process.suspend()
        return time.time()

    def wake(self, name: str) -> float:
        """Resume a frozen peer; return when."""
        for process in reversed(self._running(name).family()):
            process.resume()
        return time.time()

    def arm(self) -> None:
        """Let the first peer fail that reaches the step it was started with."""
        (self._root / "armed").touch()

    def crashed(self) -> str:
        """Return the name of the peer that has failed since `arm`; empty if none has."""
        file = self._root / "crashed"
        return file.read_text() if file.exists() else ""

    def set_wall_clock(self, name: str, ahead: float) -> float:
        """Set the wall clock of a peer that was started with `wall_ahead`; return when, by the machine's clock."""
        set_wall_clock(self.peers[name].folder, ahead)
        return time.time()

    def leave(self, name: str) -> None:
        """Send Ctrl-C to a peer and wait until it is gone."""
        peer = self._running(name)
        self._note_families()
        assert peer.process is not None
        peer.process.send_signal(signal.SIGINT)
        assert peer.process.wait(timeout=self.patience_seconds) == 0, self.story()

    def end_all_after(self, last_round: int) -> dict[str, str]:
        """Let all running peers end after `last_round`; return the state digest that each reports."""
        living = [peer for peer in self.peers.values() if peer.family()]
        self._note_families()
        for peer in living:
            (peer.folder / "last_round").write_text(str(last_round))
            assert peer.process is not None
            peer.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + self.patience_seconds
        for peer in living:
            assert peer.process is not None
            code = peer.process.wait(timeout=max(deadline - time.monotonic(), 0.1))
            assert code == 0, f"{peer.name} ended with {code}\n{self.story()}"
        return {peer.name: peer.status.state_digest for peer in living if peer.status.role == "trainer"}

    def flip_a_bit(self, name: str) -> float:
        """Flip a bit in a peer's anchor, as bad memory would; return when."""
        peer = self._running(name)
        flipped = peer.folder / "flipped"
        flipped.unlink(missing_ok=True)
        assert peer.process is not None
        peer.process.send_signal(signal.SIGUSR2)
        self.wait("a flipped bit", flipped.exists)
        return time.time()

    def _running(self, name: str) -> PeerProcess:
        peer = self.peers[name]
        assert peer.process is not None, f"{name} was never started"
        assert peer.process.poll() is None, f"{name} is gone\n{self.story()}"
        return peer

    def _note_families(self) -> None:
        for peer in self.peers.values():
            peer.seen += peer.family()

    def _end_all(self) -> list[str]:
        """Kill only the peers, and check that everything they started ends by itself; return what had to be killed."""
        self._note_families()
        for peer in self.peers.values():
            if peer.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(peer.process.pid, signal.SIGKILL)
                peer.process.wait()
        seen = [process for peer in self.peers.values() for process in peer.seen]
        for process in seen:
            with contextlib.suppress(psutil.Error):
                process.resume()  # a frozen process cannot end
        _, alive = psutil.wait_procs(set(seen), timeout=10.0)
        left = []
        for process in alive:
            with contextlib.suppress(psutil.Error):
                left.append(" ".join(process.cmdline())[:120])
                process.kill()
        return left

    # -- the clock

    def round_at(self, seconds: float) -> int:
        return int((seconds - self.manifest.rounds.clock_start) // self.round_seconds)

    def begin(self, round_index: int) -> float:
        return self.manifest.rounds.clock_start + round_index * self.round_seconds

    def sleep_to(self, share: float) -> None:
        """Wait until this share of a round has passed."""
        now = time.time()
        at = self.begin(self.round_at(now)) + share * self.round_seconds
        time.sleep(at - now if at > now else at - now + self.round_seconds)

    def sleep_rounds(self, num_rounds: float) -> None:
        time.sleep(num_rounds * self.round_seconds)

    # -- waiting and reporting

    def rosters(self, name: str) -> tuple[Roster, ...]:
        """Return the rosters on a peer's disk, the newest last."""
        kept = RunFolder(self.peers[name].folder, self.manifest.digest()).read_rosters()
        return tuple(certified.roster for certified in kept)

    def wait(self, what: str, condition: Callable[[], Any], patience_seconds: float | None = None) -> None:
        """Wait until `condition` holds; a peer that meanwhile ends with an error fails the test at once."""
        patience_seconds = patience_seconds if patience_seconds is not None else self.patience_seconds
        end = time.monotonic() + patience_seconds
        while not condition():
            codes = {peer.name: peer.process.poll() for peer in self.peers.values() if peer.process is not None}
            failed = [name for name, code in codes.items() if code is not None and code > 0]
            assert not failed, f"{failed} ended with an error\n{self.story()}"
            assert time.monotonic() < end, f"waited {patience_seconds:.0f} s in vain for {what}\n{self.story()}"
            time.sleep(0.05)

    def wait_for_whole_round(
        self, names: Sequence[str], num_members: int, since: float, *, lasting: bool = False
    ) -> None:
        """Wait until all of `names` closed one round in which every member is in every entry.

        A peer that has just woken may still be left out of the next roster, because it had not been heard when that was
        voted on; `lasting` waits for two such rounds a cycle apart, which no earlier vote can undo.
        """
        apart = FRAGMENTS if lasting else 0

        def all_saw_it() -> bool:
            whole = [
                {closed.round for closed in self.peers[name].rounds(since) if closed.is_whole(num_members)}
                for name in names
            ]
            common = set.intersection(*whole)
            return any(number + apart in common for number in common)

        self.wait(f"a whole round of {num_members} at {', '.join(names)}", all_saw_it)

    def rounds_between(self, name: str, begin: float, end: float) -> Iterator[ClosedRound]:
        """Yield the rounds that are completely between two moments, as `name` closed them."""
        for closed in self.peers[name].rounds():
            if self.begin(closed.round) >= begin and self.begin(closed.round + 1) <= end:
                yield closed

    def story(self) -> str:
        """Return what all peers recorded, for debugging."""
        lines = []
        for peer in self.peers.values():
            for event in peer.events():
                place = (event.time - self.manifest.rounds.clock_start) / self.round_seconds
                figures = event.figures
                more = f" included {figures['num_included']}" if event.topic == "round" else ""
                more += f" of {figures['num_members']} members" if event.topic == "round" else ""
                lines.append((event.time, f"{place:7.2f} {peer.name:10} [{event.topic}] {event.text}{more}"))
        text = "\n".join(line for _, line in sorted(lines))
        outputs = "".join(
            f"\n-- {peer.name}: {log.read_text(errors='replace')[-2000:]}"
            for peer in self.peers.values()
            if (log := peer.folder / "output.log").exists() and log.stat().st_size
        )
        return text + outputs
