"""Learners on text: where fragments and tensors lie, and that vectors go in and out unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.training.data import open_corpus
from p2p_diloco.training.inner_loop import InnerRule
from research.learners import MICRO, Judge, TextLearners, shape_named


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


def test_topics_are_shares_of_the_text(text: str) -> None:
    corpus = open_corpus(text)
    shares = [corpus.share(index, 2).train_parts.tolist() for index in range(2)]
    assert shares[0] + shares[1] == corpus.train_parts.tolist()
    assert learners(text, by_topic=True).read(0, 0).size
    with pytest.raises(ConfigError, match="too few for 99 shares"):
        corpus.share(0, 99)


def test_the_judge_sees_what_learners_hold(text: str) -> None:
    some = learners(text)
    judge = Judge(MICRO, open_corpus(text), 2, num_tokens=1024)
    loss = judge.loss([some.read(0, fragment) for fragment in range(2)])
    assert loss == pytest.approx(np.log(256), rel=1e-3)  # the head begins at zero


def test_sizes_are_named() -> None:
    assert shape_named("micro") is MICRO
    assert shape_named("tiny").width == 160
    with pytest.raises(ConfigError, match="expected one of micro, tiny"):
        shape_named("huge")
