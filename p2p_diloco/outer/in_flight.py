"""Contributions in flight: sent, but not yet resolved by an entry.

One list per span. Each contribution leaves it exactly once: with the entry of its round, void behind a later entry, or
counted as if included (a transfer, an adoption, too many at once). Losing one is cheap, counting one twice is not.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2p_diloco.errors import RoundError
from p2p_diloco.outer.vector import Vector, read_only

MAX_IN_FLIGHT = 8


class Sent(NamedTuple):
    """A contribution as it went over the wire: an eighth of the memory of what it decodes to."""

    payload: bytes | memoryview
    decode: Callable[[bytes | memoryview], Vector]


class Contribution(NamedTuple):
    """What an island sent for one span in one round, decoded or not; a vector is not to be changed."""

    round: int
    sent: Vector | Sent

    @property
    def decoded_N(self) -> Vector:
        """Return it as everybody decodes it."""
        return self.sent.decode(self.sent.payload) if isinstance(self.sent, Sent) else self.sent


# Not compared by value: `==` on arrays has no single truth value.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlight:
    """One span's unresolved contributions, oldest round first. Methods return a new list; this one stays as it is."""

    contributions: tuple[Contribution, ...] = ()

    def __len__(self) -> int:
        return len(self.contributions)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds of the contributions, rising."""
        return tuple(contribution.round for contribution in self.contributions)

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Decoded contributions in order of rounds, as `pseudo_gradient` takes them."""
        return tuple(contribution.decoded_N for contribution in self.contributions)

    def with_contribution(self, round_index: int, sent: Vector | Sent) -> InFlight:
        """Add what was sent in a round; a vector must not be written to afterwards.

        Raises:
            RoundError: something of that round or of a later one is in flight already (a clock that was set back).
        """
        if self.contributions and round_index <= self.contributions[-1].round:
            raise RoundError(
                f"round {round_index} cannot follow round {self.contributions[-1].round}, whose contribution is in "
                "flight; contribute again in a later round"
            )
        kept = sent if isinstance(sent, Sent) else read_only(sent)
        return InFlight(contributions=(*self.contributions, Contribution(round_index, kept)))

    def of_round(self, entry_round: int) -> Contribution | None:
        """Return the contribution of exactly that round, while it is in flight."""
        return next((one for one in self.contributions if one.round == entry_round), None)

    def after(self, entry_round: int) -> InFlight:
        """Return what remains once the entry of a round has settled its own and all earlier ones."""
        return InFlight(contributions=tuple(one for one in self.contributions if one.round > entry_round))

    def resolve(self, entry_round: int) -> tuple[InFlight, Vector | None]:
        """Resolve what the entry of a round settles.

        The contribution of exactly that round leaves and is returned; how it leaves θ is the merge's affair. Those of
        earlier rounds are void, since chains only go forward: they leave too, stay in θ, and so are part of the next Δ.
        Those of later rounds remain.
        """
        resolved = self.of_round(entry_round)
        return self.after(entry_round), resolved.decoded_N if resolved is not None else None

    def overflow(self, limit: int = MAX_IN_FLIGHT) -> tuple[InFlight, list[Vector]]:
        """Keep the newest `limit` contributions; return the older ones, to be taken out of θ as if included."""
        surplus = max(0, len(self.contributions) - limit)
        if not surplus:
            return self, []
        return InFlight(contributions=self.contributions[surplus:]), list(self.vectors[:surplus])

    def cleared(self) -> tuple[InFlight, list[Vector]]:
        """Empty the list; return all contributions, to be taken out of θ as if included."""
        return self.overflow(limit=0)

    def scaled(self, alpha: float) -> InFlight:
        """Multiply every contribution by `alpha`, as `blend` does to the part of θ that they are in."""
        factor = np.float32(alpha)
        return InFlight(
            contributions=tuple(
                Contribution(one.round, read_only(np.multiply(one.decoded_N, factor))) for one in self.contributions
            )
        )
