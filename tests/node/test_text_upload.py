"""The budget of a shared text: averaging first, one request for each peer, a limited part for strangers."""

from __future__ import annotations

import pytest

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.node.text_exchange import (
    BUSY_SHARE,
    COPIES_A_DAY,
    DAY_SECONDS,
    IDLE_SHARE,
    LEAST_CHARGED_BYTES,
    MOST_WAITING,
    STRANGERS_SHARE,
    UNKNOWN_BYTES_PER_SECOND,
    TextUpload,
    Wanted,
    block_bytes,
    charged_bytes,
    text_rate,
)
from p2p_diloco.protocol.wire.messages import MOST_BLOCK_BYTES
from p2p_diloco.transport.rate_limit import MOST_BUCKETS

A, B, C = (PeerId(bytes([number]) * 32) for number in range(3))
DIGEST = Digest(bytes(32))
LINE = 2.5e6
BLOCK = 50_000
TEXT_BYTES = 1 << 40
LONG = 600.0


def wanted(peer: PeerId, offset: int = 0) -> Wanted:
    return Wanted(peer, DIGEST, offset)


def upload(*strangers: PeerId, text_bytes: int = TEXT_BYTES, num_pieces: int = 0) -> TextUpload:
    return TextUpload(text_bytes, num_pieces, frozenset(strangers).__contains__)


def play(budget: TextUpload, peers: tuple[PeerId, ...], seconds: float, rate: float) -> dict[PeerId, int]:
    """Have peers ask without a pause; return the bytes that each was sent."""
    sent = dict.fromkeys(peers, 0)
    now = 0.0
    for peer in peers:
        budget.queue(wanted(peer), now)
    while now < seconds:
        due = budget.next(now)
        if due is None:
            pause = budget.wait_seconds(now)
            now += max(pause if pause is not None else seconds, 0.001)
            continue
        sent[due.peer] += BLOCK
        budget.sent(due.peer, BLOCK, now, rate)
        budget.queue(wanted(due.peer), now)
    return sent


@pytest.mark.parametrize(
    ("line", "is_busy", "rate"),
    [
        (LINE, True, BUSY_SHARE * LINE),
        (LINE, False, IDLE_SHARE * LINE),
        (None, True, 0.0),
        (None, False, IDLE_SHARE * UNKNOWN_BYTES_PER_SECOND),
    ],
)
def test_a_text_gets_a_share_of_the_line_and_less_while_vectors_wait(
    line: float | None, is_busy: bool, rate: float
) -> None:
    assert text_rate(line, is_busy=is_busy) == rate


@pytest.mark.parametrize("line", [None, 16e3, 125e3, LINE, 1e9])
def test_a_block_holds_the_line_only_for_a_moment(line: float | None) -> None:
    size = block_bytes(line)
    assert 4096 <= size <= MOST_BLOCK_BYTES
    assert line is None or size <= max(0.05 * line, 4096)


def test_the_rate_is_kept_and_used() -> None:
    sent = play(upload(), (A, B), 100.0, 0.1 * LINE)
    assert sum(sent.values()) == pytest.approx(100.0 * 0.1 * LINE, rel=0.02)
    assert sent[A] == pytest.approx(sent[B], rel=0.02)


def test_strangers_together_get_half_and_members_the_rest() -> None:
    rate = 0.1 * LINE
    alone = play(upload(A, B), (A, B), 100.0, rate)
    assert sum(alone.values()) == pytest.approx(100.0 * STRANGERS_SHARE * rate, rel=0.02)
    crowd = play(upload(A, B), (A, B, C), 100.0, rate)
    assert crowd[C] >= 0.5 * 100.0 * rate * 0.98
    assert sum(crowd.values()) == pytest.approx(100.0 * rate, rel=0.02)


def test_a_peer_has_one_request_and_a_crowd_a_bounded_number() -> None:
    budget = upload()
    for offset in range(5):
        budget.queue(wanted(A, offset), 0.0)
    assert budget.next(0.0) == wanted(A, 4)
    assert budget.next(0.0) is None
    peers = [PeerId(bytes([number]) * 32) for number in range(MOST_WAITING + 1)]
    for peer in peers:
        budget.queue(wanted(peer), 0.0)
    budget.lose(peers[0])
    budget.lose(peers[0])
    answered = []
    while (due := budget.next(0.0)) is not None:
        answered.append(due.peer)
    assert answered == peers[1:MOST_WAITING]
    assert budget.wait_seconds(0.0) is None


def test_one_peer_is_sent_two_texts_at_once_and_two_a_day() -> None:
    text_bytes = 100 * BLOCK
    budget = upload(text_bytes=text_bytes)
    most = COPIES_A_DAY * (text_bytes + MOST_BLOCK_BYTES)
    assert play(budget, (A,), LONG, 1e9)[A] <= most + 2 * BLOCK + LONG / DAY_SECONDS * most
    assert budget.next(LONG) is None
    budget.queue(wanted(B), LONG)
    assert budget.next(LONG) == wanted(B), "the others are not affected"
    budget.queue(wanted(A), LONG + DAY_SECONDS)
    assert budget.next(LONG + DAY_SECONDS) == wanted(A)


def blocks_of(piece: int, line: float | None) -> list[int]:
    size = block_bytes(line)
    return [min(size, piece - offset) for offset in range(0, piece, size)]


@pytest.mark.parametrize("line", [None, 16e3, LINE])
@pytest.mark.parametrize("piece", [1, 100, 4096, 4097, LEAST_CHARGED_BYTES + 1, MOST_BLOCK_BYTES + 1, 1 << 20])
def test_a_text_of_any_pieces_can_be_fetched_within_the_allowance(line: float | None, piece: int) -> None:
    budget = upload(text_bytes=1000 * piece, num_pieces=1000)
    for _ in range(1000):
        for num_bytes in blocks_of(piece, line):
            budget.queue(wanted(A), 0.0)
            assert budget.next(LONG) is not None
            budget.sent(A, charged_bytes(num_bytes, piece, line), 0.0, 1e12)


@pytest.mark.parametrize("num_bytes", [0, 1])
@pytest.mark.parametrize("line", [None, 16e3, LINE])
def test_single_bytes_of_long_pieces_and_answers_without_a_block_use_up_the_allowance(
    line: float | None, num_bytes: int
) -> None:
    text_bytes = 10 << 20
    budget = upload(text_bytes=text_bytes)
    answered = 0
    budget.queue(wanted(A), 0.0)
    while budget.next(LONG) is not None:
        answered += 1
        budget.sent(A, charged_bytes(num_bytes, (1 << 20) * num_bytes, line), 0.0, 1e12)
        budget.queue(wanted(A), 0.0)
    assert answered <= 1 + COPIES_A_DAY * (text_bytes + MOST_BLOCK_BYTES) / 4096


def test_the_number_of_quotas_is_bounded_and_a_used_one_is_not_forgotten() -> None:
    budget, answered = upload(text_bytes=BLOCK), []
    for peer in (PeerId(number.to_bytes(32, "big")) for number in range(MOST_BUCKETS + 40)):
        budget.queue(wanted(peer), 1e3)
        if budget.next(1e3) is not None:
            answered.append(peer)
            budget.sent(peer, 2 * COPIES_A_DAY * (BLOCK + MOST_BLOCK_BYTES), 0.0, 1e12)
    assert len(answered) == MOST_BUCKETS + 1, "peers beyond the bound share one quota"
    budget.queue(wanted(answered[0]), 1e3)
    assert budget.next(1e3) is None
