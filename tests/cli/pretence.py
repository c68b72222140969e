"""Fake demo peers in virtual time that leave the same files as real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from p2p_diloco.cli.child_processes import OUTPUT_FILE
from p2p_diloco.cli.demo_plan import BOOTSTRAP
from p2p_diloco.status.event_log import PeerEvent, append_event
from p2p_diloco.status.status_file import ByteCounts, PeerStatus, read_status, write_status

INVITE = "p2pdiloco://" + "ab" * 32
READY_SECONDS = 10.0


class VirtualClock:
    """A clock that advances when somebody sleeps."""

    def __init__(self, start: float) -> None:
        self._now = start

    def time(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class PretendedChildren:
    """Peers that become ready, train and finish by the clock alone.

    `broken` names peers that exit at once; `stuck` those that never finish; `deaf` those that never become ready;
    `failing` those that exit with an error.
    """

    def __init__(
        self,
        root: Path,
        clock: VirtualClock,
        *,
        end: float,
        broken: Sequence[str] = (),
        stuck: Sequence[str] = (),
        deaf: Sequence[str] = (),
        failing: Sequence[str] = (),
        says: str = f'/usr/bin/python3 -m p2p_diloco join "{INVITE}"\n',
    ) -> None:
        self._root, self._clock, self._end = root, clock, end
        self._broken, self._stuck, self._deaf, self._says = broken, stuck, deaf, says
        self._failing = failing
        self._started: dict[str, float] = {}
        self._killed: set[str] = set()
        self._finished: set[str] = set()
        self.arguments: dict[str, list[str]] = {}

    def folder(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, name: str, arguments: Sequence[str]) -> None:
        self.arguments[name] = list(arguments)
        self._started[name] = self._clock.time()
        text = "trouble is coming\nTraceback\n" if name in self._broken else self._says
        (self.folder(name) / OUTPUT_FILE).write_text(text)
        write_status(self.folder(name), PeerStatus(role="bootstrap" if name == BOOTSTRAP else "trainer"))

    def kill(self, name: str) -> None:
        self._killed.add(name)

    def exit_code(self, name: str) -> int | None:
        if name in self._killed:
            return -9
        if name in self._broken:
            return 3
        if name == BOOTSTRAP:
            return None
        self._live(name)
        if name not in self._finished:
            return None
        return 4 if name in self._failing else 0

    def _live(self, name: str) -> None:
        now, folder = self._clock.time(), self.folder(name)
        status = read_status(folder)
        assert status is not None
        if name not in self._deaf and not status.ready and now >= self._started[name] + READY_SECONDS:
            status = replace(
                status,
                ready=True,
                phase="training",
                updated=now,
                parameters=1_000,
                participation=0.95,
                tokens_per_second=100.0,
            )
            write_status(folder, status)
            append_event(folder, PeerEvent(time=now, topic="ready", text="ready"))
            self._measure(name, now, 5.5, tokens=0)
        if now >= self._end + 3 and name not in self._finished and name not in self._stuck:
            self._finished.add(name)
            self._measure(name, now, 2.0, tokens=9_000)
            end = replace(
                status,
                phase="finished",
                state_digest="cd" * 32,
                updated=now,
                inner_steps=90,
                tokens=9_000,
                rounds_closed=20,
                vector_cycles=10.0,
                bytes_sent=ByteCounts(vectors=8_000, control=900, transfer=70),
            )
            write_status(folder, end)

    def _measure(self, name: str, now: float, loss: float, *, tokens: int) -> None:
        figures = {"round": 1, "tokens": tokens, "anchor_loss": loss, "local_loss": loss - 0.1}
        append_event(self.folder(name), PeerEvent(time=now, topic="evaluation", text="loss", figures=figures))
