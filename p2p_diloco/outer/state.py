"""A span's state: what is agreed, anchor, momentum and log position; and what its island has in flight.

A chain digest identifies the absorbed entries, a content digest the bytes. Peers with equal chain digests must have
equal content digests; a difference means bad memory or a bug.

In flight are contributions that were sent, but not yet resolved by an entry. Each leaves the list exactly once: with
the entry of its round, skipped by a later entry, or counted as included (a transfer, an adoption, too many in flight).
Losing one is cheap; counting one twice is not.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2p_diloco.codec.dispatch import is_vector
from p2p_diloco.codec.vectors import LARGEST_ANCHOR, Vector, is_within, read_only, zero_small
from p2p_diloco.errors import RoundError, StateError
from p2p_diloco.ids import ZERO_DIGEST, Digest, blake3_of, sha256
from p2p_diloco.log import FOUNDING_WEIGHT, GENESIS_ROUND, AbsorbedEntry, SpanHead, advance_head, founding_radius
from p2p_diloco.memory.slabs import copy_of, zero_vector
from p2p_diloco.outer.outer_step import OuterRule, apply_outer_step

MAX_IN_FLIGHT = 8

# Each kind of digest has its own prefix, so that one cannot be mistaken for another.
_CONTENT_LABEL = b"p2p-diloco span content 2\n"
_STATE_LABEL = b"p2p-diloco state 1\n"


# Not compared by value: `==` on arrays has no single truth value. Compare digests.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanState:
    """The agreed state of one span.

    The arrays are made read-only; their ownership is transferred.

    Attributes:
        head: the span's log position.
        anchor_N: φ, float32, shape (N,).
        momentum_N: m, same shape.
    """

    head: SpanHead
    anchor_N: Vector
    momentum_N: Vector

    def __post_init__(self) -> None:
        if not is_vector(self.anchor_N) or not is_vector(self.momentum_N) or len(self.anchor_N) != len(self.momentum_N):
            raise StateError(
                f"anchor is {self.anchor_N.dtype} {self.anchor_N.shape} and momentum {self.momentum_N.dtype} "
                f"{self.momentum_N.shape}; expected float32 vectors of one length"
            )
        for vector_N in (self.anchor_N, self.momentum_N):
            vector_N.setflags(write=False)

    @property
    def elements(self) -> int:
        """N."""
        return len(self.anchor_N)

    def followed_by(self, entry: AbsorbedEntry, anchor_N: Vector, momentum_N: Vector) -> SpanState:
        """Return the span after an entry whose outer step gave these vectors: d ← H(d, entry digest), height + 1.

        Raises:
            StateError: the entry's round is not after the span's.
        """
        if entry.round <= self.head.round:
            raise StateError(
                f"entry of round {entry.round} cannot follow round {self.head.round}, which is already absorbed"
            )
        return SpanState(head=advance_head(self.head, entry), anchor_N=anchor_N, momentum_N=momentum_N)


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


def genesis_state(anchor_N: Vector, founding_roster: Digest) -> SpanState:
    """Return the initial state of a span: zero momentum, no entries, d = the content digest, founding limits.

    Args:
        anchor_N: initial values; copied, with values too small for an agreed state set to zero.
        founding_roster: digest of roster 0.
    Raises:
        StateError: a value is not finite or too large.
    """
    wild = len(anchor_N) - int(np.count_nonzero(np.abs(anchor_N) <= LARGEST_ANCHOR))
    if wild:
        raise StateError(
            f"{wild} of {len(anchor_N)} initial values are not finite or beyond {LARGEST_ANCHOR:.3g}; "
            "found the run with another model or seed"
        )
    start_N, momentum_N = copy_of(anchor_N), zero_vector(len(anchor_N))
    zero_small(start_N)
    head = SpanHead(
        digest=content_digest(start_N, momentum_N, ZERO_DIGEST),
        height=0,
        round=GENESIS_ROUND,
        roster=founding_roster,
        radius=founding_radius(len(start_N)),
        median_weight=FOUNDING_WEIGHT,
    )
    return SpanState(head=head, anchor_N=start_N, momentum_N=momentum_N)


def absorb(state: SpanState, *, entry: AbsorbedEntry, update_N: Vector, rule: OuterRule) -> SpanState:
    """Apply one valid entry to a span atomically: outer step, d ← H(d, entry digest), height + 1.

    The caller has validated the entry: signature, parent, majority, radius.

    Args:
        state: the entry's parent.
        entry: the entry's values for the head.
        update_N: the decoded entry, shape (N,).
        rule: from the manifest.
    Raises:
        StateError: the entry's round is not after the span's, or its length differs.
        NonFiniteUpdate: the update or the step along it is not finite.
    """
    if len(update_N) != state.elements:
        raise StateError(f"an update of {len(update_N)} elements does not match a span of {state.elements}")
    anchor_N, momentum_N = apply_outer_step(state.anchor_N, state.momentum_N, update_N, rule.at(state.head.height))
    return state.followed_by(entry, anchor_N, momentum_N)


def is_sound(numbers_N: Vector, *, largest: float) -> bool:
    """Return whether all values are valid in φ (`largest` = `LARGEST_ANCHOR`) or m (`LARGEST_MOMENTUM`)."""
    return bool(is_within(numbers_N, np.float32(largest).view(np.uint32)))


def content_digest(anchor_N: Vector, momentum_N: Vector, chain_digest: Digest) -> Digest:
    """Return x = H(φ, m, d) over little-endian float32 bytes; d is `ZERO_DIGEST` at founding, where x becomes d."""
    return blake3_of(_CONTENT_LABEL, _little_endian(anchor_N), _little_endian(momentum_N), chain_digest)


def state_digest(states: Sequence[SpanState]) -> Digest:
    """Return one digest over the bytes of spans, in order of fragment and span: equal means equal φ, m and d."""
    contents = (content_digest(state.anchor_N, state.momentum_N, state.head.digest) for state in states)
    return sha256(_STATE_LABEL, *contents)


def _little_endian(vector_N: Vector) -> memoryview:
    return np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B")
