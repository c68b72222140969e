"""How often a peer looks at the directory: every second at first, seldom once nothing is lacking."""

from __future__ import annotations

LOOK_SECONDS = 1.0
CALM_LOOK_SECONDS = 5.0
CALM_AFTER_LOOKS = 30
CONTENT_LOOK_SECONDS = 60.0
"""Among a thousand peers a look reads some two megabytes, and mostly what was known."""


class LookPace:
    """Tells when the next look is due. Time is an argument, in seconds of any steady clock.

    The first looks follow each other at `LOOK_SECONDS`: that is how fast a swarm forms. Then pauses grow from
    `CALM_LOOK_SECONDS` to `CONTENT_LOOK_SECONDS`, and begin anew with every `hurry`.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._looked_at = float("-inf")
        self._pause = CALM_LOOK_SECONDS

    def turn_seconds(self) -> float:
        """Return after how many seconds to ask again, and to dial and hang up meanwhile."""
        return LOOK_SECONDS if self._looks < CALM_AFTER_LOOKS else CALM_LOOK_SECONDS

    def is_due(self, now: float) -> bool:
        """Return whether to look now."""
        return self._looks < CALM_AFTER_LOOKS or now - self._looked_at >= self._pause

    def looked(self, now: float) -> None:
        """Note that a look begins now."""
        self._looks += 1
        self._looked_at = now
        if self._looks > CALM_AFTER_LOOKS:
            self._pause = min(2 * self._pause, CONTENT_LOOK_SECONDS)

    def hurry(self) -> None:
        """Note that something is lacking: the pause is `CALM_LOOK_SECONDS` again."""
        self._pause = CALM_LOOK_SECONDS
