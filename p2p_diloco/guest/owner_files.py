"""Files of a machine's owner in the state directory: `control.json` with requests, and `traffic.json` with a ledger.

The requests are for the peer that runs there, which looks at them several times a second. A file needs no port and no
server, survives restarts, and only who may write the state directory may write it. It holds all that is asked for at
present, not a list of commands, so the last writer wins. The peer answers in its status with the `number` of the file
that it obeys. The ledger holds the bytes that a peer has sent and received this calendar month, across restarts.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from p2p_diloco.config.settings import LIMITS
from p2p_diloco.errors import StateError
from p2p_diloco.storage.whole_file import replace_file

CONTROL_FILE, TRAFFIC_FILE = "control.json", "traffic.json"
MOST_FILE_BYTES = 16 * 1024
FIRST_MONTH = "2026-01"
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Everything that is asked for at present.

    Attributes:
        number: differs in every file, for the answer.
        pauses: whether the owner has asked for a pause.
        pauses_until: its end, Unix seconds; None: until the owner resumes.
        leaves: process id of the peer that is asked to leave; 0: none.
        limits: changed limits by key, as texts; the peer of the next start reads them, too.
    """

    number: str = ""
    pauses: bool = False
    pauses_until: float | None = None
    leaves: int = 0
    limits: Mapping[str, str] = field(default_factory=dict)


def new_number() -> str:
    """Return a number that no earlier file has."""
    return secrets.token_hex(8)


def read_control(folder: Path) -> Control:
    """Return what is asked for in `folder`; nothing if there is no file.

    Raises:
        StateError: the file is not one of ours; it is not changed.
    """
    path = folder / CONTROL_FILE
    try:
        return _control_of(_read(path))
    except FileNotFoundError:
        return Control()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; check the folder and the disk") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is broken ({error}) and is ignored; remove it, then repeat the command") from None


def write_control(folder: Path, control: Control) -> None:
    """Replace the file atomically.

    Raises:
        StateError: the folder is read-only or missing, or the disk is full; the old file is kept.
    """
    path = folder / CONTROL_FILE
    try:
        _write(path, asdict(control))
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}; check the folder and the disk") from None


def _control_of(document: Mapping[str, Any]) -> Control:
    until, pauses, leaves = document["pauses_until"], document["pauses"], document["leaves"]
    if type(pauses) is not bool or type(leaves) is not int:
        raise ValueError("pauses or leaves has another type")
    if until is not None and not (isinstance(until, float | int) and math.isfinite(until)):
        raise ValueError("pauses_until is not a time")
    limits = {str(key): str(text) for key, text in document["limits"].items()}
    if not limits.keys() <= set(LIMITS) or any(len(text) > _MOST_TEXT for text in limits.values()):
        raise ValueError("limits has an unknown key, or a text that is too long")
    return Control(
        number=str(document["number"])[:_MOST_TEXT],
        pauses=pauses,
        pauses_until=until,
        leaves=leaves,
        limits=limits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthTraffic:
    """Bytes on the wire in one calendar month, such as 2026-11."""

    month: str = ""
    sent: float = 0.0
    received: float = 0.0

    @property
    def total(self) -> float:
        return self.sent + self.received

    def plus(self, month: str, sent: float, received: float) -> MonthTraffic:
        """Return the traffic after more bytes in `month`; a new month begins at zero.

        A clock that is not set yet, after a boot without a network, shows a month before this program existed. Its
        bytes count for the month that was saved.
        """
        if month != self.month and (month >= FIRST_MONTH or not self.month):
            return MonthTraffic(month=month, sent=sent, received=received)
        return replace(self, sent=self.sent + sent, received=self.received + received)


def read_traffic(folder: Path) -> MonthTraffic | None:
    """Return the traffic saved in `folder`: none if there is no file, None if it is broken."""
    try:
        document = _read(folder / TRAFFIC_FILE)
        sent, received = float(document["sent"]), float(document["received"])
        if not (0.0 <= sent < float("inf") and 0.0 <= received < float("inf")):
            return None
        return MonthTraffic(month=str(document["month"]), sent=sent, received=received)
    except FileNotFoundError:
        return MonthTraffic()
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def write_traffic(folder: Path, traffic: MonthTraffic) -> None:
    """Save the traffic atomically and durably; a full disk must not stop the peer."""
    with contextlib.suppress(OSError):
        _write(folder / TRAFFIC_FILE, asdict(traffic))


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise ValueError(f"more than {MOST_FILE_BYTES} bytes")
    return json.loads(content)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    content = json.dumps(document).encode("ascii") + b"\n"
    replace_file(path, content)
