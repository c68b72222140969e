"""The last lines of `join`: what this machine gave, what the run learnt meanwhile, and where the model is."""

from __future__ import annotations

import shlex
from pathlib import Path

from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.wording import (
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    format_share,
    join_line,
    own_command,
)


class Summary:
    """Follows the status of a trainer from its first step on."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._last = PeerStatus()
        self._losses: tuple[float, float] | None = None
        """The first held-out loss of the shared model, and the last one."""
        self._share: float | None = None

    def status(self, status: PeerStatus) -> None:
        """Take note of a status."""
        if status.role != "trainer":
            return
        if self._began_at is None and status.inner_steps:
            self._began_at = status.updated
        if status.anchor_loss is not None:
            self._losses = (status.anchor_loss if self._losses is None else self._losses[0], status.anchor_loss)
        if status.claimed_token_share is not None:
            self._share = status.claimed_token_share
        self._last = status

    def lines(self, folder: Path) -> list[str]:
        """Return the summary; nothing if this machine made no step.

        Args:
            folder: state directory of this peer.
        """
        last = self._last
        if self._began_at is None:
            return []
        share = "" if self._share is None else f" ({format_share(self._share)} of the run's, at the end)"
        gave = (
            f"this machine gave {format_seconds(max(last.updated - self._began_at, 0.0))}, "
            f"{format_count(last.inner_steps)} steps and {format_count(last.tokens)} tokens{share}; it sent "
            f"{format_bytes(last.bytes_sent.total)} and received {format_bytes(last.bytes_received.total)}"
        )
        learnt = (
            []
            if self._losses is None
            else [f"held-out loss of the shared model: {' → '.join(map(format_loss, self._losses))} (lower is better)"]
        )
        place = ("--state-directory", str(folder))
        back = join_line(last.invite, own_model=False) if last.invite else own_command("join", "INVITE")
        return [
            gave,
            *learnt,
            f"the model is in {folder}",
            f"to try it: {own_command('sample', *place, 'def main')}",
            f"to use it elsewhere: {own_command('export', *place, 'my-model')}",
            f"to come back: {back} {shlex.join(place)}",
        ]
