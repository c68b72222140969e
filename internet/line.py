"""A line between a home and the middle of the internet: its delay, rates, queues, jitter and losses."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

QUEUE_SECONDS = 0.2
"""Time for which a full queue of a home's modem holds a packet; a packet that finds it full is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineKind:
    """Delay, losses and rates of a line; all but the rates are the same both ways.

    Attributes:
        delay: seconds that a packet takes to the middle, one way.
        up_bits, down_bits: rates, in bits per second.
        jitter: further seconds that a packet may take, drawn evenly; packets keep their order.
        loss: share of the packets that are lost.
    """

    delay: float
    up_bits: float
    down_bits: float
    jitter: float = 0.0
    loss: float = 0.0


class Way:
    """One direction of a line. A state machine without I/O: times are seconds of any clock.

    Args:
        bits: its rate, in bits per second.
    """

    def __init__(self, kind: LineKind, bits: float, random: Random) -> None:
        self.kind = kind
        self.is_cut = False
        self.extra_loss = 0.0
        self.num_bytes = self.num_packets = self.num_lost = self.num_overflowed = 0
        self._seconds_per_byte = 8.0 / bits
        self._random = random
        self._free_at = self._last_at = 0.0

    def carry(self, num_bytes: int, now: float) -> float | None:
        """Return when a packet that enters now comes out; None if it is lost."""
        if self.is_cut or self._random.random() < self.kind.loss + self.extra_loss:
            self.num_lost += 1
            return None
        begin = max(now, self._free_at)
        if begin - now > QUEUE_SECONDS:
            self.num_overflowed += 1
            return None
        self._free_at = begin + num_bytes * self._seconds_per_byte
        self.num_bytes += num_bytes
        self.num_packets += 1
        late = self.kind.jitter * self._random.random() if self.kind.jitter else 0.0
        self._last_at = max(self._free_at + self.kind.delay + late, self._last_at)
        return self._last_at
