"""One round after the other, and the count of stalled cycles."""

from __future__ import annotations

from fake_run import CYCLE_SECONDS, ROUND_SECONDS, peer_id, run_rules, verify
from made import certify, change, child_of, founding, heartbeat, membership_of, roster_1

from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.round.exchange import Exchange, RoundDriver


def turns(name: str = "ann") -> tuple[RoundDriver, Membership]:
    rules = run_rules()
    membership = membership_of(peer_id(name), founding(), roster_1(2))
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    exchange = Exchange(rules=rules, membership=membership, chains=chains)
    return RoundDriver(rules=rules, membership=membership, chains=chains, exchange=exchange), membership


def pass_time(page: RoundDriver, begin: float, end: float, step: float = 1.0) -> None:
    now = begin
    while now < end:
        begun = page.tick(now)
        if begun is not None:
            page.turn(begun, True, now)
        now += step


def take_child(membership: Membership, now: float) -> None:
    """Take a roster that is certified now."""
    parent, clock = roster_1(2).roster, membership.rules.clock
    child = child_of(parent, parent.members, cycle=clock.cycle_at(now))
    membership.rosters.take((certify(child, sorted(parent.voters), clock.ballot_at(now)),), now)
    assert membership.book.in_force == child


def test_cycles_without_entries_count_only_while_awake() -> None:
    page, membership = turns()
    pass_time(page, 1.0, 5 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == 4  # not the first, which may not have been spent awake


def test_a_cycle_governed_by_another_roster_does_not_count_as_stalled() -> None:
    """A new member may send nothing in its first cycle; when one such cycle was enough, all went below a majority."""
    page, membership = turns()
    pass_time(page, 1.0, 3 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == 2
    take_child(membership, 3 * CYCLE_SECONDS + 1.0)
    pass_time(page, 3 * CYCLE_SECONDS + 1.0, 4 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == 0
    pass_time(page, 4 * CYCLE_SECONDS + 1.0, 5 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == 1


def test_a_strangers_cycles_do_not_count() -> None:
    page, membership = turns("stranger")
    pass_time(page, 1.0, 5 * CYCLE_SECONDS)
    assert membership.stall.cycles_without_entries == 0


def test_neither_cycles_asleep_nor_the_cycle_of_waking_count() -> None:
    page, membership = turns()
    pass_time(page, 1.0, 2 * CYCLE_SECONDS + 1.0)
    counted = membership.stall.cycles_without_entries
    pass_time(page, 50 * CYCLE_SECONDS + 1.0, 51 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == counted
    pass_time(page, 51 * CYCLE_SECONDS + 1.0, 52 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == counted + 1


def test_stalled_cycles_are_counted_after_a_clock_is_set_back() -> None:
    """A peer whose clock had been ten minutes ahead counted no stalled cycle, and followed no peer, for ten minutes."""
    page, membership = turns()
    pass_time(page, 60 * CYCLE_SECONDS + 1.0, 62 * CYCLE_SECONDS + 1.0)
    take_child(membership, 61 * CYCLE_SECONDS + 1.0)
    membership.set_back(1.0)
    counted = membership.stall.cycles_without_entries
    pass_time(page, 1.0, CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == counted, "part of that cycle was at another time"
    pass_time(page, CYCLE_SECONDS + 1.0, 2 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == counted + 1


def hear_bob(page: RoundDriver, membership: Membership, cycle: int, steps: int) -> None:
    """Run a cycle in which the other voter is heard all the time."""
    for second in range(int(CYCLE_SECONDS)):
        now = cycle * CYCLE_SECONDS + second + 1.0
        pass_time(page, now, now + 1.0)
        membership.liveness.take(heartbeat(peer_id("bob"), sequence=int(now), steps=steps), now)


def test_a_cycle_in_which_most_voters_are_present_without_a_step_is_not_stalled() -> None:
    """First steps compile for longer than a stall takes: no peer need continue without the others for that."""
    page, membership = turns()
    for cycle in range(6):
        hear_bob(page, membership, cycle, steps=0)
    assert membership.stall.cycles_without_entries == 0
    for cycle in range(6, 10):
        hear_bob(page, membership, cycle, steps=min(cycle, 8))
    assert membership.stall.cycles_without_entries == 3, "the last cycle is not over"
    hear_bob(page, membership, 10, steps=8)
    assert membership.stall.cycles_without_entries == 3, "no step in the ninth cycle"
    change(membership, progress=Progress(steps=3))
    hear_bob(page, membership, 11, steps=8)
    assert membership.stall.cycles_without_entries == 4, "this peer's own steps are steps"


def test_an_entry_resets_the_count() -> None:
    page, membership = turns()
    pass_time(page, 1.0, 4 * CYCLE_SECONDS + 1.0)
    page.entry_absorbed(8, 2)
    assert membership.stall.cycles_without_entries == 0
    pass_time(page, 4 * CYCLE_SECONDS + 1.0, 5 * CYCLE_SECONDS + 1.0)
    assert membership.stall.cycles_without_entries == 0


def test_a_round_is_closed_with_its_outcome() -> None:
    page, _ = turns()
    page.turn(0, True, 0.0)
    page.entry_absorbed(0, 2)
    closed = [action for action in page.turn(1, True, ROUND_SECONDS) if isinstance(action, RoundClosed)]
    assert [(one.round, one.num_included, one.num_members) for one in closed] == [(0, 2, 2)]
