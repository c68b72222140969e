"""How many lines one peer can make this one print, log and write; what is beyond them is counted, in one line."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.ids import PeerId, short_peer_id

LINES_PER_MINUTE = 20
STRANGERS_LINES_PER_MINUTE = 3 * LINES_PER_MINUTE
"""Of all peers together that are no members: identities cost nothing."""
MOST_PEERS = 512
WINDOW_SECONDS = 60.0

Line = tuple[str, str]
"""Topic and sentence."""


@dataclass(slots=True)
class _Window:
    """What was said of a peer in its minute."""

    began: float
    said: int = 0
    left_out: int = 0


class EventBudget:
    """Lets lines about peers pass, up to a budget each. Times are the loop's."""

    def __init__(self) -> None:
        self._windows: dict[PeerId | None, _Window] = {}

    def __len__(self) -> int:
        """Return of how many peers something is counted, which is bounded."""
        return len(self._windows)

    def take(self, peer: PeerId, line: Line, now: float, *, is_member: bool) -> list[Line]:
        """Return what is to be said when `line` came up about `peer`: it, or nothing, and how many were left out."""
        lines = self.flush(now)
        owners = [peer] if is_member else [peer, None]
        windows = [self._window(owner, now) for owner in owners]
        budgets = [LINES_PER_MINUTE, STRANGERS_LINES_PER_MINUTE]
        if all(window.said < most for window, most in zip(windows, budgets, strict=False)):
            for window in windows:
                window.said += 1
            return [*lines, line]
        windows[-1 if windows[0].said < LINES_PER_MINUTE else 0].left_out += 1
        return lines

    def flush(self, now: float) -> list[Line]:
        """Return a line for each peer whose minute is over and of whom lines were left out."""
        over = [owner for owner, window in self._windows.items() if now - window.began >= WINDOW_SECONDS]
        left_out = [(owner, self._windows.pop(owner).left_out) for owner in over]
        return [("flood", _counted(owner, count)) for owner, count in left_out if count]

    def _window(self, owner: PeerId | None, now: float) -> _Window:
        if owner not in self._windows and len(self._windows) >= MOST_PEERS:
            owner = None
        return self._windows.setdefault(owner, _Window(began=now))


def _counted(owner: PeerId | None, count: int) -> str:
    name = short_peer_id(owner) if owner is not None else "peers that are no members"
    return f"{count} more lines about {name} were left out in the last minute"
