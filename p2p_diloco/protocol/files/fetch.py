"""Fetch the pieces of a text from any peers that hold them. A state machine; times are loop time.

One block is under way from each peer that is asked, so little of a text waits in any line. A piece comes whole from one
peer, so a piece with wrong bytes has one sender, which is never asked again. A peer that stops answering rests for a
while, longer each time, and a piece that takes long is also asked of another peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from p2p_diloco.ids import PeerId

MOST_ASKED = 8
"""Maximum number of peers that send at a time; with one block each, at most a megabyte is under way."""
SILENCE_SECONDS = 20.0
"""A peer that sends no block for this long rests, and its piece is asked of another. A late block still counts."""
OVERDUE_SECONDS = 5.0
"""A piece that takes longer than this is also asked of a second peer that has nothing else to send."""
TURN_SECONDS = 60.0
"""A piece that takes longer than this gives up its turn when other peers wait to be asked."""
REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 60.0


class Ask(NamedTuple):
    """A request to send: bytes of a piece, from an offset on."""

    peer: PeerId
    piece: int
    offset: int


class Whole(NamedTuple):
    """A piece that has arrived and must be checked; report the result with `keep` or `refuse`."""

    peer: PeerId
    piece: int
    content: bytearray


@dataclass(slots=True)
class _Transfer:
    """A piece on its way from one peer.

    Attributes:
        began: when it was first asked for.
        asked_at: when the block under way was asked for; None: the next block must be asked for.
    """

    piece: int
    began: float
    asked_at: float | None = None
    content: bytearray = field(default_factory=bytearray)

    def ask(self, now: float) -> None:
        self.asked_at = now

    def add(self, block: bytes | memoryview) -> None:
        self.content += block
        self.asked_at = None


@dataclass(slots=True)
class _Source:
    """A linked peer that has answered what it holds.

    Attributes:
        holds: the pieces that it holds, as a set of bits.
        late: a piece that came too slowly; it goes on if its next block arrives after all.
        failures: times that it failed to answer since its last whole piece.
    """

    holds: int
    transfer: _Transfer | None = None
    late: _Transfer | None = None
    failures: int = 0
    rests_until: float = float("-inf")

    def hold(self, holds: int) -> None:
        self.holds = holds

    def begin(self, piece: int, now: float) -> None:
        """Begin with a piece, or continue one that came too slowly."""
        late, self.late = self.late, None
        content = late.content if late is not None and late.piece == piece else bytearray()
        self.transfer = _Transfer(piece=piece, began=now, content=content)

    def resume(self, transfer: _Transfer) -> None:
        """Continue with the transfer whose next block came, even if it is late."""
        self.transfer, self.late = transfer, None

    def rest(self, now: float) -> None:
        """Ask nothing more of it for a while, longer each time."""
        self.late, self.transfer = self.transfer, None
        self.rests_until = now + min(REST_SECONDS * 2.0**self.failures, LONGEST_REST_SECONDS)
        self.failures = min(self.failures + 1, 16)

    def end(self, rests_until: float) -> None:
        self.transfer, self.rests_until = None, rests_until

    def forget_late(self) -> None:
        self.late = None

    def served(self) -> None:
        self.failures = 0


class Fetch:
    """Decides what to ask, and collects what comes.

    Args:
        sizes: length of each piece in bytes.
        missing: pieces to fetch, as a set of bits.
        seed: of the order in which pieces are asked for. Peers with different orders soon have pieces for each other.
        is_exact: False: `sizes` are upper limits, and the sender names the length.
        banned: peers that have sent wrong bytes before.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        missing: int,
        seed: int = 0,
        is_exact: bool = True,
        banned: Collection[PeerId] = (),
    ) -> None:
        self.missing = missing
        self.wanted = 0
        """Pieces that are asked for before all others, as a set of bits."""
        self.only_wanted = False
        """Whether no other pieces are fetched."""
        self.banned = set(banned)
        """Peers that sent wrong bytes."""
        self._sizes = sizes
        self._draw = seed
        self._is_exact = is_exact
        self._sources: dict[PeerId, _Source] = {}
        self._checking = 0

    def lack(self, pieces: int) -> None:
        """Fetch these pieces, too."""
        self.missing |= pieces

    def prefer(self, pieces: int, *, alone: bool = False) -> None:
        """Ask for these pieces before all others, or for no others."""
        self.wanted, self.only_wanted = pieces, alone

    # -- peers

    def set_holdings(self, peer: PeerId, holds: int) -> None:
        """Record what a linked peer holds, as a set of bits."""
        if peer in self.banned:
            return
        source = self._sources.get(peer)
        if source is None:
            self._sources[peer] = _Source(holds=holds)
        else:
            source.hold(holds)

    def lose(self, peer: PeerId) -> None:
        """Forget a peer whose link is lost."""
        self._sources.pop(peer, None)

    def sources(self) -> list[PeerId]:
        """Return the peers that hold a piece to fetch."""
        due = self.missing & self.wanted if self.only_wanted else self.missing
        return [peer for peer, source in self._sources.items() if source.holds & due]

    # -- asking

    def asks(self, now: float) -> list[Ask]:
        """Return the requests to send now. Call after every other call, and once a second."""
        self._give_up_on_silent(now)
        asks = [self._ask(peer, source, now) for peer, source in self._sources.items() if _is_due(source)]
        idle = [peer for peer, source in self._sources.items() if source.transfer is None and now >= source.rests_until]
        for peer in sorted(idle, key=lambda peer: self._sources[peer].failures):
            piece = self._choose(self._sources[peer], now)
            if piece is not None and self._has_turn(now):
                self._sources[peer].begin(piece, now)
                asks.append(self._ask(peer, self._sources[peer], now))
        return asks

    def _ask(self, peer: PeerId, source: _Source, now: float) -> Ask:
        transfer = source.transfer
        assert transfer is not None, "it is given before"
        transfer.ask(now)
        return Ask(peer, transfer.piece, len(transfer.content))

    def _give_up_on_silent(self, now: float) -> None:
        for source in self._sources.values():
            asked_at = source.transfer.asked_at if source.transfer is not None else None
            if asked_at is not None and now - asked_at >= SILENCE_SECONDS:
                self._rest(source, now)

    def _rest(self, source: _Source, now: float) -> None:
        source.rest(now)
        late = [each for each in self._sources.values() if each.late is not None]
        if len(late) > MOST_ASKED:
            late[0].forget_late()

    def _has_turn(self, now: float) -> bool:
        """Return whether one more peer may be asked; end the longest transfer for it if that has had its turn."""
        under_way = list(self._under_way())
        if len(under_way) < MOST_ASKED:
            return True
        source, transfer = min(under_way, key=lambda each: each[1].began)
        if now - transfer.began < TURN_SECONDS:
            return False
        self._rest(source, now)
        return True

    def _under_way(self) -> Iterator[tuple[_Source, _Transfer]]:
        for source in self._sources.values():
            if source.transfer is not None:
                yield source, source.transfer

    def _choose(self, source: _Source, now: float) -> int | None:
        """Return the piece to ask this peer for: one that is wanted, or else any, drawn by lot."""
        asked: dict[int, float] = {}
        several = 0
        for _, transfer in self._under_way():
            # Two that are slow for this long, with a byte now and then, must not keep others from sending the piece.
            if transfer.piece in asked and now - transfer.began < TURN_SECONDS:
                several |= 1 << transfer.piece
            asked[transfer.piece] = transfer.began
        taken = self._checking | sum(1 << piece for piece in asked)
        open_ = self.missing & source.holds
        allowed = open_ & self.wanted if self.only_wanted else open_
        if source.late is not None and (allowed & ~taken) >> source.late.piece & 1:
            return source.late.piece
        for group in (self.wanted,) if self.only_wanted else (self.wanted, -1):
            free = open_ & group & ~taken
            if free:
                # Knuth's generator for 64 bits: any spread will do, and a rule has no randomness of its own.
                self._draw = (self._draw * 6364136223846793005 + 1442695040888963407) % (1 << 64)
                return _next_bit(free, (self._draw >> 32) % len(self._sizes))
            alone = open_ & group & ~several & ~self._checking
            slow = [
                (began, piece)
                for piece, began in asked.items()
                if alone >> piece & 1 and now - began >= OVERDUE_SECONDS
            ]
            if slow:
                return min(slow)[1]
        return None

    # -- what comes

    def take_block(
        self, peer: PeerId, piece: int, offset: int, total_bytes: int, block: bytes | memoryview, now: float
    ) -> Whole | None:
        """Take a block; return the piece once it is whole. A block that was not asked for is ignored.

        An empty block means that the peer does not hold the piece.
        """
        source = self._sources.get(peer)
        transfer = self._expected(source) if source is not None else None
        if source is None or transfer is None or (transfer.piece, len(transfer.content)) != (piece, offset):
            return None
        source.resume(transfer)
        end, size = offset + len(block), self._sizes[piece]
        fits = total_bytes == size if self._is_exact else 0 < total_bytes <= size
        if not block or not fits or end > total_bytes:
            source.hold(source.holds & ~(1 << piece))
            self._rest(source, now)
            return None
        transfer.add(block)
        if end < total_bytes:
            return None
        source.end(now)
        self._checking |= 1 << piece
        return Whole(peer, piece, transfer.content)

    def _expected(self, source: _Source) -> _Transfer | None:
        """Return the transfer whose next block a peer was asked for, even if it is late."""
        transfer = source.transfer if source.transfer is not None else source.late
        is_here = transfer is not None and not (self.missing & ~self._checking) >> transfer.piece & 1
        return None if transfer is None or transfer.asked_at is None or is_here else transfer

    def asked_of(self, peer: PeerId) -> int | None:
        """Return the piece under way from a peer, if there is one."""
        source = self._sources.get(peer)
        transfer = self._expected(source) if source is not None else None
        return transfer.piece if transfer is not None else None

    def keep(self, peer: PeerId, piece: int) -> None:
        """Record that a piece from `peer` was right, and is stored."""
        self.drop(piece)
        if (source := self._sources.get(peer)) is not None:
            source.served()

    def drop(self, piece: int) -> None:
        """Stop fetching a piece: it is here."""
        bit = 1 << piece
        self.missing &= ~bit
        self.wanted &= ~bit
        self._checking &= ~bit
        for source, transfer in self._under_way():
            if transfer.piece == piece:
                source.end(source.rests_until)

    def refuse(self, peer: PeerId, piece: int) -> None:
        """Record that a piece from `peer` had wrong bytes: that peer is never asked again."""
        self._checking &= ~(1 << piece)
        self.banned.add(peer)
        self.lose(peer)

    def postpone(self, piece: int) -> None:
        """Record that a piece could not be stored, so that it is fetched again."""
        self._checking &= ~(1 << piece)


def _is_due(source: _Source) -> bool:
    return source.transfer is not None and source.transfer.asked_at is None


def _next_bit(bits: int, first: int) -> int:
    """Return the lowest bit that is set at or above `first`; the lowest of all if there is none."""
    above = bits >> first
    if above:
        return first + (above & -above).bit_length() - 1
    return (bits & -bits).bit_length() - 1
