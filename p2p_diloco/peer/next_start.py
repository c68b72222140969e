"""Save what the next start of a peer needs: the clock offset, and the addresses at which other peers were reached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from p2p_diloco.errors import StateError
from p2p_diloco.ids import PeerId
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.storage.run_folder import RunFolder

KEPT_OFFSET_SECONDS, KEEP_CLOCK_SECONDS = 0.05, 10.0
"""Write the offset between swarm time and wall clock after a change of this much, and at most this often."""


class NextStart:
    """Writes changed values in a separate thread.

    Args:
        soon: runs a call in that thread.
        refused: called there with a sentence if the addresses cannot be written; the peer continues.
    """

    def __init__(
        self, folder: RunFolder, *, soon: Callable[[Callable[[], None]], object], refused: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._soon = soon
        self._refused = refused
        self._offset, self._offset_at = folder.recall_clock_offset(), float("-inf")
        self._addresses: dict[PeerId, tuple[str, ...]] = {}

    def keep(self, clock: SwarmClock, addresses: dict[PeerId, tuple[str, ...]], moment: float) -> None:
        """Save both if they have changed; call this about once a second.

        Args:
            addresses: addresses by peer, the best first.
            moment: seconds of any monotonic clock.
        """
        offset = clock.wall_offset_seconds
        has_moved = abs(offset - self._offset) > KEPT_OFFSET_SECONDS
        if clock.is_settled and has_moved and moment - self._offset_at >= KEEP_CLOCK_SECONDS:
            self._offset, self._offset_at = offset, moment
            self._soon(partial(self._folder.keep_clock_offset, offset))
        if list(addresses.items()) != list(self._addresses.items()):
            self._addresses = addresses
            self._soon(partial(self._keep_addresses, addresses))

    def _keep_addresses(self, known: dict[PeerId, tuple[str, ...]]) -> None:
        try:
            self._folder.keep_addresses(known)
        except StateError as error:
            self._refused(str(error))
