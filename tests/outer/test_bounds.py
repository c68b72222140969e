"""No sequence of updates makes a number that is not finite, or other bytes on some processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.vectors import (
    LARGEST,
    LARGEST_ANCHOR,
    LARGEST_MOMENTUM,
    LARGEST_RATE,
    SMALLEST,
    SMALLEST_RATE,
    Vector,
    numpy_alone,
)
from p2p_diloco.ids import ZERO_DIGEST
from p2p_diloco.outer.outer_step import OuterRule, apply_outer_step
from p2p_diloco.outer.state import genesis_state, is_sound

reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
rules = st.builds(
    OuterRule,
    learning_rate=st.sampled_from([SMALLEST_RATE, 0.7, 1.0, LARGEST_RATE]),
    momentum=st.sampled_from([0.0, SMALLEST_RATE, 0.3, 0.9, 1.0 - 2.0**-53]),
)
ELEMENTS = 64


def numbers(seed: int, largest: float, elements: int = ELEMENTS) -> Vector:
    """Return numbers of all magnitudes that an agreed state or an update may have, including zeros and the bounds."""
    rng = np.random.default_rng(seed)
    top = int(np.log2(largest))
    magnitude_N = np.exp2(rng.integers(-64, top, elements)) * rng.uniform(1.0, 2.0, elements)
    picked = rng.random(elements)
    for share, value in ((0.1, 0.0), (0.2, largest), (0.3, SMALLEST)):
        magnitude_N[(share - 0.1 <= picked) & (picked < share)] = value
    return (magnitude_N * rng.choice([-1.0, 1.0], elements)).astype(np.float32)


def assert_sound(anchor_N: Vector, momentum_N: Vector) -> None:
    assert is_sound(anchor_N, largest=LARGEST_ANCHOR)
    assert is_sound(momentum_N, largest=LARGEST_MOMENTUM)


@given(seed=seeds, rule=rules, worst=st.booleans())
@reproducible
def test_no_sequence_of_updates_makes_a_number_that_is_not_finite(seed: int, rule: OuterRule, worst: bool) -> None:
    """Apply random updates, and the worst case: the largest in one direction, starting at the largest values."""
    anchor_N, momentum_N = numbers(seed, LARGEST_ANCHOR), numbers(seed + 1, LARGEST_MOMENTUM)
    if worst:
        anchor_N, momentum_N = np.full_like(anchor_N, -LARGEST_ANCHOR), np.full_like(anchor_N, LARGEST_MOMENTUM)
    for step in range(60):
        update_N = np.full(ELEMENTS, LARGEST, np.float32) if worst else numbers(seed + 2 + step, LARGEST)
        anchor_N, momentum_N = apply_outer_step(anchor_N, momentum_N, update_N, rule)
        assert_sound(anchor_N, momentum_N)


def test_nothing_grows_without_bound_from_the_founding_on() -> None:
    """Apply 30,000 entries with the largest rate and updates: float32 addition ignores addends that are too small."""
    rule = OuterRule(learning_rate=LARGEST_RATE, momentum=1.0 - 2.0**-53)
    anchor_N, momentum_N = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
    update_N = np.full(ELEMENTS, LARGEST, np.float32)
    for _ in range(30_000):
        anchor_N, momentum_N = apply_outer_step(anchor_N, momentum_N, update_N, rule)
    assert_sound(anchor_N, momentum_N)


@contextmanager
def flushing() -> Iterator[None]:
    """Have this thread's processor treat subnormal inputs and results as zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("by_numpy", [False, True])
@given(seed=seeds, rule=rules)
@reproducible
def test_a_thread_that_flushes_subnormal_numbers_computes_the_same_bytes(
    by_numpy: bool, seed: int, rule: OuterRule
) -> None:
    def play() -> list[bytes]:
        anchor_N, momentum_N = numbers(seed, 4.0), numbers(seed + 1, 2.0**-50)
        found = []
        for step in range(16):
            update_N = numbers(seed + 2 + step, 2.0**-60) * np.float32(step % 8 == 0)  # otherwise momentum decays
            anchor_N, momentum_N = apply_outer_step(anchor_N, momentum_N, update_N, rule)
            found.append(anchor_N.tobytes() + momentum_N.tobytes())
        return found

    expected = alone(by_numpy, play)
    with flushing():
        assert alone(by_numpy, play) == expected


def alone(by_numpy: bool, play: Callable[[], list[bytes]]) -> list[bytes]:
    if not by_numpy:
        return play()
    with numpy_alone():
        return play()


def test_decaying_momentum_becomes_zero_and_stays_zero() -> None:
    anchor_N, momentum_N = np.ones(ELEMENTS, np.float32), np.full(ELEMENTS, 2.0**-60, np.float32)
    for _ in range(8):
        anchor_N, momentum_N = apply_outer_step(anchor_N, momentum_N, np.zeros(ELEMENTS, np.float32), OuterRule())
    assert momentum_N.tobytes() == bytes(4 * ELEMENTS)


def test_founding_sets_numbers_that_are_too_small_to_zero() -> None:
    start_N = np.array([1.0, -1e-30, 1e-42, -0.0], np.float32)
    assert genesis_state(start_N, ZERO_DIGEST).anchor_N.tobytes() == np.array([1, 0, 0, 0], np.float32).tobytes()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -3e38, 2.0**-65, -1e-42])
def test_a_state_with_a_number_out_of_bounds_is_not_sound(wrong: float) -> None:
    numbers_N = np.zeros(5, np.float32)
    assert is_sound(numbers_N, largest=LARGEST_ANCHOR)
    numbers_N[3] = wrong
    assert not is_sound(numbers_N, largest=LARGEST_ANCHOR)
