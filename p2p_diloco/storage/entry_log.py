"""Entries on disk, for peers that missed them and for this peer's restart: one file per height.

A file is a sequence of frames: length, sequence number and checksum, then either a message in its wire format, or a
marker that all earlier entries of a span are discarded. A torn end is truncated when the log is opened, and a frame
with a wrong checksum is skipped. Each span keeps the entries of its last heights, and a file is unlinked when no span
needs it. Files are by height, not by round: an entry may claim any round, but its height is one more than its parent's.

Waiting entries are written together: opening a file and checksumming an already hashed vector cost as much as writing
its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p_diloco.errors import FrameError, StateError
from p2p_diloco.ids import Digest, SpanId, sha256
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import decode_message, message_parts
from p2p_diloco.storage.whole_file import sync_file, write_at

_FRAME = struct.Struct("<IQ8s")
_Buffer = bytes | bytearray | memoryview
_GIVEN_UP = struct.Struct("<4sHI")
_GIVEN_UP_MARK = b"gone"
_FILE_NAME = re.compile(r"height-(\d{20})\.log", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The location of an entry."""

    height: int
    offset: int
    frame_bytes: int
    entry: Digest


class EntryLog:
    """Entries by span and parent. Thread-safe.

    Args:
        folder: created if it is missing.
        keep_cycles: number of entries to keep per span, including the latest; there is at most one per cycle.
        mends: truncate a torn end; do not use this on a peer that may be running, whose last write may be unfinished.
    Raises:
        StateError: the folder cannot be created or read.
    """

    def __init__(self, folder: Path, *, keep_cycles: int, mends: bool = True) -> None:
        self._folder = folder
        self._mends = mends
        self._keep_cycles = keep_cycles
        self._places: dict[SpanId, dict[Digest, _Place]] = {}
        self._ends: dict[int, int] = {}
        self.num_given_up = 0
        """Number of heights unlinked early because the disk was full."""
        self._checkpointed: dict[SpanId, int] = {}
        self._sequence = 0
        self._unsynced: set[int] = set()
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise StateError(f"cannot read {folder}: {error.strerror}; check the disk") from None

    # -- writing

    def keep(self, entries: Sequence[Entry]) -> None:
        """Append entries that are not stored yet. They survive a power failure after `sync`.

        If the disk is full, the lowest height is unlinked to make room, unless it is the height being written or holds
        an entry after the newest checkpoint, which a replay would need.

        Raises:
            StateError: the write failed; earlier entries are kept, and some of the new ones may be.
        """
        with self._lock:
            by_height: dict[int, list[Entry]] = {}
            # Write duplicates once; of two different entries with the same parent, the later one wins.
            for entry in {entry.digest(): entry for entry in entries}.values():
                places = self._places.get(entry.span, {})
                known = places.get(entry.parent)
                is_kept = known is not None and known.entry == entry.digest()
                if not is_kept and entry.height > self._top(entry.span) - self._keep_cycles:
                    by_height.setdefault(entry.height, []).append(entry)
            for height in sorted(by_height):
                self._keep_at(height, by_height[height])
            for span in {entry.span for entry in entries}:
                self._forget_below(span)
            if len(self._ends) > self._keep_cycles:
                self._unlink_unwanted()

    def _keep_at(self, height: int, entries: Sequence[Entry]) -> None:
        frames = [self._frame(message_parts(entry), _sum_of(entry)) for entry in entries]
        at = self._append(height, frames)
        for entry, frame in zip(entries, frames, strict=True):
            place = _Place(height=height, offset=at, frame_bytes=sum(map(len, frame)), entry=entry.digest())
            self._places.setdefault(entry.span, {})[entry.parent] = place
            at += place.frame_bytes

    def _top(self, span: SpanId) -> int:
        return max((place.height for place in self._places.get(span, {}).values()), default=0)

    def _forget_below(self, span: SpanId) -> None:
        lowest = self._top(span) - self._keep_cycles
        places = self._places.get(span, {})
        for parent in [parent for parent, place in places.items() if place.height <= lowest]:
            del places[parent]

    def _unlink_unwanted(self) -> None:
        """Unlink the files that no span needs; keep the newest, which may hold a discard marker."""
        wanted = {place.height for places in self._places.values() for place in places.values()}
        for height in self._ends.keys() - wanted - {self._newest()}:
            self._unlink(height)

    def give_up(self, span: SpanId) -> None:
        """Discard the stored entries of a span, also across restarts.

        Raises:
            StateError: the write failed; the entries are discarded only until a restart.
        """
        with self._lock:
            if self._places.pop(span, None) is not None:
                body = _GIVEN_UP.pack(_GIVEN_UP_MARK, span.fragment, span.index)
                self._append(self._newest(), [self._frame((body,), sha256(body))])

    def sync(self) -> None:
        """Sync all written entries to the disk.

        Raises:
            StateError: the sync failed.
        """
        with self._lock:
            waiting, self._unsynced = self._unsynced, set()
        for height in waiting:
            try:
                with contextlib.suppress(FileNotFoundError):  # unlinked meanwhile
                    sync_file(self._path(height))
            except OSError as error:
                raise _refused(self._path(height), error) from None

    def note_checkpoint(self, heights: Mapping[SpanId, int]) -> None:
        """Record the heights of the newest checkpoint: entries above them are not deleted to make room."""
        with self._lock:
            self._checkpointed = dict(heights)

    def make_room(self) -> bool:
        """Unlink the lowest height, unless it is the only one; return whether that freed anything."""
        with self._lock:
            return self._make_room()

    def drop_before_checkpoint(self) -> None:
        """Unlink the heights that a replay from the newest checkpoint does not need; none without a checkpoint."""
        with self._lock:
            while self._checkpointed and len(self._ends) > 1 and not self._is_needed(min(self._ends)):
                self._unlink(min(self._ends))

    def _make_room(self) -> bool:
        if len(self._ends) < 2:
            return False
        self._unlink(min(self._ends))
        self.num_given_up += 1
        return True

    def _frame(self, body: Sequence[_Buffer], what: Digest) -> tuple[_Buffer, ...]:
        """Return the next frame: its header, and the parts of its body, whose digest is `what`."""
        self._sequence += 1
        return _FRAME.pack(sum(map(len, body)), self._sequence, _checksum(self._sequence, what)), *body

    def _append(self, height: int, frames: Sequence[Sequence[_Buffer]]) -> int:
        """Write frames after the last complete one; return the offset of the first."""
        path, end = self._path(height), self._ends.get(height, 0)
        buffers = [part for frame in frames for part in frame]
        while True:
            try:
                write_at(path, end, buffers, is_end=True)
                break
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                lowest = min(self._ends, default=height)
                if not is_full or height <= lowest or self._is_needed(lowest) or not self._make_room():
                    raise _refused(path, error) from None
        self._ends[height] = end + sum(map(len, buffers))
        self._unsynced.add(height)
        return end

    def _is_needed(self, height: int) -> bool:
        """Return whether a replay from the newest checkpoint needs an entry of this height."""
        spans = [span for span, checkpointed in self._checkpointed.items() if height > checkpointed]
        return any(place.height == height for span in spans for place in self._places.get(span, {}).values())

    def _unlink(self, height: int) -> None:
        del self._ends[height]
        for kept in self._places.values():
            for parent in [parent for parent, place in kept.items() if place.height == height]:
                del kept[parent]
        with contextlib.suppress(OSError):
            self._path(height).unlink()

    # -- reading

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        """Return the entry of `span` that follows `parent`; None if it is not stored or damaged."""
        with self._lock:
            place = self._places.get(span, {}).get(parent)
        if place is None:
            return None
        try:
            with self._path(place.height).open("rb") as file:
                file.seek(place.offset)
                raw = file.read(place.frame_bytes)
        except OSError:
            return None
        entry = next((entry for _, sequence, entry, _ in _frames(raw) if sequence), None)
        return entry if entry is not None and entry.parent == parent else None

    def kept(self) -> Iterator[Entry]:
        """Yield all stored, intact entries, span by span."""
        with self._lock:
            wanted = [(span, parent) for span, places in self._places.items() for parent in places]
        for span, parent in wanted:
            entry = self.entry_after(span, parent)
            if entry is not None:
                yield entry

    def num_entries(self) -> int:
        with self._lock:
            return sum(map(len, self._places.values()))

    # -- opening

    def _open(self) -> None:
        found: list[tuple[int, SpanId, Digest | None, _Place | None]] = []
        for path in sorted(self._folder.iterdir()):
            match = _FILE_NAME.fullmatch(path.name)
            if match is not None:
                found += self._scan(path, int(match[1]))
        for sequence, span, parent, place in sorted(found, key=lambda each: each[0]):
            self._sequence = sequence
            if parent is None or place is None:
                self._places.pop(span, None)
            else:
                self._places.setdefault(span, {})[parent] = place
        for span in self._places:
            self._forget_below(span)

    def _scan(self, path: Path, height: int) -> Iterator[tuple[int, SpanId, Digest | None, _Place | None]]:
        """Yield the index record of each complete frame of a file; truncate what follows the last one."""
        raw = path.read_bytes()
        whole_bytes = 0
        for offset, sequence, entry, frame_bytes in _frames(raw):
            whole_bytes = offset + frame_bytes
            if entry is not None:
                place = _Place(height=height, offset=offset, frame_bytes=frame_bytes, entry=entry.digest())
                yield sequence, entry.span, entry.parent, place
            elif sequence:
                _, fragment, index = _GIVEN_UP.unpack_from(raw, offset + _FRAME.size)
                yield sequence, SpanId(fragment, index), None, None
        self._ends[height] = whole_bytes
        if self._mends and whole_bytes < len(raw):
            os.truncate(path, whole_bytes)

    def _newest(self) -> int:
        return max(self._ends, default=0)

    def _path(self, height: int) -> Path:
        return self._folder / f"height-{height:020d}.log"


def _frames(raw: bytes) -> Iterator[tuple[int, int, Entry | None, int]]:
    """Yield offset, sequence number, entry and length of each frame.

    If the checksum is wrong or the kind unknown, the sequence number is 0 and the entry None. An entry of None with
    another number is a discard marker.
    """
    at = 0
    while at + _FRAME.size <= len(raw):
        length, sequence, checksum = _FRAME.unpack_from(raw, at)
        begin = at + _FRAME.size
        if begin + length > len(raw):
            return
        body = raw[begin : begin + length]
        is_given_up = length == _GIVEN_UP.size and body.startswith(_GIVEN_UP_MARK)
        entry = _entry_in(body) if not is_given_up else None
        what = sha256(body) if is_given_up else _sum_of(entry) if entry is not None else None
        is_sound = what is not None and checksum == _checksum(sequence, what)
        yield at, sequence if is_sound else 0, entry if is_sound else None, _FRAME.size + length
        at = begin + length


def _entry_in(body: bytes) -> Entry | None:
    try:
        message = decode_message(body)
    except FrameError:
        return None
    return message if isinstance(message, Entry) else None


def _sum_of(entry: Entry) -> Digest:
    """Return a digest over a whole entry. Its vector is hashed only once for all uses."""
    return sha256(entry.digest(), entry.signature)


def _checksum(sequence: int, what: Digest) -> bytes:
    """Return the checksum that detects torn and damaged frames; forged entries are detected when they are applied."""
    return sha256(sequence.to_bytes(8, "little"), what)[:8]


def _refused(path: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write {path}: {error.strerror}; stored entries are still served, but new ones are not stored until "
        "there is space"
    )
