"""Files in the state directory from which other processes see a peer: its status, events and history."""

from __future__ import annotations

from pathlib import Path

from p2p_diloco.status.event_log import PeerEvent, append_event
from p2p_diloco.status.history import HistoryWriter
from p2p_diloco.status.status_file import PeerStatus, write_status


class PeerFiles:
    """Writes these files. Its methods block, and are called by one thread at a time.

    Args:
        folder: state directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._history = HistoryWriter(folder)

    def status(self, status: PeerStatus) -> None:
        """Replace the status, and add a point to the history if it is due.

        Raises:
            StateError: the folder is read-only or missing, or the disk is full; what is there is kept.
        """
        write_status(self._folder, status)
        self._history.status(status)

    def event(self, event: PeerEvent) -> None:
        """Append an event; a round also gets a row in the history.

        Raises:
            StateError: likewise.
        """
        append_event(self._folder, event)
        self._history.event(event)
