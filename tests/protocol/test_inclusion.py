"""Who is in a mean and with what."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from made import SPAN, head_of, roster_of

from p2p_diloco.protocol.entry import Entry, included_places
from p2p_diloco.protocol.inclusion import Inclusion, as_float32, build_entry, join_inclusions, lower_median
from p2p_diloco.protocol.wire import MOST_COUNTED

ROSTER = roster_of(3)
HEAD = head_of()


def inclusion(*places: int, tokens: int = 100) -> Inclusion:
    return Inclusion(
        places=places,
        weights=tuple(10.0 + place for place in places),
        norms=tuple(1.0 + place for place in places),
        tokens=tokens,
    )


def entry_of(made: Inclusion) -> Entry | str:
    return build_entry(ROSTER, ROSTER.digest(), 4, SPAN, HEAD.digest, 1, made, b"mean")


def test_inclusions_are_joined_in_roster_order() -> None:
    assert join_inclusions([inclusion(2, 5), inclusion(0, 3)]) == inclusion(0, 2, 3, 5, tokens=200)
    assert join_inclusions([inclusion(1, tokens=MOST_COUNTED)] * 2).tokens == MOST_COUNTED


def test_an_entry_needs_a_sound_majority_and_some_weight() -> None:
    assert "1 of 3 contributions were sound" in str(entry_of(inclusion(1)))
    assert "weight 0" in str(entry_of(replace(inclusion(0, 1), weights=(0.0, 0.0))))
    entry = entry_of(inclusion(0, 2))
    assert isinstance(entry, Entry)
    assert included_places(entry) == (0, 2)
    assert (entry.tokens, entry.median_norm, entry.median_weight, entry.weights) == (100, 1.0, 10.0, (10.0, 12.0))
    newcomer = entry_of(replace(inclusion(0, 2), weights=(0.0, 12.0)))
    assert isinstance(newcomer, Entry)
    assert newcomer.median_weight == 12.0, "who weighs nothing does not lower what others may weigh"


@given(st.lists(st.floats(0, 1e30), min_size=1))
def test_the_median_is_one_of_the_values(values: list[float]) -> None:
    median = lower_median(values)
    assert median in values
    assert sum(value <= median for value in values) * 2 >= len(values)


@given(st.floats(allow_nan=False))
def test_numbers_are_as_the_wire_carries_them(value: float) -> None:
    assert as_float32(as_float32(value)) == as_float32(value)
