"""Opponents step as we do."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.averaging.textbook import FlatOuter, seed_of
from p2p_diloco.outer.outer_step import OuterRule, apply_outer_step


def test_the_outer_step_is_ours() -> None:
    outer = FlatOuter(1000)
    anchor_N, momentum_N = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    for turn in range(3):
        outer.fill(seed_of(0, turn))
        anchor_N, momentum_N = apply_outer_step(anchor_N, momentum_N, outer.delta_N.numpy().copy(), OuterRule())
        outer.step(outer.delta_N)
    stepped_N = outer.anchor_N.detach().numpy()
    np.testing.assert_allclose(stepped_N, anchor_N, rtol=1e-5, atol=1e-7)


def test_equal_anchors_have_equal_digests_and_others_have_not() -> None:
    one, same, other = FlatOuter(64), FlatOuter(64), FlatOuter(64)
    for outer in (one, same):
        outer.step(torch.ones(64))
    assert one.digest() == same.digest() != other.digest()


def test_every_peer_and_turn_has_a_seed_of_its_own() -> None:
    assert len({seed_of(place, turn) for place in range(16) for turn in range(64)}) == 16 * 64
