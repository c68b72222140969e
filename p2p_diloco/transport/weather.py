"""Simulated network conditions for tests: delays, losses, cuts, stalls; all from one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from p2p_diloco.ids import PeerId
from p2p_diloco.transport.link import MIB


class Weather:
    """The state of the paths between peers, without the peers.

    Args:
        seed: determines all delays and losses, together with the order of events.
        delay_seconds: minimum and maximum one-way delay of a frame; drawn for each frame, order is kept within a lane.
        loss: share of frames lost independently (harsher than reality, where streams only lose whole links).
        bytes_per_second: rate of each lane and direction of each link.
        pipe_bytes: bytes that a lane accepts without being read.
        detect_seconds: time until the ends of a cut link notice it.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        delay_seconds: tuple[float, float] = (0.01, 0.05),
        loss: float = 0.0,
        bytes_per_second: float = float("inf"),
        pipe_bytes: int = MIB,
        detect_seconds: float = 10.0,
    ) -> None:
        self.delay_seconds = delay_seconds
        self.loss = loss
        self.bytes_per_second = bytes_per_second
        self.pipe_bytes = pipe_bytes
        self.detect_seconds = detect_seconds
        self._random = random.Random(seed)
        self._cuts: set[frozenset[PeerId]] = set()
        self._isolated: set[PeerId] = set()
        self._stalled: set[PeerId] = set()
        self._line_rates: dict[PeerId, float] = {}
        self._line_free: dict[tuple[PeerId, str], float] = {}
        self._changed = asyncio.Event()

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Block all traffic between two peers; their link is lost after `detect_seconds` unless healed before."""
        self._cuts.add(frozenset((one, other)))

    def split(self, group: Iterable[PeerId], rest: Iterable[PeerId]) -> None:
        """Cut every peer of `group` from every peer of `rest`."""
        others = tuple(rest)
        self._cuts.update(frozenset((one, other)) for one in group for other in others)

    def isolate(self, peer: PeerId) -> None:
        """Cut `peer` off from all others."""
        self._isolated.add(peer)

    def heal(self, one: PeerId | None = None, other: PeerId | None = None) -> None:
        """Undo cuts: all of them, all of one peer, or the one between two peers. Frames in the pipes then arrive."""
        if one is None:
            self._cuts.clear()
            self._isolated.clear()
        elif other is None:
            self._cuts = {pair for pair in self._cuts if one not in pair}
            self._isolated.discard(one)
        else:
            self._cuts.discard(frozenset((one, other)))
        self._announce_change()

    def stall(self, peer: PeerId) -> None:
        """Stop `peer` as SIGSTOP does: it neither reads nor writes; its links stay up until a write stalls."""
        self._stalled.add(peer)

    def wake(self, peer: PeerId) -> None:
        """Undo `stall`; the peer then receives the events that it missed."""
        self._stalled.discard(peer)
        self._announce_change()

    def is_cut(self, one: PeerId, other: PeerId) -> bool:
        """Return whether the path between two peers is cut; a stalled peer is not cut."""
        if one in self._isolated or other in self._isolated:
            return True
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def is_stalled(self, peer: PeerId) -> bool:
        """Return whether `peer` is stopped."""
        return peer in self._stalled

    def is_blocked(self, one: PeerId, other: PeerId) -> bool:
        """Return whether nothing passes between two peers, because of a cut or a stall."""
        return one in self._stalled or other in self._stalled or self.is_cut(one, other)

    def limit_line(self, peer: PeerId, bytes_per_second: float) -> None:
        """Limit the rate of `peer` in each direction, shared by all its links."""
        self._line_rates[peer] = bytes_per_second

    def book_line(
        self, sender: PeerId, receiver: PeerId, num_bytes: int, earliest: float, *, shared: bool = True
    ) -> float:
        """Book bytes that can be sent at `earliest`; return when they have passed. They delay later ones.

        Args:
            shared: False for control frames, which are few and do not wait for others.
        """
        done = earliest + num_bytes / self.bytes_per_second
        for line in ((sender, "out"), (receiver, "in")):
            rate = self._line_rates.get(line[0])
            if rate is not None and shared:
                self._line_free[line] = max(self._line_free.get(line, 0.0), earliest) + num_bytes / rate
                done = max(done, self._line_free[line])
        return done

    def draw_delay_seconds(self) -> float:
        """Draw one frame's one-way delay."""
        return self._random.uniform(*self.delay_seconds)

    def draw_loss(self) -> bool:
        """Draw whether a frame is lost."""
        return self.loss > 0.0 and self._random.random() < self.loss

    async def wait_for_change(self) -> None:
        """Wait for the next heal or wake."""
        await self._changed.wait()

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
