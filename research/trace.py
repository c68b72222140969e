"""Read the trace that an island has written, for replays and reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId
from p2p_diloco.storage.trace import TRACE_FILE


def chosen_spans(line: Mapping[str, Any]) -> frozenset[SpanId] | None:
    """Return the spans in a record of a contribution; None: all."""
    return frozenset(SpanId(line["fragment"], index) for index in line["only"]) if "only" in line else None


def read_trace(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a trace; an incomplete last line is skipped.

    Raises:
        StateError: there is no trace, or a line is not a valid record.
    """
    path = folder / TRACE_FILE
    try:
        lines = path.read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"cannot read {path} ({error}); was the peer started with keep_trace?") from None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "what" not in found:
            raise StateError(f"line {number} of {path} is not a trace record")
        yield found
