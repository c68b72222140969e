"""Claims about the outer step: the same bits everywhere, and the formula of the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2p_diloco.codec.vectors import CACHED_ELEMENTS, Vector
from p2p_diloco.config.manifest import OuterSection
from p2p_diloco.errors import ConfigError, NonFiniteUpdate
from p2p_diloco.outer.outer_step import OuterRule, apply_outer_step

RULE = OuterRule(learning_rate=1.0, momentum=0.5)
MODERATE = hnp.arrays(np.float32, 12, elements=st.floats(-1e6, 1e6, width=32))


def ramp(elements: int, scale: float) -> Vector:
    return np.sin(np.arange(elements, dtype=np.float64) * scale).astype(np.float32)


def zero_if_small(number: np.float32) -> np.float32:
    return number if abs(number) >= 2.0**-64 else np.float32(0)


def step_by_scalars(
    anchor_N: Vector, momentum_N: Vector, update_N: Vector, rule: OuterRule
) -> list[tuple[bytes, bytes]]:
    """Apply the formula, one float32 operation after another."""
    rate, mu = np.float32(rule.learning_rate), np.float32(rule.momentum)
    stepped = []
    for anchor, momentum, update in zip(anchor_N, momentum_N, update_N, strict=True):
        next_momentum = zero_if_small(np.float32(np.float32(mu * momentum) + update))
        direction = np.float32(update + np.float32(mu * next_momentum))
        next_anchor = zero_if_small(np.float32(anchor - np.float32(rate * direction)))
        stepped.append((next_anchor.tobytes(), next_momentum.tobytes()))
    return stepped


@settings(deadline=None)
@given(
    anchor_N=MODERATE,
    momentum_N=MODERATE,
    update_N=MODERATE,
    rate=st.floats(0.01, 2.0),
    mu=st.just(0.0) | st.floats(1e-6, 0.99),
)
def test_every_bit_is_that_of_separate_float32_operations(
    anchor_N: Vector, momentum_N: Vector, update_N: Vector, rate: float, mu: float
) -> None:
    rule = OuterRule(learning_rate=rate, momentum=mu)
    next_anchor_N, next_momentum_N = apply_outer_step(anchor_N, momentum_N, update_N, rule)
    stepped = [(a.tobytes(), m.tobytes()) for a, m in zip(next_anchor_N, next_momentum_N, strict=True)]
    assert stepped == step_by_scalars(anchor_N, momentum_N, update_N, rule)


@pytest.mark.parametrize("elements", [1, 63, CACHED_ELEMENTS, CACHED_ELEMENTS + 1, 2 * CACHED_ELEMENTS + 5])
def test_bits_do_not_depend_on_cuts_or_memory_alignment(elements: int) -> None:
    anchor_N, momentum_N, update_N = ramp(elements, 0.1), ramp(elements, 0.7), ramp(elements, 1.3)
    whole = apply_outer_step(anchor_N, momentum_N, update_N, RULE)
    # At an odd offset in a buffer, so that vector registers line up differently.
    padded = [
        np.concatenate([np.zeros(3, dtype=np.float32), vector])[3:] for vector in (anchor_N, momentum_N, update_N)
    ]
    cut = elements // 3
    head = apply_outer_step(padded[0][:cut], padded[1][:cut], padded[2][:cut], RULE)
    tail = apply_outer_step(padded[0][cut:], padded[1][cut:], padded[2][cut:], RULE)
    for together, first, second in zip(whole, head, tail, strict=True):
        assert together.tobytes() == first.tobytes() + second.tobytes()


def test_two_nesterov_steps_match_the_formula_by_hand() -> None:
    anchor_N, momentum_N = np.array([8.0], dtype=np.float32), np.zeros(1, dtype=np.float32)
    update_N = np.array([2.0], dtype=np.float32)
    # m = 2, g + m/2 = 3, φ = 8 - 3 = 5; then m = 1 + 2 = 3, g + m/2 = 3.5, φ = 5 - 3.5 = 1.5.
    anchor_N, momentum_N = apply_outer_step(anchor_N, momentum_N, update_N, RULE)
    assert (anchor_N[0], momentum_N[0]) == (5.0, 2.0)
    anchor_N, momentum_N = apply_outer_step(anchor_N, momentum_N, update_N, RULE)
    assert (anchor_N[0], momentum_N[0]) == (1.5, 3.0)


def test_plain_sgd_with_rate_one_moves_the_anchor_to_the_mean_of_the_islands() -> None:
    anchor_N, momentum_N = apply_outer_step(
        np.array([8.0], dtype=np.float32),
        np.array([5.0], dtype=np.float32),
        np.array([2.0], dtype=np.float32),
        OuterRule(learning_rate=1.0, momentum=0.0),
    )
    assert (anchor_N[0], momentum_N[0]) == (6.0, 2.0)


def test_the_step_allocates_its_results_and_does_not_change_its_arguments() -> None:
    arguments = [ramp(100, 0.1), ramp(100, 0.2), ramp(100, 0.3)]
    before = [argument.tobytes() for argument in arguments]
    for argument in arguments:
        argument.flags.writeable = False
    results = apply_outer_step(arguments[0], arguments[1], arguments[2], RULE)
    assert [argument.tobytes() for argument in arguments] == before
    assert not any(np.shares_memory(result, argument) for result in results for argument in arguments)
    assert all(result.dtype == np.float32 and result.flags.writeable for result in results)


@pytest.mark.parametrize("rule", [RULE, OuterRule(learning_rate=0.7, momentum=0.0)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_refused(value: float, rule: OuterRule) -> None:
    update_N = ramp(CACHED_ELEMENTS + 9, 0.1)
    update_N[-2] = value
    zeros_N = np.zeros_like(update_N)
    with pytest.raises(
        NonFiniteUpdate, match="the update holds 1 and the step along it 1 non-finite numbers among 16393"
    ):
        apply_outer_step(zeros_N, zeros_N, update_N, rule)


def test_a_finite_update_whose_step_overflows_is_refused() -> None:
    largest_N = np.full(2, np.finfo(np.float32).max, dtype=np.float32)
    with pytest.raises(NonFiniteUpdate, match="the update holds 0 and the step along it 2 non-finite numbers among 2"):
        apply_outer_step(np.zeros(2, dtype=np.float32), largest_N, largest_N, OuterRule(momentum=0.75))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 1e-40, 16.1])
def test_a_learning_rate_that_cannot_train_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=f"outer learning_rate is {rate}; expected a number from 5.96e-08 to 16"):
        OuterRule(learning_rate=rate)


@pytest.mark.parametrize("mu", [-0.1, 1.0, math.nan, 1e-40])
def test_a_momentum_that_never_decays_is_refused(mu: float) -> None:
    with pytest.raises(ConfigError, match=f"outer momentum is {mu}; expected 0, or from 5.96e-08 to less than 1"):
        OuterRule(momentum=mu)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.1, math.nan])
def test_a_final_share_that_stops_or_speeds_up_training_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"outer final_share is {share}; expected more than 0, and at most 1"):
        OuterRule(final_share=share)


@pytest.mark.parametrize(
    ("height", "rate"), [(0, 0.8), (75, 0.8), (80, 0.68), (90, 0.44), (99, 0.224), (100, 0.2), (2**40, 0.2)]
)
def test_the_rate_falls_over_the_last_quarter_of_the_planned_entries(height: int, rate: float) -> None:
    rule = OuterRule(learning_rate=0.8, momentum=0.3, final_share=0.25, planned_entries=100)
    assert rule.at(height).learning_rate == pytest.approx(rate, rel=1e-12)
    assert rule.at(height).momentum == 0.3


def test_a_run_without_an_end_keeps_its_rate() -> None:
    rule = OuterRule(planned_entries=100)
    assert rule.at(1_000) == rule.at(0)
    assert OuterRule(final_share=0.25).at(1_000) == OuterRule(final_share=0.25)


def test_a_rate_that_falls_stays_a_rate_that_all_processors_round_alike() -> None:
    rule = OuterRule(learning_rate=2.0**-24, final_share=0.001, planned_entries=1)
    assert rule.at(1).learning_rate == 2.0**-24


def test_the_default_rule_is_that_of_the_manifest() -> None:
    section = OuterSection()
    rates = {"learning_rate": section.learning_rate, "momentum": section.momentum, "final_share": section.final_share}
    assert OuterRule() == OuterRule(**rates)
