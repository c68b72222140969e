"""Claims about the merge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2p_diloco.codec.vectors import CACHED_ELEMENTS, Vector
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.outer_step import MergeRule, merge_local

WHOLE = hnp.arrays(np.float32, 5, elements=st.integers(-1000, 1000).map(float))
KEEP = MergeRule()


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


@settings(deadline=None)
@given(
    local_N=WHOLE,
    before_N=WHOLE,
    after_N=WHOLE,
    resolved_N=WHOLE,
    remaining_N=WHOLE,
)
def test_keep_does_not_change_the_residual(
    local_N: Vector, before_N: Vector, after_N: Vector, resolved_N: Vector, remaining_N: Vector
) -> None:
    merged_N = merge_local(local_N, before_N, after_N, resolved_N, KEEP)
    residual_before_N = before_N - local_N - (resolved_N + remaining_N)
    assert np.array_equal(after_N - merged_N - remaining_N, residual_before_N)


def test_keep_removes_the_contribution_of_the_entrys_round_and_follows_the_anchor() -> None:
    merged_N = merge_local(vector(10.0), vector(8.0), vector(5.0), vector(2.0), KEEP)
    assert merged_N.tolist() == [10.0 - 3.0 + 2.0]


def test_without_a_contribution_of_that_round_keep_follows_the_anchor() -> None:
    assert merge_local(vector(10.0), vector(8.0), vector(5.0), None, KEEP).tolist() == [7.0]


def test_keep_rounds_local_once() -> None:
    # Added separately, 1 + 2⁻²⁴ would be rounded to 1 twice; together they are 2⁻²³, which float32 holds next to 1.
    tiny = 2.0**-24
    assert merge_local(vector(1.0), vector(0.0), vector(tiny), vector(tiny), KEEP)[0] == 1.0 + 2.0**-23


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (MergeRule(kind="blend", alpha=1.0), 10.0),
        (MergeRule(kind="blend", alpha=0.5), 7.0),
        (MergeRule(kind="blend", alpha=0.25), 5.5),
        (MergeRule(kind="blend", alpha=0.0), 4.0),
    ],
)
def test_blend_keeps_the_local_share(rule: MergeRule, expected: float) -> None:
    assert merge_local(vector(10.0), vector(8.0), vector(4.0), vector(99.0), rule).tolist() == [expected]


def test_overwriting_replaces_numbers_that_are_not_finite() -> None:
    anchor_N = vector(1.0, 2.0)
    merged_N = merge_local(vector(math.nan, math.inf), anchor_N, anchor_N, None, MergeRule(kind="blend"))
    assert merged_N.tolist() == [1.0, 2.0]
    assert not np.shares_memory(merged_N, anchor_N)


@pytest.mark.parametrize("rule", [KEEP, MergeRule(kind="blend", alpha=0.5), MergeRule(kind="blend")])
def test_every_element_is_merged_in_fresh_memory(rule: MergeRule) -> None:
    local_N = np.arange(2 * CACHED_ELEMENTS + 3, dtype=np.float32)
    vectors = [local_N, local_N + 2.0, local_N + 4.0, local_N * 0.0 + 1.0]
    before = [each.tobytes() for each in vectors]
    merged_N = merge_local(vectors[0], vectors[1], vectors[2], vectors[3], rule)
    expected = {KEEP: local_N + 3.0, MergeRule(kind="blend", alpha=0.5): local_N + 2.0}.get(rule, local_N + 4.0)
    assert np.array_equal(merged_N, expected)
    assert [each.tobytes() for each in vectors] == before
    assert not any(np.shares_memory(merged_N, each) for each in vectors)


def test_contributions_in_flight_are_scaled_like_local() -> None:
    assert KEEP.in_flight_share == 1.0
    assert MergeRule(kind="blend", alpha=0.25).in_flight_share == 0.25
    assert MergeRule(kind="blend").in_flight_share == 0.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "mix"}, "merge is 'mix'; expected one of keep, blend"),
        ({"kind": "blend", "alpha": 1.5}, "fragment_update_alpha is 1.5; expected 0 to 1, the local share"),
        ({"kind": "blend", "alpha": math.nan}, "fragment_update_alpha is nan; expected 0 to 1"),
        ({"alpha": 0.5}, "fragment_update_alpha is 0.5 but merge is 'keep'; set merge to 'blend' or alpha to 0"),
    ],
)
def test_an_invalid_rule_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MergeRule(**arguments)


@pytest.mark.parametrize("elements", [1, 63, 64, 1000])
def test_without_a_contribution_local_moves_with_the_anchor(elements: int) -> None:
    rng = np.random.default_rng(elements)
    local_N, before_N, after_N = rng.standard_normal((3, elements), dtype=np.float32)
    merged_N = merge_local(local_N, before_N, after_N, None, MergeRule())
    assert np.array_equal(merged_N, local_N + (after_N - before_N))
