"""Learners on text: where fragments and tensors lie, and that vectors go in and out unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.errors import ConfigError
from research.learners import MICRO, Judge, RoundedSum, TextLearners, shape_named


def learners(text: str, **changes: object) -> TextLearners:
    values: dict[str, object] = {
        "shape": MICRO, "corpus": open_corpus(text), "rule": InnerRule(), "num_learners": 2, "windows": 1,
        "num_fragments": 2, "seed": 3,
    }  # fmt: skip
    return TextLearners(**(values | changes))  # type: ignore[arg-type]


def test_fragments_and_tensors_cover_the_model_once(text: str) -> None:
    some = learners(text)
    assert some.fragments[0][0] == 0
    assert some.fragments[0][1] == some.fragments[1][0]
    assert some.fragments[-1][1] == MICRO.num_parameters
    assert sum(tensor.stop - tensor.start for tensor in some.tensors) == MICRO.num_parameters
    assert sum(tensor.is_embedding for tensor in some.tensors) == 2


def test_all_begin_alike_and_go_their_own_ways(text: str) -> None:
    some = learners(text)
    assert len(some) == 2
    assert np.array_equal(some.read(0, 0), some.read(1, 0))
    some.progress(0.0)
    for learner in (0, 1):
        some.step(learner)  # moves the head only, which begins at zero and lets no gradient through
        some.step(learner)
    assert not np.array_equal(some.read(0, 0), some.read(1, 0))
    assert (some.steps(0), some.tokens(0)) == (2, 2 * MICRO.context)
    some.write(1, 0, some.read(0, 0))
    assert np.array_equal(some.read(0, 0), some.read(1, 0))


def test_the_judge_sees_what_learners_hold(text: str) -> None:
    some = learners(text)
    corpus = open_corpus(text)
    judge = Judge(MICRO, (corpus, corpus), 2, num_tokens=2048)
    losses = judge.losses([some.read(0, fragment) for fragment in range(2)])
    assert losses == pytest.approx([np.log(256)] * 2, rel=1e-3)  # the head begins at zero


def test_each_island_s_gradient_is_rounded_and_what_was_lost_comes_next_time(text: str) -> None:
    seen: list[list[float]] = []

    def nothing(vector_N: Vector) -> Vector:
        seen.append(vector_N[:1].tolist())
        return np.zeros_like(vector_N)

    rounded = learners(text, num_learners=1, windows=2, gradients=(2, nothing))
    plain = learners(text, num_learners=1, windows=2)
    num_tensors = len(rounded.tensors)
    for some in (rounded, plain):
        some.progress(0.0)
        some.step(0)
    assert len(seen) == 2 * num_tensors, "once for each island and tensor"
    assert not np.array_equal(rounded.read(0, 1), plain.read(0, 1))
    exact = learners(text, num_learners=1, windows=2, gradients=(2, lambda vector_N: vector_N))
    exact.progress(0.0)
    exact.step(0)
    assert np.allclose(exact.read(0, 1), plain.read(0, 1), atol=1e-5)


def test_rounded_gradients_add_up_to_the_true_ones() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    hook = RoundedSum(2, np.round)
    parts = [[0.4, 1.0], [0.2, -0.6], [0.4, 0.0], [0.2, 0.0], [0.4, 0.0], [0.2, 0.0]]
    sums = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            parameter.grad = torch.zeros(2)
        parameter.grad += torch.tensor(part)
        hook(parameter)
        sums.append(parameter.grad.tolist())
    # The first island keeps 0.4, then sends 1 of 0.8; the second keeps 0.2 and 0.4, then sends 1 of 0.6.
    assert [sums[number] for number in (1, 3, 5)] == [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]


def test_sizes_are_named() -> None:
    assert shape_named("micro") is MICRO
    assert shape_named("tiny").width == 160
    with pytest.raises(ConfigError, match="expected one of micro, tiny"):
        shape_named("huge")
