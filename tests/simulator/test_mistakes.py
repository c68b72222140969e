"""Each planted mistake is caught, by an invariant that it breaks."""

from __future__ import annotations

import pytest

from p2p_diloco.node import vector_actions
from p2p_diloco.protocol.membership import stall
from p2p_diloco.protocol.wire import roster
from p2p_diloco.span.reduce import reduce_parts
from simulator.command import catch, is_caught
from simulator.mistakes import MISTAKES

pytestmark = pytest.mark.story

FIRST = {
    "plain-for-radial": 1,
    "row-counted-twice": 11,
    "in-flight-left-out": 1,
    "replaced-in-flight": 2,
    "out-of-order": 1,
    "rosters-not-served": 2,
    "ready-too-early": 1,
    "anchor-for-momentum": 2,
    "absent-entries": 2,
    "heads-not-compared": 1,
    "never-redials": 1,
    "sleeps-too-long": 1,
    "incarnation-repeated": 21,
    "nothing-synced": 18,
    "memory-not-compared": 4,
    "wrong-entry-served": 1,
    "rate-that-never-falls": 42,
}
"""Seeds that catch a mistake that seed 0 misses or catches much later; other seeds follow if these no longer do."""


@pytest.mark.parametrize(
    "name",
    # `make size` plants all of them.
    [pytest.param(name, marks=[pytest.mark.long] if number % 4 else []) for number, name in enumerate(MISTAKES)],
)
def test_planted_mistake_is_caught(name: str) -> None:
    result = catch(name, FIRST.get(name, 0))
    assert is_caught(name, result), result.text if result is not None else "no invariant was violated"


def test_there_are_enough_mistakes_and_each_has_a_description() -> None:
    assert len(MISTAKES) >= 25
    assert all(mistake.text for mistake in MISTAKES.values())


def test_planted_mistakes_are_removed_again() -> None:
    for mistake in MISTAKES.values():
        with mistake.planted():
            pass
    assert vars(stall)["is_majority"] is roster.is_majority
    assert vars(vector_actions)["reduce_parts"] is reduce_parts
