"""Each member names others for the influence that it sees, and nobody wrongly."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from fake_run import peer_id
from made import entry_on, head_of, roster_of

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.round.influence import (
    AGAINST_CYCLES,
    CLIPPED_CYCLES,
    FORGOTTEN_CYCLES,
    LEFT_OUT_CYCLES,
    SHARE_CYCLES,
    Agreement,
    Influence,
)

ROSTER = roster_of(5)
A, B, C, D, E = PEERS = tuple(each.peer for each in ROSTER.members)
ME = peer_id("me")
FOR, AGAINST, UNCLEAR = (Agreement(cosine, 1, 1e-4) for cosine in (0.4, -0.4, 0.02))
RATES = dict.fromkeys(PEERS, 1000.0)
EQUAL, HEAVY = (1.0,) * 5, (4.0, 1.0, 1.0, 1.0, 1.0)


def saw(influence: Influence, weights: Mapping[PeerId, tuple[float, ...]], newcomers: tuple[PeerId, ...] = ()) -> None:
    """Let an entry of each owner arrive, with these weights of the first members."""
    for owner, each in weights.items():
        entry = entry_on(head_of(), ROSTER, owner, places=range(len(each)), weights=each)
        influence.entry_absorbed(entry, owner, ROSTER, newcomers)


def said(influence: Influence, cycle: int, members: Collection[PeerId] = PEERS) -> list[str]:
    """Return the names of those that are named when a cycle is over."""
    return [each.text.split()[0] for each in influence.cycle_over(cycle, members, RATES)]


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
def test_who_holds_more_than_a_third_of_the_weight_for_three_cycles_is_named(
    weights: tuple[float, ...], is_named: bool
) -> None:
    influence = Influence(ME)
    for cycle in range(SHARE_CYCLES):
        saw(influence, {B: weights, C: weights})
        assert said(influence, cycle) == ([short_peer_id(A)] if is_named and cycle == SHARE_CYCLES - 1 else [])
    assert len(influence.named()) == is_named
    if len(weights) > 1:
        assert influence.shares[A] == pytest.approx(weights[0] / sum(weights))


def test_who_takes_half_of_the_weight_is_named_two_cycles_later() -> None:
    influence = Influence(ME)
    for cycle, weights in enumerate([EQUAL, EQUAL, EQUAL, HEAVY, HEAVY]):
        saw(influence, {B: weights, C: weights})
        assert said(influence, cycle) == ([short_peer_id(A)] if cycle == 4 else [])


@pytest.mark.parametrize("late", range(6))
def test_who_was_late_for_a_cycle_and_then_has_the_tokens_of_several_is_not_named(late: int) -> None:
    influence = Influence(ME)
    for cycle in range(6):
        weights = HEAVY if cycle == late else EQUAL
        saw(influence, {B: weights, C: weights})
        assert said(influence, cycle) == []


def test_cycles_of_long_ago_do_not_count() -> None:
    influence = Influence(ME)
    for cycle in (0, 1, 100):
        weights = EQUAL if cycle == 100 else HEAVY
        saw(influence, {B: weights, C: weights})
        assert said(influence, cycle) == []
    assert influence.shares == pytest.approx(dict.fromkeys(PEERS, 0.2))


@pytest.mark.parametrize("accounts", [{B: HEAVY, C: EQUAL, D: EQUAL}, {B: HEAVY, C: EQUAL}, {B: HEAVY}])
def test_weights_that_one_owner_states_alone_name_nobody(accounts: Mapping[PeerId, tuple[float, ...]]) -> None:
    influence = Influence(ME)
    for cycle in range(4):
        saw(influence, accounts)
        assert said(influence, cycle) == []


@pytest.mark.parametrize("others", [{B: EQUAL, C: EQUAL}, {}])
def test_this_peer_trusts_its_own_account_of_weights(others: Mapping[PeerId, tuple[float, ...]]) -> None:
    influence = Influence(D)
    for cycle in range(SHARE_CYCLES):
        saw(influence, {D: HEAVY, **others})
        assert said(influence, cycle) == ([short_peer_id(A)] if cycle == SHARE_CYCLES - 1 else [])


def test_newcomers_with_small_weights_make_nobody_heavy() -> None:
    influence, weights = Influence(ME), (1.0, 1.0, 1.0, 0.1, 0.1)
    for cycle in range(4):
        saw(influence, {B: weights, C: weights}, newcomers=(D, E))
        assert said(influence, cycle) == []
    assert influence.shares == pytest.approx(dict.fromkeys(PEERS, 0.2))


def test_who_is_not_a_member_any_more_is_neither_named_nor_remembered() -> None:
    influence = Influence(ME)
    for cycle in range(4):
        saw(influence, {B: HEAVY, C: HEAVY})
        assert said(influence, cycle, PEERS if cycle < 3 else PEERS[1:]) == ([short_peer_id(A)] if cycle == 2 else [])
    assert influence.named() == ()


def against(influence: Influence, cycles: str) -> list[list[str]]:
    """Return whom cycles name in which the entries of C point for (+) or against (-) this peer, A's and B's for it."""
    named = []
    for cycle, sign in enumerate(cycles):
        for owner, agreement in {A: FOR, B: FOR, C: FOR if sign == "+" else AGAINST}.items():
            influence.agreed(owner, agreement)
        named.append(said(influence, cycle))
    return named


@pytest.mark.parametrize(("cycles", "is_named"), [("---", True), ("-+-+-", True), ("--+--+", True), ("-++-++-", False)])
def test_an_owner_against_whose_entries_others_speak_is_named_after_three_cycles_of_six(
    cycles: str, is_named: bool
) -> None:
    named = against(Influence(ME), cycles)
    assert [each for each in named if each] == ([[short_peer_id(C)]] if is_named else [])
    assert AGAINST_CYCLES == (3, 6)


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
    influence = Influence(ME)
    for cycle in range(10):
        for owner, agreement in agreements.items():
            influence.agreed(owner, agreement)
        assert said(influence, cycle) == []


def test_who_has_far_more_weight_at_such_an_owner_alone_is_named_with_it() -> None:
    """It may have sent this owner other numbers than the others."""
    influence = Influence(ME)
    for cycle in range(AGAINST_CYCLES[0]):
        for owner, agreement in {A: FOR, B: FOR, C: AGAINST}.items():
            influence.agreed(owner, agreement)
        saw(influence, {A: EQUAL, B: EQUAL, C: (1.0, 1.0, 1.0, 4.0, 1.0)})
        reports = influence.cycle_over(cycle, PEERS, RATES)
    (report,) = reports
    assert report.text.startswith(short_peer_id(C))
    assert report.text.endswith(f"either it lies, or {short_peer_id(D)} does, which has far more weight in them")


def test_each_entry_counts_the_same_for_the_cosine() -> None:
    joined = Agreement(0.5, 1, 1 / 50).joined(Agreement(-0.1, 1, 1 / 50))
    assert joined.cosine() == pytest.approx(0.2)
    assert joined.sign() == 0, "unrelated vectors of 50 elements have such cosines"
    assert Agreement(0.4, 2, 2 / 1000).sign() == 1
    assert Agreement(0.4, 1, 1 / 10_000).joined(Agreement(-0.5, 1, 1 / 20)).sign() == 0, "the short one is chance"
    assert Agreement().sign() == 0


@pytest.mark.parametrize(("others", "is_named"), [(0.5, True), (1.0, True), (3.0, False)])
def test_who_is_clipped_by_more_than_half_is_named_unless_others_are_clipped_too(others: float, is_named: bool) -> None:
    influence, named = Influence(ME), list[int]()
    for cycle in range(CLIPPED_CYCLES[1]):
        influence.contributed(A, 1.0 if cycle % 4 == 3 else 5.0, 2.0)  # not in every fourth cycle
        for peer in (B, C):
            influence.contributed(peer, 2.0 * others, 2.0)
        named += [cycle] * len(said(influence, cycle))
    assert named == ([9] if is_named else []), "the eighth time"


def test_nobody_is_clipped_where_the_limit_is_unknown() -> None:
    influence = Influence(ME)
    for cycle in range(2 * CLIPPED_CYCLES[1]):
        for peer, norm in ((A, 1e30), (B, 1.0)):
            influence.contributed(peer, norm, float("inf"))
        assert said(influence, cycle) == []


@pytest.mark.parametrize(
    ("left_out", "is_named"), [((True, True, True), True), ((True, True, False), True), ((True, False), False)]
)
def test_whom_this_peer_leaves_out_of_most_means_in_three_cycles_is_named_with_a_remedy(
    left_out: tuple[bool, ...], is_named: bool
) -> None:
    influence, named = Influence(ME), list[int]()
    for cycle in range(LEFT_OUT_CYCLES[1]):
        for peer in (A, B):
            for here in left_out:
                influence.contributed(peer, 1.0, 2.0, is_left_out=here and peer == A and cycle % 2 == 0)
        named += [cycle] * len(said(influence, cycle))
    assert named == ([4] if is_named else []), "the third time"
    for text in influence.named():
        assert text.startswith(f"{short_peer_id(A)} was left out of {sum(left_out)} of 3 means that this peer took")
        assert "its owner should check its learning rate, text and memory" in text
        assert "found the next run without it" in text


def test_shares_of_tokens_are_those_that_members_claim_over_the_cycles_of_the_weights() -> None:
    influence = Influence(ME)
    for cycle, fast in enumerate((400.0, 400.0, 700.0, 700.0)):
        saw(influence, {B: EQUAL, C: EQUAL})
        influence.cycle_over(cycle, PEERS, {A: fast, B: 100.0, C: 200.0, D: -5.0, ME: 1e9})
    assert influence.shares[A] == pytest.approx(0.2)
    expected = [(400 / 700 + 2 * 700 / 1000) / 3, (100 / 700 + 0.2) / 3, (200 / 700 + 0.4) / 3, 0.0]
    assert influence.claimed_shares == pytest.approx(dict(zip((A, B, C, D), expected, strict=True)))
    influence.cycle_over(4, PEERS, RATES)
    assert (influence.shares, influence.claimed_shares) == ({}, {}), "no entries, no shares"


def test_nobody_has_a_share_of_tokens_while_nobody_trains() -> None:
    influence = Influence(ME)
    saw(influence, {B: EQUAL, C: EQUAL})
    influence.cycle_over(0, PEERS, dict.fromkeys(PEERS, 0.0))
    assert set(influence.claimed_shares.values()) == {0.0}


def test_a_peer_is_named_once_and_forgotten_when_it_is_no_longer_so() -> None:
    influence = Influence(ME)
    for cycle in range(10):
        saw(influence, {B: HEAVY, C: HEAVY})
        assert len(said(influence, cycle)) == (cycle == SHARE_CYCLES - 1)
    for cycle in range(10, 10 + 2 * FORGOTTEN_CYCLES):
        saw(influence, {B: EQUAL, C: EQUAL})
        assert said(influence, cycle) == []
    assert influence.named() == ()
