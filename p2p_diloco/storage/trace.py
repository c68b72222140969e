"""The trace: what an island did and after which step, line by line, so that a replay can repeat it.

It is off by default (`keep_trace`). Each line is written at once: a killed process loses at most the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, SpanId

TRACE_FILE = "trace.jsonl"


class Trace:
    """Appends to a file in `folder`; every call raises StateError if the write fails."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / TRACE_FILE

    def began(self, position: int) -> None:
        """Record that an island starts empty, at this position of its stream of windows."""
        self._write("began", position=position)

    def loaded(self, heads: Mapping[SpanId, Digest], kept: str | None = None) -> None:
        """Record θ := φ at these chain digests; the optimiser state labelled `kept` was restored."""
        inner = {} if kept is None else {"kept": kept}
        self._write("loaded", heads=[[*span, digest.hex()] for span, digest in sorted(heads.items())], **inner)

    def batch(self, steps: int, windows: int) -> None:
        """Record that a step takes that many windows from now on, after `steps` steps."""
        self._write("batch", steps=steps, windows=windows)

    def kept(self, steps: int, label: str) -> None:
        """Record that the optimiser's state was saved after `steps` steps."""
        self._write("kept", steps=steps, label=label)

    def contributed(
        self,
        steps: int,
        round_index: int,
        fragment: int,
        chosen: frozenset[SpanId] | None = None,
        lengths: Mapping[str, float] | None = None,
    ) -> None:
        """Record a contribution after `steps` steps, of the `chosen` spans or of all, and its lengths, for people."""
        only: dict[str, Any] = {"only": sorted(span.index for span in chosen)} if chosen is not None else {}
        self._write("contributed", steps=steps, round=round_index, fragment=fragment, **only, **(lengths or {}))

    def absorbed(self, steps: int, span: SpanId, entry: Digest, own_included: bool) -> None:
        self._write("absorbed", steps=steps, span=[*span], entry=entry.hex(), own=own_included)

    def took(self, steps: int, span: SpanId, head: Digest) -> None:
        """Record that a span was replaced by one at this chain digest."""
        self._write("took", steps=steps, span=[*span], head=head.hex())

    def _write(self, what: str, **figures: Any) -> None:
        try:
            with self._path.open("a", encoding="ascii") as file:
                file.write(json.dumps({"what": what, **figures}, separators=(",", ":")) + "\n")
        except OSError as error:
            text = f"cannot write {self._path}: {error.strerror}; free some space or leave keep_trace out"
            raise StateError(text) from None
