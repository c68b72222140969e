"""Fetching a text: every piece arrives once, no liar and no slow peer stops it, and little is under way at a time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import ids

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.files.fetch import (
    LONGEST_REST_SECONDS,
    MOST_ASKED,
    OVERDUE_SECONDS,
    REST_SECONDS,
    SILENCE_SECONDS,
    TURN_SECONDS,
    Ask,
    Fetch,
    Whole,
)

A, B, C = ids(3)
ALL = 0b1111


def many_ids(count: int) -> list[PeerId]:
    return [PeerId(bytes([number]) * 32) for number in range(count)]


def fetch(num_pieces: int = 4, seed: int = 0) -> Fetch:
    return Fetch([8] * num_pieces, missing=(1 << num_pieces) - 1, seed=seed)


def test_a_piece_is_asked_block_by_block_and_is_missing_until_it_is_kept() -> None:
    fetched = fetch(1)
    fetched.set_holdings(A, 1)
    assert fetched.asks(0.0) == [Ask(A, 0, 0)]
    assert fetched.asks(0.0) == [], "one block is under way from each peer"
    assert fetched.asked_of(A) == 0
    assert fetched.take_block(A, 0, 0, 8, b"12345", 1.0) is None
    assert fetched.asks(1.0) == [Ask(A, 0, 5)]
    assert fetched.take_block(A, 0, 5, 8, b"678", 2.0) == Whole(A, 0, bytearray(b"12345678"))
    assert fetched.asks(2.0) == [], "it is being checked"
    assert fetched.missing == 1
    fetched.keep(A, 0)
    assert fetched.missing == 0
    assert fetched.asked_of(A) is None


def test_peers_are_asked_for_different_pieces_in_an_order_of_the_seed() -> None:
    orders = set()
    for seed in range(20):
        fetched = fetch(seed=seed << 32)
        for peer in (A, B, C):
            fetched.set_holdings(peer, ALL)
        orders.add(tuple(ask.piece for ask in fetched.asks(0.0)))
    assert all(len(set(order)) == 3 for order in orders)
    assert len({order[0] for order in orders}) == 4


def test_wanted_pieces_come_first_and_only_from_peers_that_hold_them() -> None:
    fetched = fetch()
    fetched.prefer(0b1000)
    fetched.set_holdings(A, 0b0010)
    fetched.set_holdings(B, ALL)
    assert {ask.peer: ask.piece for ask in fetched.asks(0.0)} == {A: 1, B: 3}
    assert fetched.sources() == [A, B]
    fetched.set_holdings(A, 0)
    assert fetched.sources() == [B]


def test_a_peer_without_room_for_all_fetches_only_what_is_wanted() -> None:
    fetched = fetch()
    fetched.prefer(0b0100, alone=True)
    fetched.set_holdings(A, ALL)
    fetched.set_holdings(B, 0b1011)
    assert fetched.sources() == [A]
    assert fetched.asks(0.0) == [Ask(A, 2, 0)]
    fetched.take_block(A, 2, 0, 8, b"1234", 0.0)
    fetched.asks(0.0)
    fetched.asks(SILENCE_SECONDS)
    fetched.lose(B)
    fetched.prefer(0b1000, alone=True)
    (ask,) = fetched.asks(SILENCE_SECONDS + REST_SECONDS)
    assert ask.piece == 3, "the late one is not wanted any more"


def test_a_piece_with_wrong_bytes_bans_its_sender_and_is_asked_of_another_peer() -> None:
    fetched = fetch(1)
    fetched.set_holdings(A, 1)
    fetched.asks(0.0)
    fetched.take_block(A, 0, 0, 8, b"12345678", 0.0)
    fetched.set_holdings(B, 1)
    assert fetched.asks(0.0) == []
    fetched.refuse(A, 0)
    assert fetched.asks(0.0) == [Ask(B, 0, 0)]
    fetched.set_holdings(A, 1)
    assert fetched.banned == {A}
    assert A not in fetched.sources()


@pytest.mark.parametrize(
    ("offset", "total", "block"), [(0, 9, b"12345678"), (0, 8, b"123456789"), (0, 8, b""), (0, 0, b"")]
)
def test_a_block_that_does_not_fit_makes_its_sender_rest(offset: int, total: int, block: bytes) -> None:
    fetched = fetch(1)
    fetched.set_holdings(A, 1)
    fetched.asks(0.0)
    assert fetched.take_block(A, 0, offset, total, block, 0.0) is None
    fetched.set_holdings(A, 1)
    assert fetched.asks(REST_SECONDS - 0.1) == []
    assert fetched.asks(REST_SECONDS) == [Ask(A, 0, 0)]


def test_blocks_that_were_not_asked_for_change_nothing() -> None:
    fetched = fetch()
    assert fetched.take_block(A, 0, 0, 8, b"12345678", 0.0) is None
    fetched.set_holdings(A, ALL)
    assert fetched.take_block(A, 0, 0, 8, b"12345678", 0.0) is None
    fetched.asks(0.0)
    piece = fetched.asked_of(A)
    assert piece is not None
    assert fetched.take_block(A, (piece + 1) % 4, 0, 8, b"12345678", 0.0) is None
    assert fetched.take_block(A, piece, 4, 8, b"5678", 0.0) is None
    fetched.take_block(A, piece, 0, 8, b"1234", 0.0)
    assert fetched.take_block(A, piece, 4, 8, b"5678", 0.0) is None, "the rest was not asked for yet"
    assert fetched.missing == ALL


def test_a_silent_peer_rests_longer_each_time_and_another_takes_over() -> None:
    fetched = fetch(1)
    fetched.set_holdings(A, 1)
    now = 0.0
    for rest in (REST_SECONDS, 2 * REST_SECONDS, 4 * REST_SECONDS):
        assert fetched.asks(now) == [Ask(A, 0, 0)]
        now += SILENCE_SECONDS
        assert fetched.asks(now) == []
        now += rest
    for _ in range(20):
        now += LONGEST_REST_SECONDS
        assert fetched.asks(now) == [Ask(A, 0, 0)], "it rests for no longer than that"
        now += SILENCE_SECONDS
        fetched.asks(now)
    fetched.set_holdings(B, 1)
    assert fetched.asks(now) == [Ask(B, 0, 0)]


def test_a_late_block_counts_and_its_piece_goes_on() -> None:
    fetched = fetch(1)
    fetched.set_holdings(A, 1)
    fetched.asks(0.0)
    fetched.take_block(A, 0, 0, 8, b"1234", 0.0)
    assert fetched.asks(0.0) == [Ask(A, 0, 4)]
    assert fetched.asks(SILENCE_SECONDS) == []
    assert fetched.asked_of(A) == 0
    assert fetched.take_block(A, 0, 4, 8, b"5", SILENCE_SECONDS + 1.0) is None
    assert fetched.asks(SILENCE_SECONDS + 1.0) == [Ask(A, 0, 5)]
    assert fetched.asks(2 * SILENCE_SECONDS + 1.0) == []
    now = 2 * SILENCE_SECONDS + 1.0 + LONGEST_REST_SECONDS
    assert fetched.asks(now) == [Ask(A, 0, 5)], "what came is not lost by a rest"
    assert fetched.take_block(A, 0, 5, 8, b"678", now) == Whole(A, 0, bytearray(b"12345678"))


def test_a_late_block_of_a_piece_that_is_here_is_ignored() -> None:
    fetched = fetch(2)
    fetched.set_holdings(A, 1)
    fetched.asks(0.0)
    fetched.asks(SILENCE_SECONDS)
    fetched.set_holdings(B, 1)
    assert fetched.asks(SILENCE_SECONDS) == [Ask(B, 0, 0)]
    fetched.take_block(B, 0, 0, 8, b"12345678", SILENCE_SECONDS)
    assert fetched.take_block(A, 0, 0, 8, b"12345678", SILENCE_SECONDS) is None, "it is being checked"
    fetched.keep(B, 0)
    assert fetched.take_block(A, 0, 0, 8, b"12345678", SILENCE_SECONDS) is None
    fetched.set_holdings(A, 0b11)
    assert fetched.asks(SILENCE_SECONDS + LONGEST_REST_SECONDS) == [Ask(A, 1, 0)]


def test_only_a_few_late_pieces_are_kept() -> None:
    fetched = fetch(4 * MOST_ASKED)
    peers = many_ids(2 * MOST_ASKED)
    for peer in peers:
        fetched.set_holdings(peer, -1)
    fetched.asks(0.0)
    fetched.asks(SILENCE_SECONDS)
    fetched.asks(2 * SILENCE_SECONDS)
    assert sum(fetched.asked_of(peer) is not None for peer in peers) <= 2 * MOST_ASKED
    assert len(fetched.asks(2 * SILENCE_SECONDS)) == 0


def test_a_peer_that_delivers_is_forgiven() -> None:
    fetched = fetch(3)
    fetched.set_holdings(A, 0b111)
    fetched.asks(0.0)
    fetched.asks(SILENCE_SECONDS)
    now = SILENCE_SECONDS + REST_SECONDS
    (ask,) = fetched.asks(now)
    fetched.take_block(A, ask.piece, 0, 8, b"12345678", now)
    fetched.keep(A, ask.piece)
    fetched.asks(now)
    now += SILENCE_SECONDS
    assert fetched.asks(now) == []
    assert len(fetched.asks(now + REST_SECONDS)) == 1


def test_a_piece_that_takes_long_is_also_asked_of_one_other_peer_and_the_first_wins() -> None:
    fetched = fetch(1)
    for peer in (A, B, C):
        fetched.set_holdings(peer, 1)
    assert fetched.asks(0.0) == [Ask(A, 0, 0)]
    assert fetched.asks(OVERDUE_SECONDS - 0.1) == []
    assert fetched.asks(OVERDUE_SECONDS) == [Ask(B, 0, 0)]
    assert fetched.asks(OVERDUE_SECONDS + 9.0) == [], "two are enough"
    came = fetched.take_block(B, 0, 0, 8, b"12345678", OVERDUE_SECONDS)
    assert came is not None
    fetched.keep(B, 0)
    assert fetched.asked_of(A) is None
    assert fetched.take_block(A, 0, 0, 8, b"12345678", 9.0) is None


def test_a_wanted_piece_at_a_slow_peer_comes_before_other_pieces() -> None:
    fetched = fetch()
    fetched.prefer(0b0001)
    fetched.set_holdings(A, ALL)
    fetched.asks(0.0)
    fetched.set_holdings(B, ALL)
    (ask,) = fetched.asks(0.0)
    assert ask.piece in (1, 2, 3)
    fetched.take_block(B, ask.piece, 0, 8, b"12345678", OVERDUE_SECONDS)
    fetched.keep(B, ask.piece)
    assert fetched.asks(OVERDUE_SECONDS) == [Ask(B, 0, 0)]


def test_a_bounded_number_of_peers_send_and_a_slow_one_gives_up_its_turn() -> None:
    peers = many_ids(MOST_ASKED + 1)
    fetched = fetch(2 * MOST_ASKED)
    for peer in peers[:-1]:
        fetched.set_holdings(peer, -1)
    assert len(fetched.asks(0.0)) == MOST_ASKED
    fetched.set_holdings(peers[-1], -1)

    def trickle(now: float) -> None:
        for peer in peers:
            piece = fetched.asked_of(peer)
            if piece is not None:
                fetched.take_block(peer, piece, int(now / 10.0), 8, b"1", now)

    for now in (0.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        trickle(now)
        assert len(fetched.asks(now)) == MOST_ASKED
        assert fetched.asked_of(peers[-1]) is None
    trickle(TURN_SECONDS)
    assert peers[-1] in [ask.peer for ask in fetched.asks(TURN_SECONDS)]
    assert sum(fetched.asked_of(peer) is not None for peer in peers) <= MOST_ASKED + 1


def test_a_lost_peer_gives_its_piece_back_and_a_full_disk_only_postpones() -> None:
    fetched = fetch(1)
    fetched.set_holdings(A, 1)
    fetched.asks(0.0)
    fetched.lose(A)
    fetched.lose(A)
    fetched.set_holdings(B, 1)
    assert fetched.asks(0.0) == [Ask(B, 0, 0)]
    fetched.take_block(B, 0, 0, 8, b"12345678", 0.0)
    fetched.lose(B)
    fetched.postpone(0)
    fetched.set_holdings(C, 1)
    assert fetched.asks(0.0) == [Ask(C, 0, 0)]
    fetched.take_block(C, 0, 0, 8, b"12345678", 0.0)
    fetched.lose(C)
    fetched.keep(C, 0)
    assert fetched.missing == 0


def test_the_length_of_a_list_is_named_by_its_sender_up_to_a_limit() -> None:
    fetched = Fetch([8], missing=1, is_exact=False)
    fetched.set_holdings(A, 1)
    fetched.asks(0.0)
    assert fetched.take_block(A, 0, 0, 9, b"123456789", 0.0) is None
    fetched.set_holdings(B, 1)
    fetched.asks(0.0)
    assert fetched.take_block(B, 0, 0, 5, b"12345", 0.0) == Whole(B, 0, bytearray(b"12345"))


CHARACTERS = st.lists(st.sampled_from(["honest", "slow", "silent", "flips", "absent"]), min_size=0, max_size=9)


@settings(max_examples=60, deadline=None)
@given(CHARACTERS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_with_one_honest_peer_every_piece_arrives_right_whatever_the_others_do(
    characters: list[str], num_pieces: int, rng: random.Random
) -> None:
    right = [bytes(rng.randrange(256) for _ in range(8)) for _ in range(num_pieces)]
    fetched = Fetch([8] * num_pieces, missing=(1 << num_pieces) - 1, seed=rng.randrange(1 << 64))
    nature = dict(zip(many_ids(len(characters) + 1), [*characters, "honest"], strict=True))
    for peer in nature:
        fetched.set_holdings(peer, -1)
    kept: dict[int, bytes] = {}
    due: list[tuple[float, Ask]] = []
    now = 0.0
    while fetched.missing:
        for ask in fetched.asks(now):
            pause = {"slow": 10.0, "silent": 1e9}.get(nature[ask.peer], 0.1)
            due.append((now + pause, ask))
        now += 0.5
        assert now < 4000.0, "it takes for ever"
        for at, ask in [each for each in due if each[0] <= now]:
            due.remove((at, ask))
            if answer(fetched, nature[ask.peer], ask, right, now, kept) == "banned":
                assert ask.peer in fetched.banned
        for peer in nature:
            if rng.random() < 0.02:
                fetched.set_holdings(peer, -1)  # as it answers from time to time
    assert [kept[piece] for piece in range(num_pieces)] == right
    assert all(nature[peer] == "flips" for peer in fetched.banned)


def answer(fetched: Fetch, nature: str, ask: Ask, right: list[bytes], now: float, kept: dict[int, bytes]) -> str | None:
    content = right[ask.piece]
    block = b"" if nature == "absent" else content[ask.offset : ask.offset + 3]
    if nature == "flips":
        block = bytes([block[0] ^ 1, *block[1:]])
    came = fetched.take_block(ask.peer, ask.piece, ask.offset, 8, block, now)
    if came is None:
        return None
    if came.content != content:
        fetched.refuse(came.peer, came.piece)
        return "banned"
    assert came.piece not in kept, "it arrives once"
    kept[came.piece] = bytes(came.content)
    fetched.keep(came.peer, came.piece)
    return None


def test_two_peers_that_send_a_byte_now_and_then_do_not_keep_a_third_from_sending_the_piece() -> None:
    fetched = fetch(1)
    for peer in (A, B, C):
        fetched.set_holdings(peer, 1)
    came: list[tuple[float, PeerId]] = []
    sent = {A: 0, B: 0}
    now = 0.0
    while now < 2 * TURN_SECONDS and fetched.missing:
        for ask in fetched.asks(now):
            came.append((now, ask.peer))
            if ask.peer in sent:
                fetched.take_block(ask.peer, 0, ask.offset, 8, b"x", now)
        now += 10.0 if len(came) < 2 else 15.0
    assert C in {peer for _, peer in came}, came
