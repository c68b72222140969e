"""The worker's pure functions: check, average, hash, cut, read."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from p2p_diloco.codec.codec import Codec, codec_named
from p2p_diloco.codec.vectors import Vector, compiled_loops
from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.outer.state import PreparedContribution, SpanState
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.wire.messages import SpanReply
from p2p_diloco.span.fused import MOST_SHRINKS, encode_contribution
from p2p_diloco.span.known_answer import warm_up
from p2p_diloco.span.reduce import Codecs, EncodedMean, agreement_of, reduce_parts
from p2p_diloco.span.serve import content_digests, cut_piece, is_sound_piece, state_bytes, state_from_bytes
from p2p_diloco.span_log import LONGEST_BLOCK, SpanHead

ANN, BEN, CLEO, DORA = (PeerId(sha256(name)) for name in (b"ann", b"ben", b"cleo", b"dora"))
FLOAT32, INT4 = codec_named("float32"), codec_named("int4")
EXACT = Codecs(contribution=FLOAT32, row_mean=FLOAT32, entry=FLOAT32, rounds_stochastically=False)
ELEMENTS = 64


def test_a_warm_up_compiles_everything() -> None:
    found = compiled_loops()
    assert found is not None
    codecs = [INT4, codec_named("int8")]
    gc.unfreeze()
    warm_up()
    assert gc.get_freeze_count() > 1000, "collections need not look at what was imported"
    gc.unfreeze()
    loops = [found.encode, found.decode, found.code_squares]
    compiled = [len(loop.signatures) for loop in loops]
    assert all(compiled)
    for codec in codecs:
        encoded = codec.encode(np.zeros(1000, np.float32), rounding_seed=b"a seed")
        for received in (encoded, bytearray(encoded), memoryview(encoded)):
            codec.decode(received, 1000)
            codec.squared_norm(received, 1000)
    assert [len(loop.signatures) for loop in loops] == compiled


def vector(*values: float) -> Vector:
    return np.resize(np.array(values, dtype=np.float32), ELEMENTS)


def part(peer: PeerId, values: Vector, weight: float = 1.0) -> Part:
    return Part(peer=peer, payload=FLOAT32.encode(values), weight=weight, norm=1.0)


def reduce(
    *parts: Part, norm_limit: float = float("inf"), seed: bytes = b"seed", stage: Stage = Stage.WHOLE,
    levels: bool = True,
) -> ReduceSpan:  # fmt: skip
    return ReduceSpan(
        round=4, span=SpanId(0, 0), stage=stage, parts=parts, norm_limit=norm_limit, rounding_seed=seed, levels=levels
    )


def reduced(action: ReduceSpan, codecs: Codecs = EXACT) -> EncodedMean:
    result = reduce_parts(action, codecs, ELEMENTS)
    assert isinstance(result, EncodedMean), result
    return result


def span_state(anchor_N: Vector, momentum_N: Vector) -> SpanState:
    head = SpanHead(digest=sha256(b"d"), height=3, round=4, roster=ZERO_DIGEST, radius=1.0, median_weight=1.0)
    return SpanState(head=head, anchor_N=anchor_N.copy(), momentum_N=momentum_N.copy())


def test_the_mean_is_weighted_and_its_norm_exact() -> None:
    result = reduced(reduce(part(ANN, vector(1.0), weight=3.0), part(BEN, vector(5.0), weight=1.0), levels=False))
    assert FLOAT32.decode(result.payload, ELEMENTS).tolist() == [2.0] * ELEMENTS
    assert result.norm == FLOAT32.norm(result.payload, ELEMENTS) == 16.0
    assert result.sound == {ANN, BEN}
    assert result.measured == {ANN: 8.0, BEN: 40.0}
    assert result.dropped == ()


@pytest.mark.parametrize(
    ("payload", "says"),
    [(bytes(7), "7"), (vector(float("nan")).tobytes(), "finite"), (vector(100.0).tobytes(), "beyond the limit 80")],
    ids=["size", "finiteness", "norm"],
)
def test_an_unsound_part_is_dropped_with_a_reason_and_the_others_are_averaged(payload: bytes, says: str) -> None:
    bad = Part(peer=BEN, payload=payload, weight=1.0, norm=1.0)
    result = reduced(reduce(part(ANN, vector(1.0)), bad, part(CLEO, vector(3.0)), norm_limit=80.0))
    assert result.sound == {ANN, CLEO}
    assert FLOAT32.decode(result.payload, ELEMENTS).tolist() == [2.0] * ELEMENTS
    ((peer, reason),) = result.dropped
    assert peer == BEN
    assert says in reason


def test_among_strangers_no_part_counts_for_more_than_most() -> None:
    parts = [part(ANN, vector(2.0), weight=300.0), part(BEN, vector(4.0)), part(CLEO, vector(3.0))]
    assert FLOAT32.decode(reduced(reduce(*parts)).payload, ELEMENTS).tolist() == [3.0] * ELEMENTS


@pytest.mark.parametrize(
    ("stage", "levels", "expected"),
    [
        (Stage.WHOLE, True, (3.0 + LONGEST_BLOCK) / 4),
        (Stage.ROW, True, (3.0 + LONGEST_BLOCK) / 4),
        (Stage.FINISH, True, 3.0),
        (Stage.WHOLE, False, 3.0),
    ],
    ids=["strangers", "strangers in a row", "means of rows", "acquaintances"],
)
@pytest.mark.parametrize("is_radial", [None, False])
def test_only_among_strangers_nobody_puts_many_medians_into_a_block(
    stage: Stage, levels: bool, expected: float, is_radial: bool | None
) -> None:
    parts = [
        part(peer, vector(value)) for peer, value in zip((ANN, BEN, CLEO, DORA), (1.0, 1.0, 1.0, 9.0), strict=True)
    ]
    radial = {} if is_radial is None else {SpanId(0, 0): np.zeros(1, np.bool_)}
    result = reduced(reduce(*parts, stage=stage, levels=levels), dataclasses.replace(EXACT, radial=radial))
    assert FLOAT32.decode(result.payload, ELEMENTS).tolist() == [expected] * ELEMENTS
    assert result.measured[DORA] == 72.0, "what is measured, and determines the next radius, is as sent"


def opposite(*vectors: Vector, stage: Stage = Stage.WHOLE, levels: bool = True) -> set[int]:
    """Return the places of the parts that are left out of the mean of these vectors."""
    peers = [PeerId(sha256(bytes([number]))) for number in range(len(vectors))]
    action = reduce(*map(part, peers, vectors), stage=stage, levels=levels)
    result = reduced(action)
    assert result.sound == set(peers) - {peer for peer, _ in result.dropped}
    assert all("points against what the others have learnt" in reason for _, reason in result.dropped)
    assert result.against == {peer for peer, _ in result.dropped}
    return {peers.index(peer) for peer, _ in result.dropped}


def test_among_strangers_a_part_that_points_against_the_others_is_left_out() -> None:
    honest, other, liar = vector(1.0, 0.5), vector(1.0, -0.5), vector(-40.0, 0.0)
    assert opposite(honest, other, liar) == {2}
    assert opposite(honest, other, liar / np.float32(1e6)) == {2}, "its length does not matter"
    assert opposite(honest, other, honest, -honest, -other) == {3, 4}, "two of five"
    assert opposite(honest, other, vector(0.0, 1.0)) == set(), "who has learnt something else does no harm"


def test_copies_of_a_lie_do_not_speak_for_each_other() -> None:
    rng = np.random.default_rng(5)
    honest = [(0.5 + rng.standard_normal(ELEMENTS)).astype(np.float32) for _ in range(3)]
    lie = (-np.mean(honest, axis=0)).astype(np.float32)
    assert opposite(*honest, lie, lie) == {3, 4}
    assert opposite(lie, lie, *honest) == {0, 1}


@pytest.mark.parametrize("scale", [b"\x80\x7f", b"\xff\x7f", b"\xff\xff"], ids=["infinite", "not a number", "negative"])
@pytest.mark.filterwarnings("error")
def test_a_scale_that_is_not_finite_drops_its_part_and_warns_of_nothing(scale: bytes) -> None:
    peers = [PeerId(sha256(bytes([number]))) for number in range(4)]
    payloads = [INT4.encode(vector(1.0, 0.5 + number / 9)) for number in range(4)]
    payloads[3] = scale + payloads[3][2:]
    parts = [Part(peer=peer, payload=one, weight=1.0, norm=1.0) for peer, one in zip(peers, payloads, strict=True)]
    result = reduced(reduce(*parts), Codecs(contribution=INT4, row_mean=INT4, entry=INT4))
    assert result.sound == set(peers[:3])


LONG = 1 << 15


def of_strangers(vectors: Sequence[Vector], secret: bytes, codec: Codec = INT4) -> EncodedMean:
    peers = [PeerId(sha256(bytes([number]))) for number in range(len(vectors))]
    parts = [
        Part(peer=peer, payload=codec.encode(vector_N.ravel()), weight=1.0, norm=1.0)
        for peer, vector_N in zip(peers, vectors, strict=True)
    ]
    codecs = Codecs(contribution=codec, row_mean=codec, entry=codec)
    result = reduce_parts(reduce(*parts), codecs, vectors[0].size, secret)
    assert isinstance(result, EncodedMean)
    return result


def learnt(count: int, seed: int) -> list[Vector]:
    """Return contributions of honest islands, whose cosines are 0.3, in blocks."""
    rng = np.random.default_rng(seed)
    common_BK = rng.standard_normal((LONG // 64, 64))
    return [
        (0.3**0.5 * common_BK + 0.7**0.5 * rng.standard_normal(common_BK.shape)).astype(np.float32)
        for _ in range(count)
    ]


def spiked(flipped_BK: Vector) -> Vector:
    """Return it with one vast element in every block, as if nothing could be said about its direction."""
    spiked_BK = flipped_BK.copy()
    spiked_BK[:, 0] = np.linalg.norm(flipped_BK, axis=1)
    return spiked_BK


def lengthened(flipped_BK: Vector) -> Vector:
    """Return it with every sixth block agreeing, and so long that the whole agrees."""
    lengthened_BK = flipped_BK.copy()
    lengthened_BK[::6] *= -6.0
    return lengthened_BK


@pytest.mark.parametrize("form", [lambda flipped_BK: flipped_BK, spiked, lengthened], ids=["plain", "spikes", "long"])
@pytest.mark.parametrize(("honest", "liars"), [(2, 1), (3, 1), (4, 1), (3, 2), (9, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_liars_are_left_out_and_nobody_else_whatever_their_lengths(
    form: Callable[[Vector], Vector], honest: int, liars: int, seed: int
) -> None:
    vectors = learnt(honest, seed)
    lie_BK = form(np.asarray(-3.0 * np.mean(vectors, axis=0), np.float32))
    result = of_strangers([*vectors, *[lie_BK] * liars], bytes([seed] * 8))
    assert result.sound == {PeerId(sha256(bytes([number]))) for number in range(honest)}


@pytest.mark.parametrize("seed", range(4))
def test_what_only_one_has_seen_gives_a_liar_no_friend(seed: int) -> None:
    ann_BK, *others = learnt(4, seed)
    lie_BK = np.asarray(-np.mean([ann_BK, *others], axis=0), np.float32)
    for each_BK in others:
        each_BK[::4] = 0.0
    lie_BK[::4] = 9.0 * ann_BK[::4]
    assert len(of_strangers([ann_BK, *others, lie_BK], bytes([seed] * 8)).sound) == 4


@pytest.mark.parametrize("count", [5, 16])
@pytest.mark.parametrize("name", ["int4", "float32"])
@pytest.mark.parametrize("chance", [0.05, 0.2, 0.5])
def test_rows_that_few_strangers_have_seen_arrive_in_whole(count: int, name: str, chance: float) -> None:
    """In the other rows, rounding has left something from the cycles before."""
    rng, codec, rows, dropped = np.random.default_rng(count), codec_named(name), 256, 0
    peers = [PeerId(sha256(bytes([number]))) for number in range(count)]
    left, sums, wanted = np.zeros((count, rows, 64)), np.zeros((rows, 64)), np.zeros((rows, 64))
    aim_BK = rng.standard_normal((rows, 64)) / 8.0
    for cycle in range(20):
        new = (rng.random((count, rows, 1)) < chance) * (aim_BK + rng.standard_normal((count, rows, 64)) / 8.0)
        wanted += new.mean(axis=0)
        vectors = [each.astype(np.float32) for each in left + new]
        result = of_strangers(vectors, bytes([cycle] * 8), codec)
        left = np.stack(
            [
                each - (peer in result.sound) * codec.decode(codec.encode(each.ravel()), each.size).reshape(rows, 64)
                for peer, each in zip(peers, vectors, strict=True)
            ]
        )
        dropped += len(result.dropped)
        sums += codec.decode(result.payload, rows * 64).reshape(rows, 64)
    assert np.sum(sums * wanted) / np.sum(wanted * wanted) == pytest.approx(1.0, abs=0.06)
    assert dropped <= 0.01 * 20 * count, "by chance, where hardly any two have seen the same"


def test_who_has_learnt_nothing_and_who_is_unsound_is_no_third_one() -> None:
    honest, liar = vector(1.0), vector(-1.0)
    assert opposite(honest, liar, vector(0.0)) == set()
    assert opposite(vector(0.0), vector(0.0), vector(0.0)) == set()
    unsound = [Part(peer=CLEO, payload=payload, weight=1.0, norm=1.0) for payload in (b"", vector(9e9).tobytes())]
    for third in unsound:
        result = reduced(reduce(part(ANN, honest), part(BEN, liar), third, norm_limit=80.0))
        assert result.sound == {ANN, BEN}
        assert result.against == set()


def test_who_is_unsound_is_not_said_to_point_against_the_others() -> None:
    peers = [PeerId(sha256(bytes([number]))) for number in range(4)]
    values = [vector(1.0, 0.5), vector(1.0, -0.5), vector(1.0), vector(-1.0)]
    for codec in (FLOAT32, INT4):
        parts = [
            Part(peer=p, payload=codec.encode(v), weight=1.0, norm=1.0) for p, v in zip(peers, values, strict=True)
        ]
        action = reduce(*parts, Part(peer=CLEO, payload=b"", weight=1.0, norm=1.0))
        result = reduced(action, Codecs(contribution=codec, row_mean=codec, entry=codec))
        assert {peer for peer, _ in result.dropped} == {peers[3], CLEO}
        assert result.against == {peers[3]}


def test_nobody_is_left_out_by_chance() -> None:
    codecs, elements = Codecs(contribution=INT4, row_mean=INT4, entry=INT4), 1 << 16
    for seed in range(20):
        rng = np.random.default_rng(seed)
        parts = [
            Part(peer=PeerId(sha256(bytes([k]))), payload=INT4.encode(one_N), weight=1.0, norm=1.0)
            for k, one_N in enumerate(rng.standard_normal((5, elements)).astype(np.float32))
        ]
        result = reduce_parts(reduce(*parts), codecs, elements, bytes([seed] * 8))
        assert isinstance(result, EncodedMean)
        assert result.dropped == ()


@pytest.mark.parametrize(
    ("stage", "levels", "count"),
    [(Stage.WHOLE, False, 3), (Stage.FINISH, True, 3), (Stage.WHOLE, True, 2)],
    ids=["among acquaintances", "of the means of rows", "of two nobody knows who lies"],
)
def test_otherwise_directions_are_not_compared(stage: Stage, levels: bool, count: int) -> None:
    vectors = [vector(-1.0), vector(1.0), vector(1.0)][:count]
    assert opposite(*vectors, stage=stage, levels=levels) == set()


@pytest.mark.parametrize("count", range(3, 9))
def test_fewer_than_half_are_left_out_whatever_they_send(count: int) -> None:
    for seed in range(20):
        vectors_PN = np.random.default_rng(seed).standard_normal((count, ELEMENTS)).astype(np.float32)
        assert len(opposite(*vectors_PN)) <= (count - 1) // 2


def test_without_a_sound_part_the_reason_names_all_senders() -> None:
    result = reduce_parts(reduce(Part(peer=BEN, payload=b"", weight=1.0, norm=1.0)), EXACT, ELEMENTS)
    assert isinstance(result, str)
    assert short_peer_id(BEN) in result


def test_parts_without_weight_give_no_mean() -> None:
    result = reduce_parts(reduce(part(ANN, vector(1.0), weight=0.0)), EXACT, ELEMENTS)
    assert isinstance(result, str)


def test_a_mean_that_overflows_is_skipped_without_an_error() -> None:
    most = float(np.finfo(np.float32).max)
    codecs = Codecs(contribution=FLOAT32, row_mean=FLOAT32, entry=INT4, rounds_stochastically=False)
    result = reduce_parts(reduce(part(ANN, vector(most)), part(BEN, vector(most))), codecs, ELEMENTS)
    assert isinstance(result, str | EncodedMean)


def test_a_sender_slightly_above_the_limit_by_rounding_is_not_dropped() -> None:
    limit = FLOAT32.norm(FLOAT32.encode(vector(1.0)), ELEMENTS) * (1.0 - 1e-7)
    assert reduced(reduce(part(ANN, vector(1.0)), norm_limit=limit)).sound == {ANN}


def test_stochastic_rounding_follows_the_seed_and_nothing_else() -> None:
    codecs = Codecs(contribution=FLOAT32, row_mean=FLOAT32, entry=INT4, rounds_stochastically=True)
    parts = part(ANN, vector(*np.linspace(-1.0, 1.0, ELEMENTS).tolist()))
    one, again, other = (reduced(reduce(parts, seed=seed), codecs).payload for seed in (b"a", b"a", b"b"))
    assert one == again != other


def test_a_span_survives_a_transfer_bit_for_bit() -> None:
    state = span_state(vector(1.0, -0.0, 3e-39), vector(2.0, 0.5))
    back = state_from_bytes(state.head, state_bytes(state))
    assert back.anchor_N.tobytes() == state.anchor_N.tobytes()
    assert back.momentum_N.tobytes() == state.momentum_N.tobytes()
    assert back.head == state.head
    assert content_digests([back]) == content_digests([state])


def test_a_received_span_uses_the_memory_of_its_pieces_and_is_read_only() -> None:
    state = span_state(vector(1.0), vector(2.0))
    raw = bytearray(state_bytes(state))
    back = state_from_bytes(state.head, memoryview(raw))
    assert np.shares_memory(back.anchor_N, np.frombuffer(raw, np.float32))
    assert not back.anchor_N.flags.writeable
    assert not back.momentum_N.flags.writeable


@pytest.mark.parametrize("most_bytes", [4, 8, 20, 1 << 20])
def test_pieces_are_views_that_make_up_the_whole_span(most_bytes: int) -> None:
    state = span_state(vector(1.0, 2.0, 3.0), vector(4.0, 5.0, 6.0))
    raw, parts = state_bytes(state), b""
    while len(parts) < len(raw):
        piece = cut_piece(state, len(parts), most_bytes)
        assert 0 < len(piece) <= most_bytes
        assert any(
            np.shares_memory(np.frombuffer(piece, np.uint8), array_N) for array_N in (state.anchor_N, state.momentum_N)
        )
        parts += piece
    assert parts == raw
    assert len(cut_piece(state, len(raw), most_bytes)) == 0
    assert len(cut_piece(state, 10 * len(raw), most_bytes)) == 0


@pytest.mark.parametrize(
    ("piece", "offset", "is_sound"),
    [
        (vector(1.0).tobytes(), 0, True),
        (vector(1.0).tobytes()[:-1], 0, False),
        (vector(float("nan")).tobytes(), 0, False),
        (vector(float("-inf")).tobytes(), 0, False),
        (vector(2.0**100).tobytes(), 0, True),
        (vector(2.0**120).tobytes(), 0, False),
        (vector(2.0**100).tobytes(), 4 * ELEMENTS, False),
        (vector(1.0).tobytes() + vector(2.0**100).tobytes(), 0, False),
        (vector(2.0**100).tobytes() + vector(1.0).tobytes(), 0, True),
        (vector(1e-40).tobytes(), 0, False),
        (vector(1.0).tobytes(), 2**40, True),
    ],
)
def test_a_piece_holds_only_whole_numbers_within_the_bounds_of_a_sound_state(
    piece: bytes, offset: int, is_sound: bool
) -> None:
    """Only liars serve an infinite number, or a finite one that may become infinite in a later step."""
    head = span_state(vector(1.0), vector(1.0)).head
    reply = SpanReply(span=SpanId(0, 0), head=head, total_bytes=8 * ELEMENTS, offset=offset, piece=piece)
    assert is_sound_piece(reply) is is_sound


def test_content_digests_pair_the_chain_with_the_bytes_and_the_whole_head() -> None:
    one, other = span_state(vector(1.0), vector(2.0)), span_state(vector(1.0), vector(3.0))
    wide = dataclasses.replace(one, head=dataclasses.replace(one.head, radius=9.0))
    pairs = content_digests([one, other, wide])
    assert {chain for chain, _ in pairs} == {one.head.digest}
    assert len({content for _, content in pairs}) == 3
    assert content_digests([one]) == pairs[:1]


def test_a_contribution_that_rounding_made_too_long_is_encoded_again() -> None:
    codec = codec_named("int4")
    delta_N = np.array([1.0, 0.55] * 64, np.float32)
    norm = float(np.linalg.norm(delta_N))
    free = PreparedContribution(delta_N=delta_N, norm=norm, limit=float("inf"))
    same, payload = encode_contribution(codec, free)
    assert same is free, "its encoding fits"
    assert payload == codec.encode(delta_N)
    tight = dataclasses.replace(free, limit=0.9 * codec.norm(payload, len(delta_N)))
    shrunk, shorter = encode_contribution(codec, tight)
    assert codec.norm(shorter, len(delta_N)) <= tight.limit
    assert codec.norm(shorter, len(delta_N)) >= 0.98 * tight.limit
    assert shorter == codec.encode(shrunk.delta_N)
    assert (shrunk.norm, shrunk.limit) == (tight.norm, tight.limit)
    asked: list[bytes] = []

    def too_long(encoded: bytes) -> float:
        asked.append(encoded)
        return 2.0 * tight.limit

    encode_contribution(codec, tight, too_long)
    assert len(asked) == MOST_SHRINKS, "it gives up in the end"


@pytest.mark.parametrize("name", ["int4", "int8", "bfloat16", "float32"])
@pytest.mark.parametrize("elements", [1000, 1 << 20])
def test_an_entry_is_compared_with_what_this_peer_contributed_to_it(name: str, elements: int) -> None:
    codec, rng = codec_named(name), np.random.default_rng(1)
    own_N, other_N = rng.standard_normal((2, elements), np.float32)
    codecs = Codecs(contribution=codec, row_mean=codec, entry=codec)
    own, entry = codec.encode(own_N), codec.encode((own_N + other_N) / 2)
    for sign, encoded in ((1, entry), (-1, codec.encode(-(own_N + other_N) / 2))):
        agreement = agreement_of(encoded, own, codecs, elements, b"a secret")
        assert agreement.variance == 1 / min(elements, 16_384), "of a long span, a part is enough"
        assert agreement.cosine() == pytest.approx(sign * 0.5**0.5, abs=0.05)
    if elements > 16_384:
        assert agreement_of(entry, own, codecs, elements, b"a secret") != agreement_of(
            entry, own, codecs, elements, b"another secret"
        ), "who signs entries does not know which part"
