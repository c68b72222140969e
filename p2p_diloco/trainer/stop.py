"""How a peer is told to go: once politely, twice at once."""

from __future__ import annotations

import asyncio


class StopRequest:
    """Set from a signal handler in the event loop; the session watches it."""

    def __init__(self) -> None:
        self._leave = asyncio.Event()
        self._now = asyncio.Event()

    def leave(self) -> None:
        """Say good-bye, finish the round, checkpoint, go."""
        self._leave.set()

    def stop_now(self) -> None:
        """Go at once."""
        self._leave.set()
        self._now.set()

    @property
    def is_leaving(self) -> bool:
        """Tell whether this peer was told to go."""
        return self._leave.is_set()

    async def wait_for_leave(self) -> None:
        """Wait until this peer is told to go."""
        await self._leave.wait()

    async def wait_for_stop(self) -> None:
        """Wait until this peer is told to go at once."""
        await self._now.wait()
