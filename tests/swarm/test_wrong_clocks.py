"""Wrong clocks and lies about the time, in the real node: which peers move swarm time, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial

import pytest

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.wire.entry import places_in
from p2p_diloco.protocol.wire.messages import Message, Ping, Pong
from simulator.hostility import Caller
from simulator.machine import Machine
from simulator.network import OUTBOUND_ONLY
from simulator.run import run_rules
from simulator.simulation import START_SECONDS, Simulation

pytestmark = pytest.mark.story

HOUR, DAY = 3600.0, 86_400.0
NIGHT = 8 * HOUR
RULES = run_rules(num_spans=(4, 4), stalled_cycles=8, heartbeat_seconds=2.0, round_seconds=16.0)


def simulation(seed: int) -> Simulation:
    return Simulation(seed=seed, rules=RULES, as_bytes=False)


def lies(swarm: Simulation, ahead: float, peer: PeerId, message: Message) -> Iterable[Pong]:
    """Answer a ping at once, and all else with many unsolicited pongs; an extreme value is sent as it is."""
    says = ahead if abs(ahead) > 1e12 else swarm.loop.true_seconds() + ahead
    for nonce in (message.nonce,) if isinstance(message, Ping) else range(1, 9):
        yield Pong(nonce=nonce, clock_seconds=says)


def swarm_offset(swarm: Simulation, machine: Machine) -> float:
    """Return the offset of a machine's swarm time from true time."""
    return machine.swarm_now() - swarm.loop.true_seconds()


def set_wall_forward(swarm: Simulation, machine: Machine, seconds: float) -> None:
    machine.clock.set_wall(swarm.loop.true_seconds(), machine.clock.wall_offset + seconds)


def jump(swarm: Simulation, name: str, seconds: float) -> None:
    """Set all clocks of a machine forward, so that it cannot detect it."""
    swarm.machines[name].clock.jump(swarm.loop.true_seconds(), seconds)


@pytest.mark.parametrize("said", [DAY, 1e300, -1e300], ids=["a day ahead", "1e300", "-1e300"])
async def test_eight_strangers_that_answer_pings_move_nothing_and_a_lone_founder_continues(said: float) -> None:
    async with simulation(4) as swarm, AsyncExitStack() as exits:
        founder = swarm.add("founder", founds=True)
        await swarm.run(1.0)
        for number in range(8):
            stranger = await exits.enter_async_context(Caller(swarm, f"stranger {number}"))
            stranger.answer = partial(lies, swarm, said)
            await stranger.dial(founder)
        await swarm.run(30.0)
        assert abs(swarm_offset(swarm, founder)) < 1e-6
        await swarm.grows("founder")


@pytest.mark.parametrize("ahead", [DAY, -DAY, 300.0, -300.0, 1.5e9])
async def test_a_joiner_whose_clock_is_wrong_takes_the_founders_time_and_the_founder_does_not_move(
    ahead: float,
) -> None:
    async with simulation(5) as swarm:
        founder = swarm.add("founder", founds=True)
        await swarm.run(1.0)
        joiner = swarm.add("joiner", wall_offset=ahead)
        await swarm.until(swarm.all_ready, within=180.0)
        for _ in range(30):
            await swarm.run(2.0)
            assert abs(swarm_offset(swarm, founder)) < 0.2
            assert abs(swarm_offset(swarm, joiner)) < 0.2
        await swarm.grows("joiner")
        await swarm.until(swarm.agreed, within=64.0)


async def test_one_lying_member_of_four_moves_swarm_time_no_further_than_honest_clocks_differ() -> None:
    async with simulation(6) as swarm:
        swarm.add("bootstrap", trains=False, founds=True)
        for number in range(4):
            swarm.add(f"p{number}", wall_offset=0.02 * number)
        await swarm.until(swarm.all_ready, within=180.0)
        jump(swarm, "p3", DAY)
        honest = [swarm.machines[name] for name in ("p0", "p1", "p2")]
        for _ in range(40):
            await swarm.run(1.0)
            assert all(-0.1 < swarm_offset(swarm, machine) < 0.2 for machine in honest)


@pytest.mark.parametrize("drift", [1 / 60, -1 / 60], ids=["fast", "slow"])
@pytest.mark.parametrize("num_others", [1, 3])
async def test_a_clock_that_drifts_by_a_second_a_minute_costs_its_owner_no_round(drift: float, num_others: int) -> None:
    rules = run_rules(num_spans=(4,), stalled_cycles=8, round_seconds=4.0)
    async with Simulation(seed=8, rules=rules, as_bytes=False) as swarm:
        swarm.add("bootstrap", trains=False, founds=True)
        for number in range(num_others):
            swarm.add(f"p{number}")
        drifting = swarm.add("drifting", drift=drift)
        await swarm.until(swarm.all_ready, within=180.0)
        await swarm.run(60.0)
        first = swarm.round
        await swarm.run(240.0)
        entries = [entry for entry in swarm.inspector.entries.values() if first <= entry.round < swarm.round]
        rosters = swarm.inspector.rosters
        places = [rosters[entry.roster].position(drifting.peer) for entry in entries]
        num_in = sum(place in places_in(entry.included) for place, entry in zip(places, entries, strict=True))
        assert num_in >= 0.9 * len(entries), f"{num_in} of {len(entries)}"
        assert len(entries) >= 0.9 * 4 * (swarm.round - first)


@pytest.mark.parametrize("who_errs", ["first", "second"])
@pytest.mark.parametrize("how", ["ahead", "behind"])
async def test_neither_of_two_peers_sees_time_step_back_when_their_clocks_diverge(who_errs: str, how: str) -> None:
    async with simulation(7) as swarm:
        first = swarm.add("first", founds=True)
        second = swarm.add("second")
        await swarm.until(swarm.all_ready, within=180.0)
        if how == "ahead":
            jump(swarm, who_errs, 20.0)
        else:
            swarm.pause(who_errs)
            await swarm.run(20.0)
            swarm.go_on(who_errs)
        last = [-math.inf, -math.inf]
        for _ in range(400):
            await swarm.run(0.25)
            now = [first.swarm_now(), second.swarm_now()]
            assert all(before < after for before, after in zip(last, now, strict=True))
            last = now
        assert abs(last[0] - last[1]) < 0.2, "their times meet nevertheless"
        await swarm.grows("first")


# -- one time line, whatever wall clocks show


async def begin(
    swarm: Simulation,
    num_peers: int,
    *,
    founder_ahead: float = 0.0,
    has_bootstrap: bool = False,
    counts_sleep: bool = False,
) -> None:
    """Run a swarm with entries for two minutes; its first peer founds it, and trains or is a bootstrap peer."""
    first = swarm.add("p0", founds=True, trains=not has_bootstrap, wall_offset=founder_ahead, counts_sleep=counts_sleep)
    await swarm.run(1.0)
    for number in range(1, num_peers):
        swarm.add(f"p{number}", counts_sleep=counts_sleep)
    await swarm.until(swarm.all_ready, within=300.0)
    await swarm.until(lambda: first.height() >= 8, within=300.0)
    await swarm.run(max(125.0 - (swarm.loop.true_seconds() - START_SECONDS), 5.0))


async def restart(swarm: Simulation, set_forward: dict[str, float]) -> None:
    """Kill machines, set their wall clocks forward by the given seconds, and restart them."""
    for name in set_forward:
        swarm.kill(name)
    await swarm.run(0.1)
    for name, seconds in set_forward.items():
        set_wall_forward(swarm, swarm.machines[name], seconds)
        swarm.start(name)


async def goes_on(swarm: Simulation, *, since: float | None = None) -> None:
    """Check that the next entry comes within two cycles of the event, which is now, and that soon all are ready.

    Args:
        since: time of the event, if it was not now.
    """
    since = swarm.now if since is None else since
    machines = [machine for machine in swarm.machines.values() if machine.trains]  # a bootstrap may be superfluous
    heights = [machine.height() for machine in machines]

    def grew(entries: int) -> list[bool]:
        return [machine.height() >= height + entries for machine, height in zip(machines, heights, strict=True)]

    cycle_seconds = swarm.rules.clock.num_fragments * swarm.rules.clock.round_seconds
    await swarm.until(lambda: any(grew(1)), within=2 * cycle_seconds - (swarm.now - since))
    await swarm.until(lambda: all(grew(8)) and swarm.all_ready(), within=4 * cycle_seconds)
    offsets = [swarm_offset(swarm, machine) for machine in swarm.machines.values()]
    assert max(offsets) - min(offsets) < 0.3


SIZES = pytest.mark.parametrize(
    ("num_peers", "has_bootstrap"),
    [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True), (4, True)],
    ids=["1", "2", "3", "4", "bootstrap and 1", "bootstrap and 2", "bootstrap and 3"],
)
"""Number of peers including the first, and whether the first is a bootstrap peer and the others volunteers."""


@SIZES
@pytest.mark.parametrize("ahead", [600.0, DAY])
async def test_a_founder_ahead_that_restarts_with_a_corrected_clock_keeps_the_runs_time(
    num_peers: int, has_bootstrap: bool, ahead: float
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap, founder_ahead=ahead)
        await restart(swarm, {"p0": -ahead})
        await goes_on(swarm)
        assert swarm_offset(swarm, swarm.machines["p0"]) > ahead - 2 * swarm.rules.clock.round_seconds


@SIZES
@pytest.mark.parametrize("ahead", [600.0, DAY])
async def test_a_founder_ahead_whose_wall_clock_is_corrected_while_it_runs_keeps_the_runs_time(
    num_peers: int, has_bootstrap: bool, ahead: float
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap, founder_ahead=ahead)
        set_wall_forward(swarm, swarm.machines["p0"], -ahead)
        await goes_on(swarm)
        assert abs(swarm_offset(swarm, swarm.machines["p0"]) - ahead) < 0.2


@SIZES
async def test_a_wall_clock_set_while_a_peer_ran_is_known_at_its_next_start(
    num_peers: int, has_bootstrap: bool
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap, founder_ahead=DAY)
        set_wall_forward(swarm, swarm.machines["p0"], -DAY)
        await swarm.run(30.0)
        await restart(swarm, dict.fromkeys(swarm.machines, 0.0))
        await goes_on(swarm)
        assert abs(swarm_offset(swarm, swarm.machines["p0"]) - DAY) < 0.2


@SIZES
@pytest.mark.parametrize("by", [600.0, -600.0])
async def test_one_of_many_that_restarts_with_a_wrong_wall_clock_moves_nobody(
    num_peers: int, has_bootstrap: bool, by: float
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap)
        await restart(swarm, {"p0": by})
        await goes_on(swarm)
        if num_peers > 1:
            assert all(abs(swarm_offset(swarm, machine)) < 0.3 for machine in swarm.machines.values())


@SIZES
@pytest.mark.parametrize(
    "set_forward",
    [(-HOUR, -HOUR, -HOUR, -HOUR), (-HOUR, 600.0, 0.0, -30.0)],
    ids=["an hour back, all", "each by another"],
)
async def test_the_run_continues_after_all_restart_with_other_wall_clocks(
    num_peers: int, has_bootstrap: bool, set_forward: tuple[float, ...]
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap)
        before = swarm.machines["p0"].swarm_now()
        await restart(swarm, {f"p{number}": set_forward[number] for number in range(num_peers)})
        await goes_on(swarm)
        assert swarm.machines["p0"].swarm_now() > before


@SIZES
@pytest.mark.parametrize("by", [600.0, -600.0, DAY])
async def test_a_wall_clock_set_wrong_while_the_first_peer_runs_moves_nobody(
    num_peers: int, has_bootstrap: bool, by: float
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap)
        set_wall_forward(swarm, swarm.machines["p0"], by)
        await goes_on(swarm)
        assert all(abs(swarm_offset(swarm, machine)) < 0.3 for machine in swarm.machines.values())


@pytest.mark.parametrize("ahead", [600.0, DAY])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["while it runs", "and it is started again"])
async def test_a_joiner_is_accepted_after_a_lone_founder_ahead_was_corrected(ahead: float, is_restarted: bool) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, 1, founder_ahead=ahead)
        since = swarm.now
        if is_restarted:
            await restart(swarm, {"p0": -ahead})
        else:
            set_wall_forward(swarm, swarm.machines["p0"], -ahead)
        swarm.add("joiner")
        await goes_on(swarm, since=since)


@SIZES
@pytest.mark.parametrize("stands_still", ["none", "one", "all", "none, and timers do"])
async def test_the_run_continues_after_a_night_asleep(num_peers: int, has_bootstrap: bool, stands_still: str) -> None:
    """The steady clocks of none, one or all machines stop meanwhile; on Linux only timers do."""
    async with simulation(3) as swarm:
        timers = stands_still == "none, and timers do"
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap, counts_sleep=timers)
        names = list(swarm.machines)
        asleep = {"none": [], "one": names[:1]}.get(stands_still, names)
        for name in names:
            swarm.stop(name, sleeps=name in asleep)
        await swarm.run(NIGHT)
        for name in names:
            swarm.go_on(name)
        await goes_on(swarm)


# -- one machine that is away, and whose clock may be wrong when it is back


AWAY = pytest.mark.parametrize("how", ["stopped", "asleep", "asleep, and its steady clock stood still", "paused"])
"""A stopped process and a sleeping Linux keep the time; after a pause of a virtual machine all its clocks are wrong."""


async def be_away(swarm: Simulation, name: str, how: str, seconds: float) -> None:
    if how == "paused":
        swarm.pause(name)
    else:
        swarm.machines[name].counts_sleep = how == "asleep"
        swarm.stop(name, sleeps=how != "stopped")
    await swarm.run(seconds)
    swarm.go_on(name)


async def comes_back(swarm: Simulation) -> None:
    """Check that the next entry comes within two cycles of now, and that by then all have the right time."""
    trainers = [machine for machine in swarm.machines.values() if machine.trains]
    heights = {machine.name: machine.height() for machine in trainers}
    end = swarm.now + 2 * swarm.rules.clock.num_fragments * swarm.rules.clock.round_seconds
    await swarm.until(lambda: any(m.height() > heights[m.name] for m in trainers), within=end - swarm.now)
    await swarm.until(
        lambda: all(abs(swarm_offset(swarm, machine)) < 0.3 for machine in swarm.machines.values()),
        within=end - swarm.now,
    )


@AWAY
@pytest.mark.parametrize("name", ["p0", pytest.param("p1", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("num_peers", "has_bootstrap"),
    [
        pytest.param(2, False, id="2"),
        pytest.param(3, False, id="3", marks=pytest.mark.long),
        pytest.param(2, True, id="bootstrap and 1", marks=pytest.mark.long),
        pytest.param(3, True, id="bootstrap and 2"),
    ],
)
async def test_a_machine_that_was_away_for_ten_minutes_takes_the_others_time(
    num_peers: int, has_bootstrap: bool, how: str, name: str
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers, has_bootstrap=has_bootstrap)
        await be_away(swarm, name, how, 600.0)
        await comes_back(swarm)


@AWAY
@pytest.mark.parametrize("num_peers", [2, *(pytest.param(many, marks=pytest.mark.long) for many in (3, 4))])
async def test_a_laptop_that_was_away_while_the_others_continued_becomes_a_member_again(
    num_peers: int, how: str
) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers)
        await be_away(swarm, "p1", how, 600.0)
        await swarm.until(swarm.all_ready, within=300.0)
        await swarm.run(64.0)
        await goes_on(swarm)


@pytest.mark.parametrize("how", ["jumps ahead", "paused"])
@pytest.mark.parametrize("num_peers", [2, pytest.param(3, marks=pytest.mark.long)])
async def test_members_of_one_home_agree_on_the_time_without_the_bootstrap_peer(num_peers: int, how: str) -> None:
    """None is proved reachable, so none reduces; but they have links to each other."""
    async with simulation(3) as swarm:
        bootstrap = swarm.add("bootstrap", trains=False, founds=True)
        machines = [swarm.add(f"p{number}", place="home", believes_open=True) for number in range(num_peers)]
        await swarm.until(swarm.all_ready, within=300.0)
        await swarm.until(lambda: machines[0].height() >= 8, within=300.0)
        swarm.kill("bootstrap")
        await swarm.until(lambda: all(m.roster.member(bootstrap.peer) is None for m in machines), within=600.0)
        if how == "jumps ahead":
            jump(swarm, "p0", 600.0)
        else:
            await be_away(swarm, "p0", how, 600.0)
        height = max(machine.height() for machine in machines)

        def is_well() -> bool:
            offsets = [swarm_offset(swarm, machine) for machine in machines]
            return max(offsets) - min(offsets) < 0.3 and all(m.height() >= height + 8 for m in machines)

        # The one of two that is behind moves ahead after a while; the one of three that is ahead runs at half
        # speed.
        await swarm.until(is_well, within=1500.0)


async def test_a_machine_that_wakes_up_sends_no_settled_time_before_it_has_heard_the_others() -> None:
    """Its steady clock stood still. The first messages that it receives are pings."""
    async with simulation(3) as swarm:
        await begin(swarm, 3)
        machine = swarm.machines["p0"]
        async with Caller(swarm) as caller:
            await caller.dial(machine)
            assert (await caller.ask(machine.peer, Ping(nonce=1), Pong)).is_settled
            swarm.stop("p0", sleeps=True)
            await swarm.run(20.0)
            swarm.go_on("p0")
            pong = await caller.ask(machine.peer, Ping(nonce=2), Pong)
            assert pong.clock_seconds < swarm.loop.true_seconds() - 10.0
            assert not pong.is_settled


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["asleep", "asleep, and its steady clock stood still"])
@pytest.mark.parametrize("num_peers", [2, 3])
async def test_one_laptop_sleeps_a_night_while_the_others_continue(num_peers: int, how: str) -> None:
    async with simulation(3) as swarm:
        await begin(swarm, num_peers)
        await be_away(swarm, "p1", how, NIGHT)
        await comes_back(swarm)
        await swarm.until(swarm.all_ready, within=300.0)
        await goes_on(swarm)


@pytest.mark.parametrize("num_volunteers", [1, 2])
async def test_the_run_continues_after_a_paused_bootstrap_peers_wall_clock_is_corrected(num_volunteers: int) -> None:
    async with simulation(8) as swarm:
        await begin(swarm, 1 + num_volunteers, has_bootstrap=True)
        await be_away(swarm, "p0", "paused", 600.0)
        await swarm.run(5.0)
        set_wall_forward(swarm, swarm.machines["p0"], 600.0)
        await comes_back(swarm)


async def test_a_member_that_starts_alone_an_hour_behind_the_others_logs_moves_nobody() -> None:
    """Its disk is old and its wall clock is wrong: the others' logs show that its time is impossible."""
    async with simulation(3) as swarm:
        await begin(swarm, 3)
        swarm.kill("p0")
        await swarm.run(HOUR / 4)
        others = dict.fromkeys(("p1", "p2"), -HOUR)
        for name in others:
            swarm.kill(name)
        set_wall_forward(swarm, swarm.machines["p0"], -HOUR)
        swarm.start("p0")
        await swarm.run(90.0)
        assert swarm_offset(swarm, swarm.machines["p0"]) < -600.0
        for name, by in others.items():
            set_wall_forward(swarm, swarm.machines[name], by)
            swarm.start(name)
        await swarm.until(swarm.all_ready, within=300.0)
        await goes_on(swarm)


async def test_a_lone_voter_that_starts_ahead_certifies_no_roster_of_a_future_round() -> None:
    """One of three others answers, so it listens until its patience ends, by its own clock in a voting round."""
    async with simulation(3) as swarm:
        founder = swarm.add("p0", founds=True, trains=False)
        for number in range(1, 4):
            swarm.add(f"p{number}", place=OUTBOUND_ONLY)
        await swarm.until(swarm.all_members, within=120.0)
        for name in ("p2", "p3"):
            swarm.kill(name)
        await restart(swarm, {"p0": 616.0})
        await swarm.run(60.0)
        assert abs(swarm_offset(swarm, founder)) < 0.3
        roster = founder.running.book.in_force
        assert roster is not None
        assert roster.cycle <= swarm.rules.clock.cycle(swarm.round)


async def test_two_voters_ahead_that_hear_only_the_reducer_go_back_although_a_member_without_vote_keeps_its_time() -> (
    None
):
    """It hears two voters on each side, and a newcomer on its own: that is a median, but no majority of any round."""
    async with simulation(3) as swarm:
        first = swarm.add("p0", founds=True)
        await swarm.run(1.0)
        for number in range(1, 4):
            swarm.add(f"p{number}", place=OUTBOUND_ONLY)
        await swarm.until(swarm.all_ready, within=300.0)
        await swarm.until(lambda: len(first.roster.voters) == 4, within=600.0)
        newcomer = swarm.add("newcomer", place=OUTBOUND_ONLY)
        await swarm.until(swarm.all_members, within=300.0)
        for name in ("p2", "p3"):
            jump(swarm, name, 20.0)
        assert newcomer.peer not in first.roster.voters
        await swarm.run(160.0)
        await goes_on(swarm)


async def test_one_of_four_that_restarts_next_to_a_liar_moves_nobody() -> None:
    async with simulation(3) as swarm:
        await begin(swarm, 4)
        jump(swarm, "p3", DAY)
        await swarm.run(20.0)
        await restart(swarm, {"p1": 5.0})
        honest = [swarm.machines[name] for name in ("p0", "p1", "p2")]
        for _ in range(60):
            await swarm.run(1.0)
            assert all(abs(swarm_offset(swarm, machine)) < 0.3 for machine in (honest[0], honest[2]))
        assert abs(swarm_offset(swarm, honest[1])) < 0.3
        await swarm.grows("p0")


async def test_a_member_whose_clock_jumps_only_listens_until_it_agrees_and_reports_it() -> None:
    async with simulation(3) as swarm:
        await begin(swarm, 3)
        machine = swarm.machines["p1"]
        jump(swarm, "p1", 25.0)
        await swarm.run(20.0)
        (text,) = machine.texts("clock")
        assert text.startswith("the members' clocks and this peer's are ")
        assert "only listens" in text
        assert machine.running.conditions.is_time_uncertain
        await swarm.run(60.0)
        assert machine.texts("clock")[1:] == ["the members' clocks and this peer's agree again"]
        assert not machine.running.conditions.is_time_uncertain
        await goes_on(swarm)


async def test_unreachable_members_stay_together_through_the_bootstrap_peers_clock() -> None:
    async with simulation(9) as swarm:
        bootstrap = swarm.add("bootstrap", trains=False, founds=True, wall_offset=600.0)
        for number in range(2):
            swarm.add(f"p{number}", place=OUTBOUND_ONLY)
        await swarm.until(swarm.all_ready, within=300.0)
        await swarm.grows("p0")
        await restart(swarm, {"p0": -300.0})
        await swarm.until(swarm.all_ready, within=300.0)
        await goes_on(swarm)
        assert abs(swarm_offset(swarm, bootstrap) - 600.0) < 0.3
