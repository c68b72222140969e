"""The exports of an archivist: a folder for each exported cycle, of which the newest are kept.

The archivist lists what it has written in a file of its own and removes nothing else. An export is listed before it is
begun and appears under its name only once it is whole; what a crash leaves of it is removed at the next start. A file
in each export holds a random word, so that a folder of the same name that another archivist has written is left alone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from p2p_diloco.config.new_file import write_new_folder
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.storage.whole_file import replace_file

EXPORTS_FILE = "exports.json"
WORD_FILE = ".archivist"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """The exports of an archivist.

    Attributes:
        folder: where they are written, each in a folder of its own.
        every: cycles from one export to the next.
        keep: number of exports to keep.
    """

    folder: Path
    every: int
    keep: int


def due_cycle(num_cycles: int, every: int, newest: int) -> int | None:
    """Return the cycle that is to be exported: the latest multiple of `every`, unless it was exported.

    Archivists that export equally often thus export the same cycles.

    Args:
        num_cycles: number of cycles whose end all peers agree on.
        every: cycles from one export to the next.
        newest: number of cycles in the newest export; 0 if there is none.
    """
    latest = num_cycles - num_cycles % every
    return latest if latest > newest else None


def surplus(cycles: Sequence[int], keep: int) -> list[int]:
    """Return the cycles whose exports are removed so that the `keep` newest remain."""
    return sorted(cycles)[:-keep]


def export_name(cycle: int) -> str:
    """Return the name of an export's folder, such that names sort like cycles."""
    return f"cycle-{cycle:09d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An export that this peer has begun or written: its folder, the names of its files, its cycle, and its word."""

    path: Path
    files: tuple[str, ...]
    cycle: int
    word: str

    def is_there(self) -> bool:
        """Return whether the folder holds this export, and not one of another archivist."""
        try:
            return (self.path / WORD_FILE).read_text() == self.word
        except (OSError, ValueError):
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    """The exports of an archivist, as it remembers them across restarts.

    Attributes:
        newest: number of cycles in the newest export; 0 if there is none. It may have been moved away since.
        state: digest of the state in that export.
        kept: exports that this peer has written and not removed, in the order in which they were written.
    """

    newest: int = 0
    state: str = ""
    kept: tuple[Export, ...] = ()


class ExportFolder:
    """The exports of one archivist. Not thread-safe.

    Args:
        listing: file that lists them, which belongs to this peer alone.
        owner: word in the names of unfinished folders, which tells them from those of other archivists.
    Raises:
        StateError: the listing cannot be read.
    """

    def __init__(self, folder: Path, listing: Path, *, keep: int, owner: str) -> None:
        self._folder = folder.absolute()
        self._listing = listing
        self._keep = keep
        self._owner = owner
        self._exports = _read(listing)

    @property
    def newest(self) -> int:
        """Number of cycles in the newest export; 0 if there is none."""
        return self._exports.newest

    @property
    def state(self) -> str:
        """Digest of the state in the newest export."""
        return self._exports.state

    def path(self, cycle: int) -> Path:
        return self._folder / export_name(cycle)

    def tidy(self) -> tuple[str, ...]:
        """Remove what a crash has left, and exports that are too many now; return a sentence about each that stays.

        Raises:
            StateError: the listing cannot be written.
        """
        for export in self._exports.kept:
            shutil.rmtree(self._draft(export.path), ignore_errors=True)
        present = tuple(export for export in self._exports.kept if export.is_there())
        newest = max((self._exports.newest, *(export.cycle for export in present)))
        tidied = replace(self._exports, newest=newest, kept=present)
        if tidied != self._exports:  # a full disk must not keep the peer from starting
            self._write(tidied)
        return self._remove_old()

    def write(
        self,
        cycle: int,
        files: Mapping[str, bytes],
        state: str,
        check: Callable[[Path], None] = lambda draft: None,
    ) -> tuple[str, ...]:
        """Write an export, then remove the oldest ones; return a sentence about each that stays.

        Args:
            check: called with the folder before it appears under its name; an error keeps it from appearing.
        Raises:
            StateError: the export cannot be written, or its folder exists; earlier exports are unchanged.
        """
        before, path, word = self._exports, self.path(cycle), secrets.token_hex(16)
        files = {**files, WORD_FILE: word.encode()}
        export = Export(path=path, files=tuple(files), cycle=cycle, word=word)
        try:
            self._write(replace(before, kept=(*before.kept, export)))
            write_new_folder(path, files, draft_name=self._draft(path).name, check=check)
        except (ConfigError, StateError) as error:
            with contextlib.suppress(StateError):
                self._write(before)
            raise StateError(str(error)) from None
        # Even if this cannot be written, `tidy` finds the export at the next start.
        with contextlib.suppress(StateError):
            self._write(Exports(newest=cycle, state=state, kept=(*before.kept, export)))
        return self._remove_old()

    def _remove_old(self) -> tuple[str, ...]:
        old = set(surplus([export.cycle for export in self._exports.kept], self._keep))
        sentences = [self._remove(export) for export in self._exports.kept if export.cycle in old]
        if old:
            kept = tuple(export for export in self._exports.kept if export.cycle not in old)
            with contextlib.suppress(StateError):
                self._write(replace(self._exports, kept=kept))
        return tuple(filter(None, sentences))

    def _remove(self, export: Export) -> str:
        """Remove an export; return a sentence if it stays."""
        draft = self._draft(export.path)
        if not export.is_there():
            return ""  # the user has moved it away
        try:
            foreign = sorted({found.name for found in export.path.iterdir()} - set(export.files))
            if foreign:
                return f"{export.path} stays, because {foreign[0]} in it is not part of the export"
            export.path.rename(draft)  # so that a crash leaves no part of it under its name
            shutil.rmtree(draft)
        except OSError as error:
            left = draft if draft.exists() else export.path
            return f"cannot remove {left}: {error.strerror or error}; remove it by hand"
        return ""

    def _draft(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{self._owner}")

    def _write(self, exports: Exports) -> None:
        """Remember `exports`, also across restarts."""
        self._exports = exports
        content = json.dumps(asdict(exports), indent=2, default=str).encode()
        try:
            replace_file(self._listing, content)
        except OSError as error:
            raise StateError(f"cannot write {self._listing}: {error.strerror}; check the disk") from None


def _read(listing: Path) -> Exports:
    try:
        document: dict[str, Any] = json.loads(listing.read_bytes())
        kept = tuple(
            Export(
                path=Path(one["path"]),
                files=tuple(map(str, one["files"])),
                cycle=int(one["cycle"]),
                word=str(one["word"]),
            )
            for one in document["kept"]
        )
        return Exports(newest=int(document["newest"]), state=str(document["state"]), kept=kept)
    except FileNotFoundError:
        return Exports()
    except OSError as error:
        raise StateError(f"cannot read {listing}: {error.strerror}; give this user read access") from None
    except (ValueError, LookupError, TypeError) as error:
        raise StateError(
            f"{listing} is broken ({type(error).__name__}); move it away: the exports that it lists then stay for good"
        ) from None
