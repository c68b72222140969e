"""Whole swarms whose members are present, whatever happens to their vectors."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_run import MINUTE, ROUND_SECONDS
from founded_swarms import founded, recovers
from made import change
from stage import Stage
from swarm_driver import Swarm

from p2p_diloco.protocol.wire.entry import Entry, included_places, places_in

pytestmark = pytest.mark.story

# Counting lines makes a swarm three times as slow, and these tests cover no further lines.
SMALL = [(1, "all"), (2, "all"), (2, "one"), (3, "all"), (3, "one"), (4, "all"), (5, "half")]


def without_bootstrap(num_peers: int, who: str = "all", *, seed: int = 0, group_size: int = 16) -> Swarm:
    """A swarm whose members all vote, and all train."""
    swarm = founded(num_peers, who, bootstrap=False, seed=seed, group_size=group_size)
    swarm.run_until(lambda: all(m.roster.voters == m.roster.peers() for m in swarm.running()), 5 * MINUTE)
    return swarm


def num_members(swarm: Swarm, entry: Entry) -> int:
    return len(swarm.rosters[entry.roster].members)


def recent(swarm: Stage, since: float) -> list[Entry]:
    return [entry for entry in swarm.entries.values() if swarm.rules.clock.begin(entry.round) >= since]


def play_cycles(swarm: Swarm, num_cycles: int) -> list[Entry]:
    """Run whole cycles and return the entries of their rounds."""
    swarm.run_to_cycle_end()
    begin = swarm.now
    swarm.run(num_cycles * len(swarm.rules.num_spans) * ROUND_SECONDS)
    return recent(swarm, begin)


def assert_nothing_was_void(swarm: Swarm, entries: list[Entry]) -> None:
    """Check that every span got an entry in every round; those of the last round may still be on their way."""
    moved = Counter(entry.round for entry in entries)
    first, last = min(moved), max(moved)
    assert last - first >= 10
    for index in range(first, last):
        assert moved[index] == swarm.rules.num_spans[swarm.rules.clock.fragment(index)]


@pytest.mark.parametrize(("num_peers", "who"), SMALL)
@pytest.mark.parametrize("vector_loss", [0.3, 1.0])
def test_lost_vectors_skip_no_round(num_peers: int, who: str, vector_loss: float) -> None:
    swarm = without_bootstrap(num_peers, who)
    swarm.vector_loss = vector_loss
    entries = play_cycles(swarm, 6)
    assert_nothing_was_void(swarm, entries)
    for entry in entries:
        assert len(places_in(entry.present)) == num_peers
        assert set(included_places(entry)) <= set(places_in(entry.present))
    if vector_loss == 1.0:
        assert {len(included_places(entry)) for entry in entries} == {1}, "the reducer's own"
    assert swarm.included_once()
    assert swarm.members("p0") == {f"p{place}" for place in range(num_peers)}
    swarm.vector_loss = 0.0
    recovers(swarm, MINUTE)


@pytest.mark.parametrize("num_peers", [2, 3])
def test_if_no_peer_can_be_dialled_a_span_is_skipped_only_if_all_vectors_are_lost(num_peers: int) -> None:
    swarm = founded(num_peers, "none")
    swarm.vector_loss = 0.5
    entries = play_cycles(swarm, 6)
    assert entries
    assert {len(places_in(entry.present)) for entry in entries} == {num_peers + 1}, "the bootstrap is there too"
    swarm.vector_loss = 1.0
    swarm.run(2 * ROUND_SECONDS)
    assert play_cycles(swarm, 1) == [], "nobody's contribution came: nothing moves"
    swarm.vector_loss = 0.0
    recovers(swarm, MINUTE)
    assert not any(roster.degraded for roster in swarm.rosters.values())


def test_of_three_members_one_that_sends_and_one_that_is_present_continue_without_the_third() -> None:
    swarm = without_bootstrap(3)
    swarm.run_to_cycle_end()
    swarm.vector_loss = 1.0
    before = swarm.machines["p0"].roster.digest()
    swarm.kill("p2")
    begin = swarm.now
    swarm.run(len(swarm.rules.num_spans) * ROUND_SECONDS)
    under = [entry for entry in recent(swarm, begin) if entry.roster == before]
    assert under
    assert {(len(places_in(entry.present)), len(included_places(entry))) for entry in under} <= {(2, 1), (3, 1)}
    swarm.start("p2")
    swarm.vector_loss = 0.0
    recovers(swarm, 3 * MINUTE)


@pytest.mark.parametrize("num_peers", [2, 3, 4, 7])
def test_peers_whose_caps_allow_no_contribution_still_reduce_spans(num_peers: int) -> None:
    swarm = without_bootstrap(num_peers)
    for machine in swarm.running():
        change(machine.rules_engine, upload_bytes_per_second=1.0)
    swarm.run_to_cycle_end()
    entries = play_cycles(swarm, 6)
    assert_nothing_was_void(swarm, entries)
    assert {(len(places_in(entry.present)), len(included_places(entry))) for entry in entries} == {(num_peers, 1)}
    assert swarm.included_once()
    assert swarm.members("p0") == {f"p{place}" for place in range(num_peers)}
    for machine in swarm.running():
        change(machine.rules_engine, upload_bytes_per_second=None)
    recovers(swarm, MINUTE)


@pytest.mark.parametrize("num_peers", [6, 9, 13])
def test_in_a_grid_lost_vectors_skip_no_round(num_peers: int) -> None:
    swarm = founded(num_peers, group_size=2)
    swarm.vector_loss = 0.6
    entries = play_cycles(swarm, 6)
    assert_nothing_was_void(swarm, entries)
    assert all(len(places_in(entry.present)) == num_members(swarm, entry) for entry in entries)
    assert min(len(included_places(entry)) for entry in entries) <= num_peers // 2
    swarm.vector_loss = 0.0
    recovers(swarm, MINUTE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_peers", [2, 3, 4, 5])
def test_two_sides_of_a_split_never_both_get_entries(num_peers: int, seed: int) -> None:
    swarm = without_bootstrap(num_peers, seed=seed)
    swarm.run_to_cycle_end()
    names = [f"p{place}" for place in range(num_peers)]
    swarm.vector_loss = 0.5
    swarm.partition(names[: num_peers // 2], names[num_peers // 2 :])
    swarm.run(2 * ROUND_SECONDS)
    begin, heights = swarm.now, {name: swarm.height(name) for name in names}
    swarm.run(len(swarm.rules.num_spans) * ROUND_SECONDS)  # too short for a stall
    grown = {name for name in names if swarm.height(name) > heights[name]}
    majority = names[num_peers // 2 :] if num_peers % 2 else []
    assert grown == set(majority)
    for entry in recent(swarm, begin):
        roster = swarm.rosters[entry.roster]
        there = {swarm.by_id[roster.members[place].peer].name for place in places_in(entry.present)}
        assert there <= set(majority)
    swarm.heal()
    swarm.vector_loss = 0.0
    recovers(swarm, 3 * MINUTE)
    assert not any(roster.degraded for roster in swarm.rosters.values())


@pytest.mark.parametrize("num_peers", [2, 3])
def test_a_swarm_with_lost_openings_keeps_majorities_and_recovers(num_peers: int) -> None:
    swarm = founded(num_peers)
    swarm.loss = 0.2
    swarm.run(3 * MINUTE)
    for entry in swarm.entries.values():
        assert swarm.rosters[entry.roster].has_majority(places_in(entry.present))
    swarm.loss = 0.0
    recovers(swarm, 3 * MINUTE)


@pytest.mark.parametrize("num_peers", [2, 3, 4, 5])
def test_islands_without_a_step_border_are_present_and_the_others_continue(num_peers: int) -> None:
    swarm = without_bootstrap(num_peers)
    for place in range(1, num_peers):
        swarm.machines[f"p{place}"].contributes = False
    entries = play_cycles(swarm, 6)
    assert_nothing_was_void(swarm, entries)
    assert {len(places_in(entry.present)) for entry in entries} == {num_peers}
    assert {len(included_places(entry)) for entry in entries} == {1}
    assert swarm.members("p0") == {f"p{place}" for place in range(num_peers)}
    recovers(swarm, MINUTE)


@pytest.mark.parametrize("num_peers", [1, 2])
def test_a_bootstrap_is_present_and_its_spans_advance_with_what_arrives(num_peers: int) -> None:
    """It has no contribution of its own, so spans that it reduces are skipped only if nothing arrives at all."""
    swarm = founded(num_peers)
    entries = play_cycles(swarm, 6)
    assert_nothing_was_void(swarm, entries)
    boot = swarm.machines["boot"].peer
    for entry in entries:
        roster = swarm.rosters[entry.roster]
        place = roster.position(boot)
        assert place is not None, "while fewer than three others count"
        assert place in places_in(entry.present)
        assert place not in included_places(entry)
    swarm.vector_loss = 1.0
    moved = {entry.span for entry in play_cycles(swarm, 2)}
    assert moved, "the reducers' own"
    assert swarm.included_once()
    swarm.vector_loss = 0.0
    recovers(swarm, MINUTE)
