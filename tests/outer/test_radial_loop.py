"""The compiled radial mean gives the bits of the NumPy code."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.codec.loops import sum_of_block
from p2p_diloco.codec.vectors import compiled_loops, numpy_alone
from simulator.maths import radial_mean, weighted_mean


def halves(values: list[float]) -> float:
    while len(values) > 1:
        values = [
            one + other for one, other in zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True)
        ]
    return values[0]


def test_a_block_is_summed_by_halves() -> None:
    rng = np.random.default_rng(7)
    values_BK = rng.standard_normal((300, 64)) * np.exp2(rng.integers(-30, 30, (300, 64)))
    sums = [sum_of_block(values_K.copy()) for values_K in values_BK]
    assert sums == [halves(values_K.tolist()) for values_K in values_BK]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_vectors", [1, 2, 7])
@pytest.mark.parametrize("elements", [64, 100, 64 * 1100 + 5])
@pytest.mark.parametrize("longest", [0.0, 1.5])
def test_the_loop_and_numpy_agree_in_every_bit(seed: int, num_vectors: int, elements: int, longest: float) -> None:
    assert compiled_loops() is not None
    rng = np.random.default_rng(seed)
    blocks = -(-elements // 64)
    sizes = np.exp2(rng.integers(-60, 60, (num_vectors, blocks))) * (rng.random((num_vectors, blocks)) < 0.8)
    values = rng.standard_normal((num_vectors, elements)) * np.repeat(sizes, 64, axis=1)[:, :elements]
    values[:, ::7] = -0.0
    vectors, weights = list(values.astype(np.float32)), list(rng.random(num_vectors) + 0.01)
    is_radial_B = rng.random(blocks) < 0.6
    compiled_N = radial_mean(vectors, weights, is_radial_B, longest)
    with numpy_alone():
        numpy_N = radial_mean(vectors, weights, is_radial_B, longest)
    assert np.array_equal(compiled_N.view(np.uint32), numpy_N.view(np.uint32))
    plain_N, none_B = weighted_mean(vectors, weights), np.zeros(blocks, np.bool_)
    assert np.array_equal(radial_mean(vectors, weights, none_B), plain_N)
