"""Limits on what one peer can make another print and do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.ids import PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.node.budgets import (
    LINES_PER_MINUTE,
    MOST_BUCKETS,
    MOST_SUMMARIES,
    STRANGERS_LINES_PER_MINUTE,
    SUMMARY_SECONDS,
    Line,
    PeerBudgets,
)
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.wire.messages import (
    ContentRequest,
    EntryRequest,
    HeadsRequest,
    Introductions,
    Message,
    Refusal,
    RosterRequest,
    SpanVector,
)
from simulator.run import run_rules

ANN, BEN = PeerId(sha256(b"ann")), PeerId(sha256(b"ben"))
LINE = ("refused", "no")
SPAN = SpanId(0, 0)


RULES = run_rules(num_spans=(4, 4), group_size=32, stalled_cycles=8, heartbeat_seconds=2.0, round_seconds=16.0)


def budgets() -> PeerBudgets:
    return PeerBudgets(RULES)


def num_admitted(budget: PeerBudgets, message: Message, *, count: int, seconds: float, begin: float = 0.0) -> int:
    """Return how many of a number of evenly spaced requests are admitted."""
    return sum(budget.admits(ANN, type(message), begin + seconds * number / count) for number in range(count))


# -- lines


def test_a_members_log_lines_are_limited_per_minute_and_the_rest_are_counted() -> None:
    budget = budgets()
    said = [line for n in range(600) for line in budget.take(ANN, LINE, 0.1 * n, is_member=True)]
    assert LINES_PER_MINUTE - 1 <= len(said) <= LINES_PER_MINUTE
    assert budget.take(BEN, LINE, 59.0, is_member=True) == [LINE], "its flood costs nobody else a line"
    ((topic, text),) = budget.flush(SUMMARY_SECONDS + 1.0)
    assert topic == "flood"
    left_out = 600 - len(said)
    assert text == f"in the last minute {left_out} more lines about {short_peer_id(ANN)} were left out"
    assert budget.take(ANN, LINE, 120.0, is_member=True) == [LINE]


def test_strangers_in_any_number_share_one_budget_and_little_memory() -> None:
    budget = budgets()
    said: list[Line] = []
    for number in range(10_000):
        said += budget.take(PeerId(sha256(b"%d" % number)), LINE, 1.0 + 0.006 * number, is_member=False)
    assert STRANGERS_LINES_PER_MINUTE - 1 <= len(said) <= STRANGERS_LINES_PER_MINUTE
    assert len(budget) <= MOST_BUCKETS + 1
    texts = [text for _, text in budget.flush(62.0 + SUMMARY_SECONDS)]
    assert len(texts) <= MOST_SUMMARIES + 1
    assert any("more peers were left out" in text for text in texts)
    assert budget.flush(10_000.0) == []


def test_omitted_lines_are_counted_in_the_next_line_at_the_latest() -> None:
    budget = budgets()
    for _ in range(LINES_PER_MINUTE // 2 + 3):
        budget.take(ANN, LINE, 0.0, is_member=True)
    flood, line = budget.take(ANN, LINE, SUMMARY_SECONDS, is_member=True)
    assert flood[1].startswith("in the last minute 3 more lines about")
    assert line == LINE


# -- messages


@pytest.mark.parametrize(
    ("message", "most"),
    [
        (RosterRequest(known=()), 64 + 4 * 25),
        (Introductions(records=()), 8 + 5),
        (EntryRequest(span=SPAN, parent=sha256(b"parent")), 2000 + 1000 * 25),
        (Refusal(round=0, newer_roster=True, reason=b""), 1000 + 108 * 25),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, int) else "",
)
def test_a_flood_is_handled_up_to_a_limit_and_one_line_counts_the_rest(message: Message, most: int) -> None:
    budget = budgets()
    admitted = num_admitted(budget, message, count=50_000, seconds=25.0)
    assert 0.9 * most - 1 <= admitted <= most + 1
    assert budget.flush(59.0) == []
    ((_, text),) = budget.flush(25.0 + SUMMARY_SECONDS)
    left_out = 50_000 - admitted
    assert text == (
        f"in the last minute {left_out} messages of {short_peer_id(ANN)} were dropped because it sends too many"
    )


def test_a_flood_does_not_use_the_budget_of_other_peers_or_kinds() -> None:
    budget = budgets()
    num_admitted(budget, RosterRequest(known=()), count=10_000, seconds=1.0)
    assert budget.admits(BEN, RosterRequest, 1.0)
    assert budget.admits(ANN, EntryRequest, 1.0)


def test_vectors_are_bounded_elsewhere() -> None:
    vector = SpanVector(round=0, span=SPAN, payload=b"")
    assert num_admitted(budgets(), vector, count=10_000, seconds=1.0) == 10_000


@pytest.mark.parametrize("round_seconds", [0.5, 8.0, 600.0])
@pytest.mark.parametrize("fragments", [1, 8, 1024])
def test_comparing_all_fragments_eight_times_a_round_is_never_slowed(round_seconds: float, fragments: int) -> None:
    rules = replace(
        RULES,
        num_spans=(1,) * fragments,
        clock=RoundClock(start_seconds=0.0, round_seconds=round_seconds, num_fragments=fragments),
    )
    budget = PeerBudgets(rules)
    for ask in range(32):
        for fragment in range(fragments):
            for question in (HeadsRequest(fragment=fragment), ContentRequest(fragment=fragment)):
                assert budget.admits(ANN, type(question), ask * round_seconds / 8.0)


def test_catching_up_with_eight_pending_requests_is_never_slowed() -> None:
    """Requests for entries and pieces, on a line that answers within 10 ms."""
    budget, now = budgets(), 0.0
    for _ in range(20_000):
        assert budget.admits(ANN, EntryRequest, now)
        now += 0.010 / 8.0
