"""Blocks that recompute their activations: the same gradients, with fewer bytes kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from p2p_diloco.app.models.evaluation import WholeEvaluation
from p2p_diloco.app.models.model import build_model, token_loss
from p2p_diloco.app.models.text_model import TextModel, decoder_text_model
from p2p_diloco.app.text.data import Corpus
from p2p_diloco.app.training.micro_batch import blocks_of, recompute_blocks
from p2p_diloco.config.decoder import MODEL_SIZES, ModelShape
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.parameters import LocalParameters, sizes, trained
from p2p_diloco.outer.fragments import plan_fragments
from tests.training.test_micro_batch import loop_of


class Layer(nn.Module):
    """A layer like those of transformers: named arguments, several results, dropout, and a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, *, hidden: Tensor, scale: float) -> tuple[Tensor, None]:
        self.calls += 1
        for expert in self.experts:
            hidden = hidden + scale * self.dropout(torch.tanh(expert(hidden)))
        return hidden, None


class Layered(nn.Module):
    """A language model of such layers, the first of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, 16)
        self.stack = nn.Module()
        self.stack.layers = nn.ModuleList(Layer() for _ in range(3))
        self.stack.layers[0].requires_grad_(False)
        self.head = nn.Linear(16, 256)

    def loss(self, windows_BT: Tensor) -> Tensor:
        hidden = self.words(windows_BT[:, :-1])
        for layer in self.stack.layers:
            hidden, _ = layer(hidden=hidden, scale=0.5)
        return token_loss(self.head(hidden), windows_BT)


def layered() -> TextModel:
    torch.manual_seed(3)
    return TextModel(module=Layered(), loss=lambda module, windows: module.loss(windows), context=12, vocabulary=256)


def decoder() -> TextModel:
    model = build_model(MODEL_SIZES["tiny"], 0)
    for parameter in model.parameters():  # projections that start at zero would hide most gradients
        parameter.data.add_(0.02)
    return decoder_text_model(model)


MODELS = {"decoder": decoder, "layered": layered}


def windows_of(model: TextModel, count: int = 2) -> Tensor:
    return torch.randint(0, 256, (count, model.context + 1), generator=torch.Generator().manual_seed(7))


def gradients(model: TextModel) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of some windows and its gradients; dropout draws the same each time."""
    torch.manual_seed(11)
    loss = model.loss(model.module, windows_of(model))
    loss.backward()
    found = {name: parameter.grad for name, parameter in trained(model.module).items() if parameter.grad is not None}
    return loss.item(), found


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes that the forward passes inside the block keep for their backward passes."""
    kept: dict[int, int] = {}
    total: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield total
    total.append(sum(kept.values()))


def kept_bytes(model: TextModel) -> int:
    with counted_bytes() as total:
        model.loss(model.module, windows_of(model, 8)).backward()
    return total[0]


@pytest.mark.parametrize("kind", MODELS)
def test_recomputed_activations_give_the_same_loss_and_gradients(kind: str) -> None:
    plain, recomputed = MODELS[kind](), MODELS[kind]()
    assert recompute_blocks(recomputed.module)
    loss, expected = gradients(plain)
    assert gradients(recomputed)[0] == loss
    found = {name: parameter.grad for name, parameter in trained(recomputed.module).items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", MODELS)
def test_names_and_tensors_stay_the_same(kind: str) -> None:
    model = MODELS[kind]().module
    names, state = [name for name, _ in model.named_modules()], model.state_dict(keep_vars=True)
    classes = [type(block) for block in blocks_of(model)]
    recompute_blocks(model)
    recompute_blocks(model)
    assert [name for name, _ in model.named_modules()] == names
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in state.items())
    assert after.keys() == state.keys()
    for block, kind_before in zip(blocks_of(model), classes, strict=True):
        assert isinstance(block, kind_before)
        assert type(block).__name__ == kind_before.__name__
        assert type(block).__mro__[2] is kind_before, "a second call must not wrap it again"


def test_blocks_keep_only_their_inputs() -> None:
    plain, recomputed = decoder(), decoder()
    recompute_blocks(recomputed.module)
    # Of 8 windows of 64 tokens of width 160: an input for each of 3 blocks, and what the head needs.
    assert kept_bytes(recomputed) < 0.4 * kept_bytes(plain)


def test_the_outermost_modules_in_lists_are_blocks() -> None:
    model = layered().module
    assert isinstance(model, Layered)
    assert blocks_of(model) == list(model.stack.layers)
    assert blocks_of(nn.Sequential(nn.Linear(2, 2))) == []
    assert not recompute_blocks(nn.Linear(2, 2))


def test_each_block_runs_twice_in_a_step_and_once_in_an_evaluation(corpus: Corpus) -> None:
    model = layered()
    recompute_blocks(model.module)
    layers: Any = blocks_of(model.module)
    gradients(model)
    assert [layer.calls for layer in layers] == [2, 2, 2]
    with torch.no_grad():
        model.loss(model.module, windows_of(model))
    assert [layer.calls for layer in layers] == [3, 3, 3]


def test_a_copy_without_values_evaluates_the_vectors_that_it_is_given(corpus: Corpus) -> None:
    """A copy of a model must not compute with the blocks of the original."""
    plain, recomputed = layered(), layered()
    recompute_blocks(recomputed.module)
    fragments = plan_fragments(sizes(plain.module), 1)
    vectors = LocalParameters(plain.module, fragments).read_all()
    evaluations = [WholeEvaluation(model, fragments, corpus) for model in (plain, recomputed)]
    for parameter in trained(recomputed.module).values():
        parameter.data.fill_(0.5)
    slices = [[vectors[part.fragment][part.start : part.stop] for part in one.parts[0]] for one in evaluations]
    losses = [one.take(tensors) for one, tensors in zip(evaluations, slices, strict=True)]
    assert losses[0] == losses[1]
    assert blocks_of(copy.deepcopy(recomputed.module))[1] is not blocks_of(recomputed.module)[1]


@pytest.mark.parametrize("kind", MODELS)
def test_always_recomputes_from_the_first_step(corpus: Corpus, kind: str) -> None:
    plain, recomputed = loop_of(corpus, MODELS[kind]()), loop_of(corpus, MODELS[kind](), recompute="always")
    assert (plain.recomputes, recomputed.recomputes) == (False, True)
    kept = []
    for loop in (plain, recomputed):
        torch.manual_seed(5)
        with counted_bytes() as total:
            assert loop.step().applied
        kept += total
    assert kept[1] < 0.8 * kept[0]
    for name, tensor in trained(plain.model).items():
        torch.testing.assert_close(trained(recomputed.model)[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_model_without_blocks_cannot_recompute(corpus: Corpus) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    model = TextModel(module=Flat(), loss=lambda module, windows: windows.sum(), context=12, vocabulary=256)
    with pytest.raises(ConfigError, match=r"no blocks in an nn.ModuleList, .*; leave --recompute out"):
        loop_of(corpus, model, recompute="always")
    assert not loop_of(corpus, model).start_recomputing()


def test_a_model_of_transformers_recomputes(shape: ModelShape) -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "p2p-diloco[hf]" brings it')
    from p2p_diloco.app.models.hugging_face import hugging_face_model

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(hugging_face_model(config.to_json_string(), context=12))
    recompute_blocks(models[1].module)
    (loss, expected), (again, found) = map(gradients, models)
    assert loss == again
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8)
    assert kept_bytes(models[1]) < 0.8 * kept_bytes(models[0])
