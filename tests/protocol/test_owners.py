"""Owners whose spans get no entries lose *reduces*: the log is the evidence, and one member always keeps it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from fake_run import peer_id, run_rules
from made import ids, member, roster_of

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.membership.presence import IDLE_CYCLES, LOST_CYCLES, OwnerLog
from p2p_diloco.protocol.wire.roster import Roster

CLOCK = run_rules().clock
CYCLE = CLOCK.num_fragments
SPANS = 16
GROUP = 16


def play(log: OwnerLog, roster: Roster, silent: Collection[PeerId], rounds: range) -> dict[int, tuple[PeerId, ...]]:
    """Run rounds with rotating owners; spans of owners in `silent` get no entries. Return the owners that lose."""
    losers = {}
    folded = fold_roster(roster, GROUP)
    for round_index in rounds:
        grid = folded.turned(CLOCK.cycle(round_index))
        for index in range(SPANS):
            span = SpanId(CLOCK.fragment(round_index), index)
            if grid.owner(span) not in silent:
                log.entry_absorbed(round_index, span, roster, grid)
        found = log.round_over(round_index, SPANS, roster, grid)
        if found:
            losers[round_index] = found
    return losers


@pytest.mark.parametrize("size", [2, 3, 16, 200])
def test_only_an_owner_without_entries_loses_its_role_within_a_few_cycles(size: int) -> None:
    roster = roster_of(size)
    log = OwnerLog(clock=CLOCK)
    silent = next(owner for owner in [fold_roster(roster, GROUP).owner(SpanId(0, 0))] if owner is not None)
    losers = play(log, roster, {silent}, range(200 * CYCLE))
    first = min(losers)
    assert losers[first] == (silent,)
    assert {peer for found in losers.values() for peer in found} == {silent}
    assert first >= IDLE_CYCLES * CYCLE - 1
    if size <= 16:
        assert first < (IDLE_CYCLES + 1) * CYCLE


@pytest.mark.parametrize("size", [1, 2, 3, 16, 200])
def test_no_owner_loses_its_role_if_no_spans_get_entries(size: int) -> None:
    roster = roster_of(size)
    assert play(OwnerLog(clock=CLOCK), roster, roster.peers(), range(20 * CYCLE)) == {}


@pytest.mark.parametrize("size", [2, 3, 16])
def test_all_owners_but_the_last_may_lose_their_role(size: int) -> None:
    roster = roster_of(size)
    alone = min(roster.peers())
    log = OwnerLog(clock=CLOCK)
    losers = play(log, roster, roster.peers() - {alone}, range(4 * CYCLE))
    assert {peer for found in losers.values() for peer in found} == roster.peers() - {alone}
    assert log.lost() == {(peer, 1) for peer in roster.peers() - {alone}}


def test_a_lost_role_returns_after_a_while() -> None:
    roster = roster_of(3)
    log = OwnerLog(clock=CLOCK)
    silent = min(roster.peers())
    lost_at = min(play(log, roster, {silent}, range(IDLE_CYCLES * CYCLE)))
    until = lost_at + LOST_CYCLES * CYCLE
    play(log, roster, (), range(lost_at + 1, until))
    assert log.lost() == {(silent, 1)}
    play(log, roster, (), range(until, until + 1))
    assert log.lost() == frozenset()


def test_a_restarted_owner_starts_afresh_and_one_that_left_is_forgotten() -> None:
    roster = roster_of(3)
    log = OwnerLog(clock=CLOCK)
    silent = min(roster.peers())
    play(log, roster, {silent}, range(IDLE_CYCLES * CYCLE))
    assert log.lost() == {(silent, 1)}
    others = [m for m in roster.members if m.peer != silent]
    play(log, replace(roster, members=(*others, member(silent, incarnation=2))), (), range(8, 9))
    assert log.lost() == frozenset()


def test_a_late_entry_is_evidence_too() -> None:
    roster, log = roster_of(2), OwnerLog(clock=CLOCK)
    slow = min(roster.peers())
    for cycle in range(10):
        rounds = range(cycle * CYCLE, (cycle + 1) * CYCLE)
        assert play(log, roster, {slow}, rounds) == {}
        grid = fold_roster(roster, GROUP).turned(cycle)
        owned = next(SpanId(0, index) for index in range(SPANS) if grid.owner(SpanId(0, index)) == slow)
        log.entry_absorbed(rounds[-1], owned, roster, grid)


def test_an_entry_of_the_missed_rounds_clears_an_idle_owner() -> None:
    roster, log = roster_of(2), OwnerLog(clock=CLOCK)
    missed = min(roster.peers())
    lost_at = min(play(log, roster, {missed}, range(1, 4 * CYCLE)))
    grid = fold_roster(roster, GROUP).turned(CLOCK.cycle(lost_at))
    owned = next(SpanId(0, index) for index in range(SPANS) if grid.owner(SpanId(0, index)) == missed)
    for before_or_after in (0, lost_at + 1):
        log.entry_absorbed(before_or_after, owned, roster, grid)
        assert log.lost() == {(missed, 1)}, "this says nothing of the rounds for which it has lost"
    log.entry_absorbed(lost_at, owned, roster, grid)
    assert log.lost() == frozenset()


def test_a_peer_that_does_not_follow_the_logs_has_no_evidence() -> None:
    roster, log = roster_of(2), OwnerLog(clock=CLOCK)
    silent = min(roster.peers())
    play(log, roster, {silent}, range(IDLE_CYCLES * CYCLE - 1))
    log.forget()
    assert play(log, roster, {silent}, range(IDLE_CYCLES * CYCLE - 1, IDLE_CYCLES * CYCLE)) == {}


def test_a_bootstrap_is_an_owner_like_any_other() -> None:
    boot = peer_id("boot")
    home = [member(peer, reduces=False) for peer in ids(2)]
    alone = replace(roster_of(1), members=(member(boot, trains=False), *home))
    assert play(OwnerLog(clock=CLOCK), alone, {boot}, range(10 * CYCLE)) == {}, "nobody else owns anything"
    two = replace(alone, members=(member(boot, trains=False), member(ids(1)[0]), *home[1:]))
    log = OwnerLog(clock=CLOCK)
    losers = play(log, two, {boot}, range(4 * CYCLE))
    assert {peer for found in losers.values() for peer in found} == {boot}
    assert log.lost() == {(boot, 1)}
