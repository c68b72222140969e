"""The contribution of a capped peer: what fits, longest-waiting spans first, never what it cannot send."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fake_run import run_rules
from hypothesis import given
from hypothesis import strategies as st
from made import ids, roster_of

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.membership.local import Conditions
from p2p_diloco.protocol.round.round import ReducerRound, row_members
from p2p_diloco.protocol.round.traffic import ENTRY_HEADER_BYTES, USABLE_SHARE, UploadBudget
from p2p_diloco.protocol.rules import RunRules

SPANS = 24
PAYLOAD, ENTRY, ROW_MEAN = 1000, 1100, 2000


def rules_of(num_spans: int = SPANS) -> RunRules:
    spans = [SpanId(0, index) for index in range(num_spans)]
    return replace(
        run_rules(),
        num_spans=(num_spans,),
        payload_bytes=dict.fromkeys(spans, PAYLOAD),
        row_mean_bytes=dict.fromkeys(spans, ROW_MEAN),
        entry_bytes=dict.fromkeys(spans, ENTRY),
    )


def collection_of(peer: PeerId, num_members: int, group_size: int, round_index: int = 0, k: int = 1) -> ReducerRound:
    roster = roster_of(num_members, k=k)
    grid = fold_roster(roster, group_size)
    row = grid.row_for(peer)
    return ReducerRound(
        round=round_index,
        fragment=0,
        roster=roster,
        roster_digest=roster.digest(),
        grid=grid,
        row=row,
        members=row_members(roster, grid, row),
        reduced=grid.reduced(peer, 0, SPANS),
        newcomers=frozenset(),
    )


def cost(collection: ReducerRound, peer: PeerId, chosen: frozenset[SpanId]) -> int:
    return PAYLOAD * sum(collection.grid.reducer(span, collection.row) != peer for span in chosen)


def handed_out(collection: ReducerRound, peer: PeerId) -> int:
    """Count message by message what `peer` sends for what it reduces."""
    grid, total = collection.grid, 0
    for span in collection.reduced:
        owner = grid.owner(span)
        entry = ENTRY + ENTRY_HEADER_BYTES
        total += entry * len(set(grid.rows[collection.row]) - {peer})
        total += entry * len(set(grid.column(span)) - {peer}) if owner == peer else ROW_MEAN
    return total


def test_without_a_cap_everything_is_contributed() -> None:
    peer = ids(4)[0]
    assert UploadBudget(rules=rules_of(), me=peer).choose(collection_of(peer, 4, 16), Conditions()) is None


@given(st.floats(1.0, 1e6), st.integers(1, 12), st.integers(1, 6), st.floats(0, 1e5))
def test_chosen_spans_fit_after_reducing_and_queued_frames(
    rate: float, num_members: int, group_size: int, backlog: float
) -> None:
    rules = rules_of()
    for peer in ids(num_members):
        upload_budget = UploadBudget(rules=rules, me=peer)
        conditions = Conditions(upload_bytes_per_second=rate, upload_backlog_bytes=backlog)
        collection = collection_of(peer, num_members, group_size)
        chosen = upload_budget.choose(collection, conditions)
        assert chosen is not None
        sent = cost(collection, peer, chosen)
        carried = USABLE_SHARE * rate * rules.clock.round_seconds
        assert sent == 0 or sent + backlog <= carried / 2
        assert sent == 0 or sent + backlog + handed_out(collection, peer) <= carried
        free = {span for span in rules.span_elements if span.index < SPANS and span.fragment == 0}
        own = {span for span in free if collection.grid.reducer(span, collection.row) == peer}
        assert own <= chosen, "what it reduces itself costs nothing"
        more = min(carried / 2 - backlog, carried - handed_out(collection, peer) - backlog)
        assert len(chosen) == SPANS or sent + PAYLOAD > more, "one more would not fit"


def test_every_span_is_contributed_as_often_as_the_cap_allows() -> None:
    peer, rules = ids(4)[0], rules_of()
    upload_budget = UploadBudget(rules=rules, me=peer)
    need = 0.75 * SPANS * PAYLOAD + 0.75 * SPANS * (ENTRY + ENTRY_HEADER_BYTES)
    conditions = Conditions(upload_bytes_per_second=0.7 * need / (USABLE_SHARE * rules.clock.round_seconds))
    turns: Counter[SpanId] = Counter()
    rounds = 60
    for round_index in range(rounds):
        chosen = upload_budget.choose(collection_of(peer, 4, 16, round_index), conditions)
        assert chosen is not None
        turns.update(chosen)
    others = [turns[SpanId(0, index)] for index in range(SPANS) if turns[SpanId(0, index)] < rounds]
    assert len(others) == 0.75 * SPANS
    assert max(others) - min(others) <= 1
    assert 0.2 * rounds < min(others) < 0.6 * rounds


def test_omitted_spans_use_none_of_the_cap() -> None:
    peer, rules = ids(4)[0], rules_of()
    upload_budget, collection = UploadBudget(rules=rules, me=peer), collection_of(peer, 4, 16)
    spans = frozenset(SpanId(0, index) for index in range(SPANS))
    others = [span for span in sorted(spans) if collection.grid.reducer(span, collection.row) != peer]
    left_out = frozenset(others[:2])
    assert upload_budget.choose(collection, Conditions(), left_out) == spans - left_out
    rate = (handed_out(collection, peer) + 2 * PAYLOAD) / (USABLE_SHARE * rules.clock.round_seconds)
    conditions = Conditions(upload_bytes_per_second=rate)
    for _ in range(SPANS):
        chosen = upload_budget.choose(collection, conditions, left_out)
        assert chosen is not None
        assert not chosen & left_out
        assert len(chosen & frozenset(others)) == 2


def test_a_cap_that_does_not_cover_reducing_leaves_nothing_to_contribute() -> None:
    peer, rules = ids(4)[0], rules_of()
    upload_budget = UploadBudget(rules=rules, me=peer)
    collection = collection_of(peer, 4, 16)
    rate = 0.9 * handed_out(collection, peer) / (USABLE_SHARE * rules.clock.round_seconds)
    conditions = Conditions(upload_bytes_per_second=rate)
    chosen = upload_budget.choose(collection, conditions)
    assert chosen is not None
    assert cost(collection, peer, chosen) == 0


def test_peers_under_caps_do_not_all_choose_the_same_spans() -> None:
    rules, firsts = rules_of(), set()
    for peer in ids(4):
        upload_budget = UploadBudget(rules=rules, me=peer)
        collection = collection_of(peer, 4, 16)
        rate = (handed_out(collection, peer) + 2 * PAYLOAD) / (USABLE_SHARE * rules.clock.round_seconds)
        conditions = Conditions(upload_bytes_per_second=rate)
        chosen = upload_budget.choose(collection, conditions)
        assert chosen is not None
        firsts.add(frozenset(s for s in chosen if collection.grid.reducer(s, 0) != peer))
    assert len(firsts) == 4
