"""The invariants bite: each is broken by hand once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab_swarms import RADIAL, founded

from p2p_diloco.lab import playing
from p2p_diloco.lab.stage import Violated
from p2p_diloco.lab.swarm import Swarm
from p2p_diloco.lab.toy_run import peer_named, sign_as
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import ReduceSpan, Stage
from p2p_diloco.protocol.entry import Entry, pack_included
from p2p_diloco.protocol.roster import CertifiedRoster, vote_statement
from p2p_diloco.swarm.vector_work import Codecs, Reduced, reduce_parts


def grown() -> Swarm:
    swarm = founded(3)
    swarm.run(40.0)
    return swarm


def an_entry(swarm: Swarm) -> Entry:
    return list(swarm.inspector.entries.values())[-1]


def test_equal_chains_with_other_bytes() -> None:
    swarm = grown()
    machine, span = swarm.machines["p0"], swarm.spans[0]
    state = machine.vectors.states[span]
    other = SpanState(head=state.head, anchor_N=state.anchor_N + 1, momentum_N=state.momentum_N)
    assert swarm.inspector.shared(span, other) is other
    same = SpanState(head=state.head, anchor_N=state.anchor_N.copy(), momentum_N=state.momentum_N.copy())
    assert swarm.inspector.shared(span, same) is state
    with pytest.raises(Violated, match="I1: fragment 0 span 0: equal chain digests"):
        swarm.inspector.span_replaced(machine, span, state, other)


def test_a_span_goes_back_only_when_a_branch_was_given_up() -> None:
    swarm = grown()
    machine, span = swarm.machines["p0"], swarm.spans[0]
    now = machine.vectors.states[span]
    start = next(state for (s, _), state in swarm.inspector._truth.items() if s == span and not state.head.height)
    with pytest.raises(Violated, match="I3: fragment 0 span 0 goes back from height"):
        swarm.inspector.span_replaced(machine, span, now, start)
    swarm.inspector.branch_given_up(machine)
    swarm.inspector.span_replaced(machine, span, now, start)
    with pytest.raises(Violated, match="I3"):
        swarm.inspector.span_replaced(machine, span, now, start)


def test_entries_out_of_order_twice_or_of_a_chain_that_nobody_made() -> None:
    swarm = grown()
    machine, entry = swarm.machines["p0"], next(iter(swarm.inspector.entries.values()))
    state = machine.vectors.states[entry.span]
    with pytest.raises(Violated, match="I2"):
        swarm.inspector.entry_comes_next(machine, state, entry)
    with pytest.raises(Violated, match="I3"):
        swarm.inspector.entry_comes_next(machine, state, replace(entry, round=state.head.round + 2, height=99))
    unknown = SpanState(
        head=replace(state.head, digest=entry.roster), anchor_N=state.anchor_N, momentum_N=state.momentum_N
    )
    with pytest.raises(Violated, match="a chain that nobody made"):
        swarm.inspector.span_advanced(machine, unknown, entry, unknown)


def test_entries_that_count_too_few_too_many_or_something_else() -> None:
    swarm = grown()
    machine, entry = swarm.machines["p0"], an_entry(swarm)
    for wrong, text in (
        (replace(entry, present=pack_included({0}, 3)), "I8: .* has 1 of 3 members there"),
        (replace(entry, present=pack_included({0, 1}, 3)), "I8: .* includes members that were not there"),
        (replace(entry, parent=entry.roster), "I8: .* has p. there, which did not name its parent"),
        (replace(entry, round=entry.round + 2000), "I8: .* has p. there, which did not name its parent"),
        (replace(entry, tokens=1), "I2: .* is the second one that its owner signed"),
    ):
        with pytest.raises(Violated, match=text):
            swarm.inspector.entry_absorbed(machine, wrong)
    for books in (swarm.inspector._signed, swarm.inspector._included, swarm.inspector._sent):
        books.clear()  # type: ignore[attr-defined]
    with pytest.raises(Violated, match=r"I2: .* counts p., p., p., who sent nothing"):
        swarm.inspector.entry_absorbed(machine, replace(entry, tokens=2))


@pytest.mark.parametrize(
    ("stage", "group_size"), [(Stage.WHOLE, 16), (Stage.ROW, 2), (Stage.FINISH, 2)], ids=["all", "a row", "the rows"]
)
def test_a_plain_mean_where_a_radial_one_is_due(monkeypatch: pytest.MonkeyPatch, stage: Stage, group_size: int) -> None:
    swarm = founded(4, codecs=RADIAL, group_size=group_size)
    swarm.run(80.0)
    found = {entry.span for entry in swarm.inspector.entries.values()}
    assert found == set(swarm.spans), "those of radial spans and those of plain ones have both been redone"

    def forget_marks(order: ReduceSpan, codecs: Codecs, elements: int) -> Reduced | str:
        is_forgotten = order.stage is stage
        return reduce_parts(order, replace(codecs, radial={}) if is_forgotten else codecs, elements)

    monkeypatch.setattr(playing, "reduce_parts", forget_marks)
    with pytest.raises(Violated, match=r"I2: the entry of (fragment 0 span 1|fragment 1 span 0) .* is not the mean"):
        swarm.run(160.0)


def test_rosters_without_their_votes() -> None:
    swarm = grown()
    machine = swarm.machines["p0"]
    certified = machine.running.book.chain()[-1]
    parent = machine.running.book.parent_of(certified.roster)
    assert parent is not None

    def roster(votes: int, **changes: object) -> CertifiedRoster:
        child = replace(certified.roster, **changes)  # type: ignore[arg-type]
        statement = vote_statement(child.digest(), 7)
        voters = sorted(parent.peers())[:votes]
        return CertifiedRoster(roster=child, ballot=7, votes=tuple((p, sign_as(p, statement)) for p in voters))

    for wrong, text in (
        (roster(1, cycle=99), "I8: roster .* has 1 votes of 3"),
        (roster(3, cycle=98), "a fork"),
        (roster(0, cycle=97, level=1), "I8: .* has 0 votes"),
        (roster(3, parent=peer_named("nobody")), "a parent that nobody certified"),
        (roster(3, k=0), "a second founding"),
    ):
        with pytest.raises(Violated, match=text):
            swarm.inspector.roster_kept(machine, wrong)
    swarm.inspector.roster_kept(machine, roster(1, cycle=96, level=1))


def test_a_round_that_is_held_open() -> None:
    swarm = grown()
    machine = swarm.machines["p0"]
    swarm.now += 20.0
    with pytest.raises(Violated, match="I4: in round"):
        swarm.inspector.ticked(machine)


def test_a_span_unsettled_after_the_deadline() -> None:
    swarm = grown()
    clock = swarm.rules.clock
    current = clock.round_at(swarm.now)
    swarm.run_to(clock.reduce_by(current + 1) + 0.5)
    machine = next(m for m in swarm.running() if (c := m.running.exchange.collection) is not None and c.reduced)
    collection = machine.running.exchange.collection
    assert collection is not None
    collection.settled.clear()
    with pytest.raises(Violated, match="unsettled in round"):
        swarm.inspector.ticked(machine)
