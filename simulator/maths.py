"""The vector maths of a whole simulated swarm, done once for all peers.

Peers hold the same bytes, so the same entry on the same state is computed once, and its immutable result is shared. A
peer whose bytes differ, because a bit of its memory flipped, holds another object and gets its own results.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2p_diloco.codec.codec import Codec
from p2p_diloco.codec.vectors import Vector, iterate_blocks, num_blocks, read_only
from p2p_diloco.errors import RoundError
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.outer.mean import RadialBlocks, check_mean, radial_mean_of, shares_of
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span.serve import state_bytes
from p2p_diloco.span_log import AbsorbedEntry

OUTER = OuterRule(learning_rate=1.0, momentum=0.5, final_share=0.25, planned_entries=12)
"""The outer rate falls within the length of most simulations, and stays low in longer ones."""
MERGE = MergeRule()


class SharedMaths:
    """Cached pure functions of `outer/` and `codec/`; one instance per simulated swarm."""

    def __init__(self, codecs: Codecs, span_elements: int) -> None:
        self.codecs = codecs
        self.span_elements = span_elements
        self._decoded: dict[tuple[str, bytes], Vector] = {}
        self._norms: dict[tuple[str, bytes], float] = {}
        self._followed: dict[tuple[SpanState, Digest], SpanState] = {}
        self._raw: dict[SpanState, bytes] = {}

    def decode(self, codec: Codec, payload: bytes | memoryview) -> Vector:
        """Return the decoded payload; read-only, shape (N,)."""
        key = (codec.name, bytes(payload))
        found = self._decoded.get(key)
        if found is None:
            found = self._decoded[key] = read_only(codec.decode(payload, self.span_elements))
        return found

    def norm(self, codec: Codec, payload: bytes | memoryview) -> float:
        """Return the exact norm of the decoded payload."""
        key = (codec.name, bytes(payload))
        found = self._norms.get(key)
        if found is None:
            found = self._norms[key] = codec.norm(payload, self.span_elements)
        return found

    def follow(self, state: SpanState, entry: AbsorbedEntry, payload: bytes | memoryview) -> SpanState:
        """Return the state after an entry; the same object for all peers that hold the same state object."""
        key = (state, entry.digest)
        found = self._followed.get(key)
        if found is None:
            update_N = self.decode(self.codecs.entry, payload)
            found = self._followed[key] = absorb(state, entry=entry, update_N=update_N, rule=OUTER)
        return found

    def raw(self, state: SpanState) -> bytes:
        """Return the bytes of the anchor, then of the momentum, as a transfer carries them."""
        found = self._raw.get(state)
        if found is None:
            found = self._raw[state] = state_bytes(state)
        return found


def mean_of_span(
    codecs: Codecs, span: SpanId, vectors: Sequence[Vector], weights: Sequence[float], longest_medians: float = 0.0
) -> Vector:
    """Return the mean that a reducer of this span should compute: radial if the run has marks for the span."""
    is_radial_B = codecs.radial.get(span)
    if is_radial_B is None and not longest_medians:
        return weighted_mean(vectors, weights)
    marks_B = np.zeros(num_blocks(len(vectors[0])), np.bool_) if is_radial_B is None else is_radial_B
    return radial_mean(vectors, weights, marks_B, longest_medians)


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return Σ wᵢ vᵢ / Σ wᵢ, summed in the given order (the roster's), with separate multiply and add.

    Reducers add up encoded vectors instead (`Codec.add_up`), with the same bits.

    Args:
        vectors: decoded contributions in roster order; float32, all of shape (N,). Not changed.
        weights: one per vector, finite and not negative.
    Returns:
        The mean, freshly allocated.
    Raises:
        RoundError: counts or lengths differ, a weight is negative or not finite, or all weights are zero.
        NonFiniteUpdate: the mean holds a NaN or an infinity.
    """
    lengths = {len(vector_N) for vector_N in vectors}
    if len(lengths) > 1:
        raise RoundError(f"cannot average contributions of {sorted(lengths)} elements; expected one length")
    shares = shares_of(weights, len(vectors))
    mean_N = np.empty_like(vectors[0])
    with np.errstate(over="ignore", invalid="ignore"):
        for block in iterate_blocks(len(mean_N)):
            np.multiply(vectors[0][block], shares[0], out=mean_N[block])
            for vector_N, share in zip(vectors[1:], shares[1:], strict=True):
                np.add(mean_N[block], np.multiply(vector_N[block], share), out=mean_N[block])
    check_mean(mean_N, len(vectors))
    return mean_N


def radial_mean(
    vectors: Sequence[Vector], weights: Sequence[float], is_radial_B: RadialBlocks, longest_medians: float = 0.0
) -> Vector:
    """Return the radial mean of vectors of one length; see `radial_mean_of`."""
    parts = [vector_N.__getitem__ for vector_N in vectors]
    return radial_mean_of(parts, len(vectors[0]), weights, is_radial_B, longest_medians=longest_medians)
