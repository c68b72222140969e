"""Whole swarms in virtual time: founded, joined, left, killed, asleep, split and healed."""

from __future__ import annotations

import random

import pytest
from fake_run import MINUTE, ROUND_SECONDS
from founded_swarms import founded, goes_on, is_dialable, recovers
from made import change
from swarm_driver import Swarm

from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.wire.entry import included_places

pytestmark = pytest.mark.story

CASES = [(1, "all"), (1, "none"), (2, "all"), (2, "one"), (2, "none"), (3, "all"), (3, "none"), (4, "one")]


def num_degraded(swarm: Swarm, name: str = "p0") -> int:
    """The number of rosters of a peer's chain without a majority."""
    return swarm.machines[name].rules_engine.book.num_degraded()


@pytest.mark.parametrize(("num_peers", "who"), [*CASES, (8, "all")])
def test_a_run_is_founded_by_a_bootstrap_and_joined_one_by_one(num_peers: int, who: str) -> None:
    goes_on(founded(num_peers, who))


def voting(swarm: Swarm) -> Swarm:
    """Run a swarm until all trainers count, and as many as may reduce do so."""
    swarm.run(10 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert all(member.counts for member in swarm.machines["p0"].roster.members if member.trains)
    return swarm


@pytest.mark.parametrize(("num_peers", "who"), [(1, "none"), (2, "one"), (3, "all")])
def test_a_run_is_founded_by_a_peer_that_trains(num_peers: int, who: str) -> None:
    goes_on(founded(num_peers, who, bootstrap=False))


@pytest.mark.parametrize(("num_peers", "who"), [(2, "all"), (3, "one"), (3, "none")])
def test_after_a_declared_leaving_the_others_continue_at_once(num_peers: int, who: str) -> None:
    swarm = founded(num_peers, who)
    swarm.leave("p1")
    swarm.run(5.0)
    swarm.kill("p1")
    swarm.run_until(swarm.all_members, MINUTE)
    goes_on(swarm)
    assert num_degraded(swarm, "p0") == 0
    swarm.start("p1")
    recovers(swarm, 3 * MINUTE)


@pytest.mark.parametrize(("num_peers", "who"), [(3, "all"), (3, "none"), (4, "one")])
def test_a_dead_member_is_dropped_and_comes_back(num_peers: int, who: str) -> None:
    swarm = founded(num_peers, who)
    swarm.kill("p1")
    swarm.run_until(swarm.all_members, MINUTE)
    assert num_degraded(swarm, "p0") == 0
    goes_on(swarm)
    swarm.start("p1")
    recovers(swarm, 3 * MINUTE)


def test_of_two_without_a_bootstrap_the_survivor_continues_alone_after_a_stall() -> None:
    swarm = founded(2, "one", bootstrap=False)
    swarm.run(8 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert len(swarm.machines["p0"].roster.voters) == 2
    swarm.kill("p0")
    swarm.run_until(lambda: swarm.members("p1") == {"p1"}, 2 * MINUTE)
    assert swarm.machines["p1"].roster.degraded
    goes_on(swarm, "p1")
    swarm.start("p0")
    recovers(swarm, 5 * MINUTE)


@pytest.mark.parametrize(("num_peers", "who"), [(1, "all"), (2, "one"), (2, "none"), (3, "all"), (3, "none")])
def test_a_swarm_that_slept_through_a_weekend_continues_under_the_same_roster(num_peers: int, who: str) -> None:
    swarm = founded(num_peers, who)
    for name in swarm.machines:
        swarm.pause(name)
    swarm.break_links()
    swarm.run(60 * 60 * MINUTE)
    for name in swarm.random.sample(list(swarm.machines), len(swarm.machines)):
        swarm.resume(name)
        swarm.run(swarm.random.uniform(0.0, 20.0))
    recovers(swarm, 3 * MINUTE)
    assert num_degraded(swarm, "p0") == 0


@pytest.mark.parametrize(
    ("num_peers", "who", "polite"),
    [(1, "none", True), (2, "all", False), (2, "none", True), (3, "all", True), (3, "one", False)],
)
def test_a_swarm_that_was_switched_off_comes_back(num_peers: int, who: str, polite: bool) -> None:
    swarm = founded(num_peers, who)
    swarm.run(30.0)
    for machine in swarm.running():
        if polite:
            swarm.leave(machine.name)
            swarm.run(1.0)
    for name in swarm.machines:
        swarm.kill(name)
    swarm.run(60 * 60 * MINUTE)
    for name in swarm.random.sample(list(swarm.machines), len(swarm.machines)):
        swarm.start(name)
        swarm.run(swarm.random.uniform(0.0, 20.0))
    recovers(swarm, 12 * MINUTE if polite else 5 * MINUTE)


@pytest.mark.parametrize(("num_peers", "who"), [(1, "none"), (2, "one"), (3, "all")])
def test_after_roster_1_the_bootstrap_is_not_needed(num_peers: int, who: str) -> None:
    swarm = Swarm(seed=3)
    swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}", dialable=is_dialable(who, place))
    swarm.run_until(lambda: swarm.machines["boot"].roster.k == 1, MINUTE, step=0.05)
    swarm.kill("boot")
    recovers(swarm, 12 * MINUTE)


@pytest.mark.parametrize("who", ["all", "none"])
def test_when_half_are_gone_at_once_the_rest_certify_a_degraded_roster(who: str) -> None:
    swarm = voting(founded(4, who))
    for name in ("p2", "p3"):
        swarm.kill(name)
    seconds = swarm.run_until(swarm.all_members, 4 * MINUTE)
    assert seconds > 2 * len(swarm.rules.num_spans) * ROUND_SECONDS
    assert num_degraded(swarm) == 1
    goes_on(swarm)


def test_a_short_split_never_forks_and_the_majority_continues() -> None:
    swarm = voting(founded(3))
    swarm.partition(["p0", "boot"], ["p1", "p2"])
    goes_on(swarm, "p1")
    swarm.run_until(lambda: swarm.members("p1") == {"p1", "p2"}, MINUTE)
    height = swarm.height("p0")
    swarm.heal()
    recovers(swarm, 2 * MINUTE)
    assert swarm.height("p0") > height
    assert num_degraded(swarm, "p0") == 0


def test_after_a_long_split_all_peers_follow_one_branch() -> None:
    swarm = voting(founded(4))
    swarm.partition(["p0", "p1", "boot"], ["p2", "p3"])
    swarm.run(8 * MINUTE)
    assert swarm.members("p0") - {"boot"} == {"p0", "p1"}
    assert swarm.members("p2") == {"p2", "p3"}
    assert not swarm.agreed()
    swarm.heal()
    recovers(swarm, 5 * MINUTE)
    assert any("branch" in machine.topics() for machine in swarm.running())


def test_a_lone_member_whose_branch_is_junior_adopts_the_other() -> None:
    swarm = founded(3)
    swarm.partition(["p0", "boot"], ["p1", "p2"])
    swarm.run(12 * MINUTE)
    swarm.heal()
    recovers(swarm, 5 * MINUTE)


def test_a_peer_that_lost_its_disk_joins_as_a_newcomer_before_it_votes() -> None:
    swarm = founded(3)
    swarm.kill("p1")
    machine = swarm.start("p1", keep_disk=False)
    assert not machine.rules_engine.ready
    recovers(swarm, 3 * MINUTE)


def test_failed_memory_is_found_and_fetched_again() -> None:
    swarm = founded(3)
    machine = swarm.machines["p2"]
    span = next(iter(machine.vectors))
    head, state = machine.vectors[span]
    machine.contributes = False
    swarm.known_bytes.clear()
    machine.vectors[span] = (head, bytes(len(state)))
    swarm.check_bytes = False
    swarm.run_until(swarm.agreed, 9 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert "content" in machine.topics()


def test_all_peers_get_the_outcome_of_each_round() -> None:
    swarm = founded(2)
    swarm.run(2 * MINUTE)
    closed = swarm.machines["p0"].closed[-4]
    assert closed.num_entries == closed.num_spans
    assert (closed.num_ready, closed.num_members) == (2, 2)
    assert closed.num_included == 2 * closed.num_spans


def test_nothing_is_contributed_after_the_last_round() -> None:
    swarm = founded(1)
    engine = swarm.machines["p0"].rules_engine
    change(engine, last_round=engine.round)
    swarm.run(2 * ROUND_SECONDS)
    height = swarm.height("p0")
    swarm.run(MINUTE)
    assert swarm.height("p0") == height


def misfortune(swarm: Swarm, names: list[str], chance: random.Random) -> None:
    name = chance.choice(names)
    machine = swarm.machines[name]
    what = chance.choice(["kill", "kill", "pause", "split", "long split", "heal", "leave"])
    if what == "heal":
        swarm.heal()
    elif "split" in what:
        side = [other for other in names if chance.random() < 0.5]
        swarm.partition(side, [other for other in names if other not in side])
        swarm.run(chance.uniform(100.0, 400.0) if what == "long split" else 0.0)
    elif machine.engine is None or machine.paused:
        return
    elif what == "kill":
        swarm.kill(name)
    elif what == "pause":
        swarm.pause(name)
    else:
        swarm.leave(name)
        swarm.run(chance.uniform(0.0, 10.0))
        swarm.kill(name)


def wake(swarm: Swarm, name: str) -> None:
    if swarm.machines[name].engine is None:
        swarm.start(name)
    elif swarm.machines[name].paused:
        swarm.resume(name)


@pytest.mark.parametrize("seed", [1, 22, 39, 114])
def test_all_peers_agree_and_continue_once_faults_stop(seed: int) -> None:
    chance = random.Random(seed)
    num_peers = chance.choice([2, 3, 4])
    swarm = Swarm(seed=seed, loss=0.02, duplication=0.02)
    swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}", dialable=chance.random() < 0.5, offset=chance.uniform(-0.3, 0.3))
    swarm.run(MINUTE)
    names = list(swarm.machines)
    for _ in range(12):
        misfortune(swarm, names, chance)
        swarm.run(chance.uniform(0.0, 30.0))
        for name in names:
            if chance.random() < 0.5:
                wake(swarm, name)
    swarm.heal()
    swarm.loss = swarm.duplication = 0.0
    for name in names:
        wake(swarm, name)
    recovers(swarm, 12 * MINUTE)


def grid_swarm(num_peers: int, who: str = "all", group_size: int = 2, seed: int = 0) -> Swarm:
    """A swarm whose members form several rows."""
    swarm = voting(founded(num_peers, who, group_size=group_size, seed=seed))
    grid = swarm.machines["p0"].rules_engine.book.grid()
    assert grid is not None
    assert len(grid.rows) > 1
    return swarm


def included_share(swarm: Swarm, since: float) -> float:
    """Return the share of all possible contributions that the entries of the last rounds included."""
    recent = [entry for entry in swarm.entries.values() if swarm.rules.clock.begin(entry.round) >= since]
    included = sum(len(included_places(entry)) for entry in recent)
    return included / sum(member.trains for entry in recent for member in swarm.rosters[entry.roster].members)


@pytest.mark.parametrize(("num_peers", "who"), [(6, "all"), (9, "all"), (13, "two of three")])
def test_in_a_grid_every_member_is_in_every_entry_and_all_hold_the_same_bytes(num_peers: int, who: str) -> None:
    swarm = grid_swarm(num_peers, who)
    swarm.run_to_cycle_end()
    begin = swarm.now
    height = swarm.height("p1")
    swarm.run(6 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert swarm.height("p1") - height >= 6 * sum(swarm.rules.num_spans) - max(swarm.rules.num_spans)
    assert included_share(swarm, begin) > 0.99
    if num_peers > 12:
        fewest = min(len(machine.rules_engine.linked) for machine in swarm.running())
        assert fewest <= 2 * (4 + 1), "row and column, of this grid and perhaps the next"
    assert swarm.included_once()
    recovers(swarm, MINUTE)


@pytest.mark.slow
def test_a_grid_grows_from_one_row_and_shrinks_to_one() -> None:
    swarm = grid_swarm(9)
    for place in range(7):
        swarm.leave(f"p{place}")
        swarm.run(20.0)
        swarm.kill(f"p{place}")
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 3 * MINUTE)
    grid = swarm.machines["p8"].rules_engine.book.grid()
    assert grid is not None
    assert len(grid.rows) == 1
    goes_on(swarm, "p8")


@pytest.mark.parametrize("seed", range(2))
def test_in_a_grid_dead_reducers_cost_only_their_own_spans(seed: int) -> None:
    swarm = grid_swarm(9, seed=seed)
    for name in swarm.random.sample(sorted(n for n in swarm.machines if n not in ("boot", "p0")), 2):
        swarm.kill(name)
    recovers(swarm, 2 * MINUTE)
    assert all(num_degraded(swarm, machine.name) == 0 for machine in swarm.running())


def test_a_hung_peer_does_not_block_a_grid() -> None:
    swarm = grid_swarm(9)
    swarm.pause("p4")
    swarm.run(4 * ROUND_SECONDS)
    swarm.resume("p4")
    recovers(swarm, 3 * MINUTE)


@pytest.mark.parametrize(("num_peers", "group_size"), [(6, 16), (13, 2)], ids=["one row", "a grid"])
def test_a_peer_on_a_thin_line_averages_less_and_nothing_is_lost(num_peers: int, group_size: int) -> None:
    swarm = voting(founded(num_peers, "all", group_size=group_size))
    change(swarm.machines["p1"].rules_engine, share=1)
    swarm.run_to_cycle_end()
    swarm.run(2 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    begin, height = swarm.now, swarm.height("p3")
    swarm.run(9 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert swarm.height("p3") - height >= 9 * sum(swarm.rules.num_spans) - max(swarm.rules.num_spans)
    recent = [entry for entry in swarm.entries.values() if swarm.rules.clock.begin(entry.round) >= begin]
    thin = swarm.machines["p1"].peer
    for machine in swarm.running():
        shares = {member.peer: member.share for member in machine.roster.members}
        assert shares.pop(thin) == 1
        assert set(shares.values()) == {8}
    folded = {digest: fold_roster(roster, group_size) for digest, roster in swarm.rosters.items()}
    turned = [(folded[entry.roster].turned(swarm.rules.clock.cycle(entry.round)), entry.span) for entry in recent]
    averaged = sum(thin in grid.column(span) for grid, span in turned) / len(recent)
    columns = len(next(iter(folded[entry.roster] for entry in recent)).columns)
    assert averaged < 0.95 / columns, "of a column of five, where all others have eight shares"
    assert included_share(swarm, begin) > 0.99
    change(swarm.machines["p1"].rules_engine, share=8)
    recovers(swarm, MINUTE)


@pytest.mark.slow
def test_a_grid_that_loses_messages_continues() -> None:
    swarm = grid_swarm(12)
    swarm.loss = 0.1
    swarm.run(3 * MINUTE)
    swarm.loss = 0.0
    recovers(swarm, 2 * MINUTE)
