"""What the lab has found in `protocol/`, each as a small story; found by seeds, told by hand."""

from __future__ import annotations

import pytest

from p2p_diloco.lab.endings import cycles_until_it_goes_on, fragment_heights
from p2p_diloco.lab.faults import FaultKind
from p2p_diloco.lab.scenario import draw_scenario
from p2p_diloco.lab.swarm import Swarm, swarm_of
from p2p_diloco.lab.trial import play

CYCLE_SECONDS = 8.0


def one_fragment(num_peers: int) -> Swarm:
    swarm = swarm_of(num_spans=(2,), seed=1)
    swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}")
    swarm.run_until(swarm.agreed, 60.0)
    return swarm


def test_who_joins_a_run_of_one_fragment_becomes_ready_while_it_goes_on() -> None:
    """Its boundary was always a round behind, so it was never compared where both sides stood."""
    swarm = one_fragment(2)
    swarm.run(20.0)
    swarm.add("late")
    swarm.run_until(lambda: swarm.machines["late"].running.ready, 2 * CYCLE_SECONDS)
    swarm.run_until(swarm.all_members, 3 * CYCLE_SECONDS)


def test_clocks_that_differ_by_a_little_void_no_round() -> None:
    """Promises of those ahead let a lead certify before its own round began; it then went by another roster."""
    swarm = swarm_of(num_spans=(2, 2), seed=1)
    swarm.add("boot", trains=False, found=True)
    for place, offset in enumerate((-0.4, 0.4, 0.4, -0.4, 0.0)):
        swarm.add(f"p{place}", offset_seconds=offset)
    swarm.run_until(swarm.all_members, 60.0)
    swarm.run(20.0)
    for machine in swarm.running():
        machine.closed.clear()
    swarm.run(200.0)
    for machine in swarm.running():
        assert {closed.num_entries for closed in machine.closed} == {2}, machine
        assert {closed.num_included for closed in machine.closed} == {10}, machine


def test_one_roster_is_certified_in_a_cycle_whatever_the_clocks_say() -> None:
    """A ballot of the next round, proposed before that began here, was labelled with the cycle before."""
    swarm = swarm_of(num_spans=(2,), seed=3)
    swarm.add("boot", trains=False, found=True, offset_seconds=-0.4)
    for place in range(3):
        swarm.add(f"p{place}", dialable=False, offset_seconds=0.3)
    swarm.run_until(swarm.all_members, 60.0)
    k, cycle = swarm.machines["p0"].roster.k, swarm.machines["p0"].roster.cycle
    swarm.run(160.0)
    now = swarm.machines["p0"].roster
    assert now.k - k == now.cycle - cycle


def test_a_joiner_with_a_single_donor_mends_what_differs_from_it() -> None:
    """It waited for a second accuser; at home behind one helper there is none, and it never became ready."""
    swarm = swarm_of(seed=1)
    swarm.add("boot", trains=False, found=True)
    for place in range(3):
        swarm.add(f"p{place}", dialable=False)
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 60.0)
    machine = swarm.machines["p1"]
    assert swarm.flip_bit("p1", swarm.spans[0], 0, 20)
    machine.disk.keep_checkpoint(machine.vectors.states)
    swarm.kill("p1")
    swarm.run(1.0)
    swarm.start("p1")
    swarm.run_until(lambda: machine.running.ready and not swarm.inspector.differing, 60.0)
    assert "content" in machine.topics


def test_a_joiner_whose_donor_speaks_once_in_a_round_becomes_ready() -> None:
    """Its donor's signs of life came right after the entries, so the two never compared the same heads."""
    swarm = swarm_of(num_spans=(1, 1), heartbeat_seconds=8.0, seed=1)
    swarm.add("boot", trains=False, found=True)
    for place in range(3):
        swarm.add(f"p{place}", dialable=False)
    swarm.run_until(swarm.all_members, 120.0)
    swarm.run_to(swarm.rules.clock.begin(40) - 0.5)
    for place in range(3, 9):
        swarm.add(f"p{place}", dialable=False)
        swarm.run(1.0)
    swarm.run_until(lambda: all(machine.running.ready for machine in swarm.running()), 32.0)


def test_a_joiner_whose_clock_is_ahead_of_a_donor_that_speaks_before_the_turn_becomes_ready() -> None:
    """The donor's word was of one boundary and, when it came, the joiner's clock showed the next: never compared."""
    swarm = swarm_of(num_spans=(2,), heartbeat_seconds=8.0, start=-8.2, seed=1)
    swarm.add("p0", found=True)
    swarm.run_until(swarm.all_members, 60.0)
    clock = swarm.rules.clock
    swarm.run_to(clock.begin(clock.round_at(swarm.now) + 2) + 0.5 * clock.round_seconds)
    swarm.add("late", dialable=False, offset_seconds=0.4)
    swarm.run_until(lambda: swarm.machines["late"].running.ready, 2 * CYCLE_SECONDS)


@pytest.mark.parametrize("num_hidden", [1, 2, 13])
def test_when_the_last_who_could_be_dialled_is_gone_the_helper_is_the_hub_again(num_hidden: int) -> None:
    """Members behind routers saw nobody but the dead one, who alone could lead a grid: they waited for ever (2432)."""
    swarm = swarm_of(num_spans=(2, 2), group_size=2, void_cycles=2, seed=1)
    swarm.add("boot", trains=False, found=True)
    swarm.add("open")
    for place in range(num_hidden):
        swarm.add(f"p{place}", dialable=False)
    swarm.run_until(swarm.all_members, 120.0)
    swarm.run(20.0)
    swarm.kill("open")
    swarm.run_until(swarm.all_members, 40 * CYCLE_SECONDS)
    heights = fragment_heights(swarm)
    swarm.run(6 * CYCLE_SECONDS)
    assert all(now > before for now, before in zip(fragment_heights(swarm), heights, strict=True))
    assert swarm.machines["boot"].running.membership.is_hub() or num_hidden == 1
    swarm.start("open")
    swarm.run_until(swarm.all_members, 20 * CYCLE_SECONDS)
    swarm.run_until(swarm.agreed, 4 * CYCLE_SECONDS)
    assert not swarm.machines["boot"].running.membership.is_hub()


@pytest.mark.parametrize("founder_lives", [True, False])
def test_when_the_only_reducer_left_of_a_grid_lost_its_disk_members_of_dead_rows_still_hear_its_proposals(
    founder_lives: bool,
) -> None:
    """They promised it their votes and never heard what for, and the helper left it to that one to lead: for ever. Seed
    5866 again, with donors dealt spans in another order."""
    swarm = swarm_of(num_spans=(2,), group_size=2, void_cycles=3, seed=1)
    swarm.add("boot", trains=False, found=True)
    for place in range(16):
        swarm.add(f"p{place}", dialable=place < 8)
    swarm.run_until(swarm.all_members, 120.0)
    swarm.run(20.0)
    grid = swarm.machines["p0"].running.book.grid()
    assert grid is not None
    assert len(grid.rows) > 1
    left = grid.columns[0][0]
    dead = {swarm.by_peer[peer].name for peer in grid.reducers() | set(grid.rows[grid.row_of[left]])}
    forgetful = swarm.by_peer[left].name
    for name in sorted(dead if founder_lives else dead | {"boot"}):
        swarm.kill(name)
    swarm.start(forgetful, keep_disk=False)
    swarm.run_until(swarm.all_members, 60 * CYCLE_SECONDS)
    heights = fragment_heights(swarm)
    swarm.run(4 * CYCLE_SECONDS)
    assert all(now > before for now, before in zip(fragment_heights(swarm), heights, strict=True))


@pytest.mark.parametrize("place", range(8))
def test_whichever_reducer_of_a_grid_is_left_the_run_goes_on_without_its_founder(place: int) -> None:
    """The first roster below a majority kept the rows of which it heard nothing. In the grid of that roster all
    reducers were dead, and the one who had led, who could be dialled, was one too many to be a reducer: for ever."""
    swarm = swarm_of(num_spans=(2,), group_size=2, void_cycles=1, seed=1)
    swarm.add("boot", trains=False, found=True)
    for number in range(16):
        swarm.add(f"p{number}", dialable=number < 11)
    swarm.run_until(swarm.all_members, 120.0)
    grid = swarm.machines["p0"].running.book.grid()
    assert grid is not None
    reducers = [swarm.by_peer[peer].name for column in grid.columns for peer in column]
    for name in sorted(swarm.machines.keys() - {reducers[place], "p14", "p15"}):
        swarm.kill(name)
    swarm.run_until(swarm.all_members, 40 * CYCLE_SECONDS)


@pytest.mark.parametrize("seed", [280, 419, 600, 656, 760, 959, 1865, 2432, 4720, 5866, 5900, 7015, 7529])
def test_who_lags_behind_when_faults_end_catches_up(seed: int) -> None:
    """280: its donor's next entry named a roster of a branch given up since, which it asked for again and again. 419: a
    question was lost; others, asked anew over lost links, had taught it that answers take a minute; 656 likewise.
    600, 760, 959, 4720: the lab itself expected too much. 1865: its one donor spoke right before the turn of the
    round, when its own clock, a little ahead, showed the next boundary: what it heard was a cycle old. 5866: most of a
    grid died, and the living had no link to each other; all of them were at home, and the helper left it to newcomers
    that could be dialled to lead, who may not. 5900: the only one left waited for an entry that the dead had. 7015: the
    two that were ahead were shunned for a damaged span, so the two behind asked each other for the entries. 7529: a
    donor that had heads and not yet the bytes said nothing, and who had asked waited long for others."""
    assert play(draw_scenario(seed, (3, 64), frozenset(FaultKind))).invariant is None


def test_two_branches_that_both_have_grids_meet_again() -> None:
    """Each kept links with its own members only and did not know of the other, for ever (4138)."""
    swarm = swarm_of(num_spans=(2,), group_size=2, void_cycles=1, seed=4)
    swarm.add("boot", trains=False, found=True)
    names = [f"p{place}" for place in range(9)]
    for name in names:
        swarm.add(name)
    swarm.run_until(swarm.all_members, 120.0)
    swarm.run(20.0)
    here, there = names[:5], names[5:]
    swarm.partition(here, [*there, "boot"])
    swarm.run_until(lambda: all(swarm.members(name) == set(here) for name in here), 30 * CYCLE_SECONDS)
    swarm.run_until(lambda: all(swarm.members(name) == set(there) for name in there), 30 * CYCLE_SECONDS)
    assert all(len(swarm.machines[name].running.book.grid().rows) > 1 for name in ("p0", "p8"))  # type: ignore[union-attr]
    swarm.run(8 * CYCLE_SECONDS)
    swarm.heal()
    swarm.run_until(swarm.all_members, 10 * CYCLE_SECONDS)
    swarm.run_until(swarm.agreed, 4 * CYCLE_SECONDS)


def test_who_listens_behind_a_hub_gets_the_entries_of_a_lone_member_within_the_round() -> None:
    """The member saw the hub only, and the hub handed on nothing, for it does not reduce for one: a round late."""
    swarm = swarm_of(num_spans=(2,), seed=1)
    swarm.add("boot", trains=False, found=True)
    swarm.add("alone", dialable=False)
    swarm.run_until(swarm.all_members, 60.0)
    swarm.add("late", dialable=False)
    swarm.run_until(lambda: swarm.machines["late"].running.ready, 4 * CYCLE_SECONDS)
    clock = swarm.rules.clock
    swarm.run_to(clock.begin(clock.round_at(swarm.now) + 1) + 0.9 * clock.round_seconds)
    assert swarm.agreed(["alone", "late"])


def test_a_state_whose_last_holders_lost_their_disks_is_not_promised_to_go_on() -> None:
    swarm = one_fragment(2)
    swarm.run(20.0)
    for name in ("p0", "p1"):
        swarm.kill(name)
    for name in ("p0", "p1"):
        swarm.start(name, keep_disk=False)
    swarm.run(10 * CYCLE_SECONDS)
    assert cycles_until_it_goes_on(swarm) is None
    assert not any(machine.running.ready for machine in swarm.running()), "a fresh start is never the truth"
