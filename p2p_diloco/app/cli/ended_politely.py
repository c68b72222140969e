"""Signal handling for commands that start processes or write drafts, so that none is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_politely() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C inside the block, so that the caller can tidy up; nohup stays in force."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
