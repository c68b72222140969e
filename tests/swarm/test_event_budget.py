"""How much one peer can make another print."""

from __future__ import annotations

from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.swarm.event_budget import (
    LINES_PER_MINUTE,
    MOST_PEERS,
    STRANGERS_LINES_PER_MINUTE,
    WINDOW_SECONDS,
    EventBudget,
    Line,
)

ANN, BEN = PeerId(sha256(b"ann")), PeerId(sha256(b"ben"))
LINE = ("refused", "no")


def test_a_member_makes_so_many_lines_a_minute_and_then_one_that_counts_the_rest_and_names_it() -> None:
    budget = EventBudget()
    said = [budget.take(ANN, LINE, 0.01 * number, is_member=True) for number in range(1000)]
    assert said[:LINES_PER_MINUTE] == [[LINE]] * LINES_PER_MINUTE
    assert said[LINES_PER_MINUTE:] == [[]] * (1000 - LINES_PER_MINUTE)
    assert budget.take(BEN, LINE, 11.0, is_member=True) == [LINE], "its flood costs nobody else a line"
    ((topic, text),) = budget.flush(WINDOW_SECONDS)
    assert topic == "flood"
    assert text == f"{1000 - LINES_PER_MINUTE} more lines about {short_peer_id(ANN)} were left out in the last minute"
    assert budget.take(ANN, LINE, WINDOW_SECONDS + 1.0, is_member=True) == [LINE]


def test_strangers_in_any_number_share_one_budget_and_little_memory() -> None:
    budget = EventBudget()
    said: list[Line] = []
    for number in range(10_000):
        said += budget.take(PeerId(sha256(b"%d" % number)), LINE, 1.0, is_member=False)
    assert said == [LINE] * STRANGERS_LINES_PER_MINUTE
    assert len(budget) <= MOST_PEERS + 1
    texts = [text for _, text in budget.flush(1.0 + WINDOW_SECONDS)]
    assert any("peers that are no members" in text for text in texts)
    assert len(budget) == 0


def test_what_is_left_out_is_said_with_the_next_line_at_the_latest() -> None:
    budget = EventBudget()
    for _ in range(LINES_PER_MINUTE + 3):
        budget.take(ANN, LINE, 0.0, is_member=True)
    flood, line = budget.take(ANN, LINE, WINDOW_SECONDS, is_member=True)
    assert flood[1].startswith("3 more lines about")
    assert line == LINE
