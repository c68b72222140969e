"""Tokens of a contribution, by hand: carried at once, carried later because a round had no entry, or lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.chaos.carried import carried_tokens
from p2p_diloco.ids import Digest, SpanId, sha256

SPAN, OTHER = SpanId(0, 0), SpanId(0, 1)
ENTRIES = {Digest(sha256(bytes([number]))): number for number in range(40)}
BY_ROUND = {number: digest for digest, number in ENTRIES.items()}

Line = Mapping[str, Any]
BEGAN: Line = {"what": "began", "position": 0}


def contributed(round_index: int, steps: int, only: list[int] | None = None) -> Line:
    more = {} if only is None else {"only": only}
    return {"what": "contributed", "steps": steps, "round": round_index, "fragment": 0, **more}


def absorbed(round_index: int, *, own: bool = True, span: SpanId = SPAN) -> Line:
    return {"what": "absorbed", "steps": 0, "span": [*span], "entry": BY_ROUND[round_index].hex(), "own": own}


TOOK: Line = {"what": "took", "steps": 0, "span": [*SPAN], "head": "00"}


@pytest.mark.parametrize(
    ("lines", "carried"),
    [
        pytest.param([contributed(1, 10), absorbed(1)], {1: 10}, id="at once"),
        pytest.param([contributed(1, 10), absorbed(1), contributed(2, 14), absorbed(2)], {1: 10, 2: 4}, id="since"),
        pytest.param([contributed(1, 10), absorbed(1, own=False)], {}, id="left out"),
        pytest.param(
            [contributed(1, 10), contributed(2, 14), absorbed(2), contributed(3, 20), absorbed(3)],
            {2: 4, 3: 16},
            id="a round without an entry: carried by the contribution after the next entry",
        ),
        pytest.param(
            [contributed(1, 10), contributed(2, 14), absorbed(1), absorbed(2)], {1: 10, 2: 4}, id="a late entry"
        ),
        pytest.param([contributed(1, 10), TOOK, contributed(2, 14), absorbed(2)], {2: 4}, id="replaced"),
        pytest.param([contributed(1, 10), BEGAN, contributed(2, 3), absorbed(2)], {2: 3}, id="another process"),
        pytest.param([contributed(1, 10, only=[1]), absorbed(1)], {}, id="another span"),
    ],
)
def test_an_included_contribution_carries_what_no_entry_had(lines: list[Line], carried: dict[int, int]) -> None:
    found = carried_tokens([BEGAN, *lines], rounds=ENTRIES, spans_of=[[SPAN, OTHER]], step_tokens=1)
    assert {ENTRIES[digest]: tokens for digest, tokens in found.items()} == carried


def test_tokens_are_steps_times_the_tokens_of_a_step() -> None:
    found = carried_tokens([BEGAN, contributed(1, 10), absorbed(1)], rounds=ENTRIES, spans_of=[[SPAN]], step_tokens=256)
    assert list(found.values()) == [2560]


def test_a_contribution_that_waited_too_long_is_lost() -> None:
    waiting = [contributed(number, 10 * number) for number in range(1, 11)]
    lines = [BEGAN, *waiting, absorbed(10), contributed(11, 110), absorbed(11)]
    found = carried_tokens(lines, rounds=ENTRIES, spans_of=[[SPAN]], step_tokens=1)
    assert sum(found.values()) == 110 - 20, "eight are in flight; the two oldest were dropped"


def test_an_entry_that_nobody_has_includes_nothing() -> None:
    unknown = {**absorbed(1), "entry": "ff" * 32}
    lines = [BEGAN, contributed(1, 10), unknown, contributed(2, 14), absorbed(2)]
    found = carried_tokens(lines, rounds=ENTRIES, spans_of=[[SPAN]], step_tokens=1)
    assert {ENTRIES[digest]: tokens for digest, tokens in found.items()} == {2: 4}
