"""Two volunteers and a bootstrap peer, the most common run: one of the three dies, or the bootstrap peer and another.

`make faults` runs these on real processes and prints the figures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tests.swarm.process_swarm import FRAGMENTS, ClosedRound, ProcessSwarm

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(400)]

ROUND_SECONDS = 1.0
SETTLED_CYCLES = 6
"""Cycles after which volunteers vote: they count after four cycles in entries; then a roster must say so."""
NEXT_ENTRY_SECONDS = 3 * ROUND_SECONDS + 5.0
EVERY_SPAN_CYCLES = 3
STALL_SECONDS = 45.0


def three(swarm: ProcessSwarm, *, crash: str | None = None, dial_out_only: Sequence[str] = ()) -> None:
    """Start a bootstrap peer and two volunteers, and wait until all three vote."""
    swarm.start("boot", founds=True, trains=False, crash=crash)
    for name in ("ann", "bob"):
        swarm.start(name, dial_out_only=name in dial_out_only, crash=crash)
    swarm.wait_for_whole_round(["ann", "bob"], 2, time.time())
    swarm.sleep_rounds(SETTLED_CYCLES * FRAGMENTS)
    swarm.wait_for_whole_round(["ann", "bob"], 2, time.time())


def with_entries(swarm: ProcessSwarm, names: Sequence[str], since: float) -> list[ClosedRound]:
    """Return the rounds that started after a moment and got entries, as closed by any of these peers."""
    closed = (each for name in names for each in swarm.peers[name].rounds(since))
    return sorted((each for each in closed if each.num_entries and swarm.begin(each.round) >= since), key=round_of)


def round_of(closed: ClosedRound) -> int:
    return closed.round


def seconds_to_entry(swarm: ProcessSwarm, names: Sequence[str], since: float, patience: float) -> float:
    swarm.wait("an entry", lambda: with_entries(swarm, names, since), patience + 15.0)
    return swarm.begin(with_entries(swarm, names, since)[0].round + 1) - since


def seconds_to_every_span(swarm: ProcessSwarm, names: Sequence[str], since: float, patience: float) -> float:
    """Return the time until each fragment had a round in which all of its spans got entries."""

    def first_whole() -> list[float]:
        whole = [closed for closed in with_entries(swarm, names, since) if closed.num_entries == closed.num_spans]
        firsts = {closed.round % FRAGMENTS: swarm.begin(closed.round + 1) for closed in reversed(whole)}
        return list(firsts.values())

    swarm.wait("entries for every span", lambda: len(first_whole()) == FRAGMENTS, patience + 15.0)
    return max(first_whole()) - since


@pytest.mark.parametrize("victim", ["boot", "ann", "bob"])
def test_two_volunteers_and_a_bootstrap_peer_continue_after_one_of_them_died(victim: str) -> None:
    with ProcessSwarm(round_seconds=ROUND_SECONDS) as swarm:
        three(swarm)
        since = swarm.kill(victim)
        left = [name for name in ("ann", "bob") if name != victim]
        entry = seconds_to_entry(swarm, left, since, NEXT_ENTRY_SECONDS)
        spans = seconds_to_every_span(swarm, left, since, EVERY_SPAN_CYCLES * FRAGMENTS * ROUND_SECONDS)
        print(f"{victim} killed: next entry after {entry:.1f} s, every span after {spans / ROUND_SECONDS:.1f} rounds")
        assert entry <= NEXT_ENTRY_SECONDS, swarm.story()
        assert spans <= (EVERY_SPAN_CYCLES * FRAGMENTS + 1) * ROUND_SECONDS, swarm.story()


@pytest.mark.parametrize("victim", ["ann", "bob"])
def test_one_volunteer_continues_alone_after_the_bootstrap_peer_and_the_other_died(victim: str) -> None:
    with ProcessSwarm(round_seconds=ROUND_SECONDS) as swarm:
        three(swarm)
        swarm.kill("boot")
        since = swarm.kill(victim)
        left = "bob" if victim == "ann" else "ann"
        entry = seconds_to_entry(swarm, [left], since, STALL_SECONDS)
        print(f"bootstrap and {victim} killed: {left} goes on after {entry:.1f} s")
        assert entry <= STALL_SECONDS, swarm.story()


def test_a_run_continues_after_the_bootstrap_peer_died_before_any_volunteer_votes() -> None:
    with ProcessSwarm(round_seconds=ROUND_SECONDS) as swarm:
        swarm.start("boot", founds=True, trains=False)
        swarm.start("ann")
        swarm.start("bob")
        swarm.wait_for_whole_round(["ann", "bob"], 2, time.time())
        since = swarm.kill("boot")
        entry = seconds_to_entry(swarm, ["ann", "bob"], since, STALL_SECONDS)
        print(f"bootstrap killed in the first cycles: next entry after {entry:.1f} s")
        assert entry <= STALL_SECONDS, swarm.story()
