"""Sensors of the machine: power and disk, and the priority of this process. Replace them in tests."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_TASKS = "/proc/self/task"
"""Lists the threads of this process, on Linux."""


def on_battery() -> bool:
    """Return whether the machine runs on battery power; False if it has none, or the system does not say."""
    ask = getattr(psutil, "sensors_battery", None)  # missing on some systems
    battery = ask() if ask is not None else None
    return battery is not None and battery.power_plugged is False


def folder_bytes(folder: Path) -> int:
    """Return the bytes that the files below `folder` take on the disk."""
    return sum(_blocks(path) for path in _files(folder))


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of `folder` for this user."""
    return shutil.disk_usage(folder).free


def lower_priority(niceness: int) -> str:
    """Set the priority of this process and those that it has started; return what went wrong, or nothing.

    On Linux each thread has a priority of its own; new threads and processes inherit it.
    """
    try:
        for thread in _threads():
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.nice(niceness)
    except (OSError, psutil.Error):
        return f"cannot set the priority to {niceness}: only an administrator may raise it again; restart the peer"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensors:
    """The functions of this module, replaceable."""

    on_battery: Callable[[], bool] = on_battery
    folder_bytes: Callable[[Path], int] = folder_bytes
    free_bytes: Callable[[Path], int] = free_bytes
    lower_priority: Callable[[int], str] = lower_priority


def _threads() -> list[int]:
    return [int(name) for name in os.listdir(_TASKS)] if os.path.isdir(_TASKS) else [0]


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)


def _blocks(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:  # removed meanwhile
        return 0
    return int(getattr(found, "st_blocks", 0)) * 512 or found.st_size
