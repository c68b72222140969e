"""A peer's persistent state of one run, in `<state>/<run>/`: rosters, votes, incarnation, addresses."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from shlex import quote

from p2p_diloco.config.invite import parse_peer_address
from p2p_diloco.errors import ConfigError, FrameError, StateError
from p2p_diloco.ids import Digest, PeerId, format_peer_id
from p2p_diloco.node.ports import PeerMemory
from p2p_diloco.protocol.engine import SavedState
from p2p_diloco.protocol.membership.histories import Activity
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS, Ballots
from p2p_diloco.protocol.wire.frames import FrameReader, Value, take_value, to_bytes
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.storage.whole_file import SpareDescriptor, append_to_file, replace_file

BOOTSTRAP_FOLDER, ARCHIVE_FOLDER = "bootstrap", "archive"
"""Folders in a trainer's state directory for the peers of the same machine that do not train."""
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer-files.json"
ROSTERS_FILE = "rosters.bin"
CUT_ROSTERS_FILE = "rosters.cut"
"""Collects the unreadable ends cut off from the roster file."""
BALLOTS_FILE = "ballots.bin"
ACTIVITY_FILE = "liveliness.bin"
INCARNATION_FILE = "incarnation"
ADDRESSES_FILE = "peers.json"
CLOCK_FILE = "clock"
LATEST_INCARNATION = (1 << 32) - (1 << 20)
"""Maximum incarnation taken from a wall clock: a roster has 32 bits for it, which leaves a million further starts."""
MOST_OFFSET_SECONDS = 1e10
"""Maximum offset between a wall clock and the run's time, about three hundred years."""

MOST_ADDRESSES_KEPT = 48
"""Number of peers whose addresses are saved; this many can be asked within a minute."""

MOST_TRIES = 8
"""Maximum tries of an essential write while this process has no file descriptors left."""

_LENGTH_BYTES = 4


class RunFolder:
    """One peer's files of one run; every write is atomic.

    Args:
        least_incarnation: minimum incarnation of the next start. A folder that is new or restored from a backup does
            not know the number of starts, so this is taken from the clock.
    Raises:
        StateError: a file cannot be read or written; the text says what to do. No agreed state is lost.
    """

    def __init__(self, state_directory: Path, run: Digest, *, least_incarnation: int = 1) -> None:
        self.path = run_folder(state_directory, run)
        self._least_incarnation = least_incarnation
        self._make_room: Callable[[], bool] = lambda: False
        self._spare = SpareDescriptor()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _disk_error(self.path, error) from None

    def make_room_with(self, make_room: Callable[[], bool]) -> None:
        """Free space for essential files by this function when the disk is full; it returns whether it could."""
        self._make_room = make_room

    def keep_ballots(self, ballots: Ballots) -> None:
        """Save this peer's ballots; call this before they are sent."""
        self.write(BALLOTS_FILE, to_bytes(ballots))

    def keep_roster(self, certified: CertifiedRoster) -> None:
        encoded = to_bytes(certified)
        path = self.path / ROSTERS_FILE
        self._insist(path, lambda: append_to_file(path, len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded))

    def keep_activity(self, activity: Activity) -> None:
        """Save the activity record if possible; a full disk must not stop the peer."""
        record = to_bytes(activity)
        with contextlib.suppress(OSError):
            replace_file(self.path / ACTIVITY_FILE, record)

    def recall(self) -> SavedState:
        """Return everything that a restarted peer must know about its earlier starts."""
        activity = None
        with contextlib.suppress(StateError):  # it matters only until eight cycles after the last entry
            activity = self._recall(ACTIVITY_FILE, Activity)
        return SavedState(rosters=self.recall_rosters(), ballots=self.recall_ballots(), activity=activity)

    def recall_ballots(self) -> Ballots:
        return self._recall(BALLOTS_FILE, Ballots) or NO_BALLOTS

    def recall_rosters(self) -> tuple[CertifiedRoster, ...]:
        """Return all saved rosters, in order of arrival.

        An unreadable end, such as one torn by a crash, is moved to a separate file, so that later rosters follow the
        last complete one.
        """
        raw = self.read(ROSTERS_FILE) or b""
        rosters, whole_bytes = _whole_rosters(raw)
        if whole_bytes < len(raw):
            self.write(CUT_ROSTERS_FILE, (self.read(CUT_ROSTERS_FILE) or b"") + raw[whole_bytes:])
            self.write(ROSTERS_FILE, raw[:whole_bytes])
        return rosters

    def read_rosters(self) -> tuple[CertifiedRoster, ...]:
        """Return the same for a peer that may be running, without writing anything."""
        return _whole_rosters(self.read(ROSTERS_FILE) or b"")[0]

    def next_incarnation(self) -> int:
        """Count this start and return its number, at least the minimum.

        Raises:
            StateError: the file is broken. Other peers would ignore a peer that restarts the count.
        """
        path, raw = self.path / INCARNATION_FILE, self.read(INCARNATION_FILE)
        if raw is not None and not raw.strip().isdigit():
            # Seconds since 1970 exceed any earlier count, which began at 1 or at such a time.
            raise StateError(
                f"{path} is broken; write a number greater than the old one: date +%s > {quote(str(path))}"
            )
        incarnation = max(int(raw or 0) + 1, min(self._least_incarnation, LATEST_INCARNATION))
        self.write(INCARNATION_FILE, str(incarnation).encode())
        return incarnation

    def keep_addresses(self, known: dict[PeerId, tuple[str, ...]]) -> None:
        """Save the addresses of reached peers, best first, so that a restart needs no bootstrap and no valid invite."""
        kept = islice(known.items(), MOST_ADDRESSES_KEPT)
        document = {format_peer_id(peer): list(addresses) for peer, addresses in kept}
        self.write(ADDRESSES_FILE, json.dumps(document, indent=1).encode())

    def recall_addresses(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the saved addresses in order; unreadable ones are skipped."""
        try:
            document = json.loads(self.read(ADDRESSES_FILE) or b"{}")
        except (ValueError, RecursionError):
            return {}
        known: dict[PeerId, tuple[str, ...]] = {}
        for listed in document.values() if isinstance(document, dict) else ():
            for text in listed if isinstance(listed, list) else ():
                with contextlib.suppress(ConfigError):
                    address, peer = parse_peer_address(str(text))
                    known[peer] = (*known.get(peer, ()), address)
        return dict(islice(known.items(), MOST_ADDRESSES_KEPT))

    def keep_clock_offset(self, seconds: float) -> None:
        """Save swarm time minus wall time durably; a failed write is ignored."""
        with contextlib.suppress(OSError):
            replace_file(self.path / CLOCK_FILE, f"{seconds:.3f}\n".encode("ascii"))

    def recall_clock_offset(self) -> float:
        """Return the saved offset; 0 if it cannot be read or is implausible."""
        with contextlib.suppress(ValueError, OSError):
            seconds = float((self.path / CLOCK_FILE).read_text(encoding="ascii"))
            if abs(seconds) <= MOST_OFFSET_SECONDS:
                return seconds
        return 0.0

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if it does not exist."""
        path = self.path / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"cannot read {path}: {error.strerror}; check the disk") from None

    def write(self, name: str, content: bytes) -> None:
        """Write `content` to the file `name`; it is on the disk when this returns."""
        path = self.path / name
        self._insist(path, lambda: replace_file(path, content))

    def _insist(self, path: Path, write: Callable[[], None]) -> None:
        """Write; retry on a full disk as long as room can be made, and without descriptors with the spare one."""
        tries = 0
        try:
            while True:
                try:
                    return write()
                except OSError as error:
                    tries += 1
                    if error.errno in (errno.EMFILE, errno.ENFILE) and tries <= MOST_TRIES:
                        self._spare.release()
                    elif error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room():
                        raise _disk_error(path, error) from None
        finally:
            self._spare.take()

    def _recall(self, name: str, kind: type[Value]) -> Value | None:
        raw = self.read(name)
        if raw is None:
            return None
        reader = FrameReader(raw)
        try:
            value = take_value(reader, kind)
            reader.expect_end()
        except FrameError as error:
            raise StateError(f"{self.path / name} is broken ({error}); move it away to start as a newcomer") from None
        return value


class WatchedMemory:
    """A `PeerMemory` that reports failed writes, besides raising.

    The transport swallows exceptions of its listener, because one peer's message must not stop everything. Without the
    report, the peer would continue without being able to vote, for no visible reason.

    Args:
        memory: the memory to write to.
        died: called once for each failed write.
        soon: runs functions on the writer thread, one at a time.
    """

    def __init__(
        self, memory: PeerMemory, died: Callable[[StateError], None], *, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._memory = memory
        self._died = died
        self._soon = soon

    def keep_ballots(self, ballots: Ballots) -> None:
        self._watch(lambda: self._memory.keep_ballots(ballots))

    def keep_roster(self, certified: CertifiedRoster) -> None:
        self._watch(lambda: self._memory.keep_roster(certified))

    def keep_activity(self, activity: Activity) -> None:
        """Schedule saving the activity record: it changes every round, and correctness does not depend on it."""
        self._soon(lambda: self._memory.keep_activity(activity))

    def _watch(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except StateError as error:
            self._died(error)
            raise


def run_folder(state_directory: Path, run: Digest) -> Path:
    """Return the folder of one run in a state directory."""
    return state_directory / run.hex()[:16]


def _disk_error(path: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write {path}: {error.strerror}; free some space, or choose another place with --state-directory"
    )


def _whole_rosters(raw: bytes) -> tuple[tuple[CertifiedRoster, ...], int]:
    """Return the rosters up to the first unreadable one, and their length in bytes."""
    reader = FrameReader(raw)
    rosters, whole_bytes = [], 0
    while reader.remaining >= _LENGTH_BYTES:
        length = int.from_bytes(reader.take(_LENGTH_BYTES), "little")
        if length > reader.remaining:
            break
        record = FrameReader(reader.take(length))
        try:
            certified = take_value(record, CertifiedRoster)
            record.expect_end()
        except FrameError:
            break
        rosters.append(certified)
        whole_bytes = len(raw) - reader.remaining
    return tuple(rosters), whole_bytes
