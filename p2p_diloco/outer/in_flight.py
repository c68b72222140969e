"""Contributions in flight: sent, but not yet resolved by an entry.

There is one list per span. Each contribution leaves it exactly once: with the entry of its round, skipped by a later
entry, or counted as included (a transfer, an adoption, too many in flight). Losing one is cheap; counting one twice is
not.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2p_diloco.codec.vectors import Vector, read_only
from p2p_diloco.errors import RoundError

MAX_IN_FLIGHT = 8


class PendingContribution(NamedTuple):
    """A contribution in its encoded form, which needs an eighth of the memory of the decoded one."""

    payload: bytes | memoryview
    decode: Callable[[bytes | memoryview], Vector]


class Contribution(NamedTuple):
    """A contribution of an island for one span in one round, encoded or decoded; read-only."""

    round: int
    sent: Vector | PendingContribution

    @property
    def decoded_N(self) -> Vector:
        """Return the decoded contribution, as every peer decodes it."""
        return self.sent.decode(self.sent.payload) if isinstance(self.sent, PendingContribution) else self.sent


# Not compared by value: `==` on arrays has no single truth value.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlight:
    """One span's unresolved contributions, oldest round first. Immutable: methods return a new list."""

    contributions: tuple[Contribution, ...] = ()

    def __len__(self) -> int:
        return len(self.contributions)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds of the contributions, in increasing order."""
        return tuple(contribution.round for contribution in self.contributions)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Decoded contributions in order of rounds, for `pseudo_gradient`."""
        return tuple(contribution.decoded_N for contribution in self.contributions)

    def with_contribution(self, round_index: int, sent: Vector | PendingContribution) -> InFlight:
        """Add a contribution; a vector must not be modified afterwards.

        Raises:
            RoundError: a contribution of that round or a later one is already in flight (the clock was set back).
        """
        if self.contributions and round_index <= self.contributions[-1].round:
            raise RoundError(
                f"round {round_index} cannot follow round {self.contributions[-1].round}, whose contribution is in "
                "flight; contribute again in a later round"
            )
        kept = sent if isinstance(sent, PendingContribution) else read_only(sent)
        return InFlight(contributions=(*self.contributions, Contribution(round_index, kept)))

    def of_round(self, entry_round: int) -> Contribution | None:
        """Return the contribution of exactly that round, or None."""
        return next((one for one in self.contributions if one.round == entry_round), None)

    def after(self, entry_round: int) -> InFlight:
        """Return what remains after the entry of a round, which resolves that round and all earlier ones."""
        return InFlight(contributions=tuple(one for one in self.contributions if one.round > entry_round))

    def resolve(self, entry_round: int) -> tuple[InFlight, Vector | None]:
        """Remove what the entry of a round settles; return the contribution of exactly that round, which leaves θ.

        Contributions of earlier rounds were skipped, since chains only move forward: they stay in θ, and so are part of
        the next Δ.
        """
        resolved = self.of_round(entry_round)
        return self.after(entry_round), resolved.decoded_N if resolved is not None else None

    def overflow(self, limit: int = MAX_IN_FLIGHT) -> tuple[InFlight, list[Vector]]:
        """Keep the newest `limit` contributions; return the older ones, to be removed from θ as if included."""
        surplus = max(0, len(self.contributions) - limit)
        if not surplus:
            return self, []
        return InFlight(contributions=self.contributions[surplus:]), list(self.vectors[:surplus])

    def cleared(self) -> tuple[InFlight, list[Vector]]:
        """Empty the list; return all contributions, to be removed from θ as if included."""
        return self.overflow(limit=0)

    def scaled(self, alpha: float) -> InFlight:
        """Multiply every contribution by `alpha`, as `blend` multiplies the part of θ that contains them."""
        scaled = (read_only(np.multiply(one.decoded_N, np.float32(alpha))) for one in self.contributions)
        return InFlight(contributions=tuple(map(Contribution, self.rounds, scaled)))
