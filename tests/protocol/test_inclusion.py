"""The members of a mean, and their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import SPAN, head_of, ids, member, roster_of

from p2p_diloco.protocol.wire.entry import Entry, Inclusion, build_entry, included_places, join_inclusions, only_present
from p2p_diloco.protocol.wire.frames import MOST_COUNTED
from p2p_diloco.span_log import RADIUS_BOUNDS, RADIUS_MOVED, within_reach

ROSTER = roster_of(3)
HEAD = head_of()


def inclusion(*places: int, tokens: int = 100, present: tuple[int, ...] | None = None) -> Inclusion:
    return Inclusion(
        present=present if present is not None else places,
        places=places,
        weights=tuple(1000.0 + place for place in places),
        norms=tuple(1.0 + place for place in places),
        tokens=tokens,
    )


def entry_of(made: Inclusion) -> Entry | str:
    return build_entry(ROSTER, ROSTER.digest(), 4, SPAN, HEAD, made, b"mean")


def test_inclusions_are_joined_in_roster_order() -> None:
    assert join_inclusions([inclusion(2, 5), inclusion(0, 3)]) == inclusion(0, 2, 3, 5, tokens=200)
    assert join_inclusions([inclusion(1, tokens=MOST_COUNTED)] * 2).tokens == MOST_COUNTED
    joined = join_inclusions([inclusion(5, present=(2, 5)), only_present((3,)), inclusion(0, 1).left_out()])
    assert joined == inclusion(5, present=(0, 1, 2, 3, 5))


@given(st.dictionaries(st.integers(0, 30), st.booleans()))
def test_a_member_left_out_of_a_mean_still_counts_as_present(sound: dict[int, bool]) -> None:
    parts = {place: inclusion(place) for place in sound}
    joined = join_inclusions(part if sound[place] else part.left_out() for place, part in parts.items())
    assert joined.present == tuple(sorted(sound))
    assert joined.places == tuple(sorted(place for place in sound if sound[place]))
    assert joined.tokens == 100 * len(joined.places)


def test_an_entry_needs_a_present_majority_and_some_weight() -> None:
    assert entry_of(inclusion(1)) == "1 of 3 voters were there; more than half are needed"
    alone = entry_of(inclusion(1, present=(0, 1)))
    assert isinstance(alone, Entry)
    assert (alone.present, alone.included, alone.weights, alone.median_norm) == (b"\3", b"\2", (1001.0,), 1.5)
    assert entry_of(only_present((0, 1))) == "no contribution was sound"
    assert "weight 0" in str(entry_of(replace(inclusion(0, 1), weights=(0.0, 0.0))))
    entry = entry_of(inclusion(0, 2))
    assert isinstance(entry, Entry)
    assert included_places(entry) == (0, 2)
    assert (entry.tokens, entry.median_norm, entry.median_weight, entry.weights) == (100, 1.0, 1000.0, (1000.0, 1002.0))
    newcomer = entry_of(replace(inclusion(0, 2), weights=(0.0, 1002.0)))
    assert isinstance(newcomer, Entry)
    assert newcomer.median_weight == 1002.0, "who weighs nothing does not lower what others may weigh"


def test_members_without_a_vote_are_included_and_make_no_majority() -> None:
    roster = replace(roster_of(6), members=tuple(member(peer, counts=place < 3) for place, peer in enumerate(ids(6))))

    def built(made: Inclusion) -> Entry | str:
        return build_entry(roster, roster.digest(), 4, SPAN, HEAD, made, b"mean")

    assert built(inclusion(0, 3, 4, 5)) == "1 of 3 voters were there; more than half are needed"
    entry = built(inclusion(5, present=(0, 1, 5)))
    assert isinstance(entry, Entry)
    assert included_places(entry) == (5,)


def two_that_claim(*norms: float) -> Inclusion:
    return replace(inclusion(0, 1), norms=norms)


def radius_after(made: Inclusion, radius: float, owner: int | None) -> float:
    entry = build_entry(ROSTER, ROSTER.digest(), 4, SPAN, replace(HEAD, radius=radius), made, b"mean", owner=owner)
    assert isinstance(entry, Entry)
    return entry.median_norm


@pytest.mark.parametrize("claimed", [1e-30, 1e30])
def test_one_of_two_contributors_moves_the_radius_by_half_at_most_while_owners_take_turns(claimed: float) -> None:
    """The liar claims what it likes, and as owner publishes what it may; the honest owner believes its own norm."""
    honest, liar, radius = 0, 1, 1.0
    for turn in range(80):
        if turn % 2:
            radius = within_reach(claimed, radius, RADIUS_BOUNDS, RADIUS_MOVED)
        else:
            radius = radius_after(two_that_claim(1.0, claimed), radius, honest)
        assert radius * 1.001 >= 1 / RADIUS_MOVED
        assert radius <= RADIUS_MOVED * 1.001
    assert radius_after(two_that_claim(1.0, 9.0), 1.0, liar) == RADIUS_MOVED


def test_an_owner_that_contributes_nothing_lets_one_of_two_move_nothing() -> None:
    assert radius_after(two_that_claim(1e-30, 1.0), 1.0, owner=None) == 1.0
    assert radius_after(two_that_claim(1.0, 1e30), 1.0, owner=2) == 1.0
