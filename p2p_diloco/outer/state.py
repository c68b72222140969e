"""A span's agreed state: anchor, momentum and where its log stands, with the digests that peers compare.

A chain digest says which entries were absorbed, a content digest what the bytes are. Peers with equal chain digests
must have equal content digests; who differs has bad memory or a bug.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2p_diloco.errors import StateError
from p2p_diloco.ids import ZERO_DIGEST, Digest, blake3_of, sha256
from p2p_diloco.kernels.bounds import LARGEST_ANCHOR, SMALLEST
from p2p_diloco.log.head import GENESIS_ROUND, AbsorbedEntry, SpanHead, advance_head
from p2p_diloco.log.limits import FOUNDING_WEIGHT, founding_radius
from p2p_diloco.memory.slabs import copy_of, zero_vector
from p2p_diloco.outer.outer_step import OuterRule, apply_outer_step
from p2p_diloco.outer.vector import Vector, is_vector, loops_for, read_only, zero_small

# Each kind of digest begins with a text of its own, so that none can pass for another.
_CONTENT_LABEL = b"p2p-diloco span content 2\n"
_STATE_LABEL = b"p2p-diloco state 1\n"


# Not compared by value: `==` on arrays has no single truth value. Compare digests.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanState:
    """What all peers agree on for one span.

    The arrays are handed over: they are made read-only, and nobody writes to them any more.

    Attributes:
        head: where the span's log stands.
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
        self.anchor_N.flags.writeable = False
        self.momentum_N.flags.writeable = False

    @property
    def elements(self) -> int:
        """N."""
        return len(self.anchor_N)

    def followed_by(self, entry: AbsorbedEntry, anchor_N: Vector, momentum_N: Vector) -> SpanState:
        """Return the span after an entry whose outer step led to these: d ← H(d, entry digest), height + 1.

        Raises:
            StateError: the entry's round is not behind the span's.
        """
        if entry.round <= self.head.round:
            raise StateError(f"entry of round {entry.round} cannot follow round {self.head.round}, absorbed already")
        return SpanState(head=advance_head(self.head, entry), anchor_N=anchor_N, momentum_N=momentum_N)


def genesis_state(anchor_N: Vector, founding_roster: Digest) -> SpanState:
    """Found a span: momentum zero, nothing absorbed, d = the content digest of the start, limits as at every founding.

    Args:
        anchor_N: the start; copied, with zeros for what is too small for an agreed state.
        founding_roster: digest of roster 0.
    Raises:
        StateError: the start holds numbers that are not finite, or too large.
    """
    wild = len(anchor_N) - int(np.count_nonzero(np.abs(anchor_N) <= LARGEST_ANCHOR))
    if wild:
        raise StateError(
            f"the start holds {wild} numbers among {len(anchor_N)} that are not finite or beyond {LARGEST_ANCHOR:.3g}; "
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
    """Apply one valid entry to a span: outer step, d ← H(d, entry digest), height + 1. Whole or not at all.

    The caller has checked the entry's predicate: signature, parent, majority, radius.

    Args:
        state: the entry's parent. Not changed.
        entry: what the head takes from it.
        update_N: the decoded entry, shape (N,). Not changed.
        rule: from the manifest.
    Raises:
        StateError: the entry's round is not behind the span's, or its length is another.
        NonFiniteUpdate: the update or the step along it is not finite.
    """
    if len(update_N) != state.elements:
        raise StateError(f"update of {len(update_N)} elements does not fit a span of {state.elements}")
    anchor_N, momentum_N = apply_outer_step(state.anchor_N, state.momentum_N, update_N, rule)
    return state.followed_by(entry, anchor_N, momentum_N)


def is_sound(numbers_N: Vector, *, largest: float) -> bool:
    """Return whether numbers may be φ (`largest` = `LARGEST_ANCHOR`) or m (`LARGEST_MOMENTUM`); `kernels/bounds.py`."""
    loops = loops_for(numbers_N)
    if loops is not None:
        return bool(loops.is_within(read_only(numbers_N), np.float32(largest).view(np.uint32)))
    magnitude_N = np.abs(numbers_N)
    return bool(np.all((magnitude_N == 0) | ((magnitude_N >= SMALLEST) & (magnitude_N <= largest))))


def content_digest(anchor_N: Vector, momentum_N: Vector, chain_digest: Digest) -> Digest:
    """Return x = H(φ, m, d) over little-endian float32 bytes; d is `ZERO_DIGEST` at founding, where x becomes d."""
    return blake3_of(_CONTENT_LABEL, _little_endian(anchor_N), _little_endian(momentum_N), chain_digest)


def state_digest(states: Sequence[SpanState]) -> Digest:
    """Return one digest for the bytes of spans, in order of fragment and span: equal means equal φ, m and d."""
    contents = (content_digest(state.anchor_N, state.momentum_N, state.head.digest) for state in states)
    return sha256(_STATE_LABEL, *contents)


def _little_endian(vector_N: Vector) -> memoryview:
    return np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B")
