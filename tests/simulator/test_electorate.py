"""Many identities of one laptop in an open run: how soon they are most of the electorate, and what they can do then.

Nothing here is defended. The figures are those of SECURITY.md, and a change of the rules must change them there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.membership.presence import COUNTS_AFTER_CYCLES
from p2p_diloco.protocol.wire.messages import Message, Opening, SpanVector
from p2p_diloco.protocol.wire.roster import Roster
from simulator.hostility import telling
from simulator.machine import Machine
from simulator.run import key_named, run_rules
from simulator.simulation import OPEN, Simulation, play

pytestmark = pytest.mark.story

LAPTOP = "laptop"
"""The router behind which all identities are: they can dial each other, and nobody else can dial them."""
MOST_CYCLES = 40


@dataclass(slots=True, kw_only=True)
class Takeover:
    """Progress of a laptop, in cycles since its identities arrived; None: not within the time of the scene.

    Attributes:
        arrived: the cycle in which they came; not a number of cycles since then.
        listed: all identities are members.
        blocks: half of the electorate are identities, so honest members alone certify nothing.
        majority: more than half of it are.
        electorate: voters at that time.
        off: no honest member is on the roster in force.
        back: an honest member was listed again, while the identities ran.
        vectors: spans that each identity contributed, at least and at most.
        num_bytes: bytes of these, for all identities together.
        entries_after: entries that honest members absorbed once they were off and the identities had gone.
        while_silent, first_silent: entries that the first honest member absorbed in 40 cycles in which the identities
            were silent, and after how many cycles the first of these came.
        listed_after: honest members on the roster of the first one 16 cycles after the identities were heard again.
        degraded: rosters so far that no majority certified.
    """

    arrived: int = 0
    listed: int | None = None
    blocks: int | None = None
    majority: int | None = None
    electorate: int = 0
    seconds: float = 0.0
    off: int | None = None
    back: int | None = None
    vectors: tuple[int, int] = (0, 0)
    cycles_included: tuple[int, int] = (0, 0)
    entries_after: int = -1
    while_silent: int = -1
    first_silent: int | None = None
    listed_after: int = -1
    degraded: int = 0


class Sparing:
    """Contributes one span in each of four cycles, and nothing after that; its node is sound otherwise."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.sent: dict[int, SpanId] = {}
        """The span sent in each cycle."""
        self.num_vectors = 0
        machine.lie(telling(self.change))

    def change(self, message: Message) -> Message | None:
        match message:
            case Opening():
                spans = tuple(
                    replace(offer, sends=offer.sends and self._may_send(message.round, offer.index))
                    for offer in message.spans
                )
                return replace(message, spans=spans)
            case SpanVector():
                if self.sent.get(self._cycle(message.round)) != message.span:
                    return None
                self.num_vectors += 1
                return message
            case _:
                return message

    def _may_send(self, round_index: int, index: int) -> bool:
        """Return whether a span is the one that is sent in its cycle; the first that is asked for is."""
        cycle, clock = self._cycle(round_index), self.machine.around.rules.clock
        span = SpanId(clock.fragment(round_index), index)
        if cycle not in self.sent and self._needs_more():
            self.sent[cycle] = span
        return self.sent.get(cycle) == span

    def _needs_more(self) -> bool:
        """Return whether entries of fewer than four cycles since the listing include a contribution."""
        engine = self.machine.engine
        roster = engine.book.in_force if engine is not None else None
        member = roster.member(self.machine.peer) if roster is not None else None
        if engine is None or engine.round is None or member is None or member.counts:
            return False
        clock = engine.rules.clock
        return not engine.membership.presence.has_come_to_count(member, clock.cycle(engine.round))

    def _cycle(self, round_index: int) -> int:
        return self.machine.around.rules.clock.cycle(round_index)


def claims_absent(machine: Machine, absent: frozenset[PeerId]) -> None:
    """Make an identity promise that it misses these members, forward no applications of theirs, and, as a leader, show
    none of their promises."""
    membership: Any = machine.running.membership
    balloting, declarations = membership.balloting, membership.declarations
    take, shown = balloting.take_promise, declarations.shown
    balloting.take_promise = lambda sender, promised, now: [] if sender in absent else take(sender, promised, now)
    membership.presence.absent = lambda parent, now: absent
    declarations.shown = lambda parent, now: tuple(each for each in shown(parent, now) if each.peer not in absent)


def newest(swarm: Simulation) -> Roster:
    """Return the longest line's last roster that a majority certified."""
    return max((each for each in swarm.inspector.rosters.values() if not each.degraded), key=lambda each: each.k)


async def take_over(
    swarm: Simulation,
    num: int,
    *,
    honest: int = 4,
    home: bool = False,
    silent: bool = False,
    young: bool = False,
    age: int = 0,
    leaves: int = 0,
    leaving: int = 1,
    most: int = MOST_CYCLES,
) -> Takeover:
    """Let `num` identities join honest trainers and a bootstrap peer, and collude once they are the majority.

    Args:
        honest: number of honest trainers.
        home: whether each honest trainer is behind a router of its own, so that the bootstrap peer averages.
        silent: whether they cut the honest members off, instead of claiming that they are absent.
        young: whether they arrive together with the honest trainers.
        age: the cycle in which they arrive, if all honest trainers count by then.
        leaves, leaving: after how many cycles some honest trainers are killed, and how many; 0: never.
        most: cycles in which they must become the majority.
    """
    swarm.inspector.may_drop = True  # that is the attack
    honest_names = [f"p{number}" for number in range(honest)]
    swarm.add("boot", trains=False, founds=True)
    for name in honest_names:
        swarm.add(name, place=name if home else OPEN)
    if not young:
        await swarm.until(swarm.all_settled, within=900.0)
    clock, result = swarm.rules.clock, Takeover()
    if age:
        await swarm.run_to_round(age * clock.num_fragments)
    await swarm.run_to_round((clock.cycle(swarm.round) + 1) * clock.num_fragments)
    begun, first = swarm.now, clock.cycle(swarm.round)
    result.arrived = first
    names = [f"identity{number}" for number in range(num)]
    sparing = []
    for name in names:
        sparing.append(Sparing(swarm.add(name, place=LAPTOP, start=False)))
        swarm.start(name)
    theirs = frozenset(key_named(name).peer for name in names)
    ours = frozenset(key_named(name).peer for name in honest_names)

    def since() -> int:
        return clock.cycle(swarm.round) - first

    while since() < most and result.majority is None:
        await swarm.run(0.5)
        if leaves and since() == leaves:
            for name in honest_names[:leaving]:
                swarm.kill(name)
        roster = newest(swarm)
        mine = len(roster.voters & theirs)
        if result.listed is None and theirs <= roster.peers():
            result.listed = since()
        if result.blocks is None and 2 * mine >= len(roster.voters):
            result.blocks = since()
        if 2 * mine > len(roster.voters):
            result.majority, result.electorate, result.seconds = since(), len(roster.voters), swarm.now - begun
    vectors = [each.num_vectors for each in sparing]
    result.vectors = min(vectors), max(vectors)
    cycles = [len(each.sent) for each in sparing]
    result.cycles_included = min(cycles), max(cycles)
    if result.majority is None:
        return result
    victims = ours | {swarm.machines["boot"].peer}
    if silent:
        return await fall_silent(swarm, names, [*honest_names, "boot"], result)
    for name in names:
        claims_absent(swarm.machines[name], victims)
    while since() < result.majority + MOST_CYCLES and result.off is None:
        await swarm.run(0.5)
        if not newest(swarm).peers() & ours:
            result.off = since()
    if result.off is None:
        return result
    await swarm.run(16 * swarm.rules.cycle_seconds)
    if newest(swarm).peers() & ours:
        result.back = since()
    for name in names:
        swarm.kill(name)
    heights = sum(swarm.machines[name].height() for name in honest_names if swarm.machines[name].runs)
    await swarm.run(60 * swarm.rules.cycle_seconds)
    now = sum(swarm.machines[name].height() for name in honest_names if swarm.machines[name].runs)
    result.entries_after = now - heights
    return result


async def fall_silent(swarm: Simulation, names: list[str], honest: list[str], result: Takeover) -> Takeover:
    """Let the identities be silent towards honest peers for 40 cycles, and then be heard again."""
    first, ours = swarm.machines[honest[0]], {swarm.machines[name].peer for name in honest}
    theirs = [swarm.machines[name].peer for name in names]
    await swarm.run(1.0)
    swarm.network.split(theirs, ours)
    height, begun = first.height(), swarm.now
    while swarm.now < begun + MOST_CYCLES * swarm.rules.cycle_seconds:
        await swarm.run(1.0)
        if result.first_silent is None and first.height() >= height + 4:
            result.first_silent = round((swarm.now - begun) / swarm.rules.cycle_seconds)
    result.while_silent = first.height() - height
    swarm.heal()
    await swarm.run(16 * swarm.rules.cycle_seconds)
    result.listed_after = len(first.roster.peers() & ours)
    result.degraded = sum(roster.degraded for roster in swarm.inspector.rosters.values())
    return result


RULES = run_rules(num_spans=(2, 2), heartbeat_seconds=2.0, stalled_cycles=3)


def played(num: int, seed: int = 1, **how: Any) -> Takeover:
    async def scene() -> Takeover:
        async with Simulation(seed=seed, rules=RULES, as_bytes=False) as swarm:
            return await take_over(swarm, num, **how)

    return play(scene)


# `make size` plays all of them.
@pytest.mark.parametrize("num", [pytest.param(num, marks=[pytest.mark.long] if num > 5 else []) for num in (5, 8, 16)])
def test_identities_of_one_laptop_are_most_of_the_electorate_after_six_cycles_and_can_drop_everybody(num: int) -> None:
    """Four honest members count. More than four identities outvote them, with four contributions of one span each."""
    found = played(num)
    print(f"{num} identities: {found}")
    assert found.majority is not None
    assert found.majority <= 7
    assert found.vectors[1] <= COUNTS_AFTER_CYCLES
    assert found.off is not None
    assert found.off <= 14
    assert found.back is None


def test_as_many_identities_as_honest_members_can_only_block() -> None:
    found = played(4)
    assert found.blocks is not None
    assert found.majority is None


@pytest.mark.long
@pytest.mark.parametrize(("honest", "num"), [(1, 2), (2, 3), (8, 20)])
def test_smaller_and_larger_runs_are_outvoted_within_eight_cycles(honest: int, num: int) -> None:
    found = played(num, honest=honest)
    print(f"{num} identities, {honest} honest: {found}")
    assert found.majority is not None
    assert found.majority <= 8
    assert found.off is not None


@pytest.mark.long
def test_a_majority_that_falls_silent_stops_a_run_for_a_few_cycles() -> None:
    """It goes on without a majority once it is stalled, and keeps its members when the identities are heard again."""
    found = played(5, silent=True)
    assert found.first_silent is not None
    assert found.first_silent <= 6
    assert found.listed_after == 4
