"""`p2p-diloco status`: the latest status of the peer in a state directory, as a table or as JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from rich.console import Console

from p2p_diloco.config.own_command import join_line
from p2p_diloco.errors import ConfigError
from p2p_diloco.status.status_file import STATUS_FILE, PeerStatus, read_status, status_document
from p2p_diloco.status.table import LOG_WIDTH, status_table
from p2p_diloco.wording import format_seconds

_SILENT_SECONDS = 60.0
LATE_SECONDS = 10.0


def show_status(folder: Path, *, as_json: bool) -> int:
    """Print the status in `folder`.

    Raises:
        ConfigError: no peer has run there, or its file cannot be parsed.
    """
    status = read_status(folder)
    if status is None:
        if folder.is_file():
            raise ConfigError(f"{folder} is a file; name the folder of a peer's state with --state-directory")
        path = folder / STATUS_FILE
        if path.exists():
            raise ConfigError(f"{path} cannot be read; was it written by another version?")
        raise ConfigError(f"no peer has run with the state directory {folder}; name another with --state-directory")
    age_seconds = max(0.0, time.time() - status.updated)
    running = is_running(status, age_seconds)
    if as_json:
        document = {"running": running, "seconds_since_update": round(age_seconds, 3), **status_document(status)}
        print(json.dumps(document, indent=2))
        return 0
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(status_table(status))
    if not running:
        console.print(f"this peer is not running; its latest status is from {format_seconds(age_seconds)} ago")
    elif age_seconds > LATE_SECONDS:
        since = time.strftime("%H:%M:%S", time.localtime(status.updated))
        console.print(
            f"this peer has written no status for {format_seconds(age_seconds)}, since {since}: its process is "
            "stopped, or its machine or disk is too busy"
        )
    if status.invite:
        console.print(join_line(status.invite, own_model=status.own_model), soft_wrap=True)
    return 0


def is_running(status: PeerStatus, age_seconds: float) -> bool:
    """Return whether the process that wrote `status` is alive; False for an old status, whose pid may be reused."""
    if status.pid <= 0 or age_seconds > _SILENT_SECONDS:
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
