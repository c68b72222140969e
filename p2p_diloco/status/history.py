"""`history.sqlite`: the series that a page draws, kept for months in a few megabytes.

A peer adds a point every ten seconds and a row for each round. Points are thinned with age, so that the curve of a
month is there after a restart. Only the peer of the state directory writes the file; others read it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from p2p_diloco.errors import StateError
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import PeerStatus

HISTORY_FILE = "history.sqlite"
POINT_SECONDS = 10
SILENT_SECONDS = 10.0
"""Time since the last heartbeat beyond which a member's rate no longer counts."""
MOST_ROUNDS = 20_000
"""Rounds of a run that are kept: 1 MB."""
THINNED = ((2 * 3600, 60), (2 * 86400, 600), (60 * 86400, 3600))
"""Age in seconds, and the seconds per point beyond it. A year has 17,000 points, 3 MB."""
MOST_BYTES = 50_000_000
_LONGEST_GAP = 60.0
"""Seconds between two points beyond which no tokens are counted, because this machine did not follow the run."""
_THIN_EVERY = 60
_PAGE_BYTES = 4096
_FORMAT = 1
_BROKEN_FILE = "history.broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Figures at one time; None where they are not known.

    Attributes:
        at: Unix seconds.
        tokens, tokens_per_second, loss: of this peer.
        swarm_tokens: tokens of all members while this machine followed the run, by the rates that each claims.
        swarm_rate: tokens per second of all members, likewise.
        sent, received: bytes of this peer since its start.
    """

    at: int
    round: int
    tokens: int
    tokens_per_second: float
    swarm_tokens: float
    swarm_rate: float
    loss: float | None
    anchor_loss: float | None
    members: int
    ready: int
    participation: float | None
    sent: int
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One closed round.

    Attributes:
        spans, entries: number of its spans, and of those that got an entry.
        included, possible: contributions in these entries, and those that all members together could have made.
        degraded: rosters of the run that had been certified without a majority by then.
    """

    round: int
    spans: int
    entries: int
    included: int
    possible: int
    degraded: int


_Row = TypeVar("_Row", Point, RoundRow)
_TABLES: dict[type, tuple[str, tuple[str, ...]]] = {
    Point: ("points", tuple(slot.name for slot in fields(Point))),
    RoundRow: ("rounds", tuple(slot.name for slot in fields(RoundRow))),
}


class HistoryWriter:
    """Writes the history of one state directory. It is used by one thread at a time.

    A file that is damaged, or of another version, is set aside, and a new one begins.

    Args:
        folder: state directory; the file is created with the first point.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status = PeerStatus()
        self._last: Point | None = None
        self._num_points = 0

    def status(self, status: PeerStatus) -> None:
        """Add a point, if the last one is old enough.

        Raises:
            StateError: the file cannot be written; earlier points are kept.
        """
        if not status.run:
            return
        if status.run != self._status.run:
            self._last = next(iter(read_points(self._folder, status.run)[-1:]), None)
        self._status = status
        since = None if self._last is None else status.updated - self._last.at
        if since is not None and 0.0 <= since < POINT_SECONDS:
            return
        self._last = _point(status, self._last, since)
        with self._writing() as base:
            _insert(base, status.run, self._last)
            if self._num_points % _THIN_EVERY == 0:
                _thin(base, self._last.at)
        self._num_points += 1

    def event(self, event: PeerEvent) -> None:
        """Add the row of a round that closed; other events are ignored.

        Raises:
            StateError: the file cannot be written; earlier rows are kept.
        """
        if event.topic != "round" or not self._status.run:
            return
        figures = {name: int(value) for name, value in event.figures.items()}
        row = RoundRow(
            round=figures["round"],
            spans=figures["num_spans"],
            entries=figures["num_entries"],
            included=figures["num_included"],
            possible=max(figures["num_ready"] * figures["num_spans"], figures["num_included"]),
            degraded=self._status.degraded_rosters,
        )
        with self._writing() as base:
            _insert(base, self._status.run, row)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        path = self._folder / HISTORY_FILE
        try:
            try:
                base = _open(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # locked, read-only or full; the file is sound
                    raise
                path.replace(self._folder / _BROKEN_FILE)
                base = _open(path)
            with closing(base), base:
                yield base
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"cannot write {path}: {error}; check the folder and the disk") from None


def read_points(folder: Path, run: str) -> tuple[Point, ...]:
    """Return the points of a run, oldest first; none if there is no file, or it cannot be read."""
    return _read(folder, Point, "WHERE run = ? ORDER BY at", (run,))


def read_rounds(folder: Path, run: str, most: int) -> tuple[RoundRow, ...]:
    """Return the last rounds of a run, oldest first; likewise."""
    return _read(folder, RoundRow, "WHERE run = ? ORDER BY round DESC LIMIT ?", (run, most))[::-1]


def _point(status: PeerStatus, last: Point | None, since: float | None) -> Point:
    rates = [status.tokens_per_second] if status.role == "trainer" else []
    for line in status.peers:
        if line.trains and line.seconds_since_heard is not None and line.seconds_since_heard <= SILENT_SECONDS:
            rates.append(line.tokens_per_second or 0.0)
    rate, before = sum(rates), 0.0 if last is None else last.swarm_tokens
    added = rate * since if since is not None and 0.0 < since <= _LONGEST_GAP else 0.0
    return Point(
        at=int(status.updated),
        round=status.round,
        tokens=status.tokens,
        tokens_per_second=status.tokens_per_second,
        swarm_tokens=max(before + added, float(status.tokens)),
        swarm_rate=rate,
        loss=status.loss,
        anchor_loss=status.anchor_loss,
        members=status.num_members,
        ready=status.num_ready,
        participation=status.participation,
        sent=status.bytes_sent.total,
        received=status.bytes_received.total,
    )


def _open(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(path, timeout=1.0)
    try:
        (version,) = base.execute("PRAGMA user_version").fetchone()
        if version not in (0, _FORMAT):
            raise sqlite3.DatabaseError("another version")
        # No sync: losing the last points in a power failure does no harm.
        base.executescript(f"PRAGMA synchronous = OFF; PRAGMA max_page_count = {MOST_BYTES // _PAGE_BYTES};")
        if version == 0:
            for key, (table, names) in zip(("at", "round"), _TABLES.values(), strict=True):
                base.execute(f"CREATE TABLE {table} (run, {', '.join(names)}, PRIMARY KEY (run, {key})) WITHOUT ROWID")
            base.execute(f"PRAGMA user_version = {_FORMAT}")
    except BaseException:
        base.close()
        raise
    return base


def _insert(base: sqlite3.Connection, run: str, row: Point | RoundRow) -> None:
    table, names = _TABLES[type(row)]
    places = ", ".join("?" * (len(names) + 1))
    base.execute(f"INSERT OR REPLACE INTO {table} VALUES ({places})", (run, *astuple(row)))


def _thin(base: sqlite3.Connection, now: int) -> None:
    for age, seconds in THINNED:
        old = now - age
        base.execute(
            "DELETE FROM points WHERE at < ? AND (run, at) NOT IN "
            "(SELECT run, max(at) FROM points WHERE at < ? GROUP BY run, at / ?)",
            (old, old, seconds),
        )
    base.execute(
        "DELETE FROM rounds WHERE round <= (SELECT max(round) FROM rounds AS newest WHERE newest.run = rounds.run) - ?",
        (MOST_ROUNDS,),
    )


def _read(folder: Path, kind: type[_Row], where: str, values: tuple[Any, ...]) -> tuple[_Row, ...]:
    path = folder / HISTORY_FILE
    if not path.is_file():
        return ()
    table, names = _TABLES[kind]
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as base:
            rows = base.execute(f"SELECT {', '.join(names)} FROM {table} {where}", values).fetchall()
        return tuple(kind(**dict(zip(names, row, strict=True))) for row in rows)
    except (sqlite3.Error, TypeError):
        return ()
