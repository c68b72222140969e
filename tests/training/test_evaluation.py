from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2p_diloco.app.models.evaluation import AnchorEvaluation, held_out_loss
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.data import Corpus, held_out_windows
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.parameters import LocalParameters, sizes
from p2p_diloco.outer.fragments import plan_fragments
from tests.training.awake import awake_model


def test_the_loss_is_the_mean_over_the_same_held_out_windows(shape: ModelShape, corpus: Corpus) -> None:
    model = awake_model(shape, seed=1, scale=0.1)
    windows = held_out_windows(corpus, context=12, num_windows=25)
    with torch.no_grad():
        expected = model.loss(windows).item()
    assert held_out_loss(model, corpus, num_tokens=25 * 12) == pytest.approx(expected, rel=1e-5)


def test_batches_of_unequal_size_are_weighted_by_their_windows(
    shape: ModelShape, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = awake_model(shape, seed=1, scale=0.1)
    whole = held_out_loss(model, corpus, num_tokens=25 * 12)
    monkeypatch.setattr("p2p_diloco.app.models.evaluation._BATCH_TOKENS", 7 * 12)
    assert held_out_loss(model, corpus, num_tokens=25 * 12) == pytest.approx(whole, rel=1e-6)


def test_a_fresh_model_predicts_all_bytes_equally(shape: ModelShape, corpus: Corpus) -> None:
    assert held_out_loss(build_model(shape, seed=0), corpus) == pytest.approx(math.log(256), abs=1e-5)


def test_evaluating_twice_gives_the_same_bits_and_changes_nothing(shape: ModelShape, corpus: Corpus) -> None:
    model = awake_model(shape, seed=1, scale=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert held_out_loss(model, corpus) == held_out_loss(model, corpus)
    for expected, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(expected, parameter)
        assert parameter.grad is None


def test_the_anchors_loss_is_that_of_a_model_with_its_parameters(shape: ModelShape, corpus: Corpus) -> None:
    model = awake_model(shape, seed=1, scale=0.1)
    fragments = plan_fragments(sizes(model), 3)
    vectors = LocalParameters(model, fragments).read_all()
    for vector_N in vectors:
        vector_N.flags.writeable = False
    assert AnchorEvaluation(shape, fragments, corpus).loss(vectors) == held_out_loss(model, corpus)


def test_parts_cover_every_element_once_and_are_taken_one_by_one(shape: ModelShape, corpus: Corpus) -> None:
    model = awake_model(shape, seed=1, scale=0.1)
    fragments = plan_fragments(sizes(model), 3)
    local = LocalParameters(model, fragments)
    evaluation = AnchorEvaluation(shape, fragments, corpus)
    assert len(evaluation.parts) == shape.layers + 2
    covered = [each for part in evaluation.parts for each in part]
    assert sorted(covered) == sorted(
        (fragment.index, slot.start, slot.stop) for fragment in fragments for slot in fragment.tensors
    )
    evaluation.take([local.read(*each) for each in evaluation.parts[0]])
    evaluation.begin()  # discards the evaluation in progress
    losses = [evaluation.take([local.read(*each) for each in part]) for part in evaluation.parts]
    assert losses[:-1] == [None] * (len(losses) - 1)
    assert losses[-1] == held_out_loss(model, corpus)


def test_one_evaluation_can_be_reused_for_many_anchors(shape: ModelShape, corpus: Corpus) -> None:
    model = awake_model(shape, seed=1, scale=0.1)
    fragments = plan_fragments(sizes(model), 2)
    vectors = LocalParameters(model, fragments).read_all()
    evaluation = AnchorEvaluation(shape, fragments, corpus)
    first = evaluation.loss(vectors)
    assert evaluation.loss([vector_N * np.float32(0.5) for vector_N in vectors]) != first
    assert evaluation.loss(vectors) == first


def test_a_context_longer_than_the_held_out_stretches_is_refused(corpus: Corpus) -> None:
    long = ModelShape(layers=1, width=8, heads=1, feed_forward=8, context=4_000)
    with pytest.raises(ConfigError, match=r"the held-out text has no stretch of 4001 tokens"):
        held_out_loss(build_model(long, seed=0), corpus)
