"""Read the events that a peer has written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from p2p_diloco.status.event_log import EVENTS_FILE, PeerEvent

MAX_LINE_CHARACTERS = 64 * 1024


def parse_event(line: str) -> PeerEvent | None:
    """Parse one line; return None if it is not a complete event."""
    if not line.strip() or len(line) > MAX_LINE_CHARACTERS:
        return None
    try:
        return _event_of(json.loads(line))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None


def read_events(folder: Path, *topics: str) -> tuple[PeerEvent, ...]:
    """Return the events in `folder`, oldest first; only those of `topics` if any are named."""
    return tuple(event for event in _events(folder / EVENTS_FILE) if not topics or event.topic in topics)


def _events(path: Path) -> Iterator[PeerEvent]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                event = parse_event(line)
                if event is not None:
                    yield event
    except OSError:
        return


def _event_of(document: Mapping[str, Any]) -> PeerEvent:
    figures = {str(name): value for name, value in document["figures"].items() if isinstance(value, int | float | str)}
    return PeerEvent(
        time=float(document["time"]), topic=str(document["topic"]), text=str(document["text"]), figures=figures
    )
