"""Disks that can fail: real files in a temporary folder, under a layer that tracks what was synced.

The shipped storage code runs unchanged, on real files. While a `DiskRack` is installed, it intercepts file operations
on paths below its root: it records what was synced and refuses writes to a full disk, and does nothing else. A power
cut discards unsynced data, or part of it. A snapshot restores an old state.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class SimulatedDisk:
    """The disk of one machine.

    Attributes:
        path: its root folder, where the machine keeps its state.
        is_full: whether every write is refused.
        write_seconds: duration of disk work that runs in the background.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_full = False
        self.write_seconds = 0.0
        self.synced: dict[int, int] = {}
        """Number of synced bytes of each file, by inode."""
        self.unsynced_names: dict[Path, bytes | None] = {}
        """Names changed since their folder was synced, with the previous content; None if the name was new."""
        path.mkdir(parents=True, exist_ok=True)

    def wipe(self) -> None:
        """Delete all files."""
        shutil.rmtree(self.path)
        self.path.mkdir()
        self.synced.clear()
        self.unsynced_names.clear()

    def snapshot(self) -> dict[Path, bytes]:
        """Return the content of all files."""
        return {path.relative_to(self.path): path.read_bytes() for path in _files_in(self.path)}

    def restore(self, files: dict[Path, bytes]) -> None:
        """Replace all files with those of a snapshot."""
        self.wipe()
        for name, content in files.items():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            self.synced[target.stat().st_ino] = len(content)

    def cut_power(self, rng: random.Random) -> int:
        """Lose unsynced data: names may revert, and files are cut at the synced length or somewhere after it.

        Returns:
            Number of files that lost something.
        """
        num_lost = 0
        for path, before in sorted(self.unsynced_names.items()):
            if rng.random() < 0.5:
                continue
            num_lost += 1
            if before is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(before)
                self.synced[path.stat().st_ino] = len(before)
        self.unsynced_names.clear()
        for path in _files_in(self.path):
            status = path.stat()
            safe = min(self.synced.get(status.st_ino, 0), status.st_size)
            if safe == status.st_size:
                continue
            num_lost += 1
            kept = rng.choice([safe, rng.randint(safe, status.st_size)])
            os.truncate(path, kept)
            if kept > safe and rng.random() < 0.3:
                with path.open("r+b") as file:  # the new length reached the disk, the bytes did not
                    file.seek(safe)
                    file.write(bytes(kept - safe))
            self.synced[status.st_ino] = kept
        return num_lost


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class DiskRack:
    """All disks of a simulation, below one folder, in memory if possible. A context manager; not thread-safe."""

    def __init__(self) -> None:
        place = Path("/dev/shm")  # an in-memory file system, where there is one
        is_writable = place.is_dir() and os.access(place, os.W_OK)
        self.root = Path(tempfile.mkdtemp(prefix="p2p-diloco-", dir=place if is_writable else None)).resolve()
        self._disks: dict[str, SimulatedDisk] = {}
        self._prefix = str(self.root) + os.sep
        self._paths: dict[int, Path] = {}
        self._installed: list[tuple[Any, str, Any]] = []

    def disk(self, name: str) -> SimulatedDisk:
        """Return the disk of a machine; the first call creates it."""
        if name not in self._disks:
            self._disks[name] = SimulatedDisk(self.root / name)
        return self._disks[name]

    def __enter__(self) -> DiskRack:
        self._replace(os, "open", self._open_descriptor(os.open))
        self._replace(os, "fsync", self._fsync(os.fsync))
        self._replace(os, "replace", self._rename(os.replace))
        self._replace(io, "open", self._open_file(io.open))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in reversed(self._installed):
            setattr(module, name, original)
        self._installed.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Bypass the layer inside the block, so that the simulation itself can change files."""
        prefix, self._prefix = self._prefix, "\0"
        try:
            yield
        finally:
            self._prefix = prefix

    def _replace(self, module: Any, name: str, wrapper: Any) -> None:
        self._installed.append((module, name, getattr(module, name)))
        setattr(module, name, wrapper)

    def _disk_of(self, path: Any) -> SimulatedDisk | None:
        if isinstance(path, int):
            return None
        text = os.fspath(path)
        if not isinstance(text, str) or not text.startswith(self._prefix):
            return None
        return self._disks.get(text[len(self._prefix) :].split(os.sep, 1)[0])

    def _refuse_if_full(self, disk: SimulatedDisk | None, path: Any) -> None:
        if disk is not None and disk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))

    def _open_descriptor(self, original: Any) -> Any:
        def open_descriptor(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
            disk = self._disk_of(path)
            if flags & _WRITE_FLAGS:
                self._refuse_if_full(disk, path)
            descriptor: int = original(path, flags, mode, **more)
            if disk is not None:
                self._paths[descriptor] = Path(path)
            return descriptor

        return open_descriptor

    def _open_file(self, original: Any) -> Any:
        def open_file(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            disk = self._disk_of(file)
            if any(letter in mode for letter in "wax+"):
                self._refuse_if_full(disk, file)
            opened = original(file, mode, *args, **more)
            if disk is not None:
                self._paths[opened.fileno()] = Path(file)
            return opened

        return open_file

    def _fsync(self, original: Any) -> Any:
        def fsync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            path = self._paths.get(number)
            disk = self._disk_of(path) if path is not None else None
            if disk is None or path is None:
                original(descriptor)
            elif path.is_dir():
                for name in [name for name in disk.unsynced_names if name.parent == path]:
                    del disk.unsynced_names[name]
            else:
                status = os.fstat(number)
                disk.synced[status.st_ino] = status.st_size

        return fsync

    def _rename(self, original: Any) -> Any:
        def rename(source: Any, target: Any, **more: Any) -> None:
            disk = self._disk_of(target)
            if disk is not None and Path(target) not in disk.unsynced_names:
                try:
                    with builtins.open(target, "rb", buffering=0) as file:
                        before = file.read()
                except FileNotFoundError:
                    before = None
                disk.unsynced_names[Path(target)] = before
            original(source, target, **more)

        return rename
