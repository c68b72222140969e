"""The vector maths of a whole simulated swarm, done once for all peers.

Peers hold the same bytes, so the same entry on the same state is computed once, and its immutable result is shared. A
peer whose bytes differ, because a bit of its memory flipped, holds another object and gets its own results.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p_diloco.codec.codec import Codec
from p2p_diloco.codec.vectors import Vector, read_only
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.log import AbsorbedEntry
from p2p_diloco.outer.mean import RadialBlocks, radial_mean_of, weighted_mean
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span.serve import state_bytes

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


def mean_of_span(codecs: Codecs, span: SpanId, vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return the mean that a reducer of this span should compute: radial if the run has marks for the span."""
    is_radial_B = codecs.radial.get(span)
    if is_radial_B is None:
        return weighted_mean(vectors, weights)
    return radial_mean(vectors, weights, is_radial_B)


def radial_mean(vectors: Sequence[Vector], weights: Sequence[float], is_radial_B: RadialBlocks) -> Vector:
    """Return the radial mean of vectors of one length; see `radial_mean_of`."""
    return radial_mean_of([vector_N.__getitem__ for vector_N in vectors], len(vectors[0]), weights, is_radial_B)
