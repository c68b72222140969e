"""Ask a peer to stop: after an agreed round, after the current round, or at once."""

from __future__ import annotations

import asyncio


class StopRequest:
    """Set from a signal handler in the event loop; the session watches it."""

    def __init__(self) -> None:
        self._leave = asyncio.Event()
        self._now = asyncio.Event()
        self.within_seconds: float | None = None
        """Time for leaving; None: until the end of the round, and for a last measurement."""
        self._last_round: int | None = None
        self._has_last_round = asyncio.Event()

    def end_after(self, last_round: int) -> None:
        """Contribute to no round after this one, and end when all peers agree on it; only the first call counts."""
        if self._last_round is None:
            self._last_round = last_round
            self._has_last_round.set()

    def leave(self, *, within_seconds: float | None = None) -> None:
        """Announce the leave, finish the round, save a checkpoint, end.

        Args:
            within_seconds: do not wait for the end of a longer round.
        """
        self.within_seconds = within_seconds
        self._leave.set()

    def stop_now(self) -> None:
        """Stop at once."""
        self._leave.set()
        self._now.set()

    @property
    def is_leaving(self) -> bool:
        """Return whether this peer has been asked to leave."""
        return self._leave.is_set()

    async def wait_for_last_round(self) -> int:
        """Wait until a last round is set, and return it."""
        await self._has_last_round.wait()
        assert self._last_round is not None
        return self._last_round

    async def wait_for_leave(self) -> None:
        """Wait until this peer is asked to leave."""
        await self._leave.wait()

    async def wait_for_stop(self) -> None:
        """Wait until this peer is asked to stop at once."""
        await self._now.wait()
