"""The vector work of a peer that is not training: check entries, average contributions, hash and cut spans.

Plain functions for the one worker thread; the event loop never touches a whole vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from p2p_diloco.codec.codec import Codec
from p2p_diloco.errors import FrameError, NonFiniteUpdate, PeerError, RoundError
from p2p_diloco.ids import Digest, PeerId, SpanHead, short_peer_id
from p2p_diloco.kernels.choice import block_kernels, span_kernels, vector_kernels
from p2p_diloco.outer.advance import PreparedContribution, shrink_contribution
from p2p_diloco.outer.mean import check_mean, shares_of
from p2p_diloco.outer.state import SpanState, content_digest
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage

MOST_SHRINKS = 16
_NORM_SLACK = 1.0 + 1e-6
"""Sender and reducer multiply the same two float32 numbers, but the sender's shrinking may end a rounding too high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """The run's codecs; `rounds_stochastically` says how entries are rounded. Means of rows are rounded to nearest."""

    contribution: Codec
    row_mean: Codec
    entry: Codec
    rounds_stochastically: bool

    def of(self, stage: Stage) -> tuple[Codec, Codec]:
        """Return what the parts of a mean come in, and what it leaves in."""
        source = self.row_mean if stage is Stage.FINISH else self.contribution
        return source, self.row_mean if stage is Stage.ROW else self.entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """An encoded mean, whose contributions are in it, its exact norm, and who was left out for what."""

    sound: frozenset[PeerId]
    payload: bytes
    norm: float
    dropped: tuple[tuple[PeerId, str], ...]


def warm_up() -> None:
    """Have all loops compiled: what was never compiled on this machine takes seconds, and the first round has none."""
    block_kernels()
    vector_kernels()
    span_kernels()


def encode_contribution(
    codec: Codec, prepared: PreparedContribution, norm: Callable[[bytes], float] | None = None
) -> tuple[PreparedContribution, bytes]:
    """Encode a contribution so that what it decodes to is within its limit.

    Args:
        norm: exact norm of an encoded vector, for whoever keeps them; computed unless given.
    Returns:
        The contribution as it was encoded, shrunk if rounding had made it too long, and its encoding.
    """
    norm = norm if norm is not None else lambda payload: payload_norm(codec, payload, len(prepared.delta_N))
    for _ in range(MOST_SHRINKS):
        payload = codec.encode(prepared.delta_N)
        shrunk = shrink_contribution(prepared, norm(payload))
        if shrunk is prepared:
            return prepared, payload
        prepared = shrunk
    return prepared, codec.encode(prepared.delta_N)


def payload_norm(codec: Codec, payload: bytes, elements: int) -> float:
    """Return the exact norm of an encoded vector.

    Raises:
        FrameError: wrong size, or not finite.
    """
    return math.sqrt(codec.squared_norm(payload, elements))


def reduce_parts(action: ReduceSpan, codecs: Codecs, elements: int) -> Reduced | str:
    """Average the sound parts in roster order and encode the mean; or say why there is none."""
    source, target = codecs.of(action.stage)
    kept, dropped = [], []
    for part in action.parts:
        try:
            _check_part(part, action.norm_limit, source, elements)
            kept.append(part)
        except PeerError as error:
            dropped.append((part.peer, str(error)))
    if not kept:
        return "no contribution was sound: " + "; ".join(f"{short_peer_id(peer)} {text}" for peer, text in dropped)
    try:
        mean_N = _mean_of(kept, source, elements)
        is_entry = action.stage is not Stage.ROW
        seed = action.rounding_seed if codecs.rounds_stochastically and is_entry else None
        payload = target.encode(mean_N, rounding_seed=seed)
    except (NonFiniteUpdate, RoundError) as error:
        return str(error)
    return Reduced(
        sound=frozenset(part.peer for part in kept),
        payload=payload,
        norm=payload_norm(target, payload, elements),
        dropped=tuple(dropped),
    )


def _check_part(part: Part, norm_limit: float, codec: Codec, elements: int) -> None:
    norm = payload_norm(codec, part.payload, elements)
    if norm > norm_limit * _NORM_SLACK:
        raise PeerError(f"its contribution has norm {norm:.4g}, beyond the limit {norm_limit:.4g}")


def _mean_of(parts: Sequence[Part], codec: Codec, elements: int) -> Vector:
    """Return what `weighted_mean` returns of the decoded parts, without any of them in memory."""
    shares = shares_of([part.weight for part in parts], len(parts))
    mean_N = codec.add_up([part.payload for part in parts], shares, elements)
    check_mean(mean_N, len(parts))
    return mean_N


def content_digests(states: Sequence[SpanState]) -> tuple[tuple[Digest, Digest], ...]:
    """Return the pair of chain and content digest of each span."""
    return tuple(
        (state.head.digest, content_digest(state.anchor_N, state.momentum_N, state.head.digest)) for state in states
    )


def state_bytes(state: SpanState) -> bytes:
    """Return anchor, then momentum, as float32 little-endian: what a span's transfer carries."""
    return np.concatenate((state.anchor_N, state.momentum_N)).astype("<f4", copy=False).tobytes()


def is_finite_piece(piece: bytes) -> bool:
    """Tell whether a piece of a transfer holds whole, finite numbers: nothing else may reach φ."""
    return len(piece) % 4 == 0 and bool(np.isfinite(np.frombuffer(piece, dtype="<f4")).all())


def state_from_bytes(head: SpanHead, raw: bytes) -> SpanState:
    """Read a transferred span.

    Raises:
        FrameError: it holds a number that is not finite.
    """
    both_N = np.frombuffer(raw, dtype="<f4").astype(np.float32)
    if not np.isfinite(both_N).all():
        raise FrameError("a transferred span holds numbers that are not finite")
    half = len(both_N) // 2
    return SpanState(head=head, anchor_N=both_N[:half].copy(), momentum_N=both_N[half:].copy())
