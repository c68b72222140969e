"""What a peer must remember across restarts, in `<state>/<run>/`: rosters, votes, good-bye, incarnation, addresses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from p2p_diloco.errors import FrameError, StateError
from p2p_diloco.ids import Digest, PeerId, format_peer_id, parse_peer_id
from p2p_diloco.protocol.ballot import BALLOTS_LAYOUT, NO_BALLOTS, Ballots
from p2p_diloco.protocol.roster import CERTIFIED_LAYOUT, GOODBYE_LAYOUT, CertifiedRoster, Goodbye
from p2p_diloco.protocol.wire import FrameReader, Layout, take_fields, to_bytes

_LENGTH_BYTES = 4


class RunFolder:
    """One peer's files of one run; every write is whole or not at all.

    Raises:
        StateError: the disk refuses; the text says what to do. Nothing agreed is lost with it.
    """

    def __init__(self, state_directory: Path, run: Digest) -> None:
        self.path = state_directory / run.hex()[:16]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _disk_error(self.path, error) from None

    def keep_ballots(self, ballots: Ballots) -> None:
        """Keep what this peer is bound to, before it says so."""
        self.write("ballots.bin", to_bytes(ballots, BALLOTS_LAYOUT))

    def keep_goodbye(self, goodbye: Goodbye) -> None:
        """Keep this incarnation's good-bye."""
        self.write("goodbye.bin", to_bytes(goodbye, GOODBYE_LAYOUT))

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Append a certified roster."""
        encoded = to_bytes(certified, CERTIFIED_LAYOUT)
        try:
            with (self.path / "rosters.bin").open("ab") as file:
                file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        except OSError as error:
            raise _disk_error(self.path, error) from None

    def recall_ballots(self) -> Ballots:
        """Return what this peer was bound to, or nothing."""
        fields = self._recall("ballots.bin", BALLOTS_LAYOUT)
        return Ballots(**fields) if fields is not None else NO_BALLOTS

    def recall_goodbye(self) -> Goodbye | None:
        """Return the last good-bye."""
        fields = self._recall("goodbye.bin", GOODBYE_LAYOUT)
        return Goodbye(**fields) if fields is not None else None

    def recall_rosters(self) -> tuple[CertifiedRoster, ...]:
        """Return all rosters kept, in the order in which they came; a torn last one, cut off by a crash, is dropped."""
        path = self.path / "rosters.bin"
        raw = path.read_bytes() if path.exists() else b""
        reader = FrameReader(raw)
        rosters = []
        while reader.remaining >= _LENGTH_BYTES:
            length = int.from_bytes(reader.take(_LENGTH_BYTES), "little")
            if length > reader.remaining:
                break
            try:
                rosters.append(CertifiedRoster(**take_fields(FrameReader(reader.take(length)), CERTIFIED_LAYOUT)))
            except FrameError:
                break
        return tuple(rosters)

    def next_incarnation(self) -> int:
        """Count this start and return its number, from 1."""
        raw = self.read("incarnation")
        incarnation = (int(raw) if raw is not None and raw.isdigit() else 0) + 1
        self.write("incarnation", str(incarnation).encode())
        return incarnation

    def keep_addresses(self, known: dict[PeerId, tuple[str, ...]]) -> None:
        """Keep where peers were reached, so that a restart needs no bootstrap."""
        document = {format_peer_id(peer): list(addresses) for peer, addresses in known.items()}
        self.write("peers.json", json.dumps(document, indent=1).encode())

    def recall_addresses(self) -> dict[PeerId, tuple[str, ...]]:
        """Return addresses of earlier starts; none when the file is missing or broken."""
        try:
            document = json.loads(self.read("peers.json") or b"{}")
            return {parse_peer_id(peer): tuple(map(str, addresses)) for peer, addresses in document.items()}
        except (ValueError, AttributeError):
            return {}

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None when there is none."""
        path = self.path / name
        return path.read_bytes() if path.exists() else None

    def write(self, name: str, content: bytes) -> None:
        """Put `content` under `name`, on the disk before this returns."""
        path = self.path / name
        part = path.with_name(f".{name}.part")
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            raise _disk_error(path, error) from None

    def _recall(self, name: str, layout: Layout) -> dict[str, Any] | None:
        raw = self.read(name)
        if raw is None:
            return None
        reader = FrameReader(raw)
        try:
            fields = take_fields(reader, layout)
            reader.expect_end()
        except FrameError as error:
            raise StateError(f"{self.path / name} is broken ({error}); move it away to start as a newcomer") from None
        return fields


def _disk_error(path: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write {path}: {error.strerror}; free some space, or choose another place with --state-directory"
    )
