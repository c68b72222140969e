"""The interval at which a peer reads the directory: every second at first, rarely once nothing is missing."""

from __future__ import annotations

LOOK_SECONDS = 1.0
CALM_LOOK_SECONDS = 5.0
CALM_AFTER_LOOKS = 30
CONTENT_LOOK_SECONDS = 60.0
"""Longest pause. Among a thousand peers a look reads about two megabytes, most of them already known."""


class LookPace:
    """Decides when the next look is due. Time is an argument, in seconds of any steady clock.

    The first looks are `LOOK_SECONDS` apart, which sets how fast a swarm forms. Then pauses grow from
    `CALM_LOOK_SECONDS` to `CONTENT_LOOK_SECONDS`, and start over after every `hurry`.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._looked_at = float("-inf")
        self._pause = CALM_LOOK_SECONDS

    def turn_seconds(self) -> float:
        """Return the seconds until the caller asks again; in each such turn it also dials and hangs up."""
        return LOOK_SECONDS if self._looks < CALM_AFTER_LOOKS else CALM_LOOK_SECONDS

    def is_due(self, now: float) -> bool:
        """Return whether to look now."""
        return self._looks < CALM_AFTER_LOOKS or now - self._looked_at >= self._pause

    def looked(self, now: float) -> None:
        """Record that a look begins now."""
        self._looks += 1
        self._looked_at = now
        if self._looks > CALM_AFTER_LOOKS:
            self._pause = min(2 * self._pause, CONTENT_LOOK_SECONDS)

    def hurry(self) -> None:
        """Shorten the pause to `CALM_LOOK_SECONDS` again, because something is missing."""
        self._pause = CALM_LOOK_SECONDS
