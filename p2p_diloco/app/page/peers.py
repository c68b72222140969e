"""The peers that a page shows: their files, read again only when they have changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from p2p_diloco.app.page.facts import STRIP_ROUNDS, PeerView
from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, format_peer_id
from p2p_diloco.status.event_log import EVENTS_FILE, PeerEvent
from p2p_diloco.status.history import Point, RoundRow, read_points, read_rounds
from p2p_diloco.status.owner_requests import is_running
from p2p_diloco.status.status_file import STATUS_FILE, PeerStatus, read_status
from p2p_diloco.storage.member_files import MemberRecord, read_members
from p2p_diloco.storage.run_folder import run_folder

READ_EVENT_BYTES = 256 * 1024
"""The end of the log of events that is read, however long the log is."""
HISTORY_SECONDS = 10.0


class WatchedPeer:
    """One state directory.

    Args:
        folder: state directory; it may be missing, and appear later.
        unix_seconds: this machine's clock.
    """

    def __init__(self, folder: Path, *, unix_seconds: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._unix_seconds = unix_seconds
        self._stamp: tuple[int, int] | None = None
        self._status = PeerStatus()
        self._history: tuple[Sequence[Point], Sequence[RoundRow]] = (), ()
        self._members: Mapping[str, MemberRecord] = {}
        self._history_at = float("-inf")

    def stamp(self) -> tuple[int, int] | None:
        """Return what differs after each change of the status; None without one."""
        try:
            found = (self.folder / STATUS_FILE).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def view(self) -> PeerView:
        """Return the peer as its files show it. A file that cannot be read leaves what was read before."""
        now, stamp = self._unix_seconds(), self.stamp()
        if stamp != self._stamp:
            self._status = read_status(self.folder) or self._status
            self._stamp = stamp
        if not 0.0 <= now - self._history_at < HISTORY_SECONDS:
            run = self._status.run
            self._history = read_points(self.folder, run), read_rounds(self.folder, run, STRIP_ROUNDS)
            self._members = read_known_members(self.folder, run)
            self._history_at = now if run else float("-inf")
        points, rounds = self._history
        return PeerView(
            status=self._status,
            points=points,
            rounds=rounds,
            events=read_last_events(self.folder),
            members=self._members,
            is_running=is_running(self._status),
            now=now,
        )


def read_known_members(folder: Path, run: str) -> dict[str, MemberRecord]:
    """Return who is and was in a run, by id; nobody if that is not known."""
    try:
        records = read_members(run_folder(folder, Digest(bytes.fromhex(run)))).records if run else ()
    except (StateError, ValueError):
        return {}
    return {format_peer_id(record.peer): record for record in records}


def read_last_events(folder: Path) -> list[PeerEvent]:
    """Return the events at the end of the log; lines that are cut off or broken are left out."""
    try:
        with (folder / EVENTS_FILE).open("rb") as file:
            start = max(file.seek(0, 2) - READ_EVENT_BYTES, 0)
            file.seek(start)
            lines = file.read(READ_EVENT_BYTES).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[1:] if start else lines:
        try:
            document = json.loads(line)
            at, topic, text = float(document["time"]), str(document["topic"]), str(document["text"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        found.append(PeerEvent(time=at, topic=topic, text=text))
    return found
