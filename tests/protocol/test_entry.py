"""The predicate that decides whether an entry may be applied."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from fake_run import run_rules, verify
from hypothesis import given
from hypothesis import strategies as st
from made import SPAN, entry_on, head_of, ids, member, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.wire.entry import (
    Entry,
    check_entry,
    included_places,
    lies_within,
    next_head,
    pack_included,
    places_in,
)
from p2p_diloco.protocol.wire.roster import MOST_MEMBERS

ROSTER = roster_of(3)
GRID = fold_roster(ROSTER, 16)
OWNER = GRID.columns[(SPAN.index + SPAN.fragment + GRID.rotation) % 3][0]
HEAD = head_of(radius=1.0)
RULES = run_rules()


def check(entry: Entry, norm: float = 1.0) -> None:
    check_entry(entry, HEAD, ROSTER, GRID, RULES, norm, verify)


def test_a_sound_entry_passes() -> None:
    check(entry_on(HEAD, ROSTER, OWNER))
    check(entry_on(HEAD, ROSTER, OWNER, places=(0, 2)))


def test_one_contribution_is_enough_if_a_majority_was_present() -> None:
    check(entry_on(HEAD, ROSTER, OWNER, places=(1,), present=(0, 1)))
    check(entry_on(HEAD, ROSTER, OWNER, places=(2,), present=(0, 1, 2)))


@given(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_an_entry_includes_only_present_members_and_needs_more_than_half_of_the_voters(
    present: set[int], included: set[int], counting: set[int]
) -> None:
    whole = roster_of(8)
    listed = enumerate(whole.members)
    roster = replace(whole, members=tuple(replace(each, counts=place in counting) for place, each in listed))
    grid = fold_roster(roster, 16)
    owner = grid.owner(SPAN)
    assert owner is not None
    entry = entry_on(HEAD, roster, owner, places=sorted(included), present=sorted(present))
    is_majority = 2 * len(present & roster.voter_places) > len(roster.voters)
    try:
        check_entry(entry, HEAD, roster, grid, RULES, 1.0, verify)
    except PeerError:
        assert not (included and included <= present and is_majority)
    else:
        assert included
        assert included <= present
        assert is_majority


def test_members_without_a_vote_neither_make_nor_break_a_majority() -> None:
    """Two of three voters are enough, and no other members are, for any number of new identities."""
    roster = replace(roster_of(8), members=tuple(member(peer, counts=place < 3) for place, peer in enumerate(ids(8))))
    grid = fold_roster(roster, 16)
    owner = grid.owner(SPAN)
    assert owner is not None
    check_entry(entry_on(HEAD, roster, owner, places=(0, 2)), HEAD, roster, grid, RULES, 1.0, verify)
    check_entry(entry_on(HEAD, roster, owner, places=(7,), present=(0, 2, 7)), HEAD, roster, grid, RULES, 1.0, verify)
    crowd = entry_on(HEAD, roster, owner, places=(0, 3, 4, 5, 6, 7))
    with pytest.raises(PeerError, match="says that 1 of 3 voters were there; more than half are needed"):
        check_entry(crowd, HEAD, roster, grid, RULES, 1.0, verify)


@given(st.sets(st.integers(0, 63)), st.sets(st.integers(0, 63)))
def test_bitmap_inclusion_matches_inclusion_of_places(part: set[int], whole: set[int]) -> None:
    assert lies_within(pack_included(part, 64), pack_included(whole, 64)) is (part <= whole)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_two_disjoint_groups_are_never_both_a_majority(counting: list[bool], sides: list[int]) -> None:
    num_members = len(counting)
    listed = zip(ids(num_members), counting, strict=True)
    roster = replace(roster_of(1), members=tuple(member(peer, counts=counts) for peer, counts in listed))
    groups = [{place for place in range(num_members) if sides[place] == side} for side in range(3)]
    assert sum(map(roster.has_majority, groups)) <= 1
    assert roster.has_majority(range(num_members))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": sha256(b"other")}, "another run"),
        ({"roster": sha256(b"other")}, "another roster"),
        ({"parent": sha256(b"other")}, "another parent"),
        ({"height": 5}, "has height 5 on top of 0"),
        ({"round": -1}, "not after round -1"),
        ({"round": 1}, "a fragment not of round 1"),
        ({"included": b"\7\0"}, "a bitmap that does not fit 3"),
        ({"present": b""}, "a bitmap that does not fit 3"),
        ({"present": b"\7\0"}, "a bitmap that does not fit 3"),
        ({"present": b"\x0f"}, "names members that the roster lacks"),
        ({"included": b"\x0f"}, "includes members that were not there"),
        ({"present": b"\3"}, "includes members that were not there"),
        (
            {"present": b"\1", "included": b"\1", "weights": (1.0,)},
            "says that 1 of 3 voters were there; more than half are needed",
        ),
        ({"present": b"\0", "included": b"\0", "weights": ()}, "says that 0 of 3 voters were there"),
        ({"included": b"\0", "weights": ()}, "do not sum to more than 0"),
        ({"weights": (1.0,)}, "has 1 weights for 3"),
        ({"weights": (1.0, -1.0, 1.0)}, "do not sum to more than 0"),
        ({"weights": (0.0, 0.0, 0.0)}, "do not sum to more than 0"),
        ({"median_norm": 0.0}, "publishes a median norm of 0, which is not between 0.6667 and 1.5"),
        ({"median_norm": -1.0}, "publishes a median norm of -1, which is not between 0.6667 and 1.5"),
        ({"median_weight": -1.0}, "publishes a median weight of -1, which is not between 250 and 4000"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused(changes: dict[str, object], text: str) -> None:
    entry = replace(entry_on(HEAD, ROSTER, OWNER), **changes)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=text):
        check(entry)


def test_an_update_beyond_the_radius_is_refused() -> None:
    entry = entry_on(HEAD, ROSTER, OWNER)
    check(entry, norm=3.0)
    with pytest.raises(PeerError, match=r"has norm 3\.5, beyond the limit 3"):
        check(entry, norm=3.5)


def test_only_the_owner_signs() -> None:
    other = next(peer for peer in ids(3) if peer != OWNER)
    with pytest.raises(PeerError, match="not signed by its owner 12D3"):
        check(entry_on(HEAD, ROSTER, other))


@given(st.sets(st.integers(0, 63)))
def test_bitmaps_encode_places(places: set[int]) -> None:
    packed = pack_included(places, 64)
    assert len(packed) == 8
    assert included_places(replace(entry_on(HEAD, ROSTER, OWNER), included=packed)) == tuple(sorted(places))


def test_a_head_moves_along_its_entries() -> None:
    entry = entry_on(HEAD, ROSTER, OWNER, median_norm=2.5, median_weight=7.0)
    head = next_head(HEAD, entry)
    assert (head.height, head.round, head.radius, head.median_weight) == (1, entry.round, 2.5, 7.0)
    assert head.digest == sha256(HEAD.digest, entry.digest())


def test_the_digest_covers_all_but_the_signature() -> None:
    entry = entry_on(HEAD, ROSTER, OWNER)
    assert replace(entry, signature=bytes(64)).digest() == entry.digest()
    changes = ({"payload": b"other"}, {"tokens": 1}, {"span": SpanId(0, 1)}, {"weights": (1.0, 1.0, 2.0)})
    for change in (*changes, {"present": b"\3"}, {"included": b"\3"}):
        assert replace(entry, **change).digest() != entry.digest()


def test_cached_bitmaps_of_strangers_use_bounded_memory() -> None:
    places = places_in(b"\xff" * (MOST_MEMBERS // 8))
    held_bytes = sys.getsizeof(places) + sum(map(sys.getsizeof, places))
    most = places_in.cache_parameters()["maxsize"]
    assert most is not None
    assert most * held_bytes < 50_000_000
