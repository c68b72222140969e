"""A machine that computes other bytes than all others is refused before it follows anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from p2p_diloco.codec.vectors import compiled_loops, numpy_alone
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer import outer_step
from p2p_diloco.span import known_answer
from p2p_diloco.span.known_answer import KNOWN_ANSWER, check_known_answer


def test_this_machine_gives_the_known_answer_with_and_without_compiled_loops() -> None:
    assert compiled_loops() is not None
    check_known_answer()
    with numpy_alone():
        check_known_answer()


def test_a_thread_that_flushes_subnormal_numbers_gives_the_known_answer() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        check_known_answer()
        with numpy_alone():
            check_known_answer()
    finally:
        torch.set_flush_denormal(False)


def test_the_known_answer_takes_milliseconds() -> None:
    check_known_answer()
    began = time.process_time()
    check_known_answer()
    assert time.process_time() - began < 0.5, "a shared machine is no reason to fail"


def fused(anchor_N: Any, momentum_N: Any, update_N: Any, rates: Any, next_N: Any, moved_N: Any) -> bool:
    """Step with one rounding where there should be two, as a multiply-add does."""
    rate, mu = rates
    moved_N[:] = momentum_N.astype(np.float64) * mu + update_N
    next_N[:] = anchor_N - (update_N.astype(np.float64) + moved_N.astype(np.float64) * mu) * rate
    return True


def keeps_small(vector_N: np.ndarray[Any, Any]) -> None:
    """Leave numbers that are too small as they are."""


def replaced_outer_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiled_loops(), "outer_step", fused)


def replaced_follow(patch: pytest.MonkeyPatch) -> None:
    loops = compiled_loops()
    assert loops is not None
    follow = loops.follow4

    def other_follow(*arguments: Any) -> bool:
        is_done = follow(*arguments)
        anchor_N = arguments[-1][0]
        anchor_N.view(np.uint32)[11] ^= 1
        return bool(is_done)

    patch.setattr(loops, "follow4", other_follow)


def replaced_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outer_step, "zero_small", keeps_small)


@pytest.mark.parametrize("change", [replaced_outer_step, replaced_follow, replaced_rule])
def test_a_wrong_bit_in_any_kind_of_step_is_refused_with_both_answers(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(ConfigError) as refusal:
        check_known_answer()
    assert str(refusal.value) == (
        "this machine computes different bytes than other peers: decoding and stepping known vectors gave "
        f"{known_answer.known_answer()}, expected {KNOWN_ANSWER}; "
        "install the versions in constraints.txt, clear numba's cache, or use another machine"
    )


def test_a_machine_that_cannot_even_decode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_loops(), "follow4", lambda *arguments: False)
    check_known_answer()  # the slow path works
    monkeypatch.setattr(outer_step, "outer_step", lambda *arguments: False)
    monkeypatch.setattr(outer_step, "count_non_finite", lambda vector_N: 1)
    with pytest.raises(ConfigError, match="stepping known vectors gave the update holds 1 and the step along it 1"):
        check_known_answer()
