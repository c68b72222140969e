"""Any module as a text model: roles of its parameters, and evaluation of vectors in a copy of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.app.models.evaluation import AnchorEvaluation, WholeEvaluation
from p2p_diloco.app.models.model import build_model, token_loss
from p2p_diloco.app.models.text_model import TextModel, check_text_model, decoder_text_model
from p2p_diloco.app.text.data import BatchStream, Corpus
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.island.inner_state import InnerState, saved_buffers
from p2p_diloco.island.parameters import LocalParameters, sizes, trained
from p2p_diloco.outer.fragments import plan_fragments

SHAPE = ModelShape(layers=2, width=16, heads=2, feed_forward=32, context=12)


class Tied(nn.Module):
    """An embedding that is also the head, a frozen layer, a convolution and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.middle = nn.Linear(8, 8)
        self.kernel = nn.Parameter(torch.randn(2, 2, 2))
        self.head = nn.Linear(8, 256, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def loss(self, windows_BT: Tensor) -> Tensor:
        stream = self.middle(self.frozen(self.table(windows_BT[:, :-1]))) * self.scale + self.kernel.sum()
        return token_loss(self.head(stream), windows_BT)


def tied() -> TextModel:
    return TextModel(module=Tied(), loss=lambda module, windows: module.loss(windows), context=12, vocabulary=256)


def test_each_trained_parameter_has_one_role() -> None:
    model = tied()
    roles = model.roles()
    module = model.module
    assert isinstance(module, Tied)
    assert [each is module.table.weight for each in roles.embedding] == [True]
    assert [each is module.middle.weight for each in roles.matrices] == [True]
    assert [each is module.middle.bias for each in roles.vectors] == [True]
    assert [each is module.kernel for each in roles.others] == [True]


def test_the_built_in_decoder_has_the_same_roles_as_before() -> None:
    model = build_model(SHAPE, 0)
    roles = decoder_text_model(model).roles()
    assert ([*map(id, roles.embedding)], [*map(id, roles.others)]) == ([id(model.embedding)], [id(model.head)])
    assert {id(each) for each in roles.matrices} == {
        id(each) for name, each in model.named_parameters() if name.startswith("blocks.") and each.ndim > 1
    }


def test_a_whole_evaluation_equals_that_of_the_built_in_decoder_part_by_part(corpus: Corpus) -> None:
    model = build_model(SHAPE, 3)
    fragments = plan_fragments(sizes(model), 3)
    vectors = LocalParameters(model, fragments).read_all()
    parts = AnchorEvaluation(SHAPE, fragments, corpus)
    whole = WholeEvaluation(decoder_text_model(model), fragments, corpus)
    loss = whole.take([vectors[fragment][start:stop] for fragment, start, stop in whole.parts[0]])
    assert abs(loss - parts.loss(vectors)) < 1e-5


def test_an_evaluation_uses_the_given_vectors_and_leaves_the_model_alone(corpus: Corpus) -> None:
    model = tied()
    before = {name: tensor.detach().clone() for name, tensor in model.module.named_parameters()}
    fragments = plan_fragments(sizes(model.module), 2)
    evaluation = WholeEvaluation(model, fragments, corpus)
    own = LocalParameters(model.module, fragments).read_all()

    def loss_of(vectors: tuple) -> float:
        return evaluation.take([vectors[fragment][start:stop] for fragment, start, stop in evaluation.parts[0]])

    with torch.no_grad():
        expected = model.loss(model.module, torch.cat(list(evaluation.batches))).item()
    assert abs(loss_of(own) - expected) < 1e-5
    assert loss_of(tuple(vector * 0 for vector in own)) > 5.5  # a guess: log 256
    assert all(torch.equal(before[name], tensor) for name, tensor in model.module.named_parameters())
    assert all(tensor.device.type == "cpu" for tensor in trained(model.module).values())


class Normed(nn.Module):
    """A model whose evaluation depends on what its norm has seen in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.head = nn.Embedding(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 256)

    def loss(self, windows_BT: Tensor) -> Tensor:
        stream = self.norm(self.table(windows_BT[:, :-1]).flatten(0, 1))
        return nn.functional.cross_entropy(self.head(stream), windows_BT[:, 1:].flatten())


def test_buffers_are_evaluated_as_they_are_now_and_saved_with_the_optimiser(tmp_path: Path, corpus: Corpus) -> None:
    def begun() -> tuple[TextModel, InnerLoop]:
        model = TextModel(
            module=Normed(), loss=lambda module, windows: module.loss(windows), context=12, vocabulary=256
        )
        stream = BatchStream(corpus, Digest(bytes(32)), PeerId(bytes(32)), batch=2, context=12)
        return model, InnerLoop(model, stream, InnerRule(warmup_steps=1))

    model, loop = begun()
    fragments = plan_fragments(sizes(model.module), 2)
    vectors = [vector_N.copy() for vector_N in LocalParameters(model.module, fragments).read_all()]
    tensors = [
        vectors[fragment][start:stop] for fragment, start, stop in WholeEvaluation(model, fragments, corpus).parts[0]
    ]
    evaluation = WholeEvaluation(model.skeleton(), fragments, corpus, live=model.module)
    before = evaluation.take(tensors)
    for _ in range(5):
        loop.step()
    assert evaluation.take(tensors) != before, "the same parameters, other statistics"
    InnerState(tmp_path, {"the optimiser": loop}).save("noon")
    again, restarted = begun()
    assert InnerState(tmp_path, {"the optimiser": restarted}).load() == "noon"
    buffers = dict(model.module.named_buffers())
    assert (
        buffers.keys()
        == saved_buffers(tmp_path).keys()
        == {
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        }
    )
    for kept in (dict(again.module.named_buffers()), saved_buffers(tmp_path)):
        assert all(torch.equal(kept[name], buffer) for name, buffer in buffers.items())
    assert saved_buffers(tmp_path / "nowhere") == {}


class Layers(nn.Module):
    """A model whose outputs also depend on `ahead` later tokens."""

    def __init__(self, ahead: int = 0, *, detached: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)
        self.ahead, self.detached = ahead, detached

    def forward(self, tokens_BT: Tensor) -> Tensor:
        near_BTW = self.table(tokens_BT)
        return near_BTW + near_BTW.roll(-self.ahead, 1)

    def loss(self, windows_BT: Tensor) -> Tensor:
        loss = token_loss(self(windows_BT[:, :-1]), windows_BT)
        return loss.detach() if self.detached else loss


def of_layers(module: Layers, context: int = 12) -> TextModel:
    return TextModel(module=module, loss=lambda _, windows: module.loss(windows), context=context, vocabulary=256)


def test_a_model_that_can_be_trained_passes() -> None:
    module = Layers()
    assert check_text_model(of_layers(module), "mine") == ()
    assert module.training


def test_tensors_that_a_text_does_not_train_are_named() -> None:
    module = Layers()
    module.vision = nn.Linear(3, 2)
    (note,) = check_text_model(of_layers(module), "mine")
    assert note.startswith("the loss of a text does not depend on 2 of 3 tensors, such as vision.weight, so they are")


@pytest.mark.parametrize("context", [4, 12, 500])
def test_a_model_that_looks_ahead_is_refused(context: int) -> None:
    text = "mine looks ahead: its first .* change by up to .* with the tokens after them, so it cannot be trained"
    with pytest.raises(ConfigError, match=text):
        check_text_model(of_layers(Layers(ahead=1), context), "mine")


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the loss of mine is .*; expected one finite number that has a gradient"):
        check_text_model(of_layers(Layers(detached=True)), "mine")
    module = Layers()
    with torch.no_grad():
        module.table.weight[3, 4] = float("nan")
    with pytest.raises(ConfigError, match=r"parameter table.weight of mine is not finite; load other weights"):
        check_text_model(of_layers(module), "mine")
    larger = replace(of_layers(Layers()), vocabulary=300)
    with pytest.raises(ConfigError, match=r"mine fails on a window of model.context 12 with 300 tokens \(index out"):
        check_text_model(larger, "mine")
