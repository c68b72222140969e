"""Double-entry ledger of one span at one island: what inner steps made, what was sent, what came back as skipped.

The ledger is kept alongside the real code and compared with it. The residual φ − θ − Σ in-flight must be what was made
minus what was sent, whatever entries, transfers and overflows have done to φ, θ and the in-flight list.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.outer.state import InFlight

Wide = npt.NDArray[np.float64]

ROUNDING = 2e-4
"""Tolerance, as a share of what was moved. Float32 rounds θ once per event; this covers hundreds of events."""


class Ledger:
    """The ledger of one span since its island began to train it.

    Attributes:
        outstanding: decoded contributions that were sent and are not resolved, by round.
    """

    def __init__(self, span_elements: int) -> None:
        self._made_N: Wide = np.zeros(span_elements)
        self._sent_N: Wide = np.zeros(span_elements)
        self._scale = 1.0
        self.outstanding: dict[int, Vector] = {}

    def make(self, displacement_N: Wide) -> None:
        """Record a displacement of θ; the residual falls by it."""
        self._made_N -= displacement_N
        self._note_size(displacement_N)

    def flip(self, displacement_N: Wide) -> None:
        """Record that φ moved by itself, as when a bit of memory flips; the island mistakes that for its own work."""
        self._made_N += displacement_N
        self._note_size(displacement_N)

    def follow(self, step_N: Vector) -> None:
        """Record that an entry moved φ, and θ with it. The balance is unchanged, but θ was rounded."""
        self._note_size(step_N)

    def send(self, round_index: int, decoded_N: Vector) -> str | None:
        """Record a contribution; return what is wrong with it, or None."""
        if round_index in self.outstanding:
            return f"a second contribution to round {round_index}"
        self._sent_N += decoded_N
        self.outstanding[round_index] = decoded_N
        return None

    def resolve(self, remaining: InFlight, entry_round: int | None) -> str | None:
        """Record which contributions have left the in-flight list; return what is wrong with that, or None.

        Args:
            remaining: the list now.
            entry_round: round of the entry that was absorbed: earlier contributions come back as skipped. None for a
                transfer or an overflow, after which all that left counts as included.
        """
        rounds = set(remaining.rounds)
        if not rounds <= self.outstanding.keys():
            return f"rounds {sorted(rounds - self.outstanding.keys())} are in flight again, resolved before"
        for round_index in [r for r in self.outstanding if r not in rounds]:
            decoded_N = self.outstanding.pop(round_index)
            if entry_round is not None and round_index < entry_round:
                self._sent_N -= decoded_N
        if entry_round is not None and any(round_index <= entry_round for round_index in rounds):
            return f"a contribution is in flight still, although an entry of round {entry_round} was absorbed"
        return None

    def imbalance(self, anchor_N: Vector, local_N: Vector, in_flight: InFlight) -> float:
        """Return by how much the real residual differs from the ledger, in units of what rounding explains."""
        residual_N = anchor_N.astype(np.float64) - local_N - total(in_flight.vectors, len(anchor_N))
        gap = float(np.abs(residual_N - (self._made_N - self._sent_N)).max())
        return gap / (ROUNDING * self._scale)

    def unsent(self) -> float:
        """Return the norm of what was made and not sent."""
        return float(np.linalg.norm(self._made_N - self._sent_N))

    @property
    def slack(self) -> float:
        """The part of `unsent` that rounding explains."""
        return ROUNDING * self._scale * len(self._made_N)

    def _note_size(self, moved_N: Wide | Vector) -> None:
        self._scale = max(self._scale, 2.0 * float(np.abs(moved_N).max()))


def total(vectors: Iterable[Vector], elements: int) -> Wide:
    """Return the sum of vectors in float64."""
    sum_N: Wide = np.zeros(elements)
    for vector_N in vectors:
        sum_N += vector_N
    return sum_N
