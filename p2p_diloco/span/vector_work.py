"""The vector work of a peer besides training: check entries, average contributions, hash and cut spans.

Plain functions for the single worker thread; the event loop never touches a whole vector.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from p2p_diloco.codec.blocks import Int4Codec, is_whole, parts_of
from p2p_diloco.codec.codec import Codec
from p2p_diloco.codec.exact_norm import squared_norm_of_bfloat16
from p2p_diloco.codec.rounding import RoundingBits
from p2p_diloco.errors import NonFiniteUpdate, PeerError, RoundError
from p2p_diloco.ids import Digest, PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.kernels.bounds import LARGEST_ANCHOR, LARGEST_MOMENTUM
from p2p_diloco.kernels.choice import compile_loops
from p2p_diloco.kernels.operations import NO_NOISE, average4
from p2p_diloco.log.head import SpanHead
from p2p_diloco.log.limits import balanced
from p2p_diloco.memory.heap import shed_compiler, trim_heap
from p2p_diloco.memory.slabs import passing_bytes
from p2p_diloco.outer.advance import PreparedContribution
from p2p_diloco.outer.mean import check_mean, shares_of
from p2p_diloco.outer.radial import RADIAL_BLOCK, RadialBlocks, radial_mean_of
from p2p_diloco.outer.state import SpanState, content_digest, is_sound
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.round.influence import Agreement
from p2p_diloco.protocol.wire.entry import HEAD_LAYOUT
from p2p_diloco.protocol.wire.frames import to_bytes
from p2p_diloco.protocol.wire.messages import SpanReply

MOST_SHRINKS = 16
_COMPARED, _COMPARED_PIECES = 1 << 14, 4
"""Elements of a span that are compared with an entry, and the number of places from which they are taken."""
_ALL_PLAIN: RadialBlocks = np.empty(0, np.bool_)
_NORM_SLACK = 1.0 + 1e-6
"""Tolerance for norms: both ends multiply the same float32 numbers, but a shrunk one may end one rounding too high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """The codecs and means of a run's vectors.

    Attributes:
        contribution, row_mean, entry: the run's codecs.
        rounds_stochastically: whether entries are rounded stochastically, with a seed that anyone can repeat. Row means
            are rounded to nearest.
        radial: for each span, which blocks have a radial mean; spans that are missing have a plain mean.
    """

    contribution: Codec
    row_mean: Codec
    entry: Codec
    rounds_stochastically: bool = True
    radial: Mapping[SpanId, RadialBlocks] = field(default_factory=dict, compare=False)

    def of(self, stage: Stage) -> tuple[Codec, Codec]:
        """Return the codec of the parts of a mean, and the codec of the mean."""
        source = self.row_mean if stage is Stage.FINISH else self.contribution
        return source, self.row_mean if stage is Stage.ROW else self.entry


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMean:
    """An encoded mean, its exact norm, the peers that are in it, and the peers left out with the reasons.

    Attributes:
        measured: exact norms of the parts that are in it.
    """

    measured: Mapping[PeerId, float]
    payload: bytes | memoryview
    norm: float
    dropped: tuple[tuple[PeerId, str], ...]

    @property
    def sound(self) -> frozenset[PeerId]:
        """The peers that are in it."""
        return frozenset(self.measured)


def warm_up() -> None:
    """Compile all loops now: a loop never compiled on this machine takes seconds, too long for the first round.

    Then free the compiler and its part of the heap, which are not needed any more. Also exempt all imported objects
    from garbage collection: scanning the 300,000 objects of torch, numba and hivemind takes a tenth of a second, during
    which neither training nor the loop runs.
    """
    compile_loops()
    shed_compiler()
    trim_heap()
    gc.freeze()


def encode_contribution(
    codec: Codec, prepared: PreparedContribution, norm: Callable[[bytes], float] | None = None
) -> tuple[PreparedContribution, bytes]:
    """Encode a contribution so that its decoded norm is within its limit.

    Args:
        norm: returns the exact norm of an encoded vector, for callers that cache norms; computed unless given.
    Returns:
        The contribution as encoded, shrunk if rounding made it too long, and its encoding.
    """
    payload, limit = b"", prepared.limit
    norm = norm if norm is not None else lambda payload: payload_norm(codec, payload, len(prepared.delta_N))

    def encode(factor: float) -> float:
        nonlocal prepared, payload
        if factor != 1.0:
            prepared = replace(prepared, delta_N=np.multiply(prepared.delta_N, np.float32(factor)))
        payload = codec.encode(prepared.delta_N)
        return norm(payload)

    encode_within(limit, encode)
    return prepared, payload


def encode_within(limit: float, encode: Callable[[float], float]) -> bool:
    """Encode a vector, shorter each time, until the norm of what was encoded is within the limit of reducers.

    Rounding to a few bits lengthens a vector slightly, so this takes one or two attempts, and one more for a vector
    that is too long itself.

    Args:
        encode: multiplies the vector by a factor, which is 1 at first, encodes it, and returns the norm.
    Returns:
        Whether it is within the limit; False after `MOST_SHRINKS` attempts, or if a norm is not finite.
    """
    factor = 1.0
    for _ in range(MOST_SHRINKS):
        norm = encode(factor)
        if norm <= limit:
            return True
        if not math.isfinite(norm):
            return False
        factor = limit / norm * (1.0 - 2.0**-10)
    return False


def payload_norm(codec: Codec, payload: bytes | memoryview, elements: int) -> float:
    """Return the exact norm of an encoded vector.

    Raises:
        FrameError: wrong size, or not finite.
    """
    return math.sqrt(codec.squared_norm(payload, elements))


def reduce_parts(action: ReduceSpan, codecs: Codecs, elements: int) -> EncodedMean | str:
    """Average the sound parts in roster order and encode the mean, or return the reason why there is none."""
    at_once = _reduce_at_once(action, codecs, elements)
    if at_once is not None:
        return at_once
    source, target = codecs.of(action.stage)
    kept, dropped, measured = [], [], {}
    for part in action.parts:
        try:
            measured[part.peer] = _check_part(part, action.norm_limit, source, elements)
            kept.append(part)
        except PeerError as error:
            dropped.append((part.peer, str(error)))
    if dropped and (at_once := _reduce_at_once(replace(action, parts=tuple(kept)), codecs, elements)) is not None:
        return replace(at_once, dropped=tuple(dropped))
    if not kept:
        return "no contribution was sound: " + "; ".join(f"{short_peer_id(peer)} {text}" for peer, text in dropped)
    try:
        mean_N = _mean_of(kept, action.stage, source, elements, codecs.radial.get(action.span))
        payload = target.encode(mean_N, rounding_seed=_seed_of(action, codecs))
    except (NonFiniteUpdate, RoundError) as error:
        return str(error)
    return EncodedMean(
        measured=measured,
        payload=payload,
        norm=payload_norm(target, payload, elements),
        dropped=tuple(dropped),
    )


def _reduce_at_once(action: ReduceSpan, codecs: Codecs, elements: int) -> EncodedMean | None:
    """Do the work of `reduce_parts` in one pass; return None if no loop can, or if something must be refused."""
    source, target = codecs.of(action.stage)
    if not isinstance(source, Int4Codec) or not isinstance(target, Int4Codec):
        return None
    if not is_whole(elements) or not action.parts:
        return None
    try:
        parts = [source.parts(part.payload, elements) for part in action.parts]
        shares = shares_of(_weights_of(action.parts, action.stage), len(parts))
    except (PeerError, RoundError):
        return None
    room = passing_bytes(target.encoded_bytes(elements))
    encoded = np.frombuffer(room, dtype=np.uint8)
    scale_bits_B, packed = parts_of(encoded, elements)
    squares_PB = np.empty((len(parts) + 1, len(scale_bits_B)), dtype=np.int64)
    seed, marks_B, limits = _seed_of(action, codecs), codecs.radial.get(action.span, _ALL_PLAIN), source.loop_limits()
    draw = partial(RoundingBits(seed).draw, elements) if seed is not None else lambda: NO_NOISE
    if not average4(parts, shares, marks_B, draw, limits, scale_bits_B, packed, squares_PB):
        return None
    norms = [
        math.sqrt(squared_norm_of_bfloat16(bits_B, squares_B))
        for bits_B, squares_B in zip([*(bits_B for bits_B, _ in parts), scale_bits_B], squares_PB, strict=True)
    ]
    if any(_is_too_long(norm, action.norm_limit) for norm in norms[:-1]):
        return None
    measured = {part.peer: norm for part, norm in zip(action.parts, norms[:-1], strict=True)}
    return EncodedMean(measured=measured, payload=room.toreadonly(), norm=norms[-1], dropped=())


def _seed_of(action: ReduceSpan, codecs: Codecs) -> bytes | None:
    """Return the seed for rounding an entry; None rounds to nearest, as for row means."""
    return action.rounding_seed if codecs.rounds_stochastically and action.stage is not Stage.ROW else None


def _is_too_long(norm: float, limit: float) -> bool:
    return norm > limit * _NORM_SLACK


def _check_part(part: Part, norm_limit: float, codec: Codec, elements: int) -> float:
    """Return the norm of a part, or raise PeerError."""
    norm = payload_norm(codec, part.payload, elements)
    if _is_too_long(norm, norm_limit):
        raise PeerError(f"its contribution has norm {norm:.4g}, beyond the limit {norm_limit:.4g}")
    return norm


def _weights_of(parts: Sequence[Part], stage: Stage) -> Sequence[float]:
    """Return the weights of the parts; those of a row are balanced, as its entry or row mean states."""
    weights = [part.weight for part in parts]
    return weights if stage is Stage.FINISH else balanced(weights)


def _mean_of(
    parts: Sequence[Part], stage: Stage, codec: Codec, elements: int, is_radial_B: RadialBlocks | None
) -> Vector:
    """Return the mean of the decoded parts. No part is in memory as a whole."""
    weights = _weights_of(parts, stage)
    if is_radial_B is not None:
        return radial_mean_of([codec.reader(part.payload, elements) for part in parts], elements, weights, is_radial_B)
    mean_N = codec.add_up([part.payload for part in parts], shares_of(weights, len(parts)), elements)
    check_mean(mean_N, len(parts))
    return mean_N


def agreement_of(
    entry: bytes | memoryview, own: bytes | memoryview, codecs: Codecs, elements: int, secret: bytes
) -> Agreement:
    """Return how an encoded entry agrees with this peer's own encoded contribution to it.

    Of a long span, pieces are compared.

    Args:
        secret: determines which. Who signs the entry must not know it.
    """
    theirs, mine = codecs.entry.reader(entry, elements), codecs.contribution.reader(own, elements)
    products = own_squares = entry_squares = 0.0
    compared = _compared(elements, int.from_bytes(secret[:8], "little"))
    for here in compared:
        entry_N, own_N = theirs(here).astype(np.float64), mine(here).astype(np.float64)
        products += float(own_N @ entry_N)
        own_squares, entry_squares = own_squares + float(own_N @ own_N), entry_squares + float(entry_N @ entry_N)
    length = math.sqrt(own_squares) * math.sqrt(entry_squares)
    return Agreement(products / length if length else 0.0, 1, 1 / sum(here.stop - here.start for here in compared))


def _compared(elements: int, number: int) -> list[slice]:
    if elements <= _COMPARED:
        return [slice(0, elements)]
    length, apart = _COMPARED // _COMPARED_PIECES, elements // _COMPARED_PIECES // RADIAL_BLOCK * RADIAL_BLOCK
    first = number % ((apart - length) // RADIAL_BLOCK + 1) * RADIAL_BLOCK
    return [slice(first + place * apart, first + place * apart + length) for place in range(_COMPARED_PIECES)]


def content_digests(states: Sequence[SpanState]) -> tuple[tuple[Digest, Digest], ...]:
    """Return the chain digest and the content digest of each span.

    The content digest covers the whole head, so it also identifies the span's height, round and radius.
    """
    return tuple((state.head.digest, _content_of(state)) for state in states)


def _content_of(state: SpanState) -> Digest:
    content = content_digest(state.anchor_N, state.momentum_N, state.head.digest)
    return sha256(content, to_bytes(state.head, HEAD_LAYOUT))


def state_bytes(state: SpanState) -> bytes:
    """Return anchor, then momentum, as little-endian float32: the content of a span's transfer."""
    return np.concatenate((state.anchor_N, state.momentum_N)).astype("<f4", copy=False).tobytes()


def cut_piece(state: SpanState, offset: int, most_bytes: int) -> memoryview:
    """Return a piece of what `state_bytes` returns, as a view of the span's own memory: nothing is copied.

    A piece never crosses the end of the anchor, so it may be shorter. Past the end of the momentum it is empty.
    """
    half = 4 * state.elements
    vector_N, start = (state.anchor_N, offset) if offset < half else (state.momentum_N, offset - half)
    return np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B")[start : start + most_bytes]


def is_sound_piece(reply: SpanReply) -> bool:
    """Return whether a piece of a transfer holds complete numbers within the bounds of φ and m."""
    if len(reply.piece) % 4:
        return False
    numbers_N = np.frombuffer(reply.piece, dtype="<f4").astype("=f4", copy=False)
    left = max(0, reply.total_bytes // 2 - reply.offset) // 4  # numbers of φ, which comes first
    return is_sound(numbers_N[:left], largest=LARGEST_ANCHOR) and is_sound(numbers_N[left:], largest=LARGEST_MOMENTUM)


def state_from_bytes(head: SpanHead, raw: bytes | memoryview) -> SpanState:
    """Build a span from transferred bytes whose pieces were found finite.

    Args:
        raw: ownership is transferred; the vectors use its memory.
    """
    both_N = np.frombuffer(raw, dtype="<f4").astype(np.float32, copy=False)
    half = len(both_N) // 2
    return SpanState(head=head, anchor_N=both_N[:half], momentum_N=both_N[half:])
