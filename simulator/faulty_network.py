"""The memory network with delays, losses, cuts and stalls, drawn from one seed.

It is made for a `VirtualTimeLoop`, where a thousand peers exchange frames in almost no real time; on any other loop it
runs in real time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.testing.network import Channel, MemoryLink, MemoryNetwork, MemoryTransport
from p2p_diloco.transport.link import Lane, TransportLimits
from p2p_diloco.transport.outbox import PostedFrame


class FaultyNetwork(MemoryNetwork):
    """Connects transports over paths that a test can slow down, cut and heal, and whose peers it can stop.

    Args:
        seed: determines all delays and losses, together with the order of events.
        delay_seconds: minimum and maximum one-way delay of a frame; drawn for each frame, order is kept within a lane.
        loss: share of frames lost independently (harsher than reality, where streams only lose whole links).
        bytes_per_second: rate of each lane and direction of each link.
        detect_seconds: time until the ends of a cut link notice it.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        delay_seconds: tuple[float, float] = (0.01, 0.05),
        loss: float = 0.0,
        bytes_per_second: float = float("inf"),
        detect_seconds: float = 10.0,
    ) -> None:
        super().__init__()
        self.delay_seconds = delay_seconds
        self.loss = loss
        self.bytes_per_second = bytes_per_second
        self.detect_seconds = detect_seconds
        self._random = random.Random(seed)
        self._cuts: set[frozenset[PeerId]] = set()
        self._isolated: set[PeerId] = set()
        self._stalled: set[PeerId] = set()
        self._line_rates: dict[PeerId, float] = {}
        self._line_free: dict[tuple[PeerId, str], float] = {}
        self._changed = asyncio.Event()

    def transport(
        self, peer: PeerId, *, run: Digest, can_be_dialled: bool = True, limits: TransportLimits | None = None
    ) -> FaultyTransport:
        return FaultyTransport(self, peer=peer, run=run, can_be_dialled=can_be_dialled, limits=limits)

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Block all traffic between two peers; their link is lost after `detect_seconds` unless healed before."""
        self._cuts.add(frozenset((one, other)))
        self._notice_cuts()

    def split(self, group: Iterable[PeerId], rest: Iterable[PeerId]) -> None:
        """Cut every peer of `group` from every peer of `rest`."""
        others = tuple(rest)
        self._cuts.update(frozenset((one, other)) for one in group for other in others)
        self._notice_cuts()

    def isolate(self, peer: PeerId) -> None:
        """Cut `peer` off from all others."""
        self._isolated.add(peer)
        self._notice_cuts()

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
        self._resume_links()

    def stall(self, peer: PeerId) -> None:
        """Stop `peer` as SIGSTOP does: it neither reads nor writes; its links stay up until a write stalls."""
        self._stalled.add(peer)

    def wake(self, peer: PeerId) -> None:
        """Undo `stall`; the peer then receives the events that it missed."""
        self._stalled.discard(peer)
        self._announce_change()
        transport = self.find(peer)
        if isinstance(transport, FaultyTransport):
            transport.replay_missed_events()
        self._resume_links()

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

    async def wait_while_blocked(self, one: PeerId, other: PeerId) -> None:
        """Wait until something passes between two peers."""
        while self.is_blocked(one, other):
            await self._changed.wait()

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

    def _notice_cuts(self) -> None:
        for transport in self._transports():
            transport.notice_cuts()

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _resume_links(self) -> None:
        for transport in self._transports():
            transport.resume_links()

    def _transports(self) -> list[FaultyTransport]:
        return [transport for transport in self._alive.values() if isinstance(transport, FaultyTransport)]


class FaultyTransport(MemoryTransport):
    """A transport on a `FaultyNetwork`; created by `FaultyNetwork.transport`."""

    def __init__(
        self, network: FaultyNetwork, *, peer: PeerId, run: Digest, can_be_dialled: bool, limits: TransportLimits | None
    ) -> None:
        super().__init__(network, peer=peer, run=run, can_be_dialled=can_be_dialled, limits=limits)
        self._paths = network
        self._missed: list[Callable[[], None]] = []

    def end(self, reason: str) -> None:
        self._missed.clear()
        super().end(reason)

    def lose(self, link: MemoryLink, reason: str) -> None:
        """Handle the loss of `link`; delayed if this peer is stopped."""
        if link.open[self.peer] and self._paths.is_stalled(self.peer):
            self._missed.append(lambda: self.lose(link, reason))
        else:
            super().lose(link, reason)

    def replay_missed_events(self) -> None:
        """Deliver the events that happened while this peer was stopped."""
        missed, self._missed = self._missed, []
        for event in missed:
            event()

    def resume_links(self) -> None:
        """Resume writing and delivering after a heal or a wake."""
        for link in tuple(self._links.values()):
            for channel in link.channels.values():
                self.loop.call_soon(channel.receiver._deliver_due, channel)
                self.loop.call_soon(self._pump, channel)

    def notice_cuts(self) -> None:
        """Lose the links that are cut now, unless they are healed within the detection time."""
        for peer, link in self._links.items():
            if self._paths.is_cut(self.peer, peer):
                self.loop.call_later(self._paths.detect_seconds, self._give_up_if_cut, peer, link)

    async def _round_trip(self, peer: PeerId) -> None:
        await asyncio.sleep(self._paths.draw_delay_seconds() + self._paths.draw_delay_seconds())
        await self._paths.wait_while_blocked(self.peer, peer)

    def _pump(self, channel: Channel) -> None:
        if not self._paths.is_stalled(channel.sender.peer):
            super()._pump(channel)

    def _arrival(self, channel: Channel, num_bytes: int, earliest: float) -> float | None:
        if self._paths.draw_loss():
            return None
        sender, receiver, shared = channel.sender.peer, channel.receiver.peer, channel.lane is Lane.BULK
        booked = self._paths.book_line(sender, receiver, num_bytes, earliest, shared=shared)
        sent = super()._arrival(channel, num_bytes, booked)
        return None if sent is None else sent + self._paths.draw_delay_seconds()

    def _can_read(self, channel: Channel) -> bool:
        return super()._can_read(channel) and not self._paths.is_blocked(channel.sender.peer, self.peer)

    def _notify_other_end(self, link: MemoryLink, reason: str, delay_seconds: float = 0.0) -> None:
        super()._notify_other_end(link, reason, delay_seconds + self._paths.draw_delay_seconds())

    def _report_to_other(self, link: MemoryLink, reason: str) -> None:
        """Notify the other end; a cut delays this."""
        other = link.other(self)
        if self._paths.is_cut(self.peer, other.peer):
            self.loop.call_later(self._paths.detect_seconds, other.lose, link, "no answer over a cut link")
        else:
            other.lose(link, reason)

    def _give_up_if_stuck(self, channel: Channel, writing: PostedFrame) -> None:
        if not self._paths.is_stalled(self.peer):
            super()._give_up_if_stuck(channel, writing)
        else:
            channel.forget_stuck(writing)  # after waking, the next write attempt sets the timer again

    def _give_up_if_cut(self, peer: PeerId, link: MemoryLink) -> None:
        if self._paths.is_cut(self.peer, peer):
            self.lose(link, f"no answer for {self._paths.detect_seconds:.1f} s")
