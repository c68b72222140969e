"""How a peer is told to go: after a round that all others know of, politely, or at once."""

from __future__ import annotations

import asyncio


class StopRequest:
    """Set from a signal handler in the event loop; the session watches it."""

    def __init__(self) -> None:
        self._leave = asyncio.Event()
        self._now = asyncio.Event()
        self._last_round: int | None = None
        self._has_last_round = asyncio.Event()

    def end_after(self, last_round: int) -> None:
        """Contribute to no round after this one, and go when all stand at its end; the first word counts."""
        if self._last_round is None:
            self._last_round = last_round
            self._has_last_round.set()

    def leave(self) -> None:
        """Say good-bye, finish the round, checkpoint, go."""
        self._leave.set()

    def stop_now(self) -> None:
        """Go at once."""
        self._leave.set()
        self._now.set()

    @property
    def is_leaving(self) -> bool:
        """Return whether this peer was told to go."""
        return self._leave.is_set()

    async def wait_for_last_round(self) -> int:
        """Wait until there is a round to end after, and return it."""
        await self._has_last_round.wait()
        assert self._last_round is not None
        return self._last_round

    async def wait_for_leave(self) -> None:
        """Wait until this peer is told to go."""
        await self._leave.wait()

    async def wait_for_stop(self) -> None:
        """Wait until this peer is told to go at once."""
        await self._now.wait()
