"""Requests of a machine's owner to the peer that runs there, through the files in its state directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.guest.owner_files import CONTROL_FILE, Control, new_number, read_control, write_control
from p2p_diloco.status.status_file import PeerStatus, read_status

ANSWER_SECONDS = 5.0
LOOK_SECONDS = 0.05
_SILENT_SECONDS = 60.0
"""Age of a status beyond which its process id may have been given to another process."""


def running_peer(folder: Path) -> PeerStatus:
    """Return the status of the peer that runs in `folder`.

    Raises:
        ConfigError: there is none.
    """
    status = find_running(folder)
    if status is None:
        raise ConfigError(
            f"no peer is running with the state directory {folder}; name the directory of one that is with "
            "--state-directory"
        )
    return status


def find_running(folder: Path) -> PeerStatus | None:
    """Return the status of the peer that runs in `folder`; None if there is none."""
    status = read_status(folder)
    return status if status is not None and is_running(status) and status.phase != "finished" else None


def is_running(status: PeerStatus) -> bool:
    """Return whether the process that wrote `status` is alive; False for an old status."""
    return status.pid > 0 and time.time() - status.updated <= _SILENT_SECONDS and is_alive(status.pid)


def kept_control(folder: Path) -> Control:
    """Return what was asked for before, without a leave."""
    return replace(read_control(folder), leaves=0)


def ask_to_leave(folder: Path) -> int:
    """Ask the peer to leave the run, and return the id of its process.

    Raises:
        ConfigError: no peer is running there.
        StateError: the request cannot be written.
    """
    pid = running_peer(folder).pid
    write_control(folder, replace(kept_control(folder), number=new_number(), leaves=pid))
    return pid


def ask_peer(folder: Path, change: Callable[[Control], Control]) -> PeerStatus:
    """Change what is asked for, and return the status in which the peer says that it obeys.

    Raises:
        ConfigError: no peer is running there.
        StateError: it does not obey in time.
    """
    running_peer(folder)
    number = new_number()
    write_control(folder, replace(change(kept_control(folder)), number=number))
    give_up_at = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < give_up_at:
        status = read_status(folder)
        if status is not None and status.control == number:
            return status
        time.sleep(LOOK_SECONDS)
    raise StateError(
        f"the peer has not answered within {ANSWER_SECONDS:g} s; the request stays in {folder / CONTROL_FILE} and is "
        "obeyed as soon as the peer looks; see events.jsonl there for what it does"
    )


def is_alive(pid: int) -> bool:
    """Return whether a process is alive."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
