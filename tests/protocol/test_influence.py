"""What one member sees of the others' influence, and whom it names for it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from made import entry_on, head_of, roster_of

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.round.influence import (
    AGAINST_CYCLES,
    CLIPPED_CYCLES,
    FORGOTTEN_CYCLES,
    Agreement,
    Influence,
)

ROSTER = roster_of(5)
A, B, C, D, E = PEERS = tuple(each.peer for each in ROSTER.members)
FOR, AGAINST, UNCLEAR = (Agreement(products, 1.0, 1.0, 10_000) for products in (0.4, -0.4, 0.02))
RATES = dict.fromkeys(PEERS, 1000.0)
EQUAL, HEAVY = (1.0,) * 5, (4.0, 1.0, 1.0, 1.0, 1.0)


def saw(influence: Influence, weights: Mapping[PeerId, tuple[float, ...]], newcomers: tuple[PeerId, ...] = ()) -> None:
    """Let an entry of each owner arrive, with these weights of the first members."""
    for owner, each in weights.items():
        entry = entry_on(head_of(), ROSTER, owner, places=range(len(each)), weights=each)
        influence.entry_absorbed(entry, owner, ROSTER, newcomers)


def said(influence: Influence, cycle: int) -> list[str]:
    """Return the names of those that are named when a cycle is over."""
    return [each.text.split()[0] for each in influence.cycle_over(cycle, PEERS, RATES)]


@pytest.mark.parametrize(
    ("weights", "is_named"),
    [
        (HEAVY, True),  # half
        (EQUAL, False),
        ((2.0, 1.0, 1.0, 1.0, 1.0), False),  # a third
        ((2.1, 1.0, 1.0, 1.0, 1.0), True),
        ((4.0, 1.0), True),
        ((2.0, 1.0), False),  # of two, half is usual
        ((4.0,), False),
    ],
)
def test_who_holds_more_than_a_third_of_the_weight_is_named_after_two_cycles(
    weights: tuple[float, ...], is_named: bool
) -> None:
    influence = Influence()
    saw(influence, {B: weights, C: weights})
    assert said(influence, 0) == []
    saw(influence, {B: weights, C: weights})
    assert said(influence, 1) == ([short_peer_id(A)] if is_named else [])
    assert len(influence.named()) == is_named
    if len(weights) > 1:
        assert influence.shares[A] == pytest.approx(weights[0] / sum(weights))


def test_who_was_late_for_a_cycle_and_then_has_the_tokens_of_several_is_not_named() -> None:
    influence = Influence()
    for cycle, weights in enumerate([EQUAL, EQUAL, HEAVY, EQUAL, EQUAL]):
        saw(influence, {B: weights, C: weights})
        assert said(influence, cycle) == []


def test_weights_that_one_owner_states_alone_name_nobody() -> None:
    influence = Influence()
    for cycle in range(4):
        saw(influence, {B: HEAVY, C: EQUAL, D: EQUAL})
        assert said(influence, cycle) == []


def test_newcomers_with_small_weights_make_nobody_heavy() -> None:
    influence, weights = Influence(), (1.0, 1.0, 1.0, 0.1, 0.1)
    for cycle in range(4):
        saw(influence, {B: weights}, newcomers=(D, E))
        assert said(influence, cycle) == []
    assert influence.shares == pytest.approx(dict.fromkeys(PEERS, 0.2))


def test_an_owner_against_whose_entries_others_speak_is_named_after_three_cycles() -> None:
    influence = Influence()
    for cycle in range(AGAINST_CYCLES):
        assert said(influence, cycle) == []
        for owner, agreement in {A: FOR, B: FOR, C: AGAINST}.items():
            influence.agreed(owner, agreement)
    assert said(influence, AGAINST_CYCLES) == [short_peer_id(C)]


@pytest.mark.parametrize(
    "agreements",
    [
        {A: FOR, C: UNCLEAR},
        {A: AGAINST, B: AGAINST, C: AGAINST},  # this peer differs from all
        {C: AGAINST},  # nothing to compare
        {A: UNCLEAR, C: AGAINST},
        {A: FOR, B: AGAINST, C: AGAINST, D: AGAINST},  # one may be the liar that is on the other side
    ],
)
def test_no_owner_is_named_if_it_may_be_this_peer_that_differs(agreements: Mapping[PeerId, Agreement]) -> None:
    influence = Influence()
    for cycle in range(3 * AGAINST_CYCLES):
        for owner, agreement in agreements.items():
            influence.agreed(owner, agreement)
        assert said(influence, cycle) == []


def test_the_cycles_against_this_peer_are_in_a_row() -> None:
    influence = Influence()
    for cycle in range(12):
        influence.agreed(A, FOR)
        influence.agreed(C, FOR if cycle % AGAINST_CYCLES == 0 else AGAINST)
        assert said(influence, cycle) == []


def test_the_cosine_is_over_all_spans_of_a_cycle_together() -> None:
    joined = Agreement(3.0, 4.0, 9.0, 50).joined(Agreement(-1.0, 5.0, 16.0, 50))
    assert joined == Agreement(2.0, 9.0, 25.0, 100)
    assert joined.cosine() == pytest.approx(2.0 / 15.0)
    assert joined.sign() == 0, "unrelated vectors of 100 elements have such cosines"
    assert Agreement(2.0, 9.0, 25.0, 1000).sign() == 1
    assert Agreement(0.0, 0.0, 1.0, 10).cosine() == 0.0


@pytest.mark.parametrize(("others", "is_named"), [(0.5, True), (1.0, True), (3.0, False)])
def test_who_is_always_clipped_by_more_than_half_is_named_unless_others_are_clipped_too(
    others: float, is_named: bool
) -> None:
    influence = Influence()
    for cycle in range(CLIPPED_CYCLES):
        assert said(influence, cycle) == []
        influence.contributed(A, 5.0, 2.0)
        for peer in (B, C):
            influence.contributed(peer, 2.0 * others, 2.0)
    assert said(influence, CLIPPED_CYCLES) == ([short_peer_id(A)] if is_named else [])


def test_nobody_is_clipped_where_the_limit_is_unknown() -> None:
    influence = Influence()
    for cycle in range(2 * CLIPPED_CYCLES):
        for peer, norm in ((A, 1e30), (B, 1.0)):
            influence.contributed(peer, norm, float("inf"))
        assert said(influence, cycle) == []


def test_a_peer_is_named_once_and_forgotten_when_it_is_no_longer_so() -> None:
    influence = Influence()
    for cycle in range(10):
        saw(influence, {B: HEAVY, C: HEAVY})
        assert len(said(influence, cycle)) == (cycle == 1)
    for cycle in range(10, 10 + 2 * FORGOTTEN_CYCLES):
        saw(influence, {B: EQUAL, C: EQUAL})
        assert said(influence, cycle) == []
    assert influence.named() == ()
