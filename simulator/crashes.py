"""The crash matrix: every step of a round, at a peer in every role, killed or stopped exactly there.

`MATRIX` accounts for each pair of step and role: either it lists the moments of the step at which a peer in that role
fails, or it says why there is no such case. Each cell is played in all swarms that have the role.

A cell settles a swarm, lets a newcomer join (which makes every step happen), and waits until a peer in the role reaches
the step. It is killed there and started again `DOWN_ROUNDS` later, or stopped there and continued after
`FROZEN_ROUNDS`, which is longer than the others need to go on without it. The claims:

- the step was reached;
- the others go on: no span waits longer for an entry than `liveness.cycles_until_it_goes_on` allows, and no span is
  skipped that the failed peer did not average;
- the failed peer's contribution is in an entry again within `RETURN_ROUNDS` of its return (a bootstrap peer follows the
  others' roster by then and, if it is a member, is present), and all trainers are members and ready by then;
- all members hold equal bytes at the end, and no invariant was violated at any time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.node import vector_actions
from p2p_diloco.protocol.actions import Stage
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.rules import ABSENT_CYCLES
from p2p_diloco.protocol.wire.ballot import Prepare, Promised, Proposal, Vote
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import Opening, RosterReply, RowMean, SpanReply, SpanRequest, SpanVector
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.storage import checkpoint as checkpoint_module
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.run_folder import RunFolder
from simulator.cores import end_with_parent, usable_cores
from simulator.coverage import longest_gap
from simulator.failpoints import ArmedFailpoint, Call, Failpoint, Kind
from simulator.inspector import Violated
from simulator.island import SimulatedIsland
from simulator.liveness import CYCLES_TO_GO_ON, check_agreement, check_tables, cycles_until_it_goes_on
from simulator.machine import Machine
from simulator.network import OPEN, OUTBOUND_ONLY, SimulatedTransport
from simulator.run import run_rules
from simulator.scenario import BOOTSTRAP
from simulator.simulation import Simulation, play

NEWCOMER = "late"
NUM_SPANS = (2, 2)
STALLED_CYCLES = 3
"""As in a manifest."""
ROUND_SECONDS = 8.0
DOWN_ROUNDS = 4
FROZEN_ROUNDS = (CYCLES_TO_GO_ON + ABSENT_CYCLES + 1) * len(NUM_SPANS)
REACHED_WITHIN_ROUNDS = 40
"""Rounds until the step is reached: the newcomer is listed, comes to count, and then may reduce."""
RETURN_ROUNDS = 12
SETTLED_WITHIN_SECONDS = 400.0
ALMOST_OVER = 0.95
"""Share of a round after which its reducers are noted."""


class Step(enum.Enum):
    """A step of a round. `TRANSFER` is how a newcomer gets the state."""

    ROSTER = "roster"
    PROMISE = "promise"
    VOTE = "vote"
    CONTRIBUTE = "contribute"
    REDUCE = "reduce"
    FINISH = "finish"
    HAND_DOWN = "hand down"
    APPLY = "apply"
    CHECKPOINT = "checkpoint"
    TRANSFER = "transfer"


class Role(enum.Enum):
    """The part of a peer in the round in which it fails."""

    CONTRIBUTOR = "contributor"
    REDUCER = "reducer"
    OWNER = "owner"
    LEADER = "leader"
    JOINER = "joiner"
    DONOR = "donor"
    BOOTSTRAP = "bootstrap"


class Moment(enum.Enum):
    """The part of a step in which a peer fails."""

    BEFORE = "before"
    MIDDLE = "middle"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmPlan:
    """The members of a swarm before the newcomer joins: a bootstrap peer or none, and trainers."""

    name: str
    bootstrap: bool
    num_open: int
    num_hidden: int
    group_size: int = 16


TWO = SwarmPlan(name="two", bootstrap=True, num_open=1, num_hidden=1)
THREE = SwarmPlan(name="three", bootstrap=False, num_open=2, num_hidden=1)
GRID = SwarmPlan(name="grid", bootstrap=True, num_open=4, num_hidden=2, group_size=3)
"""Two rows of three, so that some reducers own nothing; eight machines with the newcomer."""
ALL = (TWO, THREE, GRID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step at a role: where a peer fails at each moment, in which swarms.

    Attributes:
        is_late: whether the newcomer has been a member before and has missed rounds; otherwise it has nothing.
    """

    moments: dict[Moment, Failpoint]
    swarms: tuple[SwarmPlan, ...] = ALL
    is_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the matrix, in one swarm."""

    step: Step
    role: Role
    kind: Kind
    moment: Moment
    swarm: SwarmPlan

    def __str__(self) -> str:
        return f"{self.role.value} {self.kind.value} {self.moment.value} {self.step.value}, {self.swarm.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The result of a cell.

    Attributes:
        failure: the claim that did not hold; None: all did.
        gap_cycles: most cycles in a row that a span went without an entry, from the failure on.
        rounds_skipped: rounds in which a span was skipped that the failed peer did not average.
        return_rounds: rounds until the failed peer took part again.
    """

    cell: Cell
    seed: int
    failure: str | None = None
    gap_cycles: int = 0
    rounds_skipped: int = 0
    return_rounds: int = 0


# -- roles


Matches = Callable[[Call], bool]


def _governing(call: Call) -> tuple[Roster, Grid] | None:
    return call.machine.running.book.governing(call.swarm.round)


def _is_trainer(call: Call) -> bool:
    return call.machine.trains and call.machine.name != NEWCOMER


def _work(call: Call) -> tuple[bool, bool]:
    """Return whether a member owns a span of this round, and whether it averages one."""
    governing, clock = _governing(call), call.swarm.rules.clock
    if governing is None:
        return False, False
    fragment, peer = clock.fragment(call.swarm.round), call.machine.peer
    num_spans = call.swarm.rules.num_spans[fragment]
    return bool(governing[1].owned(peer, fragment, num_spans)), bool(governing[1].reduced(peer, fragment, num_spans))


def _contributes(call: Call) -> bool:
    """Return whether a member averages no span of this round."""
    governing = _governing(call)
    is_member = governing is not None and call.machine.peer in governing[0].peers()
    return _is_trainer(call) and is_member and _work(call) == (False, False)


def _reduces(call: Call) -> bool:
    """Return whether a member averages a span for its row, and owns none."""
    return _is_trainer(call) and _work(call) == (False, True)


def _owns(call: Call) -> bool:
    return _is_trainer(call) and _work(call)[0]


def _joins(call: Call) -> bool:
    return call.machine.name == NEWCOMER


def _founds(call: Call) -> bool:
    return call.machine.name == BOOTSTRAP


MEMBERS: dict[Role, Matches] = {Role.CONTRIBUTOR: _contributes, Role.REDUCER: _reduces, Role.OWNER: _owns}


# -- places


def _sends(kinds: type | tuple[type, ...], who: Matches, what: Matches = lambda call: True) -> Matches:
    return lambda call: isinstance(call.message, kinds) and who(call) and what(call)


def _sending(counts: Matches, *, nth: int = 1, is_after: bool = False) -> Failpoint:
    return Failpoint(owner=SimulatedTransport, name="post", counts=counts, nth=nth, is_after=is_after)


def _around(counts: Matches) -> dict[Moment, Failpoint]:
    """Return the moments before the first of several messages, before the second, and after the last."""
    return {
        Moment.BEFORE: _sending(counts),
        Moment.MIDDLE: _sending(counts, nth=2),
        Moment.AFTER: _sending(counts, is_after=True),
    }


def _is_known(call: Call, roster: Roster) -> bool:
    digest = roster.digest()
    others = (m for m in call.swarm.running(trains=False) if m is not call.machine)
    return any(digest in machine.running.book for machine in others)


def _keeps_roster(who: Matches, is_known: bool) -> Callable[[bool], Failpoint]:
    """Return the places before and after a machine writes a roster that others have, or that it has just certified."""

    def counts(call: Call) -> bool:
        return who(call) and _is_known(call, call.arguments[0].roster) == is_known

    return lambda is_after: Failpoint(owner=RunFolder, name="keep_roster", counts=counts, is_after=is_after)


def _rosters(who: Matches) -> dict[Moment, Failpoint]:
    place = _keeps_roster(who, True)
    return {Moment.BEFORE: place(False), Moment.AFTER: place(True)}


def _chains() -> dict[Moment, Failpoint]:
    """Return: before and after a member sends the newcomer the rosters so far."""
    sends = _sends(RosterReply, _is_trainer, _is_for_newcomer)
    return {Moment.BEFORE: _sending(sends), Moment.AFTER: _sending(sends, is_after=True)}


def _certificates() -> dict[Moment, Failpoint]:
    """Return: before a leader writes the roster that it has certified, with it sent to one peer, and to all."""

    def is_new(call: Call) -> bool:
        assert isinstance(call.message, RosterReply)
        return bool(call.message.rosters) and not _is_known(call, call.message.rosters[-1].roster)

    sends = _sends(RosterReply, _is_trainer, is_new)
    return {
        Moment.BEFORE: _keeps_roster(_is_trainer, False)(False),
        Moment.MIDDLE: _sending(sends, nth=2),
        Moment.AFTER: _sending(sends, is_after=True),
    }


def _answers(answer: type, who: Matches) -> dict[Moment, Failpoint]:
    """Return: before a promise or vote is on disk, on disk and not sent, and sent."""

    def is_new(call: Call) -> bool:
        has_voted = any(
            bond.voted is not None and bond.voted.ballot >= bond.promised for bond in call.arguments[0].bonds
        )
        return who(call) and has_voted == (answer is Vote)

    return {
        Moment.BEFORE: Failpoint(owner=RunFolder, name="keep_ballots", counts=is_new),
        Moment.MIDDLE: _sending(_sends(answer, who)),
        Moment.AFTER: _sending(_sends(answer, who), is_after=True),
    }


def _contributions(who: Matches) -> dict[Moment, Failpoint]:
    sends = _sends((Opening, SpanVector), who)
    return {
        Moment.BEFORE: Failpoint(owner=Exchange, name="contribute", counts=who),
        Moment.MIDDLE: _sending(sends, nth=2),
        Moment.AFTER: _sending(sends, is_after=True),
    }


def _means(who: Matches, *stages: Stage) -> dict[Moment, Failpoint]:
    """Return: with the parts collected, and with the mean computed but not used."""

    def counts(call: Call) -> bool:
        return call.arguments[0].stage in stages and who(call)

    return {
        Moment.BEFORE: Failpoint(owner=vector_actions, name="reduce_parts", counts=counts),
        Moment.AFTER: Failpoint(owner=Exchange, name="span_reduced", counts=counts),
    }


def _row_means(who: Matches) -> dict[Moment, Failpoint]:
    sends = _sends(RowMean, who)
    return {**_means(who, Stage.ROW), Moment.MIDDLE: _sending(sends), Moment.AFTER: _sending(sends, is_after=True)}


def _is_present(call: Call) -> bool:
    assert isinstance(call.message, Entry)
    return call.message.round == call.swarm.round


def _is_for_newcomer(call: Call) -> bool:
    return bool(call.arguments[0] == call.swarm.machines[NEWCOMER].peer)


def _is_old_for_newcomer(call: Call) -> bool:
    return _is_for_newcomer(call) and not _is_present(call)


def _entries(who: Matches) -> dict[Moment, Failpoint]:
    """Return: before an entry is queued for the disk, with it queued but not applied, and applied."""
    return {
        Moment.BEFORE: Failpoint(owner=Archive, name="keep_entry", counts=who),
        Moment.MIDDLE: Failpoint(owner=SimulatedIsland, name="apply", counts=who),
        Moment.AFTER: Failpoint(owner=SimulatedIsland, name="absorb", counts=who, is_after=True),
    }


def _checkpoints(who: Matches) -> dict[Moment, Failpoint]:
    """Return: before anything is written, with half of the draft written, and written."""
    return {
        Moment.BEFORE: Failpoint(owner=Archive, name="save", counts=who),
        Moment.MIDDLE: Failpoint(owner=checkpoint_module, name="write_tensors", counts=who, is_torn=True),
        Moment.AFTER: Failpoint(owner=Archive, name="save", counts=who, is_after=True),
    }


def _transfers() -> dict[Moment, Failpoint]:
    """Return: before a newcomer's first request, before it takes its second span, and after it has taken one."""
    return {
        Moment.BEFORE: _sending(_sends(SpanRequest, _joins)),
        Moment.MIDDLE: Failpoint(owner=SimulatedIsland, name="take", counts=_joins, nth=2),
        Moment.AFTER: Failpoint(owner=SimulatedIsland, name="take", counts=_joins, is_after=True),
    }


_BY_MEMBERS = "a {} does this as any member does: see contributor and owner"
_NO_VOTE = "a newcomer has no vote until it counts; then it is a contributor"
_NO_WORK = "a newcomer averages nothing for eight cycles; then it is an owner or a reducer"
_NO_REDUCER = "a contributor averages nothing in this round: see reducer and owner"
_OF_OWNER = "only the owner of a span does this"
_ONE_ROW = "a bootstrap peer averages only in a swarm of one row, where this and finish are one step"
_NO_FETCH = "a member holds the state; one that has missed entries fetches them as a joiner does"

MATRIX: dict[tuple[Step, Role], Case | str] = {
    **{(Step.ROSTER, role): Case(moments=_rosters(who)) for role, who in MEMBERS.items()},
    (Step.ROSTER, Role.LEADER): Case(moments=_certificates()),
    (Step.ROSTER, Role.JOINER): Case(moments=_rosters(_joins)),
    (Step.ROSTER, Role.DONOR): Case(moments=_chains()),
    (Step.ROSTER, Role.BOOTSTRAP): Case(moments=_rosters(_founds)),
    **{(Step.PROMISE, role): Case(moments=_answers(Promised, who)) for role, who in MEMBERS.items()},
    (Step.PROMISE, Role.LEADER): Case(moments=_around(_sends(Prepare, _is_trainer))),
    (Step.PROMISE, Role.JOINER): _NO_VOTE,
    (Step.PROMISE, Role.DONOR): _BY_MEMBERS.format("donor"),
    (Step.PROMISE, Role.BOOTSTRAP): Case(moments=_answers(Promised, _founds), swarms=(TWO,)),
    **{(Step.VOTE, role): Case(moments=_answers(Vote, who)) for role, who in MEMBERS.items()},
    (Step.VOTE, Role.LEADER): Case(moments=_around(_sends(Proposal, _is_trainer))),
    (Step.VOTE, Role.JOINER): _NO_VOTE,
    (Step.VOTE, Role.DONOR): _BY_MEMBERS.format("donor"),
    (Step.VOTE, Role.BOOTSTRAP): Case(moments=_answers(Vote, _founds), swarms=(TWO,)),
    **{(Step.CONTRIBUTE, role): Case(moments=_contributions(who)) for role, who in MEMBERS.items()},
    (Step.CONTRIBUTE, Role.LEADER): _BY_MEMBERS.format("leader"),
    (Step.CONTRIBUTE, Role.JOINER): Case(moments=_contributions(_joins)),
    (Step.CONTRIBUTE, Role.DONOR): _BY_MEMBERS.format("donor"),
    (Step.CONTRIBUTE, Role.BOOTSTRAP): Case(moments=_around(_sends(Opening, _founds)), swarms=(TWO,)),
    (Step.REDUCE, Role.CONTRIBUTOR): _NO_REDUCER,
    (Step.REDUCE, Role.REDUCER): Case(moments=_row_means(_reduces)),
    (Step.REDUCE, Role.OWNER): Case(moments=_means(_owns, Stage.ROW), swarms=(GRID,)),
    (Step.REDUCE, Role.LEADER): _BY_MEMBERS.format("leader"),
    (Step.REDUCE, Role.JOINER): _NO_WORK,
    (Step.REDUCE, Role.DONOR): _BY_MEMBERS.format("donor"),
    (Step.REDUCE, Role.BOOTSTRAP): _ONE_ROW,
    (Step.FINISH, Role.CONTRIBUTOR): _OF_OWNER,
    (Step.FINISH, Role.REDUCER): _OF_OWNER,
    (Step.FINISH, Role.OWNER): Case(moments=_means(_owns, Stage.WHOLE, Stage.FINISH)),
    (Step.FINISH, Role.LEADER): _OF_OWNER,
    (Step.FINISH, Role.JOINER): _NO_WORK,
    (Step.FINISH, Role.DONOR): _OF_OWNER,
    (Step.FINISH, Role.BOOTSTRAP): Case(moments=_means(_founds, Stage.WHOLE), swarms=(TWO,)),
    (Step.HAND_DOWN, Role.CONTRIBUTOR): _NO_REDUCER,
    (Step.HAND_DOWN, Role.REDUCER): Case(moments=_around(_sends(Entry, _reduces, _is_present))),
    (Step.HAND_DOWN, Role.OWNER): Case(moments=_around(_sends(Entry, _owns, _is_present))),
    (Step.HAND_DOWN, Role.LEADER): _BY_MEMBERS.format("leader"),
    (Step.HAND_DOWN, Role.JOINER): _NO_WORK,
    (Step.HAND_DOWN, Role.DONOR): Case(moments=_around(_sends(Entry, _is_trainer, _is_old_for_newcomer)), is_late=True),
    (Step.HAND_DOWN, Role.BOOTSTRAP): Case(moments=_around(_sends(Entry, _founds, _is_present)), swarms=(TWO,)),
    **{(Step.APPLY, role): Case(moments=_entries(who)) for role, who in MEMBERS.items()},
    (Step.APPLY, Role.LEADER): _BY_MEMBERS.format("leader"),
    (Step.APPLY, Role.JOINER): Case(moments=_entries(_joins)),
    (Step.APPLY, Role.DONOR): _BY_MEMBERS.format("donor"),
    (Step.APPLY, Role.BOOTSTRAP): Case(moments=_entries(_founds), swarms=(TWO,)),
    **{(Step.CHECKPOINT, role): Case(moments=_checkpoints(who)) for role, who in MEMBERS.items()},
    (Step.CHECKPOINT, Role.LEADER): _BY_MEMBERS.format("leader"),
    (Step.CHECKPOINT, Role.JOINER): Case(moments=_checkpoints(_joins)),
    (Step.CHECKPOINT, Role.DONOR): _BY_MEMBERS.format("donor"),
    (Step.CHECKPOINT, Role.BOOTSTRAP): Case(moments=_checkpoints(_founds), swarms=(TWO,)),
    (Step.TRANSFER, Role.CONTRIBUTOR): _NO_FETCH,
    (Step.TRANSFER, Role.REDUCER): _NO_FETCH,
    (Step.TRANSFER, Role.OWNER): _NO_FETCH,
    (Step.TRANSFER, Role.LEADER): _NO_FETCH,
    (Step.TRANSFER, Role.JOINER): Case(moments=_transfers()),
    (Step.TRANSFER, Role.DONOR): Case(moments=_around(_sends(SpanReply, _is_trainer, _is_for_newcomer))),
    (Step.TRANSFER, Role.BOOTSTRAP): Case(moments=_around(_sends(SpanReply, _founds, _is_for_newcomer)), swarms=(TWO,)),
}
"""The moments of each step at each role, or the reason why there is no such case."""


def cells() -> Iterator[Cell]:
    """Yield all cells, step by step."""
    for (step, role), case in MATRIX.items():
        if isinstance(case, str):
            continue
        for kind in Kind:
            for moment in case.moments:
                for plan in case.swarms:
                    if _has_role(plan, role):
                        yield Cell(step=step, role=role, kind=kind, moment=moment, swarm=plan)


def _has_role(plan: SwarmPlan, role: Role) -> bool:
    """Return whether a swarm has a peer in a role; in one row, all that average a span own it."""
    if role is Role.BOOTSTRAP:
        return plan.bootstrap
    return role is not Role.REDUCER or plan is GRID


# -- playing


def play_cell(cell: Cell, seed: int) -> CellResult:
    """Play one cell; a claim that does not hold does not raise."""

    async def scene() -> CellResult:
        rules = run_rules(
            round_seconds=ROUND_SECONDS,
            num_spans=NUM_SPANS,
            stalled_cycles=STALLED_CYCLES,
            heartbeat_seconds=2.0,
            group_size=cell.swarm.group_size,
        )
        async with Simulation(seed=seed, rules=rules, as_bytes=False) as swarm:
            played = _Play(swarm, cell, seed)
            try:
                await played.play()
            except Violated as violated:
                played.failure = str(violated)
            return played.result()

    return play(scene)


def run_crashes(chosen: Sequence[Cell], seeds: Sequence[int], *, processes: int | None = None) -> list[CellResult]:
    """Play cells with each of these seeds; return the results in order.

    Args:
        processes: number of worker processes; one per usable core by default. With 1, all cells are played here.
    """
    plays = [(cell, seed) for cell in chosen for seed in seeds]
    processes = min(processes if processes is not None else usable_cores(), len(plays))
    if processes <= 1:
        return [play_cell(cell, seed) for cell, seed in plays]
    with ProcessPoolExecutor(processes, initializer=end_with_parent) as pool:
        return list(pool.map(play_cell, *zip(*plays, strict=True)))


class _Play:
    """One cell being played."""

    def __init__(self, swarm: Simulation, cell: Cell, seed: int) -> None:
        self.swarm = swarm
        self.cell = cell
        self.seed = seed
        self.failure: str | None = None
        case = MATRIX[cell.step, cell.role]
        assert isinstance(case, Case), f"{cell} is not sensible: {case}"
        self._case = case
        self._armed = ArmedFailpoint(swarm, case.moments[cell.moment], cell.kind)
        self._columns: dict[int, dict[SpanId, tuple[PeerId, ...]]] = {}
        self._gap = self._skipped = self._return = 0

    def result(self) -> CellResult:
        return CellResult(
            cell=self.cell,
            seed=self.seed,
            failure=self.failure,
            gap_cycles=self._gap,
            rounds_skipped=self._skipped,
            return_rounds=self._return,
        )

    async def play(self) -> None:
        swarm, armed = self.swarm, self._armed
        await self._settle()
        with armed.armed():
            swarm.start(NEWCOMER)
            failed, first = await self._until_failed(), swarm.round
            allowed = cycles_until_it_goes_on(swarm)
            assert allowed is not None, "others can go on without one peer"
            is_killed = self.cell.kind is Kind.KILLED
            await self._watch(first + (DOWN_ROUNDS if is_killed else FROZEN_ROUNDS))
            armed.start() if is_killed else armed.go_on()
            back = swarm.round
            await self._until_back(failed, back)
        self._gap = longest_gap(swarm, first, swarm.round - 1)
        self._skipped = sum(bool(spans) for spans in self._skipped_of_others(failed, first, swarm.round - 1).values())
        if self._gap > allowed:
            self.failure = f"a span had no entry for {self._gap} cycles; at most {allowed} are allowed"
        elif self._skipped:
            self.failure = f"spans of others were skipped in {self._skipped} rounds"
        await swarm.finish()
        holders = [m.name for m in swarm.running(trains=False) if m.trains or m.peer in m.roster.peers()]
        await swarm.until(lambda: swarm.agreed(holders), swarm.rules.cycle_seconds)
        check_agreement(swarm)
        check_tables(swarm)

    async def _until_failed(self) -> Machine:
        swarm = self.swarm
        last = swarm.round + REACHED_WITHIN_ROUNDS
        while (failed := self._armed.machine) is None:
            if swarm.round > last:
                raise Violated("claim", f"no peer reached the step within {REACHED_WITHIN_ROUNDS} rounds")
            await swarm.run(0.25)
        return failed

    async def _settle(self) -> None:
        swarm, plan = self.swarm, self.cell.swarm
        if plan.bootstrap:
            swarm.add(BOOTSTRAP, trains=False, founds=True)
        for place in range(plan.num_open + plan.num_hidden):
            founds = place == 0 and not plan.bootstrap
            swarm.add(f"p{place}", founds=founds, place=OPEN if place < plan.num_open else OUTBOUND_ONLY)
        await swarm.until(swarm.all_settled, SETTLED_WITHIN_SECONDS)
        swarm.add(NEWCOMER, start=self._case.is_late)
        if self._case.is_late:
            await swarm.until(swarm.all_ready, SETTLED_WITHIN_SECONDS)
            await swarm.run_to_round(swarm.round + 1)
            swarm.kill(NEWCOMER)
            await swarm.run_to_round(swarm.round + DOWN_ROUNDS)

    async def _watch(self, until: int) -> None:
        """Let time pass until a round has begun; note who averages the spans of each round."""
        swarm, clock = self.swarm, self.swarm.rules.clock
        while swarm.round < until:
            end = (swarm.round + ALMOST_OVER) * clock.round_seconds
            if swarm.now < end:
                await swarm.run_to(end)
            self._note_columns(swarm.round)
            await swarm.run_to_round(swarm.round + 1)

    def _note_columns(self, round_index: int) -> None:
        swarm = self.swarm
        fragment = swarm.rules.clock.fragment(round_index)
        spans = [span for span in swarm.spans if span.fragment == fragment]
        for machine in swarm.running():
            governing = machine.running.book.governing(round_index)
            if not machine.is_stopped and machine is not self._armed.machine and governing is not None:
                self._columns[round_index] = {span: governing[1].column(span) for span in spans}
                return

    async def _until_back(self, failed: Machine, back: int) -> None:
        """Wait until the failed peer takes part again, and all are members and ready."""
        swarm = self.swarm
        while not (self._takes_part(failed, back) and swarm.all_ready()):
            if swarm.round - back >= RETURN_ROUNDS:
                raise Violated("claim", f"{failed} is not back after {RETURN_ROUNDS} rounds; {swarm.describe()}")
            await self._watch(swarm.round + 1)
        self._return = swarm.round - back

    def _takes_part(self, failed: Machine, back: int) -> bool:
        if not failed.runs:
            return False
        if not failed.trains:
            others = next(machine.roster for machine in self.swarm.running())
            if failed.roster.digest() != others.digest():
                return False
            if failed.peer not in others.peers():
                return True
        for entry in self.swarm.inspector.entries.values():
            roster = self.swarm.inspector.rosters.get(entry.roster)
            if entry.round < back or roster is None:
                continue
            bitmap = entry.included if failed.trains else entry.present
            places = [place for place, member in enumerate(roster.members) if member.peer == failed.peer]
            if any(bitmap[place // 8] >> place % 8 & 1 for place in places):
                return True
        return False

    def _skipped_of_others(self, failed: Machine, first: int, until: int) -> dict[int, list[SpanId]]:
        """Return the spans without an entry that the failed peer did not average, by round."""
        got = {(entry.span, entry.round) for entry in self.swarm.inspector.entries.values()}
        return {
            index: [span for span, column in columns.items() if failed.peer not in column and (span, index) not in got]
            for index, columns in self._columns.items()
            if first <= index < until
        }
