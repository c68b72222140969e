"""Which of two lines of rosters is gone by: one vote makes no roster, and honest halves come together again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from fake_run import ALL_SPANS, MINUTE, ROUND_SECONDS, peer_id
from founded_swarms import founded, goes_on, recovers
from made import certify, child_of, heartbeat, member, membership_of, roster_1
from made import founding as founding_of
from swarm_driver import Swarm

from p2p_diloco.ids import sha256
from p2p_diloco.protocol.actions import Report
from p2p_diloco.protocol.ballot import ballot_number
from p2p_diloco.protocol.histories import has_gone_on, is_better, is_left_behind, is_sound
from p2p_diloco.protocol.messages import RosterReply
from p2p_diloco.protocol.roster import MOST_LEVELS, CertifiedRoster, Roster

CYCLE_SECONDS = 2 * ROUND_SECONDS


def self_voted(swarm: Swarm, parent: Roster, voter: str, *, level: int = MOST_LEVELS) -> CertifiedRoster:
    """Return a child of `parent` that one of its members alone has certified, as senior as it may be."""
    cycle = swarm.rules.clock.cycle(swarm.rules.clock.round_at(swarm.now))
    more = len(parent.members) * len(ALL_SPANS) * (cycle - parent.cycle)
    child = child_of(
        parent,
        [member(peer_id(voter))],
        level=level,
        epoch=parent.epoch + 1,
        cycle=cycle,
        included_total=parent.included_total + more,
    )
    return certify(child, [peer_id(voter)], ballot=ballot_number(swarm.rules.clock.round_at(swarm.now), 3))


def tell(swarm: Swarm, names: Iterable[str], lie: CertifiedRoster, liar: str) -> None:
    for name in names:
        machine = swarm.machines[name]
        word = RosterReply(rosters=(lie,))
        swarm.perform(machine, machine.rules_engine.receive(peer_id(liar), word, swarm.now))


def insist(swarm: Swarm, names: list[str], lie: CertifiedRoster, liar: str, seconds: float = MINUTE) -> None:
    """Tell some of a roster again and again, as whoever is heard at each sign of life."""
    for _ in range(int(seconds)):
        tell(swarm, names, lie, liar)
        swarm.run(1.0)


def roster_numbered(swarm: Swarm, k: int) -> Roster:
    return swarm.machines["p0"].rules_engine.book.chain()[k].roster


HONEST = ["p0", "p1", "p2"]


def test_a_degraded_roster_that_a_member_voted_for_itself_is_not_in_force_while_entries_go_on() -> None:
    swarm = founded(4)
    lie = self_voted(swarm, swarm.machines["p0"].roster, "p3")
    insist(swarm, HONEST, lie, "p3")
    goes_on(swarm)
    assert {swarm.machines[name].roster.epoch for name in HONEST} == {0}
    assert "roster-refused" in swarm.machines["p0"].topics()


def test_a_degraded_roster_that_an_ex_member_voted_for_is_not_in_force() -> None:
    swarm = founded(4)
    with_p3 = swarm.machines["p0"].roster
    assert with_p3.member(peer_id("p3")) is not None
    swarm.kill("p3")
    swarm.run_until(swarm.all_members, MINUTE)
    goes_on(swarm)
    insist(swarm, HONEST, self_voted(swarm, with_p3, "p3"), "p3")
    goes_on(swarm)
    assert {swarm.machines[name].roster.epoch for name in HONEST} == {0}
    assert all("branch" not in swarm.machines[name].topics() for name in HONEST)


@pytest.mark.parametrize("k", [1, 3])
def test_a_degraded_child_of_an_old_roster_is_not_in_force(k: int) -> None:
    swarm = founded(4)
    swarm.run(2 * MINUTE)
    old = roster_numbered(swarm, k)
    lie = self_voted(swarm, old, swarm.by_id[old.members[0].peer].name)
    insist(swarm, HONEST, lie, "p3")
    goes_on(swarm)
    assert {swarm.machines[name].roster.epoch for name in HONEST} == {0}
    assert all("branch" not in swarm.machines[name].topics() for name in HONEST)


def test_of_four_that_were_all_restarted_one_that_lies_first_takes_nobody_with_it() -> None:
    swarm = founded(4)
    swarm.run(30.0)
    for name in swarm.machines:
        swarm.kill(name)
    swarm.run(10 * MINUTE)
    lie = self_voted(swarm, swarm.machines["p3"].disk.rosters[-1].roster, "p3")
    for name in HONEST:
        swarm.start(name)
        tell(swarm, [name], lie, "p3")
    insist(swarm, HONEST, lie, "p3")
    swarm.run_until(swarm.agreed, MINUTE)
    goes_on(swarm)
    assert {swarm.machines[name].roster.epoch for name in HONEST} == {0}


@pytest.mark.parametrize("back", [1, 2])
@pytest.mark.parametrize("heard_for", [0.5, 30.0])
def test_after_a_night_of_all_a_line_that_one_member_makes_up_at_once_takes_nobody_with_it(
    back: int, heard_for: float
) -> None:
    swarm = founded(4)
    swarm.run(MINUTE)
    for name in swarm.machines:
        swarm.kill(name)
    swarm.run(10 * MINUTE)
    liar, old = peer_id("p3"), swarm.machines["p3"].disk.rosters[-1 - back].roster
    line = [self_voted(swarm, old, "p3")]
    for _ in range(swarm.rules.void_cycles + 2):
        last = line[-1].roster
        line.append(certify(child_of(last, [member(liar)]), [liar], ballot=line[-1].ballot))
    for name in HONEST:
        swarm.start(name)
    swarm.run(heard_for)
    for _ in range(30):
        for name in HONEST:
            machine = swarm.machines[name]
            word = RosterReply(rosters=tuple(line))
            swarm.perform(machine, machine.rules_engine.receive(liar, word, swarm.now))
        swarm.run(1.0)
    swarm.run_until(lambda: swarm.agreed(HONEST), 2 * MINUTE)
    goes_on(swarm)
    assert {swarm.machines[name].roster.epoch for name in HONEST} == {0}


@pytest.mark.parametrize("wakes", [False, True], ids=["restarted", "joins"])
def test_who_hears_a_liar_first_goes_by_what_the_others_go_by_in_the_end(wakes: bool) -> None:
    swarm = founded(4)
    swarm.run(MINUTE)
    if not wakes:
        swarm.kill("p0")
        swarm.run(MINUTE)
        swarm.start("p0")
    name = "p4" if wakes else "p0"
    if wakes:
        swarm.add("p4")
        chain = swarm.machines["p1"].rules_engine.book.chain()
        for certified in chain[:-2]:
            tell(swarm, [name], certified, "p3")
    lie = self_voted(swarm, swarm.machines[name].roster, "p3")
    insist(swarm, [name], lie, "p3", 30.0)
    recovers(swarm, 4 * MINUTE)
    assert swarm.machines[name].roster.epoch == 0


def test_one_of_two_that_comes_back_from_disk_follows_the_other_within_a_minute() -> None:
    swarm = founded(2)
    swarm.kill("p0")
    swarm.run_until(lambda: swarm.members("p1") == {"p1"}, 9 * MINUTE)
    goes_on(swarm, "p1")
    swarm.start("p0")
    swarm.run_until(swarm.all_members, 6 * CYCLE_SECONDS)


def test_one_of_two_that_slept_through_it_follows_the_other() -> None:
    swarm = founded(2)
    swarm.pause("p0")
    swarm.break_links()
    swarm.run_until(lambda: swarm.members("p1") == {"p1"}, 9 * MINUTE)
    goes_on(swarm, "p1")
    swarm.resume("p0")
    swarm.run_until(swarm.all_members, 8 * CYCLE_SECONDS)


def test_a_lone_member_takes_the_line_of_the_majority_though_more_is_counted_on_its_own() -> None:
    swarm = founded(3)
    swarm.partition(["p0", "boot"], ["p1", "p2"])
    swarm.machines["p1"].contributes = False
    swarm.run_until(lambda: swarm.members("p0") == {"p0"}, 9 * MINUTE)
    swarm.machines["p0"].rules_engine.membership.included_total += 200
    swarm.run(6 * MINUTE)
    alone, others = swarm.machines["p0"].roster, swarm.machines["p1"].roster
    assert (alone.epoch, others.epoch) == (1, 0)
    assert alone.included_total > others.included_total
    swarm.machines["p1"].contributes = True
    swarm.heal()
    recovers(swarm, 5 * MINUTE)
    assert {machine.roster.epoch for machine in swarm.running()} == {0}


# -- the rule


def roster(cycle: int, *, level: int = 0, epoch: int = 0) -> Roster:
    return child_of(founding_of().roster, [member(peer_id("ann"))], cycle=cycle, level=level, epoch=max(epoch, level))


@pytest.mark.parametrize(
    ("parting", "line", "now", "expected"),
    [
        (100, [101, 102, 103], 104, True),
        (100, [], 101, False),
        (100, [101, 102, 103], 111, True),
        (100, [101, 102, 103], 112, False),  # it ended, as far as is known
        (100, [500], 501, False),  # the night is somebody else's
        (100, [500, 504, 507], 507, False),
        (100, [500, 504, 507], 508, True),
        (100, [101, 140, 141, 145], 150, True),
    ],
)
def test_a_line_is_sound_when_a_majority_went_on_with_it(
    parting: int, line: list[int], now: int, expected: bool
) -> None:
    assert is_sound(roster(parting), [roster(cycle) for cycle in line], now, 8) is expected


def test_a_line_on_which_somebody_went_on_without_a_majority_is_not_sound() -> None:
    assert not is_sound(roster(100), [roster(101), roster(102, level=1), roster(103, epoch=1)], 104, 8)


def test_a_line_with_a_majority_is_better_and_a_young_one_without_must_have_gone_on_for_a_while() -> None:
    parting, night = roster(100), [roster(110 + n, level=1) for n in range(9)]
    sound, morning = [roster(cycle) for cycle in range(101, 120)], [roster(119)]
    assert is_better(parting, night, sound, 120, 8) is True
    assert is_better(parting, sound, night, 120, 8) is False
    assert is_better(parting, morning, night, 120, 8) is None, "as much as is counted on it"
    assert is_better(parting, morning, night[:3], 120, 8) is False, "a single liar begins one"
    assert is_better(parting, night, morning, 120, 8) is None
    assert is_better(parting, [roster(101)], night[:1], 120, 8) is None, "what ended long ago defends nothing"


def test_a_majority_that_went_on_from_a_parting_is_not_forgotten_because_it_slept() -> None:
    assert has_gone_on(roster(100), [roster(101)], 8)
    assert has_gone_on(roster(100), [roster(500 + n) for n in range(8)], 8)
    assert not has_gone_on(roster(100), [roster(500)], 8), "the night may be somebody else's"
    assert not has_gone_on(roster(100), [roster(101, level=1)], 8)
    assert not has_gone_on(roster(100), [], 8)


def test_whom_most_have_left_behind_is_told_by_signs_of_life() -> None:
    book = membership_of(peer_id("ann"), founding_of(), roster_1(4)).book
    mine = roster_1(4).roster
    bob, cat, dan, eve = (peer_id(name) for name in ("bob", "cat", "dan", "eve"))
    here = [heartbeat(peer, roster=mine.digest()) for peer in (bob, cat)]
    gone = [heartbeat(peer, roster=sha256(b"elsewhere")) for peer in (dan, eve, peer_id("stranger"))]
    assert is_left_behind(mine, [], book)
    assert is_left_behind(mine, gone, book)
    assert not is_left_behind(mine, [*here, *gone], book), "one of three members, and strangers say nothing"
    assert not is_left_behind(mine, here, book)


def test_a_degraded_line_by_which_most_members_of_ours_go_is_followed_at_once() -> None:
    """Whoever missed one of several in a row was not stalled again at each of them, and refused the next."""
    names = ("ann", "bob", "cat", "dan", "eve")
    mine = roster_1(5).roster
    first = certify(child_of(mine, mine.members, level=1, epoch=1), [m.peer for m in mine.members][:2])
    second = certify(child_of(first.roster, mine.members, level=1, epoch=2), [m.peer for m in mine.members][:2])
    for num_gone, wins in ((2, False), (3, True)):
        here = membership_of(peer_id("stranger"), founding_of(), roster_1(5))
        for name, certified in zip(names[:num_gone], (first, second, second), strict=False):
            here.hear(heartbeat(peer_id(name), roster=certified.roster.digest()), 20.0)
        here.take_rosters((first,), 20.0)
        assert here.book.in_force == mine, "a line is more than its first roster"
        here.take_rosters((first, second), 20.0)
        assert (here.book.in_force in (first.roster, second.roster)) is wins


def test_a_certificate_from_the_far_future_is_refused_by_a_member() -> None:
    here = membership_of(peer_id("ann"), founding_of(), roster_1(1))
    far = certify(child_of(roster_1(1).roster, [member(peer_id("ann"))]), [peer_id("ann")], ballot=1 << 60)
    (report,) = here.take_rosters((far,), 20.0)
    assert isinstance(report, Report)
    assert "rounds from now" in report.text
