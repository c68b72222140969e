"""Being told to end, for commands that have started processes: nothing may be left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_politely() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C inside the block, so that whoever has started something can end it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
