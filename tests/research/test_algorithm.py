"""Radial means, and what all algorithms share."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_learners import ScriptedLearners

from research.algorithm import radial_mean
from research.baselines import DataParallel
from research.learners import Tensor

INSIDE = Tensor(start=0, stop=2, is_embedding=False)


def test_a_radial_mean_of_orthogonal_vectors_is_as_long_as_they_are() -> None:
    vectors = [np.array([2.0, 0.0, 2.0, 0.0], np.float32), np.array([0.0, 4.0, 0.0, 4.0], np.float32)]
    mean_N = radial_mean(vectors, [1.0, 1.0], [INSIDE, Tensor(start=2, stop=4, is_embedding=True)])
    assert mean_N[:2].tolist() == pytest.approx([3.0 / 2**0.5] * 2)  # the mean of their norms
    assert mean_N[2:].tolist() == [1.0, 2.0]  # embeddings as they are


def test_what_has_no_direction_stays_the_plain_mean() -> None:
    opposite = [np.array([1.0, 0.0], np.float32), np.array([-1.0, 0.0], np.float32)]
    assert radial_mean(opposite, [1.0, 1.0], [INSIDE]).tolist() == [0.0, 0.0]
    nothing = [np.zeros(2, np.float32)] * 2
    assert radial_mean(nothing, [1.0, 3.0], [INSIDE]).tolist() == [0.0, 0.0]


def test_tensors_are_placed_within_their_fragment() -> None:
    algorithm = DataParallel(ScriptedLearners([0.0], lengths=(2, 3)), num_islands=2)
    assert algorithm.num_parameters == 5
    assert algorithm.tensors_of(1) == [Tensor(start=0, stop=3, is_embedding=False)]
    assert [len(part_N) for part_N in algorithm.read_all(0)] == [2, 3]
