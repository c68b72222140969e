"""Average the contributions to one span, as a reducer, and compare an entry with this peer's own contribution.

Plain functions for the single worker thread; the event loop never touches a whole vector.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from p2p_diloco.codec.codec import Codec, Int4Codec, RoundingBits, is_whole
from p2p_diloco.codec.codes import NO_NOISE, average4, lengths_of
from p2p_diloco.codec.vectors import BLOCK, Vector, Wide, num_blocks, squared_norm_of_bfloat16
from p2p_diloco.errors import NonFiniteUpdate, PeerError, RoundError
from p2p_diloco.ids import PeerId, SpanId, short_peer_id
from p2p_diloco.outer.mean import (
    NO_LIMITS,
    RadialBlocks,
    check_mean,
    lengths_of_blocks,
    longest_blocks,
    lower_medians,
    radial_mean_of,
    shares_of,
)
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.round.influence import Agreement
from p2p_diloco.span_log import LONGEST_BLOCK, levelled

_COMPARED, _COMPARED_PIECES = 1 << 14, 4
"""Elements of a span that are compared with an entry, and the number of places from which they are taken."""
_COMPARED_OF_EACH, _PIECES_OF_EACH = 1 << 12, 8
"""Likewise of each contribution, for the comparison with the others."""
_DEVIATIONS = 3.0
"""Standard deviations of chance by which a contribution must point against the others."""
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
        against: those left out because they point against the others.
    """

    measured: Mapping[PeerId, float]
    payload: bytes | memoryview
    norm: float
    dropped: tuple[tuple[PeerId, str], ...]
    against: frozenset[PeerId] = frozenset()

    @property
    def sound(self) -> frozenset[PeerId]:
        return frozenset(self.measured)


def reduce_parts(action: ReduceSpan, codecs: Codecs, elements: int, secret: bytes | None = b"") -> EncodedMean | str:
    """Average the sound parts in roster order and encode the mean, or return the reason why there is none.

    Args:
        secret: determines which pieces of a long span are compared among strangers; senders must not know it. None:
            nobody is left out for its direction, as when the mean of an entry is repeated.
    """
    against = _against_the_others(action, codecs, elements, secret)
    found = _reduce_at_once(_without(action, against), codecs, elements)
    if found is not None:
        return replace(found, dropped=tuple(against.items()), against=frozenset(against))
    source, target = codecs.of(action.stage)
    unsound, measured = dict[PeerId, str](), dict[PeerId, float]()
    for part in action.parts:
        try:
            measured[part.peer] = _check_part(part, action.norm_limit, source, elements)
        except PeerError as error:
            unsound[part.peer] = str(error)
    if unsound:
        against = _against_the_others(_without(action, unsound), codecs, elements, secret)
    left_out = against | unsound
    kept, dropped = _without(action, left_out), tuple(left_out.items())
    if dropped and (found := _reduce_at_once(kept, codecs, elements)) is not None:
        return replace(found, dropped=dropped, against=frozenset(against))
    if not kept.parts:
        return "no contribution was sound: " + "; ".join(f"{short_peer_id(peer)} {text}" for peer, text in dropped)
    try:
        mean_N = _mean_of(kept, codecs, elements)
        payload = target.encode(mean_N, rounding_seed=_seed_of(action, codecs))
    except (NonFiniteUpdate, RoundError) as error:
        return str(error)
    return EncodedMean(
        measured={part.peer: measured[part.peer] for part in kept.parts},
        payload=payload,
        norm=target.norm(payload, elements),
        dropped=dropped,
        against=frozenset(against),
    )


def _without(action: ReduceSpan, peers: Collection[PeerId]) -> ReduceSpan:
    return replace(action, parts=tuple(part for part in action.parts if part.peer not in peers)) if peers else action


def _against_the_others(action: ReduceSpan, codecs: Codecs, elements: int, secret: bytes | None) -> dict[PeerId, str]:
    """Return which of three or more strangers' contributions point against the sum of the others, with the reason.

    Only directions count, and no block has more influence on them than one of median length. No two agree by more than
    the median of all pairs, so that copies of one contribution do not speak for each other. Those that point against
    the others by more than chance are left out one by one, the worst first, and never as many as half. Whoever is left
    out keeps what it has learnt, and sends it again.
    """
    if secret is None or not _is_of_strangers(action) or len(action.parts) < 3:
        return {}
    source, _ = codecs.of(action.stage)
    compared = _compared(elements, int.from_bytes(secret[:8], "little"), _COMPARED_OF_EACH, _PIECES_OF_EACH)
    read = {part.peer: _pieces_of(part, source, elements, compared) for part in action.parts}
    directions = _directions_of({peer: pieces_N for peer, pieces_N in read.items() if pieces_N is not None})
    count = len(directions)
    if count < 3:
        return {}
    peers, directions_PN = list(directions), np.stack(list(directions.values()))
    products_PP = directions_PN @ directions_PN.T
    usual = float(np.median(products_PP[np.triu_indices(count, 1)]))
    products_PP = np.minimum(products_PP, max(usual, 0.0))
    # The mean square of the cosine of two vectors whose signs have nothing in common.
    variances_PP = np.square(directions_PN) @ np.square(directions_PN).T
    for each_PP in (products_PP, variances_PP):
        np.fill_diagonal(each_PP, 0.0)
    found, agreement_P, variance_P = dict[PeerId, str](), products_PP.sum(axis=1), variances_PP.sum(axis=1)
    while len(found) < (count - 1) // 2:
        excess_P = agreement_P + _DEVIATIONS * np.sqrt(variance_P.clip(min=0.0))
        worst = int(excess_P.argmin())
        if excess_P[worst] >= 0.0:
            break
        found[peers[worst]] = (
            "its contribution points against what the others have learnt (a mean cosine of "
            f"{agreement_P[worst] / (count - 1 - len(found)):.2f})"
        )
        agreement_P, variance_P = agreement_P - products_PP[worst], variance_P - variances_PP[worst]
        agreement_P[worst] = np.inf
    return found


def _pieces_of(part: Part, codec: Codec, elements: int, compared: Sequence[slice]) -> Vector | None:
    """Return pieces of a part in whole blocks, end to end; None if it cannot be read."""
    try:
        read = codec.reader(part.payload, elements)
        pieces_N = np.concatenate([read(here) for here in compared])
    except PeerError:
        return None
    return np.pad(pieces_N, (0, -len(pieces_N) % BLOCK))


def _directions_of(pieces: Mapping[PeerId, Vector]) -> dict[PeerId, Wide]:
    """Return the pieces of contributions at length 1, without those that have none.

    Before, blocks are shortened to their median length; those that fewer than three have do not count.
    """
    if len(pieces) < 3:
        return {}
    pieces_PN = np.stack(list(pieces.values()))
    lengths_PB = lengths_of_blocks(pieces_PN)
    most_B = lower_medians(lengths_PB)
    most_B[most_B == np.inf] = 0.0
    factors_PB = np.divide(
        np.minimum(lengths_PB, most_B), lengths_PB, out=np.zeros_like(lengths_PB), where=lengths_PB > 0
    )
    vectors_PN = pieces_PN * np.repeat(factors_PB, BLOCK, axis=1)
    sizes_P = np.sqrt(np.square(vectors_PN).sum(axis=1))
    found = zip(pieces, vectors_PN, sizes_P, strict=True)
    return {peer: vector_N / size for peer, vector_N, size in found if 0.0 < size < math.inf}


def _reduce_at_once(action: ReduceSpan, codecs: Codecs, elements: int) -> EncodedMean | None:
    """Do the work of `reduce_parts` in one pass; return None if no loop can, or if something must be refused."""
    source, target = codecs.of(action.stage)
    if not isinstance(source, Int4Codec) or not isinstance(target, Int4Codec):
        return None
    if not is_whole(elements) or not action.parts:
        return None
    try:
        parts = [source.parts(part.payload, elements) for part in action.parts]
        shares = shares_of(_weights_of(action), len(parts))
    except (PeerError, RoundError):
        return None
    longest_B = NO_LIMITS
    if _is_of_strangers(action):
        lengths = [lengths for part in parts if (lengths := lengths_of(part, source.least_code)) is not None]
        if len(lengths) < len(parts):
            return None
        longest_B = longest_blocks(np.stack(lengths), _marks_of(action, codecs, elements), LONGEST_BLOCK)
    room, scale_bits_B, packed = target.empty_encoding(elements)
    squares_PB = np.empty((len(parts) + 1, len(scale_bits_B)), dtype=np.int64)
    seed, marks_B, limits = _seed_of(action, codecs), codecs.radial.get(action.span, _ALL_PLAIN), source.loop_limits()
    draw = partial(RoundingBits(seed).draw, elements) if seed is not None else lambda: NO_NOISE
    if not average4(parts, shares, marks_B, longest_B, draw, limits, scale_bits_B, packed, squares_PB):
        return None
    norms = [
        math.sqrt(squared_norm_of_bfloat16(bits_B, squares_B))
        for bits_B, squares_B in zip([*(bits_B for bits_B, _ in parts), scale_bits_B], squares_PB, strict=True)
    ]
    if any(norm > action.norm_limit * _NORM_SLACK for norm in norms[:-1]):
        return None
    measured = {part.peer: norm for part, norm in zip(action.parts, norms[:-1], strict=True)}
    return EncodedMean(measured=measured, payload=room.toreadonly(), norm=norms[-1], dropped=())


def _seed_of(action: ReduceSpan, codecs: Codecs) -> bytes | None:
    """Return the seed for rounding an entry; None rounds to nearest, as for row means."""
    return action.rounding_seed if codecs.rounds_stochastically and action.stage is not Stage.ROW else None


def _check_part(part: Part, norm_limit: float, codec: Codec, elements: int) -> float:
    norm = codec.norm(part.payload, elements)
    if norm > norm_limit * _NORM_SLACK:
        raise PeerError(f"its contribution has norm {norm:.4g}, beyond the limit {norm_limit:.4g}")
    return norm


def _is_of_strangers(action: ReduceSpan) -> bool:
    """Return whether the parts are strangers' contributions; means of rows are not."""
    return action.levels and action.stage is not Stage.FINISH


def _weights_of(action: ReduceSpan) -> Sequence[float]:
    """Return the weights of the parts; those of a row of strangers are levelled, as its entry or row mean states."""
    weights = [part.weight for part in action.parts]
    return levelled(weights) if _is_of_strangers(action) else weights


def _mean_of(action: ReduceSpan, codecs: Codecs, elements: int) -> Vector:
    """Return the mean of the decoded parts. No part is in memory as a whole."""
    codec, _ = codecs.of(action.stage)
    weights, parts = _weights_of(action), action.parts
    longest = LONGEST_BLOCK if _is_of_strangers(action) else 0.0
    if longest or action.span in codecs.radial:
        readers, marks_B = [codec.reader(part.payload, elements) for part in parts], _marks_of(action, codecs, elements)
        return radial_mean_of(readers, elements, weights, marks_B, longest_medians=longest)
    mean_N = codec.add_up([part.payload for part in parts], shares_of(weights, len(parts)), elements)
    check_mean(mean_N, len(parts))
    return mean_N


def _marks_of(action: ReduceSpan, codecs: Codecs, elements: int) -> RadialBlocks:
    marks_B = codecs.radial.get(action.span)
    return np.zeros(num_blocks(elements), np.bool_) if marks_B is None else marks_B


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


def _compared(elements: int, number: int, most: int = _COMPARED, pieces: int = _COMPARED_PIECES) -> list[slice]:
    length, apart = most // pieces, elements // pieces // BLOCK * BLOCK
    if elements <= most or apart < length:
        return [slice(0, elements)]
    first = number % ((apart - length) // BLOCK + 1) * BLOCK
    return [slice(first + place * apart, first + place * apart + length) for place in range(pieces)]
