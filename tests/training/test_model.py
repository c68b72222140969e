from __future__ import annotations

import dataclasses
import hashlib
import math

import pytest
import torch
from torch import Tensor

from p2p_diloco.app.models.model import DecoderModel, build_model, rotary_tables, rotate
from p2p_diloco.config.decoder import MODEL_SIZES, ModelShape, decoder_tensors, model_shape
from p2p_diloco.errors import ConfigError
from tests.training.awake import awake


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size", "millions"), [("tiny", 1.0), ("small", 10.0), ("base", 125.0)])
def test_built_in_sizes_have_their_nominal_number_of_parameters(size: str, millions: float) -> None:
    assert model_shape(size).num_parameters / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_the_number_of_parameters_is_known_without_building(size: str) -> None:
    model = build_model(MODEL_SIZES[size], seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == MODEL_SIZES[size].num_parameters


def test_an_unknown_size_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown model size 'huge'; expected one of tiny, small, base"):
        model_shape("huge")


@pytest.mark.parametrize("name", ["layers", "width", "heads", "feed_forward", "context", "vocabulary"])
def test_a_size_below_one_is_refused_by_its_name(shape: ModelShape, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model {name} is 0; expected at least 1"):
        dataclasses.replace(shape, **{name: 0})


def test_heads_that_do_not_divide_the_width_into_even_parts_are_refused(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"width 18 does not fit 6 heads; expected a multiple of 12"):
        dataclasses.replace(shape, width=18, heads=6)


def test_the_initial_model_is_the_same_on_every_platform(shape: ModelShape) -> None:
    hasher = hashlib.sha256()
    for parameter in build_model(shape, seed=11).parameters():
        hasher.update(parameter.detach().numpy().astype("<f4").tobytes())
    assert hasher.hexdigest() == "e7790393d86fb82294a65d4adce52eb33ed44cf78395fe5d385cf69e3eab2d59"


def test_another_seed_gives_another_initial_model(shape: ModelShape) -> None:
    assert not torch.equal(build_model(shape, seed=1).embedding, build_model(shape, seed=2).embedding)


def test_building_does_not_change_the_global_generator(shape: ModelShape) -> None:
    before = torch.get_rng_state()
    build_model(shape, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fresh_model_predicts_all_bytes_equally(shape: ModelShape) -> None:
    loss = build_model(shape, seed=0).loss(random_tokens(3, 13))
    assert loss.item() == pytest.approx(math.log(256), abs=1e-5)


def test_no_position_depends_on_the_future(shape: ModelShape) -> None:
    model = awake(build_model(shape, seed=0))
    tokens = random_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    with torch.no_grad():
        first, second = model(tokens), model(changed)
    assert torch.allclose(first[:, :7], second[:, :7], atol=1e-5)
    assert not torch.allclose(first[:, 7:], second[:, 7:], atol=1e-2)


def test_a_shorter_window_gives_the_same_logits(shape: ModelShape) -> None:
    model = awake(build_model(shape, seed=0))
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        assert torch.allclose(model(tokens)[:, :5], model(tokens[:, :5]), atol=1e-5)


def test_a_window_longer_than_the_context_is_a_bug_of_the_caller(shape: ModelShape) -> None:
    with pytest.raises(ValueError, match=r"got 13 positions; expected at most 12"):
        build_model(shape, seed=0)(random_tokens(1, 13))


def test_attention_matches_a_plain_reference(shape: ModelShape) -> None:
    attention = awake(build_model(shape, seed=0)).blocks[0].attention
    stream = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(1))
    cos_TD, sin_TD = rotary_tables(6, 8)
    query, key, value = (stream[0] @ attention.query_key_value.T).split(16, dim=-1)
    expected = torch.zeros(6, 16)
    for head in (slice(0, 8), slice(8, 16)):
        turned_query = rotate(query[:, head], cos_TD, sin_TD)
        turned_key = rotate(key[:, head], cos_TD, sin_TD)
        scores = turned_query @ turned_key.T / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        expected[:, head] = scores.softmax(-1) @ value[:, head]
    with torch.no_grad():
        assert torch.allclose(attention(stream, (cos_TD, sin_TD))[0], expected @ attention.output.T, atol=1e-5)


def test_rotary_products_depend_only_on_the_distance() -> None:
    cos_TD, sin_TD = rotary_tables(20, 8)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    turned_query, turned_key = rotate(query.expand(20, 8), cos_TD, sin_TD), rotate(key.expand(20, 8), cos_TD, sin_TD)
    assert turned_query[5] @ turned_key[2] == pytest.approx(float(turned_query[15] @ turned_key[12]), abs=1e-5)
    assert turned_query[5] @ turned_key[2] != pytest.approx(float(turned_query[5] @ turned_key[4]), abs=1e-2)
    assert torch.allclose(turned_query.norm(dim=-1), query.norm().expand(20), atol=1e-5)


def test_rotary_tables_hold_numbers_even_on_the_meta_device() -> None:
    with torch.device("meta"):
        planned = rotary_tables(20, 8)
    assert all(torch.equal(one, two) for one, two in zip(planned, rotary_tables(20, 8), strict=True))


def test_every_tensor_gets_a_gradient(shape: ModelShape) -> None:
    model = awake(build_model(shape, seed=0))
    model.loss(random_tokens(4, 13)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_the_loss_is_the_mean_cross_entropy_of_the_next_byte(shape: ModelShape) -> None:
    model = awake(build_model(shape, seed=0))
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        logs = model(tokens[:, :-1]).log_softmax(-1)
        expected = -logs.gather(-1, tokens[:, 1:, None]).mean()
        assert model.loss(tokens).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_a_manifest_describes_the_models_tensors_in_their_order(size: str) -> None:
    shape = model_shape(size)
    with torch.device("meta"):
        model = DecoderModel(shape)
    assert list(decoder_tensors(shape).items()) == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
