"""Peers at different tips agree again: two children of one tip, a restart of all, lost entries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import MINUTE, ROUND_SECONDS, Machine, absorbed_bytes, peer_id, sign_as
from founded_swarms import founded, recovers
from made import SPAN, take_entry
from swarm_driver import Swarm

from p2p_diloco.protocol.round.chain import wins_tie
from p2p_diloco.protocol.wire.entry import Entry, next_head


def other_child(swarm: Swarm, last: Entry, *, wins: bool) -> Entry:
    """Return another entry of the owner for the last entry's parent, which wins over it or does not."""
    _, grid = swarm.machines["p0"].rules_engine.book.folded(last.roster, last.round)
    owner = grid.owner(last.span)
    assert owner is not None
    parent = replace(swarm.machines["p0"].vectors[last.span][0], digest=last.parent, height=last.height - 1)
    for number in range(64):
        entry = replace(last, payload=b"other %d" % number)
        entry = replace(entry, signature=sign_as(owner, entry.statement()))
        if wins_tie(next_head(parent, entry), next_head(parent, last)) == wins:
            return entry
    raise AssertionError("of many entries one wins and one loses")


def split(swarm: Swarm, *, wins: bool) -> tuple[Machine, Machine]:
    """Put p1 on another child of the parent of the others' tip."""
    p0, p1 = swarm.machines["p0"], swarm.machines["p1"]

    def can_go_back() -> bool:
        tip = p0.vectors[SPAN][0].digest
        return swarm.agreed() and all(
            SPAN in machine.disk.checkpoint and machine.disk.rebuilt_before(SPAN, tip) is not None
            for machine in swarm.running()
        )

    swarm.run_until(can_go_back, 2 * MINUTE, step=0.1)
    swarm.takes_checkpoints = False
    tip = p0.vectors[SPAN][0]
    parent, state = p1.disk.rebuilt_before(SPAN, tip.digest) or (tip, b"")
    last = p1.disk.entries[SPAN][parent.digest]
    entry = other_child(swarm, last, wins=wins)
    p1.disk.entries[SPAN][parent.digest] = entry
    p1.rules_engine.chains.set_head(SPAN, next_head(parent, entry))
    swarm.place(p1, SPAN, next_head(parent, entry), absorbed_bytes(state, entry))
    for machine in swarm.running():
        machine.reports.clear()
    return p0, p1


def said(machine: Machine) -> str:
    return "; ".join(report.text for _, report in machine.reports if report.topic in ("adoption", "tips"))


def grows(swarm: Swarm) -> None:
    """Wait until the run continues. A contribution in two entries is expected, since this test causes it."""
    height = swarm.height("p0")
    swarm.run_until(lambda: swarm.agreed() and swarm.height("p0") >= height + 10, 2 * MINUTE)


def is_one_tip(swarm: Swarm) -> bool:
    return len({machine.vectors[SPAN] for machine in swarm.running()}) == 1


@pytest.mark.parametrize("wins", [False, True])
def test_of_two_peers_on_two_children_one_goes_back_from_disk_and_follows_the_other(wins: bool) -> None:
    swarm = founded(2, bootstrap=False)
    p0, p1 = split(swarm, wins=wins)
    swarm.run_until(lambda: is_one_tip(swarm), 4 * len(swarm.rules.num_spans) * ROUND_SECONDS, step=0.1)
    mover, other = (p0, p1) if wins else (p1, p0)
    assert "has two children" in said(mover)
    assert "has two children" not in said(other)
    assert "fetching" not in said(mover)
    grows(swarm)


def test_of_two_peers_the_one_whose_disk_cannot_go_back_fetches_the_span() -> None:
    swarm = founded(2, bootstrap=False)
    p0, p1 = split(swarm, wins=False)
    p1.disk.checkpoint.clear()
    swarm.run_until(lambda: is_one_tip(swarm), 4 * len(swarm.rules.num_spans) * ROUND_SECONDS, step=0.1)
    assert "the only other member" in said(p1)
    assert said(p0) == ""
    grows(swarm)


@pytest.mark.parametrize("wins", [False, True])
def test_with_a_bootstrap_the_peer_on_its_own_child_moves(wins: bool) -> None:
    swarm = founded(2)
    p0, p1 = split(swarm, wins=wins)
    assert p0.roster.bootstrap is not None
    swarm.run_until(lambda: is_one_tip(swarm), 4 * len(swarm.rules.num_spans) * ROUND_SECONDS, step=0.1)
    assert said(p1)
    assert said(p0) == said(swarm.machines["boot"]) == ""
    grows(swarm)


@pytest.mark.parametrize("wins", [False, True])
def test_a_peer_alone_on_another_child_follows_the_majority_even_if_its_own_would_win(wins: bool) -> None:
    swarm = founded(4, bootstrap=False)
    _, p1 = split(swarm, wins=wins)
    swarm.run_until(lambda: is_one_tip(swarm), 4 * len(swarm.rules.num_spans) * ROUND_SECONDS, step=0.1)
    assert said(p1)
    assert not any(said(machine) for machine in swarm.running() if machine is not p1)
    grows(swarm)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_peers", [2, 4])
def test_all_killed_at_different_tips_and_started_from_their_disks_agree_again(num_peers: int, seed: int) -> None:
    swarm = founded(num_peers, seed=seed)
    swarm.run(40.0 + seed)
    for place in range(num_peers):
        swarm.kill(f"p{place}")
        swarm.run(swarm.random.uniform(0.0, 12.0))
    swarm.kill("boot")
    heights = {swarm.machines[f"p{place}"].disk.replayed()[SPAN][0].height for place in range(num_peers)}
    assert heights
    for name in swarm.random.sample(list(swarm.machines), len(swarm.machines)):
        swarm.start(name)
        swarm.run(swarm.random.uniform(0.0, 20.0))
    recovers(swarm, 5 * MINUTE)


@pytest.mark.parametrize("num_peers", [2, 4])
def test_entries_on_one_disk_lead_the_others_on_and_a_tip_without_entries_does_not(
    num_peers: int,
) -> None:
    swarm = founded(num_peers, bootstrap=False)
    p0, _ = split(swarm, wins=False)
    for machine in swarm.running():
        swarm.kill(machine.name)
    parent = min(m.disk.rebuilt_before(SPAN, p0.vectors[SPAN][0].digest) or p0.vectors[SPAN] for m in [p0])
    for place in range(1, num_peers):
        disk = swarm.machines[f"p{place}"].disk
        disk.checkpoint[SPAN] = parent
        disk.entries[SPAN].pop(parent[0].digest)
    p0.disk.checkpoint[SPAN] = p0.vectors[SPAN]
    p0.disk.entries[SPAN].clear()
    for name in swarm.machines:
        swarm.start(name)
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 5 * MINUTE)
    grows(swarm)
    is_announced = [said(machine) for machine in swarm.running() if said(machine)]
    assert is_announced, "a span goes back, or is fetched at the tip of another, only with a sentence"


def test_the_other_child_may_arrive_after_another_branch_of_rosters_was_adopted() -> None:
    swarm = founded(2, bootstrap=False)
    p0, p1 = split(swarm, wins=True)
    theirs = next(entry for entry in p1.disk.entries[SPAN].values() if bytes(entry.payload).startswith(b"other"))
    swarm.is_lost = lambda sender, target, message: isinstance(message, Entry)
    swarm.run_until(lambda: SPAN in p0.rules_engine.chains._forks, MINUTE, step=0.05)
    p0.rules_engine.repair.adopt_branch()
    swarm.perform(p0, take_entry(p0.rules_engine, p1.peer, theirs, swarm.now))
    assert "has two children" not in said(p0), "what the span was before is fetched anew"


@pytest.mark.parametrize("wins", [False, True])
def test_two_against_two_are_no_majority_and_one_pair_goes_back_from_disk(wins: bool) -> None:
    swarm = founded(4, bootstrap=False)
    _, p1 = split(swarm, wins=wins)
    p3, (head, state) = swarm.machines["p3"], p1.vectors[SPAN]
    entry = next(entry for entry in p1.disk.entries[SPAN].values() if bytes(entry.payload).startswith(b"other"))
    p3.disk.entries[SPAN][entry.parent] = entry
    p3.rules_engine.chains.set_head(SPAN, head)
    swarm.place(p3, SPAN, head, state)
    swarm.run_until(lambda: is_one_tip(swarm), 4 * len(swarm.rules.num_spans) * ROUND_SECONDS, step=0.1)
    assert not any("a majority is at" in said(machine) for machine in swarm.running())
    grows(swarm)


@pytest.mark.parametrize("can_go_back", [True, False])
def test_a_peer_that_hears_one_member_leaves_its_abandoned_child_and_follows_it(
    can_go_back: bool,
) -> None:
    """Behind a router it hears only the dialable member; its own child even won, but no other peer was on it."""
    swarm = founded(4, "one", bootstrap=False)
    p0, p1 = split(swarm, wins=True)
    if not can_go_back:
        p1.disk.checkpoint[SPAN] = p1.vectors[SPAN]
        p1.disk.entries[SPAN].clear()
    swarm.run_until(lambda: is_one_tip(swarm), 12 * len(swarm.rules.num_spans) * ROUND_SECONDS, step=0.1)
    assert "staying here" in said(p1)
    assert ("has two children" if can_go_back else "the only other member") in said(p1)
    assert "has two children" not in said(p0)
    grows(swarm)


@pytest.mark.parametrize("tips", ["xyz", "xxyy", "xyzw", "xxyyz"])
def test_members_whose_disks_cannot_go_back_agree_again_from_any_tips(tips: str) -> None:
    swarm = founded(len(tips), bootstrap=False)
    p0, _ = split(swarm, wins=True)
    parent, state = p0.disk.rebuilt_before(SPAN, p0.vectors[SPAN][0].digest) or p0.vectors[SPAN]
    last = p0.disk.entries[SPAN][parent.digest]
    _, grid = swarm.machines["p0"].rules_engine.book.folded(last.roster, last.round)
    for place, tip in enumerate(tips):
        machine = swarm.machines[f"p{place}"]
        entry = replace(last, payload=tip.encode())
        entry = replace(entry, signature=sign_as(grid.owner(SPAN) or peer_id("nobody"), entry.statement()))
        machine.rules_engine.chains.set_head(SPAN, next_head(parent, entry))
        swarm.place(machine, SPAN, next_head(parent, entry), absorbed_bytes(state, entry))
        machine.disk.checkpoint[SPAN] = machine.vectors[SPAN]
        machine.disk.entries[SPAN].clear()
    swarm.run_until(lambda: is_one_tip(swarm), 12 * len(swarm.rules.num_spans) * ROUND_SECONDS, step=0.1)
    grows(swarm)
