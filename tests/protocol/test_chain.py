"""The logs of all spans: strictly in parent order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import RUN, run_rules, verify
from hypothesis import given
from hypothesis import strategies as st
from made import SPAN, entry_on, head_of, ids, roster_of

from p2p_diloco.ids import SpanHead, SpanId
from p2p_diloco.protocol.chain import ChainBook, EntryFate, Remedy, choose_remedy, heads_digest
from p2p_diloco.protocol.entry import Entry, EntryRules, next_head
from p2p_diloco.protocol.grid import fold_roster

ROSTER = roster_of(1)
FOLDED = {ROSTER.digest(): (ROSTER, fold_roster(ROSTER, 16))}
OWNER = ids(1)[0]
START = head_of()


def book(retained_cycles: int = 16) -> ChainBook:
    rules = EntryRules(run=RUN, clock=run_rules().clock, radius_limit=3.0)
    chains = ChainBook(rules=rules, retained_cycles=retained_cycles, verify=verify)
    chains.set_head(SPAN, START)
    return chains


def log(length: int) -> list[Entry]:
    entries, head = [], START
    for _ in range(length):
        entries.append(entry_on(head, ROSTER, OWNER))
        head = next_head(head, entries[-1])
    return entries


@given(st.permutations(range(6)))
def test_entries_are_absorbed_in_parent_order_whatever_the_order_of_arrival(order: list[int]) -> None:
    chains, entries = book(), log(6)
    absorbed = [entry for place in order for entry in chains.offer(entries[place], 1.0, FOLDED).absorbed]
    assert absorbed == entries
    assert chains.heads[SPAN].height == 6


def test_an_entry_is_absorbed_once() -> None:
    chains, (entry,) = book(), log(1)
    assert chains.offer(entry, 1.0, FOLDED).fate is EntryFate.ABSORBED
    assert chains.is_known(entry)
    assert chains.offer(entry, 1.0, FOLDED).fate is EntryFate.KNOWN


def test_an_entry_for_a_span_without_a_head_says_nothing() -> None:
    entry = entry_on(START, ROSTER, OWNER, span=SpanId(1, 1))
    assert book().offer(entry, 1.0, FOLDED).fate is EntryFate.KNOWN


def test_an_entry_of_an_unknown_roster_waits_elsewhere() -> None:
    assert book().offer(log(1)[0], 1.0, {}).fate is EntryFate.LACKS_ROSTER


def test_an_entry_that_breaks_a_rule_is_refused_with_its_reason() -> None:
    verdict = book().offer(replace(log(1)[0], tokens=7), 1.0, FOLDED)
    assert verdict.fate is EntryFate.REFUSED
    assert "not signed" in verdict.reason


def test_only_entries_that_their_owner_signed_wait() -> None:
    verdict = book().offer(replace(log(2)[1], tokens=7), 1.0, FOLDED)
    assert verdict.fate is EntryFate.REFUSED
    assert "not signed" in verdict.reason


def test_a_waiting_entry_that_turns_out_bad_is_dropped() -> None:
    chains, entries = book(), log(2)
    bad = entry_on(next_head(START, entries[0]), ROSTER, OWNER, weights=())
    assert chains.offer(bad, 1.0, FOLDED).fate is EntryFate.WAITS
    assert chains.is_known(bad)
    assert chains.offer(entries[0], 1.0, FOLDED).absorbed == (entries[0],)
    assert chains.offer(entries[1], 1.0, FOLDED).fate is EntryFate.ABSORBED


def test_few_entries_wait() -> None:
    chains, entries = book(), log(40)
    for entry in entries[1:]:
        chains.offer(entry, 1.0, FOLDED)
    absorbed = chains.offer(entries[0], 1.0, FOLDED).absorbed
    assert len(absorbed) < 17
    assert chains.heads[SPAN].height == len(absorbed)


def test_waiting_entries_that_were_overtaken_are_dropped() -> None:
    chains, entries = book(), log(3)
    other = entry_on(head_of(digest=b"another branch"), ROSTER, OWNER)
    assert chains.offer(replace(other, height=2, signature=other.signature), 1.0, FOLDED).fate is EntryFate.REFUSED
    waits = entry_on(replace(head_of(digest=b"another branch"), height=1), ROSTER, OWNER)
    assert chains.offer(waits, 1.0, FOLDED).fate is EntryFate.WAITS
    for entry in entries[:2]:
        chains.offer(entry, 1.0, FOLDED)
    assert chains.is_known(waits)
    chains.set_head(SPAN, START)
    assert not chains.is_known(waits)


def test_an_entry_that_waited_is_taken_after_a_transfer_brought_its_parent() -> None:
    chains, entries = book(), log(3)
    assert chains.offer(entries[2], 1.0, FOLDED).fate is EntryFate.WAITS
    chains.set_head(SPAN, next_head(next_head(START, entries[0]), entries[1]))
    assert not chains.is_known(entries[2])
    assert chains.offer(entries[2], 1.0, FOLDED).absorbed == (entries[2],)


def test_entries_are_kept_for_those_who_missed_them_but_not_for_ever() -> None:
    chains, entries = book(retained_cycles=2), log(5)
    for entry in entries:
        chains.offer(entry, 1.0, FOLDED)
    kept = [chains.entry_after(SPAN, entry.parent) for entry in entries]
    assert kept == [None, None, None, entries[3], entries[4]]
    assert chains.entry_after(SpanId(1, 0), START.digest) is None


def test_a_transfer_forgets_entries_that_may_be_of_another_branch() -> None:
    chains, entries = book(), log(1)
    chains.offer(entries[0], 1.0, FOLDED)
    chains.set_head(SPAN, head_of(height=9, digest=b"elsewhere"))
    assert chains.entry_after(SPAN, START.digest) is None
    chains.drop_head(SPAN)
    assert chains.heads == {}


def test_a_fragment_has_heads_only_when_no_span_is_missing() -> None:
    chains = book()
    assert chains.fragment_heads(0, 2) is None
    chains.set_head(SpanId(0, 1), START)
    assert chains.fragment_heads(0, 2) == (START, START)


@pytest.mark.parametrize(
    ("mine", "theirs", "remedy"),
    [
        (None, START, Remedy.TRANSFER),
        (START, START, Remedy.NOTHING),
        (START, head_of(height=2, digest=b"x"), Remedy.REPLAY),
        (head_of(height=2, digest=b"x"), START, Remedy.NOTHING),
        (START, head_of(digest=b"x", round_index=5), Remedy.TRANSFER),
        (head_of(digest=b"x", round_index=5), START, Remedy.NOTHING),
    ],
)
def test_more_entries_win_then_the_later_round(mine: SpanHead | None, theirs: SpanHead, remedy: Remedy) -> None:
    assert choose_remedy(mine, theirs) is remedy


@given(st.tuples(*[st.integers(0, 3)] * 4), st.booleans())
def test_both_sides_agree_on_who_moves(numbers: tuple[int, int, int, int], same: bool) -> None:
    one = head_of(height=numbers[0], round_index=numbers[1], digest=b"1")
    other = head_of(height=numbers[2], round_index=numbers[3], digest=b"2")
    remedies = {choose_remedy(one, other) is Remedy.NOTHING, choose_remedy(other, one) is Remedy.NOTHING}
    assert remedies == {True, False}


def test_a_digest_covers_every_field_of_every_head() -> None:
    changes = ({"height": 1}, {"radius": 2.0}, {"median_weight": 3.0}, {"round": 4}, {"roster": START.digest})
    digests = {heads_digest([START, replace(START, **change)]) for change in changes}
    assert len(digests | {heads_digest([START, START])}) == 6
