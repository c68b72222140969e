"""Ask the machine's owner for a monthly quota before a peer takes part in a run: once, and only at a terminal."""

from __future__ import annotations

import math
import select
import sys
from collections.abc import Callable

from p2p_diloco.config.settings import NO_LIMIT, PeerSettings
from p2p_diloco.errors import ConfigError

LOOK_SECONDS = 0.2
SPARE = 1.1
"""The suggested quota, as a multiple of what the run needs at full rate, if that is modest."""
MOST_SUGGESTED_GB = 500.0
"""Largest quota that Enter grants, so that nobody gives away a home's allowance for the month with one key."""


class QuotaQuestion:
    """Asks with the terminal's own input, and gives up when the peer is asked to stop.

    Args:
        show: prints a line.
        has_stopped: returns whether the peer was asked to stop.
        read_line: returns a line of input, or None while there is none; None instead if there is no terminal.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        has_stopped: Callable[[], bool],
        read_line: Callable[[], str | None] | None,
    ) -> None:
        self._show = show
        self._has_stopped = has_stopped
        self._read_line = read_line

    def ask(self, sentence: str, month_bytes: float) -> str:
        """Return the answer as a text for `monthly_quota`; empty if there was none.

        Args:
            sentence: the traffic of the run.
            month_bytes: bytes that it needs in a month at full rate.
        """
        if self._read_line is None:
            self._show(f"{sentence}; limit a month with --monthly-quota 500GB")
            return ""
        default = suggest_quota(month_bytes)
        self._show(f"{sentence}. How much may this machine send and receive in a calendar month?")
        lasts = MOST_SUGGESTED_GB * 1e9 / max(month_bytes, 1.0)
        pause = f", which lasts {30 * lasts:.0f} days; then it pauses until the next month" if lasts < 1.0 else ""
        self._show(f"an amount such as 500GB, {NO_LIMIT} for no limit, or Enter for {default}{pause}:")
        while True:
            line = self._wait_for_line()
            if line is None:
                return ""
            answer = line.strip() or default
            try:
                PeerSettings().with_limits({"monthly_quota": answer}, "the answer")
            except ConfigError as error:
                self._show(f"{error}:")
                continue
            return answer

    def _wait_for_line(self) -> str | None:
        assert self._read_line is not None
        while not self._has_stopped():
            line = self._read_line()
            if line is not None:
                return line
        return None


def suggest_quota(month_bytes: float) -> str:
    """Return a round amount above what the run needs, such as 200GB; at least 1GB and at most what a home can spare."""
    gigabytes = min(max(SPARE * month_bytes / 1e9, 1.0), MOST_SUGGESTED_GB)
    unit = 10.0 ** (math.floor(math.log10(gigabytes)) - 1)
    return f"{math.ceil(gigabytes / unit) * unit:.6g}GB" if gigabytes > 10.0 else f"{math.ceil(gigabytes)}GB"


def line_from_terminal() -> Callable[[], str | None] | None:
    """Return a function that reads a line if one is there, after a short wait; None if nobody sits at a terminal."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        return None

    def read_line() -> str | None:
        is_ready, _, _ = select.select([sys.stdin], [], [], LOOK_SECONDS)
        return sys.stdin.readline() if is_ready else None

    return read_line
