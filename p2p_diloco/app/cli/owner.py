"""`p2p-diloco status`, `pause`, `resume`, `limits` and `leave`: what a machine's owner asks of the peer on it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from p2p_diloco.app.cli.status_table import StatusTable, line_key, shows_table, status_line, status_lines
from p2p_diloco.config.settings import LIMITS, PeerSettings
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.guest.owner_files import (
    CONTROL_FILE,
    MonthTraffic,
    new_number,
    read_control,
    read_traffic,
    write_control,
)
from p2p_diloco.guest.pause_rule import month_of
from p2p_diloco.guest.sensors import folder_bytes, free_bytes
from p2p_diloco.rate import format_rate, parse_seconds
from p2p_diloco.status.owner_requests import (
    LOOK_SECONDS,
    ask_peer,
    ask_to_leave,
    find_running,
    is_alive,
    is_running,
    kept_control,
)
from p2p_diloco.status.status_file import STATUS_FILE, PeerStatus, read_status, status_document
from p2p_diloco.wording import format_bytes, format_seconds, join_line

LEAVE_SECONDS = 60.0
"""Leaving takes ten seconds and the time for a checkpoint."""
LATE_SECONDS = 10.0
WATCH_SECONDS = 1.0


def show_status(folder: Path, *, as_json: bool) -> int:
    """Print the status in `folder`.

    Raises:
        ConfigError: no peer has run there, or its file cannot be parsed.
    """
    status = latest_status(folder)
    if as_json:
        print(json.dumps(_document(status), indent=2))
        return 0
    console = _console()
    if shows_table(console):
        console.print(StatusTable(status, console.height))
    else:
        console.print("\n".join(status_lines(status)), soft_wrap=True)
    if note := _age_note(status):
        console.print(note, soft_wrap=not shows_table(console))
    if status.invite:
        console.print(join_line(status.invite, own_model=status.own_model), soft_wrap=True)
    return 0


def watch_status(folder: Path, *, as_json: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show the status in `folder` until Ctrl-C: in place on a terminal, else a line or JSON document for each change.

    Args:
        sleep: waits so many seconds; KeyboardInterrupt ends it.
    Raises:
        ConfigError: no peer has run there, or its file cannot be parsed.
    """
    status, console = latest_status(folder), _console()
    live = Live(console=console, auto_refresh=False) if shows_table(console) and not as_json else None
    shown: object = None
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            status = read_status(folder) or status  # the last one, if the file is being replaced or is gone
            running, note = is_running(status), _age_note(status)
            if live is not None:
                live.update(Group(StatusTable(status, console.height), *([note] if note else [])), refresh=True)
            elif as_json and (status, running) != shown:
                shown = status, running
                print(json.dumps(_document(status)), flush=True)
            elif not as_json and (line_key(status), bool(note)) != shown:
                shown = line_key(status), bool(note)
                print(note or status_line(status), flush=True)
            sleep(WATCH_SECONDS)
    return 0


def latest_status(folder: Path) -> PeerStatus:
    """Return the status in `folder`.

    Raises:
        ConfigError: no peer has run there, or its file cannot be parsed.
    """
    status = read_status(folder)
    if status is not None:
        return status
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; name the folder of a peer's state with --state-directory")
    path = folder / STATUS_FILE
    if path.exists():
        raise ConfigError(f"{path} cannot be read; was it written by another version?")
    raise ConfigError(f"no peer has run with the state directory {folder}; name another with --state-directory")


def _document(status: PeerStatus) -> dict[str, Any]:
    age_seconds = round(_age_seconds(status), 3)
    return {"running": is_running(status), "seconds_since_update": age_seconds, **status_document(status)}


def _age_seconds(status: PeerStatus) -> float:
    return max(0.0, time.time() - status.updated)


def _age_note(status: PeerStatus) -> str:
    """Return why a status is old; empty if it is not."""
    age_seconds = _age_seconds(status)
    if not is_running(status):
        return f"this peer is not running; its latest status is from {format_seconds(age_seconds)} ago"
    if age_seconds <= LATE_SECONDS:
        return ""
    since = time.strftime("%H:%M:%S", time.localtime(status.updated))
    return (
        f"this peer has written no status for {format_seconds(age_seconds)}, since {since}: its process is "
        "stopped, or its machine or disk is too busy"
    )


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def pause_peer(folder: Path, duration: str | None) -> int:
    """Pause the peer of a state directory.

    Raises:
        ConfigError: no peer is running there, or the duration is invalid.
        StateError: the peer does not answer.
    """
    seconds = None if duration is None else parse_seconds(duration, "--for")
    until = None if seconds is None else time.time() + seconds
    status = ask_peer(folder, lambda control: replace(control, pauses=True, pauses_until=until))
    offline = status.pause_reason == "monthly quota"
    print(f"{status.paused}; {'it is offline' if offline else 'it follows the run, and makes no steps'}")
    return 0


def resume_peer(folder: Path) -> int:
    """End a pause that the owner has asked for; others last."""
    status = ask_peer(folder, lambda control: replace(control, pauses=False, pauses_until=None))
    print(f"still {status.paused}" if status.paused else "running again")
    return 0


def leave_peer(folder: Path) -> int:
    """Ask the peer to leave the run, and wait until its process has ended."""
    began = time.monotonic()
    pid = ask_to_leave(folder)
    while time.monotonic() < began + LEAVE_SECONDS:
        if not is_alive(pid):
            print(f"the peer has left after {time.monotonic() - began:.1f} s; its state is kept in {folder}")
            return 0
        status = read_status(folder)
        if status is not None and status.pid == pid and status.own_model and status.phase == "finished":
            print(f"the peer has left after {time.monotonic() - began:.1f} s; the program that it ran in goes on")
            return 0
        time.sleep(LOOK_SECONDS)
    raise StateError(
        f"process {pid} has not ended within {LEAVE_SECONDS:g} s; it may still be writing a checkpoint; "
        f"if it hangs, end it with kill {pid}"
    )


def limit_peer(folder: Path, changes: Mapping[str, str], *, as_json: bool) -> int:
    """Change limits, and show those in force and what is used.

    Raises:
        ConfigError: a value is invalid, or no peer has run with this state directory.
        StateError: the peer does not answer.
    """
    if not folder.is_dir():
        raise ConfigError(f"no peer has run with the state directory {folder}; name another with --state-directory")
    if changes:
        PeerSettings().with_limits(changes, "the command line")
    running = find_running(folder)
    if changes and running is not None:
        running = ask_peer(folder, lambda control: replace(control, limits={**control.limits, **changes}))
    elif changes:
        control = kept_control(folder)
        write_control(folder, replace(control, number=new_number(), limits={**control.limits, **changes}))
    limits = _kept_limits(folder) if running is None else dict(running.limits)
    traffic = read_traffic(folder) or MonthTraffic()
    month = month_of(datetime.now().astimezone())
    if running is not None and running.month == month:
        traffic = MonthTraffic(month=month, sent=running.month_sent, received=running.month_received)
    elif traffic.month != month:
        traffic = MonthTraffic(month=month)
    used = {
        "month_sent": round(traffic.sent),
        "month_received": round(traffic.received),
        "disk_used": folder_bytes(folder),
        "disk_free": free_bytes(folder),
    }
    if as_json:
        state = {"running": running is not None, "paused": "" if running is None else running.paused}
        print(json.dumps({**state, "limits": limits, "month": month, **used}, indent=2))
        return 0
    if running is None:
        print("not running; these limits apply at the next start, unless its flags differ")
    else:
        print(running.paused or "running")
    settings = PeerSettings().with_limits(limits, CONTROL_FILE)
    for key in LIMITS:
        print(f"  {key.replace('_', '-'):14} {_shown(key, getattr(settings, key))}")
    quota = "" if settings.monthly_quota is None else f", {format_bytes(traffic.total)} of the quota"
    print(f"used in {month}: {format_bytes(traffic.sent)} sent, {format_bytes(traffic.received)} received{quota}")
    print(f"disk: {format_bytes(used['disk_used'])} in {folder}, {format_bytes(used['disk_free'])} free")
    return 0


def _shown(key: str, value: object) -> str:
    if value is None:
        return "none"
    if key in ("max_upload", "max_download"):
        return format_rate(float(str(value)))
    return format_bytes(float(str(value))) if key in ("monthly_quota", "disk_cap", "disk_free") else str(value)


def _kept_limits(folder: Path) -> dict[str, str]:
    return PeerSettings().with_limits(read_control(folder).limits, str(folder / CONTROL_FILE)).limit_texts()
