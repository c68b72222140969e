"""Decides when to send which block of the text: one at a time, within a share of this peer's line.

Averaging comes first. While vectors wait, a text gets a tenth of the line, which a run leaves to headers and short
stalls anyway; on a line of unknown rate it waits. Otherwise it gets at most half. A state machine; times are loop time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.wire.messages import MOST_BLOCK_BYTES
from p2p_diloco.transport.rate_limit import TokenBucket, piece_bytes

BUSY_SHARE, IDLE_SHARE = 0.1, 0.5
UNKNOWN_BYTES_PER_SECOND = 128 * (1 << 20)
"""Assumed rate of a line that no cap limits and no traffic has filled."""
STRANGERS_SHARE = 0.5
"""Share of the budget for all peers together that are not members. A joiner is one until it holds the run's state."""
MOST_WAITING = 64
"""Maximum number of peers whose request waits; each has one."""
COPIES_A_DAY = 2.0
"""Texts that one peer may be sent at once, and in each day: it needs each piece once."""
DAY_SECONDS = 86_400.0
MOST_REQUESTERS = 4096
HEADER_BYTES = 128
"""At least as many as the header of a block has."""
LEAST_CHARGED_BYTES = 16 * 1024
"""Bytes that a block of a longer piece counts at least in the budgets."""


class Wanted(NamedTuple):
    """A block that a peer waits for."""

    peer: PeerId
    digest: Digest
    offset: int


def text_rate(line: float | None, *, is_busy: bool) -> float:
    """Return the rate for a text in bytes per second, given that of the line; None: unknown."""
    if line is None:
        return 0.0 if is_busy else IDLE_SHARE * UNKNOWN_BYTES_PER_SECOND
    return (BUSY_SHARE if is_busy else IDLE_SHARE) * line


def block_bytes(line: float | None) -> int:
    """Return the length of blocks, so that a vector waits for at most a twentieth of a second for one."""
    return MOST_BLOCK_BYTES if line is None else min(piece_bytes(line), MOST_BLOCK_BYTES)


def charged_bytes(num_bytes: int, piece: int, line: float | None) -> int:
    """Return how many bytes an answer counts in the budgets, given the lengths of its block and of its piece.

    One byte of a long piece counts more, because the whole piece is read and hashed for it, and so does an answer
    without a block. A short piece counts as it is, so that a text of many small files fits the allowance.
    """
    least = min(LEAST_CHARGED_BYTES, block_bytes(line))
    return HEADER_BYTES + (max(num_bytes, min(least, piece)) if num_bytes else least)


class TextUpload:
    """The requests that wait, and the budgets.

    Args:
        text_bytes: length of the text.
        num_pieces: number of its pieces.
        is_stranger: returns whether a peer is not a member.
    """

    def __init__(self, text_bytes: int, num_pieces: int, is_stranger: Callable[[PeerId], bool]) -> None:
        self._is_stranger = is_stranger
        self._copies = COPIES_A_DAY * (text_bytes + HEADER_BYTES * num_pieces + MOST_BLOCK_BYTES)
        self._waiting: dict[PeerId, Wanted] = {}
        self._free_at = self._free_for_strangers_at = float("-inf")
        self._quotas: dict[PeerId | None, TokenBucket] = {}

    def ask(self, wanted: Wanted, now: float) -> None:
        """Queue a request; it replaces an earlier one of the same peer. Dropped if the peer has had its share."""
        is_known = wanted.peer in self._waiting
        if (is_known or len(self._waiting) < MOST_WAITING) and self._quota(wanted.peer, now).has_one(now):
            self._waiting[wanted.peer] = wanted

    def lose(self, peer: PeerId) -> None:
        """Drop the request of a peer whose link is lost."""
        self._waiting.pop(peer, None)

    def next(self, now: float) -> Wanted | None:
        """Return the request to answer now, the longest-waiting one first; None: not yet. Then call `sent`."""
        if now < self._free_at:
            return None
        strangers_may = now >= self._free_for_strangers_at
        peer = next((peer for peer in self._waiting if strangers_may or not self._is_stranger(peer)), None)
        return self._waiting.pop(peer) if peer is not None else None

    def sent(self, peer: PeerId, num_bytes: int, now: float, rate: float) -> None:
        """Book a block that was sent, with what it counts, at `rate` bytes per second."""
        self._free_at = max(self._free_at, now) + num_bytes / rate
        if self._is_stranger(peer):
            self._free_for_strangers_at = max(self._free_for_strangers_at, now) + num_bytes / (STRANGERS_SHARE * rate)
        self._quota(peer, now).spend(num_bytes, now)

    def wait_seconds(self, now: float) -> float | None:
        """Return how long until a request may be answered; None: none waits."""
        if not self._waiting:
            return None
        at = self._free_at
        if all(map(self._is_stranger, self._waiting)):
            at = max(at, self._free_for_strangers_at)
        return max(at - now, 0.0)

    def _quota(self, peer: PeerId, now: float) -> TokenBucket:
        key: PeerId | None = peer
        if peer not in self._quotas and len(self._quotas) >= MOST_REQUESTERS:
            self._quotas = {key: bucket for key, bucket in self._quotas.items() if not bucket.is_full(now)}
            if len(self._quotas) >= MOST_REQUESTERS:
                key = None  # more peers than links: the rest share one quota
        if key not in self._quotas:
            self._quotas[key] = TokenBucket(per_second=self._copies / DAY_SECONDS, burst=self._copies)
        return self._quotas[key]
