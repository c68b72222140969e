"""The predicate that decides whether an entry may be applied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import RUN, run_rules, verify
from hypothesis import given
from hypothesis import strategies as st
from made import SPAN, entry_on, head_of, ids, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.protocol.entry import Entry, EntryRules, check_entry, included_places, next_head, pack_included
from p2p_diloco.protocol.grid import fold_roster

ROSTER = roster_of(3)
GRID = fold_roster(ROSTER, 16)
OWNER = GRID.columns[(SPAN.index + SPAN.fragment + GRID.rotation) % 3][0]
HEAD = head_of(radius=1.0)
RULES = EntryRules(run=RUN, clock=run_rules().clock, radius_limit=3.0)


def check(entry: Entry, norm: float = 1.0) -> None:
    check_entry(entry, HEAD, ROSTER, GRID, RULES, norm, verify)


def test_a_sound_entry_passes() -> None:
    check(entry_on(HEAD, ROSTER, OWNER))
    check(entry_on(HEAD, ROSTER, OWNER, places=(0, 2)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": sha256(b"other")}, "another run"),
        ({"roster": sha256(b"other")}, "another roster"),
        ({"parent": sha256(b"other")}, "another parent"),
        ({"height": 5}, "says height 5 on top of 0"),
        ({"round": -1}, "not after round -1"),
        ({"round": 1}, "a fragment that round 1 lacks"),
        ({"included": b"\7\0"}, "a bitmap that does not fit 3"),
        ({"included": b"\x0f"}, "includes members that the roster lacks"),
        ({"included": b"\1", "weights": (1.0,)}, "includes 1 of 3 members"),
        ({"weights": (1.0,)}, "has 1 weights for 3"),
        ({"weights": (1.0, -1.0, 1.0)}, "do not sum to more than 0"),
        ({"weights": (0.0, 0.0, 0.0)}, "do not sum to more than 0"),
        ({"median_norm": -1.0}, "a negative norm"),
        ({"median_weight": -1.0}, "a negative norm or weight"),
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
    check_entry(entry, replace(HEAD, radius=0.0), ROSTER, GRID, RULES, 1e30, verify)


def test_only_the_owner_signs() -> None:
    other = next(peer for peer in ids(3) if peer != OWNER)
    with pytest.raises(PeerError, match="not signed by its owner 12D3"):
        check(entry_on(HEAD, ROSTER, other))
    orphans = roster_of(2, dialable=False, helper=None)
    with pytest.raises(PeerError, match="not signed by its owner nobody"):
        check_entry(entry_on(HEAD, orphans, OWNER), HEAD, orphans, fold_roster(orphans, 16), RULES, 1.0, verify)


@given(st.sets(st.integers(0, 63)))
def test_bitmaps_hold_the_places(places: set[int]) -> None:
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
    for change in ({"payload": b"other"}, {"tokens": 1}, {"span": SpanId(0, 1)}, {"weights": (1.0, 1.0, 2.0)}):
        assert replace(entry, **change).digest() != entry.digest()
