"""The logs of all spans: strictly in parent order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ballot_number, peer_id, run_rules, sign_as, verify
from hypothesis import given
from hypothesis import strategies as st
from made import SPAN, book_with, certify, child_of, entry_on, founding, head_of, ids, roster_1, roster_of

from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.round.chain import ChainBook, EntryFate, heads_digest, wins_tie
from p2p_diloco.protocol.wire.entry import Entry, next_head

ROSTER = roster_of(1)
BOOK = book_with(founding(), roster_1(1))
NOW = 1000
"""The latest round whose entries may be absorbed."""
OWNER = ids(1)[0]
START = head_of()


def book(retained_cycles: int = 16) -> ChainBook:
    rules = run_rules()
    chains = ChainBook(rules=rules, retained_cycles=retained_cycles, verify=verify)
    chains.set_head(SPAN, START)
    return chains


def log(length: int) -> list[Entry]:
    entries, head = [], START
    for _ in range(length):
        entries.append(entry_on(head, ROSTER, OWNER))
        head = next_head(head, entries[-1])
    return entries


@given(st.permutations(range(5)))
def test_entries_are_absorbed_in_parent_order_whatever_the_order_of_arrival(order: list[int]) -> None:
    """The entry that waits is kept. For any other, only its source is recorded, and it is fetched again."""
    chains, entries = book(), log(5)
    absorbed: list[Entry] = []
    for _ in entries:
        absorbed += [entry for place in order for entry in chains.offer(entries[place], 1.0, BOOK, NOW).absorbed]
    assert absorbed == entries
    assert chains.heads[SPAN].height == 5


def test_an_entry_is_absorbed_once() -> None:
    chains, (entry,) = book(), log(1)
    assert chains.offer(entry, 1.0, BOOK, NOW).fate is EntryFate.ABSORBED
    assert chains.is_known(entry)
    assert chains.offer(entry, 1.0, BOOK, NOW).fate is EntryFate.KNOWN


def test_an_entry_for_a_span_without_a_head_is_ignored() -> None:
    entry = entry_on(START, ROSTER, OWNER, span=SpanId(1, 1))
    assert book().offer(entry, 1.0, BOOK, NOW).fate is EntryFate.KNOWN


def test_an_entry_of_an_unknown_roster_waits_elsewhere() -> None:
    assert book().offer(log(1)[0], 1.0, book_with(), NOW).fate is EntryFate.LACKS_ROSTER


def test_an_entry_that_breaks_a_rule_is_refused_with_a_reason() -> None:
    verdict = book().offer(replace(log(1)[0], tokens=7), 1.0, BOOK, NOW)
    assert verdict.fate is EntryFate.REFUSED
    assert "not signed" in verdict.reason


def test_only_entries_signed_by_their_owner_wait() -> None:
    verdict = book().offer(replace(log(2)[1], tokens=7), 1.0, BOOK, NOW)
    assert verdict.fate is EntryFate.REFUSED
    assert "not signed" in verdict.reason


def test_a_waiting_entry_that_proves_invalid_is_dropped() -> None:
    chains, entries = book(), log(2)
    bad = entry_on(next_head(START, entries[0]), ROSTER, OWNER, weights=())
    assert chains.offer(bad, 1.0, BOOK, NOW).fate is EntryFate.WAITS
    assert chains.is_known(bad)
    assert chains.offer(entries[0], 1.0, BOOK, NOW).absorbed == (entries[0],)
    assert chains.offer(entries[1], 1.0, BOOK, NOW).fate is EntryFate.ABSORBED


def test_only_the_lowest_entry_of_a_span_waits() -> None:
    chains, entries = book(), log(5)
    kept = [chains.offer(entries[place], 1.0, BOOK, NOW).is_kept for place in (3, 4, 2, 1)]
    assert kept == [True, False, True, True]
    assert chains.offer(entries[1], 1.0, BOOK, NOW).fate is EntryFate.KNOWN, "it waits already"
    assert chains.offer(entries[0], 1.0, BOOK, NOW).absorbed == tuple(entries[:2])


def test_an_entry_of_a_far_round_waits_and_does_not_freeze_its_span() -> None:
    for far in (2**60, 2**63 - 1):
        chains, entries = book(), log(2)
        ahead = entry_on(START, ROSTER, OWNER, round=far - far % 2)
        verdict = chains.offer(ahead, 1.0, BOOK, NOW)
        assert (verdict.fate, verdict.is_kept) == (EntryFate.EARLY, True)
        assert chains.heads[SPAN] == START
        assert chains.offer(entries[0], 1.0, BOOK, NOW).fate is EntryFate.ABSORBED
        assert chains.offer(entries[1], 1.0, BOOK, NOW).fate is EntryFate.ABSORBED
        assert chains.absorb_due(BOOK, far) == (), "its parent has another child by then"


def test_an_entry_of_the_next_round_but_one_is_absorbed_when_its_round_is_near() -> None:
    chains, entries = book(), log(2)
    chains.offer(entries[0], 1.0, BOOK, 1)
    assert chains.offer(entries[1], 1.0, BOOK, 1).fate is EntryFate.EARLY
    assert chains.absorb_due(BOOK, 1) == ()
    assert chains.absorb_due(BOOK, 2) == (entries[1],)


def test_of_two_waiting_entries_the_one_of_a_near_round_stays() -> None:
    chains, entries = book(), log(3)
    far = entry_on(START, ROSTER, OWNER, round=2**40)
    assert chains.offer(far, 1.0, BOOK, NOW).is_kept
    assert chains.offer(entries[2], 1.0, BOOK, NOW).is_kept
    assert not chains.offer(far, 1.0, BOOK, NOW).is_kept


def test_waiting_entries_are_bounded_by_their_total_payload_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of near rounds do not displace each other; those of far rounds make room for them."""
    monkeypatch.setattr("p2p_diloco.protocol.round.chain.MOST_WAITING_BYTES", 20)
    chains = book()
    spans = [SpanId(0, index) for index in range(3)]
    grid = BOOK.folded(ROSTER.digest(), 0)[1]
    assert {grid.owner(span) for span in spans} == {OWNER}
    for span in spans:
        chains.set_head(span, START)
    far = [entry_on(START, ROSTER, OWNER, span=span, round=2**40, payload=bytes(10)) for span in spans]
    parent = next_head(START, log(1)[0])
    near = [entry_on(parent, ROSTER, OWNER, span=span, payload=bytes(10)) for span in spans]
    assert [chains.offer(entry, 1.0, BOOK, NOW).is_kept for entry in far] == [True, True, False]
    assert [chains.offer(entry, 1.0, BOOK, NOW).is_kept for entry in reversed(near)] == [True, True, False]


def test_an_owner_of_a_superseded_roster_makes_no_more_entries() -> None:
    later = certify(child_of(ROSTER, ROSTER.members), [OWNER], ballot=ballot_number(5, 0))
    rosters = book_with(founding(), roster_1(1), later)
    chains = book()
    assert chains.offer(log(1)[0], 1.0, rosters, NOW).fate is EntryFate.ABSORBED, "an old entry of its time"
    for round_index in (6, 8, 2**40):
        stale = entry_on(chains.heads[SPAN], ROSTER, OWNER, round=round_index)
        verdict = chains.offer(stale, 1.0, rosters, NOW)
        assert verdict.fate is EntryFate.REFUSED
        assert verdict.reason.endswith("names roster 1, but roster 2 governs that round")
    below = book_with(founding(), certify(ROSTER, [peer_id("boot")], ballot=ballot_number(5, 0)))
    early = chains.offer(entry_on(chains.heads[SPAN], later.roster, OWNER, round=4), 1.0, rosters, NOW)
    assert early.fate is EntryFate.LACKS_CERTIFICATE
    nobody = chains.offer(entry_on(chains.heads[SPAN], founding().roster, OWNER, round=8), 1.0, below, NOW)
    assert nobody.reason.endswith("names roster 0, but roster 1 governs that round")


def test_a_waiting_entry_is_dropped_once_its_roster_no_longer_governs_its_round() -> None:
    chains, entries = book(), log(5)
    assert chains.offer(entries[4], 1.0, BOOK, NOW).is_kept
    later = certify(child_of(ROSTER, ROSTER.members), [OWNER], ballot=ballot_number(5, 0))
    rosters = book_with(founding(), roster_1(1), later)
    under_it = entry_on(next_head(next_head(START, entries[0]), entries[1]), later.roster, OWNER, round=8)
    above = entry_on(replace(head_of(digest=b"x"), height=7), later.roster, OWNER, round=8)
    assert chains.offer(above, 1.0, rosters, NOW).is_kept, "it takes the place of one that can be valid no more"
    assert chains.offer(under_it, 1.0, rosters, NOW).is_kept
    other = book()
    other.offer(entries[4], 1.0, BOOK, NOW)
    assert other.absorb_due(rosters, NOW) == ()
    assert not other.is_known(entries[4])


def test_a_waiting_entry_is_absorbed_once_its_span_has_been_fetched() -> None:
    chains, entries = book(), log(2)
    chains.offer(entries[1], 1.0, BOOK, NOW)
    del chains.heads[SPAN]
    assert chains.absorb_due(BOOK, NOW) == ()
    chains.set_head(SPAN, next_head(START, entries[0]))
    assert chains.absorb_due(BOOK, NOW) == (entries[1],)


def test_a_late_child_of_a_named_parent_waits_for_the_end_of_the_round() -> None:
    chains, entries = book(), log(1)
    assert chains.offer(entries[0], 1.0, BOOK, NOW, is_late=True).fate is EntryFate.EARLY
    assert chains.heads[SPAN] == START
    assert chains.absorb_due(BOOK, NOW) == (entries[0],)


@pytest.mark.parametrize("first_waits", [False, True])
def test_two_entries_of_one_owner_for_a_span_and_round_are_kept_as_evidence_once(first_waits: bool) -> None:
    chains, entries = book(), log(2)
    one = entries[1] if first_waits else entries[0]
    other = replace(one, tokens=7)
    other = replace(other, signature=sign_as(OWNER, other.statement()))
    forged = replace(one, tokens=8, signature=bytes(64))
    chains.offer(one, 1.0, BOOK, NOW)
    assert chains.is_known(one)
    assert chains.offer(forged, 1.0, BOOK, NOW).evidence is None
    assert not chains.is_known(other)
    found = chains.offer(other, 1.0, BOOK, NOW).evidence
    assert found is not None
    assert (found.owner, found.span, found.round) == (OWNER, SPAN, one.round)
    assert all(verify(OWNER, statement, signature) for statement, signature in found.signed)
    assert "signed two different entries" in found.sentence()
    assert chains.evidence == {OWNER: found}
    assert chains.offer(other, 1.0, BOOK, NOW).evidence is None, "once for each owner"


def test_overtaken_waiting_entries_are_dropped() -> None:
    chains, entries = book(), log(3)
    other = entry_on(head_of(digest=b"another branch"), ROSTER, OWNER)
    assert chains.offer(replace(other, height=2, signature=other.signature), 1.0, BOOK, NOW).fate is EntryFate.REFUSED
    waits = entry_on(replace(head_of(digest=b"another branch"), height=1), ROSTER, OWNER, round=8)
    assert chains.offer(waits, 1.0, BOOK, NOW).fate is EntryFate.WAITS
    for entry in entries[:2]:
        chains.offer(entry, 1.0, BOOK, NOW)
    assert chains.is_known(waits)
    assert chains.absorb_due(BOOK, NOW) == ()
    chains.set_head(SPAN, START)
    assert not chains.is_known(waits)


def test_a_waiting_entry_is_absorbed_after_a_transfer_of_its_parent() -> None:
    chains, entries = book(), log(3)
    assert chains.offer(entries[2], 1.0, BOOK, NOW).fate is EntryFate.WAITS
    chains.set_head(SPAN, next_head(next_head(START, entries[0]), entries[1]))
    assert not chains.is_known(entries[2])
    assert chains.offer(entries[2], 1.0, BOOK, NOW).absorbed == (entries[2],)


def test_entries_are_kept_for_late_peers_but_not_forever() -> None:
    chains, entries = book(retained_cycles=2), log(5)
    for entry in entries:
        chains.offer(entry, 1.0, BOOK, NOW)
    kept = [chains.entry_after(SPAN, entry.parent) for entry in entries]
    assert kept == [None, None, None, entries[3], entries[4]]
    assert chains.entry_after(SpanId(1, 0), START.digest) is None


def test_a_transfer_drops_entries_that_may_belong_to_another_branch() -> None:
    chains, entries = book(), log(1)
    chains.offer(entries[0], 1.0, BOOK, NOW)
    chains.set_head(SPAN, head_of(height=9, digest=b"elsewhere"))
    assert chains.entry_after(SPAN, START.digest) is None
    chains.drop_head(SPAN)
    assert chains.heads == {}


def test_a_fragment_has_heads_only_when_no_span_is_missing() -> None:
    chains = book()
    assert chains.fragment_heads(0, 2) is None
    chains.set_head(SpanId(0, 1), START)
    assert chains.fragment_heads(0, 2) == (START, START)


@given(st.tuples(*[st.integers(0, 3)] * 2))
def test_of_two_children_the_later_wins_then_the_smaller_digest_on_both_sides(rounds: tuple[int, int]) -> None:
    one, other = (head_of(round_index=r, digest=d) for r, d in zip(rounds, (b"1", b"2"), strict=True))
    assert wins_tie(one, other) != wins_tie(other, one)
    if rounds[0] != rounds[1]:
        assert wins_tie(one, other) == (rounds[0] > rounds[1])
    else:
        assert wins_tie(one, other) == (one.digest < other.digest)


def test_a_digest_covers_every_field_of_every_head() -> None:
    changes = ({"height": 1}, {"radius": 2.0}, {"median_weight": 3.0}, {"round": 4}, {"roster": START.digest})
    digests = {heads_digest([START, replace(START, **change)]) for change in changes}
    assert len(digests | {heads_digest([START, START])}) == 6


def test_another_child_of_the_tips_parent_is_recognised_and_checked() -> None:
    chains, (first,) = book(), log(1)
    assert chains.offer(first, 1.0, BOOK, NOW).fate is EntryFate.ABSORBED
    others = [replace(first, payload=b"other %d" % number) for number in range(32)]
    wins = next(one for one in others if wins_tie(next_head(START, one), next_head(START, first)))
    assert chains.offer(wins, 1.0, BOOK, NOW).fate is EntryFate.KNOWN
    chains.fork_at(SPAN, START)
    assert chains.offer(wins, 1.0, BOOK, latest_round=wins.round - 1).fate is EntryFate.EARLY
    verdict = chains.offer(wins, 1.0, BOOK, NOW)
    assert verdict.fate is EntryFate.REFUSED, "its signature is that of the first"
    assert "not signed by its owner" in verdict.reason
    assert chains.heads[SPAN] == next_head(START, first)


def test_any_other_child_is_followed_if_others_have_continued_from_it() -> None:
    chains, (first,) = book(), log(1)
    assert chains.offer(first, 1.0, BOOK, NOW).fate is EntryFate.ABSORBED
    others = [replace(first, payload=b"other %d" % number) for number in range(32)]
    loses = next(one for one in others if wins_tie(next_head(START, first), next_head(START, one)))
    loses = replace(loses, signature=sign_as(OWNER, loses.statement()))
    chains.fork_at(SPAN, START)
    assert chains.offer(loses, 1.0, BOOK, NOW).fate is EntryFate.KNOWN
    chains.fork_at(SPAN, START, is_left=True)
    assert chains.offer(first, 1.0, BOOK, NOW).fate is EntryFate.KNOWN
    assert chains.offer(loses, 1.0, BOOK, NOW).fate is EntryFate.OTHER_CHILD
