"""Each invariant is broken on purpose once, and the inspector reports it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from p2p_diloco.ids import ZERO_DIGEST, sha256
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.wire.entry import Entry, pack_included
from p2p_diloco.protocol.wire.roster import CertifiedRoster, vote_statement
from simulator.machine import Machine
from simulator.run import key_named, sign_as, start_states
from simulator.simulation import Simulation


@asynccontextmanager
async def grown_swarm() -> AsyncIterator[tuple[Simulation, Machine, list[str]]]:
    """Let three peers train until all vote; yield the swarm, the first peer, and the violations from then on."""
    async with Simulation(seed=1, as_bytes=False) as swarm:
        for name in ("p0", "p1", "p2"):
            swarm.add(name, founds=name == "p0")
        await swarm.until(swarm.all_members, within=120.0)
        await swarm.run(200.0)
        engine = swarm.machines["p2"].running
        engine.set_conditions(replace(engine.conditions, share=2))  # one more roster, of a parent of three voters
        await swarm.run(40.0)
        found: list[str] = []
        swarm.inspector.violated = lambda invariant, text, machine: found.append(f"{invariant}: {text}")
        yield swarm, swarm.machines["p0"], found


def expect(found: list[str], pattern: str) -> None:
    assert any(re.search(pattern, text) for text in found), f"{pattern} not in {found}"
    found.clear()


def update_of(entry: Entry) -> SpanUpdate:
    return SpanUpdate(span=entry.span, absorbed=entry.absorbed(), payload=entry.payload, own_included=False)


async def test_equal_chains_with_different_bytes_are_a_violation() -> None:
    async with grown_swarm() as (swarm, machine, found):
        span = swarm.spans[0]
        state = machine.vectors.states[span]
        other = SpanState(head=state.head, anchor_N=state.anchor_N + 1, momentum_N=state.momentum_N)
        assert swarm.inspector.shared(span, other) is other
        same = SpanState(head=state.head, anchor_N=state.anchor_N.copy(), momentum_N=state.momentum_N.copy())
        assert swarm.inspector.shared(span, same) is state
        swarm.inspector.replaced(machine, span, state, other)
        expect(found, "I1: fragment 0 span 0: equal chain digests")


async def test_a_span_may_go_back_only_once_per_branch_given_up() -> None:
    async with grown_swarm() as (swarm, machine, found):
        span = swarm.spans[0]
        now = machine.vectors.states[span]
        start = start_states(swarm.rules, machine.running.book.chain()[0].roster)[span]
        swarm.inspector.replaced(machine, span, now, start)
        expect(found, "I3: fragment 0 span 0 goes back from height")
        swarm.inspector.branch_given_up(machine)
        swarm.inspector.replaced(machine, span, now, start)
        assert found == []
        swarm.inspector.replaced(machine, span, now, start)
        expect(found, "I3")


async def test_entries_out_of_order_repeated_or_on_an_unknown_chain_are_violations() -> None:
    async with grown_swarm() as (swarm, machine, found):
        entry = next(iter(swarm.inspector.entries.values()))
        state = machine.vectors.states[entry.span]
        swarm.inspector.advancing(machine, state, update_of(entry))
        expect(found, "I2: .* absorbed an entry of round .* on top of round")
        ahead = replace(update_of(entry), absorbed=replace(entry.absorbed(), round=state.head.round + 2))
        swarm.inspector.advancing(machine, state, ahead)
        expect(found, "I3: .* absorbed an entry of round .* without its parent")
        unknown = replace(ahead, absorbed=replace(ahead.absorbed, digest=sha256(b"unknown")))
        swarm.inspector.advancing(machine, state, unknown)
        expect(found, "I3: .* absorbed an entry that no log has kept")
        head = replace(state.head, digest=ZERO_DIGEST)
        foreign = SpanState(head=head, anchor_N=state.anchor_N, momentum_N=state.momentum_N)
        swarm.inspector.advanced(machine, entry.span, foreign)
        expect(found, "I1: .* is on an unknown chain")


async def test_entries_with_wrong_members_or_a_wrong_mean_are_violations() -> None:
    async with grown_swarm() as (swarm, machine, found):
        entry = list(swarm.inspector.entries.values())[-1]
        for wrong, text in (
            (replace(entry, present=pack_included({0}, 3)), "I8: .* has 1 of 3 voters present"),
            (replace(entry, present=pack_included({0, 1}, 3)), "I8: .* includes members that were not present"),
            (replace(entry, parent=entry.roster), "I8: .* lists p. as present, which did not name its parent"),
            (replace(entry, round=entry.round + 2000), "I8: .* lists p. as present, which did not name its parent"),
            (replace(entry, tokens=1), "I2: .* is the second one that its owner signed"),
            (replace(entry, round=entry.round + 4000), "I2: .* counts p., p., p., which sent nothing"),
        ):
            swarm.inspector.entry_kept(machine, wrong)
            expect(found, text)


async def test_rosters_without_enough_votes_are_violations() -> None:
    async with grown_swarm() as (swarm, machine, found):
        certified = machine.running.book.chain()[-1]
        parent = machine.running.book.parent_of(certified.roster)
        assert parent is not None

        def roster(votes: int, **changes: object) -> CertifiedRoster:
            child = replace(certified.roster, **changes)  # type: ignore[arg-type]
            statement = vote_statement(child.digest(), certified.ballot)
            voters = sorted(parent.peers())[:votes]
            signed = tuple((peer, sign_as(peer, statement)) for peer in voters)
            return CertifiedRoster(roster=child, ballot=certified.ballot, votes=signed)

        for wrong, text in (
            (roster(1, cycle=99), "I8: roster .* has 1 votes of 3"),
            (roster(3, cycle=98), "a fork"),
            (roster(0, cycle=97, degraded=True), "I8: .* has 0 votes"),
            (roster(3, parent=sha256(b"nobody")), "a parent that was never certified"),
            (roster(3, k=0), "a second founding"),
        ):
            swarm.inspector.roster_kept(machine, wrong)
            expect(found, text)
        swarm.inspector.roster_kept(machine, roster(1, cycle=96, degraded=True))
        assert found == []


async def test_a_round_under_two_rosters_is_a_violation() -> None:
    async with grown_swarm() as (swarm, machine, found):
        book = machine.running.book
        parent = book.in_force
        child = replace(parent, k=parent.k + 1, parent=parent.digest())
        votes = ((machine.peer, b""),)
        swarm.inspector.losses[machine.peer] += 1
        swarm.inspector.roster_kept(machine, CertifiedRoster(roster=child, ballot=1, votes=votes))
        assert not any("it voted for" in text for text in found), found
        found.clear()
        swarm.inspector.losses.clear()
        swarm.inspector.roster_kept(machine, CertifiedRoster(roster=child, ballot=1, votes=votes))
        expect(found, "I8: .* is in an entry of round .* under a roster whose child it voted for in round 0")


async def test_an_open_round_and_an_unsettled_span_after_the_deadline_are_violations() -> None:
    async with grown_swarm() as (swarm, machine, found):
        clock = swarm.rules.clock
        reducing = [m for m in swarm.running() if (c := m.running.exchange.collection) is not None and c.reduced]
        machine, engine = reducing[0], reducing[0].running
        collection = engine.exchange.collection
        assert collection is not None
        swarm.inspector.ticked(machine, engine, clock.begin(engine.round + 2))
        expect(found, "I4: the engine is in round")
        collection.settled.clear()
        swarm.inspector.ticked(machine, engine, clock.reduce_by(collection.round) + 0.1)
        expect(found, "I4: .* unsettled in round")


async def test_votes_of_strangers_do_not_count() -> None:
    async with grown_swarm() as (swarm, machine, found):
        certified = machine.running.book.chain()[-1]
        child = replace(certified.roster, cycle=95)
        statement = vote_statement(child.digest(), 7)
        strangers = [key_named(f"stranger{number}").peer for number in range(5)]
        votes = tuple((peer, sign_as(peer, statement)) for peer in strangers)
        swarm.inspector.roster_kept(machine, CertifiedRoster(roster=child, ballot=7, votes=votes))
        expect(found, "has 0 votes of 3")
