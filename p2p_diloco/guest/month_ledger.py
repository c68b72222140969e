"""The bytes that a peer has sent and received this calendar month, kept in its state directory across restarts."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from p2p_diloco.storage.whole_file import replace_file

TRAFFIC_FILE = "traffic.json"
MOST_FILE_BYTES = 4096
FIRST_MONTH = "2026-01"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthTraffic:
    """Bytes on the wire in one calendar month, such as 2026-11."""

    month: str = ""
    sent: float = 0.0
    received: float = 0.0

    @property
    def total(self) -> float:
        """Bytes both ways."""
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
        with (folder / TRAFFIC_FILE).open("rb") as file:
            document = json.loads(file.read(MOST_FILE_BYTES))
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
    text = json.dumps(asdict(traffic)) + "\n"
    with contextlib.suppress(OSError):
        replace_file(folder / TRAFFIC_FILE, text.encode("ascii"))
