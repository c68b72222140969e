"""A trace of what happened, in order, for people who investigate a violated invariant.

It costs nothing unless requested: a seed that violates an invariant is run again with a trace.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.messages import Message, Ping, Pong, decode_message
from p2p_diloco.span_log import SpanHead

LINES_KEPT = 20_000
LINES_SHOWN = 60


class Trace:
    """The last lines of a simulation, each with its time, its machine and a keyword."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, str, str]] = deque(maxlen=LINES_KEPT)
        self.names: dict[bytes, str] = {}

    def add(self, now: float, machine: str, word: str, text: str) -> None:
        """Add a line."""
        self._lines.append((now, machine, word, text))

    def frame(self, now: float, sender: bytes, to: bytes, frame: bytes) -> None:
        """Add a line about a received message; heartbeats and pings are left out, since they would hide all others."""
        whom, who = self.names.get(to, "?"), self.names.get(sender, "?")
        try:
            message: Message = decode_message(frame)
        except FrameError as error:
            self.add(now, whom, "from", f"{who}: a bad frame: {error}")
            return
        if not isinstance(message, Heartbeat | Ping | Pong):
            self.add(now, whom, "from", f"{who}: {describe(message, self.names)}")

    def error(self, now: float, error: BaseException) -> None:
        """Add the traceback of an error."""
        for line in traceback.format_exception(error):
            self.add(now, "", "error", line.rstrip())

    def last(self, machines: Iterable[str] = (), count: int = LINES_SHOWN) -> list[str]:
        """Return the last lines about these machines or no machine, in order; of all machines if none is named."""
        wanted = set(machines)
        found = [line for line in self._lines if not wanted or line[1] in wanted or not line[1]]
        return [f"{now:9.3f}  {name:<5} {word:<10} {text}" for now, name, word, text in found[-count:]]


def describe(value: object, names: Mapping[bytes, str]) -> str:
    """Return a message in one line: digests cut short, peers by name, vectors by length."""
    parts = [
        f"{slot.name}={_short(getattr(value, slot.name), names)}"
        for slot in fields(value)  # type: ignore[arg-type]  # every message is a dataclass
        if slot.name not in ("run", "signature", "votes", "goodbyes")
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _short(value: object, names: Mapping[bytes, str]) -> str:
    if isinstance(value, memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, bytes):
        return names.get(value) or (value.hex()[:6] if len(value) == 32 else f"{len(value)} bytes")
    if isinstance(value, SpanId):
        return f"{value.fragment}.{value.index}"
    if isinstance(value, SpanHead):
        return f"{value.digest.hex()[:6]}@{value.height}"
    if isinstance(value, tuple):
        shown = ", ".join(_short(item, names) for item in value[:8])
        return f"({shown}{', …' if len(value) > 8 else ''})"
    if hasattr(value, "__dataclass_fields__"):
        return describe(value, names)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
