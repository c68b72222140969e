"""The tokens of entries are divided exactly, and two peers that followed the same log have the same sums."""

from __future__ import annotations

import struct
from dataclasses import replace
from fractions import Fraction

import pytest
from fake_run import ALL_SPANS, genesis_heads, peer_id, run_rules
from hypothesis import given
from hypothesis import strategies as st
from made import book_with, entry_on, founding, ids, roster_1

from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.round.credit import BLOCK_CYCLES, CreditBook, divide_tokens
from p2p_diloco.protocol.wire.entry import Entry, next_head
from p2p_diloco.protocol.wire.frames import MOST_COUNTED
from p2p_diloco.span_log import SpanHead

ROSTER = roster_1(3)
ANN, BOB, CAT = ids(3)
SPAN = SpanId(0, 0)
FRAGMENTS = 2
WEIGHTS = st.lists(st.floats(min_value=0.0, max_value=2.0**100, width=32), min_size=1, max_size=40).filter(sum)


@pytest.mark.parametrize(
    ("tokens", "weights", "parts"),
    [
        (100, (1.0,), (100,)),
        (100, (30.0, 70.0), (30, 70)),
        (100, (1.0, 1.0, 1.0), (34, 33, 33)),
        (101, (1.0, 1.0, 1.0), (34, 34, 33)),
        (100, (0.0, 1.0, 1.0), (0, 50, 50)),
        (1, (1.0, 2.0, 2.0), (0, 1, 0)),
        (0, (1.0, 2.0), (0, 0)),
        (7, (2.0**-149, 2.0**-149), (4, 3)),
        (MOST_COUNTED, (3.0e38, 1.0), (MOST_COUNTED, 0)),
        (MOST_COUNTED, (1.0, 1.0), (MOST_COUNTED // 2 + 1, MOST_COUNTED // 2)),
    ],
)
def test_tokens_are_divided_by_weight_and_the_rest_goes_to_whoever_lost_most(
    tokens: int, weights: tuple[float, ...], parts: tuple[int, ...]
) -> None:
    assert divide_tokens(tokens, weights) == parts


@given(tokens=st.integers(0, MOST_COUNTED), weights=WEIGHTS)
def test_parts_sum_to_the_tokens_and_none_is_a_token_from_its_share(tokens: int, weights: list[float]) -> None:
    parts = divide_tokens(tokens, tuple(weights))
    assert sum(parts) == tokens
    whole = sum(map(Fraction, weights))
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - tokens * Fraction(weight) / whole) < 1
        assert part == 0 or weight > 0


def test_weights_that_are_the_tokens_give_each_member_its_own() -> None:
    tokens = (512, 16_384, 1, 999_999)
    weights = struct.unpack("<4f", struct.pack("<4f", *tokens))
    assert divide_tokens(sum(tokens), weights) == tokens


class Log:
    """A log of all spans, and the entries that make it."""

    def __init__(self) -> None:
        self.heads = genesis_heads(founding().roster)

    def entry(self, span: SpanId, cycle: int, **changes: object) -> Entry:
        """Return the next entry of a span, and follow it."""
        entry = entry_on(
            self.heads[span], ROSTER.roster, ANN, span=span, round=FRAGMENTS * cycle + span.fragment, **changes
        )
        self.heads[span] = next_head(self.heads[span], entry)
        return entry

    def cycle(self, cycle: int, **changes: object) -> list[Entry]:
        return [self.entry(span, cycle, **changes) for span in ALL_SPANS]


def book() -> RosterBook:
    return book_with(founding(), ROSTER)


def at_genesis() -> CreditBook:
    counted = CreditBook(run_rules())
    counted.look(book(), genesis_heads(founding().roster), 0, is_level=True)
    return counted


def absorb(counted: CreditBook, *entries: Entry) -> None:
    for entry in entries:
        counted.entry_absorbed(entry, ROSTER.roster)


def test_a_member_gets_its_part_of_each_span_that_includes_it() -> None:
    counted, log = at_genesis(), Log()
    absorb(counted, *log.cycle(0, tokens=90, weights=(1.0, 1.0, 4.0)))
    absorb(counted, log.entry(SPAN, 1, places=(2,), weights=(1.0,), tokens=7))
    (block,) = counted.saved().blocks.values()
    assert block.sums == {ANN: 15 * len(ALL_SPANS), BOB: 15 * len(ALL_SPANS), CAT: 60 * len(ALL_SPANS) + 7}
    assert block.missing == 0


def test_blocks_end_with_their_cycle_and_are_complete_a_cycle_later() -> None:
    counted, log, rosters = at_genesis(), Log(), book()
    absorb(counted, *log.cycle(BLOCK_CYCLES - 1))
    absorb(counted, *log.cycle(BLOCK_CYCLES, tokens=1))
    for cycle, level, complete in (
        (BLOCK_CYCLES, True, False),
        (BLOCK_CYCLES + 1, False, False),
        (BLOCK_CYCLES + 1, True, True),
    ):
        counted.look(rosters, log.heads, cycle, is_level=level)
        assert counted.saved().is_complete(0) is complete
    assert sum(counted.saved().blocks[0].sums.values()) == 100 * len(ALL_SPANS)
    assert sum(counted.saved().blocks[1].sums.values()) == len(ALL_SPANS)
    assert not counted.saved().is_complete(1)


def test_a_newcomer_lacks_the_cycles_of_its_first_block_until_its_tips() -> None:
    counted, log, rosters = CreditBook(run_rules()), Log(), book()
    log.cycle(BLOCK_CYCLES + 9)
    counted.look(rosters, {}, BLOCK_CYCLES + 9, is_level=False)
    assert counted.saved().blocks == {}
    counted.look(rosters, log.heads, BLOCK_CYCLES + 10, is_level=True)
    absorb(counted, *log.cycle(BLOCK_CYCLES + 10), *log.cycle(2 * BLOCK_CYCLES))
    counted.look(rosters, log.heads, 3 * BLOCK_CYCLES + 1, is_level=True)
    saved = counted.saved()
    assert saved.blocks[1].missing == (1 << 10) - 1
    assert not saved.is_complete(1)
    assert saved.is_complete(2)


def skipping(log: Log) -> SpanHead:
    """Let a span follow an entry that a peer does not get."""
    log.entry(SPAN, BLOCK_CYCLES - 1)
    return log.heads[SPAN]


@pytest.mark.parametrize("looks", [True, False])
def test_a_tip_to_which_no_entries_led_makes_the_cycles_between_incomplete(looks: bool) -> None:
    counted, log, rosters = at_genesis(), Log(), book()
    absorb(counted, *log.cycle(BLOCK_CYCLES - 3))
    skipping(log)
    if looks:
        counted.look(rosters, log.heads, BLOCK_CYCLES, is_level=True)
    absorb(counted, log.entry(SPAN, BLOCK_CYCLES + 2))
    counted.look(rosters, log.heads, 2 * BLOCK_CYCLES + 1, is_level=True)
    saved = counted.saved()
    assert saved.blocks[0].missing == 7 << BLOCK_CYCLES - 3
    assert not saved.is_complete(0)
    assert saved.blocks[1].missing == (0 if looks else 3), "without a look, the round of the parent is not known"


def test_an_entry_that_loses_to_another_child_is_taken_back() -> None:
    counted, log, rosters = at_genesis(), Log(), book()
    absorb(counted, log.entry(SPAN, 0))
    before = log.heads[SPAN]
    absorb(counted, log.entry(SPAN, 1, places=(0,), weights=(1.0,), tokens=50))
    log.heads[SPAN] = before
    counted.look(rosters, log.heads, 2, is_level=True)
    absorb(counted, log.entry(SPAN, 1, places=(1,), weights=(1.0,), tokens=60))
    (block,) = counted.saved().blocks.values()
    assert (block.missing, block.sums) == (0, {ANN: 34, BOB: 93, CAT: 33})


def test_a_peer_without_its_spans_lacks_the_cycles_until_it_has_them_again() -> None:
    counted, log, rosters = at_genesis(), Log(), book()
    absorb(counted, *log.cycle(0))
    counted.look(rosters, {}, 3, is_level=True)
    assert counted.saved().blocks[0].missing == 1 << 3
    assert counted.saved().followed == 0


def test_a_branch_that_is_given_up_makes_its_cycles_incomplete() -> None:
    counted, log = CreditBook(run_rules()), Log()
    old, other = roster_1(3), roster_1(2)
    rosters = book_with(founding(), old)
    counted.look(rosters, log.heads, 0, is_level=True)
    absorb(counted, *log.cycle(4))
    counted.look(rosters, log.heads, 5, is_level=True)
    assert counted.saved().blocks[0].missing == 0
    rosters.add(other, wins=True)
    counted.look(rosters, log.heads, 5, is_level=True)
    assert counted.saved().blocks[0].missing == (1 << 6) - 1


def test_a_restarted_peer_counts_what_it_had_absorbed_and_not_saved() -> None:
    counted, log, rosters = at_genesis(), Log(), book()
    absorb(counted, *log.cycle(0))
    saved = counted.saved()
    later = [*log.cycle(1, tokens=31), *log.cycle(2)]
    absorb(counted, *later)
    again = CreditBook(run_rules())
    again.recall(saved)
    disk = {(entry.span, entry.parent): entry for entry in later}

    def entry_after(span: SpanId, parent: Digest) -> Entry | None:
        return disk.get((span, parent))

    again.replay(log.heads, entry_after, rosters)
    again.look(rosters, log.heads, 3, is_level=True)
    assert replace(again.saved(), followed=0, line=None) == replace(counted.saved(), followed=0, line=None)
    without = CreditBook(run_rules())
    without.recall(saved)
    without.replay(log.heads, lambda span, parent: None, rosters)
    without.look(rosters, log.heads, 3, is_level=True)
    assert without.saved().blocks[0].missing == 0b111


def test_the_oldest_sums_are_dropped_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_diloco.protocol.round.credit.MOST_SUMS", 7)
    counted, log, rosters = at_genesis(), Log(), book()
    for block in range(4):
        absorb(counted, *log.cycle(block * BLOCK_CYCLES))
        counted.look(rosters, log.heads, block * BLOCK_CYCLES, is_level=True)
    assert sorted(counted.saved().blocks) == [2, 3]


def test_the_bootstrap_peer_with_weight_0_gets_nothing() -> None:
    counted, log = at_genesis(), Log()
    absorb(counted, log.entry(SPAN, 0, weights=(0.0, 1.0, 1.0)))
    assert ANN not in counted.saved().blocks[0].sums
    assert peer_id("boot") not in counted.saved().blocks[0].sums
